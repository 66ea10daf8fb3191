//! Prefill's side: what may be opened and fetched here, and who holds what for whom.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tandem_telemetry::Traces;
use tandem_wire::frame::Digest;
use tandem_wire::phase::Phase;
use tandem_wire::proto::kv_transfer_server::{KvTransfer, KvTransferServer};
use tandem_wire::proto::{DecodeMessage, FetchRequest, Open, PrefillMessage};
use tandem_wire::state::PrefillState;
use tandem_wire::{BootId, Failure, KvLayout, Reason, Source as Witness, TransferKey};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use super::cell::Cell;
use super::metrics::{SideMetrics, TransferMetrics};
use super::registry::{Ending, Found, Registry, Tracked};
use super::timers::Timers;
use super::{body, control, data, watchdog};
use crate::exec::{KvStore, ModelSpec};
use crate::kv::SeqPages;
use crate::sched::{PrefillAbort, Sampling, Scheduler, TransferGuard, read_sampling};
use crate::trace::failed;

/// A prompt of a million tokens takes 3 to 5 MB on the wire.
const MAX_CONTROL_MESSAGE_BYTES: usize = 64 << 20;
/// Data streams that may wait for their control stream at once.
const MAX_EARLY_FETCHES: usize = 256;

/// What a [`Source`] needs to know.
pub struct SourceConfig {
    /// This process.
    pub boot_id: BootId,
    /// host:port of the data port as `Accepted` names it; an empty host means the host that decode dialled.
    pub advertise: String,
    /// The timers.
    pub timers: Timers,
    /// Where it is counted.
    pub metrics: TransferMetrics,
    /// Where spans begin.
    pub traces: Traces,
}

/// Hands KV out.
#[derive(Clone)]
pub struct Source(Arc<Shared>);

/// What all calls share.
pub struct Shared {
    pub(super) boot_id: BootId,
    pub(super) advertise: String,
    pub(super) timers: Timers,
    pub(super) metrics: Arc<SideMetrics>,
    pub(super) scheduler: Scheduler,
    pub(super) spec: ModelSpec,
    pub(super) store: Arc<dyn KvStore>,
    pub(super) registry: Arc<Registry<HandOff>>,
    traces: Traces,
    early: Semaphore,
    tasks: TaskTracker,
}

/// What a hand-off holds; the last clone lets go of it.
#[derive(Clone)]
pub enum Held {
    /// The computation.
    Computing(#[expect(dead_code, reason = "held for its drop, which aborts")] Arc<PrefillAbort>),
    /// The prompt's pages, and a place in the load.
    Pages(
        Arc<SeqPages>,
        #[expect(dead_code, reason = "held for its drop, which takes it out of the load")] Arc<TransferGuard>,
    ),
}

/// Prefill's record of one attempt.
pub struct HandOff {
    pub(super) cell: Cell<PrefillState, Held>,
    pub(super) decode_boot: BootId,
    /// First token whose KV is asked for.
    pub(super) from: u32,
    /// The prompt's length.
    pub(super) to: u32,
    /// A data stream reads it.
    attached: AtomicBool,
    /// Set once the last frame went out.
    pub(super) sent: watch::Sender<Option<Digest>>,
}

impl Tracked for HandOff {
    fn is_terminal(&self) -> bool {
        self.cell.state().is_terminal()
    }
    fn ending(&self) -> Ending {
        match self.cell.state() {
            PrefillState::Finished => Ending::Finished,
            _ => self.cell.failure().map_or(Ending::Done, Ending::Failed),
        }
    }
    fn end_if_overdue(&self, now: Instant, limit: Duration) -> bool {
        self.cell.end_if_overdue(now, limit, Witness::Prefill)
    }
    fn age(&self, now: Instant) -> Option<Duration> {
        self.cell.age(now)
    }
}

impl Source {
    /// Hands out what `scheduler` prefills.
    pub fn new(scheduler: Scheduler, config: SourceConfig) -> Self {
        Self(Arc::new(Shared {
            boot_id: config.boot_id,
            advertise: config.advertise,
            timers: config.timers,
            metrics: config.metrics.prefill,
            spec: scheduler.spec().clone(),
            store: Arc::clone(scheduler.kv()),
            scheduler,
            registry: Arc::default(),
            traces: config.traces,
            early: Semaphore::new(MAX_EARLY_FETCHES),
            tasks: TaskTracker::new(),
        }))
    }

