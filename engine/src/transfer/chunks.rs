//! Messages out of bytes as they come off the network, in pieces of any size.

use std::collections::VecDeque;

use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use tandem_wire::frame::FRAME_MAX_BYTES;
use tandem_wire::proto::Frame;
use tonic::Status;

/// Before each message: one byte that is 1 where it is compressed, and its length, big endian.
pub(super) const PREFIX: usize = 5;
/// A frame's fields beside the payload.
const FRAME_HEADER_BYTES: usize = 1024;

/// Bytes as they came off the network, in pieces. What lies within one piece is taken out without a copy.
#[derive(Default)]
pub struct Chunks {
    pieces: VecDeque<Bytes>,
    len: usize,
}

impl Chunks {
    /// Adds what came.
    pub fn push(&mut self, piece: Bytes) {
        self.len += piece.len();
        if !piece.is_empty() {
            self.pieces.push_back(piece);
        }
    }

    /// Nothing is left.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The next frame, once all of it is here.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, Status> {
        self.next_message()
    }

    /// The next message, once all of it is here.
    pub(super) fn next_message<M: prost::Message + Default>(&mut self) -> Result<Option<M>, Status> {
        let mut prefix = [0; PREFIX];
        let mut bytes = self.pieces.iter().flatten();
        for slot in &mut prefix {
            let Some(byte) = bytes.next() else { return Ok(None) };
            *slot = *byte;
        }
        let [compressed, length @ ..] = prefix;
        if compressed != 0 {
            return Err(Status::internal("a message is compressed, which was not offered"));
        }
        let length = u32::from_be_bytes(length) as usize;
        if length > FRAME_MAX_BYTES + FRAME_HEADER_BYTES {
            return Err(Status::out_of_range(format!(
                "a frame of {length} bytes, the bound is {FRAME_MAX_BYTES}"
            )));
        }
        if self.len < PREFIX + length {
            return Ok(None);
        }
        self.advance(PREFIX);
        let before = self.len;
        let message = M::decode(Buf::take(&mut *self, length))
            .map_err(|e| Status::internal(format!("a message of the data stream is malformed: {e}")))?;
        debug_assert_eq!(before - self.len, length);
        Ok(Some(message))
    }
}

impl Buf for Chunks {
    fn remaining(&self) -> usize {
        self.len
    }

    fn chunk(&self) -> &[u8] {
        self.pieces.front().map_or(&[], |piece| &piece[..])
    }

    fn advance(&mut self, mut n: usize) {
        self.len -= n;
        while let Some(first) = self.pieces.front_mut()
            && n > 0
        {
            let step = n.min(first.len());
            first.advance(step);
            n -= step;
            if first.is_empty() {
                self.pieces.pop_front();
            }
        }
    }

    fn copy_to_bytes(&mut self, n: usize) -> Bytes {
        if let Some(first) = self.pieces.front_mut()
            && first.len() >= n
        {
            let taken = first.split_to(n);
            self.len -= n;
            if first.is_empty() {
                self.pieces.pop_front();
            }
            return taken;
        }
        let mut gathered = BytesMut::with_capacity(n);
        gathered.put(Buf::take(&mut *self, n));
        gathered.freeze()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn garbage_is_an_error_or_too_short_but_never_a_panic(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..8), honest in any::<bool>()) {
            let mut chunks = Chunks::default();
            let len: usize = pieces.iter().map(Vec::len).sum();
            if honest {
                // a prefix that promises what follows lets the garbage through to the message's reader
                let mut prefix = BytesMut::new();
                prefix.put_u8(0);
                prefix.put_u32(len as u32);
                chunks.push(prefix.freeze());
            }
            for piece in pieces {
                chunks.push(piece.into());
            }
            while let Ok(Some(_)) = chunks.next_frame() {}
        }
    }

    #[test]
    fn a_length_beyond_the_bound_is_refused_before_it_is_gathered() {
        let mut chunks = Chunks::default();
        chunks.push(Bytes::from_static(&[0, 0xFF, 0, 0, 0]));
        assert_eq!(chunks.next_frame().unwrap_err().code(), tonic::Code::OutOfRange);
        let mut chunks = Chunks::default();
        chunks.push(Bytes::from_static(&[1, 0, 0, 0, 0]));
        assert_eq!(chunks.next_frame().unwrap_err().code(), tonic::Code::Internal);
    }
}
