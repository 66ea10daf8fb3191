//! Makes the record: looks at the router and at each engine, lets probes run, and looks again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::future::{join, join_all};
use http_body_util::Full;
use hyper::Request;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::http::request::Builder;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tandem_wire::phase;
use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::{self, GetInfoRequest, WatchLoadRequest};
use tandem_wire::{BootId, Failure, Reason, Source};
use tokio::sync::watch;
use tokio::time::timeout;
use tonic::transport::Channel;

use super::prober::{Direct, Prober};
use super::record::{
    Clients, Engine, Found, Heard, HeardEngine, Inflight, Info, Limits, Load, Probe, Reading, Record, Side, VERSION,
    Way,
};
use super::target::{Admin, Target};
use crate::console::with_causes;
use crate::http::{ConnectError, Connector, Http, Road, Trust};
use crate::up::knobs_json;

/// Each reading: whoever is asked answers from memory.
const READ: Duration = Duration::from_secs(5);
/// Between the two looks, at least.
const APART: Duration = Duration::from_secs(1);
/// Between two reports of an engine's load that are kept.
const LOAD_INTERVAL_MS: u32 = 250;
/// Reports that are kept of one engine.
const LOADS: usize = 1024;
const MAX_ANSWER: usize = 4 << 20;
/// Longer than all probes take, one after the other.
const BADGE_TIME: &str = r#"{"seconds": 3600}"#;

/// How to look.
#[derive(Debug)]
pub struct Options {
    pub limits: Limits,
    pub via: Option<String>,
    pub trust: Trust,
    /// Probes on one connection; 0: no probe at all.
    pub rounds: u32,
}

/// When the record began.
#[derive(Debug, Clone, Copy)]
pub struct Origin(Instant);

impl Origin {
    pub fn now() -> Self {
        Self(Instant::now())
    }

    pub fn ms(self) -> u64 {
        self.0.elapsed().as_millis() as u64
    }
}

/// Observes everything that can be observed of `target`.
pub async fn record(target: &Target, options: &Options) -> Record {
    let origin = Origin::now();
    let taken = jiff::Timestamp::now().to_string();
    let admin = target
        .admin
        .as_ref()
        .map(|admin| AdminPort::new(admin, origin, &target.road));
    let first = look(admin.as_ref()).await;
    let engines = match &first {
        Some((_, heard)) if target.engines.is_empty() => named(heard),
        _ => target.engines.clone(),
    };
    let (stop, stopped) = watch::channel(false);
    let main = async {
        let began = Instant::now();
        let probes = probes(target, &engines, options, admin.as_ref(), origin).await;
        tokio::time::sleep(APART.saturating_sub(began.elapsed())).await;
        let last = look(admin.as_ref()).await;
        let _ = stop.send(true);
        (probes, last)
    };
    let engines = join_all(
        engines
            .iter()
            .map(|(side, endpoint)| engine(&target.road, *side, endpoint, origin, stopped.clone())),
    );
    let ((probes, last), engines) = join(main, engines).await;
    let (clients, heard) = [first, last].into_iter().flatten().unzip();
    Record {
        version: VERSION,
        tandem: env!("CARGO_PKG_VERSION").to_owned(),
        taken,
        limits: options.limits,
        via: options.via.clone(),
        clients,
        heard,
        engines,
        missing: target.missing.clone(),
        probes,
    }
}

/// The engines that the router names.
fn named(heard: &Reading<Heard>) -> Vec<(Side, String)> {
    let engines = heard.read().map(|heard| heard.engines.as_slice()).unwrap_or_default();
    let side = |name: &str| {
        [Side::Prefill, Side::Decode]
            .into_iter()
            .find(|side| side.name() == name)
    };
    engines
        .iter()
        .filter_map(|engine| Some((side(&engine.side)?, engine.endpoint.clone())))
        .collect()
}

async fn probes(
    target: &Target,
    engines: &[(Side, String)],
    options: &Options,
    admin: Option<&AdminPort>,
    origin: Origin,
) -> Vec<Probe> {
    if options.rounds == 0 {
        return Vec::new();
    }
    let deadline = Duration::from_millis(options.limits.probe_ms);
    let badge = match admin {
        Some(admin) => admin.badge().await,
        None => None,
    };
    let prober = Prober {
        deadline,
        rounds: options.rounds,
        badge: badge.as_deref(),
        key: target.key.as_ref(),
        model: target.model.as_deref(),
        admin,
        origin,
    };
    // What a client sees, it sees from here.
    let through = [
        (Way::Via, options.via.as_deref(), Road::Tcp),
        (Way::Router, target.router.as_deref(), target.road.clone()),
    ];
    let through = through
        .into_iter()
        .filter_map(|(way, url, road)| Some(prober.through(way, url?, &options.trust, road)));
    let direct = Direct {
        deadline,
        origin,
        road: &target.road,
    };
    let direct = direct.all(engines);
    let (through, direct) = join(join_all(through), direct).await;
    through.into_iter().flatten().chain(direct).collect()
}

