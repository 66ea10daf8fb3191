//! The engines behind the router: who they are, how loaded, and which pair serves a request.
//!
//! | room | purpose |
//! | --- | --- |
//! | [`channel`] | HTTP/2 to one engine |
//! | [`discovery`] | where they are: named by flags, or found in a cluster |
//! | [`slices`] | the cluster's word: EndpointSlices |
//! | [`pool`] | those of one side that there are now |
//! | [`worker`] | keeps one connection to one engine: dials, asks who it is, watches its load |
//! | [`session`] | one incarnation of an engine as this router knows it, with the guard of a request that is at it |
//! | [`breaker`] | keeps requests from an engine that answers but fails |
//! | [`select`] | the choice of a pair: pure |

pub mod breaker;
pub mod channel;
pub mod discovery;
pub mod pool;
pub mod select;
pub mod session;
pub mod slices;
pub mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use futures::FutureExt;
use tandem_wire::BootId;
use tokio::sync::{Notify, watch};
use tokio_util::task::AbortOnDropHandle;

pub use session::{Leg, Session, Verdict};
pub use slices::{Cluster, ClusterError};
pub use worker::{Link, Worker};

use crate::config::Config;
use crate::knobs::{Knobs, Policy};
use crate::metrics::Metrics;
use crate::shards::Shards;
use discovery::{Discovery, Named};
use pool::{Pool, Start};
use select::{Candidate, Chosen};
use slices::EndpointSlices;

/// What an engine is used as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// Of `--prefill` or `--discover-prefill`.
    Prefill,
    /// Of `--decode` or `--discover-decode`.
    Decode,
}

impl Side {
    /// For labels and logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// All engines of this router. Dropping it closes every connection.
#[derive(Debug)]
pub struct Engines {
    decodes: Arc<Pool>,
    prefills: Arc<Pool>,
    _following: Vec<AbortOnDropHandle<()>>,
    turn: [AtomicU64; 2],
    changed: Arc<Changed>,
}

/// Tells of changes.
#[derive(Debug)]
pub struct Changed {
    /// Something may let the first waiting request go: load, room, an engine that came or went.
    pub room: Notify,
    /// An engine came or went.
    pub links: watch::Sender<()>,
}

impl Changed {
    /// An engine came or went, or what is asked of them has changed.
    pub fn link(&self) {
        self.links.send_replace(());
        self.room.notify_one();
    }
}

/// Which engines this request failed on, by incarnation: others are tried first.
#[derive(Debug, Default)]
pub struct Avoid {
    /// Sessions, decode or prefill.
    pub sessions: Vec<Arc<Session>>,
}

impl Avoid {
    fn has(&self, session: &Arc<Session>) -> bool {
        self.sessions.iter().any(|avoided| avoided.boot == session.boot)
    }
}

/// A pair that a request holds; dropping it gives the room back.
#[derive(Debug)]
pub struct Lease {
    /// Where `Generate` goes.
    pub decode: Leg,
    /// Whom decode pulls from; none: decode prefills by itself.
    pub prefill: Option<Leg>,
    /// Prefill engines exist, but none can be used.
    pub bypass: bool,
}

/// Engines that have a request's prompt in their caches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Prefer {
    /// By incarnation.
    pub decode: Option<BootId>,
    /// By incarnation.
    pub prefill: Option<BootId>,
}

/// How much KV a request reserves, and where it goes if there is room.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens of its answer; none: as many as fit.
    pub new_tokens: Option<u32>,
    /// Longest prompt with answer by the router's own limit.
    pub max_length_tokens: Option<u32>,
    /// Whom it goes to rather than to others with room.
    pub prefer: Prefer,
}

impl Need {
    /// At an engine of `side` that holds at most `longest` tokens of a sequence; none: it does not fit.
    fn at(&self, side: Side, longest: u32) -> Option<u32> {
        // the answer has at least one token, and a prefill makes no more
        let least = self.prompt_tokens.saturating_add(1);
        let tokens = match (side, self.new_tokens) {
            (Side::Prefill, _) => least,
            (Side::Decode, Some(new)) => self.prompt_tokens.saturating_add(new),
            (Side::Decode, None) => least.max(longest.min(self.max_length_tokens.unwrap_or(longest))),
        };
        // the KV of the last token is never computed
        (tokens <= longest).then_some(tokens - 1)
    }
}

