//! An engine that answers by script, over real gRPC, and remembers what it was asked.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use futures::Stream;
use parking_lot::Mutex;
use tandem_router::text::Text;
use tandem_wire::layout::KvDtype;
use tandem_wire::proto::engine_server::{Engine, EngineServer};
use tandem_wire::proto::generate_event::Event;
use tandem_wire::proto::{
    EngineInfo, Finished, GenerateEvent, GenerateRequest, GetInfoRequest, Knobs, Load, Logprob, Phase, Role, Started,
    Tokens, Usage, WatchLoadRequest, finished, phase,
};
use tandem_wire::{BootId, Failure, KvLayout, Reason, Source};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, watch};
use tonic::{Request, Response, Status};

use super::PATIENCE;

/// The tokenizer of all these tests: has every byte as a token, and a chat template.
pub static TEXT: LazyLock<Text> = LazyLock::new(|| Text::load(&tokenizer()).unwrap());

pub fn tokenizer() -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny.gguf")
}

/// Token ids of `text`, one token for each character of ASCII.
pub fn ids(text: &str) -> Vec<u32> {
    text.chars()
        .flat_map(|c| TEXT.encode(&c.to_string(), false).unwrap())
        .collect()
}

/// What this engine says of a token: made up, another of each.
pub fn score(id: u32, top: u32) -> Logprob {
    Logprob {
        logprob: id as f32 / -64.0,
        top_ids: (0..top).map(|at| (id + 1 + at) % 526).collect(),
        top_logprobs: (0..top).map(|at| at as f32 / -8.0).collect(),
    }
}

/// A step of an answer.
#[derive(Debug, Clone)]
pub enum Step {
    Started,
    Phase(phase::Kind),
    /// This text: a message for each token, or one for all where the caller wants tokens gathered.
    Spell(&'static str),
    /// The prompt again, in the same way.
    Echo,
    /// This text without log-probabilities, whatever the caller wants.
    Bare(&'static str),
    /// Waits until the test lets it go on.
    Hold,
    Finish(finished::Cause),
    /// The same by an engine that had to prefill in the stead of the one it was given.
    Recomputed,
    /// A failure as last message.
    Fail(Failure),
    /// A failure instead of a stream; only as first step.
    Refuse(Failure),
    /// A status without a failure in it, as a broken connection gives it.
    Break,
    /// The end of the stream without a last message.
    Cut,
    /// A message of a newer engine, which has no arm that we know.
    Unknown,
    /// Endless tokens, as fast as they are taken.
    Flood,
}

/// What an engine was asked, and how it stands.
pub struct Mock {
    pub addr: SocketAddr,
    inner: Arc<Inner>,
    runtime: Option<Runtime>,
}

struct Inner {
    boot: BootId,
    shape: Shape,
    scripts: Mutex<VecDeque<Vec<Step>>>,
    standing: Mutex<Vec<Step>>,
    calls: Mutex<Vec<GenerateRequest>>,
    /// Calls begun in all, calls open now.
    counts: watch::Sender<(usize, usize)>,
    gate: Semaphore,
    load: watch::Sender<Load>,
    infos: watch::Sender<usize>,
    /// Calls whose answer was read to its end.
    ended: watch::Sender<usize>,
}

/// What an engine says about itself.
#[derive(Debug, Clone)]
pub struct Shape {
    pub role: Role,
    pub model_hash: u8,
    pub max_running: u32,
    pub max_length_tokens: u32,
    /// Between two tokens.
    pub token_ms: u64,
    /// Keeps what it was asked.
    pub remembers: bool,
    /// Reports its load at most so often; ours do every 100 ms.
    pub load_ms: u64,
    /// Reports its load only where it is told to, not at each of its calls.
    pub told: bool,
    /// Reports its load once and never again.
    pub mute: bool,
    /// Where its admin port is.
    pub admin_endpoint: String,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            role: Role::Decode,
            model_hash: 1,
            max_running: 4,
            max_length_tokens: 512,
            token_ms: 0,
            remembers: true,
            load_ms: 0,
            told: false,
            mute: false,
            admin_endpoint: String::new(),
        }
    }
}

pub fn decode() -> Mock {
    Mock::start(Shape::default())
}

pub fn prefill() -> Mock {
    Mock::start(Shape {
        role: Role::Prefill,
        ..Shape::default()
    })
}

pub fn unified() -> Mock {
    Mock::start(Shape {
        role: Role::Unified,
        ..Shape::default()
    })
}

pub fn failure(reason: Reason, source: Source) -> Failure {
    Failure::new(reason, source, format!("scripted {reason:?}"))
}

/// An answer that says `text`, a token at a time.
pub fn spell(text: &'static str) -> Vec<Step> {
    vec![Step::Started, Step::Spell(text), Step::Finish(finished::Cause::Stop)]
}

impl Mock {
    pub fn start(shape: Shape) -> Self {
        Self::start_on(shape, "127.0.0.1:0".parse().unwrap())
    }

