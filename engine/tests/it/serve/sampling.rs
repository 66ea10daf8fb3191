//! Every sampling parameter over real gRPC: a hand-off, a recomputation and the neighbours leave no trace in an answer.

use std::sync::Arc;

use serde_json::Value;
use tandem_engine::exec::Logprob;
use tandem_engine::sched::{Role, SchedKnobs, read_sampling};
use tandem_engine::serve::NodeConfig;
use tandem_wire::proto;
use tandem_wire::proto::finished::Cause;
use tandem_wire::proto::{GenerateRequest, LogitBias, OnPrefillFailure, Peer, Sampling};
use tandem_wire::{BootId, Reason};

use crate::support::fake::{END_TOKEN, FakeConfig, mix, solo_with, token_bytes};
use crate::support::node::{Answer, TestNode, config};
use crate::support::sched::{prompt, until_idle};

const NEW: u32 = 24;

type Change = fn(&mut Sampling);

fn bias(token: u32, bias: f32) -> LogitBias {
    LogitBias { token, bias }
}

/// One of each parameter, and all of them.
fn cases() -> Vec<(&'static str, Sampling)> {
    let hot = Sampling {
        temperature: 0.9,
        top_p: 1.0,
        seed: 5,
        ..Sampling::default()
    };
    let greedy = Sampling::default();
    let each = |s: &Sampling, change: fn(&mut Sampling)| {
        let mut s = s.clone();
        change(&mut s);
        s
    };
    vec![
        ("top_k", each(&hot, |s| s.top_k = 5)),
        ("top_k and top_p", each(&hot, |s| (s.top_k, s.top_p) = (40, 0.5))),
        ("min_p", each(&hot, |s| s.min_p = 0.6)),
        ("repetition", each(&greedy, |s| s.repetition_penalty = 1.7)),
        ("repetition below 1", each(&greedy, |s| s.repetition_penalty = 0.5)),
        ("presence", each(&greedy, |s| s.presence_penalty = -1.5)),
        ("frequency", each(&greedy, |s| s.frequency_penalty = -0.5)),
        (
            "bias",
            each(&greedy, |s| s.logit_bias = vec![bias(70, 7.0), bias(71, 6.5)]),
        ),
        (
            "min_new_tokens",
            each(&greedy, |s| {
                s.logit_bias = vec![bias(END_TOKEN, 100.0)];
                s.min_new_tokens = 9;
            }),
        ),
        ("logprobs", each(&greedy, |s| s.logprobs = Some(3))),
        ("logprobs of the token alone", each(&hot, |s| s.logprobs = Some(0))),
        (
            "all",
            each(&hot, |s| {
                s.top_k = 50;
                s.top_p = 0.9;
                s.min_p = 0.02;
                s.repetition_penalty = 1.2;
                s.presence_penalty = 0.4;
                s.frequency_penalty = 0.3;
                s.logit_bias = vec![bias(END_TOKEN, 4.5), bias(300, -3.0), bias(301, 3.0)];
                s.min_new_tokens = 4;
                s.logprobs = Some(20);
            }),
        ),
    ]
}

struct Rig {
    fake: FakeConfig,
    unified: TestNode,
    prefill: TestNode,
    decode: TestNode,
}

impl Rig {
    async fn start() -> Self {
        let fake = FakeConfig::default();
        let cut = |role| NodeConfig {
            knobs: SchedKnobs {
                chunked_prefill_tokens: 23,
                step_tokens: 61,
                prefill_queue: 64,
                ..SchedKnobs::default()
            },
            ..config(role)
        };
        Self {
            unified: TestNode::fake(&fake, cut(Role::Unified)).await.0,
            prefill: TestNode::fake(&fake, cut(Role::Prefill)).await.0,
            decode: TestNode::fake(&fake, cut(Role::Decode)).await.0,
            fake,
        }
    }

    /// The answer of a lone run, up to what ends it.
    fn expected(&self, prompt: &[u32], sampling: &Sampling) -> (Answer, Cause) {
        let read = read_sampling(Some(sampling), 2_048, NEW).unwrap();
        let (mut tokens, logprobs) = solo_with(&self.fake, prompt, NEW as usize, &read);
        let end = tokens.iter().position(|t| *t == END_TOKEN);
        tokens.truncate(end.unwrap_or(tokens.len()));
        let answer = Answer {
            logprobs: logprobs.iter().take(tokens.len()).map(Logprob::to_wire).collect(),
            tokens,
            ..Answer::default()
        };
        (answer, if end.is_some() { Cause::Stop } else { Cause::Length })
    }