/// What a look for a pair gave.
#[derive(Debug)]
pub enum Look {
    /// A pair with room.
    Pair(Box<Lease>),
    /// Usable engines exist, none has room now; worth another look at the time given, if not told of a change before.
    Full(Option<Instant>),
    /// No decode engine that can hold it is up.
    NoDecode,
    /// Such a decode engine is up, but no prefill engine that goes with it.
    NoPrefill,
}

/// Begins; what is known at once is in the pool when this returns, and a task goes on with the rest.
fn follow(discovery: impl Discovery, pool: &Arc<Pool>) -> Option<AbortOnDropHandle<()>> {
    let mut following = Box::pin(discovery.follow(Arc::clone(pool)));
    match following.as_mut().now_or_never() {
        Some(()) => None,
        None => Some(AbortOnDropHandle::new(tokio::spawn(following))),
    }
}

impl Engines {
    /// Starts to keep connections to all engines of `config`; `cluster` is where those are found that it does not name.
    pub fn start(config: &Config, cluster: Option<&Cluster>, metrics: &Arc<Metrics>, shards: &Shards) -> Self {
        let changed = Arc::new(Changed {
            room: Notify::new(),
            links: watch::Sender::new(()),
        });
        let start = Start {
            keep: channel::Keep::new(config),
            shards: shards.clone(),
            metrics: Arc::clone(metrics),
            changed: Arc::clone(&changed),
        };
        let mut following = Vec::new();
        let mut pool = |side: Side, named: &[String], service: Option<&str>| {
            let Some((cluster, service)) = cluster.zip(service) else {
                let origin = (!named.is_empty()).then(|| format!("--{}", side.name()));
                let pool = Arc::new(Pool::new(side, origin, start.clone()));
                following.extend(follow(Named(named.to_vec()), &pool));
                return pool;
            };
            let slices = EndpointSlices::new(cluster, service, metrics.discovery(side.name()));
            let pool = Arc::new(Pool::new(side, Some(slices.name().to_owned()), start.clone()));
            following.extend(follow(slices, &pool));
            pool
        };
        let decodes = pool(Side::Decode, &config.decode, config.discover_decode.as_deref());
        let prefills = pool(Side::Prefill, &config.prefill, config.discover_prefill.as_deref());
        Self {
            decodes,
            prefills,
            _following: following,
            turn: [AtomicU64::new(0), AtomicU64::new(0)],
            changed,
        }
    }

    /// All that there are, prefills first.
    pub fn workers(&self) -> Vec<Arc<Worker>> {
        let (prefills, decodes) = (self.prefills.workers(), self.decodes.workers());
        prefills.iter().chain(decodes.iter()).cloned().collect()
    }

    /// Tells of changes.
    pub fn changed(&self) -> &Arc<Changed> {
        &self.changed
    }

    /// Looks for a pair and takes it.
    pub fn look(&self, need: &Need, avoid: &Avoid, knobs: &Knobs) -> Look {
        let (policy, recompute) = (knobs.policy, knobs.recompute());
        let now = Instant::now();
        let decodes = Self::able(&self.decodes.workers(), need);
        if decodes.is_empty() {
            return Look::NoDecode;
        }
        let prefills = Self::able(&self.prefills.workers(), need);
        let mates = |decode: &Session| prefills.iter().any(|(prefill, _)| decode.goes_with(prefill));
        let can_serve = |decode: &Session| !self.needs_prefill(decode) || recompute || mates(decode);
        let candidates: Vec<_> = decodes
            .iter()
            .filter(|(session, _)| can_serve(session))
            .map(|(session, tokens)| Self::candidate(session, *tokens, need, avoid, now))
            .collect();
        if candidates.is_empty() {
            return Look::NoPrefill;
        }
        let decode = match self.choose(Side::Decode, policy, &candidates) {
            Chosen::One(at) => Arc::clone(candidates[at].what),
            Chosen::Full(until) => return Look::Full(until),
        };
        let alone = |decode, bypass| {
            Look::Pair(Box::new(Lease {
                decode: Leg::take(decode, &self.changed),
                prefill: None,
                bypass,
            }))
        };
        if !self.needs_prefill(&decode) {
            return alone(decode, false);
        }
        let mates = prefills.iter().filter(|(prefill, _)| decode.goes_with(prefill));
        // those that fail each request are as good as none; the trials still go to them
        if recompute && mates.clone().all(|(prefill, _)| prefill.closed(now).is_some()) {
            return alone(decode, true);
        }
        let candidates: Vec<_> = mates
            .map(|(session, tokens)| Self::candidate(session, *tokens, need, avoid, now))
            .collect();
        match self.choose(Side::Prefill, policy, &candidates) {
            Chosen::One(at) => Look::Pair(Box::new(Lease {
                decode: Leg::take(decode, &self.changed),
                prefill: Some(Leg::take(Arc::clone(candidates[at].what), &self.changed)),
                bypass: false,
            })),
            Chosen::Full(until) => Look::Full(until),
        }
    }

