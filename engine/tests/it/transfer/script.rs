//! Decode against a prefill that keeps to no rule: each message dropped, doubled, out of order, cut short or changed. No
//! token may come of it, nothing may stay held, and prefill must hear of it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tandem_wire::frame::{Digest, checksum, prompt_hash, spans};
use tandem_wire::proto::kv_transfer_server::{KvTransfer, KvTransferServer};
use tandem_wire::proto::{
    self, DecodeMessage, FetchRequest, Frame, PrefillMessage, decode_message, prefill_message::Message,
};
use tandem_wire::{BootId, Failure, Reason, Source};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

use super::pull::prompt;
use super::rig::{Ask, Decode, Setup, eventually, soon};

/// What the scripted prefill does.
#[derive(Debug, Clone)]
struct Script {
    /// `None`: a word of a newer version.
    control: Vec<Option<Message>>,
    /// After the last word the control stream ends; otherwise it stays open.
    control_ends: bool,
    frames: Vec<Frame>,
    /// How the data stream ends; `None`: not at all.
    data_ends: Option<Result<(), Failure>>,
}

struct Prefill {
    script: Mutex<Script>,
    /// Everything decode said.
    heard: Mutex<Vec<decode_message::Message>>,
    /// Control streams that decode has closed.
    closed: Mutex<u32>,
}

struct Service(Arc<Prefill>);

#[tonic::async_trait]
impl KvTransfer for Service {
    type PrefillStream = ReceiverStream<Result<PrefillMessage, Status>>;
    type FetchStream = ReceiverStream<Result<Frame, Status>>;

    async fn prefill(
        &self,
        request: Request<Streaming<DecodeMessage>>,
    ) -> Result<Response<Self::PrefillStream>, Status> {
        let (say, said) = mpsc::channel(64);
        let me = Arc::clone(&self.0);
        let mut inbound = request.into_inner();
        tokio::spawn(async move {
            let first = inbound.message().await;
            assert!(matches!(
                first,
                Ok(Some(DecodeMessage {
                    message: Some(decode_message::Message::Open(_))
                }))
            ));
            let script = me.script.lock().clone();
            for message in script.control {
                if say.send(Ok(PrefillMessage { message })).await.is_err() {
                    break;
                }
            }
            let say = (!script.control_ends).then_some(say);
            while let Ok(Some(message)) = inbound.message().await {
                me.heard.lock().extend(message.message);
            }
            *me.closed.lock() += 1;
            drop(say);
        });
        Ok(Response::new(ReceiverStream::new(said)))
    }

    async fn fetch(&self, _: Request<FetchRequest>) -> Result<Response<Self::FetchStream>, Status> {
        let (say, said) = mpsc::channel(1);
        let script = self.0.script.lock().clone();
        tokio::spawn(async move {
            for frame in script.frames {
                if say.send(Ok(frame)).await.is_err() {
                    return;
                }
            }
            match script.data_ends {
                Some(Ok(())) => {}
                Some(Err(failure)) => drop(say.send(Err(failure.to_status())).await),
                None => say.closed().await,
            }
        });
        Ok(Response::new(ReceiverStream::new(said)))
    }
}

struct Rig {
    decode: Decode,
    prefill: Arc<Prefill>,
    peer: (String, BootId),
    ask: Ask,
    good: Script,
    server: JoinHandle<()>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.server.abort();
    }
}

const FIRST_TOKEN: u32 = 77;
/// Often waited for, so short; yet longer than a loaded machine takes between two frames.
const STALL: Duration = Duration::from_millis(400);
/// For scripts that never get as far as frames.
const BEFORE_FRAMES: Duration = Duration::from_secs(2);

impl Rig {
    async fn start() -> Self {
        let setup = Setup::default().timers(|t| {
            t.stall = STALL;
            t.rendezvous = BEFORE_FRAMES;
            t.queue = BEFORE_FRAMES;
            t.progress = BEFORE_FRAMES;
        });
        let decode = Decode::start(&setup);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let boot_id = BootId::random();
        let ask = Ask::new(prompt(5, 100), 8);
        let good = good(&decode, boot_id, addr.port(), &ask);
        let prefill = Arc::new(Prefill {
            script: Mutex::new(good.clone()),
            heard: Mutex::default(),
            closed: Mutex::default(),
        });
        let service = KvTransferServer::new(Service(Arc::clone(&prefill))).max_encoding_message_size(usize::MAX);
        let server = tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(TcpListenerStream::new(listener));
        let server = tokio::spawn(async move { server.await.unwrap() });
        Self {
            decode,
            prefill,
            peer: (addr.to_string(), boot_id),
            ask,
            good,
            server,
        }
    }

