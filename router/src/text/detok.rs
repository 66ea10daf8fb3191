//! Bytes to text, piece by piece, never cutting a character.
//!
//! At most three bytes of a character that is not complete yet wait here. What comes out, joined, is exactly
//! what [`String::from_utf8_lossy`] makes of all bytes at once: a replacement character stands only where no later byte could
//! have made the sequence valid.

/// The bytes of a character that has begun and not ended.
#[derive(Debug, Clone, Default)]
pub struct Utf8Joiner {
    /// A UTF-8 character has at most four bytes, so at most three can wait.
    pending: [u8; 3],
    pending_bytes: usize,
}

impl Utf8Joiner {
    /// Appends to `out` the characters that `bytes` completes.
    pub fn push(&mut self, mut bytes: &[u8], out: &mut String) {
        while self.pending_bytes > 0 {
            let Some((&next, rest)) = bytes.split_first() else {
                return;
            };
            let mut joined = [0; 4];
            joined[..self.pending_bytes].copy_from_slice(&self.pending[..self.pending_bytes]);
            joined[self.pending_bytes] = next;
            match std::str::from_utf8(&joined[..=self.pending_bytes]) {
                Ok(character) => {
                    out.push_str(character);
                    self.pending_bytes = 0;
                    bytes = rest;
                }
                Err(error) if error.error_len().is_none() => {
                    self.pending[self.pending_bytes] = next;
                    self.pending_bytes += 1;
                    bytes = rest;
                }
                // `next` cannot continue what waits: that much is invalid, and `next` begins something new
                Err(_) => {
                    out.push(char::REPLACEMENT_CHARACTER);
                    self.pending_bytes = 0;
                }
            }
        }
        while !bytes.is_empty() {
            let error = match std::str::from_utf8(bytes) {
                Ok(text) => return out.push_str(text),
                Err(error) => error,
            };
            let (valid, rest) = bytes.split_at(error.valid_up_to());
            out.push_str(&String::from_utf8_lossy(valid));
            let Some(invalid) = error.error_len() else {
                self.pending[..rest.len()].copy_from_slice(rest);
                self.pending_bytes = rest.len();
                return;
            };
            out.push(char::REPLACEMENT_CHARACTER);
            bytes = &rest[invalid..];
        }
    }

    /// Has a character begun and not ended?
    pub fn waits(&self) -> bool {
        self.pending_bytes > 0
    }

    /// Ends the text: what still waits can never become a character.
    pub fn finish(&mut self, out: &mut String) {
        if std::mem::take(&mut self.pending_bytes) > 0 {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn joined_pieces_differ_from_the_lossy_decode_of_all(pieces in vec(bytes(), 0..8)) {
            let mut joiner = Utf8Joiner::default();
            let mut text = String::new();
            for piece in &pieces {
                joiner.push(piece, &mut text);
            }
            joiner.finish(&mut text);
            let whole = pieces.concat();
            prop_assert_eq!(text, String::from_utf8_lossy(&whole));
        }
    }

    /// Mostly bytes that begin, continue or break characters of two to four bytes.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let telling = prop::sample::select(vec![
            0x00, b'a', 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc2, 0xdf, 0xe0, 0xe2, 0xed, 0xef, 0xf0, 0xf1,
            0xf4, 0xf5, 0xff,
        ]);
        vec(prop_oneof![4 => telling, 1 => any::<u8>()], 0..6)
    }
}
