//! What connections cost that nobody uses.

use std::net::SocketAddr;
use std::time::Duration;

use tandem_e2e::eventually;
use tandem_e2e::stack::{Engine, Router};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const CONNECTIONS: usize = 2_000;
/// Used before the first look, so that what is only once is there.
const BEFORE: usize = 100;
/// 4 were measured.
const MOST_KIB: f64 = 16.0;
/// Of each body: larger than the buffers that a connection begins with.
const BODY_BYTES: usize = 16 << 10;
/// For the last of them to be quiet.
const SETTLE: Duration = Duration::from_mins(1);

/// A connection that has had one answer and is kept alive.
async fn idle(addr: SocketAddr) -> TcpStream {
    let mut socket = TcpStream::connect(addr).await.expect("connect");
    let body = format!("{{\"prompt\":\"{}\"}}", "word ".repeat(BODY_BYTES / 5));
    let request = format!(
        "POST /tokenize HTTP/1.1\r\nhost: {addr}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(request.as_bytes()).await.expect("a request");
    let mut answer = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&answer);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.and_then(|length| length.parse().ok()).expect("a length");
            if body.len() == length {
                assert!(head.starts_with("HTTP/1.1 200"), "{head}");
                return socket;
            }
        }
        let read = socket.read_buf(&mut answer).await.expect("an answer");
        assert!(read > 0, "the router closed an idle connection");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_costs_the_router_some_kib_and_no_more() {
    let engine = Engine::start("unified", &["--kv-pages=64"]).await;
    let router = Router::start(&[], &[&engine], &[]).await;
    let addr = router.url().trim_start_matches("http://").parse().expect("an address");
    let mut open = Vec::new();
    for _ in 0..BEFORE {
        open.push(idle(addr).await);
    }
    let before = router.process.rss_mib();
    for _ in 0..CONNECTIONS {
        open.push(idle(addr).await);
    }
    let each = eventually("idle connections are small", SETTLE, async || {
        let after = router.process.rss_mib();
        let each = (after - before) * 1024.0 / CONNECTIONS as f64;
        let said =
            format!("{CONNECTIONS} idle connections: {before:.1} MiB before, {after:.1} with them, {each:.1} KiB each");
        if each < MOST_KIB { Ok(said) } else { Err(said) }
    })
    .await;
    println!("{each}");
    assert!(router.process.fds() > CONNECTIONS, "they are not kept alive");
}
