//! A router's process between engines of its kind.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_wire::proto::{Role, finished};

use crate::engine::{Mock, Shape, Step};
use crate::http_engine::{Dialect, HttpEngine};
use crate::{ANSWER, TOKEN_MS};

/// The model's name in every request.
pub const MODEL: &str = "tiny";
/// As often as an engine of ours reports its load.
const LOAD_MS: u64 = 100;
/// A router that starts is given this long.
const START: Duration = Duration::from_mins(1);

#[derive(Clone, Copy)]
pub enum Peer {
    VllmRouter,
    Smg,
}

impl Peer {
    pub fn name(self) -> &'static str {
        match self {
            Self::VllmRouter => "vllm-router",
            Self::Smg => "SMG",
        }
    }

    fn dialect(self) -> Dialect {
        match self {
            Self::VllmRouter => Dialect::Vllm,
            Self::Smg => Dialect::Sglang,
        }
    }
}

pub struct Router {
    child: Child,
    base: String,
    _engines: Engines,
}

/// They live as long as the router that asks them.
#[expect(dead_code, reason = "held for their sockets")]
enum Engines {
    Ours([Mock; 2]),
    Http([HttpEngine; 2]),
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Router {
    /// Our router before a prefill and a decode.
    pub fn ours(program: &Path, tokenizer: &Path, paced: bool) -> Self {
        let engines = [Role::Prefill, Role::Decode].map(|role| {
            let engine = Mock::start(Shape {
                role,
                max_running: 1_024,
                max_length_tokens: 4_096,
                remembers: false,
                load_ms: LOAD_MS,
                token_ms: if paced { TOKEN_MS } else { 0 },
                ..Shape::default()
            });
            engine.always(vec![
                Step::Started,
                Step::Spell(ANSWER),
                Step::Finish(finished::Cause::Length),
            ]);
            engine
        });
        let mut child = Command::new(program)
            .args(["--listen=127.0.0.1:0", "--ops-listen=127.0.0.1:0", "--log-format=json"])
            .arg(format!("--model-name={MODEL}"))
            .arg(format!("--tokenizer={}", tokenizer.display()))
            .arg(format!("--prefill={}", engines[0].endpoint()))
            .arg(format!("--decode={}", engines[1].endpoint()))
            // a line for each request is what the others, too, are told not to write
            .env("RUST_LOG", "info,tandem_router::http=warn")
            .stderr(Stdio::piped())
            .spawn()
            .expect("our router; build it first");
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (mut base, mut up) = (String::new(), 0);
        while up < engines.len() || base.is_empty() {
            let line = lines
                .next()
                .expect("our router ended before its engines were up")
                .unwrap();
            let line: Value = serde_json::from_str(&line).unwrap();
            if line["message"] == "serving" {
                base = format!("http://{}", line["addr"].as_str().unwrap());
            }
            up += usize::from(line["message"] == "engine is up");
        }
        std::thread::spawn(move || lines.for_each(drop));
        Self {
            child,
            base,
            _engines: Engines::Ours(engines),
        }
    }

    /// Another router before two workers.
    pub fn peer(peer: Peer, program: &Path, paced: bool) -> Self {
        let pace = if paced { TOKEN_MS } else { 0 };
        let engines = [(); 2].map(|()| HttpEngine::start(peer.dialect(), pace));
        let (port, metrics) = (free_port(), free_port());
        let mut command = Command::new(program);
        match peer {
            Peer::VllmRouter => command.args(["--log-level", "warning"]),
            Peer::Smg => command.args(["launch", "--log-level", "warn", "--disable-tokenizer-autoload"]),
        };
        command
            .args(["--host", "127.0.0.1", "--port", &port.to_string()])
            .args([
                "--prometheus-host",
                "127.0.0.1",
                "--prometheus-port",
                &metrics.to_string(),
            ])
            .args(["--policy", "round_robin"])
            .args([
                "--worker-startup-check-interval",
                "1",
                "--worker-startup-timeout-secs",
                "30",
            ])
            .arg("--worker-urls")
            .args(engines.iter().map(|engine| format!("http://{}", engine.addr)));
        let child = command
            .env("HF_HUB_OFFLINE", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        let mut router = Self {
            child,
            base: format!("http://127.0.0.1:{port}"),
            _engines: Engines::Http(engines),
        };
        router.wait_until_it_answers(peer.name());
        router
    }

    #[tokio::main(flavor = "current_thread")]
    async fn wait_until_it_answers(&mut self, name: &str) {
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        let question = json!({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]});
        let began = Instant::now();
        loop {
            let answer = http.post(self.url("/v1/chat/completions")).json(&question);
            if answer.send().await.is_ok_and(|answer| answer.status().is_success()) {
                return;
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("{name} ended before it answered: {status}");
            }
            assert!(began.elapsed() < START, "{name} does not answer after {START:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// CPU seconds used so far, of Linux's 100 ticks.
    pub fn cpu_seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<_> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
    }

    pub fn rss_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1024.0
    }
}

/// Free a moment ago; the programs of others take no port of 0.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
