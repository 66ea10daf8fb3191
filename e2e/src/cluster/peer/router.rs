//! The router: the orders of its admin port, and completions of its own.

use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::http::HeaderValue;
use hyper::{Method, Request};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value, json};
use tandem_wire::TransferId;
use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::generate_event::Event;
use tandem_wire::proto::{EngineInfo, GenerateRequest, GetInfoRequest, Peer, Sampling, TransferKey, Usage};
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

use super::flags::Flags;
use super::ports::{self, Answer};
use super::{Endpoints, Live, Obeys, Script};

const CONTROL: u16 = 7101;
/// Of the prompt of a probe.
const PROBE_TOKENS: usize = 32;
/// To an engine on the same machine.
const DIAL: Duration = Duration::from_secs(2);
/// The knobs, by flag and by name in an order.
const KNOBS: [(&str, &str); 4] = [
    ("policy", "policy"),
    ("on-prefill-failure", "on_prefill_failure"),
    ("queue-ms", "queue_ms"),
    ("request-ms", "request_ms"),
];

struct Router {
    token: String,
    /// The Services that its engines are found by.
    prefill: String,
    decode: String,
    endpoints: Endpoints,
    state: Mutex<State>,
    script: Live,
}

struct State {
    mode: String,
    until: Option<Timestamp>,
    knobs: Map<String, Value>,
}

/// Starts one with the arguments of its container.
pub async fn start(
    flags: &Flags<'_>,
    token: String,
    script: Live,
    endpoints: Endpoints,
) -> Result<JoinSet<()>, String> {
    let (http, ops, admin) = (
        flags.listen("listen")?,
        flags.listen("ops-listen")?,
        flags.listen("admin-listen")?,
    );
    let router = Arc::new(Router {
        token,
        prefill: service(flags, "prefill")?,
        decode: service(flags, "decode")?,
        endpoints,
        state: Mutex::new(State {
            mode: flags.text("traffic").unwrap_or("admit").to_owned(),
            until: flags.value("traffic-until").ok(),
            knobs: knobs(flags)?,
        }),
        script,
    });
    let mut all = JoinSet::new();
    let of = Arc::clone(&router);
    all.spawn(ports::http(ports::bind(ops).await?, move |request| {
        let answer = of.ops(request.uri().path());
        async { answer }
    }));
    all.spawn(ports::http(ports::bind(admin).await?, move |request| {
        let router = Arc::clone(&router);
        async move { router.admin(request).await }
    }));
    all.spawn(ports::http(ports::bind(http).await?, |_| async {
        refused(501, "it serves no clients")
    }));
    Ok(all)
}

fn service(flags: &Flags<'_>, side: &str) -> Result<String, String> {
    let given = flags.text(&format!("discover-{side}"));
    let given = given.or_else(|| Some(flags.text(side)?.split_once(':')?.0));
    given.map(str::to_owned).ok_or_else(|| format!("no --discover-{side}"))
}

fn knobs(flags: &Flags<'_>) -> Result<Map<String, Value>, String> {
    let mut knobs = Map::new();
    for (flag, name) in KNOBS {
        let value: Value = if flag.ends_with("-ms") {
            flags.value::<u64>(flag)?.into()
        } else {
            flags.value::<String>(flag)?.into()
        };
        knobs.insert(name.to_owned(), value);
    }
    Ok(knobs)
}

fn evidence(script: Script) -> Value {
    let (ended, gone) = script.clients;
    json!({
        "no_pair": script.no_pair.then_some("the script says so"),
        "lately": {"ended": ended, "client_gone": gone, "client_stalled": 0},
        "blocked": {"count": 0, "longest_ms": 0},
    })
}

fn refused(status: u16, message: &str) -> Answer {
    Answer::Json(status, json!({"error": {"message": message, "type": "scripted"}}))
}

impl Router {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ops(&self, path: &str) -> Answer {
        match path {
            "/livez" => Answer::Text(200, "ok".into()),
            "/readyz" if (self.script)().ready => Answer::Text(200, "ok".into()),
            "/readyz" => Answer::Text(503, "the script says no".into()),
            "/metrics" => Answer::Text(200, "# EOF\n".into()),
            _ => Answer::Text(404, String::new()),
        }
    }

    async fn admin(&self, request: Request<Incoming>) -> Answer {
        let presented = request.headers().get("authorization").map(HeaderValue::as_bytes);
        if presented != Some(format!("Bearer {}", self.token).as_bytes()) {
            return refused(401, "the token is not the one of --admin-token-file");
        }
        let script = (self.script)();
        tokio::time::sleep(script.delay).await;
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        match (method, path.as_str()) {
            (Method::GET, "/admin/endpoints") => Answer::Json(200, self.engines()),
            (Method::GET, "/admin/evidence") => Answer::Json(200, evidence(script)),
            (Method::GET, "/admin/traffic") => Answer::Json(200, self.traffic(script)),
            (Method::GET, "/admin/knobs") => Answer::Json(200, self.state().knobs.clone().into()),
            (Method::POST, "/admin/traffic") => match obey(script.traffic, request).await {
                Ok(order) => self.direct(order.as_ref(), script),
                Err(answer) => answer,
            },
            (Method::POST, "/admin/knobs") => match obey(script.knobs, request).await {
                Ok(order) => self.turn(order.as_ref()),
                Err(answer) => answer,
            },
            (Method::POST, "/admin/probe") => self.probe(request).await,
            _ => refused(404, "no such path"),
        }
    }

