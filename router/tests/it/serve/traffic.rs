//! Orders on traffic: what is not at an engine waits or is refused, what is there goes on, and the counts are exact.

use std::time::Duration;

use serde_json::json;
use tandem_telemetry::State;
use tandem_wire::proto::finished::Cause;
use tokio::task::JoinHandle;

use super::client::{Answer, events};
use super::engine::{self, Mock, Shape, Step};
use super::stack::Governed;

const PATH: &str = "/admin/traffic";

fn held(text: &'static str) -> Vec<Step> {
    vec![Step::Started, Step::Hold, Step::Spell(text), Step::Finish(Cause::Stop)]
}

fn queue(remaining_ms: u64) -> serde_json::Value {
    json!({"mode": "queue", "remaining_ms": remaining_ms})
}

/// Asks in the background.
fn ask(rig: &Governed) -> JoinHandle<Answer> {
    let client = rig.stack.client.clone();
    tokio::spawn(async move { client.chat(json!({})).await })
}

#[tokio::test]
async fn an_order_to_queue_ends_what_runs_or_loses_what_waits() {
    let decode = engine::decode();
    let rig = Governed::start(&[], &[&decode], &[]).await;
    decode.then(held("early"));
    let early = ask(&rig);
    decode.called(1).await;
    let answer = rig.order(PATH, queue(600_000)).await;
    assert_eq!(
        (&answer["mode"], &answer["in_flight"], &answer["queued"]),
        (&json!("queue"), &json!(1), &json!(0))
    );
    let remaining = answer["remaining_ms"].as_u64().unwrap();
    assert!((1..=600_000).contains(&remaining), "{remaining}");
    assert_eq!(rig.stack.sample("tandem_router_traffic{mode=\"queue\"}"), 1);
    assert_eq!(rig.stack.sample("tandem_router_traffic{mode=\"admit\"}"), 0);

    let late = [ask(&rig), ask(&rig)];
    rig.shows(PATH, json!({"in_flight": 1, "queued": 2})).await;
    assert_eq!(rig.get("/admin/connections").await["by_state"]["held"]["count"], 2);
    decode.release();
    assert_eq!(early.await.unwrap().content(), "early");
    rig.shows(PATH, json!({"in_flight": 0, "queued": 2})).await;
    assert_eq!(decode.calls().len(), 1, "nothing goes against the order");

    let answer = rig.order(PATH, json!({"mode": "admit"})).await;
    assert_eq!(
        (&answer["mode"], &answer["remaining_ms"]),
        (&json!("admit"), &json!(null))
    );
    for request in late {
        assert_eq!(request.await.unwrap().content(), "Paris");
    }
    rig.shows(PATH, json!({"in_flight": 0, "queued": 0})).await;
    assert_eq!(rig.stack.sample("tandem_router_at_engines"), 0);
    rig.stack.at_rest(&[&decode]).await;
}

/// On several threads under load: whoever goes to the engine after the acknowledgement was counted in it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_missed_by_the_order_and_by_its_count() {
    let decode = Mock::start(Shape {
        max_running: 64,
        ..Shape::default()
    });
    let rig = Governed::start(&[], &[&decode], &["--threads=4"]).await;
    let asking: Vec<_> = (0..16)
        .map(|_| {
            let client = rig.stack.client.clone();
            tokio::spawn(async move {
                for _ in 0..20 {
                    assert_eq!(client.chat(json!({})).await.content(), "Paris");
                }
            })
        })
        .collect();
    while !asking.iter().all(JoinHandle::is_finished) {
        let in_flight = rig.order(PATH, queue(600_000)).await["in_flight"].as_u64().unwrap();
        let before = decode.calls().len() as u64;
        rig.shows(PATH, json!({"in_flight": 0})).await;
        let after = decode.calls().len() as u64;
        assert!(after - before <= in_flight, "{before} {after} {in_flight}");
        rig.order(PATH, json!({"mode": "admit"})).await;
        tokio::task::yield_now().await;
    }
    for request in asking {
        request.await.unwrap();
    }
    assert_eq!(decode.calls().len(), 16 * 20);
}

