//! What a request's owner sees. Events gather in a mailbox until they are read: the scheduler never waits for a reader, and
//! what gathers is bounded by the request itself (its tokens) or replaced by the newest (progress).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::Duration;

use parking_lot::Mutex;
use tandem_wire::{Failure, Reason, Source};
use tokio::sync::{Notify, watch};

use super::load::Health;
use super::seq::Cause;
use super::shared::TransferGuard;
use crate::exec::Logprob;
use crate::kv::SeqPages;

/// How a good answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finish {
    /// Why it ended.
    pub cause: Cause,
    /// Tokens generated and emitted.
    pub completion_tokens: u32,
    /// Prompt tokens that this engine computed.
    pub computed_tokens: u32,
    /// Prompt tokens that lay in this engine's prefix cache.
    pub cached_tokens: u32,
    /// From submission to the first step.
    pub queue: Duration,
    /// From the first step to the first token; zero if the prompt was complete.
    pub prefill: Duration,
    /// From the first token to the end.
    pub decode: Duration,
}

/// What happens to a generation.
#[derive(Debug, Clone, PartialEq)]
pub enum SeqEvent {
    /// Tokens since the last event, in order; at least one.
    Tokens {
        /// The tokens.
        ids: Vec<u32>,
        /// One for each of them where they were asked for.
        logprobs: Vec<Logprob>,
    },
    /// Terminal.
    Finished(Finish),
    /// Terminal.
    Failed(Failure),
}

/// What happens to a prefill.
#[derive(Debug, Clone)]
pub enum PrefillEvent {
    /// It waits for a place, or for tokens of a step.
    Queued {
        /// Prefills before it.
        ahead: u32,
    },
    /// It has pages, a place, and tokens of the step that begins.
    Started {
        /// Prompt tokens found in the prefix cache.
        cached_tokens: u32,
    },
    /// The newest progress.
    Progress {
        /// Prompt tokens whose KV is complete, cached ones included.
        computed_tokens: u32,
        /// Layers done of the chunk that follows `computed_tokens`.
        layer: u32,
        /// Chunks done.
        chunk: u32,
    },
    /// Terminal: the whole prompt's KV lies in `pages`.
    Done {
        /// Sampled after the prompt.
        first_token: u32,
        /// Of the first token, where it was asked for.
        first_logprob: Option<Logprob>,
        /// The first token ends the request.
        ends: Option<Cause>,
        /// Hold them as long as somebody copies.
        pages: Arc<SeqPages>,
        /// Hold it until decode has, or needs, nothing more.
        hand_off: Arc<TransferGuard>,
        /// Prompt tokens computed here.
        computed_tokens: u32,
        /// From submission to the first step.
        queue: Duration,
        /// From the first step to the first token.
        prefill: Duration,
    },
    /// Terminal.
    Failed(Failure),
}

/// Events not yet read.
pub(super) trait Pending: Default + Send + fmt::Debug {
    type Event: Send + fmt::Debug;
    fn take(&mut self) -> Option<Self::Event>;
    fn failed(failure: Failure) -> Self::Event;
}

#[derive(Debug)]
struct Inner<P: Pending> {
    pending: P,
    terminal: Option<P::Event>,
    ended: bool,
}

/// Where the scheduler leaves events and the reader takes them.
#[derive(Debug)]
pub(super) struct Mailbox<P: Pending> {
    inner: Mutex<Inner<P>>,
    notify: Notify,
    aborted: AtomicBool,
}

impl<P: Pending> Mailbox<P> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::new(Inner {
                pending: P::default(),
                terminal: None,
                ended: false,
            }),
            notify: Notify::new(),
            aborted: AtomicBool::new(false),
        })
    }

    /// The reader is gone.
    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// Adds to what is pending; `add` says whether the reader should wake.
    pub(super) fn update(&self, add: impl FnOnce(&mut P) -> bool) {
        let mut inner = self.inner.lock();
        let wake = !inner.ended && add(&mut inner.pending);
        drop(inner);
        if wake {
            self.notify.notify_one();
        }
    }

    /// The terminal; the first one stays.
    pub(super) fn end(&self, event: P::Event) {
        let mut inner = self.inner.lock();
        if !inner.ended {
            inner.ended = true;
            inner.terminal = Some(event);
        }
        drop(inner);
        self.notify.notify_one();
    }

    /// Nobody wants it any more. A result that nobody read may hold pages, so it goes as well.
    fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        let mut inner = self.inner.lock();
        inner.ended = true;
        let unread = inner.terminal.take();
        drop(inner);
        drop(unread);
        self.notify.notify_one();
    }

    pub(super) fn fail(&self, failure: Failure) {
        self.end(P::failed(failure));
    }
}

/// The reader's end; dropping it aborts.
#[derive(Debug)]
pub(super) struct Reader<P: Pending> {
    mailbox: Arc<Mailbox<P>>,
    scheduler: Thread,
    health: watch::Receiver<Health>,
    source: Source,
}

