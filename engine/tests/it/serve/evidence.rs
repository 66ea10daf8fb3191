//! What an engine says of its requests: each level turns while there is work, is zero after it, and needs nobody who moves.

use std::time::Duration;

use tandem_engine::sched::{Role, SchedKnobs};
use tandem_engine::serve::NodeConfig;
use tandem_wire::phase::{PHASES, Phase, name};
use tandem_wire::proto::{self, GenerateEvent, GenerateRequest};
use tandem_wire::{BootId, Reason};
use tokio::net::TcpListener;
use tonic::Streaming;

use super::generate::hesitant;
use crate::support::fake::{FakeConfig, FakeControl};
use crate::support::node::{TestNode, config, eventually, next};
use crate::support::sched::{PATIENCE, prompt, until_idle};
use crate::transfer::relay::{Relay, Rule};

/// Its load by a stream of its own.
async fn load(node: &TestNode) -> proto::Load {
    let mut client = node.client.clone();
    let report = async {
        let watch = client.watch_load(proto::WatchLoadRequest::default()).await;
        watch.unwrap().into_inner().message().await.unwrap().unwrap()
    };
    tokio::time::timeout(PATIENCE, report).await.expect("no load in time")
}

/// A sample of its metrics.
fn sample(node: &TestNode, of: &str) -> f64 {
    let metrics = node.metrics.encode().unwrap();
    let line = metrics
        .lines()
        .find_map(|line| line.strip_prefix(of)?.strip_prefix(' '));
    let value = line.unwrap_or_else(|| panic!("no {of} in\n{metrics}"));
    value.parse().unwrap()
}

