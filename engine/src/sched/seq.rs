//! One sequence: `(computed, total)` tokens, its pages, and where its events go.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_wire::proto::finished::Cause as WireCause;
use tandem_wire::{Failure, Reason};

use super::chooser::Chooser;
use super::inflight::Stay;
use super::shared::Admitted;
use super::stream::{Finish, Mailbox, PendingPrefill, PendingTokens, PrefillEvent, SeqEvent};
use crate::exec::Logprob;

/// Why a good answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// An end or stop token, which is not among the tokens.
    Stop,
    /// As many tokens as were asked for.
    Length,
}

impl Cause {
    /// The message form.
    pub fn to_wire(self) -> WireCause {
        match self {
            Self::Stop => WireCause::Stop,
            Self::Length => WireCause::Length,
        }
    }

    /// From the message form; `None` for one that is not named.
    pub fn from_wire(cause: WireCause) -> Option<Self> {
        match cause {
            WireCause::Unspecified => None,
            WireCause::Stop => Some(Self::Stop),
            WireCause::Length => Some(Self::Length),
        }
    }
}

/// When an answer ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stops {
    /// Stop tokens beside the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's own end tokens do not stop it.
    pub ignore_eos: bool,
    /// Tokens asked for, at least 1.
    pub max_new_tokens: u32,
}

impl Stops {
    /// The tokens that end the answer wherever they are sampled.
    pub(super) fn ending<'a>(&'a self, end_tokens: &'a [u32]) -> impl Iterator<Item = u32> + 'a {
        let own = if self.ignore_eos { &[] } else { end_tokens };
        self.stop_token_ids.iter().chain(own).copied()
    }

    /// Whether `token`, sampled after `emitted` tokens went out, ends the answer.
    pub fn ends(&self, token: u32, emitted: u32, end_tokens: &[u32]) -> Option<Cause> {
        if self.ending(end_tokens).any(|end| end == token) {
            Some(Cause::Stop)
        } else if emitted + 1 >= self.max_new_tokens {
            Some(Cause::Length)
        } else {
            None
        }
    }
}

/// What a sequence is run for.
#[derive(Debug)]
pub(super) enum Kind {
    /// Tokens to the end; `gather`: in few messages.
    Generate {
        mailbox: Arc<Mailbox<PendingTokens>>,
        gather: bool,
    },
    /// The first token and the prompt's KV.
    Prefill {
        mailbox: Arc<Mailbox<PendingPrefill>>,
        chunks: u32,
    },
}

/// Readers of gathered tokens wake when this many are there.
const GATHER_TOKENS: usize = 256;

#[derive(Debug)]
pub(super) struct Seq {
    pub(super) kind: Kind,
    pub(super) admitted: Admitted,
    /// The prompt, then what was generated.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_len: usize,
    /// Tokens whose KV lies in the pages.
    pub(super) computed: usize,
    /// Tokens that went out.
    pub(super) emitted: u32,
    pub(super) chooser: Chooser,
    pub(super) stops: Stops,
    pub(super) deadline: Option<Instant>,
    pub(super) stay: Option<Arc<Stay>>,
    pub(super) last_step: u64,
    /// Prompt tokens computed here.
    pub(super) prompt_computed: u32,
    pub(super) submitted: Instant,
    pub(super) started: Option<Instant>,
    pub(super) first_token: Option<Instant>,
    /// Of the last token, where it was asked for and nobody was told yet.
    pub(super) logprob: Option<Logprob>,
}

impl Seq {
    pub(super) fn prompt_left(&self) -> u32 {
        self.prompt_len.saturating_sub(self.computed) as u32
    }

    pub(super) fn is_aborted(&self) -> bool {
        match &self.kind {
            Kind::Generate { mailbox, .. } => mailbox.is_aborted(),
            Kind::Prefill { mailbox, .. } => mailbox.is_aborted(),
        }
    }

    /// It has tokens of a step. A prefill is told so only now: the timers that watch its progress run from here.
    pub(super) fn start(&mut self, now: Instant) {
        if self.started.is_none() {
            self.started = Some(now);
            if let Kind::Prefill { mailbox, .. } = &self.kind {
                let cached = self.admitted.pages.cached_tokens();
                mailbox.update(|pending| pending.started(cached));
            }
        }
    }