/// The router's admin port.
#[derive(Debug)]
pub struct AdminPort {
    http: Result<Http, String>,
    place: String,
    authorization: String,
    origin: Origin,
}

impl AdminPort {
    pub fn new(admin: &Admin, origin: Origin, road: &Road) -> Self {
        let url = format!("http://{}", admin.place);
        Self {
            // it is plain HTTP: nobody has to be trusted
            http: Trust::new(None).and_then(|trust| Http::over(&url, trust, road.clone())),
            place: url,
            authorization: admin.token.authorization(),
            origin,
        }
    }

    /// What is there now.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Reading<T> {
        let at_ms = self.origin.ms();
        let found = match timeout(READ, self.ask(Request::get("/"), path, String::new())).await {
            Ok(Ok(found)) => Found::Read(found),
            Ok(Err(why)) => Found::Failed(why),
            Err(_) => Found::Failed(format!("no answer within {} s", READ.as_secs())),
        };
        Reading {
            place: format!("{}{path}", self.place),
            at_ms,
            found,
        }
    }

    /// What marks probes; none: this router knows no such thing, and will count them as requests of a user.
    async fn badge(&self) -> Option<String> {
        #[derive(Deserialize)]
        struct Drawn {
            badge: String,
        }
        let order = Request::post("/").header(CONTENT_TYPE, "application/json");
        let order = self.ask(order, "/admin/badge", BADGE_TIME.to_owned());
        let drawn: Drawn = timeout(READ, order).await.ok()?.ok()?;
        Some(drawn.badge)
    }

    async fn ask<T: DeserializeOwned>(&self, request: Builder, path: &str, body: String) -> Result<T, String> {
        let request = request.header(AUTHORIZATION, &self.authorization);
        let request = request.body(Full::from(body)).map_err(|error| error.to_string())?;
        let http = self.http.as_ref().map_err(Clone::clone)?;
        let answer = http.send(path, request).await.map_err(|error| error.to_string())?;
        let status = answer.status;
        let body = answer.whole(MAX_ANSWER).await.map_err(|error| error.to_string())?;
        if !status.is_success() {
            return Err(format!("{}: {}", status.as_u16(), crate::http::said(&body)));
        }
        serde_json::from_slice(&body).map_err(|error| format!("not what a router says: {error}"))
    }
}

/// Both of the router's views at one moment.
async fn look(admin: Option<&AdminPort>) -> Option<(Reading<Clients>, Reading<Heard>)> {
    let admin = admin?;
    let (clients, endpoints, loads) = futures::join!(
        admin.get("/admin/connections"),
        admin.get("/admin/endpoints"),
        admin.get("/admin/loads")
    );
    Some((clients, heard(endpoints, &loads)))
}

#[derive(Debug, Deserialize)]
struct Endpoints {
    endpoints: Vec<HeardEngine>,
}

#[derive(Debug, Deserialize)]
struct Loads {
    loads: Vec<Reported>,
}

#[derive(Debug, Deserialize)]
struct Reported {
    endpoint: String,
    age_ms: u64,
}

fn heard(endpoints: Reading<Endpoints>, loads: &Reading<Loads>) -> Reading<Heard> {
    let ages: BTreeMap<&str, u64> = loads
        .read()
        .into_iter()
        .flat_map(|loads| &loads.loads)
        .map(|load| (load.endpoint.as_str(), load.age_ms))
        .collect();
    Reading {
        place: endpoints.place,
        at_ms: endpoints.at_ms,
        found: match endpoints.found {
            Found::Failed(why) => Found::Failed(why),
            Found::Read(mut found) => {
                for engine in &mut found.endpoints {
                    engine.report_age_ms = ages.get(engine.endpoint.as_str()).copied();
                }
                Found::Read(Heard {
                    engines: found.endpoints,
                })
            }
        },
    }
}

