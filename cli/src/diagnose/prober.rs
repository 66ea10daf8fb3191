//! Tiny completions, sent each way to measure: on fresh and on reused connections through the router, and directly to each engine.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::{join, join_all};
use http_body_util::Full;
use hyper::Request;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use serde::Deserialize;
use serde_json::{Value, json};
use tandem_secrets::Token;
use tandem_wire::phase;
use tandem_wire::proto::generate_event::Event;
use tandem_wire::proto::{self, GenerateRequest, GetInfoRequest, Peer};
use tandem_wire::reason::source_name;
use tandem_wire::{Failure, Source, TransferId, TransferKey};
use tokio::time::timeout;

use super::gather::{AdminPort, Origin, dial};
use super::record::{ANSWERED, Connection, Found, Kept, Outcome, Probe, Probes, Side, Way};
use crate::bench::sse::Events;
use crate::http::{ConnectionId, Http, HttpError, Road, Trust, said};

/// Of each answer: enough pieces for a proxy that cuts or holds them to be seen.
const TOKENS: u32 = 16;
/// Of each prompt that goes to an engine directly.
const PROMPT_TOKENS: u32 = 12;
/// Fresh connections to one place.
const FRESH: u32 = 2;
/// Pairs of engines that are tried.
const PAIRS: usize = 16;
/// An answer that is no stream is read up to this.
const MAX_BODY: usize = 1 << 20;

/// Probes through the router.
#[derive(Debug)]
pub struct Prober<'a> {
    pub deadline: Duration,
    pub rounds: u32,
    /// What marks them to the router.
    pub badge: Option<&'a str>,
    pub key: Option<&'a Token>,
    pub model: Option<&'a str>,
    pub admin: Option<&'a AdminPort>,
    pub origin: Origin,
}

