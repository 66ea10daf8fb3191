//! KV over loopback, in one process: the hand-off as it is, beside the same frames through tonic's own codec with the best
//! settings that it has, and beside bare TCP. Prints GB/s and CPU-seconds per GB of both ends together; compare within one
//! run only.
//!
//! `cargo run --release -p tandem-engine --example kv_transfer [rounds]`

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use parking_lot::RwLock;
use tandem_engine::exec::{Executor, KvError, KvRun, KvStore, ModelSpec, PageId, Sampled, StepError, StepSeq};
use tandem_engine::sched::{Admission, Role, SchedKnobs, Scheduler, Stops};
use tandem_engine::serve::listen::Reserved;
use tandem_engine::serve::{Node, NodeConfig, Ports};
use tandem_engine::transfer::{KeepAlive, PullRequest, Puller, PullerConfig, TimerValues, Timers, TransferMetrics};
use tandem_telemetry::{Metrics, Readiness, Traces};
use tandem_wire::frame::{checksum, spans};
use tandem_wire::layout::KvDtype;
use tandem_wire::phase::Phase;
use tandem_wire::proto;
use tandem_wire::proto::kv_transfer_client::KvTransferClient;
use tandem_wire::proto::kv_transfer_server::{KvTransfer, KvTransferServer};
use tandem_wire::proto::{DecodeMessage, FetchRequest, Frame, PrefillMessage};
use tandem_wire::{BootId, KvLayout, TransferId, TransferKey};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming};

type AnyError = Box<dyn Error + Send + Sync>;

const PROMPT: u32 = 2_048;
const PAGE: u32 = 16;

/// 128 KiB a token, 256 MiB a prompt.
fn layout() -> KvLayout {
    KvLayout::heads(32, 8, 128, KvDtype::F16, PAGE)
}

/// Pages `[layer][component][token]`, one sequence's pages in order.
struct Pool {
    layout: KvLayout,
    bytes: RwLock<Vec<u8>>,
}

impl Pool {
    fn new(fill: u8) -> Arc<Self> {
        let layout = layout();
        let bytes = RwLock::new(vec![fill; layout.token_bytes() * PROMPT as usize]);
        Arc::new(Self { layout, bytes })
    }
    fn range(&self, run: KvRun) -> std::ops::Range<usize> {
        let token = self.layout.components[run.component as usize].token_bytes();
        let plane = run.layer as usize * 2 + run.component as usize;
        let at = (plane * PROMPT as usize + run.first_token as usize) * token;
        at..at + run.tokens as usize * token
    }
}

impl KvStore for Pool {
    fn read(&self, _: &[PageId], run: KvRun, out: &mut [u8]) -> Result<(), KvError> {
        out.copy_from_slice(&self.bytes.read()[self.range(run)]);
        Ok(())
    }
    fn write(&self, _: &[PageId], run: KvRun, data: &[u8]) -> Result<(), KvError> {
        self.bytes.write()[self.range(run)].copy_from_slice(data);
        Ok(())
    }
}

/// Computes nothing.
struct Idle {
    spec: ModelSpec,
    pool: Arc<Pool>,
}

impl Idle {
    fn new(fill: u8) -> Self {
        let spec = ModelSpec {
            name: "idle".to_owned(),
            hash: [1; 32],
            layout: layout(),
            max_length_tokens: PROMPT + PAGE,
            vocab_size: 1 << 20,
            end_tokens: vec![],
            vocabulary: Err("none".to_owned()),
            backend: "idle",
            total_pages: PROMPT / PAGE + 1,
            page_tokens: PAGE,
            max_step_tokens: PROMPT,
            max_step_seqs: 8,
        };
        Self {
            spec,
            pool: Pool::new(fill),
        }
    }
}

impl Executor for Idle {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }
    fn step(&mut self, batch: &[StepSeq<'_>], _: &mut dyn FnMut(u32)) -> Result<Vec<Sampled>, StepError> {
        Ok(batch
            .iter()
            .map(|s| s.sample.map_or(Sampled::None, |_| Sampled::Token(1, None)))
            .collect())
    }
    fn kv(&self) -> Arc<dyn KvStore> {
        Arc::clone(&self.pool) as _
    }
}

/// CPU seconds of all threads that live; none of them ends while something is measured.
fn cpu() -> f64 {
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let nanos = threads.filter_map(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
        stat.split(' ').next()?.parse::<f64>().ok()
    });
    nanos.sum::<f64>() / 1e9
}

