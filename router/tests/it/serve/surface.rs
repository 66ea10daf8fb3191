//! Requests, answers and refusals as OpenAI's clients expect them.

use serde_json::{Value, json};
use tandem_telemetry::State;
use tandem_wire::proto::finished::Cause;
use tandem_wire::{Reason, Source};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::client::{Client, question};
use super::engine::{self, Shape, Step, TEXT};
use super::stack::{cold, stack};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_chat_is_not_answered_as_openai_would() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let answer = stack.client.chat(json!({})).await;
    assert_eq!(answer.content(), "Paris");
    let json = answer.json();
    assert_eq!(json["object"], "chat.completion");
    assert_eq!(json["model"], "tiny");
    assert!(json["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(json["choices"][0]["finish_reason"], "stop");
    assert_eq!(json["choices"][0]["message"]["role"], "assistant");
    let call = &decode.calls()[0];
    let usage = &json["usage"];
    assert_eq!(usage["prompt_tokens"], call.prompt_tokens.len());
    assert_eq!(usage["completion_tokens"], 5);
    assert_eq!(usage["total_tokens"], call.prompt_tokens.len() + 5);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 3);
    assert!(
        TEXT.decode(&call.prompt_tokens, false)
            .unwrap()
            .contains("What is the capital of France?")
    );
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn what_the_client_asked_for_does_not_reach_the_engine() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let extra = json!({
        "temperature": 0.5, "top_p": 0.25, "seed": -1, "max_completion_tokens": 7, "stop_token_ids": [9, 8],
        "ignore_eos": true,
    });
    stack.client.chat(extra).await.content();
    stack.client.stream(json!({})).await;
    let calls = decode.calls();
    let sampling = calls[0].sampling.clone().unwrap();
    assert_eq!(
        (sampling.temperature, sampling.top_p, sampling.seed),
        (0.5, 0.25, u64::MAX)
    );
    assert_eq!(
        (calls[0].max_new_tokens, calls[0].ignore_eos, calls[0].batch_tokens),
        (7, true, true)
    );
    assert_eq!(calls[0].stop_token_ids, [9, 8]);
    assert!((1..=1_800_000).contains(&calls[0].remaining_ms));
    // left out: as many as fit; and a stream wants each token as it comes
    assert_eq!(calls[1].max_new_tokens as usize, 512 - calls[1].prompt_tokens.len());
    assert!(!calls[1].batch_tokens && !calls[1].ignore_eos);
}

#[tokio::test]
async fn a_completion_is_not_answered_for_every_shape_of_prompt() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let ids = TEXT.encode_prompt("Paris is").unwrap();
    for prompt in [json!("Paris is"), json!(["Paris is"]), json!(ids), json!([ids])] {
        let answer = stack
            .client
            .send("/v1/completions", &json!({"model": "tiny", "prompt": prompt}))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        let json = answer.json();
        assert_eq!(json["object"], "text_completion");
        assert_eq!(json["choices"][0]["text"], "Paris");
        assert_eq!(decode.calls().last().unwrap().prompt_tokens, ids);
    }
}

#[tokio::test]
async fn several_prompts_are_mixed_up() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--policy=round-robin"]).await;
    let body = json!({"model": "tiny", "prompt": ["a", "bb", "ccc"], "stream_options": null});
    let answer = stack.client.send("/v1/completions", &body).await.json();
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(
            (choice["index"].as_u64(), choice["text"].as_str()),
            (Some(index as u64), Some("Paris"))
        );
    }
    assert_eq!(answer["usage"]["completion_tokens"], 15);
    let mut body = body;
    body["stream"] = true.into();
    body["stream_options"] = json!({"include_usage": true});
    let response = stack.client.post("/v1/completions", &body).send().await.unwrap();
    let events = super::client::events(response).await;
    for index in 0..3 {
        let of = |event: &&Value| event["choices"][0]["index"] == index;
        let text: String = events
            .data
            .iter()
            .filter(of)
            .filter_map(|e| e["choices"][0]["text"].as_str())
            .collect();
        assert_eq!(text, "Paris");
        let ends = events
            .data
            .iter()
            .filter(of)
            .filter(|e| e["choices"][0]["finish_reason"] == "stop")
            .count();
        assert_eq!(ends, 1);
    }
    assert!(events.done);
    assert_eq!(events.usage().unwrap()["completion_tokens"], 15);
}

