//! The client's reader of event streams: the same events however the bytes are cut. The first byte says where.

use crate::bench::sse;

/// The events of all are kept to compare: 7 bytes may make one, a `String` of 24.
pub const FACTOR: usize = 64;

/// Once whole, once in two chunks, once byte by byte.
pub fn read(data: &[u8]) {
    let Some((cut, bytes)) = data.split_first() else { return };
    let whole = events(std::iter::once(bytes));
    let (first, second) = bytes.split_at(usize::from(*cut).min(bytes.len()));
    assert_eq!(whole, events([first, second].into_iter()));
    assert_eq!(whole, events(bytes.chunks(1)));
}

/// Whether all chunks were taken, and the events.
fn events<'a>(mut chunks: impl Iterator<Item = &'a [u8]>) -> (bool, Vec<String>) {
    let (mut reader, mut all) = (sse::Events::default(), Vec::new());
    let ends = chunks.try_for_each(|chunk| reader.push(chunk, |event| all.push(event.to_owned())));
    (ends.is_ok(), all)
}
