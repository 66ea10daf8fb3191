//! Routers, on their admin port: what they do with new requests, their knobs, and a completion through them.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use reqwest::{Method, StatusCode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tandem_plan::{Clients, Evidence, Traffic};

use super::{PeerError, Target};

/// A router's answer has at most this many bytes.
const MAX_ANSWER: usize = 64 * 1024;
/// The router counts its queue from when it was told, the order from when it was made; they differ by so much at most.
const SKEW: SignedDuration = SignedDuration::from_secs(5);

/// What new requests meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// They go to engines.
    Admit,
    /// They wait in the router.
    Queue,
    /// They are refused.
    Reject,
}

/// An order to a router.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Order {
    /// What new requests meet.
    pub mode: Mode,
    /// How long a queue waits; they are refused afterwards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remaining_ms: Option<u64>,
}

impl Order {
    /// The order as it is told at this time.
    pub fn of(traffic: Traffic, now: Timestamp) -> Self {
        let (mode, remaining_ms) = match traffic {
            Traffic::Admit => (Mode::Admit, None),
            Traffic::Reject => (Mode::Reject, None),
            Traffic::Queue { until } => {
                let left = until.duration_since(now).as_millis().max(0);
                (Mode::Queue, Some(left as u64))
            }
        };
        Self { mode, remaining_ms }
    }
}

/// A router's acknowledgement.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Told {
    /// What new requests meet.
    pub mode: Mode,
    /// How long the queue still waits.
    #[serde(default)]
    pub remaining_ms: Option<u64>,
    /// Requests that are with engines.
    pub in_flight: u64,
    /// Requests that wait in the router.
    #[serde(default)]
    pub queued: u64,
}

impl Told {
    /// The order that was acknowledged at this time; the wanted one where it is that.
    pub fn order(&self, at: Timestamp, wanted: Option<Traffic>) -> Traffic {
        match self.mode {
            Mode::Admit => Traffic::Admit,
            Mode::Reject => Traffic::Reject,
            Mode::Queue => {
                let left = SignedDuration::from_millis(self.remaining_ms.unwrap_or(0).min(i64::MAX as u64) as i64);
                let until = at.saturating_add(left).unwrap_or(at);
                match wanted {
                    // An end that has passed is none: how long ago it passed does not matter.
                    Some(Traffic::Queue { until: wanted })
                        if until.max(at).duration_since(wanted.max(at)).abs() <= SKEW =>
                    {
                        Traffic::Queue { until: wanted }
                    }
                    _ => Traffic::Queue { until },
                }
            }
        }
    }
}

/// A router's knobs, by name.
pub type Knobs = serde_json::Map<String, Value>;

/// What a router has measured of its clients and engines. One that is older says less.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Seen {
    /// Why it knows no decode that could pull from a prefill.
    pub no_pair: Option<String>,
    /// How requests ended lately.
    pub lately: Lately,
    /// Clients that take nothing.
    pub blocked: Blocked,
}

/// How requests ended lately.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Lately {
    /// All of them.
    pub ended: u64,
    /// Their client left before the answer ended.
    pub client_gone: u64,
    /// Their client was cut off, because it took nothing.
    pub client_stalled: u64,
}

/// Clients that take nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Blocked {
    /// How many.
    pub count: u64,
}

/// The engines that a router has found.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Endpoints {
    endpoints: Vec<Endpoint>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Endpoint {
    /// HOST:PORT.
    endpoint: String,
    state: String,
}

impl Endpoints {
    /// Whether it may send requests to the engine of this address.
    pub fn knows(&self, ip: &str) -> bool {
        self.finds(|endpoint| {
            let host = endpoint.rsplit_once(':').map_or("", |(host, _)| host);
            host.trim_matches(['[', ']']) == ip
        })
    }

    /// The same of an engine among several of one address: HOST:PORT.
    pub fn knows_port(&self, endpoint: &str) -> bool {
        self.finds(|one| one == endpoint)
    }

    fn finds(&self, is_it: impl Fn(&str) -> bool) -> bool {
        let found = self.endpoints.iter().find(|one| is_it(&one.endpoint));
        found.is_some_and(|one| one.state != "down")
    }
}