#[tokio::test]
async fn a_wrong_request_is_not_refused_by_the_name_of_its_field() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let cases = [
        (json!({"max_tokens": "x"}), "max_tokens", "invalid_field"),
        (json!({"max_tokens": 0}), "max_tokens", "invalid_field"),
        (
            json!({"messages": [{"role": "user", "content": 5}]}),
            "messages[0].content",
            "invalid_field",
        ),
        (json!({"messages": []}), "messages", "invalid_field"),
        (json!({"messages": null}), "messages", "invalid_field"),
        (json!({"stop": 5}), "stop", "invalid_field"),
        (json!({"stop": ""}), "stop[0]", "invalid_field"),
        (json!({"stop": vec!["a"; 17]}), "stop", "invalid_field"),
        (json!({"stop_token_ids": [1, 526]}), "stop_token_ids", "invalid_field"),
        (
            json!({"stop_token_ids": vec![1; 129]}),
            "stop_token_ids",
            "invalid_field",
        ),
        (json!({"model": null}), "model", "invalid_field"),
    ];
    for (extra, param, code) in cases {
        let answer = stack.client.chat(extra.clone()).await;
        assert_eq!(answer.status, 400, "{extra}: {}", answer.text);
        assert_eq!(
            (answer.code().as_str(), answer.param().as_deref()),
            (code, Some(param)),
            "{extra}"
        );
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
        assert!(answer.message().contains(param), "{}", answer.message());
    }
    let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]});
    let answer = stack.client.chat(image).await;
    assert_eq!(answer.code(), "invalid_field");
    assert_eq!(answer.param().as_deref(), Some("messages[0].content[0].type"));
    let wrong = json!({"model": "tiny", "prompt": [1, 2, 99_999]});
    let answer = stack.client.send("/v1/completions", &wrong).await;
    assert_eq!((answer.status, answer.param().as_deref()), (400, Some("prompt[2]")));
    assert!(decode.calls().is_empty(), "a wrong request must not reach an engine");
}

#[tokio::test]
async fn malformed_json_an_unknown_model_or_a_wrong_path_has_another_shape() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--max-body-bytes=2000"]).await;
    let client = &stack.client;
    for body in ["", "{", "{\"model\":", "not json"] {
        let answer = client.raw(CHAT, body).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (400, "malformed_json"),
            "{body:?}"
        );
    }
    let answer = client.chat(json!({"model": "gpt-9"})).await;
    assert_eq!((answer.status, answer.code().as_str()), (404, "model_not_found"));
    assert!(answer.message().contains("gpt-9") && answer.message().contains("tiny"));
    let answer = client.get("/v1/models/gpt-9").await;
    assert_eq!((answer.status, answer.code().as_str()), (404, "model_not_found"));
    let answer = client.get("/v1/nowhere").await;
    assert_eq!((answer.status, answer.code().as_str()), (404, "unknown_path"));
    let answer = client.get(CHAT).await;
    assert_eq!(
        (answer.status, answer.code().as_str(), answer.header("allow")),
        (405, "method_not_allowed", Some("POST"))
    );
    let answer = client.send("/v1/models", &json!({})).await;
    assert_eq!((answer.status, answer.header("allow")), (405, Some("GET")));
    let form = client
        .http
        .post(client.url(CHAT))
        .header("content-type", "text/plain")
        .body("{}");
    let answer = Client::read(form.send().await.unwrap()).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (415, "unsupported_content_type")
    );
}

#[tokio::test]
async fn a_body_over_the_limit_is_read_to_memory() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--max-body-bytes=2000"]).await;
    let client = &stack.client;
    let big = question(json!({"user": "x".repeat(200_000)}));
    let answer = client.send(CHAT, &big).await;
    assert_eq!((answer.status, answer.code().as_str()), (413, "body_too_large"));
    // without a declared length
    let pieces = (0..100).map(|_| Ok::<_, std::io::Error>(vec![b' '; 1_000]));
    let body = reqwest::Body::wrap_stream(futures::stream::iter(pieces));
    let request = client
        .http
        .post(client.url(CHAT))
        .header("content-type", "application/json")
        .body(body);
    let answer = Client::read(request.send().await.unwrap()).await;
    assert_eq!((answer.status, answer.code().as_str()), (413, "body_too_large"));
    assert_eq!(client.chat(json!({})).await.content(), "Paris");
}

