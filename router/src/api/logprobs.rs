//! Log-probabilities as OpenAI's two APIs write them.

use std::borrow::Cow;

use serde::{Serialize, Serializer};

use crate::flow::Scored;
use crate::metrics::Endpoint;
use crate::text::Vocabulary;

/// What stands for minus infinity, which JSON cannot say; OpenAI's own.
const LEAST: f32 = -9999.0;

/// `logprobs` of a choice or of a chunk.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum Logprobs<'a> {
    /// Of a chat.
    Chat {
        /// In order.
        content: Vec<Token<'a>>,
        /// Never.
        refusal: (),
    },
    /// Of a completion.
    Completion {
        /// In order.
        tokens: Vec<Cow<'a, str>>,
        /// Of each.
        token_logprobs: Vec<f32>,
        /// Of each, the likeliest with its own.
        top_logprobs: Vec<Likeliest<'a>>,
        /// Where each begins, in characters.
        text_offset: Vec<usize>,
    },
}

/// A token of a chat.
#[derive(Debug, Serialize)]
pub struct Token<'a> {
    #[serde(flatten)]
    own: One<'a>,
    top_logprobs: Vec<One<'a>>,
}

#[derive(Debug, Serialize)]
struct One<'a> {
    token: Cow<'a, str>,
    logprob: f32,
    bytes: &'a [u8],
}

/// Tokens by their text, the likeliest first.
#[derive(Debug)]
pub struct Likeliest<'a>(Vec<(Cow<'a, str>, f32)>);

impl Serialize for Likeliest<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

impl<'a> Logprobs<'a> {
    /// Of these tokens.
    pub fn new(endpoint: Endpoint, tokens: &[Scored], vocabulary: &'a Vocabulary) -> Self {
        if endpoint == Endpoint::Chat {
            let content = tokens.iter().map(|scored| Token::new(scored, vocabulary)).collect();
            return Self::Chat { content, refusal: () };
        }
        Self::Completion {
            tokens: tokens.iter().map(|scored| name(bytes(scored.id, vocabulary))).collect(),
            token_logprobs: tokens.iter().map(|scored| scored.score.logprob.max(LEAST)).collect(),
            top_logprobs: tokens.iter().map(|scored| Likeliest::new(scored, vocabulary)).collect(),
            text_offset: tokens.iter().map(|scored| scored.begin).collect(),
        }
    }

    /// As JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// The ids of the likeliest tokens with their log-probabilities.
fn likeliest(scored: &Scored) -> impl Iterator<Item = (u32, f32)> {
    let score = &scored.score;
    score.top_ids.iter().copied().zip(score.top_logprobs.iter().copied())
}

impl<'a> Token<'a> {
    fn new(scored: &Scored, vocabulary: &'a Vocabulary) -> Self {
        let one = |(id, logprob): (u32, f32)| {
            let bytes = bytes(id, vocabulary);
            One {
                token: String::from_utf8_lossy(bytes),
                logprob: logprob.max(LEAST),
                bytes,
            }
        };
        Self {
            own: one((scored.id, scored.score.logprob)),
            top_logprobs: likeliest(scored).map(one).collect(),
        }
    }
}

impl<'a> Likeliest<'a> {
    /// The likeliest, and the token itself where it is none of them.
    fn new(scored: &Scored, vocabulary: &'a Vocabulary) -> Self {
        let own = (scored.id, scored.score.logprob);
        let mut named: Vec<(Cow<'a, str>, f32)> = Vec::with_capacity(scored.score.top_ids.len() + 1);
        for (id, logprob) in likeliest(scored).chain([own]) {
            let name = name(bytes(id, vocabulary));
            // two ids may have one text, but an object has a key once
            if named.iter().all(|(other, _)| *other != name) {
                named.push((name, logprob.max(LEAST)));
            }
        }
        Self(named)
    }
}

/// An engine may know ids that are padding, and have no text.
fn bytes(id: u32, vocabulary: &Vocabulary) -> &[u8] {
    vocabulary.token(id).map_or(&[], |(bytes, _)| bytes)
}

/// The text of a token, or, of one that is a part of a character, its bytes as OpenAI writes them.
fn name(bytes: &[u8]) -> Cow<'_, str> {
    use std::fmt::Write;
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => bytes
            .iter()
            .fold("bytes:".to_owned(), |mut name, byte| {
                // writing into a String cannot fail
                let _ = write!(name, "\\x{byte:02x}");
                name
            })
            .into(),
    }
}
