//! The binary itself: flags, ports, signals, exit codes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use tandem_engine::serve::node::READER_STALL;
use tandem_wire::proto::admin_client::AdminClient;
use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::generate_event::Event;
use tandem_wire::proto::kv_transfer_client::KvTransferClient;
use tandem_wire::proto::{DecodeMessage, FlushRequest, GenerateEvent, GenerateRequest, GetInfoRequest};
use tandem_wire::{Failure, Reason, Source};
use tonic::transport::Channel;
use tonic::{Code, Streaming};

use crate::support::node::bearing;
use crate::support::sched::PATIENCE;
use crate::tiny::{Kind, Shape, llama};

struct Engine {
    child: Child,
    lines: mpsc::Receiver<String>,
    log: Vec<String>,
}

impl Engine {
    fn start(model: &Path, more: &[&str]) -> Self {
        Self::start_with_log("info", model, more)
    }

    fn start_with_log(filter: &str, model: &Path, more: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tandem-engine"))
            .args(["--log-format", "json", "--threads", "1", "--model"])
            .arg(model)
            .args(more)
            .env("RUST_LOG", filter)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (send, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            lines,
            log: Vec::new(),
        }
    }

    /// The first line that holds `part`.
    fn line(&mut self, part: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if line.contains(part) => return line,
                Ok(line) => self.log.push(line),
                Err(error) => panic!("{part:?} was not logged ({error}); logged was {:#?}", self.log),
            }
        }
    }

    fn serving(&mut self) -> (String, String) {
        self.ports("\"serving\"")
    }

    /// The ports that the line with `part` names: listen, ops.
    fn ports(&mut self, part: &str) -> (String, String) {
        let line: serde_json::Value = serde_json::from_str(&self.line(part)).unwrap();
        let field = |name: &str| line[name].as_str().unwrap().to_owned();
        (field("listen"), field("ops_listen"))
    }

    fn signal(&self, signal: i32) {
        // SAFETY: kill with the id of a child that we have not waited for yet.
        let sent = unsafe { libc::kill(self.child.id() as i32, signal) };
        assert_eq!(sent, 0);
    }

    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn rest(mut self) -> String {
        self.wait();
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.log.push(line);
        }
        self.log.join("\n")
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn get(addr: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(addr).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let status = text.split(' ').nth(1).unwrap().parse().unwrap();
    (status, text)
}

fn tiny(dir: &Path) -> std::path::PathBuf {
    llama(Shape::SMALL, Kind::Q8_0, Kind::F16, 3).write(dir)
}

const ANY: [&str; 6] = [
    "--listen",
    "127.0.0.1:0",
    "--ops-listen",
    "127.0.0.1:0",
    "--data-listen",
    "127.0.0.1:0",
];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let pages: &[&str] = if more.contains(&"--kv-pages") {
        &[]
    } else {
        &["--kv-pages", "64"]
    };
    [&ANY, pages, more].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_process_serves_drains_on_sigterm_and_exits_0() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::start(
        &tiny(dir.path()),
        &with(&["--role", "unified", "--served-name", "tiny"]),
    );
    let (listen, ops) = engine.serving();
    let mut client = EngineClient::connect(format!("http://{listen}")).await.unwrap();
    let info = client.get_info(GetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((&info.model_name[..], info.total_pages), ("tiny", 64));
    assert_eq!(get(&ops, "/readyz").0, 200);
    assert!(
        get(&ops, "/metrics")
            .1
            .contains("tandem_engine_pages{state=\"free\"} 64")
    );
    let request = GenerateRequest {
        boot_id: info.boot_id,
        prompt_tokens: vec![5; 20],
        max_new_tokens: 400,
        ignore_eos: true,
        ..GenerateRequest::default()
    };
    let mut stream = client.generate(request).await.unwrap().into_inner();
    stream.message().await.unwrap().unwrap();
    engine.signal(libc::SIGTERM);
    let (mut tokens, mut finished) = (0, false);
    while let Some(event) = stream.message().await.unwrap() {
        match event.event.unwrap() {
            Event::Tokens(t) => tokens += t.ids.len(),
            Event::Finished(_) => finished = true,
            _ => {}
        }
    }
    assert_eq!((tokens, finished), (400, true), "what was under way ends well");
    assert_eq!(engine.wait().code(), Some(0));
    assert!(engine.rest().contains("drained"));
}

/// A request that the engine has admitted; one that comes after a signal is refused.
async fn admitted(client: &mut EngineClient<Channel>, request: GenerateRequest) -> Streaming<GenerateEvent> {
    let mut stream = client.generate(request).await.unwrap().into_inner();
    let first = stream.message().await.unwrap().and_then(|message| message.event);
    assert!(matches!(first, Some(Event::Started(_))), "{first:?}");
    stream
}

