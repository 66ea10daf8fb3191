//! What the handles and the loop share, and how a place among the running sequences is held.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tandem_wire::{Failure, Reason};
use tokio::sync::watch;

use super::Role;
use super::chooser::Chooser;
use super::inflight::{Inflight, Stay};
use super::knobs::SchedKnobs;
use super::load::{Health, LoadSnapshot};
use super::metrics::SchedMetrics;
use super::scheduler::Admission;
use super::seq::{Seq, Stops};
use super::stream::{Mailbox, PendingPrefill};
use crate::exec::{Executor, KvStore, ModelSpec};
use crate::kv::{KvCache, NoPages, PageStats, SeqPages};

/// A prefill that waits for a place.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) mailbox: Arc<Mailbox<PendingPrefill>>,
    pub(super) prompt: Arc<[u32]>,
    pub(super) chooser: Chooser,
    pub(super) stops: Stops,
    pub(super) deadline: Option<Instant>,
    pub(super) stay: Option<Arc<Stay>>,
    pub(super) submitted: Instant,
}

#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) arrivals: Vec<Seq>,
    pub(super) prefills: Vec<Waiting>,
    /// Nobody will read it again.
    pub(super) closed: bool,
}

/// What the handles and the loop share.
pub(super) struct Shared {
    pub(super) spec: ModelSpec,
    pub(super) role: Role,
    pub(super) store: Arc<dyn KvStore>,
    pub(super) cache: Arc<KvCache>,
    pub(super) metrics: SchedMetrics,
    pub(super) inflight: Arc<Inflight>,
    pub(super) inbox: Mutex<Inbox>,
    pub(super) stop: AtomicBool,
    pub(super) knobs: Mutex<SchedKnobs>,
    pub(super) places: AtomicU32,
    pub(super) transferring: AtomicU32,
    pub(super) handing_out: AtomicU32,
    pub(super) draining: AtomicBool,
    /// Prefills that wait for a place, and their prompt tokens.
    pub(super) waiting: AtomicU32,
    pub(super) waiting_tokens: AtomicU64,
    /// Prompt tokens not yet computed of running sequences; written by the loop.
    pub(super) running_prompt_tokens: AtomicU64,
    born: Instant,
    /// Microseconds since `born` of the last end of a step, or of the last look at an empty batch.
    last_step: AtomicU64,
    /// Counts the layers that were done; 0: no step runs.
    in_step: AtomicU64,
    beats: AtomicU64,
    pub(super) load: watch::Sender<LoadSnapshot>,
    pub(super) health: watch::Sender<Health>,
    pub(super) thread: OnceLock<Thread>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler")
            .field("role", &self.role)
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn new(executor: &dyn Executor, role: Role, knobs: SchedKnobs) -> Self {
        let mut spec = executor.spec().clone();
        let pool_tokens = u64::from(spec.total_pages) * u64::from(spec.page_tokens);
        spec.max_length_tokens = spec.max_length_tokens.min(pool_tokens.min(u64::from(u32::MAX)) as u32);
        let cache = KvCache::new(spec.total_pages, spec.page_tokens, knobs.prefix_cache);
        let born = Instant::now();
        let load = LoadSnapshot {
            running: 0,
            waiting: 0,
            transferring: 0,
            free_pages: spec.total_pages,
            total_pages: spec.total_pages,
            max_running: knobs.max_running,
            draining: false,
            waiting_tokens: 0,
            last_step: born,
        };
        Self {
            role,
            store: executor.kv(),
            cache,
            metrics: SchedMetrics::default(),
            inflight: Arc::default(),
            inbox: Mutex::default(),
            stop: AtomicBool::new(false),
            knobs: Mutex::new(knobs),
            places: AtomicU32::new(0),
            transferring: AtomicU32::new(0),
            handing_out: AtomicU32::new(0),
            draining: AtomicBool::new(false),
            waiting: AtomicU32::new(0),
            waiting_tokens: AtomicU64::new(0),
            running_prompt_tokens: AtomicU64::new(0),
            born,
            last_step: AtomicU64::new(0),
            in_step: AtomicU64::new(0),
            beats: AtomicU64::new(0),
            load: watch::Sender::new(load),
            health: watch::Sender::new(Health::Alive),
            thread: OnceLock::new(),
            spec,
        }
    }

