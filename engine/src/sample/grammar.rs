//! What a grammar allows next, token by token.
//!
//! A schema is compiled once into the state before its first token; each answer goes on from a copy of it. End tokens are no
//! text: they are allowed exactly where the text so far is complete.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::vocabulary::TokenBytes;
use crate::exec::mask_words;

/// A longer schema is refused unread.
pub const MAX_SCHEMA_BYTES: usize = 256 << 10;
/// A number's remainder is a state of the grammar, and the library explores all of them without its fuel: 9,973 take 0.1 s and 10 MiB,
/// 199,999 take 2.5 s and 150 MiB, and a hundred million run for minutes, whoever has given up waiting.
const MAX_MULTIPLE: u64 = 10_000;
/// Compiled schemas that are kept, the last used ones: the choices of one request, and an application's few schemas.
const KEPT: usize = 16;
/// An id takes 24 bits in the trie.
const MAX_VOCABULARY: usize = 1 << 24;

/// Half of the library's own, to bound an answer's states and the time that a schema compiles.
fn limits() -> ParserLimits {
    ParserLimits {
        max_lexer_states: 50_000,
        max_grammar_size: 250_000,
        initial_lexer_fuel: 500_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// The tokens' bytes, ready for grammars.
pub struct Vocabulary {
    factory: ParserFactory,
    kept: Mutex<VecDeque<Arc<Grammar>>>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Of a model with `vocab_size` tokens; those beyond `tokens` have no text, and neither has an end token.
    ///
    /// # Errors
    /// Says what is wrong with the vocabulary.
    pub fn new(mut tokens: TokenBytes, vocab_size: u32, end_tokens: &[u32]) -> Result<Self, String> {
        let size = vocab_size as usize;
        if tokens.len() > size || size >= MAX_VOCABULARY {
            return Err(format!(
                "its vocabulary has {} tokens, the model {vocab_size}; at most as many and fewer than {MAX_VOCABULARY} are needed",
                tokens.len()
            ));
        }
        tokens.resize(size, Vec::new());
        for end in end_tokens {
            if let Some(token) = tokens.get_mut(*end as usize) {
                token.clear();
            }
        }
        if tokens.iter().all(Vec::is_empty) {
            return Err("no token of its vocabulary stands for text".to_owned());
        }
        // the bit of this one is overwritten in every mask
        let info = TokRxInfo::new(vocab_size, end_tokens.first().copied().unwrap_or_default());
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &tokens)));
        let slices = SlicedBiasComputer::json_slices();
        let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(told)?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self {
            factory,
            kept: Mutex::default(),
        })
    }

    /// One that was compiled before.
    pub fn kept(&self, schema: &str) -> Option<Arc<Grammar>> {
        let mut kept = self.kept.lock();
        let at = kept.iter().position(|g| g.schema == schema)?;
        let grammar = kept.remove(at)?;
        kept.push_front(Arc::clone(&grammar));
        Some(grammar)
    }

    /// Compiles a JSON schema, which takes up to a second.
    ///
    /// # Errors
    /// Says why no answer can be held to it.
    pub fn compile(&self, schema: &str) -> Result<Arc<Grammar>, String> {
        if let Some(kept) = self.kept(schema) {
            return Ok(kept);
        }
        let mut value: Value = serde_json::from_str(schema).map_err(|e| format!("it is no JSON: {e}"))?;
        let multiple = common_multiple(&value);
        if multiple > MAX_MULTIPLE {
            return Err(format!(
                "its multipleOf, or the least common multiple of them, is {multiple} without its decimal point; \
                 at most {MAX_MULTIPLE} is allowed"
            ));
        }
        match &mut value {
            // no endless white space: at most one space after a comma and a colon
            Value::Object(object) => {
                let options = json!({"whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?"});
                object.insert("x-guidance".to_owned(), options);
            }
            Value::Bool(_) => return Err("it is true or false; an object is needed".to_owned()),
            _ => return Err("it is no JSON schema: an object is needed".to_owned()),
        }
        let parser = self
            .factory
            .create_parser(TopLevelGrammar::from_json_schema(value))
            .map_err(told)?;
        let mut start = Matcher::new(Ok(parser));
        // here, off the scheduler's thread, and not at its first token
        start.compute_mask().map_err(told)?;
        let grammar = Arc::new(Grammar {
            schema: schema.to_owned(),
            start: Mutex::new(start),
        });
        let mut kept = self.kept.lock();
        kept.push_front(Arc::clone(&grammar));
        kept.truncate(KEPT);
        Ok(grammar)
    }
}

/// The least common multiple of all digits of `multipleOf` in a schema, without trailing zeros behind the point: any of them may meet
/// through `allOf` and `$ref`.
fn common_multiple(schema: &Value) -> u64 {
    match schema {
        Value::Array(values) => values.iter().map(common_multiple).fold(1, lcm),
        Value::Object(fields) => {
            let own = fields.get("multipleOf").and_then(Value::as_f64).map_or(1, digits);
            fields.values().map(common_multiple).fold(own, lcm)
        }
        _ => 1,
    }
}

/// 0.25 is 25, 100 is 100. In floating point, as the library does it.
fn digits(number: f64) -> u64 {
    let mut number = number.abs();
    while number.fract() != 0.0 && number <= f64::from(u32::MAX) {
        number *= 10.0;
    }
    // saturates; 0 has no remainders
    (number as u64).max(1)
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

/// The library's errors may have several lines and end with a stop.
fn told(error: impl fmt::Display) -> String {
    one_line(&error.to_string())
}

fn one_line(text: &str) -> String {
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((end, _)) = line.char_indices().nth(500) {
        line.truncate(end);
    }
    line.trim_end_matches('.').to_owned()
}

/// A compiled schema, before the first token of an answer.
pub struct Grammar {
    schema: String,
    start: Mutex<Matcher>,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").finish_non_exhaustive()
    }
}

impl PartialEq for Grammar {
    fn eq(&self, other: &Self) -> bool {
        self.schema == other.schema
    }
}

/// Where one answer stands in its grammar.
pub struct GrammarState {
    matcher: Matcher,
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarState").finish_non_exhaustive()
    }
}

impl Grammar {
    /// Before an answer's first token.
    pub fn start(&self) -> GrammarState {
        GrammarState {
            // its own caches: sequences share no lock
            matcher: self.start.lock().deep_clone(),
        }
    }
}

impl GrammarState {
    /// The tokens that may come next; `ends` are those that end the answer.
    ///
    /// # Errors
    /// The grammar is too complex to go on here.
    pub fn allowed(&mut self, ends: &[u32], vocab_size: u32, mask: &mut Vec<u32>) -> Result<(), String> {
        mask.clear();
        if self.matcher.is_error() {
            return Err(one_line(&self.matcher.get_error().unwrap_or_default()));
        }
        let complete = if self.matcher.is_stopped() {
            true
        } else {
            let allowed = self.matcher.compute_mask().map_err(told)?;
            mask.extend_from_slice(allowed.as_slice());
            self.matcher.is_accepting().map_err(told)?
        };
        mask.resize(mask_words(vocab_size as usize), 0);
        for &end in ends.iter().filter(|end| **end < vocab_size) {
            let (word, bit) = (&mut mask[end as usize / 32], 1 << (end % 32));
            *word = if complete { *word | bit } else { *word & !bit };
        }
        Ok(())
    }

    /// The answer has one token more, which is none of its ends.
    ///
    /// # Errors
    /// The grammar does not allow it.
    pub fn accept(&mut self, token: u32) -> Result<(), String> {
        self.matcher.consume_token(token).map_err(told)
    }
}
