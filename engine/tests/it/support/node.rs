//! Engines over real gRPC, in this process.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tandem_engine::exec::Executor;
use tandem_engine::sched::{Role, SchedKnobs, Scheduler};
use tandem_engine::serve::admin::AdminPort;
use tandem_engine::serve::listen::Reserved;
use tandem_engine::serve::node::{NodeHandle, Ports, READER_STALL};
use tandem_engine::serve::{Node, NodeConfig, NodeError};
use tandem_engine::transfer::{KeepAlive, TimerValues};
use tandem_secrets::{SecretFile, Token, Watched};
use tandem_telemetry::{Metrics, Readiness, Traces};
use tandem_wire::proto::admin_client::AdminClient;
use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::generate_event::Event;
use tandem_wire::proto::{self, GenerateEvent, GenerateRequest, Sampling};
use tandem_wire::{BootId, Failure, Source, TransferId};
use tokio::task::JoinHandle;
use tonic::Streaming;
use tonic::transport::Channel;

use super::fake::{FakeConfig, FakeControl, FakeExecutor};
use super::sched::PATIENCE;

/// A running engine and a client of it.
pub struct TestNode {
    pub client: EngineClient<Channel>,
    pub channel: Channel,
    /// Without the token, as anybody could have it.
    pub admin: AdminClient<Channel>,
    token: tempfile::NamedTempFile,
    pub boot: BootId,
    pub scheduler: Scheduler,
    pub addr: SocketAddr,
    /// Of the data port, where the role has one.
    pub data: Option<SocketAddr>,
    pub handle: NodeHandle,
    pub readiness: Readiness,
    pub metrics: Metrics,
    pub running: JoinHandle<Result<(), NodeError>>,
}

pub fn config(role: Role) -> NodeConfig {
    NodeConfig {
        role,
        served_name: None,
        knobs: SchedKnobs::default(),
        timers: TimerValues::default(),
        keep_alive: KeepAlive::default(),
        reader_stall: READER_STALL,
        advertise: None,
        traces: Traces::off(),
    }
}

/// A message with a token.
pub fn bearing<T>(token: &str, message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    let value = format!("Bearer {token}").parse().unwrap();
    request.metadata_mut().insert("authorization", value);
    request
}

async fn connect(addr: SocketAddr) -> Channel {
    let endpoint = Channel::from_shared(format!("http://{addr}")).unwrap();
    endpoint.connect().await.unwrap()
}

fn loopback() -> Reserved {
    Reserved::bind("127.0.0.1:0".parse().unwrap(), "a test", "--none").unwrap()
}

impl TestNode {
    pub async fn start(executor: Box<dyn Executor>, config: NodeConfig) -> Self {
        let (metrics, readiness) = (Metrics::new("test", "0"), Readiness::default());
        let token = tempfile::NamedTempFile::new().unwrap();
        Token::make(token.path()).unwrap();
        let file = SecretFile::private("--none", token.path());
        let ports = Ports {
            control: loopback(),
            data: Some(loopback()),
            admin: Some(AdminPort {
                reserved: loopback(),
                token: Arc::new(Watched::start(vec![file], |f, b| Token::parse(&f[0], &b[0])).unwrap()),
                advertise: None,
            }),
        };
        let node = Node::start(executor, config, ports, &metrics, &readiness).unwrap();
        let admin = node.admin_addr().unwrap();
        let (boot, addr, data, handle) = (node.boot_id(), node.control_addr(), node.data_addr(), node.handle());
        let scheduler = node.scheduler().clone();
        let running = tokio::spawn(node.run());
        let channel = connect(addr).await;
        Self {
            client: EngineClient::new(channel.clone()).max_decoding_message_size(64 << 20),
            channel,
            admin: AdminClient::new(connect(admin).await),
            token,
            boot,
            scheduler,
            addr,
            data,
            handle,
            readiness,
            metrics,
            running,
        }
    }

    pub async fn fake(fake: &FakeConfig, config: NodeConfig) -> (Self, FakeControl) {
        let (executor, control) = FakeExecutor::new(fake);
        (Self::start(Box::new(executor), config).await, control)
    }

