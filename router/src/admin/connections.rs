//! What the admin port shows of the clients.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Version;
use serde::Serialize;

use crate::evidence::{Connection, Ended, Open, Registry, Spent, Stage, Standing};
use crate::metrics::{CLIENT_GONE, CLIENT_STALLED, OK};

/// Connections that are listed; all are counted.
const LISTED: usize = 256;
/// Open requests that are listed of one connection.
const REQUESTS: usize = 16;
/// Of the requests that ended lately.
const SLOWEST: usize = 20;
/// How long ago that is at most.
const LATELY: Duration = Duration::from_mins(15);

/// `GET /admin/connections`. All times in milliseconds.
#[derive(Debug, Serialize)]
pub struct Clients {
    open: usize,
    /// How many stand how, and the longest of each.
    by_state: BTreeMap<&'static str, Group>,
    /// Requests whose answer is not complete, probes left out.
    in_flight: usize,
    /// Since the kernel took the last byte of an answer; none: there was no answer yet.
    last_answer_written_ms: Option<u64>,
    lately: Lately,
    /// The longest in their state first.
    connections: Vec<One>,
    /// The slowest first.
    slowest: Vec<Past>,
    probes: Probes,
}

/// Requests that were marked as probes: part of nothing else here.
#[derive(Debug, Serialize)]
struct Probes {
    running: Vec<Running>,
    /// The last to end first.
    ended: Vec<Past>,
}

#[derive(Debug, Default, Serialize)]
struct Group {
    count: usize,
    longest_ms: u64,
}

/// The requests that ended lately.
#[derive(Debug, Serialize)]
pub struct Lately {
    /// How far back they go.
    since_ms: u64,
    ended: usize,
    /// The client closed its connection before its answer ended.
    client_gone: usize,
    /// This router closed it, because the client took nothing of its answer.
    client_stalled: usize,
    /// Since the last of either.
    last_unfinished_ms: Option<u64>,
    /// Those that failed, by their code.
    failed: BTreeMap<&'static str, usize>,
    /// Since the last of those.
    last_failed_ms: Option<u64>,
}

#[derive(Debug, Serialize)]
struct One {
    id: u64,
    peer: SocketAddr,
    tls: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    http: Option<&'static str>,
    age_ms: u64,
    requests_served: u64,
    state: &'static str,
    /// In this state.
    state_ms: u64,
    /// That the client does not take; what the kernel holds comes on top.
    unsent_bytes: usize,
    idle_ms: u64,
    /// Beside the other times, not one of them.
    blocked_ms: u64,
    spent_ms: SpentMs,
    requests: Vec<Running>,
}

#[derive(Debug, Serialize)]
struct Running {
    request_id: String,
    age_ms: u64,
    state: &'static str,
    state_ms: u64,
    /// Since its latest token. Tokens of an answer that is not streamed may come many at a time.
    last_token_ms: Option<u64>,
    #[serde(skip)]
    probe: bool,
}

#[derive(Debug, Serialize)]
struct Past {
    request_id: String,
    endpoint: &'static str,
    code: &'static str,
    stream: bool,
    connection: u64,
    ended_ms: u64,
    total_ms: f64,
    first_token_ms: Option<f64>,
    prompt_tokens: u32,
    completion_tokens: u32,
    attempts: u32,
    spent_ms: SpentMs,
}

