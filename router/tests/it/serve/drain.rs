//! The binary: a stop lets what runs finish, and says so.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::fd::IntoRawFd as _;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::json;
use tandem_wire::proto::finished::Cause;

use super::PATIENCE;
use super::client::{Client, events, until_text};
use super::engine::{self, Mock, Step, tokenizer};
use super::stack::stack;

struct Process {
    child: Child,
    client: Client,
    addr: SocketAddr,
    lines: mpsc::Receiver<String>,
}

/// Starts the binary and waits until it serves.
async fn process(decode: &Mock, flags: &[&str]) -> Process {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tandem-router"))
        .args([
            "--listen=127.0.0.1:0",
            "--ops-listen=127.0.0.1:0",
            "--model-name=tiny",
            "--log-format=json",
        ])
        .arg(format!("--tokenizer={}", tokenizer().display()))
        .arg(format!("--decode={}", decode.endpoint()))
        .args(flags)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stderr = child.stderr.take().unwrap();
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        BufReader::new(stderr)
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| sender.send(line))
    });
    let mut process = Process {
        child,
        client: Client::new(SocketAddr::from(([127, 0, 0, 1], 1))),
        addr: SocketAddr::from(([127, 0, 0, 1], 1)),
        lines,
    };
    let line = process.line("serving");
    process.addr = line["addr"].as_str().unwrap().parse().unwrap();
    process.client = Client::new(process.addr);
    let ready = async {
        while process.client.get("/readyz").await.status != 200 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, ready).await.expect("never ready");
    process
}

impl Process {
    /// The next log line with this message.
    fn line(&self, message: &str) -> serde_json::Value {
        loop {
            let line = self
                .lines
                .recv_timeout(PATIENCE)
                .unwrap_or_else(|_| panic!("no line {message:?}"));
            let json: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("not JSON: {line}"));
            if json["message"] == message {
                return json;
            }
        }
    }

    fn signal(&self, name: &str) {
        assert!(
            Command::new("kill")
                .args([name, &self.child.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
    }

    fn exits(&mut self) -> i32 {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code().expect("killed by a signal");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("it never exited");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_cuts_off_what_runs() {
    let decode = engine::decode();
    let mut process = process(&decode, &[]).await;
    decode.then(vec![
        Step::Started,
        Step::Spell("Par"),
        Step::Hold,
        Step::Spell("is"),
        Step::Finish(Cause::Stop),
    ]);
    let response = process.client.streaming(json!({})).await;
    let mut rest = until_text(response, "Par").await;
    process.signal("-TERM");
    process.line("draining");
    // no new connection is taken
    assert!(tokio::net::TcpStream::connect(process.addr).await.is_err());
    decode.release();
    let mut text = Vec::new();
    while let Some(piece) = futures::StreamExt::next(&mut rest).await {
        text.extend_from_slice(&piece.unwrap());
    }
    assert!(String::from_utf8(text).unwrap().ends_with("data: [DONE]\n\n"));
    assert_eq!(process.exits(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_waits_for_a_connection_that_is_only_kept_alive() {
    let decode = engine::decode();
    let mut process = process(&decode, &[]).await;
    process.client.chat(json!({})).await.content();
    // one that has never been used beside it
    let mut fresh = tokio::net::TcpStream::connect(process.addr).await.unwrap();
    // for the first to be quiet
    tokio::time::sleep(Duration::from_millis(400)).await;
    process.signal("-TERM");
    // and not at the end of --drain-ms
    assert_eq!(process.exits(), 0);
    let closed = tokio::io::AsyncReadExt::read(&mut fresh, &mut [0]).await;
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_without_end_or_an_end_without_a_word() {
    let decode = engine::decode();
    let mut process = process(&decode, &["--drain-ms=200"]).await;
    decode.then(vec![Step::Started, Step::Spell("Par"), Step::Hold]);
    let response = process.client.streaming(json!({})).await;
    decode.called(1).await;
    process.signal("-TERM");
    let events = events(response).await;
    assert!(!events.done && events.text() == "Par");
    let error = events.error().expect("cut off without an error event");
    assert_eq!(
        (error["code"].as_str(), error["retry_after_seconds"].as_u64()),
        (Some("draining"), Some(1))
    );
    assert_eq!(process.exits(), 0);
    decode.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_request_is_logged_once_without_its_prompt() {
    let decode = engine::decode();
    let mut process = process(&decode, &[]).await;
    let secret = json!({"messages": [{"role": "user", "content": "my secret plan"}], "user": "me"});
    process.client.chat(secret).await.content();
    let line = process.line("request");
    assert_eq!(
        (line["endpoint"].as_str(), line["code"].as_str()),
        (Some("chat"), Some("ok"))
    );
    assert!(line["request_id"].is_string() && line["seconds"].is_number() && line["prompt_tokens"].is_number());
    process.signal("-INT");
    assert_eq!(process.exits(), 0);
    let rest: Vec<_> = process.lines.try_iter().collect();
    assert!(!line.to_string().contains("secret") && !rest.iter().any(|line| line.contains("secret")));
}

#[tokio::test]
async fn a_client_is_turned_away_between_two_routers_of_one_socket() {
    let decode = engine::decode();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let flag = || format!("--listen-fd={}", listener.try_clone().unwrap().into_raw_fd());
    let old = stack(&[], &[&decode], &[&flag()]).await;
    assert_eq!(old.router.addr(), listener.local_addr().unwrap());
    old.client.chat(json!({})).await.content();
    old.router.drain().await;
    let client = Client::new(listener.local_addr().unwrap());
    let begins = async { stack(&[], &[&decode], &[&flag()]).await };
    let (new, answer) = tokio::join!(begins, client.chat(json!({})));
    answer.content();
    assert_eq!(new.router.addr(), listener.local_addr().unwrap());
}

#[test]
fn a_flag_that_cannot_work_is_found_out_later() {
    let run = |flags: &[&str]| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tandem-router"))
            .args(["--listen=127.0.0.1:0", "--ops-listen=127.0.0.1:0", "--model-name=tiny"])
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let status = child.wait().unwrap();
        let mut text = String::new();
        child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(status.code(), Some(1), "{text}");
        text
    };
    let tokenizer = format!("--tokenizer={}", tokenizer().display());
    assert!(run(&[&tokenizer, "--decode=nowhere"]).contains("--decode \"nowhere\" is not HOST:PORT"));
    let text = run(&["--tokenizer=/does/not/exist.gguf", "--decode=127.0.0.1:9"]);
    assert!(
        text.contains("/does/not/exist.gguf") && text.contains("--tokenizer"),
        "{text}"
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = format!("--listen={}", taken.local_addr().unwrap());
    let text = run_listen(&tokenizer, &listen);
    assert!(text.contains("choose another --listen address"), "{text}");
    let text = run(&[&tokenizer, "--decode=127.0.0.1:9", "--listen-fd=999"]);
    assert!(text.contains("--listen-fd 999 is no listening socket"), "{text}");
}

fn run_listen(tokenizer: &str, listen: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_tandem-router"))
        .args([
            listen,
            "--ops-listen=127.0.0.1:0",
            "--model-name=tiny",
            tokenizer,
            "--decode=127.0.0.1:9",
        ])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8(output.stderr).unwrap()
}
