//! Clients and connections that are slow on purpose.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::question;
use super::engine::{self, Step};
use super::stack::{Stack, stack};

async fn connect(stack: &Stack, body: &serde_json::Value) -> TcpStream {
    let body = body.to_string();
    let mut socket = TcpStream::connect(stack.router.addr()).await.unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(head.as_bytes()).await.unwrap();
    socket
}

#[tokio::test]
async fn a_reader_that_stops_delays_others() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--client-stall-ms=60000"]).await;
    decode.then(vec![Step::Started, Step::Flood]);
    let socket = connect(&stack, &question(json!({"stream": true}))).await;
    decode.called(1).await;
    for _ in 0..5 {
        assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
        assert!(decode.open() >= 1, "it was cut off");
    }
    drop(socket);
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn a_reader_that_stops_holds_its_engine_for_ever_or_is_said_to_have_left() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--client-stall-ms=300"]).await;
    decode.then(vec![Step::Started, Step::Flood]);
    let socket = connect(&stack, &question(json!({"stream": true}))).await;
    decode.called(1).await;
    decode.idle().await;
    stack.at_rest(&[&decode]).await;
    stack.disconnected().await;
    let counted = |code| {
        stack.sample(&format!(
            "tandem_router_requests_total{{endpoint=\"chat\",code=\"{code}\"}}"
        ))
    };
    assert_eq!((counted("client_stalled"), counted("client_gone")), (1, 0));
    assert_eq!(stack.sample("tandem_router_client_stalled_total"), 1);
    drop(socket);
}

#[tokio::test]
async fn a_slow_reader_that_goes_on_is_cut_off() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--client-stall-ms=2000"]).await;
    decode.then(vec![Step::Started, Step::Flood]);
    let mut socket = connect(&stack, &question(json!({"stream": true}))).await;
    let mut buffer = vec![0; 64 << 10];
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        assert!(socket.read(&mut buffer).await.unwrap() > 0, "cut off while it read");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(decode.open(), 1);
    drop(socket);
    stack.at_rest(&[&decode]).await;
}