    /// Another incarnation on a given address.
    pub fn start_on(shape: Shape, addr: SocketAddr) -> Self {
        let inner = Arc::new(Inner {
            boot: BootId::random(),
            shape,
            scripts: Mutex::default(),
            standing: Mutex::new(spell("Paris")),
            calls: Mutex::default(),
            counts: watch::Sender::new((0, 0)),
            gate: Semaphore::new(0),
            load: watch::Sender::new(Load::default()),
            infos: watch::Sender::new(0),
            ended: watch::Sender::new(0),
        });
        // a runtime of its own, so that dropping it closes every socket as a killed process does
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = std::net::TcpListener::bind(addr).unwrap_or_else(|error| panic!("{addr}: {error}"));
        listener.set_nonblocking(true).unwrap();
        let addr = listener.local_addr().unwrap();
        let service = EngineServer::new(Service(Arc::clone(&inner)));
        runtime.spawn(async move {
            let incoming =
                tonic::transport::server::TcpIncoming::from(tokio::net::TcpListener::from_std(listener).unwrap());
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(incoming)
                .await
        });
        Self {
            addr,
            inner,
            runtime: Some(runtime),
        }
    }

    pub fn endpoint(&self) -> String {
        self.addr.to_string()
    }

    pub fn boot(&self) -> BootId {
        self.inner.boot
    }

    /// The answer to the next call that has none yet.
    pub fn then(&self, script: Vec<Step>) -> &Self {
        self.inner.scripts.lock().push_back(script);
        self
    }

    /// The answer to all calls beyond those.
    pub fn always(&self, script: Vec<Step>) -> &Self {
        *self.inner.standing.lock() = script;
        self
    }

    pub fn fails_with(&self, reason: Reason, source: Source) -> &Self {
        self.then(vec![Step::Started, Step::Fail(failure(reason, source))])
    }

    /// Lets one held step go on.
    pub fn release(&self) {
        self.inner.gate.add_permits(1);
    }

    /// A load beside that of the calls it has.
    pub fn report(&self, load: Load) {
        self.inner.load.send_replace(load);
    }

    pub fn calls(&self) -> Vec<GenerateRequest> {
        self.inner.calls.lock().clone()
    }

    pub fn open(&self) -> usize {
        self.inner.counts.borrow().1
    }

    /// How often it was asked who it is.
    pub fn infos(&self) -> usize {
        *self.inner.infos.borrow()
    }

    /// Waits until `begun` calls have begun in all.
    pub async fn called(&self, begun: usize) {
        let mut counts = self.inner.counts.subscribe();
        let reached = counts.wait_for(|counts| counts.0 >= begun);
        tokio::time::timeout(PATIENCE, reached)
            .await
            .expect("the engine was never called")
            .unwrap();
    }

    /// Waits until so many calls were read to their end, which is after their last message.
    pub async fn ended(&self, calls: usize) {
        let mut ended = self.inner.ended.subscribe();
        let reached = ended.wait_for(|ended| *ended >= calls);
        tokio::time::timeout(PATIENCE, reached)
            .await
            .expect("a call that went well was cut off before its end")
            .unwrap();
    }

    /// Waits until no call is open; gives how long that took.
    pub async fn idle(&self) -> Duration {
        let since = Instant::now();
        let mut counts = self.inner.counts.subscribe();
        let reached = counts.wait_for(|counts| counts.1 == 0);
        tokio::time::timeout(PATIENCE, reached)
            .await
            .expect("a call to the engine was never cancelled")
            .unwrap();
        since.elapsed()
    }

