//! Decode's side: what a hand-off needs and gives, and the attempts under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_telemetry::TraceParent;
use tandem_wire::proto;
use tandem_wire::state::DecodeState;
use tandem_wire::{BootId, Failure, KvLayout, Reason, Source, TransferKey};
use tokio_util::task::TaskTracker;

use super::attempt::Attempt;
use super::cell::Cell;
use super::metrics::TransferMetrics;
use super::peers::Peers;
use super::registry::{Ending, Registry, Tracked};
use super::timers::{KeepAlive, Timers};
use super::watchdog;
use crate::exec::{KvStore, Logprob, ModelSpec};
use crate::kv::SeqPages;
use crate::sched::{Cause, Stay, Stops};
use crate::trace::failed;

/// Where a request waits, as its caller is told.
pub use tandem_wire::phase::Phase;

/// What a [`Puller`] needs to know.
pub struct PullerConfig {
    /// This process.
    pub boot_id: BootId,
    /// The model served here; prefill must serve the same.
    pub spec: Arc<ModelSpec>,
    /// Where the bytes go.
    pub store: Arc<dyn KvStore>,
    /// The timers.
    pub timers: Timers,
    /// Pings between engines.
    pub keep_alive: KeepAlive,
    /// Where it is counted.
    pub metrics: TransferMetrics,
}

/// One attempt, as the router minted it.
pub struct PullRequest {
    /// Hand-off and attempt.
    pub key: TransferKey,
    /// host:port of prefill's control port.
    pub endpoint: String,
    /// The prefill process that is meant.
    pub boot_id: BootId,
    /// The whole prompt.
    pub prompt: Arc<[u32]>,
    /// The sequence's pages; they cover the prompt.
    pub pages: Arc<SeqPages>,
    /// KV of tokens before this lies in the pages already; at least `pages.cached_tokens()`.
    pub have_tokens: u32,
    /// How prefill samples the first token: the request's own, passed on as it came.
    pub sampling: proto::Sampling,
    /// When the answer ends.
    pub stops: Stops,
    /// The request's remaining time.
    pub remaining: Option<Duration>,
    /// For logs.
    pub request_id: String,
    /// Moved and touched as the attempt gets on.
    pub stay: Arc<Stay>,
    /// The span that this is a part of.
    pub trace: TraceParent,
}

/// A hand-off that was committed: the prompt's KV lies in the pages, unless `finished`.
#[derive(Debug, Clone, PartialEq)]
pub struct Pulled {
    /// Sampled by prefill after the prompt.
    pub first_token: u32,
    /// Of the first token, where it was asked for.
    pub first_logprob: Option<Logprob>,
    /// The first token ended the request: **no KV was moved**, the pages hold nothing beyond `have_tokens`.
    pub finished: Option<Cause>,
    /// Prompt tokens whose KV came.
    pub moved_tokens: u32,
    /// Payload bytes of those.
    pub moved_bytes: u64,
    /// Prefill's own prefix-cache hit.
    pub cached_tokens: u32,
    /// Time in prefill's run queue.
    pub queue_us: u64,
    /// Time that prefill computed.
    pub prefill_us: u64,
    /// From when frames were due until all were verified.
    pub transfer_us: u64,
}

/// Decode's record of one attempt.
pub struct PullEntry {
    pub(super) cell: Cell<DecodeState, Arc<SeqPages>>,
}

impl Tracked for PullEntry {
    fn is_terminal(&self) -> bool {
        self.cell.state().is_terminal()
    }
    fn ending(&self) -> Ending {
        self.cell.failure().map_or(Ending::Done, Ending::Failed)
    }
    fn end_if_overdue(&self, now: Instant, limit: Duration) -> bool {
        self.cell.end_if_overdue(now, limit, Source::Decode)
    }
    fn age(&self, now: Instant) -> Option<Duration> {
        self.cell.age(now)
    }
}

/// Pulls prompts' KV from prefills.
pub struct Puller {
    pub(super) boot_id: BootId,
    pub(super) spec: Arc<ModelSpec>,
    pub(super) layout: Arc<KvLayout>,
    pub(super) store: Arc<dyn KvStore>,
    pub(super) timers: Timers,
    pub(super) metrics: TransferMetrics,
    pub(super) peers: Peers,
    pub(super) registry: Arc<Registry<PullEntry>>,
    pub(super) goodbyes: TaskTracker,
}

