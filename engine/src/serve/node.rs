//! One engine: scheduler, both ends of transfer, the two watchdogs, and its identity.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures::StreamExt;
use tandem_telemetry::{Metrics, Readiness, State, Traces};
use tandem_wire::proto::engine_server::EngineServer;
use tandem_wire::{BootId, Failure, Reason};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::admin::{AdminPort, OpenPort};
use super::engine::EngineService;
use super::knobs::AllKnobs;
use super::listen::{self, ListenError, Reserved};
use super::monitor::Monitor;
use crate::exec::Executor;
use crate::sched::{Health, Role, SchedKnobs, Scheduler, StartError};
use crate::transfer::{
    KeepAlive, Puller, PullerConfig, Source, SourceConfig, Sweep, Tally, TimerValues, Timers, TransferMetrics, Watchdog,
};

/// A request's message holds at most this many bytes for a token id.
const TOKEN_BYTES: usize = 5;
/// A prompt so much longer than the longest that can run is still read, so that the answer names both lengths.
const LENGTH_ROOM: usize = 4;
/// What a message holds beside the prompt.
const MESSAGE_ROOM: usize = 4 << 20;
/// Calls of one connection at once. More would wait in the caller's HTTP/2 stack, where nobody sees them; hyper's default
/// of 200 is less than the sequences that an engine may run.
const CONTROL_STREAMS: u32 = 16_384;
/// Once all is over, connections get this long to take their last bytes.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A caller that reads nothing for so long is left, though it may answer pings.
pub const READER_STALL: Duration = Duration::from_secs(30);

/// What an engine is set up with.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// What it is for.
    pub role: Role,
    /// Its model's name, if not the file's own.
    pub served_name: Option<String>,
    /// The scheduler's knobs.
    pub knobs: SchedKnobs,
    /// The transfer's timers.
    pub timers: TimerValues,
    /// Pings, to and from peers.
    pub keep_alive: KeepAlive,
    /// A caller that reads nothing of its answer for so long is left.
    pub reader_stall: Duration,
    /// Where decode engines reach the data port; `None`: its port on the host that they dialled.
    pub advertise: Option<String>,
    /// Where spans begin.
    pub traces: Traces,
}

/// Where an engine listens: addresses that are taken and not yet open.
#[derive(Debug)]
pub struct Ports {
    /// `Engine`, `KvTransfer.Prefill`, health.
    pub control: Reserved,
    /// `KvTransfer.Fetch`; used by a role that hands KV out.
    pub data: Option<Reserved>,
    /// `Admin`.
    pub admin: Option<AdminPort>,
}

/// Why an engine did not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// An address cannot be had.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The scheduler did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// No thread.
    #[error("cannot start a watchdog's thread: {0}")]
    Thread(std::io::Error),
    /// The control port's server ended.
    #[error("the gRPC server ended: {0}")]
    Server(#[from] tonic::transport::Error),
    /// The scheduler ended or hangs.
    #[error("this engine is dead: {0}")]
    Dead(String),
}

/// What the services share.
pub(super) struct Shared {
    pub(super) boot_id: BootId,
    pub(super) scheduler: Scheduler,
    pub(super) timers: Timers,
    pub(super) puller: Arc<Puller>,
    pub(super) tally: Arc<Tally>,
    pub(super) model_name: String,
    pub(super) admin_endpoint: String,
    pub(super) reader_stall: Duration,
    pub(super) started: Instant,
    pub(super) readiness: Readiness,
    pub(super) traces: Traces,
    /// Nothing is answered any more …
    pub(super) closing: CancellationToken,
    /// … because of this, if not because the process was told to end.
    death: OnceLock<String>,
    /// Requests under way, until their last event is taken: they outlive the places and pages that they held.
    pub(super) requests: TaskTracker,
    pub(super) under_way: watch::Sender<usize>,
    /// Knobs are read, changed and written under this lock.
    pub(super) knobs: parking_lot::Mutex<()>,
    /// The process is on its way out: a drain that a caller ends does not end this one.
    ending: AtomicBool,
    source: Option<Source>,
}

/// A running engine.
pub struct Node {
    shared: Arc<Shared>,
    keep_alive: KeepAlive,
    control: tokio::net::TcpListener,
    data: Option<tokio::net::TcpListener>,
    admin: Option<OpenPort>,
    control_addr: SocketAddr,
    data_addr: Option<SocketAddr>,
    _watchdog: Watchdog,
    monitor: Monitor,
}

/// Ends a node from outside.
#[derive(Clone)]
pub struct NodeHandle(Arc<Shared>);