    pub(super) fn knobs(&self) -> SchedKnobs {
        *self.knobs.lock()
    }

    pub(super) fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    fn since_born(&self) -> u64 {
        self.born.elapsed().as_micros() as u64
    }

    /// A layer of the running step is done.
    pub(super) fn beat(&self) {
        let beat = self.beats.fetch_add(1, Ordering::Relaxed) + 1;
        self.in_step.store(beat, Ordering::Release);
        self.inflight.progressed();
    }

    /// The last one, while a step runs.
    pub(super) fn beat_now(&self) -> Option<u64> {
        match self.in_step.load(Ordering::Acquire) {
            0 => None,
            beat => Some(beat),
        }
    }

    /// Since the last step's end, or the last look at an empty batch.
    pub(super) fn step_age(&self) -> Duration {
        let last = Duration::from_micros(self.last_step.load(Ordering::Acquire));
        self.born.elapsed().saturating_sub(last)
    }

    /// No step runs.
    pub(super) fn idle(&self) {
        self.in_step.store(0, Ordering::Release);
        self.last_step.store(self.since_born(), Ordering::Release);
    }

    /// The load and its pages, now.
    pub(super) fn levels(&self) -> (LoadSnapshot, PageStats) {
        let pages = self.cache.stats();
        let load = LoadSnapshot {
            running: self.places.load(Ordering::Acquire),
            waiting: self.waiting.load(Ordering::Acquire),
            transferring: self.transferring.load(Ordering::Acquire),
            free_pages: pages.available(),
            total_pages: pages.total,
            max_running: self.knobs().max_running,
            draining: self.draining.load(Ordering::Acquire),
            waiting_tokens: self.waiting_tokens.load(Ordering::Acquire)
                + self.running_prompt_tokens.load(Ordering::Acquire),
            last_step: self.born + Duration::from_micros(self.last_step.load(Ordering::Acquire)),
        };
        (load, pages)
    }

    /// Tells the load. It is read under the lock of the load that it replaces: an older one never replaces a newer one.
    pub(super) fn publish_load(&self) {
        self.load.send_if_modified(|load| {
            let (new, _) = self.levels();
            let last_step = load.last_step;
            let changed = *load != LoadSnapshot { last_step, ..new };
            *load = new;
            changed
        });
    }

    /// The loop ended or hangs; the first reason stays.
    pub(super) fn die(&self, why: &str) {
        self.health.send_if_modified(|health| {
            let alive = *health == Health::Alive;
            if alive {
                *health = Health::Dead(why.into());
            }
            alive
        });
    }

    pub(super) fn failure(&self, reason: Reason, detail: impl Into<String>) -> Failure {
        self.metrics.failure(reason);
        Failure::new(reason, self.role.source(), detail)
    }

    /// A prefill no longer waits.
    pub(super) fn left_queue(&self, waiting: &Waiting) {
        self.waiting.fetch_sub(1, Ordering::AcqRel);
        let tokens = waiting.prompt.len() as u64;
        self.waiting_tokens.fetch_sub(tokens, Ordering::AcqRel);
    }

    pub(super) fn check_open(&self) -> Result<(), Failure> {
        if let Health::Dead(why) = &*self.health.borrow() {
            return Err(self.failure(Reason::Internal, format!("this engine is dead: {why}")));
        }
        if self.draining.load(Ordering::Acquire) {
            return Err(self.failure(
                Reason::Draining,
                "this engine is draining and admits nothing new; use another",
            ));
        }
        Ok(())
    }