/// One way to move the bytes, measured round by round.
#[derive(Default)]
struct Ways(Vec<(&'static str, Vec<(f64, f64)>)>);

impl Ways {
    async fn measure(
        &mut self,
        name: &'static str,
        work: impl Future<Output = Result<u64, AnyError>>,
    ) -> Result<(), AnyError> {
        let (cpu_before, begun) = (cpu(), Instant::now());
        let gb = work.await? as f64 / 1e9;
        let round = (gb / begun.elapsed().as_secs_f64(), (cpu() - cpu_before) / gb);
        match self.0.iter_mut().find(|(n, _)| *n == name) {
            Some((_, rounds)) => rounds.push(round),
            None => self.0.push((name, vec![round])),
        }
        Ok(())
    }

    /// Medians; the first round pays for the page faults of fresh memory and does not count.
    fn print(&self) {
        let median = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
        };
        for (name, rounds) in &self.0 {
            let speed = median(rounds.iter().skip(1).map(|r| r.0).collect());
            let cpu = median(rounds.iter().skip(1).map(|r| r.1).collect());
            println!("{name:16} {speed:6.2} GB/s  {cpu:6.3} CPU-s/GB");
        }
    }
}

/// The hand-off as it is.
struct HandOff {
    puller: Arc<Puller>,
    scheduler: Scheduler,
    endpoint: String,
    boot_id: BootId,
}

impl HandOff {
    fn start() -> Result<Self, AnyError> {
        let knobs = SchedKnobs {
            chunked_prefill_tokens: PROMPT,
            step_tokens: PROMPT,
            max_running: 4,
            prefix_cache: false,
            ..SchedKnobs::default()
        };
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let config = NodeConfig {
            role: Role::Prefill,
            served_name: None,
            knobs,
            timers: TimerValues::default(),
            keep_alive: KeepAlive::default(),
            reader_stall: tandem_engine::serve::node::READER_STALL,
            advertise: None,
            traces: Traces::off(),
        };
        let node = Node::start(
            Box::new(Idle::new(3)),
            config,
            Ports {
                control: Reserved::bind(any, "gRPC", "--listen")?,
                data: Some(Reserved::bind(any, "KV data", "--data-listen")?),
                admin: None,
            },
            &Metrics::new("bench", "0"),
            &Readiness::default(),
        )?;
        let (endpoint, boot_id) = (node.control_addr().to_string(), node.boot_id());
        tokio::spawn(node.run());
        let scheduler = Scheduler::start(Box::new(Idle::new(0)), Role::Decode, knobs)?;
        let puller = Puller::new(PullerConfig {
            boot_id: BootId::random(),
            spec: Arc::new(scheduler.spec().clone()),
            store: Arc::clone(scheduler.kv()),
            timers: Timers::new(TimerValues::default()),
            keep_alive: KeepAlive::default(),
            metrics: TransferMetrics::register(&Metrics::new("bench", "0")),
        });
        Ok(Self {
            puller,
            scheduler,
            endpoint,
            boot_id,
        })
    }

    async fn pull(&self) -> Result<u64, AnyError> {
        let prompt: Arc<[u32]> = (0..PROMPT).collect();
        let admission = Admission {
            prompt: Arc::clone(&prompt),
            max_new_tokens: 2,
            pulled: true,
        };
        let admitted = self.scheduler.admit(&admission)?;
        let request = PullRequest {
            key: TransferKey {
                id: TransferId::random(),
                attempt: 0,
            },
            endpoint: self.endpoint.clone(),
            boot_id: self.boot_id,
            prompt,
            pages: Arc::clone(&admitted.pages),
            have_tokens: 0,
            sampling: proto::Sampling::default(),
            stops: Stops {
                stop_token_ids: vec![],
                ignore_eos: true,
                max_new_tokens: 2,
            },
            remaining: Some(Duration::from_mins(1)),
            request_id: "bench".to_owned(),
            stay: self.scheduler.inflight().enter(Phase::Accept),
            trace: tandem_telemetry::TraceParent::default(),
        };
        Ok(self.puller.pull(request, |_| {}).await?.moved_bytes)
    }
}

/// The same frames through tonic's codec.
struct Codec(Arc<Pool>);

#[tonic::async_trait]
impl KvTransfer for Codec {
    type PrefillStream = futures::stream::Empty<Result<PrefillMessage, Status>>;
    type FetchStream = futures::stream::BoxStream<'static, Result<Frame, Status>>;

    async fn prefill(&self, _: Request<Streaming<DecodeMessage>>) -> Result<Response<Self::PrefillStream>, Status> {
        Err(Status::unimplemented("not measured"))
    }

    async fn fetch(&self, _: Request<FetchRequest>) -> Result<Response<Self::FetchStream>, Status> {
        let pool = Arc::clone(&self.0);
        let all: Vec<_> = spans(&pool.layout, 0, PROMPT).collect();
        let frames = futures::stream::iter(all).map(move |span| {
            let mut payload = vec![0; span.bytes(&pool.layout).unwrap_or_default()];
            let run = run(span.layer, span.component, span.first_token, span.tokens);
            pool.read(&[], run, &mut payload)
                .map_err(|e| Status::internal(e.to_string()))?;
            Ok(Frame {
                layer: span.layer,
                component: span.component,
                first_token: span.first_token,
                tokens: span.tokens,
                crc32c: checksum(&payload),
                payload: payload.into(),
            })
        });
        Ok(Response::new(frames.boxed()))
    }
}

fn run(layer: u32, component: u32, first_token: u32, tokens: u32) -> KvRun {
    KvRun {
        layer,
        component,
        first_token,
        tokens,
    }
}

async fn codec(client: &mut KvTransferClient<tonic::transport::Channel>, into: &Pool) -> Result<u64, AnyError> {
    let mut frames = client.fetch(FetchRequest::default()).await?.into_inner();
    let mut bytes = 0;
    while let Some(frame) = frames.message().await? {
        if checksum(&frame.payload) != frame.crc32c {
            return Err("checksum".into());
        }
        into.write(
            &[],
            run(frame.layer, frame.component, frame.first_token, frame.tokens),
            &frame.payload,
        )?;
        bytes += frame.payload.len() as u64;
    }
    Ok(bytes)
}

/// As many bytes over a bare socket, in pieces of a frame, with checksum and copies.
async fn tcp(from: Arc<Pool>, into: &Pool) -> Result<u64, AnyError> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    let all: Vec<_> = spans(&from.layout, 0, PROMPT).collect();
    let to_send = all.clone();
    let sender = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await?;
        let mut sum = 0_u32;
        for span in to_send {
            let mut payload = vec![0; span.bytes(&from.layout).unwrap_or_default()];
            from.read(
                &[],
                run(span.layer, span.component, span.first_token, span.tokens),
                &mut payload,
            )?;
            sum ^= checksum(&payload);
            socket.write_all(&payload).await?;
        }
        Ok::<_, AnyError>(sum)
    });
    let mut socket = TcpStream::connect(addr).await?;
    let (mut bytes, mut sum, mut buffer) = (0, 0_u32, Vec::new());
    for span in all {
        buffer.resize(span.bytes(&into.layout).unwrap_or_default(), 0);
        socket.read_exact(&mut buffer).await?;
        sum ^= checksum(&buffer);
        into.write(
            &[],
            run(span.layer, span.component, span.first_token, span.tokens),
            &buffer,
        )?;
        bytes += buffer.len() as u64;
    }
    if sender.await?? != sum {
        return Err("checksum".into());
    }
    Ok(bytes)
}

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<(), AnyError> {
    let rounds: u32 = std::env::args().nth(1).map_or(Ok(9), |n| n.parse())?;
    let hand_off = HandOff::start()?;
    let (from, into) = (Pool::new(5), Pool::new(0));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    let server = tonic::transport::Server::builder()
        .add_service(KvTransferServer::new(Codec(Arc::clone(&from))))
        .serve_with_incoming(TcpListenerStream::new(listener));
    tokio::spawn(server);
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{addr}"))?
        .initial_stream_window_size(4 << 20)
        .initial_connection_window_size(16 << 20)
        .max_frame_size((256 << 10) + 1024)
        .connect()
        .await?;
    let mut client = KvTransferClient::new(channel).max_decoding_message_size(8 << 20);
    let mut ways = Ways::default();
    for _ in 0..=rounds {
        ways.measure("hand-off", hand_off.pull()).await?;
        ways.measure("tonic's codec", codec(&mut client, &into)).await?;
        ways.measure("bare TCP", tcp(Arc::clone(&from), &into)).await?;
    }
    ways.print();
    Ok(())
}