impl Node {
    /// Starts everything and listens; requests are answered once [`Node::run`] runs.
    pub fn start(
        executor: Box<dyn Executor>,
        config: NodeConfig,
        ports: Ports,
        metrics: &Metrics,
        readiness: &Readiness,
    ) -> Result<Self, NodeError> {
        let Ports { control, data, admin } = ports;
        let boot_id = BootId::random();
        let scheduler = Scheduler::start(executor, config.role, config.knobs)?;
        metrics.part("engine", |registry| scheduler.register(registry));
        let timers = Timers::new(config.timers);
        let transfer_metrics = TransferMetrics::register(metrics);
        let tally = transfer_metrics.tally(config.role);
        let puller = Puller::new(PullerConfig {
            boot_id,
            spec: Arc::new(scheduler.spec().clone()),
            store: Arc::clone(scheduler.kv()),
            timers: timers.clone(),
            keep_alive: config.keep_alive,
            metrics: transfer_metrics.clone(),
        });
        let data = data.filter(|_| config.role.hands_out());
        let data_addr = data.as_ref().map(Reserved::addr);
        let source = data_addr.map(|addr| {
            let advertise = config.advertise.unwrap_or_else(|| format!(":{}", addr.port()));
            let config = SourceConfig {
                boot_id,
                advertise,
                timers: timers.clone(),
                metrics: transfer_metrics,
                traces: config.traces.clone(),
            };
            Source::new(scheduler.clone(), config)
        });
        let swept: Vec<Arc<dyn Sweep>> = [Some(puller.swept()), source.as_ref().map(Source::swept)]
            .into_iter()
            .flatten()
            .collect();
        let watchdog = Watchdog::start(timers.clone(), swept).map_err(NodeError::Thread)?;
        let monitor =
            Monitor::start(scheduler.clone(), timers.clone(), readiness.clone()).map_err(NodeError::Thread)?;
        let model_name = config.served_name.unwrap_or_else(|| scheduler.spec().name.clone());
        let control_addr = control.addr();
        let admin_endpoint = admin.as_ref().map(AdminPort::endpoint).unwrap_or_default();
        Ok(Self {
            keep_alive: config.keep_alive,
            control: control.open()?,
            data: data.map(Reserved::open).transpose()?,
            admin: admin.map(AdminPort::open).transpose()?,
            control_addr,
            data_addr,
            _watchdog: watchdog,
            monitor,
            shared: Arc::new(Shared {
                boot_id,
                scheduler,
                timers,
                puller,
                tally,
                model_name,
                admin_endpoint,
                reader_stall: config.reader_stall,
                started: Instant::now(),
                readiness: readiness.clone(),
                traces: config.traces,
                closing: CancellationToken::new(),
                death: OnceLock::new(),
                requests: TaskTracker::new(),
                under_way: watch::Sender::new(0),
                knobs: parking_lot::Mutex::new(()),
                ending: AtomicBool::new(false),
                source,
            }),
        })
    }

    /// Where the control port listens.
    pub fn control_addr(&self) -> SocketAddr {
        self.control_addr
    }

    /// Where the data port listens, if there is one.
    pub fn data_addr(&self) -> Option<SocketAddr> {
        self.data_addr
    }

    /// Where the admin port listens, if there is one.
    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(OpenPort::addr)
    }

    /// This process.
    pub fn boot_id(&self) -> BootId {
        self.shared.boot_id
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &Scheduler {
        &self.shared.scheduler
    }

    /// To end it from outside.
    pub fn handle(&self) -> NodeHandle {
        NodeHandle(Arc::clone(&self.shared))
    }

    /// Serves until [`NodeHandle::close`] (then `Ok`), or until the scheduler is dead.
    pub async fn run(self) -> Result<(), NodeError> {
        let shared = self.shared;
        let closing = shared.closing.clone();
        let connections = TaskTracker::new();
        if let (Some(listener), Some(source)) = (self.data, &shared.source) {
            connections.spawn(listen::serve_data(
                listener,
                source.data(),
                self.keep_alive,
                closing.clone(),
                connections.clone(),
            ));
        }
        if let Some(admin) = self.admin {
            connections.spawn(admin.serve(Arc::clone(&shared), self.keep_alive, closing.clone()));
        }
        let (reporter, health) = tonic_health::server::health_reporter();
        let following = tokio::spawn(report(reporter, shared.readiness.clone(), closing.clone()));
        let longest = shared.scheduler.spec().max_length_tokens as usize;
        let engine = EngineServer::new(EngineService(Arc::clone(&shared)))
            .max_decoding_message_size(longest * TOKEN_BYTES * LENGTH_ROOM + MESSAGE_ROOM);
        let control = self.control;
        let incoming = futures::stream::unfold(control, |listener| async {
            let stream = listen::accept(&listener).await;
            Some((Ok::<_, std::io::Error>(stream), listener))
        });
        let server = self
            .keep_alive
            .server()
            .max_concurrent_streams(Some(CONTROL_STREAMS))
            .add_service(health)
            .add_service(engine)
            .add_optional_service(shared.source.as_ref().map(Source::control))
            .serve_with_incoming_shutdown(incoming.boxed(), closing.clone().cancelled_owned());
        shared.readiness.set(State::Ready);

        let mut health = shared.scheduler.health();
        let died = async {
            match health.wait_for(|h| matches!(h, Health::Dead(_))).await.as_deref() {
                Ok(Health::Dead(why)) => why.to_string(),
                Ok(Health::Alive) | Err(_) => "the scheduler is gone".to_owned(),
            }
        };
        tokio::pin!(server);
        let mut server_runs = true;
        let result = tokio::select! {
            biased;
            () = closing.cancelled() => Ok(()),
            ended = &mut server => {
                server_runs = false;
                ended.map_err(NodeError::from)
            }
            why = died => {
                shared.readiness.set(State::Failed { reason: why.clone() });
                let _ = shared.death.set(why.clone());
                Err(NodeError::Dead(why))
            }
        };
        // from here on a scheduler that ends is no failure
        drop(self.monitor);
        closing.cancel();
        shared.scheduler.shut_down();
        let last = async {
            shared.requests.close();
            shared.requests.wait().await;
            if let Some(source) = &shared.source {
                source.close().await;
            }
            shared.puller.close().await;
            if server_runs {
                let _ = server.await;
            }
            connections.close();
            connections.wait().await;
        };
        if tokio::time::timeout(LAST_WORDS, last).await.is_err() {
            tracing::info!("some connections did not take their last bytes in time");
        }
        let _ = following.await;
        result
    }
}

