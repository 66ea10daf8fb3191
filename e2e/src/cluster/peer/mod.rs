//! A pod's process that computes nothing: it takes the arguments of `tandem-engine` or `tandem-router`, listens on the pod's
//! address and speaks their contracts, and a script says what it does well and what it does badly.
//!
//! | module | holds |
//! | --- | --- |
//! | [`flags`] | the container's arguments |
//! | [`engine`] | prefill and decode: `Engine` and `Admin` |
//! | [`router`] | the orders of the router's admin port, and completions of its own |
//! | [`ports`] | listening, until the process is ended |
//!
//! They run on the threads of the scripted kubelet: hundreds of deployments fit into one test process.

mod engine;
mod flags;
mod ports;
mod router;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use flags::Flags;

/// What a process does. It is asked for anew at each call, so a test can change it while the process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Script {
    /// Whether `/readyz` says yes.
    pub ready: bool,
    /// What becomes of new knobs.
    pub knobs: Obeys,
    /// Of a router: what becomes of an order to admit, queue or reject.
    pub traffic: Obeys,
    /// Of a router: requests that are with engines, however long it is waited for their end.
    pub in_flight: u32,
    /// Of decode: how a completion ends.
    pub completions: Completions,
    /// Of an engine: hand-offs that finished, it says, beside those of its completions, and so many in a row that failed since.
    pub handoffs: (u32, u32),
    /// Of a router: it has found no engine.
    pub finds_none: bool,
    /// Of a router: it knows no decode that could pull from a prefill.
    pub no_pair: bool,
    /// Of a router: requests that ended lately, and of those whose client left before the end.
    pub clients: (u32, u32),
    /// Every order and question is answered after so long.
    pub delay: Duration,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            ready: true,
            knobs: Obeys::Yes,
            traffic: Obeys::Yes,
            in_flight: 0,
            completions: Completions::Moved,
            handoffs: (0, 0),
            finds_none: false,
            no_pair: false,
            clients: (0, 0),
            delay: Duration::ZERO,
        }
    }
}

/// What becomes of an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obeys {
    /// It is done.
    Yes,
    /// It is answered with an error.
    Refuses,
    /// It is answered well, with what was in effect before and still is.
    Ignores,
    /// It is not answered.
    Hangs,
}

/// How decode ends a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completions {
    /// The prompt's KV came over the wire.
    Moved,
    /// The answer is good, but no KV came: decode read the prompt itself.
    Recomputed,
    /// With a failure.
    Failed,
    /// Not at all.
    Hangs,
}

/// The script of one process.
pub type Live = Arc<dyn Fn() -> Script + Send + Sync>;

/// The ready pods of a Service in the process's own namespace, as a watch of its EndpointSlices shows them.
pub type Endpoints = Arc<dyn Fn(&str) -> Vec<Ipv4Addr> + Send + Sync>;

/// A running process; dropping it closes its ports and connections, as a kill does.
#[derive(Debug)]
pub struct Peer {
    ports: JoinSet<()>,
}

impl Peer {
    /// Starts `tandem-engine` or `tandem-router` with the arguments of a container.
    ///
    /// # Errors
    /// In a few words, what a process would have ended with: an argument that is missing, a port that is taken.
    pub async fn start(program: &str, args: &[String], script: Live, endpoints: Endpoints) -> Result<Self, String> {
        let flags = Flags::of(args);
        let token = match flags.text("admin-token-file") {
            Some(file) => std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?,
            None => return Err("no --admin-token-file".into()),
        };
        let token = token.trim().to_owned();
        let ports = match program {
            "tandem-engine" => engine::start(&flags, token, script).await?,
            "tandem-router" => router::start(&flags, token, script, endpoints).await?,
            other => return Err(format!("{other:?} is no program of ours")),
        };
        Ok(Self { ports })
    }

    /// Waits for its end, which comes only where one of its ports breaks.
    pub async fn ended(&mut self) {
        self.ports.join_next().await;
    }
}