/// Stages with some time in them.
#[derive(Debug, Serialize)]
#[serde(transparent)]
struct SpentMs(BTreeMap<&'static str, f64>);

impl From<&Spent> for SpentMs {
    fn from(spent: &Spent) -> Self {
        let some = Stage::ALL.into_iter().filter(|&stage| !spent[stage].is_zero());
        Self(some.map(|stage| (stage.name(), fine(spent[stage]))).collect())
    }
}

fn ms(time: Duration) -> u64 {
    time.as_millis() as u64
}

/// To a microsecond.
fn fine(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

/// How things stand now.
pub fn view(registry: &Registry) -> Clients {
    let now = Instant::now();
    let since = |then: Instant| ms(now.saturating_duration_since(then));
    let open = registry.connections();
    let mut running: Vec<Running> = open.iter().flat_map(|c| requests(c, now)).collect();
    running.retain(|request| request.probe);
    running.truncate(LISTED);
    let of_clients = open.iter().filter(|connection| !connection.probes_only());
    let mut connections: Vec<One> = of_clients.map(|c| one(c, now)).collect();
    let mut by_state: BTreeMap<_, Group> = Standing::all()
        .map(|standing| (standing.name(), Group::default()))
        .collect();
    for connection in &connections {
        let group = by_state.entry(connection.state).or_default();
        group.count += 1;
        group.longest_ms = group.longest_ms.max(connection.state_ms);
    }
    let (count_open, in_flight) = (connections.len(), connections.iter().map(|c| c.requests.len()).sum());
    connections.sort_by_key(|connection| std::cmp::Reverse(connection.state_ms));
    connections.truncate(LISTED);
    for connection in &mut connections {
        connection.requests.truncate(REQUESTS);
    }

    let mut recent = recent(registry, now);
    let lately = lately(&recent, now);
    recent.sort_by_key(|request| std::cmp::Reverse(request.total));
    recent.truncate(SLOWEST);
    Clients {
        open: count_open,
        by_state,
        in_flight,
        last_answer_written_ms: registry.last_written().map(since),
        lately,
        connections,
        slowest: recent.iter().map(|request| past(request, now)).collect(),
        probes: Probes {
            running,
            ended: registry.probed().iter().map(|request| past(request, now)).collect(),
        },
    }
}

/// Those that ended lately, the last to end first.
pub fn recent(registry: &Registry, now: Instant) -> Vec<Ended> {
    let mut recent = registry.recent();
    recent.retain(|request| now.saturating_duration_since(request.at) < LATELY);
    recent
}

/// How those ended.
pub fn lately(recent: &[Ended], now: Instant) -> Lately {
    let since = |then: Instant| ms(now.saturating_duration_since(then));
    let unfinished = |request: &&Ended| request.code == CLIENT_GONE || request.code == CLIENT_STALLED;
    let failed = |request: &&Ended| request.code != OK && !unfinished(request);
    let count = |code| recent.iter().filter(|request| request.code == code).count();
    Lately {
        since_ms: recent.last().map_or(0, |oldest| since(oldest.at)),
        ended: recent.len(),
        client_gone: count(CLIENT_GONE),
        client_stalled: count(CLIENT_STALLED),
        last_unfinished_ms: recent.iter().find(unfinished).map(|request| since(request.at)),
        failed: recent
            .iter()
            .filter(failed)
            .fold(BTreeMap::new(), |mut codes, request| {
                *codes.entry(request.code).or_default() += 1;
                codes
            }),
        last_failed_ms: recent.iter().find(failed).map(|request| since(request.at)),
    }
}

/// Those whose answer is not complete, oldest first.
fn requests(connection: &Connection, now: Instant) -> Vec<Running> {
    running(&connection.view(now).open, now)
}

fn running(open: &[Arc<Open>], now: Instant) -> Vec<Running> {
    let since = |then: Instant| ms(now.saturating_duration_since(then));
    let requests = open.iter().map(|open| {
        let (stage, entered) = open.ledger.at().unwrap_or((Stage::Answer, now));
        Running {
            request_id: open.request_id.clone(),
            age_ms: since(open.came),
            state: stage.name(),
            state_ms: since(entered),
            last_token_ms: open.ledger.last_token().map(|after| since(open.came + after)),
            probe: open.probe,
        }
    });
    requests.collect()
}

fn one(connection: &Connection, now: Instant) -> One {
    let since = |then: Instant| ms(now.saturating_duration_since(then));
    let view = connection.view(now);
    let mut requests = running(&view.open, now);
    requests.retain(|request| !request.probe);
    One {
        id: connection.id,
        peer: connection.peer,
        tls: connection.tls,
        http: view.version.map(|version| match version {
            Version::HTTP_2 => "2",
            Version::HTTP_10 => "1.0",
            _ => "1.1",
        }),
        age_ms: since(connection.opened),
        requests_served: view.served,
        state: view.standing.name(),
        state_ms: since(view.since),
        unsent_bytes: view.unsent_bytes,
        idle_ms: ms(view.idle),
        blocked_ms: ms(view.blocked),
        spent_ms: (&view.spent).into(),
        requests,
    }
}

fn past(request: &Ended, now: Instant) -> Past {
    Past {
        request_id: request.request_id.clone(),
        endpoint: request.endpoint,
        code: request.code,
        stream: request.stream,
        connection: request.connection,
        ended_ms: ms(now.saturating_duration_since(request.at)),
        total_ms: fine(request.total),
        first_token_ms: request.first_token.map(fine),
        prompt_tokens: request.prompt_tokens,
        completion_tokens: request.completion_tokens,
        attempts: request.attempts,
        spent_ms: (&request.spent).into(),
    }
}