    /// Runs one pull against `script`; afterwards nothing is held and prefill has heard the end.
    async fn run(&self, script: Script) -> Result<u32, Failure> {
        *self.prefill.script.lock() = script;
        *self.prefill.closed.lock() = 0;
        self.prefill.heard.lock().clear();
        let ask = Ask {
            key: super::rig::new_key(),
            ..self.ask.clone()
        };
        let result = soon("the pull", self.decode.pull_with(&ask, &self.peer, |_| {})).await;
        let result = result.map(|(pulled, _)| pulled.first_token);
        self.decode.idle().await;
        assert_eq!(self.decode.scheduler.cache().stats().cached, 0);
        eventually("the control stream is closed", || *self.prefill.closed.lock() == 1).await;
        let heard = self.prefill.heard.lock().clone();
        let committed = heard.iter().any(|m| matches!(m, decode_message::Message::Commit(_)));
        assert_eq!(committed, result.is_ok(), "{heard:?}");
        result
    }
}

/// What a prefill that keeps the rules would do.
fn good(decode: &Decode, boot_id: BootId, port: u16, ask: &Ask) -> Script {
    let layout = &decode.scheduler.spec().layout;
    let mut digest = Digest::default();
    let frames: Vec<_> = spans(layout, 0, ask.prompt.len() as u32)
        .flat_map(|span| {
            // several frames per layer and component, as a long prompt has
            [(0, 30), (30, 70)].map(|(first, n)| tandem_wire::frame::FrameSpan {
                first_token: span.first_token + first,
                tokens: n,
                ..span
            })
        })
        .map(|span| {
            let payload = Bytes::from(vec![span.layer as u8 + 1; span.bytes(layout).unwrap()]);
            let crc32c = checksum(&payload);
            digest.add(span, crc32c, payload.len());
            Frame {
                layer: span.layer,
                component: span.component,
                first_token: span.first_token,
                tokens: span.tokens,
                crc32c,
                payload,
            }
        })
        .collect();
    let accepted = proto::Accepted {
        transport: "grpc".to_owned(),
        ranks: vec![proto::Rank {
            endpoint: format!(":{port}"),
            boot_id: boot_id.to_wire(),
        }],
        cached_tokens: 0,
    };
    let progress = proto::Progress {
        computed_tokens: ask.prompt.len() as u32,
        layer: layout.layers,
        chunk: 2,
    };
    let manifest = proto::Manifest {
        prompt_hash: Bytes::copy_from_slice(&prompt_hash(&ask.prompt)),
        from_token: 0,
        to_token: ask.prompt.len() as u32,
        frames: digest.frames(),
        payload_bytes: digest.bytes(),
        digest: digest.value(),
        first_tokens: vec![FIRST_TOKEN],
        finished: false,
        finish_cause: 0,
        cached_tokens: 0,
        queue_us: 1,
        prefill_us: 2,
        lease_ms: 30_000,
        first_logprobs: Vec::new(),
    };
    Script {
        control: vec![
            Some(Message::Queued(proto::Queued { ahead: 0 })),
            Some(Message::Accepted(accepted)),
            Some(Message::Progress(progress)),
            Some(Message::Manifest(manifest)),
        ],
        control_ends: false,
        frames,
        data_ends: Some(Ok(())),
    }
}

impl Script {
    fn accepted(&mut self) -> &mut proto::Accepted {
        let accepted = self.control.iter_mut().flatten().find_map(|m| match m {
            Message::Accepted(accepted) => Some(accepted),
            _ => None,
        });
        accepted.unwrap()
    }
    fn manifest(&mut self) -> &mut proto::Manifest {
        let manifest = self.control.iter_mut().flatten().find_map(|m| match m {
            Message::Manifest(manifest) => Some(manifest),
            _ => None,
        });
        manifest.unwrap()
    }
    fn fail(reason: i32) -> Message {
        Message::Failed(proto::Failure {
            reason,
            source: Source::Prefill.into(),
            detail: "planted".to_owned(),
            boot_id: Bytes::new(),
        })
    }
}

type Edit = fn(&mut Script);

