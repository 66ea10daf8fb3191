//! The receiver of one transfer's frames: each is checked in full before its first byte touches a page.

use std::sync::Arc;

use tandem_wire::frame::{Coverage, Digest, FRAME_MAX_BYTES, FrameSpan, checksum, prompt_hash};
use tandem_wire::proto::Manifest;
use tandem_wire::state::{DecodeEvent, DecodeState, Step};
use tandem_wire::{Failure, KvLayout, Reason, Source};

use super::cell::Cell;
use super::metrics::SideMetrics;
use crate::exec::{KvRun, KvStore};
use crate::kv::SeqPages;

/// What came so far, and where it goes.
pub struct Inbox {
    layout: Arc<KvLayout>,
    store: Arc<dyn KvStore>,
    metrics: Arc<SideMetrics>,
    from: u32,
    to: u32,
    coverage: Coverage,
    digest: Digest,
}

/// One frame as it came off the wire.
#[derive(Debug, Clone, Copy)]
pub struct Arrived<'a> {
    /// Where it belongs.
    pub span: FrameSpan,
    /// Checksum that the sender computed.
    pub crc32c: u32,
    /// The bytes.
    pub payload: &'a [u8],
}

fn broken(reason: Reason, detail: String) -> Failure {
    Failure::new(reason, Source::Transfer, detail)
}

impl Inbox {
    /// Expects the KV of tokens `from..to`.
    pub fn new(layout: Arc<KvLayout>, store: Arc<dyn KvStore>, metrics: Arc<SideMetrics>, from: u32, to: u32) -> Self {
        let coverage = Coverage::new(&layout, from, to);
        Self {
            layout,
            store,
            metrics,
            from,
            to,
            coverage,
            digest: Digest::default(),
        }
    }

    /// Takes a frame in: state, place, size and checksum first, then the copy. `Ok(false)`: it came after the transfer's end
    /// and touched nothing.
    pub fn accept(&mut self, cell: &Cell<DecodeState, Arc<SeqPages>>, frame: Arrived<'_>) -> Result<bool, Failure> {
        let Arrived { span, crc32c, payload } = frame;
        if let Step::Illegal(state) = cell.on(DecodeEvent::Frame) {
            return Err(broken(
                Reason::Internal,
                format!("frame {span:?} in state {state:?}, before the handshake"),
            ));
        }
        // held until the copy is done: whoever ends the transfer meanwhile frees the pages only after that
        let Some(pages) = cell.copying() else {
            self.metrics.late_frames.inc();
            return Ok(false);
        };
        self.coverage
            .check(span)
            .map_err(|e| broken(Reason::Incomplete, format!("{e} ({}..{})", self.from, self.to)))?;
        let expected = span.bytes(&self.layout);
        if expected != Some(payload.len()) || payload.len() > FRAME_MAX_BYTES {
            return Err(broken(
                Reason::Incomplete,
                format!(
                    "frame {span:?} holds {} bytes, its span has {}, the bound is {FRAME_MAX_BYTES}",
                    payload.len(),
                    expected.unwrap_or_default()
                ),
            ));
        }
        let computed = checksum(payload);
        if computed != crc32c {
            return Err(broken(
                Reason::Checksum,
                format!("frame {span:?}: crc32c {computed:08x} of what came, {crc32c:08x} of what was sent"),
            ));
        }
        let run = KvRun {
            layer: span.layer,
            component: span.component,
            first_token: span.first_token,
            tokens: span.tokens,
        };
        self.store
            .write(pages.pages(), run, payload)
            .map_err(|e| broken(Reason::Internal, e.to_string()))?;
        drop(pages);
        self.coverage
            .add(span)
            .map_err(|e| broken(Reason::Incomplete, e.to_string()))?;
        self.digest.add(span, crc32c, payload.len());
        self.metrics.bytes.inc_by(payload.len() as u64);
        self.metrics.frames.inc();
        cell.progress();
        Ok(true)
    }

    /// Everything that was asked for is here.
    pub fn is_complete(&self) -> bool {
        self.coverage.is_complete()
    }

    /// What is missing, for people.
    pub fn missing(&self) -> String {
        format!(
            "{} token rows of tokens {}..{} missing after {} frames, {} bytes",
            self.coverage.missing_tokens(),
            self.from,
            self.to,
            self.digest.frames(),
            self.digest.bytes()
        )
    }

    /// Payload bytes taken in.
    pub fn bytes(&self) -> u64 {
        self.digest.bytes()
    }

