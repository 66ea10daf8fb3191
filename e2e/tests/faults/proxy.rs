//! The planted proxy itself: one whose fault does not strike would prove nothing.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use tandem_e2e::proxy::{Doorway, Plant, Proxy};
use tandem_e2e::visitor::KeptAlive;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::timeout;

const ANSWER: usize = 3_000;
/// A word that does not come is waited for so long.
const SILENCE: Duration = Duration::from_millis(300);

/// Answers each request of each connection with so many bytes.
async fn upstream() -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = Vec::new();
                let mut buffer = [0; 4096];
                while let Ok(count @ 1..) = socket.read(&mut buffer).await {
                    request.extend_from_slice(&buffer[..count]);
                    // the body is the empty object
                    if request.ends_with(b"\r\n\r\n{}") {
                        request.clear();
                        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {ANSWER}\r\n\r\n");
                        let answer = [head.into_bytes(), vec![b'x'; ANSWER]].concat();
                        if socket.write_all(&answer).await.is_err() {
                            return;
                        }
                    }
                }
            });
        }
    });
    addr
}

async fn visit(proxy: &Proxy) -> KeptAlive {
    KeptAlive::open(&proxy.url(), &proxy.ca(), "none").await
}

async fn passes(visitor: &mut KeptAlive) {
    let (status, body) = visitor.complete(&json!({})).await.expect("an answer");
    assert_eq!((status, body.len()), (200, ANSWER));
}

async fn hangs(visitor: &mut KeptAlive) {
    let answer = timeout(SILENCE, visitor.complete(&json!({}))).await;
    assert!(answer.is_err(), "{answer:?}");
}

#[tokio::test]
async fn a_proxy_without_a_fault_passes_everything_on() {
    let proxy = Proxy::start(upstream().await, Plant::Nothing).await;
    let mut visitor = visit(&proxy).await;
    for _ in 0..3 {
        passes(&mut visitor).await;
    }
}

#[tokio::test]
async fn one_that_holds_lets_the_first_of_each_connection_through() {
    let proxy = Proxy::start(upstream().await, Plant::Hold(2)).await;
    for _ in 0..2 {
        let mut visitor = visit(&proxy).await;
        passes(&mut visitor).await;
        hangs(&mut visitor).await;
    }
    proxy.struck(2).await;
}

#[tokio::test]
async fn one_whose_pool_is_exhausted_answers_nobody_any_more() {
    let proxy = Proxy::start(upstream().await, Plant::Exhaust(2)).await;
    let mut visitor = visit(&proxy).await;
    passes(&mut visitor).await;
    passes(&mut visitor).await;
    hangs(&mut visitor).await;
    hangs(&mut visit(&proxy).await).await;
    proxy.struck(2).await;
}

#[tokio::test]
async fn one_that_cuts_ends_the_answer_on_the_way() {
    let proxy = Proxy::start(upstream().await, Plant::Cut(1_000)).await;
    let mut visitor = visit(&proxy).await;
    let answer = timeout(Duration::from_secs(30), visitor.complete(&json!({}))).await;
    assert!(answer.expect("it hangs").is_err());
    proxy.struck(1).await;
}

#[tokio::test]
async fn one_that_stops_reading_gives_no_byte_of_the_answer() {
    let proxy = Proxy::start(upstream().await, Plant::StopReading).await;
    hangs(&mut visit(&proxy).await).await;
    proxy.struck(1).await;
}