#[tokio::test]
async fn a_prefill_that_breaks_any_rule_gives_no_token() {
    let rig = Rig::start().await;
    let rows: &[(&str, Edit, Reason)] = &[
        // frames
        (
            "the first frame is missing",
            |s| drop(s.frames.remove(0)),
            Reason::Incomplete,
        ),
        (
            "the last frame is missing",
            |s| drop(s.frames.pop()),
            Reason::Incomplete,
        ),
        ("all frames are missing", |s| s.frames.clear(), Reason::Incomplete),
        (
            "a frame comes twice",
            |s| s.frames.insert(3, s.frames[2].clone()),
            Reason::Incomplete,
        ),
        (
            "a payload is cut short",
            |s| s.frames[1].payload.truncate(40),
            Reason::Incomplete,
        ),
        (
            "a payload is empty",
            |s| s.frames[1].payload.clear(),
            Reason::Incomplete,
        ),
        (
            "a payload is too long",
            |s| s.frames[1].payload = Bytes::from(vec![0; s.frames[1].payload.len() + 1]),
            Reason::Incomplete,
        ),
        (
            "a payload is beyond every bound",
            |s| s.frames[1].payload = Bytes::from(vec![0; 5 << 20]),
            Reason::Internal,
        ),
        (
            "a payload is changed",
            |s| {
                let mut payload = s.frames[4].payload.to_vec();
                payload[17] ^= 0x10;
                s.frames[4].payload = payload.into();
            },
            Reason::Checksum,
        ),
        ("a checksum is changed", |s| s.frames[4].crc32c ^= 1, Reason::Checksum),
        ("a frame is of no layer", |s| s.frames[2].layer = 3, Reason::Incomplete),
        (
            "a frame is of no component",
            |s| s.frames[2].component = 2,
            Reason::Incomplete,
        ),
        (
            "a frame is of no token",
            |s| s.frames[2].first_token = 71,
            Reason::Incomplete,
        ),
        (
            "a frame wraps around",
            |s| s.frames[2].first_token = u32::MAX,
            Reason::Incomplete,
        ),
        ("a frame has no tokens", |s| s.frames[2].tokens = 0, Reason::Incomplete),
        (
            "a frame has too many tokens",
            |s| s.frames[2].tokens = u32::MAX,
            Reason::Incomplete,
        ),
        (
            "two frames change places in memory",
            |s| {
                let payload = s.frames[0].payload.clone();
                let crc = s.frames[0].crc32c;
                s.frames[0].payload = std::mem::replace(&mut s.frames[4].payload, payload);
                s.frames[0].crc32c = std::mem::replace(&mut s.frames[4].crc32c, crc);
            },
            Reason::Checksum,
        ),
        (
            "the frames stop",
            |s| {
                s.frames.truncate(5);
                s.data_ends = None;
            },
            Reason::Stalled,
        ),
        (
            "no frame ever comes",
            |s| {
                s.frames.clear();
                s.data_ends = None;
            },
            Reason::Stalled,
        ),
        (
            "the data stream ends with a failure",
            |s| {
                s.frames.truncate(5);
                s.data_ends = Some(Err(Failure::new(Reason::LeaseLost, Source::Prefill, "planted")));
            },
            Reason::LeaseLost,
        ),
        // the manifest
        ("no manifest comes", |s| drop(s.control.pop()), Reason::Stalled),
        (
            "no manifest comes and control ends",
            |s| {
                s.control.pop();
                s.control_ends = true;
            },
            Reason::Incomplete,
        ),
        ("the digest is another", |s| s.manifest().digest ^= 1, Reason::Checksum),
        (
            "the prompt is another",
            |s| s.manifest().prompt_hash = Bytes::from_static(&[1; 32]),
            Reason::PromptMismatch,
        ),
        (
            "the prompt hash is missing",
            |s| s.manifest().prompt_hash.clear(),
            Reason::PromptMismatch,
        ),
        (
            "it begins elsewhere",
            |s| s.manifest().from_token = 16,
            Reason::Incomplete,
        ),
        ("it ends elsewhere", |s| s.manifest().to_token = 99, Reason::Incomplete),
        (
            "it counts other frames",
            |s| s.manifest().frames += 1,
            Reason::Incomplete,
        ),
        (
            "it counts other bytes",
            |s| s.manifest().payload_bytes -= 1,
            Reason::Incomplete,
        ),
        (
            "it has no first token",
            |s| s.manifest().first_tokens.clear(),
            Reason::Incomplete,
        ),
        (
            "it has two first tokens",
            |s| s.manifest().first_tokens.push(1),
            Reason::Incomplete,
        ),
        (
            "the first token is not in the vocabulary",
            |s| s.manifest().first_tokens = vec![u32::MAX],
            Reason::Internal,
        ),
        (
            "a first token that ends the request is not in the vocabulary",
            |s| {
                s.manifest().finished = true;
                s.manifest().finish_cause = proto::finished::Cause::Length.into();
                s.manifest().first_tokens = vec![u32::MAX];
            },
            Reason::Internal,
        ),
        (
            "it is finished for no cause",
            |s| s.manifest().finished = true,
            Reason::Internal,
        ),
        (
            "it is finished for an unknown cause",
            |s| {
                s.manifest().finished = true;
                s.manifest().finish_cause = 99;
            },
            Reason::Internal,
        ),
        // the handshake
        ("accepted never comes", |s| drop(s.control.remove(1)), Reason::Internal),
        (
            "the manifest comes first",
            |s| s.control.rotate_right(1),
            Reason::Internal,
        ),
        (
            "control ends at once",
            |s| {
                s.control.clear();
                s.control_ends = true;
            },
            Reason::Incomplete,
        ),
        (
            "control ends after accepted",
            |s| {
                s.control.truncate(2);
                s.control_ends = true;
            },
            Reason::Incomplete,
        ),
        (
            "the transport is unknown",
            |s| s.accepted().transport = "smoke".to_owned(),
            Reason::LayoutMismatch,
        ),
        (
            "there is no rank",
            |s| s.accepted().ranks.clear(),
            Reason::LayoutMismatch,
        ),
        (
            "there are two ranks",
            |s| {
                let rank = s.accepted().ranks[0].clone();
                s.accepted().ranks.push(rank);
            },
            Reason::LayoutMismatch,
        ),
        (
            "the rank is another boot",
            |s| s.accepted().ranks[0].boot_id = BootId::from([3; 16]).to_wire(),
            Reason::StaleBoot,
        ),
        (
            "the data endpoint is none",
            |s| s.accepted().ranks[0].endpoint = "nowhere".to_owned(),
            Reason::Internal,
        ),
        (
            "nobody listens on the data port",
            |s| s.accepted().ranks[0].endpoint = ":1".to_owned(),
            Reason::PeerLost,
        ),
        // failures, told at each stage
        (
            "it fails first",
            |s| s.control.insert(0, Some(Script::fail(Reason::NoCapacity.into()))),
            Reason::NoCapacity,
        ),
        (
            "it fails in the queue",
            |s| s.control.insert(1, Some(Script::fail(Reason::Draining.into()))),
            Reason::Draining,
        ),
        (
            "it fails after accepted",
            |s| s.control.insert(2, Some(Script::fail(Reason::OverLength.into()))),
            Reason::OverLength,
        ),
        (
            "it fails for a reason of a newer version",
            |s| s.control.insert(2, Some(Script::fail(9_999))),
            Reason::Internal,
        ),
    ];
    for (name, edit, reason) in rows {
        let mut script = rig.good.clone();
        edit(&mut script);
        match rig.run(script).await {
            Ok(_) => panic!("{name}: committed"),
            Err(failure) => assert_eq!(failure.reason, *reason, "{name}: {failure}"),
        }
    }
    assert_eq!(
        rig.run(rig.good.clone()).await,
        Ok(FIRST_TOKEN),
        "and a good one after all of that"
    );
}