impl Seen {
    /// As the planner takes it.
    pub fn evidence(&self) -> Evidence {
        Evidence {
            handoffs: None,
            clients: Some(Clients {
                ended: self.lately.ended,
                gone: self.lately.client_gone,
                stalled: self.lately.client_stalled,
                blocked: self.blocked.count,
            }),
            no_pair: self.no_pair.clone(),
        }
    }
}

/// What a router says of itself.
#[derive(Debug, Clone)]
pub struct Info {
    /// What it does with new requests.
    pub traffic: Told,
    /// In effect now.
    pub knobs: Knobs,
    /// What it has measured of its clients and engines.
    pub seen: Seen,
    /// The engines that it has found; none: it is older, and does not say.
    pub endpoints: Option<Endpoints>,
    /// When it said so.
    pub at: Timestamp,
}

/// Asks a router about itself.
pub async fn info(http: &reqwest::Client, target: &Target, token: &str) -> Result<Info, PeerError> {
    let at = Timestamp::now();
    let traffic = call(http, target, token, Method::GET, "traffic", None).await?;
    let knobs = call(http, target, token, Method::GET, "knobs", None).await?;
    // A router that is older, and has no such path, is served all the same.
    let seen = call(http, target, token, Method::GET, "evidence", None).await;
    let endpoints = call(http, target, token, Method::GET, "endpoints", None).await;
    Ok(Info {
        endpoints: endpoints.ok(),
        traffic,
        knobs,
        seen: seen.unwrap_or_default(),
        at,
    })
}

/// Tells a router what to do with new requests.
pub async fn set_traffic(
    http: &reqwest::Client,
    target: &Target,
    token: &str,
    order: &Order,
) -> Result<Told, PeerError> {
    call(http, target, token, Method::POST, "traffic", Some(json!(order))).await
}

/// Tells a router its knobs; all that are in effect then.
pub async fn set_knobs(
    http: &reqwest::Client,
    target: &Target,
    token: &str,
    knobs: &Knobs,
) -> Result<Knobs, PeerError> {
    call(http, target, token, Method::POST, "knobs", Some(json!(knobs))).await
}

/// What a completion through a router was found to be.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Probed {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
    /// Of the prompt, those that an engine had in its prefix cache.
    pub cached_tokens: u64,
    /// Of the prompt, those whose KV decode received.
    pub moved_tokens: u64,
    /// Bytes of that KV, as decode received them.
    pub moved_bytes: u64,
    /// Of the prompt, those that decode computed itself.
    pub computed_tokens: u64,
}

/// Runs a completion on a prompt that nobody has seen, past the order that holds others back.
pub async fn probe(http: &reqwest::Client, target: &Target, token: &str, limit: Duration) -> Result<Probed, PeerError> {
    let body = json!({"timeout_ms": limit.as_millis() as u64});
    let called = call(http, target, token, Method::POST, "probe", Some(body));
    // The router ends it by itself; its answer still has to come.
    match tokio::time::timeout(limit + super::DEADLINE, called).await {
        Ok(result) => result,
        Err(_) => Err(PeerError::Silent {
            pod: target.name.clone(),
            call: "probe",
        }),
    }
}

async fn call<T: DeserializeOwned>(
    http: &reqwest::Client,
    target: &Target,
    token: &str,
    method: Method,
    name: &'static str,
    body: Option<Value>,
) -> Result<T, PeerError> {
    let refused = |reason: String, token| PeerError::refused(target, name, reason, token);
    let url = format!("http://{}/admin/{name}", target.admin);
    let mut request = http.request(method, url).bearer_auth(token);
    if let Some(body) = body {
        request = request.json(&body);
    }
    let mut response = request.send().await.map_err(|error| refused(causes(&error), false))?;
    let status = response.status();
    let mut bytes = Vec::new();
    while let Some(more) = response.chunk().await.map_err(|error| refused(causes(&error), false))? {
        if bytes.len() + more.len() > MAX_ANSWER {
            return Err(refused(format!("its answer has more than {MAX_ANSWER} bytes"), false));
        }
        bytes.extend_from_slice(&more);
    }
    if !status.is_success() {
        let said = String::from_utf8_lossy(&bytes);
        let said: String = said.chars().take(300).collect();
        return Err(refused(format!("{status}: {said}"), status == StatusCode::UNAUTHORIZED));
    }
    serde_json::from_slice(&bytes).map_err(|error| refused(format!("its answer cannot be read: {error}"), false))
}

/// An error with all that it was caused by.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
