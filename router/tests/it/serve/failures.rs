//! Engines that fail: another try before the first byte, a clear error otherwise.

use std::time::{Duration, Instant};

use serde_json::json;
use tandem_wire::proto::finished::Cause;
use tandem_wire::proto::{Load, OnPrefillFailure};
use tandem_wire::{Reason, Source};

use super::client::events;
use super::engine::{self, Mock, Shape, Step, failure, spell};
use super::stack::stack;
use super::{CANCELLED_WITHIN, PATIENCE};

#[tokio::test]
async fn a_failure_before_the_first_byte_reaches_the_client_or_reuses_its_key() {
    for (streamed, end) in [
        (false, Step::Fail(failure(Reason::Stalled, Source::Transfer))),
        (true, Step::Fail(failure(Reason::LeaseLost, Source::Decode))),
        (true, Step::Break),
        (false, Step::Cut),
    ] {
        let (prefill, decode) = (engine::prefill(), engine::decode());
        let stack = stack(&[&prefill], &[&decode], &[]).await;
        decode.then(vec![Step::Started, end]);
        if streamed {
            let events = stack.client.stream(json!({})).await;
            assert!(events.done && events.text() == "Paris", "{events:?}");
        } else {
            assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
        }
        let calls = decode.calls();
        let keys: Vec<_> = calls.iter().map(|call| call.key.clone().unwrap()).collect();
        assert_eq!(keys.len(), 2);
        assert_ne!(keys[0].attempt, keys[1].attempt, "a retry must be a new attempt");
        assert_eq!(keys[0].transfer_id, keys[1].transfer_id);
        stack.at_rest(&[&prefill, &decode]).await;
    }
}

#[tokio::test]
async fn a_retry_goes_to_the_engine_that_failed_although_there_is_another() {
    let (bad, good, decode) = (engine::prefill(), engine::prefill(), engine::decode());
    let stack = stack(&[&bad, &good], &[&decode], &["--policy=least-loaded"]).await;
    // by load alone it would be `bad` each time
    good.report(Load {
        running: 1,
        ..Load::default()
    });
    let labels = format!("{{role=\"prefill\",endpoint=\"{}\"}}", good.endpoint());
    stack
        .reaches(&format!("tandem_router_upstream_occupied{labels}"), 1)
        .await;
    decode.fails_with(Reason::Stalled, Source::Prefill);
    assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
    let peers: Vec<_> = decode
        .calls()
        .iter()
        .map(|call| call.prefill.clone().unwrap().endpoint)
        .collect();
    assert_eq!(peers, [bad.endpoint(), good.endpoint()]);
}

#[tokio::test]
async fn a_lost_decode_is_not_replaced_by_another() {
    let (one, two) = (engine::decode(), engine::decode());
    let stack = stack(&[], &[&one, &two], &["--policy=round-robin"]).await;
    let first = stack.client.chat(json!({}));
    assert_eq!(first.await.content(), "Paris");
    // whichever is next breaks
    let next = if one.calls().is_empty() { &one } else { &two };
    next.then(vec![Step::Started, Step::Break]);
    assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
    assert_eq!(one.calls().len() + two.calls().len(), 3);
    assert!(!one.calls().is_empty() && !two.calls().is_empty());
}

#[tokio::test]
async fn a_whole_answer_is_not_begun_anew_while_the_client_has_nothing_of_it() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.then(vec![Step::Started, Step::Spell("wrong"), Step::Break]);
    assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
}

#[tokio::test]
async fn what_cannot_succeed_is_tried_again() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    for (reason, status, code) in [
        (Reason::Invalid, 400, "invalid"),
        (Reason::Internal, 500, "internal"),
        (Reason::Deadline, 504, "deadline"),
    ] {
        let before = decode.calls().len();
        decode.fails_with(reason, Source::Decode);
        let answer = stack.client.chat(json!({})).await;
        assert_eq!((answer.status, answer.code().as_str()), (status, code));
        assert_eq!(decode.calls().len(), before + 1);
    }
}

#[tokio::test]
async fn attempts_have_no_end() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.always(vec![
        Step::Started,
        Step::Fail(failure(Reason::Incomplete, Source::Decode)),
    ]);
    let answer = stack.client.chat(json!({})).await;
    assert_eq!((answer.status, answer.code().as_str()), (502, "incomplete"));
    assert_eq!(answer.json()["error"]["source"], "decode");
    assert_eq!(decode.calls().len(), 3);
    assert_eq!(stack.sample("tandem_router_retries_total{reason=\"incomplete\"}"), 2);
}

