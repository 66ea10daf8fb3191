//! How far a request is: written by its choices as they go, read by whoever writes it down, whatever its end is.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tandem_telemetry::TraceParent;

use crate::evidence::{Ledger, Stage, Stay};

/// All choices of one request together.
#[derive(Debug, Default)]
pub struct Progress {
    attempts: AtomicU32,
    prompt: AtomicU32,
    completion: AtomicU32,
    first_token: OnceLock<Duration>,
    trace: TraceParent,
    ledger: Arc<Ledger>,
}

impl Progress {
    /// Of a request whose span is `trace`.
    pub fn of(trace: TraceParent) -> Self {
        Self {
            trace,
            ..Self::default()
        }
    }

    /// The request's span.
    pub fn trace(&self) -> &TraceParent {
        &self.trace
    }

    /// Where it is, and where its time went.
    pub fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// It waits in `stage` for as long as the guard lives.
    pub fn stay(&self, stage: Stage) -> Stay {
        Stay::enter(&self.ledger, stage)
    }

    /// A choice with a prompt of so many tokens begins.
    pub fn begins(&self, prompt_tokens: u32) {
        self.prompt.fetch_add(prompt_tokens, Ordering::Relaxed);
    }

    /// A choice makes its call number `calls`.
    pub fn attempt(&self, calls: u32) {
        self.attempts.fetch_max(calls, Ordering::Relaxed);
    }

    /// A token came, so long after the request's head. The first one counts.
    pub fn token(&self, after: Duration) {
        self.ledger.token(after);
        // one that came earlier stays
        let _ = self.first_token.set(after);
    }

    /// The answer of a choice had `before` tokens and has `now`.
    pub fn tokens(&self, before: u32, now: u32) {
        // wraps where a choice begins anew, and so takes back what counts no more
        self.completion.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
    }

    /// Most calls that a choice made.
    pub fn attempts(&self) -> u32 {
        self.attempts.load(Ordering::Relaxed)
    }

    /// Tokens of the prompts; none: no choice has begun.
    pub fn prompt_tokens(&self) -> Option<u32> {
        Some(self.prompt.load(Ordering::Relaxed)).filter(|tokens| *tokens > 0)
    }

    /// Tokens of the answers so far.
    pub fn completion_tokens(&self) -> u32 {
        self.completion.load(Ordering::Relaxed)
    }

    /// From the request's head to its first token.
    pub fn first_token(&self) -> Option<Duration> {
        self.first_token.get().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_that_begins_anew_leaves_the_tokens_of_others() {
        let progress = Progress::default();
        progress.tokens(0, 3);
        progress.tokens(0, 5);
        progress.tokens(5, 0);
        progress.tokens(0, 2);
        assert_eq!(progress.completion_tokens(), 5);
    }

    #[test]
    fn the_first_token_of_all_choices_is_the_one() {
        let progress = Progress::default();
        assert_eq!(progress.first_token(), None);
        progress.token(Duration::from_millis(3));
        progress.token(Duration::from_millis(7));
        assert_eq!(progress.first_token(), Some(Duration::from_millis(3)));
    }
}
