//! Prefill and decode.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use tandem_wire::BootId;
use tandem_wire::proto::admin_server::{Admin, AdminServer};
use tandem_wire::proto::engine_server::{Engine as EngineService, EngineServer};
use tandem_wire::proto::{
    self, DrainRequest, DrainResponse, EngineInfo, FailedHandoffs, Failure, Finished, FlushRequest, FlushResponse,
    GenerateEvent, GenerateRequest, GetInfoRequest, Handoffs, KvAxis, KvComponent, KvDtype, KvLayout, Load, Phase,
    Reason, Role, SetKnobsRequest, Source, Started, Tokens, Usage, WatchLoadRequest, generate_event::Event, phase,
};
use tokio::task::JoinSet;
use tokio_stream::wrappers::IntervalStream;
use tonic::metadata::MetadataValue;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

use super::flags::Flags;
use super::ports::{self, Answer};
use super::{Completions, Live, Obeys};

const LAYERS: u32 = 2;
const HEADS: u32 = 1;
const HEAD_DIM: u32 = 8;
/// K and V in two bytes each.
const BYTES_PER_TOKEN: u64 = 2 * 2 * (LAYERS * HEADS * HEAD_DIM) as u64;

struct Engine {
    boot: BootId,
    started: Instant,
    role: Role,
    model: String,
    max_length_tokens: u32,
    page_tokens: u32,
    admin_endpoint: String,
    token: String,
    knobs: Mutex<proto::Knobs>,
    draining: AtomicBool,
    /// KV bytes that came over the wire.
    moved_bytes: AtomicU64,
    /// Hand-offs that finished here.
    handoffs: AtomicU64,
    /// Prompt tokens that were read here.
    prompt_tokens: AtomicU64,
    script: Live,
}

/// Starts one with the arguments of its container.
pub async fn start(flags: &Flags<'_>, token: String, script: Live) -> Result<JoinSet<()>, String> {
    let (control, ops, admin) = (
        flags.listen("listen")?,
        flags.listen("ops-listen")?,
        flags.listen("admin-listen")?,
    );
    let engine = Arc::new(Engine {
        boot: BootId::random(),
        started: Instant::now(),
        role: match flags.text("role") {
            Some("prefill") => Role::Prefill,
            Some("decode") => Role::Decode,
            other => return Err(format!("--role={other:?} is not understood")),
        },
        model: flags.value("served-name")?,
        max_length_tokens: flags.value("max-length-tokens").unwrap_or(8192),
        page_tokens: flags.value("page-tokens")?,
        admin_endpoint: format!(":{}", admin.port()),
        token,
        knobs: Mutex::new(knobs(flags)?),
        draining: AtomicBool::new(false),
        moved_bytes: AtomicU64::new(0),
        handoffs: AtomicU64::new(0),
        prompt_tokens: AtomicU64::new(0),
        script,
    });
    let mut ports = JoinSet::new();
    let served = Serving(Arc::clone(&engine));
    let routes = Routes::new(EngineServer::new(served.clone()));
    ports.spawn(ports::grpc(ports::bind(control).await?, routes));
    ports.spawn(ports::grpc(
        ports::bind(admin).await?,
        Routes::new(AdminServer::new(served)),
    ));
    ports.spawn(ports::http(ports::bind(ops).await?, move |request| {
        let engine = Arc::clone(&engine);
        async move { engine.ops(request.uri().path()) }
    }));
    Ok(ports)
}

fn knobs(flags: &Flags<'_>) -> Result<proto::Knobs, String> {
    let chunk = flags.value("chunked-prefill-tokens")?;
    let max_running = flags.value("max-running")?;
    Ok(proto::Knobs {
        chunked_prefill_tokens: Some(chunk),
        max_running: Some(max_running),
        step_tokens: Some(chunk + max_running),
        prefix_cache: Some(!flags.value::<bool>("no-prefix-cache")?),
        rendezvous_ms: Some(flags.value("rendezvous-ms")?),
        progress_ms: Some(flags.value("progress-ms")?),
        stall_ms: Some(flags.value("stall-ms")?),
        watchdog_ms: Some(flags.value("watchdog-ms")?),
        lease_ms: Some(flags.value("lease-ms")?),
        queue_ms: Some(flags.value("queue-ms")?),
        prefill_queue: Some(16),
    })
}

