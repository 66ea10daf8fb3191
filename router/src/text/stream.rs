//! The text of one choice of a response, as its tokens arrive.

use std::sync::Arc;

use super::detok::Utf8Joiner;
use super::stop::StopScanner;
use super::{TextError, Vocabulary};

/// Turns a choice's ids into text, token by token, and ends it at the first stop string.
///
/// The deltas joined, with [`finish`](Self::finish)'s, are the whole decode up to the first stop string; how the ids are
/// grouped into calls does not matter.
#[derive(Debug)]
pub struct TextStream {
    vocabulary: Arc<Vocabulary>,
    joiner: Utf8Joiner,
    stops: StopScanner,
    skip_special: bool,
    /// Special tokens that are shown nevertheless.
    markers: &'static [&'static str],
    tokens: usize,
    /// Reused for each delta: characters of the current token, and text that may go out.
    characters: String,
    out: String,
}

/// What a push or the end gave: text that may go to the client, and the stop string that ended the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delta<'a> {
    /// New text; empty while characters or possible stop strings are incomplete.
    pub text: &'a str,
    /// The stop string that was met. From then on the stream gives no more text: cancel the generation.
    pub stopped: Option<&'a str>,
}

impl TextStream {
    pub(super) fn new(vocabulary: Arc<Vocabulary>, stops: &[String]) -> Result<Self, TextError> {
        Ok(Self {
            vocabulary,
            joiner: Utf8Joiner::default(),
            stops: StopScanner::new(stops)?,
            skip_special: true,
            markers: &[],
            tokens: 0,
            characters: String::new(),
            out: String::new(),
        })
    }

    /// Shows special tokens (`<|im_end|>` and the like) as text instead of dropping them.
    #[must_use]
    pub fn with_special_tokens(mut self, show: bool) -> Self {
        self.skip_special = !show;
        self
    }

    /// Shows these special tokens as text: the marks around tool calls, which some models have as special tokens.
    #[must_use]
    pub fn with_markers(mut self, markers: &'static [&'static str]) -> Self {
        self.markers = markers;
        self
    }

    /// Takes the next ids. After a stop string was met, ids are neither decoded nor counted.
    pub fn push(&mut self, ids: &[u32]) -> Result<Delta<'_>, TextError> {
        self.out.clear();
        for &id in ids {
            if self.stops.stopped().is_some() {
                break;
            }
            let (bytes, special) = self.vocabulary.token(id)?;
            self.tokens += 1;
            if special && self.skip_special && !self.markers.iter().any(|marker| marker.as_bytes() == bytes) {
                continue;
            }
            self.characters.clear();
            self.joiner.push(bytes, &mut self.characters);
            self.stops.push(&self.characters, &mut self.out);
        }
        Ok(Delta {
            text: &self.out,
            stopped: self.stops.stopped(),
        })
    }

    /// Ends the text: gives what was held back, as text or as the stop string that it is.
    pub fn finish(&mut self) -> Delta<'_> {
        self.out.clear();
        if self.stops.stopped().is_none() {
            self.characters.clear();
            self.joiner.finish(&mut self.characters);
            self.stops.push(&self.characters, &mut self.out);
            self.stops.finish(&mut self.out);
        }
        Delta {
            text: &self.out,
            stopped: self.stops.stopped(),
        }
    }

    /// Ids taken so far, special ones too, up to and with the one that completed a stop string: `completion_tokens`.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}