    async fn close(self) {
        for node in [self.unified, self.prefill, self.decode] {
            until_idle(&node.scheduler).await;
            node.close().await;
        }
    }
}

fn request(node: &TestNode, prompt: &[u32], sampling: &Sampling, prefill: Option<Peer>) -> GenerateRequest {
    GenerateRequest {
        sampling: Some(sampling.clone()),
        ignore_eos: false,
        prefill,
        ..node.request(prompt, NEW)
    }
}

/// A prefill that is not there.
fn nobody() -> Peer {
    Peer {
        endpoint: "127.0.0.1:1".to_owned(),
        boot_id: BootId::random().to_wire(),
    }
}

#[tokio::test]
async fn every_parameter_gives_the_same_answer_with_a_hand_off_without_and_recomputed() {
    let rig = Rig::start().await;
    let mut answers = Vec::new();
    for (i, (name, sampling)) in cases().into_iter().enumerate() {
        let prompt = prompt(i as u32 + 1, 90);
        let (expected, cause) = rig.expected(&prompt, &sampling);
        let recompute = GenerateRequest {
            on_prefill_failure: OnPrefillFailure::Recompute.into(),
            ..request(&rig.decode, &prompt, &sampling, Some(nobody()))
        };
        for (how, answer) in [
            (
                "unified",
                rig.unified.ask(request(&rig.unified, &prompt, &sampling, None)).await,
            ),
            (
                "a hand-off",
                rig.decode
                    .ask(request(&rig.decode, &prompt, &sampling, Some(rig.prefill.peer())))
                    .await,
            ),
            ("recomputed", rig.decode.ask(recompute).await),
        ] {
            let answer = answer.unwrap_or_else(|f| panic!("{name}, {how}: {f}"));
            assert_eq!(answer.tokens, expected.tokens, "{name}, {how}");
            assert_eq!(answer.logprobs, expected.logprobs, "{name}, {how}");
            assert_eq!(answer.cause, Some(cause), "{name}, {how}");
            assert_eq!(answer.usage.recomputed, how == "recomputed", "{name}");
        }
        if name == "min_new_tokens" {
            assert_eq!((expected.tokens.len(), cause), (9, Cause::Stop));
        }
        answers.push((name, expected.logprobs.len()));
    }
    let with: Vec<&str> = answers.iter().filter(|a| a.1 > 0).map(|a| a.0).collect();
    assert_eq!(with, ["logprobs", "logprobs of the token alone", "all"]);
    rig.close().await;
}

