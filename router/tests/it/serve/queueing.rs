//! The queue: engines with room get requests in order, and waiting has bounds.

use serde_json::json;
use tandem_wire::proto::Load;
use tandem_wire::proto::finished::Cause;
use tandem_wire::{Reason, Source};

use super::client::events;
use super::engine::{self, Mock, Shape, Step, failure};
use super::stack::{Stack, stack};

fn small() -> Mock {
    Mock::start(Shape {
        max_running: 1,
        ..Shape::default()
    })
}

/// Whatever it refused is asked for again only after a report that a test makes.
fn told(max_running: u32) -> Mock {
    Mock::start(Shape {
        max_running,
        told: true,
        ..Shape::default()
    })
}

fn held() -> Vec<Step> {
    vec![Step::Started, Step::Hold, Step::Spell("ok"), Step::Finish(Cause::Stop)]
}

/// Fills the one place of `decode`.
async fn fill(stack: &Stack, decode: &Mock) -> reqwest::Response {
    let calls = decode.calls().len();
    let response = stack.client.streaming(json!({})).await;
    decode.called(calls + 1).await;
    response
}

#[tokio::test]
async fn a_full_engine_gets_more_than_it_can_run() {
    let decode = small();
    decode.always(held());
    let stack = stack(&[], &[&decode], &[]).await;
    let first = fill(&stack, &decode).await;
    let mut waiting = Vec::new();
    for place in 1..=3 {
        let client = stack.client.clone();
        let user = format!("number {place}");
        let body = json!({"messages": [{"role": "user", "content": user}]});
        waiting.push(tokio::spawn(async move { client.chat(body).await }));
        stack.reaches("tandem_router_queue_depth", place).await;
    }
    assert_eq!(decode.calls().len(), 1);
    for _ in 0..4 {
        decode.release();
    }
    assert!(events(first).await.done);
    for request in waiting {
        assert_eq!(request.await.unwrap().content(), "ok");
    }
    // first come, first served
    let calls = decode.calls();
    for (place, call) in calls.iter().enumerate().skip(1) {
        let prompt = engine::TEXT.decode(&call.prompt_tokens, false).unwrap();
        assert!(
            prompt.contains(&format!("number {place}")),
            "{prompt} came at place {place}"
        );
    }
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn a_full_queue_takes_more_or_does_not_say_when_to_come_back() {
    let decode = small();
    decode.always(held());
    let stack = stack(&[], &[&decode], &["--queue-limit=1"]).await;
    let first = fill(&stack, &decode).await;
    let client = stack.client.clone();
    let second = tokio::spawn(async move { client.chat(json!({})).await });
    stack.reaches("tandem_router_queue_depth", 1).await;
    let third = stack.client.chat(json!({})).await;
    assert_eq!((third.status, third.code().as_str()), (429, "queue_full"));
    assert_eq!(third.header("retry-after"), Some("1"));
    assert_eq!(third.json()["error"]["type"], "rate_limit_error");
    decode.release();
    decode.release();
    assert!(events(first).await.done);
    assert_eq!(second.await.unwrap().content(), "ok");
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn waiting_for_room_has_no_end() {
    let decode = small();
    decode.always(held());
    let stack = stack(&[], &[&decode], &["--queue-ms=100"]).await;
    let first = fill(&stack, &decode).await;
    let second = stack.client.chat(json!({})).await;
    assert_eq!((second.status, second.code().as_str()), (503, "no_capacity"));
    assert_eq!(second.header("retry-after"), Some("1"));
    decode.release();
    assert!(events(first).await.done);
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn a_refusal_for_lack_of_room_reaches_the_client_although_room_comes() {
    let decode = told(4);
    let stack = stack(&[], &[&decode], &[]).await;
    for _ in 0..5 {
        decode.then(vec![Step::Refuse(failure(Reason::NoCapacity, Source::Decode))]);
    }
    let client = stack.client.clone();
    let request = tokio::spawn(async move { client.chat(json!({})).await });
    // each report of the load lets it ask again, more often than a failure would be tried again
    for calls in 1..=5 {
        decode.called(calls).await;
        stack.reaches("tandem_router_queue_depth", 1).await;
        decode.report(Load {
            free_pages: calls as u32,
            ..Load::default()
        });
    }
    assert_eq!(request.await.unwrap().content(), "Paris");
    let attempts: Vec<_> = decode
        .calls()
        .iter()
        .map(|call| call.key.as_ref().unwrap().attempt)
        .collect();
    assert_eq!(attempts, [0, 1, 2, 3, 4, 5]);
    assert_eq!(stack.sample("tandem_router_retries_total{reason=\"no_capacity\"}"), 5);
}

#[tokio::test]
async fn a_refused_request_loses_its_place_in_the_line() {
    let decode = told(1);
    let stack = stack(&[], &[&decode], &[]).await;
    decode.then(vec![
        Step::Hold,
        Step::Refuse(failure(Reason::NoCapacity, Source::Decode)),
    ]);
    let ask = |user: &'static str| {
        let client = stack.client.clone();
        tokio::spawn(async move {
            client
                .chat(json!({"messages": [{"role": "user", "content": user}]}))
                .await
        })
    };
    let early = ask("early");
    decode.called(1).await;
    let late = ask("late");
    stack.reaches("tandem_router_queue_depth", 1).await;
    decode.release();
    stack.reaches("tandem_router_queue_depth", 2).await;
    decode.report(Load {
        free_pages: 1,
        ..Load::default()
    });
    assert_eq!(early.await.unwrap().content(), "Paris");
    assert_eq!(late.await.unwrap().content(), "Paris");
    let order: Vec<_> = decode
        .calls()
        .iter()
        .map(|call| engine::TEXT.decode(&call.prompt_tokens, false).unwrap())
        .collect();
    assert!(order[1].contains("early") && order[2].contains("late"), "{order:?}");
}

#[tokio::test]
async fn an_engine_full_of_others_requests_is_asked() {
    let decode = small();
    let stack = stack(&[], &[&decode], &["--queue-ms=5000"]).await;
    decode.report(Load {
        running: 1,
        ..Load::default()
    });
    stack.knows_of(&decode, 1).await;
    let client = stack.client.clone();
    let request = tokio::spawn(async move { client.chat(json!({})).await });
    stack.reaches("tandem_router_queue_depth", 1).await;
    assert!(decode.calls().is_empty());
    decode.report(Load::default());
    assert_eq!(request.await.unwrap().content(), "Paris");
}

#[tokio::test]
async fn a_draining_engine_is_asked() {
    let (one, two) = (engine::decode(), engine::decode());
    let stack = stack(&[], &[&one, &two], &["--policy=round-robin"]).await;
    one.report(Load {
        draining: true,
        ..Load::default()
    });
    let settled = async {
        loop {
            let before = one.calls().len();
            for _ in 0..4 {
                assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
            }
            if one.calls().len() == before {
                return;
            }
        }
    };
    tokio::time::timeout(super::PATIENCE, settled)
        .await
        .expect("the draining engine went on getting requests");
    two.report(Load {
        draining: true,
        ..Load::default()
    });
    stack
        .becomes(|state| !matches!(state, tandem_telemetry::State::Ready))
        .await;
    let answer = stack.client.chat(json!({})).await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "no_decode_engine"));
    assert!(answer.message().contains("drains"), "{}", answer.message());
    one.report(Load::default());
    stack.becomes(|state| *state == tandem_telemetry::State::Ready).await;
    assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
}

