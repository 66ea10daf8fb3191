//! Decode's end of the data stream: the same frames, and the same account of them, however the network cuts the bytes. The first byte
//! is the length of the pieces.

use bytes::Bytes;
use tandem_engine::transfer::Chunks;
use tandem_wire::KvLayout;
use tandem_wire::frame::{Coverage, FrameSpan};
use tandem_wire::layout::KvDtype;
use tandem_wire::proto::Frame;

/// Pieces of one byte are held as slices of 32, in a queue that doubles; a frame of 7 bytes is kept in 64.
pub const FACTOR: usize = 160;

/// Once whole, once in pieces; then the frames are booked as a transfer books them.
pub fn read(data: &[u8]) {
    let Some((length, bytes)) = data.split_first() else {
        return;
    };
    let bytes = Bytes::copy_from_slice(bytes);
    let whole = frames([bytes.clone()].into_iter());
    let step = usize::from(*length) + 1;
    let pieces = (0..bytes.len())
        .step_by(step)
        .map(|at| bytes.slice(at..bytes.len().min(at + step)));
    assert_eq!(whole, frames(pieces));
    book(&whole.1);
}

/// How the stream ends (with so many bytes left, or an error), and the frames before that.
fn frames(pieces: impl Iterator<Item = Bytes>) -> (Result<bool, String>, Vec<Frame>) {
    let (mut chunks, mut all) = (Chunks::default(), Vec::new());
    for piece in pieces {
        chunks.push(piece);
        loop {
            match chunks.next_frame() {
                Ok(Some(frame)) => all.push(frame),
                Ok(None) => break,
                Err(status) => return (Err(status.to_string()), all),
            }
        }
    }
    (Ok(chunks.is_empty()), all)
}

/// What is booked and what is missing are always the whole.
fn book(frames: &[Frame]) {
    let layout = KvLayout::heads(2, 1, 16, KvDtype::F16, 16);
    let (from, to) = (3, 40);
    let mut coverage = Coverage::new(&layout, from, to);
    let mut booked = 0;
    for frame in frames {
        let span = FrameSpan {
            layer: frame.layer,
            component: frame.component,
            first_token: frame.first_token,
            tokens: frame.tokens,
        };
        let taken = coverage.add(span).is_ok();
        assert!(
            !taken || span.bytes(&layout).is_some(),
            "{span:?} has no place and was booked"
        );
        booked += u64::from(span.tokens) * u64::from(taken);
        assert_eq!(coverage.missing_tokens() + booked, u64::from(to - from) * 4);
        assert_eq!(coverage.is_complete(), coverage.missing_tokens() == 0);
    }
}