    /// `Prefill`, for the control port.
    pub fn control(&self) -> KvTransferServer<ControlPort> {
        KvTransferServer::new(ControlPort(Arc::clone(&self.0))).max_decoding_message_size(MAX_CONTROL_MESSAGE_BYTES)
    }

    /// `Fetch`, for the data port.
    pub fn data(&self) -> DataPort {
        DataPort(Arc::clone(&self.0))
    }

    /// What the watchdog looks after.
    pub fn swept(&self) -> Arc<dyn watchdog::Sweep> {
        Arc::new(watchdog::Swept {
            registry: Arc::clone(&self.0.registry),
            metrics: Arc::clone(&self.0.metrics),
        })
    }

    /// Hand-offs under way.
    pub fn live(&self) -> usize {
        self.0.registry.live()
    }

    /// Waits until every hand-off has ended; each has its timers, so this takes no longer than the longest of them.
    pub async fn close(&self) {
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }
}

/// The control port's half of the service.
pub struct ControlPort(Arc<Shared>);

/// The data port's half of the service.
#[derive(Clone)]
pub struct DataPort(Arc<Shared>);

#[tonic::async_trait]
impl KvTransfer for ControlPort {
    type PrefillStream = ReceiverStream<Result<PrefillMessage, Status>>;
    type FetchStream = data::FrameStream;

    async fn prefill(
        &self,
        request: Request<Streaming<DecodeMessage>>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let (to_decode, outbox) = mpsc::channel(control::OUTBOX);
        // not part of the response stream: a reader that stops reading must not stop the timers
        let span = self
            .0
            .traces
            .served(request.metadata().as_ref(), "tandem.v1.KvTransfer/Prefill");
        let task = control::run(Arc::clone(&self.0), request.into_inner(), to_decode, span);
        self.0.tasks.spawn(task);
        Ok(Response::new(ReceiverStream::new(outbox)))
    }

    async fn fetch(&self, _: Request<FetchRequest>) -> Result<Response<Self::FetchStream>, Status> {
        Err(Status::unimplemented(
            "Fetch is served on the data port, which Accepted names",
        ))
    }
}

impl tonic::server::NamedService for DataPort {
    const NAME: &'static str = body::SERVICE;
}

impl<B> tower::Service<http::Request<B>> for DataPort
where
    B: http_body::Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let shared = Arc::clone(&self.0);
        Box::pin(async move {
            if request.uri().path() != body::FETCH {
                let status = Status::unimplemented("the data port serves Fetch and nothing else");
                return Ok(status.into_http());
            }
            let mut span = shared.traces.served(request.headers(), "tandem.v1.KvTransfer/Fetch");
            let limit = shared.timers.get().rendezvous;
            let read = tokio::time::timeout(limit, body::read_request(request.into_body()));
            let attached = match read.await {
                Ok(Ok(fetch)) => shared.attach(&fetch).await.map_err(|failure| {
                    failed(&mut span, &failure);
                    failure.to_status()
                }),
                Ok(Err(status)) => Err(status),
                Err(_) => Err(Status::deadline_exceeded("the request of a data stream did not come")),
            };
            Ok(match attached {
                Ok(Some(hand_off)) => body::respond(data::frames(shared, hand_off, span)),
                Ok(None) => body::respond(Box::pin(futures::stream::empty())),
                Err(status) => status.into_http(),
            })
        })
    }
}

fn refuse<T>(reason: Reason, detail: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::new(reason, Witness::Prefill, detail))
}

/// A field that must be an id.
fn id<T>(read: Result<T, tandem_wire::id::IdError>) -> Result<T, Failure> {
    read.or_else(|e| refuse(Reason::Invalid, e.to_string()))
}