    /// Engines that it may choose from.
    fn engines(&self) -> Value {
        let blind = (self.script)().finds_none;
        let of = |side: &str, service: &str| -> Vec<Value> {
            let all = (self.endpoints)(service);
            all.iter()
                .filter(|_| !blind)
                .map(|address| {
                    json!({"side": side, "endpoint": format!("{address}:{CONTROL}"), "state": "up", "in_flight": 0})
                })
                .collect()
        };
        let mut all = of("prefill", &self.prefill);
        all.extend(of("decode", &self.decode));
        json!({"endpoints": all})
    }

    /// The acknowledgement of an order: what is in effect.
    fn traffic(&self, script: Script) -> Value {
        let state = self.state();
        let left = state.until.map(|until| {
            let left = until.as_millisecond() - Timestamp::now().as_millisecond();
            left.max(0)
        });
        json!({"mode": state.mode, "remaining_ms": left, "in_flight": script.in_flight, "queued": 0})
    }

    fn direct(&self, order: Option<&Value>, script: Script) -> Answer {
        if let Some(order) = order {
            let Some(mode @ ("admit" | "queue" | "reject")) = order["mode"].as_str() else {
                return refused(400, "mode is admit, queue or reject");
            };
            let until = match (mode, order["remaining_ms"].as_i64()) {
                ("queue", None) => return refused(400, "queue wants remaining_ms"),
                ("queue", Some(left)) => {
                    let end = Timestamp::now().as_millisecond().saturating_add(left);
                    Timestamp::from_millisecond(end).ok()
                }
                _ => None,
            };
            let mut state = self.state();
            mode.clone_into(&mut state.mode);
            state.until = until;
        }
        Answer::Json(200, self.traffic(script))
    }

    fn turn(&self, order: Option<&Value>) -> Answer {
        let mut state = self.state();
        for (name, value) in order.and_then(Value::as_object).into_iter().flatten() {
            match state.knobs.get_mut(name) {
                Some(knob) => *knob = value.clone(),
                None => return refused(400, &format!("{name} is no knob")),
            }
        }
        Answer::Json(200, state.knobs.clone().into())
    }

    /// A completion of its own through the first decode and prefill, and what was counted of it.
    async fn probe(&self, request: Request<Incoming>) -> Answer {
        let limit = match body(request).await {
            Ok(order) => Duration::from_millis(order["timeout_ms"].as_u64().unwrap_or(0)),
            Err(answer) => return answer,
        };
        match tokio::time::timeout(limit, self.complete()).await {
            Ok(Ok(usage)) => Answer::Json(
                200,
                json!({
                    "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
                    "cached_tokens": usage.cached_tokens, "moved_tokens": usage.moved_tokens,
                    "moved_bytes": usage.moved_bytes, "computed_tokens": usage.computed_tokens,
                }),
            ),
            Ok(Err(why)) => refused(502, &why),
            Err(_) => refused(504, &format!("no end within {limit:?}")),
        }
    }

    async fn complete(&self) -> Result<Usage, String> {
        let first = |service: &str| (self.endpoints)(service).first().copied();
        let decode = first(&self.decode).ok_or("no decode engine")?;
        let prefill = first(&self.prefill).ok_or("no prefill engine")?;
        let (mut decode, info) = engine(decode).await?;
        let (_, peer) = engine(prefill).await?;
        let request = GenerateRequest {
            boot_id: info.boot_id,
            key: Some(TransferKey {
                transfer_id: TransferId::random().to_wire(),
                attempt: 1,
            }),
            prompt_tokens: crate::salted_tokens(rand::random(), PROBE_TOKENS, info.vocab_size),
            sampling: Some(Sampling::default()),
            // A request that ends with its first token needs no KV.
            max_new_tokens: 2,
            prefill: Some(Peer {
                endpoint: format!("{prefill}:{CONTROL}"),
                boot_id: peer.boot_id,
            }),
            ..GenerateRequest::default()
        };
        generate(&mut decode, request).await
    }
}

async fn body(request: Request<Incoming>) -> Result<Value, Answer> {
    let body = request.into_body().collect().await;
    let body = body.map_err(|error| refused(400, &error.to_string()))?;
    serde_json::from_slice(&body.to_bytes()).map_err(|error| refused(400, &error.to_string()))
}

/// What an order says; none where it is to be ignored.
async fn obey(how: Obeys, request: Request<Incoming>) -> Result<Option<Value>, Answer> {
    match how {
        Obeys::Refuses => Err(refused(500, "the script refuses")),
        Obeys::Hangs => std::future::pending().await,
        Obeys::Ignores => Ok(None),
        Obeys::Yes => body(request).await.map(Some),
    }
}

async fn engine(address: Ipv4Addr) -> Result<(EngineClient<Channel>, EngineInfo), String> {
    let endpoint = Endpoint::from_shared(format!("http://{address}:{CONTROL}")).map_err(|error| error.to_string())?;
    let channel = endpoint.connect_timeout(DIAL).connect().await;
    let mut client = EngineClient::new(channel.map_err(|error| format!("{address}: {error}"))?);
    let info = client.get_info(GetInfoRequest {}).await;
    Ok((client, info.map_err(|status| status.to_string())?.into_inner()))
}

async fn generate(decode: &mut EngineClient<Channel>, request: GenerateRequest) -> Result<Usage, String> {
    let answer = decode.generate(request).await.map_err(|status| status.to_string())?;
    let mut events = answer.into_inner();
    while let Some(event) = events.message().await.map_err(|status| status.to_string())? {
        match event.event {
            Some(Event::Finished(finished)) => return Ok(finished.usage.unwrap_or_default()),
            Some(Event::Failure(failure)) => return Err(failure.detail),
            _ => {}
        }
    }
    Err("the answer was cut".into())
}
