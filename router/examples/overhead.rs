//! What a request and a token cost in the router: CPU time and memory of the binary, in front of an engine that costs nothing.
//!
//! ```sh
//! cargo build --release -p tandem-router --bins --example overhead && target/release/examples/overhead
//! ```
//!
//! Prompts are token ids, so that neither template nor tokenizer is part of it. Wall-clock rates say little where load
//! generator, router and engine share the cores; CPU time of the router alone is the figure to compare.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a measuring program: it stops at the first surprise"
)]

#[expect(dead_code, reason = "the tests use more of it")]
#[path = "../tests/it/serve/engine.rs"]
mod engine;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use engine::{Mock, Shape, Step};
use futures::StreamExt;
use serde_json::{Value, json};
use tandem_wire::proto::{Role, finished};

const PATIENCE: Duration = Duration::from_secs(10);
/// Tokens of an answer.
const ANSWER: &str = "thirty-two tokens of plain ascii";
const PROMPT_TOKENS: usize = 256;

struct Router {
    child: Child,
    url: String,
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Router {
    fn start(engine: &Mock) -> Self {
        let binary = std::env::current_exe()
            .unwrap()
            .parent()
            .unwrap()
            .join("../tandem-router");
        let mut child = Command::new(binary)
            .args([
                "--listen=127.0.0.1:0",
                "--ops-listen=127.0.0.1:0",
                "--model-name=tiny",
                "--log-format=json",
            ])
            .arg(format!("--tokenizer={}", engine::tokenizer().display()))
            .arg(format!("--decode={}", engine.endpoint()))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut url = String::new();
        for line in lines.by_ref() {
            let line: Value = serde_json::from_str(&line.unwrap()).unwrap();
            if line["message"] == "serving" {
                url = format!("http://{}/v1/completions", line["addr"].as_str().unwrap());
            }
            if line["message"] == "engine is up" {
                break;
            }
        }
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, url }
    }

    /// CPU seconds used so far, of Linux's 100 ticks.
    fn cpu_seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let fields: Vec<_> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
    }

    fn rss_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1024.0
    }
}

/// So many clients for so long; prints what each answer cost.
async fn measure(name: &str, router: &Router, clients: usize, seconds: u64, stream: bool, expected: &str) {
    let http = reqwest::Client::builder()
        .no_proxy()
        .pool_max_idle_per_host(clients)
        .build()
        .unwrap();
    let prompt: Vec<u32> = engine::ids("x").repeat(PROMPT_TOKENS);
    let body = json!({"model": "tiny", "prompt": prompt, "stream": stream, "temperature": 0}).to_string();
    let one = async |http: &reqwest::Client| {
        let request = http
            .post(&router.url)
            .header("content-type", "application/json")
            .body(body.clone());
        let began = Instant::now();
        let text = request.send().await.unwrap().text().await.unwrap();
        assert!(text.contains(expected), "{text}");
        began.elapsed()
    };
    for _ in 0..50 {
        one(&http).await;
        if stream {
            break;
        }
    }
    let (before, until) = (router.cpu_seconds(), Instant::now() + Duration::from_secs(seconds));
    let mut latencies: Vec<Duration> = futures::stream::iter(0..clients)
        .map(|_| async {
            let mut times = Vec::new();
            while Instant::now() < until {
                times.push(one(&http).await);
            }
            times
        })
        .buffer_unordered(clients)
        .collect::<Vec<_>>()
        .await
        .concat();
    latencies.sort();
    let n = latencies.len();
    let micros = (router.cpu_seconds() - before) * 1e6 / n as f64;
    println!(
        "{name:28} {clients:4} clients {n:7} answers {micros:8.0} us CPU/answer {:7.1} us CPU/token p50 {:7.2} ms p99 {:7.2} ms rss {:5.0} MiB",
        micros / ANSWER.len() as f64,
        latencies[n / 2].as_secs_f64() * 1e3,
        latencies[n * 99 / 100].as_secs_f64() * 1e3,
        router.rss_mib(),
    );
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let seconds = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(3);
    let shape = |token_ms| Shape {
        role: Role::Unified,
        max_running: 1_024,
        remembers: false,
        token_ms,
        ..Shape::default()
    };
    let script = vec![
        Step::Started,
        Step::Spell(ANSWER),
        Step::Finish(finished::Cause::Length),
    ];
    for (name, token_ms, stream, all) in [
        ("JSON", 0, false, &[1, 32, 256][..]),
        ("stream, unpaced", 0, true, &[1, 32][..]),
        ("stream, a token each 20 ms", 20, true, &[64][..]),
    ] {
        let engine = Mock::start(shape(token_ms));
        engine.always(script.clone());
        let router = Router::start(&engine);
        println!("{name}: {:.0} MiB before the first request", router.rss_mib());
        for &clients in all {
            let expected = if stream { "[DONE]" } else { ANSWER };
            measure(name, &router, clients, seconds, stream, expected).await;
        }
    }
}