#[tokio::test]
async fn what_is_harmless_is_borne() {
    let rig = Rig::start().await;
    let rows: &[(&str, Edit)] = &[
        ("nothing is wrong", |_| {}),
        ("it was never queued", |s| drop(s.control.remove(0))),
        ("no progress was told", |s| drop(s.control.remove(2))),
        ("frames come in reverse", |s| s.frames.reverse()),
        ("everything on control comes twice", |s| {
            s.control = s.control.iter().flat_map(|m| [m.clone(), m.clone()]).collect();
        }),
        ("words of a newer version are between all", |s| {
            s.control = s.control.iter().flat_map(|m| [None, m.clone()]).collect();
        }),
        ("progress goes backwards", |s| {
            let back = Some(Message::Progress(proto::Progress::default()));
            s.control.insert(3, back);
        }),
        ("released and renewed come unasked", |s| {
            s.control.insert(2, Some(Message::Released(proto::Released {})));
            s.control.insert(2, Some(Message::Renewed(proto::Renewed::default())));
        }),
    ];
    for (name, edit) in rows {
        let mut script = rig.good.clone();
        edit(&mut script);
        assert_eq!(rig.run(script).await, Ok(FIRST_TOKEN), "{name}");
    }
}

/// One thing done to a script.
#[derive(Debug, Clone)]
enum Mutation {
    DropControl(prop::sample::Index),
    DoubleControl(prop::sample::Index),
    SwapControl(prop::sample::Index, prop::sample::Index),
    DropFrame(prop::sample::Index),
    DoubleFrame(prop::sample::Index),
    SwapFrames(prop::sample::Index, prop::sample::Index),
    FlipPayload(prop::sample::Index, prop::sample::Index),
    CutPayload(prop::sample::Index, prop::sample::Index),
    Field(prop::sample::Index, u8, u32),
}

