//! What the admin port shows of the engines.

use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use tandem_wire::phase;
use tandem_wire::proto::{self, Role};

use crate::engines::breaker::Standing;
use crate::engines::{Link, Worker};

#[derive(Debug, Serialize)]
pub struct Endpoints<'a> {
    endpoints: Vec<Engine<'a>>,
}

/// One engine.
#[derive(Debug, Serialize)]
struct Engine<'a> {
    side: &'static str,
    endpoint: &'a str,
    state: State,
    /// Why it is down.
    reason: Option<String>,
    #[serde(flatten)]
    session: Option<Session>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// Requests may go there.
    Up,
    /// It admits nothing new.
    Draining,
    /// It failed a request and is being asked whether it is still there.
    Doubted,
    /// It cannot be used.
    Down,
}

/// The incarnation that answers there.
#[derive(Debug, Serialize)]
struct Session {
    role: &'static str,
    boot_id: String,
    admin_endpoint: Option<String>,
    max_length_tokens: u32,
    /// Requests of this router.
    in_flight: u32,
    breaker: Breaker,
}

#[derive(Debug, Serialize)]
struct Breaker {
    state: &'static str,
    failures: u32,
    /// No request goes there before this is over.
    open_ms: Option<u64>,
}

pub fn endpoints(workers: &[Arc<Worker>]) -> Endpoints<'_> {
    let now = Instant::now();
    let endpoints = workers.iter().map(|worker| {
        let (state, reason, session) = match worker.link() {
            Link::Down { reason, .. } => (State::Down, Some(reason), None),
            Link::Up(session) if session.draining() => (State::Draining, None, Some(session)),
            Link::Up(session) if session.doubtful() => (State::Doubted, None, Some(session)),
            Link::Up(session) => (State::Up, None, Some(session)),
        };
        let session = session.map(|session| Session {
            role: match session.role() {
                Role::Prefill => "prefill",
                Role::Decode => "decode",
                Role::Unified => "unified",
                Role::Unspecified => "unknown",
            },
            boot_id: session.boot.to_string(),
            admin_endpoint: session.admin_endpoint().map(str::to_owned),
            max_length_tokens: session.max_length_tokens(),
            in_flight: session.in_flight(),
            breaker: breaker(session.breaker(now)),
        });
        Engine {
            side: worker.side().name(),
            endpoint: worker.endpoint(),
            state,
            reason,
            session,
        }
    });
    Endpoints {
        endpoints: endpoints.collect(),
    }
}

fn breaker(standing: Standing) -> Breaker {
    let (state, failures, open) = match standing {
        Standing::Closed { failures } => ("closed", failures, None),
        Standing::Open { failures, rest } => ("open", failures, Some(rest)),
        Standing::Trial { failures } => ("trial", failures, None),
    };
    Breaker {
        state,
        failures,
        open_ms: open.map(|rest| rest.as_millis() as u64),
    }
}

#[derive(Debug, Serialize)]
pub struct Loads<'a> {
    loads: Vec<Load<'a>>,
}

/// One engine's load by its last report.
#[derive(Debug, Serialize)]
struct Load<'a> {
    side: &'static str,
    endpoint: &'a str,
    boot_id: String,
    /// How old the report is.
    age_ms: u64,
    running: u32,
    waiting: u32,
    waiting_tokens: u64,
    transferring: u32,
    max_running: u32,
    free_pages: u32,
    total_pages: u32,
    draining: bool,
    last_step_age_ms: u64,
    /// Since it last did something for a request.
    last_progress_age_ms: u64,
    /// What its requests wait for.
    inflight: Vec<Inflight>,
}

/// The engine's requests in one state.
#[derive(Debug, Serialize)]
struct Inflight {
    state: &'static str,
    count: u32,
    /// The longest that one has been in it.
    oldest_ms: u64,
    /// The longest that one has been in it without a move.
    still_ms: u64,
}

fn inflight(of: &proto::Inflight) -> Inflight {
    Inflight {
        state: phase::name(of.phase()),
        count: of.count,
        oldest_ms: of.oldest_ms,
        still_ms: of.still_ms,
    }
}

pub fn loads(workers: &[Arc<Worker>]) -> Loads<'_> {
    let loads = workers.iter().filter_map(|worker| {
        let Link::Up(session) = worker.link() else {
            return None;
        };
        let (load, age) = session.load();
        Some(Load {
            side: worker.side().name(),
            endpoint: worker.endpoint(),
            boot_id: session.boot.to_string(),
            age_ms: age.as_millis() as u64,
            running: load.running,
            waiting: load.waiting,
            waiting_tokens: load.waiting_tokens,
            transferring: load.transferring,
            max_running: load.max_running,
            free_pages: load.free_pages,
            total_pages: load.total_pages,
            draining: load.draining,
            last_step_age_ms: load.last_step_age_ms,
            last_progress_age_ms: load.last_progress_age_ms,
            inflight: load.inflight.iter().map(inflight).collect(),
        })
    });
    Loads { loads: loads.collect() }
}