#[tokio::test]
async fn the_policy_on_a_prefill_failure_is_not_followed() {
    for (policy, wire) in [
        ("retry", OnPrefillFailure::Fail),
        ("recompute", OnPrefillFailure::Recompute),
        ("fail", OnPrefillFailure::Fail),
    ] {
        let (prefill, decode) = (engine::prefill(), engine::decode());
        let flag = format!("--on-prefill-failure={policy}");
        let stack = stack(&[&prefill], &[&decode], &[&flag]).await;
        decode.fails_with(Reason::PeerLost, Source::Decode);
        let answer = stack.client.chat(json!({})).await;
        let calls = decode.calls();
        assert!(calls.iter().all(|call| call.on_prefill_failure() == wire));
        if policy == "fail" {
            assert_eq!(
                (answer.status, answer.code().as_str(), calls.len()),
                (502, "peer_lost", 1)
            );
        } else {
            assert_eq!((answer.content().as_str(), calls.len()), ("Paris", 2));
        }
    }
}

#[tokio::test]
async fn without_a_prefill_the_policy_decides_and_nothing_is_silent() {
    for (policy, bypassed) in [("retry", false), ("fail", false), ("recompute", true)] {
        let (prefill, decode) = (engine::prefill(), engine::decode());
        let flag = format!("--on-prefill-failure={policy}");
        let stack = stack(&[&prefill], &[&decode], &[&flag]).await;
        prefill.kill();
        let (lost, counted) = (Instant::now(), "tandem_router_prefill_bypassed_total");
        // until the router has noticed, the scripted decode answers all the same
        let answer = loop {
            let answer = stack.client.chat(json!({})).await;
            let noticed = answer.status != 200 || stack.sample(counted) > 0;
            if noticed || lost.elapsed() > PATIENCE {
                break answer;
            }
        };
        if bypassed {
            assert_eq!(answer.content(), "Paris");
            assert!(decode.calls().last().unwrap().prefill.is_none());
        } else {
            assert_eq!((answer.status, answer.code().as_str()), (503, "no_prefill_engine"));
            assert_eq!(answer.header("retry-after"), Some("1"));
        }
    }
}

#[tokio::test]
async fn an_engine_that_restarts_on_its_port_does_not_serve_the_next_request() {
    let mut decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    for _ in 0..3 {
        assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
        let addr = decode.kill();
        decode = Mock::start_on(Shape::default(), addr);
        // at once, whatever the router has noticed so far: the very first try must do
        assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
        assert_eq!(decode.calls().len(), 1);
        assert_eq!(decode.calls()[0].boot_id, decode.boot().to_wire());
    }
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn an_engine_that_was_gone_for_long_does_not_rejoin_at_once() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let addr = decode.kill();
    stack
        .becomes(|state| !matches!(state, tandem_telemetry::State::Ready))
        .await;
    // far beyond any count of failures after which a router could give up
    for _ in 0..20 {
        let answer = stack.client.chat(json!({})).await;
        assert_eq!((answer.status, answer.code().as_str()), (503, "no_decode_engine"));
        assert!(answer.message().contains(&addr.to_string()), "{}", answer.message());
    }
    let decode = Mock::start_on(Shape::default(), addr);
    assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
    stack.becomes(|state| *state == tandem_telemetry::State::Ready).await;
    drop(decode);
}

#[tokio::test]
async fn a_stale_boot_is_an_error_for_the_client() {
    let (prefill, decode) = (engine::prefill(), engine::decode());
    let stack = stack(&[&prefill], &[&decode], &[]).await;
    // the decode that answers is the one we know, but its prefill is another boot
    let infos = prefill.infos();
    decode.then(vec![
        Step::Started,
        Step::Fail(failure(Reason::StaleBoot, Source::Prefill)),
    ]);
    assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
    assert_eq!(prefill.infos(), infos + 1, "the prefill was not asked again who it is");
    let infos = decode.infos();
    decode.then(vec![Step::Refuse(failure(Reason::StaleBoot, Source::Decode))]);
    assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
    assert_eq!(decode.infos(), infos + 1);
    stack.at_rest(&[&decode, &prefill]).await;
}

