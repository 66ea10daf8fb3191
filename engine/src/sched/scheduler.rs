//! The handle: admission at once or not at all, and the two ways to use the loop.

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tandem_wire::{Failure, Reason};
use tokio::sync::watch;

use super::Role;
use super::chooser::Chooser;
use super::inflight::{Inflight, Stay};
use super::knobs::{KnobRange, SchedKnobs};
use super::load::{Health, LoadSnapshot};
use super::metrics::{SchedMetrics, Standing};
use super::run;
use super::sampling::Sampling;
use super::seq::{Kind, Seq, Stops};
use super::shared::{Admitted, Shared, Waiting};
use super::stream::{Mailbox, Pending, PendingPrefill, PrefillStream, Reader, SeqStream};
use crate::exec::{Executor, KvStore, Logprob, ModelSpec};
use crate::kv::KvCache;

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

/// The answer's first token, chosen elsewhere.
#[derive(Debug, Clone, PartialEq)]
pub struct First {
    /// The token.
    pub token: u32,
    /// Where it was asked for.
    pub logprob: Option<Logprob>,
}

/// How a generation runs.
#[derive(Debug, Clone)]
pub struct GenParams {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens to generate at most; no more than were admitted.
    pub max_new_tokens: u32,
    /// Stop tokens beside the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's own end tokens do not stop it.
    pub ignore_eos: bool,
    /// The prompt is complete and this token follows it. It is the stream's first token.
    pub first: Option<First>,
    /// Prompt tokens whose KV lies in the pages, cached or pulled.
    pub computed: u32,
    /// When the request's time is over.
    pub deadline: Option<Instant>,
    /// Held until the loop lets go of it; touched with each step that had a part for it.
    pub stay: Option<Arc<Stay>>,
    /// Nobody reads tokens one by one: wake the reader for many at once.
    pub gather: bool,
}

/// How a prefill runs.
#[derive(Debug, Clone)]
pub struct PrefillParams {
    /// The prompt, at least one token.
    pub prompt: Arc<[u32]>,
    /// How the first token is chosen.
    pub sampling: Sampling,
    /// Stop tokens beside the model's own.
    pub stop_token_ids: Vec<u32>,
    /// The model's own end tokens do not stop it.
    pub ignore_eos: bool,
    /// Tokens that the request asks for in all: with 1 the first token ends it.
    pub max_new_tokens: u32,
    /// When the request's time is over.
    pub deadline: Option<Instant>,
    /// Held until the loop lets go of it; touched with each step that had a part for it.
    pub stay: Option<Arc<Stay>>,
}

#[derive(Debug)]
struct Owner {
    shared: Arc<Shared>,
    thread: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    thread: JoinHandle<()>,
    /// Closed once the thread has ended.
    ended: mpsc::Receiver<()>,
}

/// A loop that is told to end gets this long for the step that runs.
const LAST_STEP: Duration = Duration::from_secs(5);

