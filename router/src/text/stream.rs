//! The text of one choice of a response, as its tokens arrive.

use std::collections::VecDeque;
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
    /// Which text is whose token's, for those who ask.
    places: Option<Box<Places>>,
}

/// Where tokens stand in the text, so that each goes out with the text that it is part of.
#[derive(Debug, Default)]
struct Places {
    /// Tokens whose text is not all out yet, in order.
    waiting: VecDeque<Place>,
    /// Bytes and characters of the text so far, held back or not.
    bytes: usize,
    characters: usize,
    /// Bytes that are out.
    out: usize,
    /// Reused for each delta: where the tokens begin that go out with it, in characters.
    begins: Vec<usize>,
}

/// One token's text, in bytes of the whole text.
#[derive(Debug, Clone, Copy)]
struct Place {
    begin: usize,
    end: usize,
    begin_characters: usize,
}

impl Places {
    /// The next token gave `text`; `open`: its last character has begun and not ended, so more text will come of it.
    fn token(&mut self, text: &str, open: bool) {
        let begin = self.bytes;
        self.bytes += text.len();
        self.waiting.push_back(Place {
            begin,
            end: self.bytes + usize::from(open),
            begin_characters: self.characters,
        });
        self.characters += text.chars().count();
    }

    /// `out` more bytes went out; `last`: the text ends there. A token that a stop string cuts in two still counts, one that
    /// lies behind the cut is gone with its text.
    fn out(&mut self, out: usize, last: bool) {
        self.out += out;
        self.begins.clear();
        while let Some(place) = self.waiting.front() {
            if place.end > self.out && !(last && place.begin < self.out) {
                break;
            }
            self.begins.push(place.begin_characters);
            self.waiting.pop_front();
        }
        if last {
            self.waiting.clear();
        }
    }
}

/// What a push or the end gave: text that may go to the client, and the stop string that ended the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delta<'a> {
    /// New text; empty while characters or possible stop strings are incomplete.
    pub text: &'a str,
    /// The stop string that was met. From then on the stream gives no more text: cancel the generation.
    pub stopped: Option<&'a str>,
    /// Where the tokens that go with this text begin, in characters of the whole text: for each token in order, once. Empty
    /// unless asked for.
    pub begins: &'a [usize],
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
            places: None,
        })
    }

    /// Tells with each delta which tokens it completes.
    #[must_use]
    pub fn with_places(mut self, tell: bool) -> Self {
        self.places = tell.then(Box::default);
        self
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
            self.characters.clear();
            let hidden = special && self.skip_special && !self.markers.iter().any(|marker| marker.as_bytes() == bytes);
            if !hidden {
                self.joiner.push(bytes, &mut self.characters);
                self.stops.push(&self.characters, &mut self.out);
            }
            if let Some(places) = &mut self.places {
                places.token(&self.characters, self.joiner.waits());
            }
        }
        let stopped = self.stops.stopped().is_some();
        Ok(self.delta(stopped))
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
        self.delta(true)
    }

    fn delta(&mut self, last: bool) -> Delta<'_> {
        let stopped = self.stops.stopped();
        if let Some(places) = &mut self.places {
            places.out(self.out.len(), last);
        }
        Delta {
            text: &self.out,
            stopped,
            begins: self.places.as_ref().map_or(&[], |places| &places.begins),
        }
    }

    /// Ids taken so far, special ones too, up to and with the one that completed a stop string: `completion_tokens`.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}