impl Prober<'_> {
    /// On fresh connections, and beside that on one that is kept alive, until one does not pass.
    pub async fn through(&self, way: Way, url: &str, trust: &Trust, road: Road) -> Vec<Probe> {
        let at_ms = self.origin.ms();
        let http = match Http::over(url, trust.clone(), road) {
            Ok(http) => http,
            Err(reason) => {
                return vec![Probe {
                    way,
                    place: url.to_owned(),
                    at_ms,
                    connection: Kept::Fresh,
                    round: 1,
                    reused: None,
                    outcome: Outcome::NotMade { reason },
                }];
            }
        };
        let fresh = self.series(way, &http, Kept::Fresh, FRESH);
        let reused = self.series(way, &http, Kept::Reused, self.rounds);
        let (mut all, reused) = join(fresh, reused).await;
        all.extend(reused);
        let mut known = self.known().await.ended;
        for (id, probe) in &mut all {
            if let Outcome::Passed { spent_ms, .. } = &mut probe.outcome
                && let Some(ended) = known.iter_mut().find(|ended| ended.request_id == *id)
            {
                *spent_ms = std::mem::take(&mut ended.spent_ms);
            }
        }
        all.into_iter().map(|(_, probe)| probe).collect()
    }

    /// Each with its id.
    async fn series(&self, way: Way, http: &Http, connection: Kept, rounds: u32) -> Vec<(String, Probe)> {
        let kept = http.fresh();
        let mut before = None;
        let mut probes = Vec::new();
        for round in 1..=rounds {
            let at_ms = self.origin.ms();
            let one = match connection {
                Kept::Fresh => &http.fresh(),
                Kept::Reused => &kept,
            };
            let id = format!("probe-{:032x}", rand::random::<u128>());
            let (outcome, came_on) = self.one(one, &id).await;
            let passed = matches!(outcome, Outcome::Passed { .. });
            let reused = came_on.map(|now| Some(now) == before);
            before = came_on;
            let probe = Probe {
                way,
                place: http.url().to_owned(),
                at_ms,
                connection,
                // each fresh connection has one
                round: if connection == Kept::Fresh { 1 } else { round },
                reused,
                outcome,
            };
            probes.push((id, probe));
            if !passed {
                break;
            }
        }
        probes
    }

    /// What came of it, and our end of the connection that its answer came on.
    async fn one(&self, http: &Http, id: &str) -> (Outcome, Option<ConnectionId>) {
        let began = Instant::now();
        let mut came = Came::default();
        let mut asked = Box::pin(self.ask(http, id, began, &mut came));
        let ended = timeout(self.deadline, &mut asked).await;
        let total_ms = began.elapsed().as_millis() as u64;
        // while it is still there
        let state = match ended {
            Ok(_) => None,
            Err(_) => self.state(id).await,
        };
        drop(asked);
        let outcome = match ended {
            Ok(Ok(())) => Outcome::Passed {
                total_ms,
                first_token_ms: came.first_ms.unwrap_or(total_ms),
                spent_ms: BTreeMap::new(),
            },
            Ok(Err(End::Cut)) => Outcome::Cut {
                total_ms,
                received_bytes: came.bytes,
            },
            Ok(Err(End::NotMade(reason))) => Outcome::NotMade { reason },
            Ok(Err(End::Failed(failed))) => Outcome::Failed {
                total_ms,
                status: failed.status,
                code: failed.code,
                source: failed.source,
                reason: failed.reason,
            },
            Err(_) => Outcome::Hung {
                waited_ms: total_ms,
                received_bytes: came.bytes,
                state,
            },
        };
        (outcome, came.on)
    }

    /// Where the router has it now; [`ANSWERED`] where it has written the whole answer.
    async fn state(&self, id: &str) -> Option<String> {
        let Probes { running, ended } = self.known().await;
        if let Some(found) = running.into_iter().find(|request| request.request_id == id) {
            return Some(found.state);
        }
        let answered = ended.iter().any(|probe| probe.request_id == id && probe.code == "ok");
        answered.then(|| ANSWERED.to_owned())
    }

    /// What the router knows of our probes; one that knows no marks has them among the requests of its clients.
    async fn known(&self) -> Probes {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct View {
            probes: Probes,
            connections: Vec<Connection>,
        }
        let Some(admin) = self.admin else {
            return Probes::default();
        };
        let Found::Read(View {
            mut probes,
            connections,
        }) = admin.get("/admin/connections").await.found
        else {
            return Probes::default();
        };
        let others = connections.into_iter().flat_map(|connection| connection.requests);
        probes.running.extend(others);
        probes
    }

    async fn ask(&self, http: &Http, id: &str, began: Instant, came: &mut Came) -> Result<(), End> {
        let model = match self.model {
            Some(model) => model.to_owned(),
            None => self.first_model(http).await?,
        };
        // no prefix cache has it
        let prompt = format!("{:08x}: 1, 2, 3, 4, 5,", rand::random::<u32>());
        let body = json!({
            "model": model,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
        });
        let request = Request::post("/")
            .header(CONTENT_TYPE, "application/json")
            .header("x-request-id", id);
        let request = self.sign(request).body(Full::from(body.to_string()));
        let request = request.map_err(|error| End::NotMade(error.to_string()))?;
        let mut answer = http.send("/v1/completions", request).await?;
        came.on = answer.connection;
        if !answer.status.is_success() {
            let (status, code) = (answer.status.as_u16(), answer.error_code.take());
            let body = answer.whole(MAX_BODY).await.unwrap_or_default();
            if status == 401 || status == 403 {
                return Err(End::NotMade(format!("{status}: {}", said(&body))));
            }
            return Err(End::Failed(Failed {
                status: Some(status),
                code,
                source: field(&body, "source"),
                reason: said(&body),
            }));
        }
        let mut events = Events::default();
        let mut failed = None;
        let mut done = false;
        while let Some(chunk) = answer.chunk().await.map_err(|_| End::Cut)? {
            came.bytes += chunk.len() as u64;
            let pushed = events.push(&chunk, |data| match data {
                "[DONE]" => done = true,
                data => match serde_json::from_str::<Value>(data) {
                    Ok(event) if event.get("error").is_some() => failed = Some(data.to_owned()),
                    Ok(_) => {
                        came.first_ms.get_or_insert_with(|| began.elapsed().as_millis() as u64);
                    }
                    Err(_) => {}
                },
            });
            if let Err(error) = pushed {
                failed = Some(error.to_string());
            }
        }
        match failed {
            Some(data) => Err(End::Failed(Failed {
                status: Some(answer.status.as_u16()),
                code: field(data.as_bytes(), "code"),
                source: field(data.as_bytes(), "source"),
                reason: said(data.as_bytes()),
            })),
            None if done => Ok(()),
            None => Err(End::Cut),
        }
    }

    fn sign(&self, request: hyper::http::request::Builder) -> hyper::http::request::Builder {
        let request = match self.key {
            Some(key) => request.header(AUTHORIZATION, key.authorization()),
            None => request,
        };
        match self.badge {
            Some(badge) => request.header("x-tandem-probe", badge),
            None => request,
        }
    }

    async fn first_model(&self, http: &Http) -> Result<String, End> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<Model>,
        }
        #[derive(Deserialize)]
        struct Model {
            id: String,
        }
        let request = self.sign(Request::get("/")).body(Full::<Bytes>::default());
        let request = request.map_err(|error| End::NotMade(error.to_string()))?;
        let body = http
            .send("/v1/models", request)
            .await?
            .whole(MAX_BODY)
            .await
            .map_err(|_| End::Cut)?;
        let models: Option<Models> = serde_json::from_slice(&body).ok();
        let first = models.and_then(|models| models.data.into_iter().next());
        let first = first.ok_or_else(|| End::NotMade(format!("/v1/models lists no model: {}", said(&body))))?;
        Ok(first.id)
    }
}

