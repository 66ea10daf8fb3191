//! Clients that go on asking, and how each request ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::json;
use tokio::task::JoinSet;

use super::LIMIT;
use super::serving::MODEL;
use crate::{eventually, probe, salted_text};

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// With a whole answer.
    Answered,
    /// Refused before anything of the answer, with a status by which a client may try again.
    Refused(u16),
    /// A stream that had begun ended with an error event, and without `[DONE]`.
    Failed,
    /// In no way that a client could make sense of.
    Broken(String),
}

/// One request of a load.
#[derive(Debug, Clone)]
pub struct Request {
    /// Whether its answer was to come in pieces.
    pub streamed: bool,
    /// When it was sent.
    pub at: Instant,
    /// How it ended.
    pub end: End,
    /// From the call to its end.
    pub took: Duration,
}

/// Clients that ask one request after the other until they are stopped.
#[derive(Debug)]
pub struct Load {
    stop: Arc<AtomicBool>,
    begun: Arc<AtomicU64>,
    clients: JoinSet<Vec<Request>>,
}

impl Load {
    /// So many clients of a router; every other asks for streams.
    pub fn start(url: &str, clients: u64, max_tokens: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let begun = Arc::new(AtomicU64::new(0));
        let mut set = JoinSet::new();
        for client in 0..clients {
            let (url, stop, begun) = (url.to_owned(), Arc::clone(&stop), Arc::clone(&begun));
            set.spawn(async move {
                let mut requests = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let salt = begun.fetch_add(1, Ordering::Relaxed);
                    requests.push(ask(&url, salt, client % 2 == 0, max_tokens).await);
                    if !matches!(requests.last(), Some(Request { end: End::Answered, .. })) {
                        // as a client does that may try again
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                }
                requests
            });
        }
        Self {
            stop,
            begun,
            clients: set,
        }
    }

    fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    /// Waits until so many more have begun.
    pub async fn goes_on(&self, more: u64) {
        let from = self.begun();
        eventually("requests go on", LIMIT, async || {
            let begun = self.begun();
            if begun >= from + more {
                Ok(())
            } else {
                Err(format!("{begun} of {}", from + more))
            }
        })
        .await;
    }

    /// Lets what is under way end; tells of all.
    pub async fn stop(self) -> Vec<Request> {
        self.stop.store(true, Ordering::Relaxed);
        self.clients.join_all().await.concat()
    }
}

/// One request for a chat that nobody has seen.
pub async fn ask(url: &str, salt: u64, streamed: bool, max_tokens: u32) -> Request {
    let begin = Instant::now();
    let body = json!({
        "model": MODEL, "max_tokens": max_tokens, "stream": streamed, "temperature": 0,
        "messages": [{"role": "user", "content": salted_text(salt, 40)}],
    });
    let end = end(url, &body, streamed).await.unwrap_or_else(End::Broken);
    Request {
        streamed,
        at: begin,
        end,
        took: begin.elapsed(),
    }
}

async fn end(url: &str, body: &serde_json::Value, streamed: bool) -> Result<End, String> {
    let sent = probe::http()
        .post(format!("{url}/v1/chat/completions"))
        .json(body)
        .send()
        .await;
    let response = sent.map_err(|error| format!("no answer: {error:?}"))?;
    let status = response.status().as_u16();
    if [429, 502, 503, 504].contains(&status) {
        return Ok(End::Refused(status));
    }
    let mut text = Vec::new();
    let mut pieces = response.bytes_stream();
    while let Some(piece) = pieces.next().await {
        text.extend_from_slice(&piece.map_err(|error| format!("the answer broke off: {error:?}"))?);
    }
    let text = String::from_utf8(text).map_err(|error| error.to_string())?;
    let done = text.ends_with("data: [DONE]\n\n");
    let failed = text.contains(probe::ERROR_EVENT);
    let whole = status == 200 && text.contains("\"finish_reason\":\"");
    match (streamed, whole, done, failed) {
        (true, true, true, false) | (false, true, false, false) => Ok(End::Answered),
        (true, _, false, true) => Ok(End::Failed),
        _ => Err(format!("{status}: {text}")),
    }
}
