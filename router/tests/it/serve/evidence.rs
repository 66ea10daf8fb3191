//! What `/admin/connections` and the metrics say of connections and requests, against what really goes on.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_wire::proto::{finished, phase};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::PATIENCE;
use super::client::{Client, question};
use super::engine::{self, Mock, Shape, Step};
use super::stack::{Stack, stack};

const TOKEN: &str = "token-0123456789abcdef";
const STATES: [&str; 14] = [
    "blocked",
    "reading",
    "idle",
    "client",
    "body",
    "text",
    "held",
    "queue",
    "accept",
    "prefill_queue",
    "prefill",
    "transfer",
    "decode",
    "answer",
];

struct Rig {
    stack: Stack,
    _token: tempfile::NamedTempFile,
}

impl Rig {
    async fn start(decode: &Mock) -> Self {
        let token = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(token.path(), TOKEN).unwrap();
        let file = format!("--admin-token-file={}", token.path().display());
        let stack = stack(&[], &[decode], &["--admin-listen=127.0.0.1:0", &file]).await;
        Self { stack, _token: token }
    }

    async fn look(&self) -> Value {
        let url = format!("http://{}/admin/connections", self.stack.router.admin_addr().unwrap());
        let request = reqwest::Client::new().get(url).bearer_auth(TOKEN);
        Client::read(request.send().await.unwrap()).await.json()
    }

