//! What was observed: every reading with the place where it was read and when, those that failed too.
//!
//! A verdict is made of this and of nothing else, so it can be made again later from what was kept. Times are in milliseconds;
//! `at_ms` counts from the beginning of the record. Fields are only added.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Raised when an older program could not read a record rightly.
pub const VERSION: u32 = 1;

/// The state of a probe that hangs though the router has written the whole answer.
pub const ANSWERED: &str = "answered";

/// Everything that was observed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub version: u32,
    /// Of the program that observed.
    pub tandem: String,
    /// When it began, RFC 3339.
    pub taken: String,
    pub limits: Limits,
    /// The URL whose way to the router was to be measured; none: what only a client can see is not measured.
    pub via: Option<String>,
    /// What the router says of its clients, at the beginning and at the end.
    pub clients: Vec<Reading<Clients>>,
    /// What the router says of its engines, at the same times.
    pub heard: Vec<Reading<Heard>>,
    /// What each engine says of itself, asked directly.
    pub engines: Vec<Engine>,
    /// Sides of which the cluster has no process.
    #[serde(default)]
    pub missing: Vec<Missing>,
    pub probes: Vec<Probe>,
}

/// A side that should be there, and has no pod with an address.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Missing {
    pub side: Side,
    /// Where that is said.
    pub place: String,
    /// What there is instead.
    pub why: String,
}

/// What was taken for long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// What has not moved for so long is stuck, and a probe that takes so long is slow.
    pub stuck_ms: u64,
    /// A probe that has not ended after this hangs.
    pub probe_ms: u64,
}

/// One look at one place.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reading<T> {
    /// Where.
    pub place: String,
    pub at_ms: u64,
    #[serde(flatten)]
    pub found: Found<T>,
}

/// What a look gave.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Found<T> {
    Read(T),
    /// Why nothing could be read there.
    Failed(String),
}

impl<T> Reading<T> {
    /// What was read, if it was.
    pub fn read(&self) -> Option<&T> {
        match &self.found {
            Found::Read(found) => Some(found),
            Found::Failed(_) => None,
        }
    }

    /// Why nothing was read.
    pub fn failed(&self) -> Option<&str> {
        match &self.found {
            Found::Read(_) => None,
            Found::Failed(why) => Some(why),
        }
    }
}

/// Of `/admin/connections`, what a verdict rests on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Clients {
    pub open: u64,
    /// Requests whose answer is not complete, probes left out.
    pub in_flight: u64,
    pub last_answer_written_ms: Option<u64>,
    pub lately: Lately,
    /// The longest in their state.
    pub connections: Vec<Connection>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lately {
    pub since_ms: u64,
    pub ended: u64,
    pub client_gone: u64,
    pub client_stalled: u64,
    pub last_unfinished_ms: Option<u64>,
    /// Others that failed, by their code.
    pub failed: BTreeMap<String, u64>,
    pub last_failed_ms: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Connection {
    pub id: u64,
    pub peer: String,
    pub state: String,
    pub state_ms: u64,
    pub unsent_bytes: u64,
    pub requests: Vec<Running>,
}

/// A request whose answer is not complete.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Running {
    pub request_id: String,
    pub age_ms: u64,
    pub state: String,
    pub state_ms: u64,
    /// Since its latest token.
    pub last_token_ms: Option<u64>,
}

/// Of `/admin/endpoints` and `/admin/loads`: the engines as the router hears them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Heard {
    pub engines: Vec<HeardEngine>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HeardEngine {
    pub side: String,
    pub endpoint: String,
    /// up, draining, doubted or down.
    pub state: String,
    pub reason: Option<String>,
    pub boot_id: Option<String>,
    /// Requests that this router has there.
    pub in_flight: u64,
    /// How old its last report is.
    pub report_age_ms: Option<u64>,
}

/// What an engine is used as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    Prefill,
    Decode,
}

impl Side {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// One engine, by its own word.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Engine {
    pub side: Side,
    /// Its control port.
    pub endpoint: String,
    pub info: Reading<Info>,
    /// It answered that its model is not there yet: its words are why `info` could not be read.
    #[serde(default)]
    pub loading: bool,
    /// Its load, again and again until the end of the record; the last look at it may have failed.
    pub loads: Vec<Reading<Load>>,
}

/// Of `GetInfo`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Info {
    pub boot_id: String,
    pub role: String,
    pub version: String,
    pub model: String,
    pub backend: String,
    pub vocab_size: u32,
    pub uptime_ms: u64,
    /// In effect.
    pub knobs: BTreeMap<String, serde_json::Value>,
}

/// Of `WatchLoad`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Load {
    pub running: u64,
    pub waiting: u64,
    pub transferring: u64,
    pub max_running: u64,
    pub free_pages: u64,
    pub total_pages: u64,
    pub draining: bool,
    pub last_step_age_ms: u64,
    pub last_progress_age_ms: u64,
    /// What its requests wait for; empty from an engine that does not say so.
    pub inflight: Vec<Inflight>,
}

/// The requests of one state.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inflight {
    pub state: String,
    pub count: u64,
    /// The longest that one has been in it.
    pub oldest_ms: u64,
    /// The longest that one has been in it without a move.
    pub still_ms: u64,
}

/// A tiny completion of ours.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    pub way: Way,
    /// A URL, or an engine's control port.
    pub place: String,
    pub at_ms: u64,
    pub connection: Kept,
    /// The how manieth on its connection, from 1.
    pub round: u32,
    /// The connection was there before; none: nobody answered on it.
    pub reused: Option<bool>,
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// Which way a probe takes; each way is a part of the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// Through `--via` to the router, and on.
    Via,
    /// To the router's own listening socket, and on.
    Router,
    /// To decode, which pulls from prefill.
    Pair,
    /// To decode, which does all by itself.
    Decode,
}

/// Which kind of connection was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kept {
    /// A new one for each probe.
    Fresh,
    /// One that is kept alive for all.
    Reused,
}

/// Of `/admin/connections`, our own probes.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Probes {
    pub running: Vec<Running>,
    pub ended: Vec<Ended>,
}

/// A probe that ended, by the account of the router.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Ended {
    pub request_id: String,
    pub code: String,
    pub spent_ms: BTreeMap<String, f64>,
}

/// What came of a probe.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "outcome")]
pub enum Outcome {
    Passed {
        total_ms: u64,
        first_token_ms: u64,
        /// Where its time went, by the account of the router or of the engine that it was sent to.
        spent_ms: BTreeMap<String, f64>,
    },
    /// Whoever was asked said that it fails, or nobody could be reached.
    Failed {
        total_ms: u64,
        /// HTTP's; none: there was no answer.
        status: Option<u16>,
        /// Tandem's own code; none: whoever refused was no part of Tandem, or said nothing.
        code: Option<String>,
        /// Which part of Tandem saw the failure first.
        source: Option<String>,
        reason: String,
    },
    /// The connection ended before the answer did.
    Cut { total_ms: u64, received_bytes: u64 },
    /// Nothing more came until the deadline.
    Hung {
        waited_ms: u64,
        received_bytes: u64,
        /// Where it was then, by the account of whom it was sent to; none: nobody there knows of it. [`ANSWERED`] where that
        /// one has done with it.
        state: Option<String>,
    },
    /// It could not be made: no trust, no key. Says nothing of the way.
    NotMade { reason: String },
}