/// Watches one engine until the end.
async fn engine(road: &Road, side: Side, endpoint: &str, origin: Origin, mut stopped: watch::Receiver<bool>) -> Engine {
    let at_ms = origin.ms();
    let reading = |place: &str, found| Reading {
        place: format!("{endpoint} {place}"),
        at_ms,
        found,
    };
    let mut loading = false;
    let (info, client) = match timeout(READ, ask(road, endpoint)).await {
        Ok(Ok((info, client))) => (Found::Read(info), Some(client)),
        Ok(Err(failure)) => {
            loading = failure.reason == Reason::Loading;
            (Found::Failed(failure.detail), None)
        }
        Err(_) => (Found::Failed(format!("no answer within {} s", READ.as_secs())), None),
    };
    let info = reading("GetInfo", info);
    let mut loads = Vec::new();
    if let Some(client) = client {
        tokio::select! {
            biased;
            _ = stopped.wait_for(|stopped| *stopped) => {}
            why = follow(client, endpoint, origin, &mut loads) => loads.push(Reading {
                place: format!("{endpoint} WatchLoad"),
                at_ms: origin.ms(),
                found: Found::Failed(why),
            }),
        }
    }
    Engine {
        side,
        endpoint: endpoint.to_owned(),
        info,
        loading,
        loads,
    }
}

/// A channel to an engine's control port.
pub async fn dial(road: &Road, endpoint: &str) -> Result<EngineClient<Channel>, String> {
    let channel = Channel::from_shared(format!("http://{endpoint}")).map_err(|error| with_causes(&error))?;
    // it is plain: nobody has to be trusted
    let connector = Connector::new(Trust::new(None)?, road.clone());
    let channel = channel.connect_timeout(READ).connect_with_connector(connector).await;
    let refused = |error: tonic::transport::Error| match ConnectError::of(&error) {
        Some(refused) => refused.to_string(),
        None => with_causes(&error),
    };
    Ok(EngineClient::new(channel.map_err(refused)?))
}

async fn ask(road: &Road, endpoint: &str) -> Result<(Info, EngineClient<Channel>), Failure> {
    let lost = |why| Failure::new(Reason::PeerLost, Source::Unspecified, why);
    let mut client = dial(road, endpoint).await.map_err(lost)?;
    let info = client.get_info(GetInfoRequest {}).await;
    let info = info.map_err(|status| Failure::from_status(&status, Source::Unspecified))?;
    Ok((told(&info.into_inner()), client))
}

fn told(info: &proto::EngineInfo) -> Info {
    let knobs = info.knobs.as_ref().map(knobs_json);
    Info {
        boot_id: BootId::from_wire(&info.boot_id).map_or_else(|error| error.to_string(), |boot| boot.to_string()),
        role: info
            .role()
            .as_str_name()
            .trim_start_matches("ROLE_")
            .to_ascii_lowercase(),
        version: info.version.clone(),
        model: info.model_name.clone(),
        backend: info.backend.clone(),
        vocab_size: info.vocab_size,
        uptime_ms: info.uptime_ms,
        knobs: knobs
            .and_then(|knobs| knobs.as_object().cloned())
            .into_iter()
            .flatten()
            .collect(),
    }
}

/// Takes its reports; says why there are no more.
async fn follow(
    mut client: EngineClient<Channel>,
    endpoint: &str,
    origin: Origin,
    loads: &mut Vec<Reading<Load>>,
) -> String {
    let request = WatchLoadRequest {
        min_interval_ms: LOAD_INTERVAL_MS,
        ..WatchLoadRequest::default()
    };
    let mut reports = match timeout(READ, client.watch_load(request)).await {
        Ok(Ok(reports)) => reports.into_inner(),
        Ok(Err(status)) => return status.to_string(),
        Err(_) => return format!("no answer within {} s", READ.as_secs()),
    };
    loop {
        let load = match timeout(READ, reports.message()).await {
            Ok(Ok(Some(load))) => load,
            Ok(Ok(None)) => return "it ended its reports".to_owned(),
            Ok(Err(status)) => return status.to_string(),
            Err(_) => return format!("no report within {} s", READ.as_secs()),
        };
        if loads.len() == LOADS {
            // the first is kept, and the latest
            loads.pop();
        }
        loads.push(Reading {
            place: format!("{endpoint} WatchLoad"),
            at_ms: origin.ms(),
            found: Found::Read(Load {
                running: load.running.into(),
                waiting: load.waiting.into(),
                transferring: load.transferring.into(),
                max_running: load.max_running.into(),
                free_pages: load.free_pages.into(),
                total_pages: load.total_pages.into(),
                draining: load.draining,
                last_step_age_ms: load.last_step_age_ms,
                last_progress_age_ms: load.last_progress_age_ms,
                inflight: load
                    .inflight
                    .iter()
                    .map(|inflight| Inflight {
                        state: phase::name(inflight.phase()).to_owned(),
                        count: inflight.count.into(),
                        oldest_ms: inflight.oldest_ms,
                        still_ms: inflight.still_ms,
                    })
                    .collect(),
            }),
        });
    }
}
