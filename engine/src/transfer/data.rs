//! The data stream: KV bytes on their own connections, one `Fetch` per attempt.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt as _};
use http_body_util::BodyExt as _;
use tandem_telemetry::{Span, TraceParent};
use tandem_wire::frame::{Digest, FrameSpan, checksum, spans};
use tandem_wire::proto::{FetchRequest, Frame};
use tandem_wire::state::PrefillState;
use tandem_wire::{Failure, Reason, Source};
use tonic::Status;
use tonic::transport::Channel;

use super::body;
use super::chunks::Chunks;
use super::inbox::Arrived;
use super::source::{HandOff, Held, Shared};
use crate::exec::KvRun;
use crate::trace::failed;

/// Frames as they come.
pub type FrameStream = Pin<Box<dyn Stream<Item = Result<Frame, Status>> + Send>>;

/// Payload buffers that are looked at again: as many as a send window of 4 MiB holds, and one more.
const RECYCLED: usize = 17;

/// Decode's end: dials (a failure to do so is the first item) and reads frames, for as long as `span` lasts.
pub fn fetch(channel: Channel, request: FetchRequest, mut span: Span) -> FrameStream {
    let mut frames = read_frames(channel, request, span.parent().clone());
    Box::pin(async_stream::stream! {
        while let Some(frame) = frames.next().await {
            if let Err(status) = &frame {
                failed(&mut span, &Failure::from_status(status, Source::Decode));
            }
            yield frame;
        }
    })
}

fn read_frames(channel: Channel, request: FetchRequest, trace: TraceParent) -> FrameStream {
    Box::pin(async_stream::try_stream! {
        let mut incoming = body::call(channel, &request, &trace).await?;
        let mut chunks = Chunks::default();
        loop {
            while let Some(frame) = chunks.next_frame()? {
                yield frame;
            }
            match incoming.frame().await {
                Some(part) => match part?.into_data() {
                    Ok(data) => chunks.push(data),
                    Err(last) => {
                        body::read_trailers(last)?;
                        if !chunks.is_empty() {
                            Err(Status::data_loss("the data stream ended within a frame"))?;
                        }
                        return;
                    }
                },
                // hyper shows some resets as a clean end
                None => Err(Status::unavailable("the data stream ended without a status"))?,
            }
        }
    })
}

/// A frame message as the inbox takes it.
pub fn arrived(frame: &Frame) -> Arrived<'_> {
    Arrived {
        span: FrameSpan {
            layer: frame.layer,
            component: frame.component,
            first_token: frame.first_token,
            tokens: frame.tokens,
        },
        crc32c: frame.crc32c,
        payload: &frame.payload,
    }
}

/// A reader that goes before it has all is a lost peer.
struct Reading {
    hand_off: Arc<HandOff>,
    sent: u64,
    done: bool,
}

impl Drop for Reading {
    fn drop(&mut self) {
        if !self.done {
            self.hand_off.cell.fail(Failure::new(
                Reason::PeerLost,
                Source::Prefill,
                format!("decode dropped the data stream after {} frames", self.sent),
            ));
        }
    }
}

/// Prefill's end: waits until the KV is there, then reads it frame by frame, at the pace of the receiver. The pages are
/// held for the length of each copy and looked for anew before the next. `trace` lasts as long.
pub fn frames(shared: Arc<Shared>, hand_off: Arc<HandOff>, mut trace: Span) -> FrameStream {
    Box::pin(async_stream::stream! {
        let mut reading = Reading { hand_off: Arc::clone(&hand_off), sent: 0, done: false };
        let cell = &hand_off.cell;
        let mut changed = cell.subscribe();
        while matches!(cell.state(), PrefillState::Queued | PrefillState::Prefilling) {
            if changed.changed().await.is_err() {
                break;
            }
        }
        let layout = &shared.spec.layout;
        let mut digest = Digest::default();
        let mut buffers = Buffers::default();
        let mut rest = spans(layout, hand_off.from, hand_off.to).peekable();
        // a hand-off that finished with its first token has nothing to read
        while rest.peek().is_some() && cell.state() != PrefillState::Finished {
            let Some(span) = rest.next() else { break };
            #[cfg(feature = "faults")]
            tandem_faults::pass_async(tandem_faults::Fault::StallTransfer).await;
            let payload = match read(&shared, &hand_off, span, &mut buffers) {
                Ok(payload) => payload,
                Err(failure) => {
                    failed(&mut trace, &failure);
                    cell.fail(failure.clone());
                    yield Err(failure.to_status());
                    return;
                }
            };
            let crc32c = checksum(&payload);
            digest.add(span, crc32c, payload.len());
            cell.progress();
            shared.metrics.bytes.inc_by(payload.len() as u64);
            shared.metrics.frames.inc();
            reading.sent += 1;
            if rest.peek().is_none() {
                reading.done = true;
                hand_off.sent.send_replace(Some(digest));
            }
            yield Ok(Frame {
                layer: span.layer,
                component: span.component,
                first_token: span.first_token,
                tokens: span.tokens,
                crc32c,
                payload,
            });
        }
        reading.done = true;
        if let Some(failure) = cell.failure() {
            failed(&mut trace, &failure);
            yield Err(failure.to_status());
        }
    })
}

/// Payload buffers of one stream. A fresh one of 256 KiB costs its page faults; one that has left the socket costs nothing.
#[derive(Default)]
struct Buffers(VecDeque<Bytes>);

impl Buffers {
    fn take(&mut self, len: usize) -> BytesMut {
        let oldest = if self.0.len() >= RECYCLED {
            self.0.pop_front()
        } else {
            None
        };
        let mut buffer = oldest.and_then(|b| b.try_into_mut().ok()).unwrap_or_default();
        buffer.resize(len, 0);
        buffer
    }

    fn lend(&mut self, buffer: BytesMut) -> Bytes {
        let payload = buffer.freeze();
        self.0.push_back(payload.clone());
        payload
    }
}

fn read(shared: &Shared, hand_off: &HandOff, span: FrameSpan, buffers: &mut Buffers) -> Result<Bytes, Failure> {
    let Some(Held::Pages(pages, _)) = hand_off.cell.copying() else {
        return Err(hand_off.cell.failure().unwrap_or_else(|| {
            let state = hand_off.cell.state();
            Failure::new(
                Reason::StaleAttempt,
                Source::Prefill,
                format!("the hand-off holds no pages any more, it is in state {state:?}"),
            )
        }));
    };
    let internal = |detail: String| Failure::new(Reason::Internal, Source::Prefill, detail);
    let bytes = span
        .bytes(&shared.spec.layout)
        .ok_or_else(|| internal(format!("{span:?} lies outside of the layout")))?;
    let mut payload = buffers.take(bytes);
    let run = KvRun {
        layer: span.layer,
        component: span.component,
        first_token: span.first_token,
        tokens: span.tokens,
    };
    shared
        .store
        .read(pages.pages(), run, &mut payload)
        .map_err(|e| internal(e.to_string()))?;
    Ok(buffers.lend(payload))
}