impl Drop for Owner {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        let Some(Running { thread, ended }) = self.thread.lock().take() else {
            return;
        };
        // A step that hangs must hold neither its owner nor the process: its thread is left to itself then, and ends with
        // the process.
        if matches!(*self.shared.health.borrow(), Health::Dead(_)) {
            return;
        }
        match ended.recv_timeout(LAST_STEP) {
            Err(mpsc::RecvTimeoutError::Timeout) => {
                tracing::warn!(
                    waited_ms = LAST_STEP.as_millis(),
                    "a step does not end, it is left to itself"
                );
            }
            // a panic of the loop was caught and told by itself
            Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => drop(thread.join()),
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
        knobs.check(executor.spec())?;
        let shared = Arc::new(Shared::new(&*executor, role, knobs));
        let weak = Arc::downgrade(&shared);
        shared.cache.on_release(move || {
            if let Some(shared) = weak.upgrade() {
                shared.wake();
                shared.publish_load();
            }
        });
        let (running, ended) = mpsc::channel();
        let thread = std::thread::Builder::new().name("scheduler".into()).spawn({
            let shared = Arc::clone(&shared);
            move || {
                run::run(&shared, executor);
                drop(running);
            }
        })?;
        let _ = shared.thread.set(thread.thread().clone());
        shared.wake();
        shared.publish_load();
        Ok(Self {
            owner: Arc::new(Owner {
                shared,
                thread: Mutex::new(Some(Running { thread, ended })),
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

    /// Counters and gauges.
    pub fn metrics(&self) -> &SchedMetrics {
        &self.shared().metrics
    }

    /// Registers the metrics, once per process; what depends on the time is read when somebody asks.
    pub fn register(&self, registry: &mut Registry) {
        self.metrics().register(registry);
        registry.register_collector(Box::new(Standing(Arc::clone(self.shared()))));
    }

    /// What each request waits for.
    pub fn inflight(&self) -> &Arc<Inflight> {
        &self.shared().inflight
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

    /// Changes with each layer that the running step has done; `None`: no step runs.
    pub fn beat(&self) -> Option<u64> {
        self.shared().beat_now()
    }

    /// Declares the loop dead, because its step hangs: whatever waits for it fails at once, nothing is admitted any more.
    pub fn give_up(&self, why: &str) {
        tracing::error!(why, "the scheduler is given up");
        self.shared().die(why);
    }

    /// Ends the loop after the step that runs: whatever is not over fails.
    pub fn shut_down(&self) {
        self.shared().stop.store(true, Ordering::Release);
        self.shared().wake();
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
        let stops = Stops {
            stop_token_ids: params.stop_token_ids,
            ignore_eos: params.ignore_eos,
            max_new_tokens: params.max_new_tokens.clamp(1, admitted.max_new_tokens),
        };
        let chooser = match Chooser::new(params.sampling, &admitted.prompt, &stops, &shared.spec) {
            Ok(chooser) => chooser,
            Err(why) => {
                drop(admitted);
                mailbox.fail(shared.failure(Reason::Invalid, format!("response_format's schema: {why}")));
                return SeqStream(reader);
            }
        };
        let mut seq = Seq {
            kind: Kind::Generate {
                mailbox,
                gather: params.gather,
            },
            tokens: admitted.prompt.to_vec(),
            prompt_len: admitted.prompt.len(),
            computed,
            emitted: 0,
            chooser,
            stops,
            deadline: params.deadline,
            stay: params.stay,
            last_step: 0,
            prompt_computed: 0,
            submitted: now,
            started: None,
            first_token: None,
            logprob: None,
            admitted,
        };
        shared
            .metrics
            .cached_tokens
            .inc_by(seq.admitted.pages.cached_tokens().into());
        match params.first {
            Some(First { token, .. }) if token >= shared.spec.vocab_size => {
                let size = shared.spec.vocab_size;
                let detail = format!("the prefill's first token is {token}, the vocabulary has {size}");
                seq.fail(shared.failure(Reason::Internal, detail));
                return SeqStream(reader);
            }
            Some(First { token, logprob }) => {
                seq.computed = seq.prompt_len;
                shared.cache.publish(&seq.tokens, &seq.admitted.pages);
                match seq.accept(token, logprob, &shared.spec.end_tokens, now) {
                    Ok(None) => {}
                    Ok(cause) => {
                        shared.metrics.finished.inc();
                        seq.finish(cause, now);
                        return SeqStream(reader);
                    }
                    Err(why) => {
                        let detail = format!("the prefill's first token {token} does not fit the grammar: {why}");
                        seq.fail(shared.failure(Reason::Internal, detail));
                        return SeqStream(reader);
                    }
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
        let stops = Stops {
            stop_token_ids: params.stop_token_ids,
            ignore_eos: params.ignore_eos,
            max_new_tokens: params.max_new_tokens,
        };
        // a long prompt takes a while to count: not on the loop's thread
        let chooser = Chooser::new(params.sampling, &params.prompt, &stops, &shared.spec)
            .map_err(|why| shared.failure(Reason::Invalid, format!("response_format's schema: {why}")))?;
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
            chooser,
            stops,
            prompt: params.prompt,
            deadline: params.deadline,
            stay: params.stay,
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

    fn reader<P: Pending>(&self, mailbox: Arc<Mailbox<P>>) -> Reader<P> {
        let shared = self.shared();
        let thread = shared.thread.get().cloned().unwrap_or_else(std::thread::current);
        Reader::new(mailbox, thread, shared.health.subscribe(), shared.role.source())
    }
}
