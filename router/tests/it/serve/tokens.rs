//! Text to tokens and back, and the token that proves both legs.

use serde_json::json;
use tandem_wire::proto::finished::Cause;
use tandem_wire::{Reason, Source};

use super::engine::{self, Step, TEXT};
use super::stack::{cold, stack};

#[tokio::test]
async fn a_prompt_or_a_conversation_has_other_tokens_than_where_it_is_answered() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let client = &stack.client;
    let prompt = "Paris is é日🎉";
    let answer = client
        .send("/tokenize", &json!({"model": "tiny", "prompt": prompt}))
        .await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let tokens = TEXT.encode_prompt(prompt).unwrap();
    let expected = json!({"count": tokens.len(), "max_model_len": 512, "tokens": tokens, "token_strs": null});
    assert_eq!(answer.json(), expected);
    let back = client.send("/detokenize", &json!({"tokens": tokens})).await;
    assert_eq!(back.json(), json!({"prompt": prompt}));

    client.chat(json!({})).await.content();
    let asked = decode.calls()[0].prompt_tokens.clone();
    let body = super::client::question(json!({}));
    let answer = client.send("/tokenize", &body).await.json();
    assert_eq!(answer["tokens"], json!(asked));
    let unopened = super::client::question(json!({"add_generation_prompt": false, "return_token_strs": true}));
    let answer = client.send("/tokenize", &unopened).await.json();
    let tokens = answer["tokens"].as_array().unwrap();
    assert!(tokens.len() < asked.len() && json!(asked).as_array().unwrap().starts_with(tokens));
    let text: String = answer["token_strs"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| token.as_str().unwrap())
        .collect();
    // a special token is shown, going back too
    assert!(text.contains("<|im_start|>"), "{text}");
    let back = client.send("/detokenize", &json!({"tokens": tokens})).await;
    assert_eq!(back.json()["prompt"], text);
    assert_eq!(decode.calls().len(), 1, "an engine was asked");
}

#[tokio::test]
async fn a_wrong_field_of_them_is_not_named() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--max-body-bytes=2000"]).await;
    for (path, body, param, code) in [
        ("/tokenize", json!({}), Some("prompt"), "invalid_field"),
        ("/tokenize", json!({"prompt": 5}), Some("prompt"), "invalid_field"),
        (
            "/tokenize",
            json!({"prompt": "x", "messages": []}),
            Some("prompt"),
            "invalid_field",
        ),
        ("/tokenize", json!({"messages": []}), Some("messages"), "invalid_field"),
        (
            "/tokenize",
            json!({"messages": [{"role": "user", "content": 5}]}),
            Some("messages[0].content"),
            "invalid_field",
        ),
        (
            "/tokenize",
            json!({"prompt": "x", "add_special_tokens": 1}),
            Some("add_special_tokens"),
            "invalid_field",
        ),
        (
            "/tokenize",
            json!({"prompt": "x", "model": "other"}),
            Some("model"),
            "model_not_found",
        ),
        (
            "/tokenize",
            json!({"prompt": "x".repeat(3_000)}),
            None,
            "body_too_large",
        ),
        ("/detokenize", json!({}), Some("tokens"), "invalid_field"),
        ("/detokenize", json!({"tokens": "x"}), Some("tokens"), "invalid_field"),
        (
            "/detokenize",
            json!({"tokens": [1, 526]}),
            Some("tokens[1]"),
            "invalid_field",
        ),
        (
            "/detokenize",
            json!({"tokens": [1, -1]}),
            Some("tokens[1]"),
            "invalid_field",
        ),
    ] {
        let answer = stack.client.send(path, &body).await;
        let case = format!("{path} {body}: {}", answer.text);
        assert_eq!(
            (answer.code().as_str(), answer.param().as_deref()),
            (code, param),
            "{case}"
        );
    }
    let answer = stack.client.get("/tokenize").await;
    assert_eq!((answer.status, answer.header("allow")), (405, Some("POST")));
}

#[tokio::test]
async fn health_generate_asks_one_leg_only_or_says_well_without_a_token() {
    let (prefill, decode) = (engine::prefill(), engine::decode());
    let stack = stack(&[&prefill], &[&decode], &[]).await;
    let answer = stack.client.get("/health_generate").await;
    assert_eq!(
        (answer.status, answer.json()["status"].as_str()),
        (200, Some("generating"))
    );
    let call = &decode.calls()[0];
    assert_eq!(call.prefill.as_ref().unwrap().endpoint, prefill.endpoint());
    // with one token only, decode would need no KV
    assert_eq!((call.max_new_tokens, call.ignore_eos), (2, true));
    decode.then(vec![Step::Refuse(engine::failure(Reason::Internal, Source::Prefill))]);
    let answer = stack.client.get("/health_generate").await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["code"], "internal");
    assert!(answer.json()["reason"].as_str().unwrap().contains("scripted"));
    assert_eq!(stack.client.send("/health_generate", &json!({})).await.status, 405);

    let alone = cold(&[], &[&prefill], &[]).await;
    let answer = alone.client.get("/health_generate").await;
    assert_eq!(
        (answer.status, answer.json()["code"].as_str()),
        (503, Some("no_decode_engine"))
    );
}

#[tokio::test]
async fn many_who_ask_for_health_load_the_engines() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    decode.always(vec![
        Step::Started,
        Step::Hold,
        Step::Spell("ok"),
        Step::Finish(Cause::Length),
    ]);
    let ask = || {
        let client = stack.client.clone();
        tokio::spawn(async move { client.get("/health_generate").await })
    };
    let first = ask();
    decode.called(1).await;
    let others: Vec<_> = (0..20).map(|_| ask()).collect();
    stack.reaches("tandem_router_in_flight", 21).await;
    assert_eq!(decode.calls().len(), 1, "two probes at once");
    for _ in 0..21 {
        decode.release();
    }
    assert_eq!(first.await.unwrap().status, 200);
    for other in others {
        assert_eq!(other.await.unwrap().status, 200);
    }
    // one for all who came while the first ran; a second one for a straggler
    assert!(
        (2..10).contains(&decode.calls().len()),
        "{} probes",
        decode.calls().len()
    );
    stack.at_rest(&[&decode]).await;
}
