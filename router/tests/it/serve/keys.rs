//! API keys.

use std::path::Path;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::PATIENCE;
use super::client::{Answer, Client, question};
use super::engine;
use super::stack::{Stack, stack};

const KEY: &str = "sk-0123456789abcdef";
const OTHER: &str = "sk-fedcba9876543210";

async fn locked(mock: &engine::Mock, file: &Path, keys: &str) -> Stack {
    std::fs::write(file, keys).unwrap();
    stack(&[], &[mock], &[&format!("--api-key-file={}", file.display())]).await
}

async fn chat(stack: &Stack, authorization: &[&str]) -> Answer {
    let mut request = stack.client.post("/v1/chat/completions", &question(json!({})));
    for value in authorization {
        request = request.header("authorization", *value);
    }
    Client::read(request.send().await.unwrap()).await
}

#[tokio::test]
async fn a_request_without_one_of_the_keys_is_refused_and_no_engine_hears_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let decode = engine::decode();
    let stack = locked(
        &decode,
        &dir.path().join("keys"),
        &format!("# team a\n{OTHER}\n\n{KEY}\n"),
    )
    .await;
    let bearer = format!("Bearer {KEY}");
    for wrong in [
        &[][..],
        &[""],
        &[KEY],
        &["Bearer"],
        &["Bearer sk-0123456789abcdeF"],
        &["Bearer sk-0123456789abcde"],
        &["Bearer # team a"],
        &[&format!("Basic {KEY}")],
        &[&bearer, &bearer],
    ] {
        let answer = chat(&stack, wrong).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (401, "invalid_api_key"),
            "{wrong:?}"
        );
        assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
        assert_eq!(answer.json()["error"]["param"], Value::Null);
        assert!(!answer.text.contains("sk-"), "{}", answer.text);
    }
    assert_eq!(decode.calls().len(), 0);
    for right in [&bearer, &format!("bearer  {OTHER}")] {
        assert_eq!(chat(&stack, &[right]).await.content(), "Paris");
    }
    assert!(!stack.metrics.encode().unwrap().contains("sk-"));
}

#[tokio::test]
async fn probes_need_no_key_and_every_other_path_does() {
    let dir = tempfile::tempdir().unwrap();
    let decode = engine::decode();
    let stack = locked(&decode, &dir.path().join("keys"), KEY).await;
    for open in ["/health", "/livez", "/readyz"] {
        assert_eq!(stack.client.get(open).await.status, 200, "{open}");
    }
    for closed in [
        "/v1/models",
        "/v1/models/tiny",
        "/metrics",
        "/nowhere",
        "/health/",
        "/readyz%20",
        "//livez",
        "/v1/chat/completions",
        "/tokenize",
        "/health_generate",
    ] {
        let answer = stack.client.get(closed).await;
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (401, "invalid_api_key"),
            "{closed}"
        );
    }
    let models = stack.client.http.get(stack.client.url("/v1/models")).bearer_auth(KEY);
    assert_eq!(models.send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_request_without_a_key_is_refused_before_its_body_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let decode = engine::decode();
    let stack = locked(&decode, &dir.path().join("keys"), KEY).await;
    // none of the bodies comes; one client waits to be asked for it
    for expect in ["", "expect: 100-continue\r\n"] {
        let mut socket = TcpStream::connect(stack.router.addr()).await.unwrap();
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{expect}content-length: 1000\r\n\r\n"
        );
        socket.write_all(head.as_bytes()).await.unwrap();
        let mut start = [0; 12];
        tokio::time::timeout(PATIENCE, socket.read_exact(&mut start))
            .await
            .expect("it waits for the body")
            .unwrap();
        assert_eq!(str::from_utf8(&start).unwrap(), "HTTP/1.1 401", "{expect:?}");
    }
}

#[tokio::test]
async fn a_key_that_was_removed_from_the_file_is_refused_without_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys");
    let decode = engine::decode();
    let stack = locked(&decode, &file, KEY).await;
    let status = async |key: &str| chat(&stack, &[&format!("Bearer {key}")]).await.status;
    assert_eq!((status(KEY).await, status(OTHER).await), (200, 401));
    std::fs::write(&file, OTHER).unwrap();
    let taken = async {
        while status(OTHER).await != 200 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, taken)
        .await
        .expect("the new key is never taken");
    assert_eq!(status(KEY).await, 401);
}