    /// Can this request ever run here?
    pub(super) fn check_request(&self, prompt: &[u32], new_tokens: u32) -> Result<(), Failure> {
        if prompt.is_empty() {
            return Err(self.failure(Reason::Invalid, "prompt_tokens is empty"));
        }
        if new_tokens == 0 {
            return Err(self.failure(Reason::Invalid, "max_new_tokens is 0, at least 1 is needed"));
        }
        let total = prompt.len() as u64 + u64::from(new_tokens);
        let max = self.spec.max_length_tokens;
        if total > u64::from(max) {
            let detail = format!(
                "prompt of {} tokens and {new_tokens} new tokens make {total}, this engine holds {max} tokens per sequence",
                prompt.len()
            );
            return Err(self.failure(Reason::OverLength, detail));
        }
        if let Some((i, token)) = prompt.iter().enumerate().find(|(_, t)| **t >= self.spec.vocab_size) {
            let detail = format!(
                "prompt_tokens[{i}] is {token}, the vocabulary has {}",
                self.spec.vocab_size
            );
            return Err(self.failure(Reason::Invalid, detail));
        }
        Ok(())
    }

    pub(super) fn admit(self: &Arc<Self>, admission: &Admission) -> Result<Admitted, Refused> {
        // Looked at first and taken last: a place that is taken and given back wakes the loop, and hides a free place from
        // others meanwhile. Pages taken for nothing are given back only where somebody took the place in between.
        if self.places.load(Ordering::Acquire) >= self.knobs().max_running {
            return Err(Refused::NoPlace);
        }
        let leave = usize::from(!admission.pulled);
        // the KV of the last token is never computed
        let total = admission.prompt.len() + admission.max_new_tokens as usize - 1;
        let pages = self.cache.reserve(&admission.prompt, leave, total)?;
        let place = Place::take(self, admission.pulled).ok_or(Refused::NoPlace)?;
        Ok(Admitted {
            pages: Arc::new(pages),
            prompt: Arc::clone(&admission.prompt),
            max_new_tokens: admission.max_new_tokens,
            place,
        })
    }
}

/// No capacity now.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    #[error("all places are taken")]
    NoPlace,
    #[error(transparent)]
    NoPages(#[from] NoPages),
}

/// A place among the running sequences.
#[derive(Debug)]
pub(super) struct Place {
    shared: Arc<Shared>,
    pulled: bool,
}

impl Place {
    fn take(shared: &Arc<Shared>, pulled: bool) -> Option<Self> {
        let max = shared.knobs().max_running;
        let taken = shared
            .places
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < max).then_some(n + 1));
        taken.ok().map(|_| {
            if pulled {
                shared.transferring.fetch_add(1, Ordering::AcqRel);
            }
            Self {
                shared: Arc::clone(shared),
                pulled,
            }
        })
    }

    /// Counts the hand-off of what was computed here.
    pub(super) fn hand_off(&self) -> TransferGuard {
        TransferGuard::new(&self.shared)
    }

    /// Its hand-off is over.
    pub(super) fn pulled(&mut self) {
        if std::mem::take(&mut self.pulled) {
            self.shared.transferring.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.pulled();
        self.shared.places.fetch_sub(1, Ordering::AcqRel);
        self.shared.wake();
        self.shared.publish_load();
    }
}

/// A place and pages; dropping it gives both back.
#[derive(Debug)]
pub struct Admitted {
    /// Pages for the prompt and all growth.
    pub pages: Arc<SeqPages>,
    /// The prompt.
    pub prompt: Arc<[u32]>,
    /// Tokens to generate at most.
    pub max_new_tokens: u32,
    pub(super) place: Place,
}

/// Counts a hand-off in the load until dropped.
#[derive(Debug)]
pub struct TransferGuard(Arc<Shared>);

impl TransferGuard {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.transferring.fetch_add(1, Ordering::AcqRel);
        shared.handing_out.fetch_add(1, Ordering::AcqRel);
        shared.publish_load();
        Self(Arc::clone(shared))
    }
}

impl Drop for TransferGuard {
    fn drop(&mut self) {
        // The load shows only `transferring`. It falls last, so that a drain which its change wakes sees the other fallen.
        self.0.handing_out.fetch_sub(1, Ordering::AcqRel);
        self.0.transferring.fetch_sub(1, Ordering::AcqRel);
        self.0.publish_load();
    }
}
