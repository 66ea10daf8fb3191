//! One deployment at a time: observe, plan, carry out, write down.
//!
//! | module | does |
//! | --- | --- |
//! | [`pass`] | one look at a deployment, from the cache to the status |
//! | `observe` | gathers what the planner is told |
//! | `pace` | how soon a deployment is looked at again |
//! | `carry` | carries a plan out, in the order of its fields |
//! | `probe` | the completion that a plan orders, and what it proves |
//!
//! What a process remembers between two passes is lost with it and asked for again; what has to last is in the cluster.

mod carry;
mod observe;
mod pace;
mod pass;
pub mod probe;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tandem_plan::{DefaultImages, Probe};
use tandem_telemetry::Traces;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::cluster::cache::{Cache, Key};
use crate::cluster::events::Events;
use crate::cluster::kinds::Kind;
use crate::cluster::write::{WriteError, Writer};
use crate::metrics::{Metrics, PassResult};
use crate::peers::{Known, Peers};
use crate::queue::Queue;
use crate::render::network::Reach;

/// Objects of others that are in the way are looked at this often.
const CONFLICTS: Duration = Duration::from_mins(1);
/// After a failure, doubled with each further one that comes before anything could be done.
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const LAST_BACKOFF: Duration = Duration::from_mins(1);
/// So many passes may each change something, one at once after the other: more than any change has steps.
const BRISK: u32 = 40;

/// Everything that a pass uses.
pub struct Reconciler {
    /// What the API server said last.
    pub cache: Arc<Cache>,
    /// What is looked at next.
    pub queue: Arc<Queue>,
    /// What writes.
    pub writer: Writer,
    /// Engines and routers.
    pub peers: Arc<Peers>,
    /// What tells people.
    pub events: Events,
    /// What counts.
    pub metrics: Metrics,
    /// The images that are taken where a spec names none.
    pub images: DefaultImages,
    /// Who may reach the pods from other namespaces.
    pub reach: Reach,
    /// What was remembered of each deployment.
    pub memories: Memories,
    /// Where spans begin: a trace for each pass.
    pub traces: Traces,
}

/// What was remembered of each deployment.
#[derive(Debug, Default)]
pub struct Memories(Mutex<HashMap<Key, Arc<tokio::sync::Mutex<Memory>>>>);

impl Memories {
    fn of(&self, key: &Key) -> Arc<tokio::sync::Mutex<Memory>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.entry(key.clone()).or_default())
    }

    fn forget(&self, key: &Key) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

/// What one process remembers of one deployment.
#[derive(Debug, Default)]
pub struct Memory {
    uid: String,
    /// The admin token, once it was read.
    token: Option<String>,
    /// What each pod's process said last, by the pod's uid.
    peers: HashMap<String, Known>,
    /// Objects of others that bear a name which is needed.
    conflicts: BTreeSet<(Kind, String)>,
    /// When those were last looked at.
    looked: Option<Instant>,
    /// What the last probe found; it is written by the probe's own task.
    probe: Arc<Mutex<ProbeState>>,
    failures: u32,
    /// A pass has done something before it failed.
    advanced: bool,
    /// Not looked at before, at this generation.
    backoff: Option<(Instant, i64)>,
    /// Passes in a row that changed something.
    changes: u32,
}

/// The probe of a deployment.
#[derive(Debug, Default)]
struct ProbeState {
    found: Option<Probe>,
    /// The revision and pods that one is under way for.
    running: Option<(String, String)>,
}

/// Why a pass could not be carried out.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    /// Something was not written or read.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// What was stored cannot be used.
    #[error(
        "the stored revision {id} has no template of {role} that can be read: {reason}; remove its ControllerRevision and set restart.token"
    )]
    Template {
        /// The revision.
        id: String,
        /// The role.
        role: &'static str,
        /// What is wrong.
        reason: String,
    },
}

/// How a pass ended, and when to look again.
#[derive(Debug, Clone, Copy)]
struct Ended {
    result: PassResult,
    again: Option<Instant>,
}

impl Reconciler {
    /// Looks at whatever is due, so many at a time; never ends.
    pub async fn run(self: Arc<Self>, at_once: usize) {
        let mut running = JoinSet::new();
        loop {
            while running.len() >= at_once.max(1) {
                running.join_next().await;
            }
            tokio::select! {
                key = self.queue.next() => {
                    let this = Arc::clone(&self);
                    running.spawn(async move { this.look(key).await });
                }
                Some(_) = running.join_next() => {}
            }
        }
    }

    async fn look(&self, key: Key) {
        // However it ends, also by a panic, the next one may look.
        let _done = Done {
            queue: &self.queue,
            key: &key,
        };
        let memory = self.memories.of(&key);
        let mut memory = memory.lock().await;
        let begun = Instant::now();
        let generation = self
            .cache
            .view(&key)
            .object
            .and_then(|object| object.metadata.generation)
            .unwrap_or(0);
        if let Some((until, of)) = memory.backoff
            && begun < until
            && of == generation
        {
            self.queue.at(&key, until);
            return;
        }
        let mut span = self.traces.work("pass");
        span.describe(|| {
            let (namespace, name) = (key.namespace.clone(), key.name.clone());
            [
                ("k8s.namespace.name", namespace.into()),
                ("tandem.deployment", name.into()),
            ]
        });
        let ended = match self.pass(&key, &mut memory).await {
            Ok(ended) => {
                memory.failures = 0;
                memory.backoff = None;
                ended
            }
            Err(error) => {
                span.fail("pass_failed", || error.to_string());
                let conflict = matches!(&error, PassError::Write(error) if error.is_conflict());
                memory.failures = if std::mem::take(&mut memory.advanced) {
                    1
                } else {
                    memory.failures + 1
                };
                let backoff = FIRST_BACKOFF * 2_u32.pow(memory.failures.min(9) - 1);
                let until = begun + backoff.min(LAST_BACKOFF);
                memory.backoff = Some((until, generation));
                if conflict {
                    // Somebody else was faster; the watch brings what they did.
                    tracing::info!(deployment = %key, %error, "looks again");
                } else {
                    tracing::warn!(deployment = %key, %error, failures = memory.failures, "a pass was not carried out; it is tried again");
                }
                Ended {
                    result: PassResult::Failed,
                    again: Some(until),
                }
            }
        };
        span.describe(|| [("tandem.result", ended.result.name().into())]);
        memory.changes = if ended.result == PassResult::Changed {
            memory.changes + 1
        } else {
            0
        };
        if let Some(again) = ended.again {
            self.queue.at(&key, again.max(begun + calm(memory.changes)));
        }
        self.metrics
            .pass(ended.result, begun.elapsed().as_secs_f64(), self.queue.len());
    }
}

/// How long passes that change something over and over have to wait for the next.
fn calm(changes: u32) -> Duration {
    match changes.checked_sub(BRISK) {
        None => Duration::ZERO,
        Some(more) => Duration::from_millis(100 * 2_u64.pow(more.min(9))),
    }
}

struct Done<'a> {
    queue: &'a Queue,
    key: &'a Key,
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.queue.done(self.key);
    }
}
