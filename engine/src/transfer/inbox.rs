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

/// One frame as it came off the wire: the header and the payload, in as many pieces as the network cut it into.
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

    /// Does the manifest speak of `prompt`, and of exactly what came?
    pub fn verify(&self, prompt: &[u32], manifest: &Manifest) -> Result<(), Failure> {
        if manifest.prompt_hash[..] != prompt_hash(prompt) {
            return Err(broken(
                Reason::PromptMismatch,
                "prefill's manifest speaks of another prompt".to_owned(),
            ));
        }
        if manifest.first_tokens.len() != 1 {
            return Err(broken(
                Reason::Incomplete,
                format!(
                    "manifest holds {} first tokens, expected 1",
                    manifest.first_tokens.len()
                ),
            ));
        }
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
            return Ok(());
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
        Ok(())
    }
}
