//! Clients and connections that are slow on purpose.

use std::time::{Duration, Instant};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::PATIENCE;
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
async fn a_reader_that_stops_holds_its_engine_for_ever_or_delays_others() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--client-stall-ms=300"]).await;
    decode.then(vec![Step::Started, Step::Flood]);
    let socket = connect(&stack, &question(json!({"stream": true}))).await;
    decode.called(1).await;
    // nobody else waits for it
    for _ in 0..5 {
        let began = Instant::now();
        assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
        assert!(began.elapsed() < Duration::from_secs(2));
    }
    tokio::time::timeout(PATIENCE, decode.idle()).await.unwrap();
    stack.at_rest(&[&decode]).await;
    // its connection is closed; that of the others stays
    stack.reaches("tandem_router_connections", 1).await;
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

#[tokio::test]
async fn small_writes_wait_for_an_acknowledgement() {
    // without TCP_NODELAY each further chunk waits 40 ms for the client's delayed acknowledgement
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    stack.client.stream(json!({})).await;
    let mut times = Vec::new();
    for _ in 0..21 {
        let began = Instant::now();
        assert!(stack.client.stream(json!({})).await.done);
        times.push(began.elapsed());
    }
    times.sort();
    assert!(times[10] < Duration::from_millis(35), "median {:?}", times[10]);
}
