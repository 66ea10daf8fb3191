//! Two engines on loopback, as `serve` puts them together.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tandem_engine::exec::SampleParams;
use tandem_engine::sched::{Admission, First, GenParams, Role, SchedKnobs, Scheduler, SeqEvent, Stops};
use tandem_engine::transfer::{
    KeepAlive, Phase, PullRequest, Pulled, Puller, PullerConfig, Source, SourceConfig, TimerValues, Timers,
    TransferMetrics, Watchdog,
};
use tandem_telemetry::{Metrics, TraceParent, Traces};
use tandem_wire::{BootId, Failure, Reason, TransferId, TransferKey, proto};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::TcpListenerStream;

use super::relay::Relay;
use crate::support::fake::{FakeConfig, FakeControl, FakeExecutor};

pub const GREEDY: SampleParams = SampleParams::GREEDY;

/// Far longer than any test waits: a timer that a test does not mean must not fire in it.
pub const LONG: Duration = Duration::from_mins(10);

/// How an engine is set up.
#[derive(Debug, Clone)]
pub struct Setup {
    pub fake: FakeConfig,
    pub knobs: SchedKnobs,
    pub timers: TimerValues,
    pub keep_alive: KeepAlive,
    /// Worker threads of prefill's runtime.
    pub workers: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            fake: FakeConfig::default(),
            knobs: SchedKnobs {
                chunked_prefill_tokens: 64,
                queue_ms: LONG.as_millis() as u64,
                ..SchedKnobs::default()
            },
            timers: TimerValues {
                queue: LONG,
                rendezvous: LONG,
                progress: LONG,
                stall: LONG,
                watchdog: LONG,
                lease: LONG,
            },
            keep_alive: KeepAlive {
                interval: LONG,
                timeout: LONG,
            },
            workers: 1,
        }
    }
}

impl Setup {
    pub fn timers(mut self, change: impl FnOnce(&mut TimerValues)) -> Self {
        change(&mut self.timers);
        self
    }
    pub fn knobs(mut self, change: impl FnOnce(&mut SchedKnobs)) -> Self {
        change(&mut self.knobs);
        self
    }
    pub fn fake(mut self, change: impl FnOnce(&mut FakeConfig)) -> Self {
        change(&mut self.fake);
        self
    }
}

/// A prefill on a runtime of its own, so that it can die, or stand still, as a whole.
pub struct Prefill {
    pub boot_id: BootId,
    pub scheduler: Scheduler,
    pub fake: FakeControl,
    pub source: Source,
    pub metrics: Metrics,
    pub control: SocketAddr,
    pub data: SocketAddr,
    runtime: Option<Runtime>,
    _watchdog: Watchdog,
}

impl Prefill {
    pub async fn start(setup: &Setup) -> Self {
        Self::start_at(setup, "127.0.0.1:0".parse().unwrap(), None).await
    }

    /// Hand-offs in a state, by prefill's own gauge.
    pub fn inflight(&self, state: &str) -> u64 {
        metric(&self.metrics, "tandem_transfer_inflight", &["prefill", state]) as u64
    }

    /// Listens on `control`; decodes are sent to `advertise` (or the data port itself) for the data.
    pub async fn start_at(setup: &Setup, control: SocketAddr, advertise: Option<SocketAddr>) -> Self {
        let (executor, fake) = FakeExecutor::new(&setup.fake);
        let scheduler = Scheduler::start(Box::new(executor), Role::Prefill, setup.knobs).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(setup.workers)
            .enable_all()
            .build()
            .unwrap();
        let boot_id = BootId::random();
        let timers = Timers::new(setup.timers);
        let metrics = Metrics::new("test", "0");
        let (control_port, data_port) = runtime
            .spawn(async move {
                let data = TcpListener::bind("127.0.0.1:0").await.unwrap();
                (bind(control).await, data)
            })
            .await
            .unwrap();
        let (control, data) = (control_port.local_addr().unwrap(), data_port.local_addr().unwrap());
        let source = Source::new(
            scheduler.clone(),
            SourceConfig {
                boot_id,
                advertise: format!(":{}", advertise.unwrap_or(data).port()),
                timers: timers.clone(),
                metrics: TransferMetrics::register(&metrics),
                traces: Traces::off(),
            },
        );
        let watchdog = Watchdog::start(timers.clone(), vec![source.swept()]).unwrap();
        let server = |keep_alive: KeepAlive| keep_alive.server();
        runtime.spawn(
            server(setup.keep_alive)
                .add_service(source.control())
                .serve_with_incoming(TcpListenerStream::new(control_port)),
        );
        runtime.spawn(
            server(setup.keep_alive)
                .add_service(source.data())
                .serve_with_incoming(TcpListenerStream::new(data_port)),
        );
        Self {
            boot_id,
            scheduler,
            fake,
            source,
            metrics,
            control,
            data,
            runtime: Some(runtime),
            _watchdog: watchdog,
        }
    }

