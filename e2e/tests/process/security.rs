//! Keys and tokens, through all processes.

use std::path::Path;

use serde_json::{Value, json};
use tandem_e2e::process::Process;
use tandem_e2e::stack::{Engine, MODEL, START};
use tandem_e2e::{bin, eventually, free_port, model, probe, salted_text};

const TOKEN: &str = "token-of-the-test-0123456789";
const KEY: &str = "key-of-the-test-0123456789";
const WRONG: &str = "guess-of-the-test-0123456789";

fn engine_flags(folder: &Path) -> Vec<String> {
    vec![
        format!("--admin-listen=127.0.0.1:{}", free_port()),
        format!("--admin-token-file={}", folder.join("token").display()),
    ]
}

async fn call(method: &str, url: &str, secret: &str, body: Option<Value>) -> (u16, Value) {
    let mut request = probe::http()
        .request(method.parse().expect("a method"), url)
        .bearer_auth(secret);
    if let Some(body) = body {
        request = request.json(&body);
    }
    let response = request.send().await.expect("an answer");
    (response.status().as_u16(), response.json().await.expect("JSON"))
}

#[tokio::test(flavor = "multi_thread")]
async fn orders_reach_the_engines_and_no_secret_stands_in_a_log() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("token"), TOKEN).expect("a file");
    std::fs::write(folder.path().join("keys"), KEY).expect("a file");
    let (of_prefill, of_decode) = (engine_flags(folder.path()), engine_flags(folder.path()));
    let of_prefill: Vec<&str> = of_prefill.iter().map(String::as_str).collect();
    let of_decode: Vec<&str> = of_decode.iter().map(String::as_str).collect();
    let (prefill, decode) = tokio::join!(
        Engine::start("prefill", &of_prefill),
        Engine::start("decode", &of_decode)
    );
    let (http, ops, admin) = (free_port(), free_port(), free_port());
    let args = [
        format!("--listen=127.0.0.1:{http}"),
        format!("--ops-listen=127.0.0.1:{ops}"),
        format!("--admin-listen=127.0.0.1:{admin}"),
        format!("--admin-token-file={}", folder.path().join("token").display()),
        format!("--api-key-file={}", folder.path().join("keys").display()),
        format!("--model-name={MODEL}"),
        format!("--tokenizer={}", model().display()),
        format!("--prefill={}", prefill.control()),
        format!("--decode={}", decode.control()),
    ];
    // the libraries below write down what passes them, if anything does
    let router = Process::start_logging("trace", "router", &bin("tandem-router"), &args);
    let ready = async |wanted: &str| {
        let url = format!("http://127.0.0.1:{ops}/readyz");
        eventually(&format!("/readyz says {wanted}"), START, async || {
            let answer = async { probe::http().get(&url).send().await?.text().await };
            let text = answer.await.map_err(|error| error.to_string())?;
            if text.contains(&format!("\"status\":\"{wanted}\"")) {
                Ok(())
            } else {
                Err(text)
            }
        })
        .await;
    };
    ready("ready").await;

    let (api, orders) = (
        format!("http://127.0.0.1:{http}/v1/completions"),
        format!("http://127.0.0.1:{admin}/admin"),
    );
    let question = json!({"model": MODEL, "prompt": salted_text(71, 60), "max_tokens": 4, "temperature": 0});
    assert_eq!(call("POST", &api, WRONG, Some(question.clone())).await.0, 401);
    let cached = async || {
        let (status, answer) = call("POST", &api, KEY, Some(question.clone())).await;
        assert_eq!(status, 200, "{answer}");
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .expect("a count")
    };
    assert_eq!(cached().await, 0);
    assert!(cached().await > 0);
    let flush = format!("{orders}/flush");
    let (status, refused) = call("POST", &flush, WRONG, None).await;
    assert_eq!(
        (status, refused["error"]["code"].as_str()),
        (401, Some("invalid_admin_token"))
    );
    assert!(cached().await > 0, "a flush without the token dropped the cache");
    let (status, flushed) = call("POST", &flush, TOKEN, None).await;
    assert_eq!(status, 200, "{flushed}");
    assert!(
        flushed["engines"]
            .as_array()
            .expect("engines")
            .iter()
            .all(|engine| engine["freed_pages"].as_u64() > Some(0)),
        "{flushed}"
    );
    assert_eq!(cached().await, 0, "the prefix cache survived the flush");

    let one = json!({"endpoint": decode.control(), "wait_ms": 1000});
    let (status, drained) = call("POST", &format!("{orders}/drain"), TOKEN, Some(one.clone())).await;
    assert_eq!(
        (status, &drained["engines"][0]["remaining"]),
        (200, &json!(0)),
        "{drained}"
    );
    ready("degraded").await;
    let (status, resumed) = call("POST", &format!("{orders}/resume"), TOKEN, Some(one)).await;
    assert_eq!(status, 200, "{resumed}");
    ready("ready").await;
    cached().await;

    for log in [prefill.process.log(), decode.process.log(), router.log()] {
        assert!(log.contains("serving"), "{log}");
        for secret in [TOKEN, KEY, WRONG] {
            assert!(!log.contains(secret), "{secret} stands in\n{log}");
        }
    }
}