impl<P: Pending> Reader<P> {
    pub(super) fn new(
        mailbox: Arc<Mailbox<P>>,
        scheduler: Thread,
        health: watch::Receiver<Health>,
        source: Source,
    ) -> Self {
        Self {
            mailbox,
            scheduler,
            health,
            source,
        }
    }

    /// The next event; `None` after the terminal. Loses nothing when dropped half-way.
    async fn recv(&mut self) -> Option<P::Event> {
        loop {
            {
                let mut inner = self.mailbox.inner.lock();
                if let Some(event) = inner.pending.take() {
                    return Some(event);
                }
                if let Some(event) = inner.terminal.take() {
                    return Some(event);
                }
                if inner.ended {
                    return None;
                }
            }
            tokio::select! {
                biased;
                () = self.mailbox.notify.notified() => {}
                died = died(&mut self.health) => {
                    // a scheduler that ends tells its requests; one that hangs cannot
                    self.mailbox.fail(Failure::new(Reason::Internal, self.source, died));
                }
            }
        }
    }
}

async fn died(health: &mut watch::Receiver<Health>) -> String {
    match health
        .wait_for(|h| matches!(h, Health::Dead(_)))
        .await
        .map(|h| h.clone())
    {
        Ok(Health::Dead(why)) => why.to_string(),
        Ok(Health::Alive) | Err(_) => "the scheduler is gone".to_owned(),
    }
}

impl<P: Pending> Drop for Reader<P> {
    fn drop(&mut self) {
        self.mailbox.abort();
        self.scheduler.unpark();
    }
}

#[derive(Debug, Default)]
pub(super) struct PendingTokens {
    pub(super) tokens: Vec<u32>,
    pub(super) logprobs: Vec<Logprob>,
}

impl Pending for PendingTokens {
    type Event = SeqEvent;
    fn take(&mut self) -> Option<SeqEvent> {
        (!self.tokens.is_empty()).then(|| SeqEvent::Tokens {
            ids: std::mem::take(&mut self.tokens),
            logprobs: std::mem::take(&mut self.logprobs),
        })
    }
    fn failed(failure: Failure) -> SeqEvent {
        SeqEvent::Failed(failure)
    }
}

#[derive(Debug, Default)]
pub(super) struct PendingPrefill {
    ahead: Option<u32>,
    queued: Option<u32>,
    started: Option<u32>,
    progress: Option<(u32, u32, u32)>,
}

impl PendingPrefill {
    pub(super) fn queued(&mut self, ahead: u32) -> bool {
        let changed = self.ahead != Some(ahead);
        self.ahead = Some(ahead);
        if changed {
            self.queued = Some(ahead);
        }
        changed
    }
    pub(super) fn started(&mut self, cached_tokens: u32) -> bool {
        self.queued = None;
        self.started = Some(cached_tokens);
        true
    }
    pub(super) fn progress(&mut self, computed_tokens: u32, layer: u32, chunk: u32) -> bool {
        self.progress = Some((computed_tokens, layer, chunk));
        true
    }
}

impl Pending for PendingPrefill {
    type Event = PrefillEvent;
    fn take(&mut self) -> Option<PrefillEvent> {
        if let Some(ahead) = self.queued.take() {
            return Some(PrefillEvent::Queued { ahead });
        }
        if let Some(cached_tokens) = self.started.take() {
            return Some(PrefillEvent::Started { cached_tokens });
        }
        let (computed_tokens, layer, chunk) = self.progress.take()?;
        Some(PrefillEvent::Progress {
            computed_tokens,
            layer,
            chunk,
        })
    }
    fn failed(failure: Failure) -> PrefillEvent {
        PrefillEvent::Failed(failure)
    }
}

/// A generation under way. Dropping it aborts: everything it holds is free by the end of the current step.
#[derive(Debug)]
pub struct SeqStream(pub(super) Reader<PendingTokens>);

impl SeqStream {
    /// The next event; `None` after the terminal one.
    pub async fn recv(&mut self) -> Option<SeqEvent> {
        self.0.recv().await
    }
}

/// A prefill under way. Dropping it aborts: everything it holds is free by the end of the current step.
#[derive(Debug)]
pub struct PrefillStream(pub(super) Reader<PendingPrefill>);

impl PrefillStream {
    /// The next event; `None` after the terminal one. Queue places and progress are the newest ones.
    pub async fn recv(&mut self) -> Option<PrefillEvent> {
        self.0.recv().await
    }

    /// Lets somebody else abort it too, from any thread, also while this reader's runtime stands still.
    pub fn aborter(&self) -> PrefillAbort {
        PrefillAbort {
            mailbox: Arc::clone(&self.0.mailbox),
            scheduler: self.0.scheduler.clone(),
        }
    }
}

/// Aborts a prefill when dropped; one whose result was read already is left alone.
#[derive(Debug)]
pub struct PrefillAbort {
    mailbox: Arc<Mailbox<PendingPrefill>>,
    scheduler: Thread,
}

impl Drop for PrefillAbort {
    fn drop(&mut self) {
        self.mailbox.abort();
        self.scheduler.unpark();
    }
}
