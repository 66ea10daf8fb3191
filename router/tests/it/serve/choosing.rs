//! Which engine gets a request.

use serde_json::json;
use tandem_wire::proto::Load;

use super::client::events;
use super::engine::{self, Mock, Shape, Step};
use super::stack::stack;

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