/// What came before the end.
#[derive(Debug, Default)]
struct Came {
    on: Option<ConnectionId>,
    bytes: u64,
    first_ms: Option<u64>,
}

/// Why a probe did not pass.
enum End {
    NotMade(String),
    Cut,
    Failed(Failed),
}

struct Failed {
    status: Option<u16>,
    code: Option<String>,
    source: Option<String>,
    reason: String,
}

impl From<HttpError> for End {
    fn from(error: HttpError) -> Self {
        match error {
            // what was asked there was no router
            HttpError::Tls(_) | HttpError::TooLarge(_) => Self::NotMade(error.to_string()),
            // the head of an answer did not come
            HttpError::Broken(_) => Self::Cut,
            HttpError::Connect(_) => Self::Failed(Failed {
                status: None,
                code: None,
                source: None,
                reason: error.to_string(),
            }),
        }
    }
}

/// A field of an error in OpenAI's form.
fn field(body: &[u8], name: &str) -> Option<String> {
    let body: Value = serde_json::from_slice(body).ok()?;
    body.get("error")?.get(name)?.as_str().map(str::to_owned)
}

/// Probes past the router.
#[derive(Debug, Clone, Copy)]
pub struct Direct<'a> {
    pub deadline: Duration,
    pub origin: Origin,
    pub road: &'a Road,
}

impl Direct<'_> {
    /// Each decode by itself, and each with each prefill.
    pub async fn all(self, engines: &[(Side, String)]) -> Vec<Probe> {
        let of = |wanted: Side| {
            engines
                .iter()
                .filter(move |(side, _)| *side == wanted)
                .map(|(_, endpoint)| endpoint.as_str())
        };
        let alone = of(Side::Decode).map(|decode| self.one(decode, None));
        let pairs =
            of(Side::Decode).flat_map(|decode| of(Side::Prefill).map(move |prefill| self.one(decode, Some(prefill))));
        let (alone, pairs) = join(join_all(alone), join_all(pairs.take(PAIRS))).await;
        alone.into_iter().chain(pairs).collect()
    }

    async fn one(self, decode: &str, prefill: Option<&str>) -> Probe {
        let (began, at_ms) = (Instant::now(), self.origin.ms());
        let mut state = None;
        let ended = timeout(self.deadline, generate(self.road, decode, prefill, began, &mut state)).await;
        let total_ms = began.elapsed().as_millis() as u64;
        Probe {
            way: if prefill.is_some() { Way::Pair } else { Way::Decode },
            place: match prefill {
                Some(prefill) => format!("{decode} with {prefill}"),
                None => decode.to_owned(),
            },
            at_ms,
            connection: Kept::Fresh,
            round: 1,
            reused: None,
            outcome: match ended {
                Ok(Ok((first_token_ms, spent_ms))) => Outcome::Passed {
                    total_ms,
                    first_token_ms,
                    spent_ms,
                },
                Ok(Err(failure)) => Outcome::Failed {
                    total_ms,
                    status: None,
                    code: Some(failure.meaning().code.to_owned()),
                    source: Some(source_name(failure.source).to_owned()),
                    reason: failure.detail,
                },
                Err(_) => Outcome::Hung {
                    waited_ms: total_ms,
                    received_bytes: 0,
                    state: state.map(str::to_owned),
                },
            },
        }
    }
}