/// grpc.health.v1 says what readiness says.
async fn report(reporter: tonic_health::server::HealthReporter, readiness: Readiness, closing: CancellationToken) {
    let mut states = readiness.subscribe();
    loop {
        let status = if states.borrow_and_update().is_ready() {
            tonic_health::ServingStatus::Serving
        } else {
            tonic_health::ServingStatus::NotServing
        };
        for service in ["", "tandem.v1.Engine", "tandem.v1.KvTransfer"] {
            reporter.set_service_status(service, status).await;
        }
        tokio::select! {
            changed = states.changed() => if changed.is_err() { return },
            () = closing.cancelled() => return,
        }
    }
}

impl Shared {
    pub(super) fn all_knobs(&self) -> AllKnobs {
        AllKnobs {
            sched: self.scheduler.knobs(),
            timers: self.timers.get(),
        }
    }

    pub(super) fn failure(&self, reason: Reason, detail: impl Into<String>) -> Failure {
        self.scheduler.metrics().failure(reason);
        Failure::new(reason, self.scheduler.role().source(), detail)
    }

    /// Does the caller mean this process?
    pub(super) fn check_boot(&self, meant: &[u8]) -> Result<(), Failure> {
        if meant == self.boot_id.as_bytes() {
            return Ok(());
        }
        self.scheduler.metrics().failure(Reason::StaleBoot);
        Err(Failure::stale_boot(self.scheduler.role().source(), meant, self.boot_id))
    }

    /// What a request is told that is still under way when all closes.
    pub(super) fn last_word(&self) -> Failure {
        match self.death.get() {
            Some(why) => self.failure(Reason::Internal, format!("this engine is dead: {why}")),
            None => self.failure(Reason::Draining, "this engine is shutting down; use another"),
        }
    }

    /// Admission is closed, or opened again.
    pub(super) fn set_draining(&self, draining: bool) {
        if self.ending.load(Ordering::Acquire) {
            return;
        }
        self.scheduler.set_draining(draining);
        self.readiness.set(if draining {
            State::Waiting {
                reason: "drained by request; Drain with resume ends it".to_owned(),
            }
        } else {
            State::Ready
        });
    }

    /// What is not over yet.
    pub(super) fn remaining(&self) -> u32 {
        self.scheduler.remaining().max(*self.under_way.borrow() as u32)
    }

    /// Waits until nothing is under way, at most until `deadline`; says how much is left.
    pub(super) async fn drained(&self, deadline: tokio::time::Instant) -> u32 {
        let (mut load, mut under_way) = (self.scheduler.load(), self.under_way.subscribe());
        let empty = async {
            loop {
                load.borrow_and_update();
                under_way.borrow_and_update();
                if self.remaining() == 0 {
                    return;
                }
                // neither sender goes before `self`
                tokio::select! {
                    _ = load.changed() => {}
                    _ = under_way.changed() => {}
                }
            }
        };
        let _ = tokio::time::timeout_at(deadline, empty).await;
        self.remaining()
    }
}

/// Counts a request until dropped.
pub(super) struct UnderWay(Arc<Shared>);

impl UnderWay {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        shared.under_way.send_modify(|n| *n += 1);
        Self(Arc::clone(shared))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.send_modify(|n| *n -= 1);
    }
}

impl NodeHandle {
    /// Refuses what is new and waits for what is old; says how much is left after `limit`. Cannot be taken back.
    pub async fn drain(&self, limit: Duration) -> u32 {
        self.0.readiness.set(State::Draining);
        self.0.scheduler.set_draining(true);
        self.0.ending.store(true, Ordering::Release);
        self.0.drained(tokio::time::Instant::now() + limit).await
    }

    /// Requests whose caller has not taken the last event yet.
    pub fn under_way(&self) -> usize {
        *self.0.under_way.borrow()
    }

    /// Ends [`Node::run`]: what is still under way fails.
    pub fn close(&self) {
        self.0.closing.cancel();
    }
}
