//! Streamed answers.

use futures::StreamExt;
use serde_json::json;
use tandem_wire::proto::finished::Cause;
use tandem_wire::{Reason, Source};

use super::CANCELLED_WITHIN;
use super::client::{Client, events, until_text};
use super::engine::{self, Step, failure, spell};
use super::stack::stack;

#[tokio::test]
async fn a_stream_has_other_chunks_than_openais() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let response = stack
        .client
        .streaming(json!({"stream_options": {"include_usage": true}}))
        .await;
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(response.headers()["cache-control"], "no-cache");
    let events = events(response).await;
    assert!(events.done && !events.broken);
    let first = &events.data[0];
    assert_eq!(first["object"], "chat.completion.chunk");
    assert_eq!(first["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(events.text(), "Paris");
    assert_eq!(events.finish_reason(), Some("stop"));
    let (last, before) = events.data.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 5);
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    assert!(
        before
            .iter()
            .all(|event| event["usage"].is_null() && event["id"] == last["id"])
    );
    let plain = stack.client.stream(json!({})).await;
    assert!(plain.usage().is_none() && plain.data.iter().all(|event| event.get("usage").is_none()));
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn tokens_wait_for_the_end_of_the_answer() {
    let decode = engine::decode();
    decode.then(vec![
        Step::Started,
        Step::Spell("Par"),
        Step::Hold,
        Step::Spell("is"),
        Step::Finish(Cause::Stop),
    ]);
    let stack = stack(&[], &[&decode], &[]).await;
    let response = stack.client.streaming(json!({})).await;
    let rest = until_text(response, "Par").await;
    decode.release();
    let rest: Vec<_> = rest.collect().await;
    let rest: Vec<u8> = rest.into_iter().flat_map(|piece| piece.unwrap().to_vec()).collect();
    assert!(String::from_utf8(rest).unwrap().ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn a_cut_stream_looks_like_a_whole_one() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let lost = failure(Reason::NoCapacity, Source::Decode);
    for (end, code, source) in [
        (Step::Fail(lost), "no_capacity", "decode"),
        (
            Step::Fail(failure(Reason::Internal, Source::Decode)),
            "internal",
            "decode",
        ),
        (Step::Cut, "incomplete", "router"),
        (Step::Break, "peer_lost", "router"),
    ] {
        decode.then(vec![Step::Started, Step::Spell("Par"), end]);
        let before = decode.calls().len();
        let events = stack
            .client
            .stream(json!({"stream_options": {"include_usage": true}}))
            .await;
        assert!(!events.done, "{code}: [DONE] after an error");
        assert_eq!(events.text(), "Par");
        let error = events.error().expect("no error event");
        assert_eq!(
            (error["code"].as_str(), error["source"].as_str()),
            (Some(code), Some(source))
        );
        assert!(error["request_id"].is_string() && error["message"].is_string() && error["type"].is_string());
        assert_eq!(
            error["retry_after_seconds"].as_u64(),
            (code == "no_capacity").then_some(1)
        );
        assert!(events.usage().is_none() && events.finish_reason().is_none());
        assert_eq!(
            decode.calls().len(),
            before + 1,
            "{code}: tried again after text had gone out"
        );
        // the connection doubted after a break is there again for the next
        assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
    }
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn what_fails_before_it_is_accepted_is_a_200() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.then(vec![Step::Refuse(failure(Reason::Invalid, Source::Decode))]);
    let answer = Client::read(stack.client.streaming(json!({})).await).await;
    assert_eq!((answer.status, answer.code().as_str()), (400, "invalid"));
}

#[tokio::test]
async fn a_silent_stream_is_closed_by_what_lies_between() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--sse-comment-ms=20"]).await;
    // neither accepted nor answered: the head and comments come all the same
    decode.then(vec![
        Step::Hold,
        Step::Started,
        Step::Hold,
        Step::Spell("ok"),
        Step::Finish(Cause::Stop),
    ]);
    let response = tokio::time::timeout(super::PATIENCE, stack.client.streaming(json!({})))
        .await
        .unwrap();
    assert_eq!(response.status(), 200);
    let mut body = response.bytes_stream();
    let mut text = String::new();
    for hold in 1..=2 {
        while text.matches(": keep-alive\n\n").count() < 3 * hold {
            text.push_str(std::str::from_utf8(&body.next().await.unwrap().unwrap()).unwrap());
        }
        decode.release();
    }
    while let Some(piece) = body.next().await {
        text.push_str(std::str::from_utf8(&piece.unwrap()).unwrap());
    }
    assert!(text.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn an_error_after_the_head_was_sent_is_silence() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--sse-comment-ms=20"]).await;
    decode.then(vec![
        Step::Hold,
        Step::Refuse(failure(Reason::Internal, Source::Prefill)),
    ]);
    let response = stack.client.streaming(json!({})).await;
    assert_eq!(response.status(), 200);
    decode.release();
    let events = events(response).await;
    assert!(!events.done);
    assert_eq!(events.error().unwrap()["code"], "internal");
    assert_eq!(events.error().unwrap()["source"], "prefill");
}

#[tokio::test]
async fn a_stop_string_across_tokens_leaks_or_lets_the_engine_run_on() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    // never ends by itself: only the cancel ends it
    decode.always(vec![Step::Started, Step::Spell("Paris. STOP and more"), Step::Hold]);
    let events = stack
        .client
        .stream(json!({"stop": ["STOP"], "stream_options": {"include_usage": true}}))
        .await;
    assert!(decode.idle().await < CANCELLED_WITHIN);
    assert_eq!(
        (events.text().as_str(), events.finish_reason()),
        ("Paris. ", Some("stop"))
    );
    assert!(
        events.data.iter().all(|event| !event.to_string().contains("ST")),
        "a piece of the stop string leaked"
    );
    // up to and with the token that completed the stop
    assert_eq!(events.usage().unwrap()["completion_tokens"], "Paris. STOP".len());
    let whole = stack.client.chat(json!({"stop": "STOP"})).await;
    assert_eq!(whole.content(), "Paris. ");
    assert_eq!(whole.json()["choices"][0]["finish_reason"], "stop");
    assert_eq!(whole.json()["usage"]["completion_tokens"], "Paris. STOP".len());
    assert!(decode.idle().await < CANCELLED_WITHIN);
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn the_beginning_of_a_stop_string_is_lost_at_the_end() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.always(spell("Paris ST"));
    let events = stack.client.stream(json!({"stop": ["STOP"]})).await;
    assert_eq!(
        (events.text().as_str(), events.finish_reason()),
        ("Paris ST", Some("stop"))
    );
}

#[tokio::test]
async fn an_event_of_a_newer_engine_breaks_the_answer() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.then(vec![
        Step::Unknown,
        Step::Started,
        Step::Spell("ok"),
        Step::Unknown,
        Step::Finish(Cause::Stop),
    ]);
    assert_eq!(stack.client.chat(json!({})).await.content(), "ok");
}

