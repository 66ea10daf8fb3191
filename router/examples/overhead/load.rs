//! Clients in a closed loop; every answer is looked at.

use std::time::{Duration, Instant};

use futures::StreamExt;
use reqwest::Client;
use serde_json::{Value, json};

use crate::router::Router;
use crate::{ANSWER, router};

/// Different prompts, taken in turn.
pub const PROMPTS: usize = 64;

pub struct Case {
    pub name: &'static str,
    pub clients: usize,
    pub stream: bool,
    pub paced: bool,
}

/// What the clients ask.
pub enum Prompts {
    /// Messages of a chat.
    Chats(Vec<String>),
    /// Token ids of a completion.
    Ids(Vec<Vec<u32>>),
}

impl Prompts {
    fn path(&self) -> &'static str {
        match self {
            Self::Chats(_) => "/v1/chat/completions",
            Self::Ids(_) => "/v1/completions",
        }
    }

    fn bodies(&self, stream: bool) -> Vec<String> {
        let body = |(key, prompt): (&str, Value)| {
            json!({"model": router::MODEL, key: prompt, "stream": stream, "temperature": 0, "max_tokens": ANSWER.len()})
                .to_string()
        };
        match self {
            Self::Chats(texts) => texts
                .iter()
                .map(|text| body(("messages", json!([{"role": "user", "content": text}]))))
                .collect(),
            Self::Ids(ids) => ids.iter().map(|ids| body(("prompt", json!(ids)))).collect(),
        }
    }
}

pub struct Measured {
    pub answers: usize,
    /// Of the router's process, an answer.
    pub cpu_us: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
}

/// As many clients as the case wants, for so long.
#[tokio::main(flavor = "current_thread")]
pub async fn measure(router: &Router, case: &Case, prompts: &Prompts, time: Duration) -> Measured {
    let http = Client::builder()
        .no_proxy()
        .pool_max_idle_per_host(case.clients)
        .timeout(Duration::from_mins(1))
        .build()
        .unwrap();
    let (url, bodies) = (router.url(prompts.path()), prompts.bodies(case.stream));
    let one = async |index: usize| {
        let began = Instant::now();
        let request = http
            .post(&url)
            .header("content-type", "application/json")
            .body(bodies[index % PROMPTS].clone());
        check(case.stream, &request.send().await.unwrap().text().await.unwrap());
        began.elapsed()
    };
    let all = async |until: Instant| {
        futures::stream::iter(0..case.clients)
            .map(|client| async move {
                let mut times = Vec::new();
                while Instant::now() < until {
                    times.push(one(client + times.len() * case.clients).await);
                }
                times
            })
            .buffer_unordered(case.clients)
            .collect::<Vec<_>>()
            .await
            .concat()
    };
    // connections are made and code is paged in
    all(Instant::now() + time / 5).await;
    let before = router.cpu_seconds();
    let mut latencies = all(Instant::now() + time).await;
    let cpu = router.cpu_seconds() - before;
    latencies.sort_unstable();
    let at = |share: usize| latencies[latencies.len() * share / 100].as_secs_f64() * 1e3;
    Measured {
        answers: latencies.len(),
        cpu_us: cpu * 1e6 / latencies.len() as f64,
        p50_ms: at(50),
        p99_ms: at(99),
    }
}

/// The whole answer came: as many pieces as there are tokens, or the usage that says so.
fn check(stream: bool, body: &str) {
    let tokens = ANSWER.len();
    let whole = if stream {
        body.matches("data: ").count() > tokens && body.trim_end().ends_with("data: [DONE]")
    } else {
        body.contains(&format!("\"completion_tokens\":{tokens}"))
    };
    assert!(whole, "not the answer that the engines give: {body}");
}