impl Engine {
    fn ops(&self, path: &str) -> Answer {
        match path {
            "/livez" => Answer::Text(200, "ok".into()),
            "/readyz" if (self.script)().ready => Answer::Text(200, "ok".into()),
            "/readyz" => Answer::Text(503, "the script says no".into()),
            "/metrics" => Answer::Text(200, self.metrics()),
            _ => Answer::Text(404, String::new()),
        }
    }

    fn metrics(&self) -> String {
        let side = if self.role == Role::Prefill {
            "prefill"
        } else {
            "decode"
        };
        format!(
            "# TYPE tandem_transfer_bytes counter\ntandem_transfer_bytes_total{{side=\"{side}\"}} {}\n\
             # TYPE tandem_engine_tokens counter\ntandem_engine_tokens_total{{kind=\"prompt\"}} {}\n# EOF\n",
            self.moved_bytes.load(Ordering::Relaxed),
            self.prompt_tokens.load(Ordering::Relaxed),
        )
    }

    fn unlock<T>(&self, request: &Request<T>) -> Result<(), Status> {
        let presented = request.metadata().get("authorization").map(MetadataValue::as_bytes);
        if presented == Some(format!("Bearer {}", self.token).as_bytes()) {
            Ok(())
        } else {
            Err(Status::unauthenticated(
                "the token is not the one of --admin-token-file",
            ))
        }
    }

    /// Whoever means another incarnation is told so.
    fn is_meant(&self, boot_id: &[u8]) -> Result<(), Status> {
        if boot_id.is_empty() || boot_id == self.boot.as_bytes() {
            Ok(())
        } else {
            Err(Status::failed_precondition("another incarnation is meant"))
        }
    }

    fn load(&self) -> Load {
        Load {
            boot_id: self.boot.to_wire(),
            free_pages: 64,
            total_pages: 64,
            max_running: self.knobs().max_running.unwrap_or(0),
            draining: self.draining.load(Ordering::Relaxed),
            ..Load::default()
        }
    }

    fn handoffs(&self) -> Handoffs {
        let (more, failed) = (self.script)().handoffs;
        let finished = self.handoffs.load(Ordering::Relaxed) + u64::from(more);
        let lost = FailedHandoffs {
            reason: Reason::PeerLost.into(),
            count: failed.into(),
        };
        Handoffs {
            finished,
            failed: if failed > 0 { vec![lost] } else { Vec::new() },
            failed_since: failed.into(),
            recent: finished.min(32) as u32 + failed,
            recent_failed: failed,
        }
    }

    fn knobs(&self) -> proto::Knobs {
        *self.knobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn completion(&self, request: &GenerateRequest, how: Completions) -> Vec<Event> {
        let prompt = request.prompt_tokens.len() as u32;
        let moved = how == Completions::Moved && request.prefill.is_some();
        let usage = Usage {
            prompt_tokens: prompt,
            completion_tokens: 1,
            moved_tokens: if moved { prompt } else { 0 },
            moved_bytes: if moved { u64::from(prompt) * BYTES_PER_TOKEN } else { 0 },
            computed_tokens: if moved { 0 } else { prompt },
            recomputed: !moved,
            ..Usage::default()
        };
        self.moved_bytes.fetch_add(usage.moved_bytes, Ordering::Relaxed);
        self.handoffs.fetch_add(moved.into(), Ordering::Relaxed);
        self.prompt_tokens
            .fetch_add(usage.computed_tokens.into(), Ordering::Relaxed);
        let mut events = vec![
            Event::Started(Started {
                boot_id: self.boot.to_wire(),
            }),
            Event::Phase(Phase {
                kind: phase::Kind::Decode.into(),
            }),
        ];
        if how == Completions::Failed {
            events.push(Event::Failure(Failure {
                reason: Reason::PeerLost.into(),
                source: Source::Transfer.into(),
                detail: "the script says so".into(),
                ..Failure::default()
            }));
        } else {
            events.push(Event::Tokens(Tokens {
                ids: vec![100],
                logprobs: Vec::new(),
            }));
            events.push(Event::Finished(Finished {
                cause: proto::finished::Cause::Length.into(),
                usage: Some(usage),
            }));
        }
        events
    }
}

#[derive(Clone)]
struct Serving(Arc<Engine>);

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl EngineService for Serving {
    type GenerateStream = Events<GenerateEvent>;
    type WatchLoadStream = Events<Load>;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        self.0.is_meant(&request.boot_id)?;
        let how = (self.0.script)().completions;
        if how == Completions::Hangs {
            std::future::pending::<()>().await;
        }
        let events = self.0.completion(&request, how);
        let events = events.into_iter().map(|event| Ok(GenerateEvent { event: Some(event) }));
        Ok(Response::new(futures::stream::iter(events).boxed()))
    }

