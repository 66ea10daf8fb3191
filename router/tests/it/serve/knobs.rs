//! What can be changed while the router runs.

use serde_json::json;
use tandem_wire::proto::finished::Cause;
use tandem_wire::proto::{GenerateRequest, Load, OnPrefillFailure};

use super::client::events;
use super::engine::{self, Mock, Shape, Step};
use super::stack::Governed;

const PATH: &str = "/admin/knobs";

#[tokio::test]
async fn an_order_is_not_in_force_for_the_next_request_or_changes_one_that_runs() {
    let decode = Mock::start(Shape {
        max_running: 1,
        ..Shape::default()
    });
    let prefill = engine::prefill();
    let rig = Governed::start(&[&prefill], &[&decode], &["--queue-ms=60000"]).await;
    let all =
        json!({"policy": "least-loaded", "on_prefill_failure": "retry", "queue_ms": 60_000, "request_ms": 1_800_000});
    assert_eq!(rig.get(PATH).await, all);
    decode.then(vec![
        Step::Started,
        Step::Hold,
        Step::Spell("ok"),
        Step::Finish(Cause::Stop),
    ]);
    let running = rig.stack.client.streaming(json!({})).await;
    decode.called(1).await;

    let mut changed = all.clone();
    (changed["queue_ms"], changed["on_prefill_failure"]) = (json!(20), json!("recompute"));
    let order = json!({"queue_ms": 20, "on_prefill_failure": "recompute"});
    assert_eq!(rig.order(PATH, order).await, changed);
    assert_eq!(rig.get(PATH).await, changed);
    let late = rig.stack.client.chat(json!({})).await;
    assert_eq!((late.status, late.code().as_str()), (503, "no_capacity"));
    decode.release();
    assert!(events(running).await.done);
    assert_eq!(rig.stack.client.chat(json!({})).await.content(), "Paris");
    let told: Vec<_> = decode.calls().iter().map(GenerateRequest::on_prefill_failure).collect();
    assert_eq!(told, [OnPrefillFailure::Fail, OnPrefillFailure::Recompute]);

    rig.order(PATH, json!({"request_ms": 50})).await;
    decode.then(vec![Step::Started, Step::Hold]);
    let late = rig.stack.client.chat(json!({})).await;
    assert_eq!((late.status, late.code().as_str()), (504, "deadline"));
}

#[tokio::test]
async fn the_policy_stays_what_it_was() {
    let (busy, free) = (engine::decode(), engine::decode());
    let rig = Governed::start(&[], &[&busy, &free], &[]).await;
    busy.report(Load {
        running: 3,
        ..Load::default()
    });
    rig.stack.knows_of(&busy, 3).await;
    for _ in 0..4 {
        rig.stack.client.chat(json!({})).await.content();
    }
    assert_eq!((busy.calls().len(), free.calls().len()), (0, 4));
    rig.order(PATH, json!({"policy": "round-robin"})).await;
    for _ in 0..4 {
        rig.stack.client.chat(json!({})).await.content();
    }
    assert_eq!((busy.calls().len(), free.calls().len()), (2, 6));
}

#[tokio::test]
async fn a_bad_order_changes_something() {
    let decode = engine::decode();
    let rig = Governed::start(&[], &[&decode], &[]).await;
    let before = rig.get(PATH).await;
    for (order, named) in [
        (json!({"policy": "round-robin", "queue_ms": 0}), "queue_ms"),
        (json!({"queue_ms": 5, "policy": "Sticky"}), "policy"),
        (json!({"queue_ms": 5, "drain_ms": 5}), "drain_ms"),
    ] {
        let answer = rig.post(PATH, &order).await;
        assert_eq!((answer.status, answer.param().as_deref()), (400, Some(named)));
    }
    assert_eq!(rig.get(PATH).await, before);
}