/// One completion; `state` says where it is, in the words of the router's states.
async fn generate(
    road: &Road,
    decode: &str,
    prefill: Option<&str>,
    began: Instant,
    state: &mut Option<&'static str>,
) -> Result<(u64, BTreeMap<String, f64>), Failure> {
    let lost = |detail: String| Failure::new(tandem_wire::Reason::PeerLost, Source::Unspecified, detail);
    let broke = |status: tonic::Status| Failure::from_status(&status, Source::Unspecified);
    let mut client = dial(road, decode).await.map_err(lost)?;
    let info = client.get_info(GetInfoRequest {}).await.map_err(broke)?.into_inner();
    let prefill = match prefill {
        None => None,
        Some(endpoint) => {
            let mut client = dial(road, endpoint).await.map_err(|why| {
                let mut failure = lost(format!("prefill {endpoint}: {why}"));
                failure.source = Source::Prefill;
                failure
            })?;
            let info = client.get_info(GetInfoRequest {}).await;
            let info = info
                .map_err(|status| Failure::from_status(&status, Source::Prefill))?
                .into_inner();
            Some(Peer {
                endpoint: endpoint.to_owned(),
                boot_id: info.boot_id,
            })
        }
    };
    *state = Some("accept");
    let low = 100.min(info.vocab_size / 2);
    let key = TransferKey {
        id: TransferId::random(),
        attempt: 0,
    };
    let request = GenerateRequest {
        boot_id: info.boot_id,
        key: Some(key.to_wire()),
        request_id: format!("probe-{:032x}", rand::random::<u128>()),
        prompt_tokens: (0..PROMPT_TOKENS)
            .map(|_| rand::random_range(low..info.vocab_size.max(low + 1)))
            .collect(),
        max_new_tokens: TOKENS,
        ignore_eos: true,
        prefill,
        ..GenerateRequest::default()
    };
    let mut events = client.generate(request).await.map_err(broke)?.into_inner();
    let mut first = None;
    while let Some(event) = events.message().await.map_err(broke)? {
        match event.event {
            Some(Event::Phase(phase)) => {
                *state = Some(phase::name(phase.kind()));
            }
            Some(Event::Tokens(_)) => {
                *state = Some("decode");
                first.get_or_insert_with(|| began.elapsed().as_millis() as u64);
            }
            Some(Event::Failure(failure)) => return Err(Failure::from_wire(&failure)),
            Some(Event::Finished(finished)) => {
                let total = began.elapsed().as_millis() as u64;
                return Ok((first.unwrap_or(total), spent(&finished.usage.unwrap_or_default())));
            }
            Some(Event::Started(_)) | None => {}
        }
    }
    Err(lost("the stream ended without a last message".to_owned()))
}

fn spent(usage: &proto::Usage) -> BTreeMap<String, f64> {
    [
        ("prefill_queue", usage.queue_us),
        ("prefill", usage.prefill_us),
        ("transfer", usage.transfer_us),
        ("decode", usage.decode_us),
    ]
    .into_iter()
    .map(|(state, micros)| (state.to_owned(), micros as f64 / 1e3))
    .collect()
}
