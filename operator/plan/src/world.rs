//! What the planner is told: nothing of it is trusted to last.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use tandem_crds::status::GateOutcome;
use tandem_crds::{PDDeploymentSpec, PDDeploymentStatus, Role};

use crate::intents::Traffic;
use crate::revision::{DefaultImages, Revision};

/// All that a plan depends on.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// The time, in whole seconds.
    pub now: Timestamp,
    /// The generation of the spec.
    pub generation: i64,
    /// Since when the object is being deleted.
    pub deleting: Option<Timestamp>,
    /// What is to run.
    pub spec: &'a PDDeploymentSpec,
    /// What the last pass wrote.
    pub status: &'a PDDeploymentStatus,
    /// The images that this operator takes where the spec names none.
    pub images: &'a DefaultImages,
    /// The stored revisions, oldest first.
    pub revisions: &'a [Revision],
    /// What runs.
    pub world: &'a World,
}

/// What runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct World {
    /// Workloads that carry our owner reference, those of 0 replicas included. The router has one.
    pub workloads: Vec<Workload>,
    /// Their pods, until they are gone.
    pub pods: Vec<Pod>,
    /// The uids of engine pods that a router which serves their contract does not know yet: no request goes there.
    pub unrouted: BTreeSet<String>,
    /// The hash of the knobs that lie in each role's config map.
    pub knobs: BTreeMap<Role, String>,
    /// The order to the routers that lies in their config map.
    pub order: Option<Traffic>,
    /// What the last probe found.
    pub probe: Option<Probe>,
    /// Objects of others that bear a name which is needed.
    pub conflicts: Vec<String>,
}

/// Pods of one role and one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// The role.
    pub role: Role,
    /// The role's revision, [`Revision::hash`]; the router's that of its template.
    pub revision: String,
    /// The contract of its pods.
    pub contract: String,
    /// How many pods are asked for.
    pub replicas: i32,
    /// GPUs of one pod.
    pub gpus: i32,
    /// Why pods cannot be made, for example a quota.
    pub trouble: Option<Trouble>,
}

/// One pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// Its uid.
    pub uid: String,
    /// Its name, for people.
    pub name: String,
    /// The role.
    pub role: Role,
    /// The role's revision that it was made from.
    pub revision: String,
    /// GPUs that it holds or asks for.
    pub gpus: i32,
    /// Ready, as its probe says.
    pub ready: bool,
    /// Asked to stop.
    pub terminating: bool,
    /// Its node is unreachable or gone: it serves nobody, and its GPUs went with the node.
    pub lost: bool,
    /// Why it does not serve: `Unschedulable`, `ImagePullFailed`, `CrashLoop`, …
    pub trouble: Option<Trouble>,
    /// The hash of the knobs that its process says it runs with.
    pub knobs: Option<String>,
    /// What its process computes with.
    pub backend: String,
    /// A router's last acknowledged order.
    pub order: Option<Traffic>,
    /// A router's requests that are with engines.
    pub in_flight: u64,
    /// What its process has measured.
    pub evidence: Evidence,
}

impl Pod {
    /// One whose process has said nothing, and that does not serve.
    pub fn unheard(uid: String, name: String, role: Role, revision: String) -> Self {
        Self {
            uid,
            name,
            role,
            revision,
            gpus: 0,
            ready: false,
            terminating: false,
            lost: false,
            trouble: None,
            knobs: None,
            backend: String::new(),
            order: None,
            in_flight: 0,
            evidence: Evidence::default(),
        }
    }

    /// One that was just made for `workload`, whose uid is its name.
    pub fn made(workload: &Workload, name: String) -> Self {
        Self {
            gpus: workload.gpus,
            ..Self::unheard(name.clone(), name, workload.role, workload.revision.clone())
        }
    }
}

/// What a process has measured of the ways that it is an end of.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evidence {
    /// An engine's hand-offs.
    pub handoffs: Option<Handoffs>,
    /// A router's clients.
    pub clients: Option<Clients>,
    /// Why a router knows no decode that could pull from a prefill; none: it knows one.
    pub no_pair: Option<String>,
}

/// How the hand-offs of KV ended that an engine took part in, since it started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Handoffs {
    /// That finished.
    pub finished: u64,
    /// That failed, by the code of their reason.
    pub failed: Vec<(String, u64)>,
    /// That failed since the last one that finished.
    pub failed_since: u64,
    /// That ended lately.
    pub recent: u32,
    /// Of those, that failed.
    pub recent_failed: u32,
}

/// What a router's clients did with their answers lately.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Clients {
    /// Requests that ended.
    pub ended: u64,
    /// Of those, whose client closed its connection before the answer ended.
    pub gone: u64,
    /// Of those, whose client was cut off because it took nothing.
    pub stalled: u64,
    /// Connections whose client takes nothing now, for longer than a moment.
    pub blocked: u64,
}

/// Why something does not come to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// In one word, as a condition's reason.
    pub reason: String,
    /// In the words of who said it.
    pub message: String,
}

impl Trouble {
    /// The reason of a pod that has ended for good: nobody starts it again.
    pub const GAVE_UP: &str = "GaveUp";
}

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// The revision that it was ordered for.
    pub revision: String,
    /// The pods that it was ordered for.
    pub pods: String,
    /// What it found.
    pub outcome: GateOutcome,
    /// What was measured, or what failed.
    pub message: String,
}
