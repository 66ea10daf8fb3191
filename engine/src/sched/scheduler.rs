//! The handle: admission at once or not at all, and the two ways to use the loop.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tandem_wire::{Failure, Reason};
use tokio::sync::watch;

use super::Role;
use super::knobs::{KnobRange, SchedKnobs};
use super::load::{Health, LoadSnapshot};
use super::metrics::SchedMetrics;
use super::run;
use super::seq::{Kind, Seq, Stops};
use super::stream::{Mailbox, PendingPrefill, PrefillStream, Reader, SeqStream};
use crate::exec::{Executor, KvStore, ModelSpec, SampleParams};
use crate::kv::{KvCache, NoPages, SeqPages};

/// Why the scheduler did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A knob is out of range for this model.
    #[error(transparent)]
    Knob(#[from] KnobRange),
    /// No thread.
    #[error("cannot start the scheduler's thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// What a request needs before it may start.
#[derive(Debug, Clone)]
pub struct Admission {
    /// The prompt, at least one token.
    pub prompt: Arc<[u32]>,
    /// Tokens to generate at most, at least one.
    pub max_new_tokens: u32,
    /// The KV is pulled from a prefill, so the prefix cache may cover the whole prompt.
    pub pulled: bool,
}

/// How a generation runs.
#[derive(Debug, Clone)]
pub struct GenParams {
    /// How tokens are chosen.
    pub sampling: SampleParams,
    /// Tokens to generate at most; no more than were admitted.
    pub max_new_tokens: u32,
    /// Stop tokens beside the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's own end tokens do not stop it.
    pub ignore_eos: bool,
    /// The prompt is complete and this token follows it. It is the stream's first token.
    pub first: Option<u32>,
    /// Prompt tokens whose KV lies in the pages, cached or pulled.
    pub computed: u32,
    /// When the request's time is over.
    pub deadline: Option<Instant>,
    /// Nobody reads tokens one by one: wake the reader for many at once.
    pub gather: bool,
}

/// How a prefill runs.
#[derive(Debug, Clone)]
pub struct PrefillParams {
    /// The prompt, at least one token.
    pub prompt: Arc<[u32]>,
    /// How the first token is chosen.
    pub sampling: SampleParams,
    /// Stop tokens beside the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's own end tokens do not stop it.
    pub ignore_eos: bool,
    /// Tokens that the request asks for in all: with 1 the first token ends it.
    pub max_new_tokens: u32,
    /// When the request's time is over.
    pub deadline: Option<Instant>,
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

    fn pulled(&mut self) {
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

impl Drop for TransferGuard {
    fn drop(&mut self) {
        self.0.transferring.fetch_sub(1, Ordering::AcqRel);
        self.0.handing_out.fetch_sub(1, Ordering::AcqRel);
        self.0.publish_load();
    }
}

/// A prefill that waits for a place.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) mailbox: Arc<Mailbox<PendingPrefill>>,
    pub(super) params: PrefillParams,
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
    pub(super) inbox: Mutex<Inbox>,
    pub(super) stop: AtomicBool,
    knobs: Mutex<SchedKnobs>,
    places: AtomicU32,
    transferring: AtomicU32,
    handing_out: AtomicU32,
    draining: AtomicBool,
    /// Prefills that wait for a place, and their prompt tokens.
    waiting: AtomicU32,
    waiting_tokens: AtomicU64,
    /// Prompt tokens not yet computed of running sequences; written by the loop.
    pub(super) running_prompt_tokens: AtomicU64,
    born: Instant,
    /// Microseconds since `born` of the last end of a step, or of the last look at an empty batch.
    last_step: AtomicU64,
    /// Microseconds since `born` of the last layer of the step that runs; 0: no step runs.
    in_step: AtomicU64,
    load: watch::Sender<LoadSnapshot>,
    health: watch::Sender<Health>,
    thread: OnceLock<Thread>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler")
            .field("role", &self.role)
            .finish_non_exhaustive()
    }
}

impl Shared {
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
        self.in_step.store(self.since_born().max(1), Ordering::Release);
    }

    /// No step runs.
    pub(super) fn idle(&self) {
        self.in_step.store(0, Ordering::Release);
        self.last_step.store(self.since_born(), Ordering::Release);
    }

    pub(super) fn publish_load(&self) {
        let knobs = self.knobs();
        let pages = self.cache.stats();
        let new = LoadSnapshot {
            running: self.places.load(Ordering::Acquire),
            waiting: self.waiting.load(Ordering::Acquire),
            transferring: self.transferring.load(Ordering::Acquire),
            free_pages: pages.available(),
            total_pages: pages.total,
            max_running: knobs.max_running,
            draining: self.draining.load(Ordering::Acquire),
            waiting_tokens: self.waiting_tokens.load(Ordering::Acquire)
                + self.running_prompt_tokens.load(Ordering::Acquire),
            last_step: self.born + Duration::from_micros(self.last_step.load(Ordering::Acquire)),
        };
        self.metrics.load(&new, pages);
        self.load.send_if_modified(|load| {
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
                tracing::error!(why, "the scheduler is dead");
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
        let tokens = waiting.params.prompt.len() as u64;
        self.waiting_tokens.fetch_sub(tokens, Ordering::AcqRel);
    }

    fn check_open(&self) -> Result<(), Failure> {
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
    fn check_request(&self, prompt: &[u32], new_tokens: u32) -> Result<(), Failure> {
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
        let place = Place::take(self, admission.pulled).ok_or(Refused::NoPlace)?;
        let leave = usize::from(!admission.pulled);
        // the KV of the last token is never computed
        let total = admission.prompt.len() + admission.max_new_tokens as usize - 1;
        let pages = self.cache.reserve(&admission.prompt, leave, total)?;
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

#[derive(Debug)]
struct Owner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        // at most one step away
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }
}

/// The handle on the scheduler. The last one dropped ends the loop and fails what still runs.
#[derive(Debug, Clone)]
pub struct Scheduler {
    owner: Arc<Owner>,
}

impl Scheduler {
    /// Starts the loop's thread, which owns `executor` from now on.
    pub fn start(executor: Box<dyn Executor>, role: Role, knobs: SchedKnobs) -> Result<Self, StartError> {
        let mut spec = executor.spec().clone();
        knobs.check(&spec)?;
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
        let shared = Arc::new(Shared {
            role,
            store: executor.kv(),
            cache: Arc::clone(&cache),
            metrics: SchedMetrics::default(),
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
            load: watch::Sender::new(load),
            health: watch::Sender::new(Health::Alive),
            thread: OnceLock::new(),
            spec,
        });
        let weak = Arc::downgrade(&shared);
        cache.on_release(move || {
            if let Some(shared) = weak.upgrade() {
                shared.wake();
                shared.publish_load();
            }
        });
        let thread = std::thread::Builder::new().name("scheduler".into()).spawn({
            let shared = Arc::clone(&shared);
            move || run::run(&shared, executor)
        })?;
        let _ = shared.thread.set(thread.thread().clone());
        shared.wake();
        shared.publish_load();
        Ok(Self {
            owner: Arc::new(Owner {
                shared,
                thread: Mutex::new(Some(thread)),
            }),
        })
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.owner.shared
    }

    /// The model, with the longest sequence that this engine's pages hold.
    pub fn spec(&self) -> &ModelSpec {
        &self.shared().spec
    }

    /// What this engine is for.
    pub fn role(&self) -> Role {
        self.shared().role
    }

    /// The pages' bytes.
    pub fn kv(&self) -> &Arc<dyn KvStore> {
        &self.shared().store
    }

    /// The pages.
    pub fn cache(&self) -> &Arc<KvCache> {
        &self.shared().cache
    }

    /// Counters and gauges, to be registered once.
    pub fn metrics(&self) -> &SchedMetrics {
        &self.shared().metrics
    }

    /// The load, at each change.
    pub fn load(&self) -> watch::Receiver<LoadSnapshot> {
        self.shared().load.subscribe()
    }

    /// The load now, its step age included.
    pub fn load_now(&self) -> LoadSnapshot {
        self.shared().publish_load();
        *self.shared().load.borrow()
    }

    /// Whether the loop lives.
    pub fn health(&self) -> watch::Receiver<Health> {
        self.shared().health.subscribe()
    }

    /// How long the step that runs has shown no sign of life (no layer done); `None`: no step runs.
    pub fn silent_for(&self) -> Option<Duration> {
        match self.shared().in_step.load(Ordering::Acquire) {
            0 => None,
            beat => Some(Duration::from_micros(self.shared().since_born().saturating_sub(beat))),
        }
    }

    /// Declares the loop dead, because its step hangs: whatever waits for it fails at once, nothing is admitted any more.
    pub fn give_up(&self, why: &str) {
        self.shared().die(why);
    }

    /// The knobs in effect.
    pub fn knobs(&self) -> SchedKnobs {
        self.shared().knobs()
    }

    /// Applies knobs between two steps.
    pub fn set_knobs(&self, knobs: SchedKnobs) -> Result<(), KnobRange> {
        knobs.check(self.spec())?;
        let before = std::mem::replace(&mut *self.shared().knobs.lock(), knobs);
        if before.prefix_cache != knobs.prefix_cache {
            self.cache().set_enabled(knobs.prefix_cache);
        }
        self.shared().wake();
        self.shared().publish_load();
        Ok(())
    }

    /// Stops admission (or, with `false`, resumes it); what was admitted goes on.
    pub fn set_draining(&self, draining: bool) {
        self.shared().draining.store(draining, Ordering::Release);
        self.shared().publish_load();
    }

    /// Stops admission.
    pub fn drain(&self) {
        self.set_draining(true);
    }

    /// Requests that are not over: running, waiting, or handing KV out.
    pub fn remaining(&self) -> u32 {
        let shared = self.shared();
        shared.places.load(Ordering::Acquire)
            + shared.waiting.load(Ordering::Acquire)
            + shared.handing_out.load(Ordering::Acquire)
    }

    /// Counts a hand-off of finished KV in the load until dropped.
    pub fn transferring(&self) -> TransferGuard {
        let shared = self.shared();
        shared.transferring.fetch_add(1, Ordering::AcqRel);
        shared.handing_out.fetch_add(1, Ordering::AcqRel);
        shared.publish_load();
        TransferGuard(Arc::clone(shared))
    }

    /// A place and pages for the prompt and all growth, at once or not at all.
    ///
    /// # Errors
    /// INVALID, OVER_LENGTH, DRAINING, NO_CAPACITY, INTERNAL (the loop is dead).
    pub fn admit(&self, admission: &Admission) -> Result<Admitted, Failure> {
        let shared = self.shared();
        shared.metrics.request("generate");
        shared.check_request(&admission.prompt, admission.max_new_tokens)?;
        shared.check_open()?;
        let admitted = shared.admit(admission).map_err(|refused| {
            let max = shared.knobs().max_running;
            let running = shared.places.load(Ordering::Acquire);
            let detail = format!("{refused} ({running} of {max} places taken); try again later or elsewhere");
            shared.failure(Reason::NoCapacity, detail)
        })?;
        shared.publish_load();
        Ok(admitted)
    }

    /// Joins the running batch. Dropping the stream aborts.
    pub fn generate(&self, admitted: Admitted, params: GenParams) -> SeqStream {
        let shared = self.shared();
        let mailbox = Mailbox::new();
        let reader = self.reader(Arc::clone(&mailbox));
        let now = Instant::now();
        let mut admitted = admitted;
        admitted.place.pulled();
        let computed = params.computed.min(admitted.prompt.len() as u32) as usize;
        let mut seq = Seq {
            kind: Kind::Generate {
                mailbox,
                gather: params.gather,
            },
            tokens: admitted.prompt.to_vec(),
            prompt_len: admitted.prompt.len(),
            computed,
            emitted: 0,
            sampling: params.sampling,
            stops: Stops {
                stop_token_ids: params.stop_token_ids,
                ignore_eos: params.ignore_eos,
                max_new_tokens: params.max_new_tokens.clamp(1, admitted.max_new_tokens),
            },
            deadline: params.deadline,
            last_step: 0,
            prompt_computed: 0,
            submitted: now,
            started: None,
            first_token: None,
            admitted,
        };
        shared
            .metrics
            .cached_tokens
            .inc_by(seq.admitted.pages.cached_tokens().into());
        match params.first {
            Some(first) => {
                seq.computed = seq.prompt_len;
                shared.cache.publish(&seq.tokens, &seq.admitted.pages);
                if let Some(cause) = seq.accept(first, &shared.spec.end_tokens, now) {
                    shared.metrics.finished.inc();
                    seq.finish(Some(cause), now);
                    return SeqStream(reader);
                }
            }
            None if computed == seq.prompt_len => {
                let detail =
                    "the whole prompt is computed, but no token follows it: its last token must be computed here";
                seq.fail(shared.failure(Reason::Internal, detail));
                return SeqStream(reader);
            }
            None => {}
        }
        let refused = {
            let mut inbox = shared.inbox.lock();
            if inbox.closed {
                Some(seq)
            } else {
                inbox.arrivals.push(seq);
                None
            }
        };
        match refused {
            Some(seq) => seq.fail(shared.failure(Reason::Internal, "the scheduler has ended")),
            None => shared.wake(),
        }
        SeqStream(reader)
    }

    /// Queues a prefill: it waits at most `queue_ms` among at most `prefill_queue` others. Dropping the stream aborts.
    ///
    /// # Errors
    /// INVALID, OVER_LENGTH, DRAINING, NO_CAPACITY (the queue is full), INTERNAL (the loop is dead).
    pub fn prefill(&self, params: PrefillParams) -> Result<PrefillStream, Failure> {
        let shared = self.shared();
        shared.metrics.request("prefill");
        shared.check_request(&params.prompt, 1)?;
        shared.check_open()?;
        let bound = shared.knobs().prefill_queue;
        let ahead = shared
            .waiting
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < bound).then_some(n + 1))
            .map_err(|n| {
                let detail = format!("{n} prefills wait, prefill_queue allows {bound}; try again later or elsewhere");
                shared.failure(Reason::NoCapacity, detail)
            })?;
        shared
            .waiting_tokens
            .fetch_add(params.prompt.len() as u64, Ordering::AcqRel);
        let mailbox = Mailbox::<PendingPrefill>::new();
        let reader = self.reader(Arc::clone(&mailbox));
        mailbox.update(|pending| pending.queued(ahead));
        let waiting = Waiting {
            mailbox,
            params,
            submitted: Instant::now(),
        };
        let refused = {
            let mut inbox = shared.inbox.lock();
            if inbox.closed {
                Some(waiting)
            } else {
                inbox.prefills.push(waiting);
                None
            }
        };
        if let Some(waiting) = refused {
            shared.left_queue(&waiting);
            return Err(shared.failure(Reason::Internal, "the scheduler has ended"));
        }
        shared.wake();
        shared.publish_load();
        Ok(PrefillStream(reader))
    }

    fn reader<P: super::stream::Pending>(&self, mailbox: Arc<Mailbox<P>>) -> Reader<P> {
        let shared = self.shared();
        let thread = shared.thread.get().cloned().unwrap_or_else(std::thread::current);
        Reader::new(mailbox, thread, shared.health.subscribe(), shared.role.source())
    }
}