#[tokio::test]
async fn a_request_outlives_its_time() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--request-ms=300"]).await;
    decode.always(vec![Step::Started, Step::Spell("Par"), Step::Hold]);
    let answer = stack.client.chat(json!({})).await;
    assert_eq!((answer.status, answer.code().as_str()), (504, "deadline"));
    let events = stack.client.stream(json!({})).await;
    assert_eq!(events.error().unwrap()["code"], "deadline");
    assert!(!events.done);
    assert!(decode.idle().await < CANCELLED_WITHIN);
    assert!(decode.calls().iter().all(|call| call.remaining_ms <= 300));
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn a_call_that_went_well_is_reset_before_its_end_or_its_end_is_waited_for() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    for (calls, streamed) in [(1, false), (2, true)] {
        // its end comes when the client has the whole answer
        decode.then(vec![
            Step::Started,
            Step::Spell("Paris"),
            Step::Finish(Cause::Stop),
            Step::Hold,
        ]);
        let text = if streamed {
            stack.client.stream(json!({})).await.text()
        } else {
            stack.client.chat(json!({})).await.content()
        };
        assert_eq!(text, "Paris");
        decode.release();
        decode.ended(calls).await;
    }
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn a_connection_to_an_engine_ends_after_so_many_answers() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let before = decode.infos();
    let answers = futures::stream::iter(0..3_000).map(|_| async { stack.client.stream(json!({})).await });
    let mut answers = std::pin::pin!(answers.buffer_unordered(8));
    while let Some(events) = answers.next().await {
        assert!(events.done && events.text() == "Paris", "{events:?}");
    }
    assert_eq!(decode.infos(), before, "it was dialled again");
    stack.at_rest(&[&decode]).await;
}
