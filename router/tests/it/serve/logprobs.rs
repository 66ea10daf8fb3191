//! Log-probabilities in answers: of which tokens, and with which piece of a stream.

use serde_json::{Value, json};

use super::client::{Events, events};
use super::engine::{self, Step, ids, score, spell};
use super::stack::{Stack, stack};

const TEXT: &str = "é日🎉 ok";

/// `logprobs.content` of all chunks, each checked to hold the tokens of its own text.
fn streamed(events: &Events) -> Vec<Value> {
    let mut all = Vec::new();
    let (mut text, mut bytes) = (String::new(), Vec::new());
    for event in &events.data {
        let choice = &event["choices"][0];
        text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        for token in choice["logprobs"]["content"].as_array().into_iter().flatten() {
            bytes.extend(
                token["bytes"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|byte| byte.as_u64().unwrap() as u8),
            );
            all.push(token.clone());
        }
        assert!(bytes.starts_with(text.as_bytes()), "{text:?} came before its tokens");
        assert!(
            String::from_utf8_lossy(&bytes).trim_end_matches('\u{fffd}') == text || choice["finish_reason"].is_string(),
            "tokens of {bytes:?} came before their text, which is {text:?} so far"
        );
    }
    all
}

async fn whole(stack: &Stack, extra: Value) -> (String, Vec<Value>) {
    let answer = stack.client.chat(extra).await;
    let content = answer.json()["choices"][0]["logprobs"]["content"].clone();
    let content = content.as_array().unwrap_or_else(|| panic!("{}", answer.text)).clone();
    (answer.content(), content)
}

#[tokio::test]
async fn a_streamed_answer_has_other_tokens_than_the_whole_one_or_apart_from_their_text() {
    let decode = engine::decode();
    decode.always(spell(TEXT));
    let stack = stack(&[], &[&decode], &[]).await;
    let asked = json!({"logprobs": true, "top_logprobs": 2});
    let (text, content) = whole(&stack, asked.clone()).await;
    assert_eq!(text, TEXT);
    let tokens = ids(TEXT);
    assert!(
        tokens.len() > TEXT.chars().count(),
        "no character is spread over tokens"
    );
    assert_eq!(content.len(), tokens.len());
    for (token, &id) in content.iter().zip(&tokens) {
        let bytes = |id| engine::TEXT.vocabulary().token(id).unwrap().0.to_vec();
        assert_eq!(token["bytes"], json!(bytes(id)));
        assert_eq!(token["token"], String::from_utf8_lossy(&bytes(id)).into_owned());
        let score = score(id, 2);
        assert_eq!(token["logprob"], json!(score.logprob));
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(top.len(), 2);
        for (top, (&id, &logprob)) in top.iter().zip(score.top_ids.iter().zip(&score.top_logprobs)) {
            assert_eq!((&top["bytes"], &top["logprob"]), (&json!(bytes(id)), &json!(logprob)));
        }
    }
    let events = stack.client.stream(asked).await;
    assert_eq!(events.text(), TEXT);
    assert_eq!(streamed(&events), content);
}

#[tokio::test]
async fn tokens_of_a_stop_string_are_told_or_differ_in_a_stream() {
    let decode = engine::decode();
    decode.always(vec![Step::Started, Step::Spell("Paris. STOP and more"), Step::Hold]);
    let stack = stack(&[], &[&decode], &[]).await;
    let asked = json!({"logprobs": true, "stop": ["STOP"]});
    let (text, content) = whole(&stack, asked.clone()).await;
    assert_eq!((text.as_str(), content.len()), ("Paris. ", "Paris. ".len()));
    assert_eq!(content[0]["top_logprobs"], json!([]));
    let events = stack.client.stream(asked).await;
    assert_eq!(events.text(), "Paris. ");
    assert_eq!(streamed(&events), content);
}

#[tokio::test]
async fn a_completions_tokens_are_not_told_as_openai_does() {
    let decode = engine::decode();
    decode.always(spell("é ok"));
    let stack = stack(&[], &[&decode], &[]).await;
    let mut body = json!({"model": "tiny", "prompt": "x", "logprobs": 1});
    let answer = stack.client.send("/v1/completions", &body).await.json();
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["bytes:\\xc3", "bytes:\\xa9", " ", "o", "k"]));
    assert_eq!(logprobs["text_offset"], json!([0, 0, 1, 2, 3]));
    let o = ids("o")[0];
    assert_eq!(logprobs["token_logprobs"][3], json!(score(o, 1).logprob));
    // the likeliest, and the token itself although it is none of them
    let likeliest = logprobs["top_logprobs"][3].as_object().unwrap();
    assert_eq!(likeliest.len(), 2);
    assert_eq!(likeliest["o"], json!(score(o, 1).logprob));
    body["stream"] = true.into();
    let response = stack.client.post("/v1/completions", &body).send().await.unwrap();
    let events = events(response).await;
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let all: Vec<_> = events
            .data
            .iter()
            .filter_map(|event| event["choices"][0]["logprobs"][name].as_array())
            .flatten()
            .cloned()
            .collect();
        assert_eq!(json!(all), logprobs[name], "{name}");
    }
    body["logprobs"] = 0.into();
    body["stream"] = false.into();
    let answer = stack.client.send("/v1/completions", &body).await.json();
    let likeliest = &answer["choices"][0]["logprobs"]["top_logprobs"][3];
    assert_eq!(likeliest, &json!({"o": score(o, 0).logprob}));
}

#[tokio::test]
async fn who_did_not_ask_is_told_or_an_engine_that_left_them_out_is_believed() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let plain = stack.client.chat(json!({})).await.json();
    assert!(plain["choices"][0]["logprobs"].is_null());
    decode.then(vec![
        Step::Started,
        Step::Bare("Paris"),
        Step::Finish(tandem_wire::proto::finished::Cause::Stop),
    ]);
    let answer = stack.client.chat(json!({"logprobs": true})).await;
    assert_eq!((answer.status, answer.code().as_str()), (500, "internal"));
    assert!(answer.message().contains("log-probabilities"), "{}", answer.message());
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn an_answer_begun_anew_keeps_the_tokens_of_the_first_try() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.then(vec![Step::Started, Step::Spell("Lon"), Step::Break]);
    let (text, content) = whole(&stack, json!({"logprobs": true})).await;
    assert_eq!((text.as_str(), content.len()), ("Paris", 5));
}