impl Shared {
    /// Everything that can be said against an Open before anything is taken for it.
    pub(super) fn check(&self, open: &Open) -> Result<(TransferKey, Sampling, HandOff), Failure> {
        let key = id(TransferKey::from_wire(open.key.as_ref()))?;
        if open.prefill_boot_id[..] != self.boot_id.as_bytes()[..] {
            return Err(Failure::stale_boot(
                Witness::Prefill,
                &open.prefill_boot_id,
                self.boot_id,
            ));
        }
        let decode_boot = id(BootId::from_wire(&open.decode_boot_id))?;
        if !open.transports.is_empty() && !open.transports.iter().any(|t| t == "grpc") {
            return refuse(
                Reason::LayoutMismatch,
                format!(
                    "no common transport: decode has {:?}, prefill has [\"grpc\"]",
                    open.transports
                ),
            );
        }
        if open.model_hash[..] != self.spec.hash[..] {
            return refuse(
                Reason::LayoutMismatch,
                "model hash differs: prefill and decode must load the same file",
            );
        }
        KvLayout::from_wire(open.layout.as_ref())
            .and_then(|theirs| self.spec.layout.compatible(&theirs))
            .or_else(|e| refuse(Reason::LayoutMismatch, e.to_string()))?;
        let prompt = open.prompt_tokens.len();
        if prompt == 0 {
            return refuse(Reason::Invalid, "prompt_tokens is empty");
        }
        if open.have_tokens as usize > prompt {
            return refuse(
                Reason::Invalid,
                format!("have_tokens is {}, the prompt has {prompt} tokens", open.have_tokens),
            );
        }
        if open.max_new_tokens == 0 {
            return refuse(Reason::Invalid, "max_new_tokens is 0, the least is 1");
        }
        let sampling = read_sampling(open.sampling.as_ref(), self.spec.vocab_size, open.max_new_tokens)
            .or_else(|e| refuse(Reason::Invalid, e))?;
        let hand_off = HandOff {
            cell: Cell::new(
                PrefillState::Queued,
                true,
                None,
                Some(self.scheduler.inflight().enter(Phase::Queued)),
                Arc::clone(&self.metrics),
            ),
            decode_boot,
            from: open.have_tokens,
            to: prompt as u32,
            attached: AtomicBool::new(false),
            sent: watch::Sender::new(None),
        };
        Ok((key, sampling, hand_off))
    }

    /// The hand-off that a Fetch means; `None`: it is over, and without KV. The Fetch may come before its Open, and after
    /// the end of a hand-off that finished with its first token.
    async fn attach(&self, fetch: &FetchRequest) -> Result<Option<Arc<HandOff>>, Failure> {
        let key = id(TransferKey::from_wire(fetch.key.as_ref()))?;
        if fetch.boot_id[..] != self.boot_id.as_bytes()[..] {
            return Err(Failure::stale_boot(Witness::Prefill, &fetch.boot_id, self.boot_id));
        }
        let decode_boot = id(BootId::from_wire(&fetch.decode_boot_id))?;
        if (fetch.rank, fetch.lane) != (0, 0) {
            return refuse(
                Reason::Invalid,
                format!(
                    "rank {} lane {} is asked for, there is rank 0 lane 0",
                    fetch.rank, fetch.lane
                ),
            );
        }
        let found = match self.registry.find(key) {
            Found::Unknown => {
                let Ok(_place) = self.early.try_acquire() else {
                    return refuse(
                        Reason::NoCapacity,
                        format!("{MAX_EARLY_FETCHES} data streams wait for their Open already"),
                    );
                };
                let limit = self.timers.get().rendezvous;
                let Ok(found) = tokio::time::timeout(limit, self.registry.arrival(key)).await else {
                    return refuse(
                        Reason::RendezvousTimeout,
                        format!(
                            "rendezvous timer: no Open for transfer {key} came for {} ms",
                            limit.as_millis()
                        ),
                    );
                };
                found
            }
            found => found,
        };
        match found {
            Found::Live(hand_off) => {
                if hand_off.decode_boot != decode_boot {
                    return refuse(
                        Reason::StaleAttempt,
                        format!("transfer {key} is bound to another decode boot than {decode_boot}"),
                    );
                }
                if hand_off.attached.swap(true, Ordering::AcqRel) {
                    return refuse(
                        Reason::StaleAttempt,
                        format!("transfer {key} has its data stream already"),
                    );
                }
                Ok(Some(hand_off))
            }
            Found::Ended(Ending::Failed(failure)) => Err(failure),
            Found::Ended(Ending::Finished) => Ok(None),
            Found::Ended(Ending::Done) | Found::Unknown => refuse(
                Reason::StaleAttempt,
                format!("transfer {key} has ended, its pages are released"),
            ),
        }
    }
}