    /// As `kill -9` does.
    pub fn kill(mut self) -> SocketAddr {
        if let Some(runtime) = self.runtime.take() {
            // a runtime may not wait inside another
            std::thread::spawn(move || runtime.shutdown_timeout(PATIENCE))
                .join()
                .unwrap();
        }
        self.addr
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

struct Service(Arc<Inner>);

/// Counts a call for as long as it is open.
struct Open(Arc<Inner>);

impl Open {
    fn new(inner: &Arc<Inner>) -> Self {
        inner.counts.send_modify(|(begun, open)| {
            *begun += 1;
            *open += 1;
        });
        Self(Arc::clone(inner))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.counts.send_modify(|(_, open)| *open -= 1);
    }
}

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Engine for Service {
    type GenerateStream = Events<GenerateEvent>;
    type WatchLoadStream = Events<Load>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let open = Open::new(&self.0);
        let request = request.into_inner();
        if request.boot_id != self.0.boot.to_wire() {
            return Err(Failure::stale_boot(Source::Decode, &request.boot_id, self.0.boot).to_status());
        }
        let script = self
            .0
            .scripts
            .lock()
            .pop_front()
            .unwrap_or_else(|| self.0.standing.lock().clone());
        let (prompt, gathered) = (request.prompt_tokens.len() as u32, request.batch_tokens);
        let top = request.sampling.as_ref().and_then(|sampling| sampling.logprobs);
        let echo = request.prompt_tokens.clone();
        if self.0.shape.remembers {
            self.0.calls.lock().push(request);
        }
        let mut steps = script.into_iter().peekable();
        // before the head of the answer
        while let Some(step) = steps.next_if(|step| matches!(step, Step::Hold | Step::Refuse(_))) {
            match step {
                Step::Refuse(failure) => return Err(failure.to_status()),
                _ => self.0.gate.acquire().await.unwrap().forget(),
            }
        }
        let inner = Arc::clone(&self.0);
        let events = async_stream::stream! {
            let _open = open;
            let mut said = 0;
            for step in steps {
                let event = |event| Ok(GenerateEvent { event: Some(event) });
                match step {
                    Step::Started => yield event(Event::Started(Started { boot_id: inner.boot.to_wire() })),
                    Step::Phase(kind) => yield event(Event::Phase(Phase { kind: kind.into() })),
                    Step::Spell(_) | Step::Echo | Step::Bare(_) => {
                        let (ids, top) = match step {
                            Step::Spell(text) => (ids(text), top),
                            Step::Bare(text) => (ids(text), None),
                            _ => (echo.clone(), top),
                        };
                        said += ids.len() as u32;
                        let size = if gathered { ids.len() } else { 1 };
                        for ids in ids.chunks(size) {
                            let logprobs = top.map(|top| ids.iter().map(|&id| score(id, top)).collect());
                            yield event(Event::Tokens(Tokens { ids: ids.to_vec(), logprobs: logprobs.unwrap_or_default() }));
                            if inner.shape.token_ms > 0 {
                                tokio::time::sleep(Duration::from_millis(inner.shape.token_ms)).await;
                            }
                        }
                    }
                    Step::Flood => {
                        let ids = ids("flood ").repeat(64);
                        loop {
                            yield event(Event::Tokens(Tokens { ids: ids.clone(), ..Tokens::default() }));
                        }
                    }
                    Step::Hold => inner.gate.acquire().await.unwrap().forget(),
                    Step::Finish(_) | Step::Recomputed => {
                        let (cause, recomputed) = match step {
                            Step::Finish(cause) => (cause, false),
                            _ => (finished::Cause::Stop, true),
                        };
                        let usage = Usage {
                            prompt_tokens: prompt,
                            cached_tokens: 3,
                            completion_tokens: said,
                            recomputed,
                            ..Usage::default()
                        };
                        yield event(Event::Finished(Finished { cause: cause.into(), usage: Some(usage) }));
                    }
                    Step::Fail(failure) => yield event(Event::Failure(failure.to_wire())),
                    Step::Refuse(failure) => yield Err(failure.to_status()),
                    Step::Break => yield Err(Status::unavailable("scripted break")),
                    Step::Unknown => yield Ok(GenerateEvent { event: None }),
                    Step::Cut => return,
                }
            }
            inner.ended.send_modify(|ended| *ended += 1);
        };
        Ok(Response::new(Box::pin(events)))
    }

    async fn get_info(&self, _: Request<GetInfoRequest>) -> Result<Response<EngineInfo>, Status> {
        self.0.infos.send_modify(|infos| *infos += 1);
        let shape = &self.0.shape;
        Ok(Response::new(EngineInfo {
            boot_id: self.0.boot.to_wire(),
            role: shape.role.into(),
            version: "test".into(),
            model_name: "tiny".into(),
            model_hash: vec![shape.model_hash; 32].into(),
            layout: Some(KvLayout::heads(2, 2, 8, KvDtype::F16, 16).to_wire()),
            max_length_tokens: shape.max_length_tokens,
            vocab_size: 526,
            backend: "mock".into(),
            knobs: Some(Knobs {
                max_running: Some(shape.max_running),
                prefill_queue: Some(2),
                ..Knobs::default()
            }),
            total_pages: 1_000,
            uptime_ms: 1,
            end_token_ids: vec![2],
            admin_endpoint: shape.admin_endpoint.clone(),
            handoffs: None,
        }))
    }

    async fn watch_load(&self, request: Request<WatchLoadRequest>) -> Result<Response<Self::WatchLoadStream>, Status> {
        if request.get_ref().boot_id != self.0.boot.to_wire() {
            return Err(Failure::stale_boot(Source::Decode, &request.get_ref().boot_id, self.0.boot).to_status());
        }
        let Shape {
            role,
            told,
            mute,
            load_ms,
            ..
        } = self.0.shape;
        let (mut load, mut counts) = (self.0.load.subscribe(), self.0.counts.subscribe());
        let events = async_stream::stream! {
            loop {
                let mut now = load.borrow_and_update().clone();
                let open = counts.borrow_and_update().1 as u32;
                now.running += open;
                if role == Role::Decode {
                    // as if each were still being pulled: a part of those that run
                    now.transferring += open;
                }
                yield Ok(now);
                if mute {
                    std::future::pending::<()>().await;
                }
                if load_ms > 0 {
                    tokio::time::sleep(Duration::from_millis(load_ms)).await;
                }
                tokio::select! {
                    _ = load.changed() => {}
                    _ = counts.changed(), if !told => {}
                    // the contract: at least so often, whatever changes
                    () = tokio::time::sleep(Duration::from_millis(100)), if !told => {}
                }
            }
        };
        Ok(Response::new(Box::pin(events)))
    }
}