    /// Does the manifest speak of `prompt`, and of exactly what came? Returns the token that it says follows.
    pub fn verify(&self, prompt: &[u32], manifest: &Manifest) -> Result<u32, Failure> {
        if manifest.prompt_hash[..] != prompt_hash(prompt) {
            return Err(broken(
                Reason::PromptMismatch,
                "prefill's manifest speaks of another prompt".to_owned(),
            ));
        }
        let [first_token] = manifest.first_tokens[..] else {
            return Err(broken(
                Reason::Incomplete,
                format!(
                    "manifest holds {} first tokens, expected 1",
                    manifest.first_tokens.len()
                ),
            ));
        };
        if (manifest.from_token, manifest.to_token) != (self.from, self.to) {
            return Err(broken(
                Reason::Incomplete,
                format!(
                    "manifest speaks of tokens {}..{}, asked were {}..{}",
                    manifest.from_token, manifest.to_token, self.from, self.to
                ),
            ));
        }
        if manifest.finished {
            // no KV is needed any more, and none came
            return Ok(first_token);
        }
        if !self.is_complete() {
            return Err(broken(Reason::Incomplete, self.missing()));
        }
        let sent = (manifest.frames, manifest.payload_bytes);
        let came = (self.digest.frames(), self.digest.bytes());
        if sent != came {
            return Err(broken(
                Reason::Incomplete,
                format!(
                    "{} frames, {} bytes came, the manifest has {} and {}",
                    came.0, came.1, sent.0, sent.1
                ),
            ));
        }
        if manifest.digest != self.digest.value() {
            return Err(broken(
                Reason::Checksum,
                format!(
                    "digest {:016x} of what came, {:016x} of what was sent",
                    self.digest.value(),
                    manifest.digest
                ),
            ));
        }
        Ok(first_token)
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use tandem_telemetry::Metrics;
    use tandem_wire::frame::spans;
    use tandem_wire::layout::KvDtype;

    use super::super::metrics::TransferMetrics;
    use super::*;
    use crate::exec::{KvError, PageId};
    use crate::kv::KvCache;

    /// Remembers what was written.
    #[derive(Default)]
    struct Store(Mutex<Vec<KvRun>>);

    impl KvStore for Store {
        fn read(&self, _: &[PageId], run: KvRun, _: &mut [u8]) -> Result<(), KvError> {
            Err(KvError {
                run,
                why: "not read here".to_owned(),
            })
        }
        fn write(&self, _: &[PageId], run: KvRun, _: &[u8]) -> Result<(), KvError> {
            self.0.lock().push(run);
            Ok(())
        }
    }

    struct Rig {
        cache: Arc<KvCache>,
        store: Arc<Store>,
        metrics: TransferMetrics,
        cell: Cell<DecodeState, Arc<SeqPages>>,
        inbox: Inbox,
        frames: Vec<(FrameSpan, Vec<u8>)>,
    }

    fn rig() -> Rig {
        let layout = Arc::new(KvLayout::heads(2, 2, 8, KvDtype::F16, 8));
        let cache = KvCache::new(8, 8, true);
        let pages = Arc::new(cache.reserve(&[7; 20], 0, 20).unwrap());
        let store = Arc::new(Store::default());
        let metrics = TransferMetrics::register(&Metrics::new("test", "0"));
        let frames = spans(&layout, 0, 20)
            .map(|span| (span, vec![5; span.bytes(&layout).unwrap()]))
            .collect();
        let kv: Arc<dyn KvStore> = Arc::clone(&store) as _;
        Rig {
            cache,
            cell: Cell::new(
                DecodeState::Reserved,
                false,
                Some(pages),
                None,
                Arc::clone(&metrics.decode),
            ),
            inbox: Inbox::new(layout, kv, Arc::clone(&metrics.decode), 0, 20),
            store,
            metrics,
            frames,
        }
    }

    impl Rig {
        fn accept(&mut self, frame: usize) -> Result<bool, Failure> {
            let (span, payload) = &self.frames[frame];
            let arrived = Arrived {
                span: *span,
                crc32c: checksum(payload),
                payload,
            };
            self.inbox.accept(&self.cell, arrived)
        }
        fn written(&self) -> usize {
            self.store.0.lock().len()
        }
    }

    #[test]
    fn a_frame_after_the_end_touches_no_memory() {
        let mut rig = rig();
        rig.cell.on(DecodeEvent::Accepted);
        assert_eq!(rig.accept(0), Ok(true));
        assert_eq!(rig.written(), 1);
        assert!(rig.cell.abort(broken(Reason::AbortedByClient, "gone".to_owned())));
        // the pages are somebody else's now
        let next = rig.cache.reserve(&[8; 64], 0, 64).unwrap();
        assert_eq!(rig.accept(1), Ok(false));
        assert_eq!(rig.written(), 1, "a late frame was written");
        assert_eq!(rig.metrics.decode.late_frames.get(), 1);
        drop(next);
    }

    #[test]
    fn a_frame_before_the_handshake_touches_no_memory() {
        let mut rig = rig();
        assert_eq!(rig.accept(0).unwrap_err().reason, Reason::Internal);
        assert_eq!(rig.written(), 0);
    }

    #[test]
    fn a_frame_that_is_wrong_in_any_way_touches_no_memory() {
        let mut rig = rig();
        rig.cell.on(DecodeEvent::Accepted);
        let (span, payload) = rig.frames[0].clone();
        let crc32c = checksum(&payload);
        let wrong = [
            (FrameSpan { layer: 2, ..span }, crc32c, &payload[..]),
            (FrameSpan { component: 9, ..span }, crc32c, &payload),
            (FrameSpan { first_token: 1, ..span }, crc32c, &payload),
            (FrameSpan { tokens: 19, ..span }, crc32c, &payload),
            (span, crc32c ^ 1, &payload),
            (span, crc32c, &payload[1..]),
        ];
        for (span, crc32c, payload) in wrong {
            let arrived = Arrived { span, crc32c, payload };
            assert!(rig.inbox.accept(&rig.cell, arrived).is_err(), "{span:?}");
        }
        assert_eq!(rig.written(), 0);
        for frame in 0..rig.frames.len() {
            assert!(!rig.inbox.is_complete());
            assert_eq!(rig.accept(frame), Ok(true));
            assert_eq!(rig.accept(frame).unwrap_err().reason, Reason::Incomplete, "twice");
        }
        assert!(rig.inbox.is_complete());
        assert_eq!(rig.written(), rig.frames.len());
    }
}