impl Puller {
    /// A puller without connections.
    pub fn new(config: PullerConfig) -> Arc<Self> {
        Arc::new(Self {
            boot_id: config.boot_id,
            layout: Arc::new(config.spec.layout.clone()),
            spec: config.spec,
            store: config.store,
            timers: config.timers,
            metrics: config.metrics,
            peers: Peers::new(config.keep_alive),
            registry: Arc::default(),
            goodbyes: TaskTracker::new(),
        })
    }

    /// What the watchdog looks after.
    pub fn swept(&self) -> Arc<dyn watchdog::Sweep> {
        Arc::new(watchdog::Swept {
            registry: Arc::clone(&self.registry),
            metrics: Arc::clone(&self.metrics.decode),
        })
    }

    /// Attempts under way.
    pub fn live(&self) -> usize {
        self.registry.live()
    }

    /// Waits until the last goodbyes are said; each takes two seconds at most.
    pub async fn close(&self) {
        self.goodbyes.close();
        self.goodbyes.wait().await;
    }

    /// Runs one attempt: KV from `have_tokens` on is written into the pages. Dropping the future aborts it and tells prefill.
    pub async fn pull(&self, mut request: PullRequest, phase: impl Fn(Phase) + Send) -> Result<Pulled, Failure> {
        let started = Instant::now();
        let key = request.key;
        let (request_id, endpoint) = (request.request_id.clone(), request.endpoint.clone());
        let entry = match self.enter(&request) {
            Ok(entry) => entry,
            Err(failure) => {
                self.metrics.decode.refused(failure.reason);
                return Err(failure);
            }
        };
        let mut span = request.trace.call("tandem.v1.KvTransfer/Prefill", &endpoint);
        request.trace = span.parent().clone();
        let trace_id = request.trace.trace_id();
        let result = Attempt::new(self, request, entry, phase).run().await;
        match &result {
            Ok(pulled) => {
                span.describe(|| {
                    [
                        ("tandem.transfer_us", (pulled.transfer_us as i64).into()),
                        ("tandem.moved_tokens", i64::from(pulled.moved_tokens).into()),
                        ("tandem.moved_bytes", (pulled.moved_bytes as i64).into()),
                        ("rpc.response.status_code", "OK".into()),
                    ]
                });
                tracing::debug!(
                    %key,
                    request_id,
                    trace_id,
                    moved_tokens = pulled.moved_tokens,
                    moved_bytes = pulled.moved_bytes,
                    millis = started.elapsed().as_millis() as u64,
                    "pulled"
                );
            }
            Err(failure) => {
                failed(&mut span, failure);
                tracing::warn!(
                    %key,
                    request_id,
                    trace_id,
                    prefill = endpoint,
                    millis = started.elapsed().as_millis() as u64,
                    "pull failed: {failure}"
                );
            }
        }
        result
    }

    fn enter(&self, request: &PullRequest) -> Result<Arc<PullEntry>, Failure> {
        let invalid = |detail: String| Err(Failure::new(Reason::Invalid, Source::Decode, detail));
        let prompt = request.prompt.len();
        if request.have_tokens as usize > prompt || request.have_tokens < request.pages.cached_tokens() {
            return invalid(format!(
                "have_tokens is {}, allowed is {} (cached and shared) to {prompt} (the prompt)",
                request.have_tokens,
                request.pages.cached_tokens()
            ));
        }
        let room = request.pages.pages().len() * self.spec.page_tokens as usize;
        if room < prompt {
            return invalid(format!("the pages hold {room} tokens, the prompt has {prompt}"));
        }
        let metrics = Arc::clone(&self.metrics.decode);
        let entry = PullEntry {
            cell: Cell::new(
                DecodeState::Reserved,
                false,
                Some(Arc::clone(&request.pages)),
                Some(Arc::clone(&request.stay)),
                metrics,
            ),
        };
        self.registry.insert(request.key, entry).ok_or_else(|| {
            Failure::new(
                Reason::StaleAttempt,
                Source::Decode,
                format!("transfer {} was seen before; a retry is a new attempt", request.key),
            )
        })
    }
}