/// Waits until its load and its metrics both say that so many wait for each, and nobody for anything else.
async fn stands(node: &TestNode, expected: &[(Phase, u32)]) {
    let begun = tokio::time::Instant::now();
    loop {
        let load = load(node).await;
        let told: Vec<_> = load.inflight.iter().map(|of| (of.phase(), of.count)).collect();
        let gauges = PHASES.map(|phase| {
            let labels = format!("{{state=\"{}\"}}", name(phase));
            (phase, sample(node, &format!("tandem_engine_inflight{labels}")) as u32)
        });
        let shown: Vec<_> = gauges.into_iter().filter(|(_, count)| *count > 0).collect();
        if told == expected && shown == expected {
            return;
        }
        assert!(
            begun.elapsed() < PATIENCE,
            "expected {expected:?}, load {told:?}, metrics {shown:?}"
        );
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Of a node, the levels that are no phases.
const LEVELS: [&str; 7] = [
    "tandem_engine_running",
    "tandem_engine_waiting",
    "tandem_engine_waiting_tokens",
    "tandem_engine_transferring",
    "tandem_engine_pages{state=\"held\"}",
    "tandem_transfer_oldest_age_seconds{side=\"prefill\"}",
    "tandem_transfer_oldest_age_seconds{side=\"decode\"}",
];

/// Waits until these of [`LEVELS`], as far as their names go, are above zero and all others zero.
async fn raised(node: &TestNode, expected: &[&str]) {
    let begun = tokio::time::Instant::now();
    loop {
        let raised: Vec<&str> = LEVELS.into_iter().filter(|level| sample(node, level) > 0.0).collect();
        if raised.len() == expected.len() && raised.iter().zip(expected).all(|(level, of)| level.contains(of)) {
            return;
        }
        assert!(begun.elapsed() < PATIENCE, "expected {expected:?}, raised {raised:?}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Prefill and decode, with a relay between their data ports.
struct Two {
    prefill: TestNode,
    reads: FakeControl,
    decode: TestNode,
    writes: FakeControl,
    relay: Relay,
}

impl Two {
    async fn start() -> Self {
        let fake = FakeConfig::default();
        let relay = Relay::start().await;
        let one_at_a_time = NodeConfig {
            advertise: Some(relay.addr.to_string()),
            knobs: SchedKnobs {
                max_running: 1,
                ..SchedKnobs::default()
            },
            ..config(Role::Prefill)
        };
        let (prefill, reads) = TestNode::fake(&fake, one_at_a_time).await;
        relay.forward_to(prefill.data.unwrap());
        let (decode, writes) = TestNode::fake(&fake, config(Role::Decode)).await;
        Self {
            prefill,
            reads,
            decode,
            writes,
            relay,
        }
    }

    /// No request gets beyond any phase.
    fn hold(&self) {
        self.reads.pause();
        self.relay.to_client(Rule::Freeze);
        self.writes.pause();
    }

    /// Requests get as far as `phase`.
    fn let_up_to(&self, phase: Phase) {
        if matches!(phase, Phase::Transfer | Phase::Decode) {
            self.reads.resume();
        }
        if phase == Phase::Decode {
            self.relay.to_client(Rule::Pass);
        }
    }

    fn let_go(&self) {
        self.let_up_to(Phase::Decode);
        self.writes.resume();
    }

    fn request(&self, seed: u32) -> GenerateRequest {
        GenerateRequest {
            prefill: Some(self.prefill.peer()),
            ..self.decode.request(&prompt(seed, 60), 40)
        }
    }

    async fn open(&self, seed: u32) -> Streaming<GenerateEvent> {
        self.decode.open(self.request(seed)).await.unwrap()
    }

    /// Both engines say the same.
    async fn stand(&self, expected: &[(Phase, u32)]) {
        stands(&self.decode, expected).await;
        stands(&self.prefill, expected).await;
    }

    async fn close(self) {
        for node in [self.prefill, self.decode] {
            until_idle(&node.scheduler).await;
            stands(&node, &[]).await;
            raised(&node, &[]).await;
            node.close().await;
        }
    }
}

async fn finish(mut stream: Streaming<GenerateEvent>) {
    while next(&mut stream).await.unwrap().is_some() {}
}

#[tokio::test]
async fn each_level_turns_under_load_and_is_zero_after_it() {
    let two = Two::start().await;
    two.stand(&[]).await;
    two.hold();
    let one = two.open(1).await;
    two.stand(&[(Phase::Prefill, 1)]).await;
    let other = two.open(2).await;
    two.stand(&[(Phase::Queued, 1), (Phase::Prefill, 1)]).await;
    let at_prefill = ["running", "waiting", "waiting_tokens", "held", "prefill"];
    raised(&two.prefill, &at_prefill).await;
    raised(&two.decode, &["running", "transferring", "held", "decode"]).await;
    two.let_up_to(Phase::Transfer);
    two.stand(&[(Phase::Transfer, 2)]).await;
    raised(&two.prefill, &["transferring", "held", "prefill"]).await;
    two.let_up_to(Phase::Decode);
    stands(&two.decode, &[(Phase::Decode, 2)]).await;
    stands(&two.prefill, &[]).await;
    raised(&two.prefill, &[]).await;
    raised(&two.decode, &["running", "held"]).await;
    two.let_go();
    tokio::join!(finish(one), finish(other));
    two.stand(&[]).await;
    raised(&two.decode, &[]).await;

    // a caller that takes nothing
    let unread = GenerateRequest {
        prefill: None,
        ..two.decode.request(&prompt(3, 20), 900)
    };
    let unread = hesitant(&two.decode, 10).await.generate(unread).await.unwrap();
    stands(&two.decode, &[(Phase::Client, 1)]).await;
    drop(unread);
    stands(&two.decode, &[]).await;

    // a prefill that says nothing
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let unanswered = GenerateRequest {
        prefill: Some(proto::Peer {
            endpoint: silent.local_addr().unwrap().to_string(),
            boot_id: BootId::random().to_wire(),
        }),
        ..two.request(4)
    };
    let unanswered = two.decode.open(unanswered).await.unwrap();
    stands(&two.decode, &[(Phase::Accept, 1)]).await;
    drop(unanswered);
    two.close().await;
}

#[tokio::test]
async fn a_caller_that_leaves_takes_its_request_out_of_every_level() {
    let two = Two::start().await;
    for (seed, phase) in [(1, Phase::Prefill), (2, Phase::Transfer), (3, Phase::Decode)] {
        two.hold();
        let stream = two.open(seed).await;
        two.let_up_to(phase);
        stands(&two.decode, &[(phase, 1)]).await;
        drop(stream);
        // one that a step works on is told as long as the step is not over
        let (at_prefill, at_decode) = match phase {
            Phase::Prefill => (1, 0),
            Phase::Decode => (0, 1),
            _ => (0, 0),
        };
        stands(&two.decode, &[(phase, at_decode)][..at_decode as usize]).await;
        stands(&two.prefill, &[(phase, at_prefill)][..at_prefill as usize]).await;
        two.let_go();
        two.stand(&[]).await;
    }
    two.hold();
    let first = two.open(4).await;
    two.stand(&[(Phase::Prefill, 1)]).await;
    let queued = two.open(5).await;
    two.stand(&[(Phase::Queued, 1), (Phase::Prefill, 1)]).await;
    drop(queued);
    stands(&two.decode, &[(Phase::Prefill, 1)]).await;
    two.let_go();
    finish(first).await;
    two.close().await;
}

#[tokio::test]
async fn a_request_that_fails_is_in_no_level_any_more() {
    let two = Two::start().await;
    let fails = async |mut stream: Streaming<GenerateEvent>| loop {
        match next(&mut stream).await {
            Ok(Some(proto::generate_event::Event::Failure(failure))) => return failure.reason(),
            Ok(Some(_)) => {}
            other => panic!("{other:?}"),
        }
    };
    two.reads.fail_next("planted");
    assert_eq!(fails(two.open(1).await).await, Reason::Internal);
    two.stand(&[]).await;

    two.relay.to_client(Rule::Freeze);
    let stream = two.open(2).await;
    two.stand(&[(Phase::Transfer, 1)]).await;
    two.relay.to_client(Rule::Cut);
    assert_eq!(fails(stream).await, Reason::PeerLost);
    two.stand(&[]).await;
    two.relay.to_client(Rule::Pass);

    two.writes.fail_next("planted");
    assert_eq!(fails(two.open(3).await).await, Reason::Internal);
    two.stand(&[]).await;

    // a scheduler that dies takes all of them along
    two.hold();
    let stream = two.open(4).await;
    two.let_up_to(Phase::Decode);
    stands(&two.decode, &[(Phase::Decode, 1)]).await;
    two.decode.scheduler.give_up("planted");
    assert_eq!(fails(stream).await, Reason::Internal);
    let left = || two.decode.scheduler.inflight().to_wire();
    assert_eq!(left().len(), 1, "the step that hangs still has it");
    two.let_go();
    eventually("the step lets it go", || left().is_empty()).await;
    until_idle(&two.prefill.scheduler).await;
    stands(&two.prefill, &[]).await;
}

#[tokio::test]
async fn a_step_that_stands_still_is_told_while_it_does() {
    let (node, control) = TestNode::fake(&FakeConfig::default(), config(Role::Unified)).await;
    control.pause();
    let stream = node.open(node.request(&prompt(1, 20), 5)).await.unwrap();
    control.wait_until_held();
    let begun = tokio::time::Instant::now();
    loop {
        let load = load(&node).await;
        let [of] = &load.inflight[..] else { panic!("{load:?}") };
        assert_eq!((of.phase(), of.count), (Phase::Prefill, 1));
        let ages = [
            load.last_step_age_ms,
            load.last_progress_age_ms,
            of.still_ms,
            of.oldest_ms,
        ];
        let shown = [
            "tandem_engine_last_step_age_seconds",
            "tandem_engine_last_progress_age_seconds",
            "tandem_engine_inflight_still_seconds{state=\"prefill\"}",
            "tandem_engine_inflight_oldest_seconds{state=\"prefill\"}",
        ]
        .map(|metric| sample(&node, metric));
        if ages.iter().all(|&ms| ms >= 200) && shown.iter().all(|&seconds| seconds >= 0.2) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{load:?}, {shown:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    control.resume();
    finish(stream).await;
    stands(&node, &[]).await;
    node.close().await;
}

#[tokio::test]
async fn one_request_that_stands_still_is_not_hidden_by_others_that_move() {
    let two = Two::start().await;
    two.relay.to_client(Rule::Freeze);
    let stuck = two.open(1).await;
    two.stand(&[(Phase::Transfer, 1)]).await;
    two.writes.step_delay(Duration::from_millis(1));
    let long = |seed| two.decode.request(&prompt(seed, 20), 900);
    let mut seed = 1;
    let begun = tokio::time::Instant::now();
    loop {
        // something decodes all the time
        seed += 1;
        let moving = two.decode.open(long(seed)).await.unwrap();
        let load = load(&two.decode).await;
        let still = |phase| {
            load.inflight
                .iter()
                .find(|of| of.phase() == phase)
                .map(|of| of.still_ms)
        };
        let (transfer, moves) = (still(Phase::Transfer).unwrap(), load.last_progress_age_ms);
        if transfer > 300 && moves < transfer / 2 {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{load:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
        drop(moving);
    }
    drop(stuck);
    two.close().await;
}