#[tokio::test]
async fn a_request_is_sent_again_and_again_to_an_engine_without_pages_for_it() {
    let decode = told(4);
    let stack = stack(&[], &[&decode], &[]).await;
    let pages = |free_pages, waiting| Load {
        running: 1,
        waiting,
        free_pages,
        total_pages: 1_000,
        ..Load::default()
    };
    decode.then(vec![Step::Refuse(failure(Reason::NoCapacity, Source::Decode))]);
    decode.report(pages(1_000, 0));
    stack.knows_of(&decode, 1).await;
    let client = stack.client.clone();
    let request = tokio::spawn(async move { client.chat(json!({"max_tokens": 300})).await });
    decode.called(1).await;
    stack.reaches("tandem_router_queue_depth", 1).await;
    // each report ends the refusal; 18 pages of 16 tokens are too few for 300
    for waiting in [1, 2, 1, 2, 1] {
        decode.report(pages(18, waiting));
        stack.knows_of(&decode, 1 + waiting).await;
        assert_eq!(stack.sample("tandem_router_queue_depth"), 1);
    }
    assert_eq!(decode.calls().len(), 1);
    decode.report(pages(100, 0));
    assert_eq!(request.await.unwrap().content(), "Paris");
    assert_eq!(decode.calls().len(), 2);
    // where nothing runs, no page will become free by waiting
    decode.report(Load {
        running: 0,
        ..pages(0, 0)
    });
    stack.knows_of(&decode, 0).await;
    assert_eq!(stack.client.chat(json!({"max_tokens": 300})).await.content(), "Paris");
}