fn mutation() -> impl Strategy<Value = Mutation> {
    let i = any::<prop::sample::Index>;
    prop_oneof![
        i().prop_map(Mutation::DropControl),
        i().prop_map(Mutation::DoubleControl),
        (i(), i()).prop_map(|(a, b)| Mutation::SwapControl(a, b)),
        i().prop_map(Mutation::DropFrame),
        i().prop_map(Mutation::DoubleFrame),
        (i(), i()).prop_map(|(a, b)| Mutation::SwapFrames(a, b)),
        (i(), i()).prop_map(|(a, b)| Mutation::FlipPayload(a, b)),
        (i(), i()).prop_map(|(a, b)| Mutation::CutPayload(a, b)),
        (i(), 0..5u8, prop_oneof![any::<u32>(), 0..110u32]).prop_map(|(a, b, c)| Mutation::Field(a, b, c)),
    ]
}

impl Mutation {
    fn apply(&self, s: &mut Script) {
        if s.control.is_empty() || s.frames.is_empty() {
            return;
        }
        let (controls, frames) = (s.control.len(), s.frames.len());
        match self {
            Self::DropControl(i) => drop(s.control.remove(i.index(controls))),
            Self::DoubleControl(i) => {
                let i = i.index(controls);
                s.control.insert(i, s.control[i].clone());
            }
            Self::SwapControl(a, b) => s.control.swap(a.index(controls), b.index(controls)),
            Self::DropFrame(i) => drop(s.frames.remove(i.index(frames))),
            Self::DoubleFrame(i) => {
                let i = i.index(frames);
                s.frames.insert(i, s.frames[i].clone());
            }
            Self::SwapFrames(a, b) => s.frames.swap(a.index(frames), b.index(frames)),
            Self::FlipPayload(i, at) => {
                let frame = &mut s.frames[i.index(frames)];
                let mut payload = frame.payload.to_vec();
                let len = payload.len();
                if len > 0 {
                    payload[at.index(len)] ^= 0x40;
                }
                frame.payload = payload.into();
            }
            Self::CutPayload(i, at) => {
                let frame = &mut s.frames[i.index(frames)];
                frame.payload.truncate(at.index(frame.payload.len() + 1));
            }
            Self::Field(i, field, value) => {
                let frame = &mut s.frames[i.index(frames)];
                match field {
                    0 => frame.layer = *value,
                    1 => frame.component = *value,
                    2 => frame.first_token = *value,
                    3 => frame.tokens = *value,
                    _ => frame.crc32c = *value,
                }
            }
        }
    }
}

/// The frames as a set, whatever their order.
fn sorted(frames: &[Frame]) -> Vec<(u32, u32, u32, u32, u32, Bytes)> {
    let mut all: Vec<_> = frames
        .iter()
        .map(|f| {
            (
                f.layer,
                f.component,
                f.first_token,
                f.tokens,
                f.crc32c,
                f.payload.clone(),
            )
        })
        .collect();
    all.sort();
    all
}

#[test]
fn whatever_is_done_to_the_messages_only_the_whole_kv_commits() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let rig = runtime.block_on(Rig::start());
    let good = sorted(&rig.good.frames);
    let mut runner = TestRunner::new(Config {
        cases: 96,
        // one that fails may take all of a test's patience, so it is not shrunk for long
        max_shrink_iters: 8,
        failure_persistence: None,
        ..Config::default()
    });
    let outcome = runner.run(&prop::collection::vec(mutation(), 0..4), |mutations| {
        let mut script = rig.good.clone();
        for mutation in &mutations {
            mutation.apply(&mut script);
        }
        // what comes after the last byte that was needed may not even be read
        let whole = script
            .frames
            .get(..good.len())
            .is_some_and(|needed| sorted(needed) == good);
        let result = runtime.block_on(rig.run(script));
        if let Ok(token) = result {
            prop_assert_eq!(token, FIRST_TOKEN);
            prop_assert!(whole, "committed without the whole KV");
        }
        if mutations.is_empty() {
            prop_assert_eq!(result, Ok(FIRST_TOKEN));
        }
        Ok(())
    });
    outcome.unwrap();
}