    pub fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().unwrap()
    }

    pub fn peer(&self) -> (String, BootId) {
        (self.control.to_string(), self.boot_id)
    }

    /// Every socket closes at once, every task ends where it stands.
    pub async fn kill(&mut self) {
        let runtime = self.runtime.take().unwrap();
        tokio::task::spawn_blocking(move || runtime.shutdown_timeout(Duration::from_secs(20)))
            .await
            .unwrap();
    }

    pub async fn idle(&self) {
        eventually("prefill holds nothing", || {
            self.source.live() == 0 && self.scheduler.cache().stats().held == 0 && self.scheduler.remaining() == 0
        })
        .await;
        assert_inflight_is_zero(&self.metrics);
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        // a paused executor would keep the scheduler's thread, and its owner waits for that
        self.fake.resume();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The port may take a moment to be free again.
async fn bind(addr: SocketAddr) -> TcpListener {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match TcpListener::bind(addr).await {
            Ok(listener) => return listener,
            Err(e) => assert!(Instant::now() < deadline, "cannot bind {addr}: {e}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A decode on the test's runtime.
pub struct Decode {
    pub scheduler: Scheduler,
    pub puller: Arc<Puller>,
    pub timers: Timers,
    pub metrics: Metrics,
    fake: FakeControl,
    _watchdog: Watchdog,
}

/// What a request came to.
#[derive(Debug, Clone)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub pulled: Pulled,
    /// Prompt tokens that decode computed.
    pub computed_tokens: u32,
}

/// One request.
#[derive(Debug, Clone)]
pub struct Ask {
    pub prompt: Arc<[u32]>,
    pub new_tokens: u32,
    pub sampling: SampleParams,
    pub remaining: Option<Duration>,
    pub key: TransferKey,
}

impl Ask {
    pub fn new(prompt: impl IntoIterator<Item = u32>, new_tokens: u32) -> Self {
        Self {
            prompt: prompt.into_iter().collect(),
            new_tokens,
            sampling: GREEDY,
            remaining: None,
            key: new_key(),
        }
    }
}

pub fn new_key() -> TransferKey {
    TransferKey {
        id: TransferId::random(),
        attempt: 0,
    }
}

impl Decode {
    pub fn start(setup: &Setup) -> Self {
        let (executor, fake) = FakeExecutor::new(&setup.fake);
        let scheduler = Scheduler::start(Box::new(executor), Role::Decode, setup.knobs).unwrap();
        let timers = Timers::new(setup.timers);
        let metrics = Metrics::new("test", "0");
        let puller = Puller::new(PullerConfig {
            boot_id: BootId::random(),
            spec: Arc::new(scheduler.spec().clone()),
            store: Arc::clone(scheduler.kv()),
            timers: timers.clone(),
            keep_alive: setup.keep_alive,
            metrics: TransferMetrics::register(&metrics),
        });
        let watchdog = Watchdog::start(timers.clone(), vec![puller.swept()]).unwrap();
        Self {
            scheduler,
            puller,
            timers,
            metrics,
            fake,
            _watchdog: watchdog,
        }
    }

    /// Admission and hand-off, no generation.
    pub async fn pull_with(
        &self,
        ask: &Ask,
        peer: &(String, BootId),
        phase: impl Fn(Phase) + Send,
    ) -> Result<(Pulled, tandem_engine::sched::Admitted), Failure> {
        let admitted = self.scheduler.admit(&Admission {
            prompt: Arc::clone(&ask.prompt),
            max_new_tokens: ask.new_tokens,
            pulled: true,
        })?;
        let request = PullRequest {
            key: ask.key,
            endpoint: peer.0.clone(),
            boot_id: peer.1,
            prompt: Arc::clone(&ask.prompt),
            pages: Arc::clone(&admitted.pages),
            have_tokens: admitted.pages.cached_tokens(),
            sampling: proto::Sampling {
                temperature: ask.sampling.temperature,
                top_p: ask.sampling.top_p,
                seed: ask.sampling.seed,
                ..proto::Sampling::default()
            },
            stops: Stops {
                stop_token_ids: vec![],
                ignore_eos: true,
                max_new_tokens: ask.new_tokens,
            },
            remaining: ask.remaining,
            request_id: "test".to_owned(),
            stay: self.scheduler.inflight().enter(Phase::Accept),
            trace: TraceParent::default(),
        };
        let pulled = self.puller.pull(request, phase).await?;
        Ok((pulled, admitted))
    }

    /// The whole request.
    pub async fn generate(&self, ask: &Ask, peer: &(String, BootId)) -> Result<Answer, Failure> {
        self.generate_with(ask, peer, |_| {}).await
    }

    pub async fn generate_with(
        &self,
        ask: &Ask,
        peer: &(String, BootId),
        phase: impl Fn(Phase) + Send,
    ) -> Result<Answer, Failure> {
        let (pulled, admitted) = self.pull_with(ask, peer, phase).await?;
        if pulled.finished.is_some() {
            let tokens = vec![pulled.first_token];
            return Ok(Answer {
                tokens,
                pulled,
                computed_tokens: 0,
            });
        }
        let params = GenParams {
            sampling: ask.sampling.into(),
            max_new_tokens: ask.new_tokens,
            stop_token_ids: vec![],
            ignore_eos: true,
            first: Some(First {
                token: pulled.first_token,
                logprob: pulled.first_logprob.clone(),
            }),
            computed: ask.prompt.len() as u32,
            deadline: None,
            stay: None,
            gather: false,
        };
        let mut stream = self.scheduler.generate(admitted, params);
        let mut tokens = Vec::new();
        loop {
            match stream.recv().await.unwrap() {
                SeqEvent::Tokens { ids: more, .. } => tokens.extend(more),
                SeqEvent::Failed(failure) => return Err(failure),
                SeqEvent::Finished(finish) => {
                    return Ok(Answer {
                        tokens,
                        pulled,
                        computed_tokens: finish.computed_tokens,
                    });
                }
            }
        }
    }

    pub async fn idle(&self) {
        eventually("decode holds nothing", || {
            self.puller.live() == 0 && self.scheduler.cache().stats().held == 0 && self.scheduler.remaining() == 0
        })
        .await;
        assert_inflight_is_zero(&self.metrics);
    }
}

impl Drop for Decode {
    fn drop(&mut self) {
        self.fake.resume();
    }
}

/// A metric's value as /metrics shows it, found by its name and label values.
pub fn metric(metrics: &Metrics, name: &str, labels: &[&str]) -> f64 {
    let text = metrics.encode().unwrap();
    let line = text
        .lines()
        .find(|l| l.starts_with(name) && labels.iter().all(|v| l.contains(&format!("\"{v}\""))))
        .unwrap_or_else(|| panic!("no {name} {labels:?} in\n{text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

pub fn failures(metrics: &Metrics, side: &str, reason: Reason) -> u64 {
    let code = tandem_wire::reason::meaning(reason).code;
    metric(metrics, "tandem_transfer_failures_total", &[side, code]) as u64
}

fn assert_inflight_is_zero(metrics: &Metrics) {
    let text = metrics.encode().unwrap();
    let inflight: Vec<_> = text
        .lines()
        .filter(|l| l.starts_with("tandem_transfer_inflight{"))
        .collect();
    assert_eq!(inflight.len(), 8, "{text}");
    assert!(inflight.iter().all(|l| l.ends_with(" 0")), "{inflight:?}");
}

/// Waits until `holds`, 20 s at most.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "not within 20 s: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Runs `work`; it must not take as long as any timer that is not meant.
pub async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), work)
        .await
        .unwrap_or_else(|_| panic!("not within 20 s: {what}"))
}

/// A prefill behind two relays, and a decode that reaches it only through them.
pub struct Relayed {
    pub prefill: Prefill,
    pub decode: Arc<Decode>,
    pub control: Relay,
    pub data: Relay,
}

impl Relayed {
    pub async fn start(setup: &Setup) -> Self {
        Self::start_with(setup, setup).await
    }

    /// Prefill's setup, then decode's.
    pub async fn start_with(prefill: &Setup, decode: &Setup) -> Self {
        let (control, data) = (Relay::start().await, Relay::start().await);
        let prefill = Prefill::start_at(prefill, "127.0.0.1:0".parse().unwrap(), Some(data.addr)).await;
        control.forward_to(prefill.control);
        data.forward_to(prefill.data);
        Self {
            prefill,
            decode: Arc::new(Decode::start(decode)),
            control,
            data,
        }
    }

    pub fn peer(&self) -> (String, BootId) {
        (self.control.addr.to_string(), self.prefill.boot_id)
    }

    pub fn begin(&self, ask: &Ask) -> Running {
        Running::begin(&self.decode, ask, self.peer())
    }

    pub async fn idle(&self) {
        self.decode.idle().await;
        self.prefill.idle().await;
    }
}

/// A request that runs beside the test.
pub struct Running {
    pub task: JoinHandle<Result<Answer, Failure>>,
    phase: watch::Receiver<Option<Phase>>,
    begun: Instant,
}

impl Running {
    pub fn begin(decode: &Arc<Decode>, ask: &Ask, peer: (String, BootId)) -> Self {
        let (decode, ask) = (Arc::clone(decode), ask.clone());
        let (told, phase) = watch::channel(None);
        let task = tokio::spawn(async move {
            decode
                .generate_with(&ask, &peer, |p| {
                    told.send_replace(Some(p));
                })
                .await
        });
        Self {
            task,
            phase,
            begun: Instant::now(),
        }
    }

    pub async fn reached(&mut self, phase: Phase) {
        soon("a phase", self.phase.wait_for(|p| *p == Some(phase)))
            .await
            .unwrap();
    }

    /// How it ended, and after how long.
    pub async fn end(self) -> (Result<Answer, Failure>, Duration) {
        let result = soon("the request's end", self.task).await.unwrap();
        (result, self.begun.elapsed())
    }

    pub async fn failure(self) -> (Failure, Duration) {
        let (result, after) = self.end().await;
        (result.expect_err("must fail"), after)
    }

    /// The request's owner goes.
    pub async fn drop_it(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }
}