#[tokio::test]
async fn a_decode_that_dies_mid_stream_leaves_the_client_waiting() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.then(vec![Step::Started, Step::Spell("Par"), Step::Hold]);
    let response = stack.client.streaming(json!({})).await;
    decode.called(1).await;
    let killed = Instant::now();
    decode.kill();
    let events = tokio::time::timeout(PATIENCE, events(response)).await.unwrap();
    assert!(killed.elapsed() < CANCELLED_WITHIN * 3);
    assert!(!events.done);
    assert_eq!(events.error().unwrap()["code"], "peer_lost");
}

#[tokio::test]
async fn what_clients_did_wrong_opens_the_breaker() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--queue-ms=1"]).await;
    for reason in [
        Reason::Invalid,
        Reason::OverLength,
        Reason::Deadline,
        Reason::AbortedByClient,
    ] {
        for _ in 0..8 {
            decode.fails_with(reason, Source::Decode);
            assert_ne!(stack.client.chat(json!({})).await.status, 200);
        }
        // an open breaker would make it wait, for which there is no time
        let answer = stack.client.chat(json!({})).await;
        assert_eq!(answer.status, 200, "{reason:?} made the engine wait: {}", answer.text);
    }
}

#[tokio::test]
async fn an_engine_that_fails_each_request_goes_on_getting_them() {
    // said in its own words, or by breaking the call, after which it is asked again who it is
    for last in [Step::Fail(failure(Reason::Internal, Source::Decode)), Step::Break] {
        let (bad, good) = (engine::decode(), engine::decode());
        let stack = stack(&[], &[&bad, &good], &["--policy=round-robin"]).await;
        bad.always(vec![Step::Started, last]);
        let up = format!(
            "tandem_router_upstream_up{{role=\"decode\",endpoint=\"{}\"}}",
            bad.endpoint()
        );
        for _ in 0..24 {
            stack.reaches(&up, 1).await;
            stack.client.chat(json!({})).await;
        }
        let calls = bad.calls().len();
        assert!((5..=8).contains(&calls), "{calls} of 24 requests went to it");
        // and it comes back once it works
        bad.always(spell("back"));
        let back = async { while stack.client.chat(json!({})).await.content() != "back" {} };
        tokio::time::timeout(PATIENCE, back)
            .await
            .expect("the engine never came back");
    }
}

#[tokio::test]
async fn a_held_prefill_keeps_its_place_while_decode_speaks() {
    let (prefill, decode) = (engine::prefill(), engine::decode());
    let stack = stack(&[&prefill], &[&decode], &[]).await;
    decode.then(vec![
        Step::Started,
        Step::Spell("P"),
        Step::Hold,
        Step::Finish(Cause::Stop),
    ]);
    let response = stack.client.streaming(json!({})).await;
    let labels = format!("{{role=\"prefill\",endpoint=\"{}\"}}", prefill.endpoint());
    stack
        .reaches(&format!("tandem_router_upstream_in_flight{labels}"), 0)
        .await;
    let labels = format!("{{role=\"decode\",endpoint=\"{}\"}}", decode.endpoint());
    assert_eq!(stack.sample(&format!("tandem_router_upstream_in_flight{labels}")), 1);
    decode.release();
    assert!(events(response).await.done);
}

#[tokio::test]
async fn a_prefill_whose_work_is_always_recomputed_goes_on_getting_requests() {
    let (prefill, decode) = (engine::prefill(), engine::decode());
    let stack = stack(&[&prefill], &[&decode], &["--on-prefill-failure=recompute"]).await;
    let recomputed = vec![Step::Started, Step::Spell("mine"), Step::Recomputed];
    decode.always(recomputed);
    // beyond the time that the breaker stays open at first, and the trial after it
    let (began, mut asked) = (Instant::now(), 0);
    while asked < 60 || began.elapsed() < Duration::from_millis(2_500) {
        assert_eq!(stack.client.chat(json!({})).await.content(), "mine");
        asked += 1;
    }
    let with_prefill = decode.calls().iter().filter(|call| call.prefill.is_some()).count();
    assert!(
        (5..=12).contains(&with_prefill),
        "{with_prefill} of {asked} requests were given it"
    );
    let bypassed = stack.sample("tandem_router_prefill_bypassed_total");
    assert_eq!(bypassed as usize, asked - with_prefill);
    // and it comes back once it works
    decode.always(spell("pulled"));
    let back = async {
        loop {
            stack.client.chat(json!({})).await.content();
            if decode.calls().iter().rev().take(3).all(|call| call.prefill.is_some()) {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, back)
        .await
        .expect("the prefill never came back");
    stack.at_rest(&[&prefill, &decode]).await;
}