#[test]
fn a_drain_that_takes_too_long_ends_and_so_does_one_that_is_told_twice() {
    let dir = tempfile::tempdir().unwrap();
    // a prompt whose steps are short each, and far more than the test waits together
    let shape = Shape {
        context: 70_000,
        ..Shape::SMALL
    };
    let model = llama(shape, Kind::Q8_0, Kind::F16, 3).write(dir.path());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let limited = ["--drain-ms", "1000", "--watchdog-ms", "900", "--stall-ms", "800"];
    for (more, signals, said) in [
        (&limited[..], 1, "the drain's time is over"),
        (&[][..], 2, "told to end at once"),
    ] {
        let role = ["--role", "unified", "--kv-pages", "4300"];
        let mut engine = Engine::start(&model, &with(&[&role, more].concat()));
        let (listen, _) = engine.serving();
        let stream = runtime.block_on(async {
            let endpoint = Channel::from_shared(format!("http://{listen}")).unwrap();
            // nobody reads the answer either
            let channel = endpoint.initial_stream_window_size(100).connect().await.unwrap();
            let mut client = EngineClient::new(channel);
            let request = GenerateRequest {
                boot_id: client.get_info(GetInfoRequest {}).await.unwrap().into_inner().boot_id,
                prompt_tokens: vec![5; 65_000],
                max_new_tokens: 400,
                ignore_eos: true,
                ..GenerateRequest::default()
            };
            admitted(&mut client, request).await
        });
        let began = Instant::now();
        for _ in 1..signals {
            engine.signal(libc::SIGTERM);
            engine.line("\"signal\"");
        }
        engine.signal(libc::SIGTERM);
        engine.line(said);
        assert_eq!(engine.wait().code(), Some(0));
        assert!(began.elapsed() < READER_STALL / 2, "{:?}", began.elapsed());
        let log = engine.rest();
        assert!(!log.contains("\"drained\""), "{log}");
        drop(stream);
    }
}