    /// Waits until it looks as `wanted` says.
    async fn until(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            let view = self.look().await;
            if wanted(&view) {
                return view;
            }
            assert!(began.elapsed() < PATIENCE, "never {what}: {view:#}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits until one connection is in `state` and no other is anywhere; metrics and groups must say the same.
    async fn alone_in(&self, state: &str) -> Value {
        let view = self
            .until(state, |view| {
                view["open"] == 1 && view["connections"][0]["state"] == state
            })
            .await;
        for name in STATES {
            let expected = i64::from(name == state);
            assert_eq!(view["by_state"][name]["count"], expected, "{name}: {view:#}");
            let gauge = format!("tandem_router_connections{{state=\"{name}\"}}");
            assert_eq!(self.stack.sample(&gauge), expected, "{gauge}");
        }
        assert_eq!(view["by_state"].as_object().unwrap().len(), STATES.len(), "{view:#}");
        view
    }
}

/// For a connection to be quiet for longer than it keeps what only a request needs. Nothing depends on that it is.
const QUIET: Duration = Duration::from_millis(400);

/// Reads one whole answer, and no byte of the next.
async fn answered(socket: &mut TcpStream) {
    let mut answer = Vec::new();
    let whole = |answer: &[u8]| {
        let text = String::from_utf8_lossy(answer).into_owned();
        let (head, body) = text.split_once("\r\n\r\n")?;
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?;
        assert!(head.starts_with("HTTP/1.1 200"), "{text}");
        (body.len() == length.parse::<usize>().unwrap()).then_some(())
    };
    let read = async {
        while whole(&answer).is_none() {
            assert!(socket.read_buf(&mut answer).await.unwrap() > 0, "closed");
        }
    };
    tokio::time::timeout(PATIENCE, read).await.expect("no answer");
}

async fn connect(rig: &Rig) -> TcpStream {
    TcpStream::connect(rig.stack.router.addr()).await.unwrap()
}

fn head(body: &Value) -> String {
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-request-id: mine\r\ncontent-length: {}\r\n\r\n",
        body.to_string().len()
    )
}

#[tokio::test]
async fn a_request_is_shown_where_it_is_not() {
    let decode = engine::decode();
    let rig = Rig::start(&decode).await;
    decode.then(vec![
        Step::Hold,
        Step::Started,
        Step::Phase(phase::Kind::Queued),
        Step::Hold,
        Step::Phase(phase::Kind::Prefill),
        Step::Hold,
        Step::Phase(phase::Kind::Transfer),
        Step::Hold,
        Step::Phase(phase::Kind::Decode),
        Step::Hold,
        Step::Spell("Paris"),
        Step::Finish(finished::Cause::Stop),
    ]);
    let body = question(json!({}));
    let mut socket = connect(&rig).await;
    rig.alone_in("reading").await;
    socket.write_all(head(&body).as_bytes()).await.unwrap();
    let view = rig.alone_in("body").await;
    assert_eq!(view["connections"][0]["http"], "1.1");
    assert_eq!(view["connections"][0]["requests"][0]["request_id"], "mine");
    assert_eq!(
        (&view["in_flight"], &view["last_answer_written_ms"]),
        (&json!(1), &Value::Null)
    );
    socket.write_all(body.to_string().as_bytes()).await.unwrap();
    for state in ["accept", "prefill_queue", "prefill", "transfer", "decode"] {
        let view = rig.alone_in(state).await;
        assert_eq!(view["connections"][0]["requests"][0]["state"], state);
        decode.release();
    }
    let view = rig.alone_in("idle").await;
    let connection = &view["connections"][0];
    assert_eq!(
        (&view["in_flight"], &connection["requests_served"]),
        (&json!(0), &json!(1))
    );
    rig.until("written", |view| view["last_answer_written_ms"].is_u64())
        .await;

    let request = &view["slowest"][0];
    assert_eq!(
        (&request["request_id"], &request["code"]),
        (&json!("mine"), &json!("ok"))
    );
    assert_eq!(request["connection"], connection["id"]);
    let spent = request["spent_ms"].as_object().unwrap();
    for state in [
        "body",
        "text",
        "accept",
        "prefill_queue",
        "prefill",
        "transfer",
        "decode",
    ] {
        assert!(spent[state].as_f64().unwrap() > 0.0, "{state}: {request:#}");
    }
    let (sum, total): (f64, _) = (
        spent.values().filter_map(Value::as_f64).sum(),
        request["total_ms"].as_f64().unwrap(),
    );
    // each is cut to whole microseconds
    assert!((sum - total).abs() < 0.1, "{sum} of {total}: {request:#}");

    // the next on the same connection begins with half a head
    socket.write_all(b"POST /v1/chat/comp").await.unwrap();
    rig.alone_in("reading").await;
    drop(socket);
    rig.until("closed", |view| view["open"] == 0).await;
}

#[tokio::test]
async fn a_connection_that_was_quiet_serves_no_more_or_loses_what_had_come_of_a_request() {
    let decode = engine::decode();
    let rig = Rig::start(&decode).await;
    let mut socket = connect(&rig).await;
    let body = question(json!({}));
    let request = head(&body) + &body.to_string();
    let (begun, rest) = request.split_at(30);
    for served in 1..=3 {
        socket.write_all(request.as_bytes()).await.unwrap();
        answered(&mut socket).await;
        let view = rig.alone_in("idle").await;
        assert_eq!(view["connections"][0]["requests_served"], served);
        tokio::time::sleep(QUIET).await;
    }
    // the beginning of the next lies in the same packet, and is read with the one before
    let both = request.clone() + begun;
    socket.write_all(both.as_bytes()).await.unwrap();
    answered(&mut socket).await;
    rig.alone_in("reading").await;
    tokio::time::sleep(QUIET).await;
    socket.write_all(rest.as_bytes()).await.unwrap();
    answered(&mut socket).await;
    let view = rig.alone_in("idle").await;
    assert_eq!(view["connections"][0]["requests_served"], 5);
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_shown_as_a_slow_engine() {
    let decode = engine::decode();
    let rig = Rig::start(&decode).await;
    decode.then(vec![Step::Started, Step::Flood]);
    let body = question(json!({"stream": true}));
    let mut socket = connect(&rig).await;
    socket.write_all(head(&body).as_bytes()).await.unwrap();
    socket.write_all(body.to_string().as_bytes()).await.unwrap();
    let view = rig
        .until("blocked", |view| {
            view["connections"][0]["requests"][0]["state"] == "client"
        })
        .await;
    let connection = &view["connections"][0];
    assert_eq!(connection["state"], "blocked", "{view:#}");
    assert!(connection["unsent_bytes"].as_u64().unwrap() > 0, "{view:#}");
    assert_eq!(view["by_state"]["blocked"]["count"], 1, "{view:#}");

    // it takes some: the answer goes on until it is blocked again
    let taken = async {
        let mut buffer = vec![0; 1 << 20];
        loop {
            let _ = socket.read(&mut buffer).await.unwrap();
            if rig.look().await["connections"][0]["state"] != "blocked" {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, taken)
        .await
        .expect("it stays blocked while it reads");
    drop(socket);
    let view = rig.until("gone", |view| view["lately"]["client_gone"] == 1).await;
    assert!(view["lately"]["last_unfinished_ms"].is_u64(), "{view:#}");
    let request = &view["slowest"][0];
    assert_eq!(request["code"], "client_gone");
    assert!(request["spent_ms"]["client"].as_f64().unwrap() > 0.0, "{request:#}");
    rig.until("closed", |view| view["open"] == 0 && view["in_flight"] == 0)
        .await;
    rig.stack.at_rest(&[&decode]).await;
}

#[tokio::test]
async fn a_request_that_waits_for_room_is_blamed_on_an_engine() {
    let decode = Mock::start(Shape {
        max_running: 1,
        ..Shape::default()
    });
    let rig = Rig::start(&decode).await;
    decode.then(vec![
        Step::Started,
        Step::Phase(phase::Kind::Decode),
        Step::Hold,
        Step::Spell("Paris"),
        Step::Finish(finished::Cause::Stop),
    ]);
    let ask = || {
        let client = rig.stack.client.clone();
        tokio::spawn(async move { client.chat(json!({})).await.content() })
    };
    let first = ask();
    rig.until("decoding", |view| view["by_state"]["decode"]["count"] == 1)
        .await;
    let second = ask();
    let view = rig
        .until("queued", |view| view["by_state"]["queue"]["count"] == 1)
        .await;
    assert_eq!(view["by_state"]["decode"]["count"], 1, "{view:#}");
    decode.release();
    assert_eq!(
        (first.await.unwrap().as_str(), second.await.unwrap().as_str()),
        ("Paris", "Paris")
    );
    let view = rig.until("over", |view| view["in_flight"] == 0).await;
    let waited = |at: usize| view["slowest"][at]["spent_ms"]["queue"].as_f64().unwrap_or(0.0);
    assert!(waited(0).max(waited(1)) > 0.0, "{view:#}");
}

#[tokio::test]
async fn of_several_choices_the_fastest_is_shown() {
    let decode = engine::decode();
    let rig = Rig::start(&decode).await;
    let held = |kind| {
        vec![
            Step::Started,
            Step::Phase(kind),
            Step::Hold,
            Step::Spell("Paris"),
            Step::Finish(finished::Cause::Stop),
        ]
    };
    decode.then(held(phase::Kind::Decode)).then(held(phase::Kind::Prefill));
    let client = rig.stack.client.clone();
    let body = json!({"model": "tiny", "prompt": ["a", "b"]});
    let asked = tokio::spawn(async move { client.send("/v1/completions", &body).await.status });
    rig.until("prefill", |view| view["connections"][0]["state"] == "prefill")
        .await;
    decode.release();
    decode.release();
    assert_eq!(asked.await.unwrap(), 200);
}

#[tokio::test]
async fn a_probe_is_told_as_a_request_of_a_user_or_needs_a_key() {
    let decode = engine::decode();
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "key-0123456789abcdef\n").unwrap();
    let token = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(token.path(), TOKEN).unwrap();
    let flags = [
        "--admin-listen=127.0.0.1:0".to_owned(),
        format!("--admin-token-file={}", token.path().display()),
        format!("--api-key-file={}", keys.path().display()),
    ];
    let stack = stack(&[], &[&decode], &flags.each_ref().map(String::as_str)).await;
    let rig = Rig { stack, _token: token };
    let url = format!("http://{}/admin/badge", rig.stack.router.admin_addr().unwrap());
    let draw = |body: Value| {
        let request = reqwest::Client::new().post(&url).bearer_auth(TOKEN).json(&body);
        async move { Client::read(request.send().await.unwrap()).await }
    };
    for wrong in [json!({"seconds": 0}), json!({"seconds": 3601})] {
        assert_eq!(draw(wrong).await.code(), "invalid_field");
    }
    let drawn = draw(json!({"seconds": 60})).await.json();
    let badge = drawn["badge"].as_str().unwrap().to_owned();

    // what is told of engines is as it is; what is told of users must not move
    let users = || {
        let text = rig.stack.metrics.encode().unwrap();
        let ours = text.lines().filter(|line| {
            line.starts_with("tandem_router_")
                && !line.contains("upstream")
                && !line.contains("traffic")
                && !line.contains("at_engines")
        });
        ours.map(str::to_owned).collect::<Vec<_>>()
    };
    let before = users();
    decode.then(vec![
        Step::Started,
        Step::Phase(phase::Kind::Decode),
        Step::Spell("Par"),
        Step::Hold,
        Step::Spell("is"),
        Step::Finish(finished::Cause::Stop),
    ]);
    let ask = |badge: &str| {
        let http = reqwest::Client::new();
        let request = http
            .post(rig.stack.client.url("/v1/chat/completions"))
            .header("x-tandem-probe", badge);
        let request = request.header("x-request-id", "mine").json(&question(json!({})));
        async move { Client::read(request.send().await.unwrap()).await }
    };
    let probe = tokio::spawn(ask(&badge));
    let view = rig
        .until("probing", |view| view["probes"]["running"][0]["last_token_ms"].is_u64())
        .await;
    let running = &view["probes"]["running"][0];
    assert_eq!(
        (&running["request_id"], &running["state"]),
        (&json!("mine"), &json!("decode"))
    );
    assert_eq!((&view["in_flight"], &view["open"]), (&json!(0), &json!(0)), "{view:#}");
    assert_eq!(users(), before);
    decode.release();
    assert_eq!(probe.await.unwrap().content(), "Paris");
    let view = rig
        .until("probed", |view| view["probes"]["ended"][0]["code"] == "ok")
        .await;
    assert!(
        view["probes"]["ended"][0]["spent_ms"]["decode"].as_f64().unwrap() > 0.0,
        "{view:#}"
    );
    assert_eq!(
        (
            &view["lately"]["ended"],
            &view["last_answer_written_ms"],
            &view["slowest"]
        ),
        (&json!(0), &Value::Null, &json!([]))
    );
    rig.stack.disconnected().await;
    assert_eq!(users(), before);

    let refused = ask("0123456789abcdef0123456789abcdef").await;
    assert_eq!(refused.code(), "invalid_api_key");
    let view = rig
        .until("refused", |view| view["lately"]["failed"]["invalid_api_key"] == 1)
        .await;
    assert!(view["lately"]["last_failed_ms"].is_u64(), "{view:#}");
}
