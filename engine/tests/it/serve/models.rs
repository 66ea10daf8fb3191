//! Engines with models that compute, over real gRPC.

use std::path::Path;
use std::sync::Arc;

use tandem_engine::exec::Executor;
use tandem_engine::model::{KvBudget, LoadOptions, load};
use tandem_engine::sched::{Role, SchedKnobs};
use tandem_engine::serve::NodeConfig;
use tandem_wire::proto::finished::Cause;
use tandem_wire::proto::{GenerateRequest, Sampling};

use crate::real::{CAPITAL, PARIS, real_model};
use crate::support::fake::mix;
use crate::support::node::{TestNode, config};
use crate::support::sched::until_idle;
use crate::tiny::{Kind, Shape, llama};

fn executor(path: &Path) -> Box<dyn Executor> {
    in_parts(path, 1)
}

fn in_parts(path: &Path, ranks: usize) -> Box<dyn Executor> {
    let options = LoadOptions {
        threads: 2,
        tensor_parallel: ranks,
        kv: KvBudget::Pages(300),
        ..LoadOptions::new(path)
    };
    load(&options, &mut |_| {}).unwrap()
}

fn cut(role: Role) -> NodeConfig {
    NodeConfig {
        knobs: SchedKnobs {
            chunked_prefill_tokens: 19,
            step_tokens: 64,
            prefill_queue: 64,
            ..SchedKnobs::default()
        },
        ..config(role)
    }
}

fn mixed(i: u64) -> (Vec<u32>, u32, Sampling) {
    let r = mix(i);
    // shared beginnings, cold and warm
    let mut tokens: Vec<u32> = (0..40).map(|t| 3 + (mix(r % 4 + 1_000) + t * t) as u32 % 90).collect();
    tokens.extend((0..(r >> 8) % 50).map(|t| 3 + mix(r ^ t) as u32 % 90));
    let sampling = Sampling {
        temperature: if r.is_multiple_of(3) { 0.9 } else { 0.0 },
        top_p: if r.is_multiple_of(2) { 0.8 } else { 0.0 },
        seed: r,
        ..Sampling::default()
    };
    (tokens, 2 + (r >> 16) as u32 % 40, sampling)
}

#[tokio::test]
async fn a_computed_answer_does_not_depend_on_neighbours_aborts_or_hand_offs() {
    answers_depend_on_nothing_else(Shape::SMALL, 1).await;
}

#[tokio::test]
async fn nor_does_it_where_two_ranks_share_the_model() {
    let shape = Shape {
        inner: 128,
        ..Shape::SMALL
    };
    answers_depend_on_nothing_else(shape, 2).await;
}

/// What one engine answers alone, and what prefill and decode, in `ranks` parts each, make of the same requests together.
async fn answers_depend_on_nothing_else(shape: Shape, ranks: usize) {
    let dir = tempfile::tempdir().unwrap();
    let path = llama(shape, Kind::Q4_1, Kind::Q8_0, 11).write(dir.path());
    let solo = TestNode::start(in_parts(&path, ranks), config(Role::Unified)).await;
    let mut expected = Vec::new();
    for i in 0..32 {
        let (tokens, new, sampling) = mixed(i);
        let request = GenerateRequest {
            sampling: Some(sampling),
            ..solo.request(&tokens, new)
        };
        // every prompt cold
        solo.scheduler.cache().flush();
        expected.push(solo.ask(request).await.unwrap().tokens);
    }
    solo.close().await;

    let prefill = Arc::new(TestNode::start(in_parts(&path, ranks), cut(Role::Prefill)).await);
    let decode = Arc::new(TestNode::start(in_parts(&path, ranks), cut(Role::Decode)).await);
    let mut tasks = Vec::new();
    for (i, expected) in (0..32_u64).zip(expected) {
        let (tokens, new, sampling) = mixed(i);
        let request = GenerateRequest {
            prefill: (i % 4 != 3).then(|| prefill.peer()),
            sampling: Some(sampling),
            request_id: i.to_string(),
            ..decode.request(&tokens, new)
        };
        let abort_after = (i.is_multiple_of(3)).then_some(mix(i) as usize % 20);
        let decode = Arc::clone(&decode);
        tasks.push(tokio::spawn(async move {
            decode.must_answer(request, &expected, abort_after).await;
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    until_idle(&decode.scheduler).await;
    until_idle(&prefill.scheduler).await;
}

#[tokio::test]
async fn smollm2_answers_the_same_from_one_engine_and_from_two() {
    let Some(path) = real_model() else { return };
    let answer = &PARIS[..PARIS.len() - 1];
    let prefill = TestNode::start(executor(&path), config(Role::Prefill)).await;
    let decode = TestNode::start(executor(&path), config(Role::Decode)).await;
    for pulled in [true, false] {
        let request = GenerateRequest {
            prefill: pulled.then(|| prefill.peer()),
            ignore_eos: false,
            ..decode.request(&CAPITAL, 20)
        };
        let got = decode.ask(request).await.unwrap();
        assert_eq!((&got.tokens[..], got.cause), (answer, Some(Cause::Stop)));
        let usage = got.usage;
        assert_eq!(
            (usage.moved_tokens, usage.computed_tokens),
            if pulled { (26, 0) } else { (0, 10) }
        );
        assert_eq!(usage.moved_bytes, u64::from(usage.moved_tokens) * 23_040);
    }
    for node in [prefill, decode] {
        until_idle(&node.scheduler).await;
        node.close().await;
    }
}