    async fn get_info(&self, _: Request<GetInfoRequest>) -> Result<Response<EngineInfo>, Status> {
        let engine = &self.0;
        tokio::time::sleep((engine.script)().delay).await;
        let component = |name: &str| KvComponent {
            name: name.into(),
            dtype: KvDtype::F16.into(),
            heads: HEADS,
            head_dim: HEAD_DIM,
            axis: KvAxis::Heads.into(),
            ..KvComponent::default()
        };
        Ok(Response::new(EngineInfo {
            boot_id: engine.boot.to_wire(),
            role: engine.role.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            model_name: engine.model.clone(),
            model_hash: vec![7; 32].into(),
            layout: Some(KvLayout {
                components: vec![component("k"), component("v")],
                layers: LAYERS,
                page_tokens: engine.page_tokens,
            }),
            max_length_tokens: engine.max_length_tokens,
            vocab_size: 1000,
            backend: "cpu-scalar".into(),
            knobs: Some(engine.knobs()),
            total_pages: 64,
            uptime_ms: engine.started.elapsed().as_millis() as u64,
            end_token_ids: vec![2],
            admin_endpoint: engine.admin_endpoint.clone(),
            handoffs: Some(engine.handoffs()),
        }))
    }

    async fn watch_load(&self, request: Request<WatchLoadRequest>) -> Result<Response<Self::WatchLoadStream>, Status> {
        self.0.is_meant(&request.into_inner().boot_id)?;
        let engine = Arc::clone(&self.0);
        let ticks = IntervalStream::new(tokio::time::interval(Duration::from_secs(1)));
        Ok(Response::new(ticks.map(move |_| Ok(engine.load())).boxed()))
    }
}

#[tonic::async_trait]
impl Admin for Serving {
    async fn set_knobs(&self, request: Request<SetKnobsRequest>) -> Result<Response<proto::Knobs>, Status> {
        let engine = &self.0;
        engine.unlock(&request)?;
        let request = request.into_inner();
        engine.is_meant(&request.boot_id)?;
        let script = (engine.script)();
        tokio::time::sleep(script.delay).await;
        match script.knobs {
            Obeys::Yes => {
                let mut knobs = engine.knobs.lock().unwrap_or_else(PoisonError::into_inner);
                *knobs = with(*knobs, request.knobs.unwrap_or_default());
            }
            Obeys::Ignores => {}
            Obeys::Refuses => return Err(Status::invalid_argument("the script refuses these knobs")),
            Obeys::Hangs => std::future::pending().await,
        }
        Ok(Response::new(engine.knobs()))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainResponse>, Status> {
        self.0.unlock(&request)?;
        let request = request.into_inner();
        self.0.is_meant(&request.boot_id)?;
        self.0.draining.store(!request.resume, Ordering::Relaxed);
        Ok(Response::new(DrainResponse { remaining: 0 }))
    }

    async fn flush(&self, request: Request<FlushRequest>) -> Result<Response<FlushResponse>, Status> {
        self.0.unlock(&request)?;
        self.0.is_meant(&request.into_inner().boot_id)?;
        Ok(Response::new(FlushResponse { freed_pages: 0 }))
    }
}

/// An unset field keeps its value.
fn with(old: proto::Knobs, new: proto::Knobs) -> proto::Knobs {
    proto::Knobs {
        chunked_prefill_tokens: new.chunked_prefill_tokens.or(old.chunked_prefill_tokens),
        max_running: new.max_running.or(old.max_running),
        step_tokens: new.step_tokens.or(old.step_tokens),
        prefix_cache: new.prefix_cache.or(old.prefix_cache),
        rendezvous_ms: new.rendezvous_ms.or(old.rendezvous_ms),
        progress_ms: new.progress_ms.or(old.progress_ms),
        stall_ms: new.stall_ms.or(old.stall_ms),
        watchdog_ms: new.watchdog_ms.or(old.watchdog_ms),
        lease_ms: new.lease_ms.or(old.lease_ms),
        queue_ms: new.queue_ms.or(old.queue_ms),
        prefill_queue: new.prefill_queue.or(old.prefill_queue),
    }
}
