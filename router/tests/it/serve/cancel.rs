//! A client that leaves takes everything below it along, at every phase.

use std::time::Duration;

use proptest::prelude::*;
use serde_json::json;
use tandem_wire::proto::finished::Cause;
use tandem_wire::proto::{Load, phase};

use super::client::{question, until_text};
use super::engine::{self, Step};
use super::stack::{Stack, stack};
use super::{CANCELLED_WITHIN, PATIENCE};

/// Sends a request on a connection of its own, waits for `phase`, and leaves.
async fn leaves(stack: &Stack, body: serde_json::Value, phase: impl Future<Output = ()>) {
    let client = super::client::Client::new(stack.router.addr());
    let request = tokio::spawn(client.post("/v1/chat/completions", &body).send());
    tokio::time::timeout(PATIENCE, phase)
        .await
        .expect("the phase was never reached");
    request.abort();
    let _ = request.await;
    drop(client);
}

#[tokio::test]
async fn a_client_that_leaves_before_the_head_leaves_the_engine_working() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    for (at, streamed) in [(1, false), (2, true)] {
        decode.then(vec![Step::Hold]);
        leaves(&stack, question(json!({"stream": streamed})), decode.called(at)).await;
        assert!(decode.idle().await < CANCELLED_WITHIN);
        stack.at_rest(&[&decode]).await;
    }
    assert_eq!(
        stack.sample("tandem_router_requests_total{endpoint=\"chat\",code=\"client_gone\"}"),
        2
    );
}

#[tokio::test]
async fn a_client_that_leaves_during_prefill_leaves_the_engine_working() {
    let (prefill, decode) = (engine::prefill(), engine::decode());
    let stack = stack(&[&prefill], &[&decode], &[]).await;
    for (at, streamed) in [(1, false), (2, true)] {
        decode.then(vec![Step::Started, Step::Phase(phase::Kind::Prefill), Step::Hold]);
        leaves(&stack, question(json!({"stream": streamed})), decode.called(at)).await;
        assert!(decode.idle().await < CANCELLED_WITHIN);
        stack.at_rest(&[&decode, &prefill]).await;
    }
}

#[tokio::test]
async fn a_client_that_leaves_between_two_tokens_leaves_the_engine_working() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.then(vec![Step::Started, Step::Spell("Par"), Step::Hold]);
    let client = super::client::Client::new(stack.router.addr());
    let rest = until_text(client.streaming(json!({})).await, "Par").await;
    assert_eq!(decode.open(), 1);
    drop((rest, client));
    assert!(decode.idle().await < CANCELLED_WITHIN);
    stack.at_rest(&[&decode]).await;
    assert_eq!(
        stack.sample("tandem_router_requests_total{endpoint=\"chat\",code=\"client_gone\"}"),
        1
    );
}

#[tokio::test]
async fn a_client_that_leaves_while_tokens_pour_leaves_the_engine_working() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.then(vec![Step::Started, Step::Flood]);
    let client = super::client::Client::new(stack.router.addr());
    let rest = until_text(client.streaming(json!({})).await, "flood").await;
    drop((rest, client));
    assert!(decode.idle().await < CANCELLED_WITHIN);
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn a_client_that_leaves_in_the_queue_keeps_its_place() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.report(Load {
        running: 4,
        ..Load::default()
    });
    let waiting = async {
        while stack.sample("tandem_router_queue_depth") < 1 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    stack.knows_of(&decode, 4).await;
    leaves(&stack, question(json!({})), waiting).await;
    stack.reaches("tandem_router_queue_depth", 0).await;
    decode.report(Load::default());
    assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
    assert_eq!(decode.calls().len(), 1, "the one that left was served");
    stack.at_rest(&[&decode]).await;
}

/// Where a client leaves.
#[derive(Debug, Clone, Copy)]
enum Leaves {
    Never,
    AtOnce,
    AfterHead,
    AfterText,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn counters_do_not_come_back_to_zero_after_random_aborts(
        plan in prop::collection::vec((0usize..4, any::<bool>(), 0usize..5), 8..40),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (prefill, one, two) = (engine::prefill(), engine::decode(), engine::decode());
            let stack = stack(&[&prefill], &[&one, &two], &["--queue-ms=2000"]).await;
            let clients = plan.iter().map(|&(leave, streamed, delay)| {
                let leave = [Leaves::Never, Leaves::AtOnce, Leaves::AfterHead, Leaves::AfterText][leave];
                one_client(&stack, leave, streamed, delay)
            });
            futures::future::join_all(clients).await;
            stack.at_rest(&[&prefill, &one, &two]).await;
            assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
            let text = stack.metrics.encode().unwrap();
            let counted: usize = text.lines()
                .filter(|line| line.starts_with("tandem_router_requests_total{endpoint=\"chat\""))
                .map(|line| line.rsplit(' ').next().unwrap().parse::<usize>().unwrap())
                .sum();
            // who left at once may not have been seen at all
            let seen = plan.iter().filter(|(leave, _, _)| *leave != 1).count();
            assert!((seen + 1..=plan.len() + 1).contains(&counted), "{counted} of {plan:?}");
        });
    }
}

async fn one_client(stack: &Stack, leave: Leaves, streamed: bool, delay: usize) {
    let client = super::client::Client::new(stack.router.addr());
    let mut request = Box::pin(
        client
            .post("/v1/chat/completions", &question(json!({"stream": streamed})))
            .send(),
    );
    match leave {
        Leaves::AtOnce => {
            let _ = tokio::time::timeout(Duration::from_millis(delay as u64), &mut request).await;
        }
        Leaves::AfterHead => drop(request.await.unwrap()),
        Leaves::AfterText if streamed => drop(until_text(request.await.unwrap(), "P").await),
        Leaves::AfterText | Leaves::Never => {
            let answer = request.await.unwrap();
            assert_eq!(answer.status(), 200);
            assert!(answer.text().await.unwrap().contains('P'));
        }
    }
}

#[tokio::test]
async fn text_after_the_end_keeps_an_engine_busy() {
    // an engine that says more after its last message
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.then(vec![
        Step::Started,
        Step::Spell("ok"),
        Step::Finish(Cause::Stop),
        Step::Spell("more"),
        Step::Hold,
    ]);
    assert_eq!(stack.client.chat(json!({})).await.content(), "ok");
    assert!(decode.idle().await < CANCELLED_WITHIN);
}
