//! The bytes of every token id.
//!
//! Tokens are pieces of bytes, not of characters: a character may be spread over several tokens. One flat table
//! of bytes makes decoding a copy per token, and lets [`detok`](super::detok) join the pieces before it looks for
//! characters.

use super::TextError;

/// What each id stands for: its bytes, and whether it is a special (control) token.
#[derive(Debug)]
pub struct Vocabulary {
    bytes: Vec<u8>,
    /// `ends[id]` is where the id's bytes end in `bytes`; they begin where the id before ends.
    ends: Vec<u32>,
    special: Vec<bool>,
    /// Decoding a whole text drops this many leading spaces (sentencepiece-like tokenizers put one before a text).
    leading_spaces: usize,
}

/// Collects a [`Vocabulary`] id by id.
#[derive(Debug, Default)]
pub(super) struct VocabularyBuilder {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    special: Vec<bool>,
}

impl VocabularyBuilder {
    /// Adds the next id.
    pub(super) fn push(&mut self, bytes: &[u8], special: bool) {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len() as u32);
        self.special.push(special);
    }

    pub(super) fn finish(self, leading_spaces: usize) -> Vocabulary {
        Vocabulary {
            bytes: self.bytes,
            ends: self.ends,
            special: self.special,
            leading_spaces,
        }
    }
}

impl Vocabulary {
    /// How many ids there are.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// True when there is no id at all.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of `id`, and whether it is special.
    pub fn token(&self, id: u32) -> Result<(&[u8], bool), TextError> {
        let at = id as usize;
        let Some(&end) = self.ends.get(at) else {
            return Err(TextError::UnknownToken {
                id,
                vocabulary_tokens: self.len(),
            });
        };
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        Ok((&self.bytes[start as usize..end as usize], self.special[at]))
    }

    /// The text of `ids` as a whole; the yardstick for streaming, save for a sentencepiece-like tokenizer's leading space,
    /// which a stream keeps because its text continues a prompt.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            let (token, special) = self.token(id)?;
            if !(special && skip_special) {
                bytes.extend_from_slice(token);
            }
        }
        let spaces = bytes
            .iter()
            .take(self.leading_spaces)
            .take_while(|&&byte| byte == b' ')
            .count();
        Ok(String::from_utf8_lossy(&bytes[spaces..]).into_owned())
    }
}
