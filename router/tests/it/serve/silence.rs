//! Peers that are there but say nothing: a stopped engine, a client behind HTTP/2 that stops reading.

use std::net::SocketAddr;
use std::sync::Arc;

use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use serde_json::json;
use tandem_telemetry::State;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::PATIENCE;
use super::client::{events, question};
use super::engine::{self, Mock, Shape, Step};
use super::stack::{Stack, cold, stack};

/// Stands between router and engine, and can stop to pass bytes on without closing anything, as SIGSTOP does.
struct Relay {
    addr: SocketAddr,
    frozen: watch::Sender<bool>,
    /// One for each connection, in the order in which they came: dropped, it closes that connection.
    open: Arc<Mutex<Vec<DropGuard>>>,
    _task: tokio_util::task::AbortOnDropHandle<()>,
}

impl Relay {
    async fn before(mock: &Mock) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (addr, target) = (listener.local_addr().unwrap(), mock.addr);
        let frozen = watch::Sender::new(false);
        let state = frozen.clone();
        let open: Arc<Mutex<Vec<DropGuard>>> = Arc::default();
        let guards = Arc::clone(&open);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (near, _) = listener.accept().await.unwrap();
                let state = state.subscribe();
                let cut = CancellationToken::new();
                guards.lock().push(cut.clone().drop_guard());
                connections.spawn(cut.run_until_cancelled_owned(async move {
                    let far = TcpStream::connect(target).await.unwrap();
                    let (near_read, near_write) = near.into_split();
                    let (far_read, far_write) = far.into_split();
                    tokio::join!(
                        pass(near_read, far_write, state.clone()),
                        pass(far_read, near_write, state)
                    );
                }));
            }
        });
        Self {
            addr,
            frozen,
            open,
            _task: tokio_util::task::AbortOnDropHandle::new(task),
        }
    }
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut frozen: watch::Receiver<bool>,
) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut buffer = vec![0; 16 << 10];
    while let Ok(read) = from.read(&mut buffer).await {
        if frozen.wait_for(|frozen| !frozen).await.is_err() || read == 0 || to.write_all(&buffer[..read]).await.is_err()
        {
            return;
        }
    }
}

const KEEP: [&str; 2] = ["--keepalive-interval-ms=100", "--keepalive-timeout-ms=300"];

async fn behind(relay: &Relay) -> Stack {
    let endpoint = format!("--decode={}", relay.addr);
    let stack = cold(&[], &[], &[&endpoint, KEEP[0], KEEP[1]]).await;
    stack.becomes(|state| *state == State::Ready).await;
    stack
}

#[tokio::test]
async fn an_engine_that_stands_still_holds_its_requests_for_ever() {
    let decode = engine::decode();
    let relay = Relay::before(&decode).await;
    let stack = behind(&relay).await;
    decode.then(vec![Step::Started, Step::Spell("Par"), Step::Hold]);
    let response = stack.client.streaming(json!({})).await;
    decode.called(1).await;
    relay.frozen.send_replace(true);
    // the default would take longer
    let events = tokio::time::timeout(PATIENCE, events(response))
        .await
        .expect("it hangs");
    assert_eq!(events.error().unwrap()["code"], "peer_lost");
    assert!(!events.done);
    // and it serves again once it goes on, with the engine the same process as before
    relay.frozen.send_replace(false);
    stack.becomes(|state| *state == State::Ready).await;
    assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
    stack.at_rest(&[&decode]).await;
}

/// Each thread has a connection to each engine, and only one of them carries the engine's loads.
#[tokio::test]
async fn the_connection_of_one_thread_ends_and_its_requests_fail_from_then_on() {
    let decode = engine::decode();
    let relay = Relay::before(&decode).await;
    let endpoint = format!("--decode={}", relay.addr);
    let stack = cold(&[], &[], &[&endpoint, "--threads=3"]).await;
    stack.becomes(|state| *state == State::Ready).await;
    let opened = async |connections| {
        let wait = async {
            while relay.open.lock().len() < connections {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(PATIENCE, wait).await
    };
    opened(3).await.expect("a connection from each thread");
    for at in 0..3 {
        drop(relay.open.lock().swap_remove(at));
        let again = opened(2 + 3).await;
        assert!(again.is_ok(), "connection {at} ended, and nobody noticed");
        // those of before are given up together
        relay.open.lock().drain(..2);
    }
    stack.becomes(|state| *state == State::Ready).await;
    assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
}

#[tokio::test]
async fn an_idle_connection_to_an_engine_that_stands_still_is_not_noticed() {
    let decode = engine::decode();
    let relay = Relay::before(&decode).await;
    let stack = behind(&relay).await;
    relay.frozen.send_replace(true);
    stack.becomes(|state| matches!(state, State::Degraded { .. })).await;
    relay.frozen.send_replace(false);
    stack.becomes(|state| *state == State::Ready).await;
}

#[tokio::test]
async fn an_engine_that_reports_its_load_no_more_is_believed_for_ever() {
    let decode = Mock::start(Shape {
        mute: true,
        ..Shape::default()
    });
    let stack = stack(&[], &[&decode], &[]).await;
    let asked_again = async {
        while decode.infos() < 2 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, asked_again)
        .await
        .expect("it was not asked again");
    stack.becomes(|state| *state == State::Ready).await;
    assert_eq!(stack.client.chat(json!({})).await.content(), "Paris");
}

/// An HTTP/2 client without encryption.
async fn http2(stack: &Stack) -> http2::SendRequest<Full<bytes::Bytes>> {
    let socket = TcpStream::connect(stack.router.addr()).await.unwrap();
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(socket))
        .await
        .unwrap();
    tokio::spawn(connection);
    sender
}

fn chat(stack: &Stack, extra: serde_json::Value) -> http::Request<Full<bytes::Bytes>> {
    http::Request::post(stack.client.url("/v1/chat/completions"))
        .header("content-type", "application/json")
        .body(Full::from(question(extra).to_string()))
        .unwrap()
}

#[tokio::test]
async fn http2_is_not_served() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let mut client = http2(&stack).await;
    for streamed in [false, true] {
        let response = client
            .send_request(chat(&stack, json!({"stream": streamed})))
            .await
            .unwrap();
        assert_eq!(
            (response.status(), response.version()),
            (http::StatusCode::OK, http::Version::HTTP_2)
        );
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8(body.to_vec()).unwrap();
        assert!(
            if streamed {
                text.ends_with("data: [DONE]\n\n")
            } else {
                text.contains("Paris")
            },
            "{text}"
        );
    }
    // one stream is cancelled, the connection stays
    decode.then(vec![Step::Started, Step::Hold]);
    let response = client
        .send_request(chat(&stack, json!({"stream": true})))
        .await
        .unwrap();
    drop(response);
    assert!(decode.idle().await < super::CANCELLED_WITHIN);
    client.ready().await.unwrap();
    stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn an_http2_stream_that_is_not_read_holds_its_engine_or_its_neighbours() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--client-stall-ms=300"]).await;
    let mut client = http2(&stack).await;
    decode.then(vec![Step::Started, Step::Flood]);
    // the head is taken, the body is not: its window fills up
    let stuck = client
        .send_request(chat(&stack, json!({"stream": true})))
        .await
        .unwrap();
    let response = client.send_request(chat(&stack, json!({}))).await.unwrap();
    assert!(String::from_utf8_lossy(&response.into_body().collect().await.unwrap().to_bytes()).contains("Paris"));
    decode.idle().await;
    stack.reaches("tandem_router_client_stalled_total", 1).await;
    stack.at_rest(&[&decode]).await;
    drop(stuck);
}