    /// A prefill that has a place, but had no tokens of a step within `limit`.
    pub(super) fn gives_up(&self, limit: Duration, now: Instant) -> bool {
        matches!(self.kind, Kind::Prefill { .. })
            && self.started.is_none()
            && now.saturating_duration_since(self.submitted) >= limit
    }

    /// `tokens` more have their KV.
    pub(super) fn advance(&mut self, tokens: u32, step: u64) {
        self.prompt_computed += tokens.min(self.prompt_left());
        self.computed += tokens as usize;
        self.last_step = step;
        if let Some(stay) = &self.stay {
            stay.touch();
        }
        if let Kind::Prefill { chunks, .. } = &mut self.kind {
            *chunks += 1;
        }
    }

    /// Takes a sampled token; `Some` if it ends the sequence.
    ///
    /// # Errors
    /// The grammar cannot go on from it.
    pub(super) fn accept(
        &mut self,
        token: u32,
        logprob: Option<Logprob>,
        end_tokens: &[u32],
        now: Instant,
    ) -> Result<Option<Cause>, String> {
        self.first_token.get_or_insert(now);
        self.logprob = logprob;
        let ends = self.stops.ends(token, self.emitted, end_tokens);
        if ends != Some(Cause::Stop) {
            self.chooser.accept(token)?;
        }
        if let Kind::Generate { mailbox, gather } = &self.kind
            && ends != Some(Cause::Stop)
        {
            self.emitted += 1;
            let gather = *gather;
            let logprob = self.logprob.take();
            mailbox.update(|pending| {
                pending.tokens.push(token);
                pending.logprobs.extend(logprob);
                !gather || pending.tokens.len() >= GATHER_TOKENS
            });
        }
        self.tokens.push(token);
        if ends.is_none() && matches!(self.kind, Kind::Generate { .. }) {
            self.chooser.look_ahead()?;
        }
        Ok(ends)
    }

    /// Frees everything, then tells the reader: a capacity that an answer shows as free is free.
    pub(super) fn fail(self, failure: Failure) {
        drop(self.admitted);
        match self.kind {
            Kind::Generate { mailbox, .. } => mailbox.fail(failure),
            Kind::Prefill { mailbox, .. } => mailbox.fail(failure),
        }
    }

    /// The good end. The pages of a prefill go to its reader, who is counted from before its place is free;
    /// everything else is freed before the reader is told.
    pub(super) fn finish(self, cause: Option<Cause>, now: Instant) {
        let started = self.started.unwrap_or(now);
        let first = self.first_token.unwrap_or(now);
        let queue = started.saturating_duration_since(self.submitted);
        let prefill = if self.prompt_computed > 0 {
            first.saturating_duration_since(started)
        } else {
            Duration::ZERO
        };
        let pages = Arc::clone(&self.admitted.pages);
        match self.kind {
            Kind::Generate { mailbox, .. } => {
                let cached_tokens = pages.cached_tokens();
                drop((pages, self.admitted));
                let Some(cause) = cause else { return };
                mailbox.end(SeqEvent::Finished(Finish {
                    cause,
                    completion_tokens: self.emitted,
                    computed_tokens: self.prompt_computed,
                    cached_tokens,
                    queue,
                    prefill,
                    decode: now.saturating_duration_since(first),
                }));
            }
            Kind::Prefill { mailbox, .. } => {
                let hand_off = Arc::new(self.admitted.place.hand_off());
                drop(self.admitted);
                let Some(&first_token) = self.tokens.last() else { return };
                mailbox.end(PrefillEvent::Done {
                    first_token,
                    first_logprob: self.logprob,
                    ends: cause,
                    pages,
                    hand_off,
                    computed_tokens: self.prompt_computed,
                    queue,
                    prefill,
                });
            }
        }
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|d| d <= now)
    }

    pub(super) fn deadline_failure(&self, source: tandem_wire::Source) -> Failure {
        let detail = format!(
            "the request's time is over after {} of {} prompt tokens and {} new tokens",
            self.computed.min(self.prompt_len),
            self.prompt_len,
            self.emitted
        );
        Failure::new(Reason::Deadline, source, detail)
    }
}