#[tokio::test]
async fn being_held_back_takes_a_requests_time() {
    let decode = engine::decode();
    let flags = ["--request-ms=5000", "--queue-ms=5000", "--sse-comment-ms=50"];
    let rig = Governed::start(&[], &[&decode], &flags).await;
    rig.order(PATH, queue(600_000)).await;
    let whole = ask(&rig);
    let stream = rig.stack.client.streaming(json!({})).await;
    assert_eq!(stream.status(), 200);
    let reading = tokio::spawn(events(stream));
    rig.shows(PATH, json!({"queued": 2})).await;
    tokio::time::sleep(Duration::from_millis(5_500)).await;
    rig.order(PATH, json!({"mode": "admit"})).await;
    assert_eq!(whole.await.unwrap().content(), "Paris");
    let events = reading.await.unwrap();
    assert!(events.done && events.text() == "Paris", "{events:?}");
    assert!(events.comments > 1, "{} comments", events.comments);
    // what is left of its time is told to the engine
    for call in decode.calls() {
        assert!((1..=5_000).contains(&call.remaining_ms), "{}", call.remaining_ms);
    }
}

#[tokio::test]
async fn holding_back_has_no_end_or_no_word_of_when_to_come_again() {
    let decode = engine::decode();
    let rig = Governed::start(&[], &[&decode], &["--sse-comment-ms=20"]).await;
    rig.order(PATH, queue(300)).await;
    let stream = rig.stack.client.streaming(json!({})).await;
    let (whole, stream) = (ask(&rig).await.unwrap(), events(stream).await);
    assert_eq!((whole.status, whole.code().as_str()), (503, "not_admitted"));
    assert_eq!(whole.header("retry-after"), Some("5"));
    let error = stream.error().expect("an error event");
    assert_eq!(
        (error["code"].as_str(), error["retry_after_seconds"].as_u64()),
        (Some("not_admitted"), Some(5))
    );
    assert!(!stream.done && stream.comments > 0);
    // those who come later do not wait
    assert_eq!(rig.stack.client.chat(json!({})).await.code(), "not_admitted");
    rig.shows(PATH, json!({"mode": "queue", "remaining_ms": 0, "queued": 0}))
        .await;
    assert!(decode.calls().is_empty());
}

#[tokio::test]
async fn an_order_to_reject_lets_one_through_or_ends_what_runs() {
    let decode = engine::decode();
    let rig = Governed::start(&[], &[&decode], &[]).await;
    decode.then(held("early"));
    let early = ask(&rig);
    decode.called(1).await;
    rig.order(PATH, queue(600_000)).await;
    let waits = ask(&rig);
    rig.shows(PATH, json!({"queued": 1})).await;
    let answer = rig.order(PATH, json!({"mode": "reject"})).await;
    assert_eq!((&answer["mode"], &answer["in_flight"]), (&json!("reject"), &json!(1)));
    for answer in [waits.await.unwrap(), rig.stack.client.chat(json!({})).await] {
        assert_eq!((answer.status, answer.code().as_str()), (503, "not_admitted"));
        assert_eq!(answer.header("retry-after"), Some("5"));
    }
    decode.release();
    assert_eq!(early.await.unwrap().content(), "early");
    assert_eq!(decode.calls().len(), 1);
    rig.order(PATH, json!({"mode": "admit"})).await;
    assert_eq!(rig.stack.client.chat(json!({})).await.content(), "Paris");
}

