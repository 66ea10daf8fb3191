//! Several answers to one prompt.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tandem_wire::proto::finished::Cause;
use tandem_wire::{Reason, Source};

use super::client::events;
use super::engine::{self, Mock, Shape, Step};
use super::stack::stack;

fn held() -> Vec<Step> {
    vec![
        Step::Started,
        Step::Hold,
        Step::Spell("Paris"),
        Step::Finish(Cause::Stop),
    ]
}

#[tokio::test]
async fn several_answers_share_a_seed_or_are_counted_with_their_prompt() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let answer = stack.client.chat(json!({"n": 3, "seed": 7})).await.json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        assert_eq!(choice["message"]["content"], "Paris");
        assert_eq!(choice["finish_reason"], "stop");
    }
    let calls = decode.calls();
    let prompt = calls[0].prompt_tokens.len();
    assert!(calls.iter().all(|call| call.prompt_tokens == calls[0].prompt_tokens));
    let usage = &answer["usage"];
    assert_eq!(
        (&usage["prompt_tokens"], &usage["completion_tokens"]),
        (&json!(prompt), &json!(15))
    );
    assert_eq!(usage["total_tokens"], prompt + 15);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 3);
    assert_eq!(stack.sample("tandem_router_prompt_tokens_total"), prompt as i64);
    assert_eq!(stack.sample("tandem_router_completion_tokens_total"), 15);
    let seeds = |calls: &[tandem_wire::proto::GenerateRequest]| -> Vec<u64> {
        calls.iter().map(|call| call.sampling.as_ref().unwrap().seed).collect()
    };
    let first = seeds(&calls);
    assert_eq!(first[0], 7);
    assert_eq!(BTreeSet::from_iter(&first).len(), 3);
    // the same request draws the same again, whichever of the others is sent first
    stack.client.chat(json!({"n": 3, "seed": 7})).await.content();
    assert_eq!(
        BTreeSet::from_iter(seeds(&decode.calls()[3..])),
        BTreeSet::from_iter(first)
    );
    let keys: BTreeSet<_> = decode
        .calls()
        .iter()
        .map(|call| call.key.clone().unwrap().transfer_id)
        .collect();
    assert_eq!(keys.len(), 6, "two choices have one transfer id");
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn the_others_do_not_wait_for_the_first_or_go_elsewhere() {
    let roomy = || {
        Mock::start(Shape {
            max_running: 16,
            ..Shape::default()
        })
    };
    let decodes = [roomy(), roomy(), roomy()];
    let prefills = [engine::prefill(), engine::prefill()];
    let stack = stack(
        &[&prefills[0], &prefills[1]],
        &[&decodes[0], &decodes[1], &decodes[2]],
        &["--policy=round-robin"],
    )
    .await;
    for decode in &decodes {
        decode.then(held());
    }
    let client = stack.client.clone();
    let answer = tokio::spawn(async move { client.chat(json!({"n": 4})).await });
    let first = loop {
        if let Some(first) = decodes.iter().find(|decode| decode.open() > 0) {
            break first;
        }
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    };
    // its first token is still to come
    assert_eq!(decodes.iter().map(|decode| decode.calls().len()).sum::<usize>(), 1);
    first.release();
    assert_eq!(answer.await.unwrap().json()["choices"].as_array().unwrap().len(), 4);
    let calls = first.calls();
    assert_eq!(calls.len(), 4, "the others went to another decode");
    let peers: BTreeSet<_> = calls
        .iter()
        .map(|call| call.prefill.clone().unwrap().endpoint)
        .collect();
    assert_eq!(peers.len(), 1, "the others went to another prefill");
    // whole answers are gathered, but the first token of the first is waited for
    let gathered: Vec<_> = calls.iter().map(|call| call.batch_tokens).collect();
    assert_eq!(gathered, [false, true, true, true]);
    stack.at_rest(&[&decodes[0], &decodes[1], &decodes[2]]).await;
}

#[tokio::test]
async fn the_others_wait_for_room_where_the_first_is() {
    let small = || {
        Mock::start(Shape {
            max_running: 1,
            ..Shape::default()
        })
    };
    let decodes = [small(), small()];
    let stack = stack(&[], &[&decodes[0], &decodes[1]], &["--queue-limit=1"]).await;
    for decode in &decodes {
        decode.always(vec![
            Step::Started,
            Step::Spell("P"),
            Step::Hold,
            Step::Finish(Cause::Stop),
        ]);
    }
    let client = stack.client.clone();
    let answer = tokio::spawn(async move { client.chat(json!({"n": 4})).await });
    // one at each; two more wait, beyond the bound for those that come anew
    stack.reaches("tandem_router_queue_depth", 2).await;
    for decode in &decodes {
        decode.called(1).await;
        for _ in 0..4 {
            decode.release();
        }
    }
    assert_eq!(answer.await.unwrap().json()["choices"].as_array().unwrap().len(), 4);
    stack.at_rest(&[&decodes[0], &decodes[1]]).await;
}

#[tokio::test]
async fn when_the_first_is_sent_again_the_others_are_lost_or_one_that_fails_is_left_out() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.fails_with(Reason::PeerLost, Source::Decode);
    let answer = stack.client.chat(json!({"n": 2})).await;
    assert_eq!(answer.json()["choices"].as_array().unwrap().len(), 2);
    assert_eq!(decode.calls().len(), 3);
    // a failure of one is one of all
    decode.then(engine::spell("Paris"));
    decode.fails_with(Reason::Internal, Source::Decode);
    let answer = stack.client.chat(json!({"n": 2})).await;
    assert_eq!((answer.status, answer.code().as_str()), (500, "internal"));
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn a_first_without_a_token_lets_nobody_follow() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.always(vec![Step::Started, Step::Finish(Cause::Stop)]);
    let answer = stack.client.chat(json!({"n": 3})).await;
    assert_eq!(answer.json()["choices"].as_array().unwrap().len(), 3, "{}", answer.text);
}

#[tokio::test]
async fn several_answers_to_several_prompts_are_mixed_up() {
    let decode = engine::decode();
    decode.always(vec![Step::Started, Step::Echo, Step::Finish(Cause::Stop)]);
    let stack = stack(&[], &[&decode], &[]).await;
    let mut body = json!({"model": "tiny", "prompt": ["aa", "bb", "cc"], "n": 2});
    let expected = ["aa", "aa", "bb", "bb", "cc", "cc"];
    let answer = stack.client.send("/v1/completions", &body).await.json();
    let texts: Vec<_> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| choice["text"].clone())
        .collect();
    assert_eq!(texts, expected);
    let prompts: usize = ["aa", "bb", "cc"]
        .iter()
        .map(|text| engine::TEXT.encode_prompt(text).unwrap().len())
        .sum();
    assert_eq!(answer["usage"]["prompt_tokens"], prompts);
    assert_eq!(answer["usage"]["completion_tokens"], 2 * prompts);
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let response = stack.client.post("/v1/completions", &body).send().await.unwrap();
    let events = events(response).await;
    let mut texts = vec![String::new(); 6];
    for choice in events.data.iter().filter_map(|event| event["choices"].get(0)) {
        let index = choice["index"].as_u64().unwrap() as usize;
        texts[index].push_str(choice["text"].as_str().unwrap());
    }
    assert_eq!(texts, expected);
    assert!(events.done);
    assert_eq!(events.usage().map(Value::to_string), Some(answer["usage"].to_string()));
}