#[tokio::test]
async fn many_bodies_at_once_fill_the_memory_or_lose_their_room_for_good() {
    let decode = engine::decode();
    let flags = ["--max-body-bytes=100000", "--max-bodies-bytes=150000"];
    let stack = stack(&[], &[&decode], &flags).await;
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n";
    // one who never sends the rest
    let mut slow = tokio::net::TcpStream::connect(stack.router.addr()).await.unwrap();
    slow.write_all(head.as_bytes()).await.unwrap();
    slow.write_all(&vec![b' '; 90_000]).await.unwrap();
    let big = question(json!({"user": "x".repeat(80_000)}));
    let full = async {
        loop {
            let answer = stack.client.send(CHAT, &big).await;
            if answer.status != 200 {
                return answer;
            }
        }
    };
    let answer = tokio::time::timeout(super::PATIENCE, full)
        .await
        .expect("its bytes are never counted");
    assert_eq!((answer.status, answer.code().as_str()), (429, "bodies_full"));
    assert_eq!(
        (answer.header("retry-after"), answer.json()["error"]["source"].as_str()),
        (Some("1"), Some("router"))
    );
    assert_eq!(
        stack.client.chat(json!({})).await.content(),
        "Paris",
        "no room for a small one"
    );
    drop(slow);
    let free = async { while stack.client.send(CHAT, &big).await.status != 200 {} };
    tokio::time::timeout(super::PATIENCE, free)
        .await
        .expect("its room is never free again");
    // and each that was answered gave its own back
    for _ in 0..4 {
        assert_eq!(stack.client.send(CHAT, &big).await.status, 200);
    }
}

#[tokio::test]
async fn an_over_long_prompt_does_not_name_both_lengths() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let long = json!({"messages": [{"role": "user", "content": "z".repeat(2_000)}]});
    let answer = stack.client.chat(long.clone()).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (400, "context_length_exceeded")
    );
    assert_eq!(answer.param().as_deref(), Some("messages"));
    let numbers: Vec<usize> = answer
        .message()
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|n| n.parse().ok())
        .collect();
    assert!(numbers.contains(&512), "{}", answer.message());
    assert!(numbers.iter().any(|n| *n > 600), "{}", answer.message());
    let answer = stack.client.chat(json!({"max_tokens": 511})).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (400, "context_length_exceeded")
    );
    assert!(
        answer.message().contains("512") && answer.message().contains("511"),
        "{}",
        answer.message()
    );
    assert!(decode.calls().is_empty());
    // so long that its tokens need not be counted
    let long = json!({"messages": [{"role": "user", "content": "z".repeat(4_000_000)}]});
    let answer = stack.client.chat(long).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (400, "context_length_exceeded")
    );
    assert!(
        answer.message().contains("512") && answer.message().contains("at least"),
        "{}",
        answer.message()
    );
    // the engine's own refusal has the same code
    decode.then(vec![Step::Refuse(engine::failure(Reason::OverLength, Source::Decode))]);
    let answer = stack.client.chat(json!({})).await;
    assert_eq!(
        (answer.status, answer.code().as_str()),
        (400, "context_length_exceeded")
    );
}

#[tokio::test]
async fn the_routers_own_length_limit_is_ignored() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--max-length-tokens=100"]).await;
    let answer = stack.client.chat(json!({"max_tokens": 90})).await;
    assert!(
        answer.status == 400 && answer.message().contains("100"),
        "{}",
        answer.text
    );
    assert_eq!(stack.client.chat(json!({"max_tokens": 9})).await.status, 200);
    assert_eq!(
        stack.client.get("/v1/models").await.json()["data"][0]["max_model_len"],
        100
    );
}

#[tokio::test]
async fn a_request_id_is_not_echoed_or_a_dangerous_one_is() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let with = async |id: &str, extra| {
        let request = stack.client.post(CHAT, &question(extra)).header("x-request-id", id);
        Client::read(request.send().await.unwrap()).await
    };
    let answer = with("mine-1", json!({})).await;
    assert_eq!(answer.header("x-request-id"), Some("mine-1"));
    assert_eq!(decode.calls()[0].request_id, "mine-1");
    let answer = with("mine-2", json!({"n": 0})).await;
    assert_eq!(answer.code(), "invalid_field");
    assert_eq!(answer.header("x-request-id"), Some("mine-2"));
    for bad in ["two words", &"x".repeat(129)] {
        let answer = with(bad, json!({})).await;
        assert!(answer.header("x-request-id").unwrap().starts_with("req-"));
    }
}

#[tokio::test]
async fn the_other_paths_do_not_answer() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let models = stack.client.get("/v1/models").await.json();
    assert_eq!(
        (models["object"].as_str(), models["data"][0]["id"].as_str()),
        (Some("list"), Some("tiny"))
    );
    assert_eq!(stack.client.get("/v1/models/tiny").await.json()["object"], "model");
    for path in ["/health", "/readyz", "/livez"] {
        assert_eq!(stack.client.get(path).await.status, 200, "{path}");
    }
    let metrics = stack.client.get("/metrics").await;
    assert!(
        metrics
            .text
            .contains("tandem_router_requests_total{endpoint=\"chat\",code=\"queue_full\"} 0")
    );
    assert!(metrics.text.ends_with("# EOF\n"));
    let head = stack
        .client
        .http
        .head(stack.client.url("/health"))
        .send()
        .await
        .unwrap();
    assert_eq!(head.status(), 200);
}

