//! The engines of one side, as requests see them now. Those that have left take nothing new; what runs there goes on, for it holds its
//! session, and with it the connection, by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use arc_swap::{ArcSwap, Guard};

use super::channel::Keep;
use super::{Changed, Side, Worker};
use crate::metrics::Metrics;
use crate::shards::Shards;

/// Engines of one side at most: each has a connection from each thread.
const MOST: usize = 1_024;

/// What a new engine's worker is started with.
#[derive(Debug, Clone)]
pub struct Start {
    /// How connections are kept alive.
    pub keep: Keep,
    /// Who connects.
    pub shards: Shards,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Told when one comes or goes.
    pub changed: Arc<Changed>,
}

/// One side's engines.
#[derive(Debug)]
pub struct Pool {
    side: Side,
    /// Where they come from, for people; none: there are none by design.
    origin: Option<String>,
    start: Start,
    workers: ArcSwap<Vec<Arc<Worker>>>,
    known: AtomicBool,
    /// The longest sequence that one of those that left could hold; 0: unknown.
    longest: AtomicU32,
}

impl Pool {
    /// Nothing is known yet of the engines that come from `origin`.
    pub fn new(side: Side, origin: Option<String>, start: Start) -> Self {
        Self {
            side,
            origin,
            start,
            workers: ArcSwap::default(),
            known: AtomicBool::new(false),
            longest: AtomicU32::new(0),
        }
    }

    /// What they are used as.
    pub fn side(&self) -> Side {
        self.side
    }

    /// May there be engines of this side, though perhaps not now?
    pub fn expected(&self) -> bool {
        self.origin.is_some()
    }

    /// Those that there are, without a lock.
    pub fn workers(&self) -> Guard<Arc<Vec<Arc<Worker>>>> {
        self.workers.load()
    }

    /// From now on these endpoints, each given once, are the engines: new ones are dialled. One caller at a time.
    pub fn set(&self, endpoints: &[String]) {
        let endpoints = &endpoints[..endpoints.len().min(MOST)];
        let old = self.workers.load_full();
        let known = |endpoint: &String| old.iter().find(|worker| worker.endpoint() == endpoint).cloned();
        let new = endpoints
            .iter()
            .map(|endpoint| known(endpoint).unwrap_or_else(|| Arc::new(self.dial(endpoint))))
            .collect();
        self.workers.store(Arc::new(new));
        self.known.store(true, Ordering::Release);
        for gone in old
            .iter()
            .filter(|worker| !endpoints.iter().any(|one| one == worker.endpoint()))
        {
            tracing::info!(
                endpoint = gone.endpoint(),
                side = self.side.name(),
                "engine is none any more"
            );
            self.longest.store(gone.longest().unwrap_or(0), Ordering::Relaxed);
            self.start.metrics.forget_upstream(self.side.name(), gone.endpoint());
        }
        self.start.changed.link();
    }

    fn dial(&self, endpoint: &str) -> Worker {
        let Start {
            keep,
            shards,
            metrics,
            changed,
        } = &self.start;
        let gauges = metrics.upstream(self.side.name(), endpoint);
        Worker::start(self.side, endpoint, *keep, shards.clone(), gauges, Arc::clone(changed))
    }

    /// Is what is known of them all newer than `since`?
    pub fn known_since(&self, since: Instant) -> bool {
        self.known.load(Ordering::Acquire) && self.workers().iter().all(|worker| worker.known_since(since))
    }

    /// Why none can be used, for people.
    pub fn reasons(&self) -> String {
        let origin = self.origin.as_deref().unwrap_or("none is configured");
        if !self.known.load(Ordering::Acquire) {
            return format!("{origin} was not asked yet");
        }
        let workers = self.workers();
        if workers.is_empty() {
            return format!("{origin} has no endpoint that is ready");
        }
        let reasons: Vec<_> = workers.iter().filter_map(|worker| worker.down_reason()).collect();
        if reasons.is_empty() {
            return "none goes with the other side (model or layout differ)".into();
        }
        reasons.join("; ")
    }

    /// The longest sequence that one of them can hold, those that are down by their last word, and if there is none one that has
    /// left; none: nothing is known of any.
    pub fn longest(&self) -> Option<u32> {
        let now = self.workers().iter().filter_map(|worker| worker.longest()).max();
        let left = self.longest.load(Ordering::Relaxed);
        now.or(Some(left).filter(|longest| *longest > 0))
    }
}