#[test]
fn a_step_that_hangs_ends_the_process_with_1_also_while_it_drains() {
    let dir = tempfile::tempdir().unwrap();
    // one layer of this step takes far longer than the test waits
    let shape = Shape {
        context: 70_000,
        ..Shape::SMALL
    };
    let model = llama(shape, Kind::Q8_0, Kind::F16, 3).write(dir.path());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    for drains in [false, true] {
        let mut engine = Engine::start(
            &model,
            &with(&[
                "--role",
                "unified",
                "--kv-pages",
                "4300",
                "--chunked-prefill-tokens",
                "65536",
                "--step-tokens",
                "65536",
                "--watchdog-ms",
                "1000",
                "--stall-ms",
                "500",
            ]),
        );
        let (listen, _) = engine.serving();
        let stream = runtime.block_on(async {
            let mut client = EngineClient::connect(format!("http://{listen}")).await.unwrap();
            let request = GenerateRequest {
                boot_id: client.get_info(GetInfoRequest {}).await.unwrap().into_inner().boot_id,
                prompt_tokens: vec![5; 65_000],
                max_new_tokens: 4,
                ignore_eos: true,
                ..GenerateRequest::default()
            };
            admitted(&mut client, request).await
        });
        if drains {
            engine.signal(libc::SIGTERM);
        }
        let began = Instant::now();
        assert_eq!(engine.wait().code(), Some(1));
        assert!(began.elapsed() < PATIENCE / 2, "{:?}", began.elapsed());
        let log = engine.rest();
        assert!(log.contains("watchdog_ms"), "{log}");
        drop(stream);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_call_while_the_model_loads_is_refused_without_a_word_and_a_signal_waits_for_it() {
    let dir = tempfile::tempdir().unwrap();
    // a pipe that nobody writes to: the load cannot end by itself
    let pipe = dir.path().join("model.gguf");
    let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: a valid path, NUL-terminated.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let mut engine = Engine::start(&pipe, &with(&["--role", "decode"]));
    let (listen, ops) = engine.ports("\"loading the model\"");
    assert_eq!(get(&ops, "/livez").0, 200);
    let (status, body) = get(&ops, "/readyz");
    assert_eq!(status, 503);
    assert!(body.contains("\"loading\":0"), "{body}");
    let mut client = EngineClient::connect(format!("http://{listen}")).await.unwrap();
    let refused = client.get_info(GetInfoRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    let refused = Failure::from_status(&refused, Source::Router);
    assert_eq!((refused.reason, refused.source), (Reason::Loading, Source::Decode));
    assert!(refused.detail.contains(" s, 0 % of it is there"), "{refused}");
    let mut peer = KvTransferClient::connect(format!("http://{listen}")).await.unwrap();
    let refused = peer
        .prefill(futures::stream::empty::<DecodeMessage>())
        .await
        .unwrap_err();
    assert_eq!(Failure::from_status(&refused, Source::Router).reason, Reason::Loading);
    engine.signal(libc::SIGTERM);
    assert_eq!(engine.wait().code(), Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_admin_ports_token_rotates_without_a_restart_and_never_stands_in_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    let (old, new, wrong) = ("old-0123456789abcdef", "new-0123456789abcdef", "bad-0123456789abcdef");
    std::fs::write(&file, format!("{old}\n")).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    let flags = [
        "--role",
        "unified",
        "--admin-listen",
        "127.0.0.1:0",
        "--admin-token-file",
    ];
    let mut engine = Engine::start_with_log(
        "debug",
        &tiny(dir.path()),
        &with(&[&flags[..], &[file.to_str().unwrap()]].concat()),
    );
    let serving: serde_json::Value = serde_json::from_str(&engine.line("\"serving\"")).unwrap();
    let addr = |field: &str| format!("http://{}", serving[field].as_str().unwrap());
    let mut client = EngineClient::connect(addr("listen")).await.unwrap();
    let mut admin = AdminClient::connect(addr("admin_listen")).await.unwrap();
    let boot_id = client.get_info(GetInfoRequest {}).await.unwrap().into_inner().boot_id;
    let mut flush = async |token: &str| {
        let boot_id = boot_id.clone();
        admin.flush(bearing(token, FlushRequest { boot_id })).await
    };
    flush(old).await.unwrap();
    assert_eq!(flush(wrong).await.unwrap_err().code(), Code::Unauthenticated);
    std::fs::write(&file, "short").unwrap();
    engine.line("has 5 characters");
    flush(old).await.unwrap();
    std::fs::write(&file, new).unwrap();
    engine.line("the new content holds from now on");
    flush(new).await.unwrap();
    assert_eq!(flush(old).await.unwrap_err().code(), Code::Unauthenticated);
    drop((client, admin));
    engine.signal(libc::SIGTERM);
    let log = engine.rest();
    assert!(log.contains("has mode 644"), "{log}");
    for secret in [old, new, wrong] {
        assert!(!log.contains(&secret[4..]) && !log.contains(&secret[..8]), "{log}");
    }
}

fn strings(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

#[test]
fn what_cannot_start_says_why_and_exits_1() {
    let dir = tempfile::tempdir().unwrap();
    let (short, none) = (dir.path().join("short"), dir.path().join("none"));
    std::fs::write(&short, "fifteen-letters").unwrap();
    let admin = |file: &Path| {
        let file = format!("--admin-token-file={}", file.display());
        [
            vec![
                "--role".to_owned(),
                "decode".into(),
                "--admin-listen=127.0.0.1:0".into(),
                file,
            ],
            ANY.map(str::to_owned).to_vec(),
        ]
        .concat()
    };
    let (short, none) = (admin(&short), admin(&none));
    let model = tiny(dir.path());
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().to_string();
    let cut = dir.path().join("cut.gguf");
    std::fs::write(&cut, &std::fs::read(&model).unwrap()[..2_000]).unwrap();
    let missing = dir.path().join("missing.gguf");
    for (model, args, named) in [
        (&model, strings(&short), "has 15 characters; give it at least 16"),
        (&model, strings(&none), "none: it cannot be read"),
        (&missing, with(&["--role", "decode"]), "missing.gguf"),
        (&cut, with(&["--role", "decode"]), "cut off"),
        (
            &model,
            vec!["--role", "decode", "--ops-listen", "127.0.0.1:0", "--listen", &port],
            "--listen",
        ),
        (
            &model,
            vec!["--role", "decode", "--listen", "127.0.0.1:0", "--ops-listen", &port],
            "--ops-listen",
        ),
        (
            &model,
            vec![
                "--role",
                "prefill",
                "--listen",
                "127.0.0.1:0",
                "--ops-listen",
                "127.0.0.1:0",
                "--data-listen",
                &port,
            ],
            "--data-listen",
        ),
    ] {
        let mut engine = Engine::start(model, &args);
        assert_eq!(engine.wait().code(), Some(1), "{named}");
        let text = engine.rest();
        let last = text.lines().last().unwrap();
        assert!(
            last.starts_with("tandem-engine: ") && last.contains(named),
            "{last:?} should name {named}"
        );
    }
}

#[test]
fn a_cache_smaller_than_the_models_length_is_said_before_it_serves() {
    let dir = tempfile::tempdir().unwrap();
    let shape = Shape {
        context: 2048,
        ..Shape::SMALL
    };
    let model = llama(shape, Kind::Q8_0, Kind::F16, 3).write(dir.path());
    // 64 pages of 16 tokens
    let mut engine = Engine::start(&model, &with(&["--role", "unified"]));
    let serving: serde_json::Value = serde_json::from_str(&engine.line("\"serving\"")).unwrap();
    assert_eq!(serving["max_length_tokens"], 1024);
    let said = engine.log.iter().find(|line| line.contains("WARN")).expect("a warning");
    for part in [
        "--kv-pages 64 holds 1024 tokens",
        "the model takes 2048",
        "--max-length-tokens",
    ] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
}

#[test]
fn a_wrong_command_line_exits_2_and_names_the_flag() {
    for (args, named) in [
        (&["--role", "decode"][..], "--model"),
        (&["--model", "x"][..], "--role"),
        (
            &["--model", "x", "--role", "decode", "--max-running", "0"][..],
            "--max-running",
        ),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_tandem-engine"))
            .args(args)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains(named));
    }
}
