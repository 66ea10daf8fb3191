//! Which engine gets a request.

use serde_json::json;
use tandem_wire::proto::{Load, Role};

use super::client::events;
use super::engine::{self, Mock, Shape, Step};
use super::stack::stack;

fn with_length(role: Role, max_length_tokens: u32) -> Mock {
    Mock::start(Shape {
        role,
        max_length_tokens,
        ..Shape::default()
    })
}

#[tokio::test]
async fn round_robin_does_not_take_turns() {
    let decodes = [engine::decode(), engine::decode(), engine::decode()];
    let stack = stack(&[], &[&decodes[0], &decodes[1], &decodes[2]], &["--policy=round-robin"]).await;
    for _ in 0..9 {
        stack.client.chat(json!({})).await.content();
    }
    assert!(decodes.iter().all(|decode| decode.calls().len() == 3));
}

#[tokio::test]
async fn least_loaded_goes_to_the_fuller_of_two() {
    let (busy, free) = (engine::decode(), engine::decode());
    let stack = stack(&[], &[&busy, &free], &["--policy=least-loaded"]).await;
    busy.report(Load {
        running: 3,
        ..Load::default()
    });
    stack.knows_of(&busy, 3).await;
    for _ in 0..20 {
        stack.client.chat(json!({})).await.content();
    }
    assert!(busy.calls().is_empty());
}

#[tokio::test]
async fn own_requests_count_before_any_report_does() {
    let (one, two) = (engine::decode(), engine::decode());
    let stack = stack(&[], &[&one, &two], &["--policy=least-loaded"]).await;
    for decode in [&one, &two] {
        decode.always(vec![Step::Started, Step::Hold]);
    }
    let mut open = Vec::new();
    for _ in 0..4 {
        open.push(stack.client.streaming(json!({})).await);
    }
    assert_eq!((one.open(), two.open()), (2, 2));
    drop(open);
    stack.at_rest(&[&one, &two]).await;
}

#[tokio::test]
async fn a_pair_of_two_models_is_made() {
    let (ours, theirs) = (
        engine::prefill(),
        Mock::start(Shape {
            role: tandem_wire::proto::Role::Prefill,
            model_hash: 2,
            ..Shape::default()
        }),
    );
    let decode = engine::decode();
    let stack = stack(&[&theirs, &ours], &[&decode], &["--policy=round-robin"]).await;
    for _ in 0..6 {
        stack.client.chat(json!({})).await.content();
    }
    let all = decode.calls();
    assert!(
        all.iter()
            .all(|call| call.prefill.as_ref().unwrap().endpoint == ours.endpoint())
    );
}

#[tokio::test]
async fn load_is_reset_by_asking_an_engine_again() {
    let decode = Mock::start(Shape {
        max_running: 2,
        ..Shape::default()
    });
    let stack = stack(&[], &[&decode], &["--queue-ms=200"]).await;
    decode.then(vec![Step::Started, Step::Hold]);
    decode.then(vec![Step::Started, Step::Spell("P"), Step::Break]);
    let held = stack.client.streaming(json!({})).await;
    // a broken call makes the router ask the same boot again
    let infos = decode.infos();
    assert!(events(stack.client.streaming(json!({})).await).await.error().is_some());
    decode.then(vec![Step::Started, Step::Hold]);
    let second = stack.client.streaming(json!({})).await;
    assert!(decode.infos() > infos);
    // both places are taken, one of them since before
    let third = stack.client.chat(json!({})).await;
    assert_eq!(third.code(), "no_capacity");
    drop((held, second));
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn a_request_whose_kv_is_being_pulled_takes_two_places() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.always(vec![Step::Started, Step::Hold]);
    let mut open = Vec::new();
    for running in 1..=Shape::default().max_running {
        open.push(stack.client.streaming(json!({})).await);
        decode.called(running as usize).await;
        stack.knows_of(&decode, running).await;
    }
    assert_eq!(decode.open(), Shape::default().max_running as usize);
    drop(open);
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn the_places_of_an_engine_are_those_it_had_at_first() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--queue-ms=200"]).await;
    decode.always(vec![Step::Started, Step::Hold]);
    decode.report(Load {
        max_running: 1,
        waiting: 1,
        ..Load::default()
    });
    stack.knows_of(&decode, 1).await;
    assert_eq!(stack.client.chat(json!({})).await.code(), "no_capacity");
    assert!(decode.calls().is_empty());
}

#[tokio::test]
async fn a_long_request_is_refused_or_sent_where_it_does_not_fit_although_another_can_hold_it() {
    let (short, long) = (with_length(Role::Decode, 120), with_length(Role::Decode, 512));
    let (tiny, prefill) = (with_length(Role::Prefill, 4), engine::prefill());
    let stack = stack(&[&tiny, &prefill], &[&short, &long], &["--policy=round-robin"]).await;
    for _ in 0..4 {
        assert_eq!(stack.client.chat(json!({"max_tokens": 200})).await.content(), "Paris");
    }
    assert!(short.calls().is_empty());
    let peers = long.calls().into_iter().map(|call| call.prefill.unwrap().endpoint);
    assert!(peers.into_iter().all(|peer| peer == prefill.endpoint()));
    // a short one goes to either
    for _ in 0..4 {
        assert_eq!(stack.client.chat(json!({"max_tokens": 1})).await.content(), "Paris");
    }
    assert!(!short.calls().is_empty());
    // while the one that could hold it is away, that is no fault of the request
    let addr = long.kill();
    let up = format!("tandem_router_upstream_up{{role=\"decode\",endpoint=\"{addr}\"}}");
    stack.reaches(&up, 0).await;
    let answer = stack.client.chat(json!({"max_tokens": 200})).await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "no_decode_engine"));
}

#[tokio::test]
async fn a_prompt_that_no_prefill_can_hold_is_told_to_come_again() {
    let (tiny, decode) = (with_length(Role::Prefill, 4), engine::decode());
    let stack = stack(&[&tiny], &[&decode], &[]).await;
    let answer = stack.client.chat(json!({"max_tokens": 1})).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (400, "context_length_exceeded")
    );
    assert!(decode.calls().is_empty());
}

#[tokio::test]
async fn requests_are_lost_between_the_threads_that_serve() {
    let (prefill, decode) = (
        engine::prefill(),
        Mock::start(Shape {
            max_running: 64,
            ..Shape::default()
        }),
    );
    let stack = stack(&[&prefill], &[&decode], &["--threads=3"]).await;
    // each at the same time has a connection of its own
    let asked = (0..32).map(|_| stack.client.chat(json!({})));
    for answer in futures::future::join_all(asked).await {
        assert_eq!(answer.content(), "Paris");
    }
    let streamed = (0..32).map(|_| stack.client.stream(json!({})));
    for events in futures::future::join_all(streamed).await {
        assert_eq!((events.text().as_str(), events.done), ("Paris", true));
    }
    assert_eq!(decode.calls().len(), 64);
    stack.at_rest(&[&decode]).await;
}