#[tokio::test]
async fn it_cannot_be_reached_while_its_engines_are_gone_and_nobody_is_told_to_come_back() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    stack.becomes(|state| *state == State::Ready).await;
    drop(decode);
    stack
        .becomes(|state| matches!(state, State::Degraded { reason } if reason.contains("no decode engine")))
        .await;
    let answer = stack.client.get("/readyz").await;
    assert_eq!(
        (answer.status, answer.json()["status"].as_str().unwrap()),
        (200, "degraded")
    );
    // who balances between several deployments goes by this one
    assert_eq!(stack.client.get("/health").await.status, 503);
    let answer = stack.client.chat(json!({})).await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "no_decode_engine"));
    assert_eq!(answer.header("retry-after"), Some("1"));
}

#[tokio::test]
async fn it_says_ready_before_a_usable_pair_exists() {
    let (prefill, decode) = (engine::prefill(), engine::decode());
    // of another model: no pair
    let stranger = engine::Mock::start(Shape {
        model_hash: 2,
        ..Shape::default()
    });
    let stack = cold(&[&prefill], &[&stranger], &[]).await;
    stack
        .becomes(|state| matches!(state, State::Waiting { reason } if reason.contains("goes with")))
        .await;
    let answer = stack.client.get("/readyz").await;
    assert_eq!(
        (answer.status, answer.json()["status"].as_str().unwrap()),
        (503, "waiting")
    );
    let answer = stack.client.chat(json!({})).await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "no_prefill_engine"));
    assert_eq!(answer.header("retry-after"), Some("1"));

    // a prefill engine given as decode
    let stack = cold(&[], &[&prefill], &[]).await;
    stack
        .becomes(|state| matches!(state, State::Waiting { reason } if reason.contains("is a prefill engine")))
        .await;
    assert_eq!(stack.client.get("/health").await.status, 503);
    assert_eq!(stack.client.get("/livez").await.status, 200);
    let answer = stack.client.chat(json!({})).await;
    assert_eq!((answer.status, answer.code().as_str()), (503, "no_decode_engine"));
    drop(decode);
}

#[tokio::test]
async fn a_pair_is_not_named_by_its_boots() {
    let (prefill, decode) = (engine::prefill(), engine::decode());
    let stack = stack(&[&prefill], &[&decode], &[]).await;
    assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
    let call = &decode.calls()[0];
    assert_eq!(call.boot_id, decode.boot().to_wire());
    let peer = call.prefill.as_ref().unwrap();
    assert_eq!(
        (peer.endpoint.as_str(), &peer.boot_id),
        (prefill.endpoint().as_str(), &prefill.boot().to_wire())
    );
    assert_eq!(call.key.as_ref().unwrap().transfer_id.len(), 16);
    // a unified engine pulls from nobody
    let unified = engine::unified();
    let other = super::stack::stack(&[], &[&unified], &[]).await;
    assert_eq!(other.client.chat(json!({})).await.content(), "Paris");
    assert!(unified.calls()[0].prefill.is_none());
}

#[tokio::test]
async fn the_same_generation_ends_differently_whole_and_streamed() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    for cause in [Cause::Stop, Cause::Length] {
        decode.always(vec![Step::Started, Step::Spell("é日🎉 ok"), Step::Finish(cause)]);
        let whole = stack.client.chat(json!({})).await;
        let events = stack.client.stream(json!({})).await;
        assert_eq!(whole.content(), events.text());
        assert_eq!(
            whole.json()["choices"][0]["finish_reason"].as_str(),
            events.finish_reason()
        );
    }
}

#[tokio::test]
async fn without_max_tokens_a_completion_has_no_bound_or_a_chat_has_one() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    stack.client.chat(json!({})).await.content();
    let body = json!({"model": "tiny", "prompt": "x"});
    let response = stack.client.post("/v1/completions", &body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let calls = decode.calls();
    assert_eq!(calls[0].max_new_tokens + calls[0].prompt_tokens.len() as u32, 512);
    assert_eq!(calls[1].max_new_tokens, 16);
}

#[tokio::test]
async fn who_is_refused_by_the_head_gets_a_reset_while_it_still_sends() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    // more than what the sockets hold, from a client that reads only when all is sent
    let body = vec![b'x'; 16 << 20];
    for (path, kind, status) in [
        ("/nowhere", "application/json", "404"),
        ("/v1/models", "application/json", "405"),
        ("/v1/completions", "text/plain", "415"),
    ] {
        let mut socket = tokio::net::TcpStream::connect(stack.router.addr()).await.unwrap();
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n"
        );
        socket.write_all(head.as_bytes()).await.unwrap();
        socket.write_all(&body).await.expect(path);
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.expect(path);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    }
}