    fn needs_prefill(&self, decode: &Session) -> bool {
        self.prefills.expected() && !decode.prefills_itself()
    }

    fn up(workers: &[Arc<Worker>]) -> Vec<Arc<Session>> {
        workers.iter().filter_map(|worker| worker.session()).collect()
    }

    /// Those that are up and can hold it, with the tokens that it reserves there.
    fn able(workers: &[Arc<Worker>], need: &Need) -> Vec<(Arc<Session>, u32)> {
        let able = |session: Arc<Session>| {
            let tokens = need.at(session.side, session.max_length_tokens())?;
            Some((session, tokens))
        };
        let sessions = workers.iter().filter_map(|worker| worker.session());
        sessions.filter_map(able).collect()
    }

    fn candidate<'a>(
        session: &'a Arc<Session>,
        tokens: u32,
        need: &Need,
        avoid: &Avoid,
        now: Instant,
    ) -> Candidate<'a, Arc<Session>> {
        let preferred = match session.side {
            Side::Decode => need.prefer.decode,
            Side::Prefill => need.prefer.prefill,
        };
        Candidate {
            preferred: preferred == Some(session.boot),
            what: session,
            room: session.room(tokens, now),
            load: session.load_share(),
            avoided: avoid.has(session),
        }
    }

    fn choose(&self, side: Side, policy: Policy, candidates: &[Candidate<'_, Arc<Session>>]) -> Chosen {
        let turn = &self.turn[side as usize];
        select::choose(
            policy,
            candidates,
            || turn.fetch_add(1, Ordering::Relaxed),
            rand::random,
        )
    }

    /// Wakes every worker that waits to dial again.
    pub fn probe_now(&self) {
        for worker in self.workers() {
            worker.probe_now();
        }
    }

    /// Is what is known about every engine of this side newer than `since`? Then waiting for a probe tells nothing new.
    pub fn known_since(&self, side: Side, since: Instant) -> bool {
        self.side(side).known_since(since)
    }

    /// Why engines of a side are down, for people.
    pub fn reasons(&self, side: Side) -> String {
        self.side(side).reasons()
    }

    fn side(&self, side: Side) -> &Pool {
        match side {
            Side::Decode => &self.decodes,
            Side::Prefill => &self.prefills,
        }
    }

    /// Is a decode engine known that could pull from a prefill engine, or that needs none? If not, why.
    pub fn pair(&self) -> Result<(), String> {
        let (decodes, prefills) = (Self::up(&self.decodes.workers()), Self::up(&self.prefills.workers()));
        let served = |d: &Arc<Session>| !self.needs_prefill(d) || prefills.iter().any(|prefill| d.goes_with(prefill));
        if decodes.iter().any(served) {
            return Ok(());
        }
        Err(match (decodes.is_empty(), prefills.is_empty()) {
            (true, _) => format!("no decode engine can be used: {}", self.reasons(Side::Decode)),
            (_, true) => format!("no prefill engine can be used: {}", self.reasons(Side::Prefill)),
            _ => format!(
                "{} decode and {} prefill engines can be used, and none of them go together: they run different models, or \
                 KV of different layouts",
                decodes.len(),
                prefills.len()
            ),
        })
    }

    /// Could a request be served, with room or without? If not, why.
    pub fn usable(&self, recompute: bool) -> Result<(), String> {
        let decodes = Self::up(&self.decodes.workers());
        if decodes.is_empty() {
            return Err(format!("no decode engine: {}", self.reasons(Side::Decode)));
        }
        let prefills = Self::up(&self.prefills.workers());
        let served = |d: &Arc<Session>| {
            recompute || !self.needs_prefill(d) || prefills.iter().any(|prefill| d.goes_with(prefill))
        };
        if decodes.iter().any(served) {
            Ok(())
        } else {
            Err(format!("no prefill engine: {}", self.reasons(Side::Prefill)))
        }
    }

    /// The longest sequence that some engine of a side can hold, those that are down by their last word; none: nothing is
    /// known of any.
    pub fn longest(&self, side: Side) -> Option<u32> {
        self.side(side).longest()
    }
}