#[tokio::test]
async fn neighbours_with_other_parameters_do_not_change_an_answer() {
    let rig = Arc::new(Rig::start().await);
    let mut tasks = Vec::new();
    for i in 0..24_u64 {
        let r = mix(i);
        let cases = cases();
        let (name, mut sampling) = cases[(r % cases.len() as u64) as usize].clone();
        sampling.seed = r >> 32;
        let rig = Arc::clone(&rig);
        tasks.push(tokio::spawn(async move {
            // some share a prefix
            let mut tokens = prompt((r % 3) as u32, 40).to_vec();
            tokens.extend_from_slice(&prompt(i as u32 + 50, 1 + (r >> 8) as usize % 40));
            let (expected, _) = rig.expected(&tokens, &sampling);
            let peer = (i % 3 != 2).then(|| rig.prefill.peer());
            let asked = request(&rig.decode, &tokens, &sampling, peer);
            let answer = rig.decode.ask(asked).await.unwrap_or_else(|f| panic!("{name}: {f}"));
            assert_eq!(answer.tokens, expected.tokens, "{name}");
            assert_eq!(answer.logprobs, expected.logprobs, "{name}");
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let Some(rig) = Arc::into_inner(rig) else {
        panic!("a task still runs")
    };
    rig.close().await;
}

fn schema(text: &str) -> proto::Grammar {
    proto::Grammar {
        kind: Some(proto::grammar::Kind::JsonSchema(text.to_owned())),
    }
}

const POINT: &str = r#"{"type": "object", "properties": {"x": {"type": "integer", "minimum": 10, "maximum": 99},
    "name": {"type": "string", "minLength": 2, "maxLength": 5}}, "required": ["x", "name"], "additionalProperties": false}"#;

#[tokio::test]
async fn an_answer_to_a_schema_is_the_same_with_a_hand_off_without_and_recomputed() {
    let rig = Rig::start().await;
    let text = token_bytes();
    for seed in 0..6_u64 {
        let prompt = prompt(seed as u32 + 1, 70);
        let sampling = Sampling {
            temperature: if seed % 2 == 0 { 1.0 } else { 0.0 },
            top_p: 1.0,
            seed,
            repetition_penalty: 1.1,
            logprobs: Some(1),
            // all that the schema allows takes fewer tokens than this
            grammar: Some(schema(POINT)),
            ..Sampling::default()
        };
        let mut tokens = None;
        for (node, peer, recomputed) in [
            (&rig.unified, None, false),
            (&rig.decode, Some(rig.prefill.peer()), false),
            (&rig.decode, Some(nobody()), true),
        ] {
            let asked = GenerateRequest {
                on_prefill_failure: OnPrefillFailure::Recompute.into(),
                max_new_tokens: 64,
                ..request(node, &prompt, &sampling, peer)
            };
            let answer = node.ask(asked).await.unwrap();
            assert_eq!(answer.cause, Some(Cause::Stop));
            assert_eq!(answer.usage.recomputed, recomputed);
            assert_eq!(answer.logprobs.len(), answer.tokens.len());
            assert_eq!(*tokens.get_or_insert_with(|| answer.tokens.clone()), answer.tokens);
        }
        let bytes: Vec<u8> = tokens.unwrap().iter().flat_map(|t| text[*t as usize].clone()).collect();
        let value: Value = serde_json::from_slice(&bytes).unwrap();
        assert!((10..100).contains(&value["x"].as_i64().unwrap()), "{value}");
        assert!(
            (2..6).contains(&value["name"].as_str().unwrap().chars().count()),
            "{value}"
        );
    }
    rig.close().await;
}

#[tokio::test]
async fn a_schema_that_cannot_be_held_to_is_refused_by_name() {
    let rig = Rig::start().await;
    let prompt = prompt(1, 10);
    let with = |grammar, change: fn(&mut GenerateRequest)| {
        let sampling = Sampling {
            grammar: Some(grammar),
            ..Sampling::default()
        };
        let mut asked = request(&rig.unified, &prompt, &sampling, None);
        change(&mut asked);
        asked
    };
    let long = format!(r#"{{"title": "{}"}}"#, "x".repeat(300 << 10));
    for (asked, named) in [
        (
            with(schema(r#"{"type": 3}"#), |_| {}),
            "response_format's schema is refused",
        ),
        (with(schema(&long), |_| {}), "response_format's schema has 3072"),
        (
            with(schema(POINT), |r| r.ignore_eos = true),
            "a token that ends the answer",
        ),
        (with(proto::Grammar::default(), |_| {}), "sampling.grammar is of a kind"),
    ] {
        let failure = rig.unified.ask(asked).await.unwrap_err();
        assert_eq!(failure.reason, Reason::Invalid, "{failure}");
        assert!(failure.detail.contains(named), "{failure}");
    }
    // the longest answer to it has fewer tokens
    let impossible = with(schema(r#"{"enum": [1]}"#), |r| {
        r.sampling.as_mut().unwrap().min_new_tokens = 5;
    });
    let failure = rig.unified.ask(impossible).await.unwrap_err();
    assert_eq!(failure.reason, Reason::Invalid, "{failure}");
    assert!(failure.detail.contains("allow no token"), "{failure}");
    rig.close().await;
}

#[tokio::test]
async fn a_parameter_out_of_range_is_refused_by_name_on_both_ends() {
    let rig = Rig::start().await;
    let prompt = prompt(1, 10);
    let bad: [(&str, Change); 8] = [
        ("sampling.min_p", |s| s.min_p = 1.5),
        ("sampling.repetition_penalty", |s| s.repetition_penalty = -1.0),
        ("sampling.presence_penalty", |s| s.presence_penalty = f32::NAN),
        ("sampling.frequency_penalty", |s| s.frequency_penalty = 101.0),
        ("sampling.logit_bias[0]", |s| s.logit_bias = vec![bias(2_048, 1.0)]),
        ("sampling.logit_bias", |s| s.logit_bias = vec![bias(1, 1.0); 2_000]),
        ("sampling.logprobs", |s| s.logprobs = Some(21)),
        ("sampling.min_new_tokens", |s| s.min_new_tokens = NEW + 1),
    ];
    for (named, change) in bad {
        let mut sampling = Sampling::default();
        change(&mut sampling);
        for node in [&rig.unified, &rig.decode] {
            let failure = node.ask(request(node, &prompt, &sampling, None)).await.unwrap_err();
            assert_eq!(failure.reason, Reason::Invalid, "{named}: {failure}");
            assert!(failure.detail.contains(named), "{named}: {failure}");
        }
    }
    rig.close().await;
}
