//! A piece of an answer: text, and where asked for the tokens that it was made of.

use std::collections::VecDeque;

use tandem_wire::proto::Logprob;

/// A token with its log-probability.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// Which.
    pub id: u32,
    /// Its own and those of the likeliest.
    pub score: Logprob,
    /// Where its text begins, in characters of the whole answer.
    pub begin: usize,
}

/// What comes at once.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Piece {
    /// More text.
    pub text: String,
    /// The tokens whose text is out with it, each once; none unless log-probabilities were asked for.
    pub tokens: Vec<Scored>,
}

impl Piece {
    /// Nothing to be told.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty()
    }

    /// Appends what came later.
    pub fn append(&mut self, mut later: Self) {
        self.text.push_str(&later.text);
        self.tokens.append(&mut later.tokens);
    }
}

/// Tokens with their scores whose text is held back.
#[derive(Debug, Default)]
pub struct Waiting(VecDeque<(u32, Logprob)>);

impl Waiting {
    /// Takes the next; the error says what an engine left out.
    pub fn take(&mut self, ids: &[u32], scores: Vec<Logprob>) -> Result<(), String> {
        if ids.len() != scores.len() {
            return Err(format!(
                "the engine sent {} log-probabilities with {} tokens; router and engine are of different versions",
                scores.len(),
                ids.len()
            ));
        }
        self.0.extend(ids.iter().copied().zip(scores));
        Ok(())
    }

    /// Those whose text goes out now; `begins` has a place for each.
    pub fn leave(&mut self, begins: &[usize]) -> Vec<Scored> {
        let leaving = self.0.drain(..begins.len().min(self.0.len()));
        let with_place = leaving.zip(begins);
        with_place
            .map(|((id, score), &begin)| Scored { id, score, begin })
            .collect()
    }
}
