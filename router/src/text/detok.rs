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

    /// Ends the text: what still waits can never become a character.
    pub fn finish(&mut self, out: &mut String) {
        if std::mem::take(&mut self.pending_bytes) > 0 {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}