    /// A message to the admin port, with this engine's token.
    pub fn authorized<T>(&self, message: T) -> tonic::Request<T> {
        let token = std::fs::read_to_string(self.token.path()).unwrap();
        bearing(token.trim(), message)
    }

    /// This engine as a prefill to pull from.
    pub fn peer(&self) -> proto::Peer {
        proto::Peer {
            endpoint: self.addr.to_string(),
            boot_id: self.boot.to_wire(),
        }
    }

    pub fn request(&self, prompt: &[u32], new_tokens: u32) -> GenerateRequest {
        GenerateRequest {
            boot_id: self.boot.to_wire(),
            key: Some(proto::TransferKey {
                transfer_id: TransferId::random().to_wire(),
                attempt: 0,
            }),
            request_id: "test".to_owned(),
            prompt_tokens: prompt.to_vec(),
            sampling: Some(Sampling::default()),
            max_new_tokens: new_tokens,
            ignore_eos: true,
            ..GenerateRequest::default()
        }
    }

    pub async fn open(&self, request: GenerateRequest) -> Result<Streaming<GenerateEvent>, Failure> {
        let mut client = self.client.clone();
        let opened = client.generate(request).await;
        opened
            .map(tonic::Response::into_inner)
            .map_err(|s| Failure::from_status(&s, Source::Router))
    }

    /// The whole answer.
    pub async fn ask(&self, request: GenerateRequest) -> Result<Answer, Failure> {
        let mut answer = Answer::default();
        let mut stream = self.open(request).await?;
        while let Some(event) = next(&mut stream).await? {
            assert!(answer.cause.is_none(), "an event after the last one");
            match event {
                Event::Started(started) => assert_eq!(started.boot_id[..], self.boot.as_bytes()[..]),
                Event::Phase(phase) => answer.phases.push(phase.kind()),
                Event::Tokens(tokens) => {
                    answer.messages += 1;
                    answer.tokens.extend(tokens.ids);
                    answer.logprobs.extend(tokens.logprobs);
                }
                Event::Finished(finished) => {
                    answer.cause = Some(finished.cause());
                    answer.usage = finished.usage.unwrap();
                }
                Event::Failure(failure) => return Err(Failure::from_wire(&failure)),
            }
        }
        assert!(answer.cause.is_some(), "the stream ended without its last event");
        Ok(answer)
    }

    /// Asks for an answer that must have the `expected` tokens; leaves once it has `leave_after` of them, if given.
    pub async fn must_answer(&self, request: GenerateRequest, expected: &[u32], leave_after: Option<usize>) {
        let id = request.request_id.clone();
        let Some(after) = leave_after else {
            assert_eq!(self.ask(request).await.unwrap().tokens, expected, "request {id}");
            return;
        };
        let mut stream = self.open(request).await.unwrap();
        let mut seen = Vec::new();
        while seen.len() < after {
            match next(&mut stream).await.unwrap() {
                Some(Event::Tokens(more)) => seen.extend(more.ids),
                Some(Event::Failure(failure)) => panic!("request {id}: {failure:?}"),
                Some(_) => {}
                None => break,
            }
        }
        assert_eq!(seen[..], expected[..seen.len()], "request {id}");
    }

    /// Ends it and sees that it ends well.
    pub async fn close(self) {
        self.handle.close();
        tokio::time::timeout(PATIENCE, self.running)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
    }
}

#[derive(Debug, Default)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<proto::Logprob>,
    /// Messages that held tokens.
    pub messages: usize,
    pub phases: Vec<proto::phase::Kind>,
    pub cause: Option<proto::finished::Cause>,
    pub usage: proto::Usage,
}

/// The next event; a broken stream is a failure.
pub async fn next(stream: &mut Streaming<GenerateEvent>) -> Result<Option<Event>, Failure> {
    let event = tokio::time::timeout(PATIENCE, stream.message())
        .await
        .expect("no event in time");
    let event = event.map_err(|s| Failure::from_status(&s, Source::Router))?;
    Ok(event.map(|e| e.event.unwrap()))
}

/// Waits until `holds`, looking every few milliseconds.
pub async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let waited = tokio::time::timeout(PATIENCE, async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    assert!(waited.await.is_ok(), "{what}: not within {PATIENCE:?}");
}

/// Tasks that live on this runtime.
pub fn alive_tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}