#[tokio::test]
async fn more_are_held_back_than_may_wait_or_one_that_left_is() {
    let decode = engine::decode();
    let rig = Governed::start(&[], &[&decode], &["--queue-limit=1"]).await;
    rig.order(PATH, queue(600_000)).await;
    let first = ask(&rig);
    rig.shows(PATH, json!({"queued": 1})).await;
    let second = rig.stack.client.chat(json!({})).await;
    assert_eq!((second.status, second.code().as_str()), (429, "queue_full"));
    first.abort();
    rig.shows(PATH, json!({"queued": 0})).await;
    rig.stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn a_request_that_waits_for_room_goes_against_the_order() {
    let decode = Mock::start(Shape {
        max_running: 1,
        ..Shape::default()
    });
    let rig = Governed::start(&[], &[&decode], &[]).await;
    decode.then(held("early"));
    let early = ask(&rig);
    decode.called(1).await;
    let waits = ask(&rig);
    rig.stack.reaches("tandem_router_queue_depth", 1).await;
    rig.order(PATH, queue(600_000)).await;
    decode.release();
    assert_eq!(early.await.unwrap().content(), "early");
    rig.shows(PATH, json!({"in_flight": 0, "queued": 1})).await;
    assert_eq!(decode.calls().len(), 1);
    // a probe is nobody's request: it goes past those that wait
    let probe = rig.stack.client.get("/health_generate").await;
    assert_eq!(probe.status, 200, "{}", probe.text);
    rig.order(PATH, json!({"mode": "admit"})).await;
    assert_eq!(waits.await.unwrap().content(), "Paris");
}

/// A restart of the only decode: what it had not begun to answer is answered by the next one.
#[tokio::test]
async fn a_request_is_lost_with_its_engine_while_traffic_is_held_back() {
    let decode = engine::decode();
    let rig = Governed::start(&[], &[&decode], &[]).await;
    decode.then(held("early"));
    let early = ask(&rig);
    decode.called(1).await;
    rig.order(PATH, queue(600_000)).await;
    let late = ask(&rig);
    rig.shows(PATH, json!({"in_flight": 1, "queued": 1})).await;
    let addr = decode.kill();
    rig.shows(PATH, json!({"in_flight": 0, "queued": 2})).await;
    let up = "tandem_router_upstream_up{role=\"decode\",endpoint=\"".to_owned() + &addr.to_string() + "\"}";
    rig.stack.reaches(&up, 0).await;
    // it can be reached by those whom it holds back
    assert_eq!(rig.stack.client.get("/readyz").await.status, 200);
    let next = Mock::start_on(Shape::default(), addr);
    rig.stack.reaches(&up, 1).await;
    rig.order(PATH, json!({"mode": "admit"})).await;
    assert_eq!(early.await.unwrap().content(), "Paris");
    assert_eq!(late.await.unwrap().content(), "Paris");
    assert_eq!(next.calls().len(), 2);
}

#[tokio::test]
async fn a_router_starts_against_its_order() {
    let decode = engine::decode();
    let started = async |flags: &[&str]| Governed::cold(&[], &[&decode], flags).await;
    let rig = started(&["--traffic=queue", "--traffic-until=2999-01-01T00:00:00Z"]).await;
    rig.stack.becomes(|state| *state == State::Ready).await;
    let waits = ask(&rig);
    rig.shows(PATH, json!({"mode": "queue", "queued": 1})).await;
    rig.order(PATH, json!({"mode": "admit"})).await;
    assert_eq!(waits.await.unwrap().content(), "Paris");

    let ends = ["--traffic=queue", "--traffic-until=2001-01-01T00:00:00Z"];
    for flags in [&ends[..], &["--traffic=reject"]] {
        let rig = started(flags).await;
        rig.stack.becomes(|state| *state == State::Ready).await;
        assert_eq!(
            rig.stack.client.chat(json!({})).await.code(),
            "not_admitted",
            "{flags:?}"
        );
    }
}

#[tokio::test]
async fn a_wrong_order_is_taken() {
    let decode = engine::decode();
    let rig = Governed::start(&[], &[&decode], &[]).await;
    for (order, named) in [
        (json!({"mode": "Admit"}), "mode"),
        (json!({"mode": "queue"}), "remaining_ms"),
        (queue(604_800_001), "remaining_ms"),
        (json!({"mode": "reject", "remaining_ms": 1}), "remaining_ms"),
    ] {
        let answer = rig.post(PATH, &order).await;
        assert_eq!((answer.status, answer.param().as_deref()), (400, Some(named)));
    }
    assert_eq!(rig.post(PATH, &json!({"mod": "admit"})).await.code(), "malformed_json");
    assert_eq!(
        rig.get(PATH).await,
        json!({"mode": "admit", "remaining_ms": null, "in_flight": 0, "queued": 0})
    );
}

#[tokio::test]
async fn a_probe_waits_with_those_that_an_order_holds_or_asks_what_was_asked_before() {
    let decode = engine::decode();
    let rig = Governed::start(&[], &[&decode], &[]).await;
    rig.order(PATH, queue(600_000)).await;
    let held = ask(&rig);
    rig.shows(PATH, json!({"queued": 1})).await;
    for round in 1..=2 {
        let measured = rig.order("/admin/probe", json!({"timeout_ms": 60_000})).await;
        let call = &decode.calls()[round - 1];
        assert_eq!(
            measured["prompt_tokens"].as_u64(),
            Some(call.prompt_tokens.len() as u64)
        );
        assert!(measured["completion_tokens"].as_u64() > Some(0), "{measured}");
        for counted in ["cached_tokens", "moved_tokens", "moved_bytes", "computed_tokens"] {
            assert!(measured[counted].is_u64(), "{measured} lacks {counted}");
        }
    }
    let calls = decode.calls();
    let common = calls[0]
        .prompt_tokens
        .iter()
        .zip(&calls[1].prompt_tokens)
        .take_while(|(a, b)| a == b);
    assert!(common.count() < 12, "a prefix cache could hold the second prompt");
    rig.shows(PATH, json!({"queued": 1})).await;
    rig.order(PATH, json!({"mode": "admit"})).await;
    assert_eq!(held.await.unwrap().content(), "Paris");
}
