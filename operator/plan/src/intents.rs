//! What the planner answers: the state that should be, whole, so that doing a plan twice is doing it once.

use std::collections::BTreeMap;

use jiff::Timestamp;
use tandem_crds::{PDDeploymentStatus, Role};

use crate::revision::Revision;

/// What should be after this pass. Applied in the order of the fields; where one cannot be applied, those below it wait.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// To be stored before all else, with its rendered templates.
    pub store: Option<Revision>,
    /// The order to every router: written to their config map first, then told to each until it acknowledges it.
    pub traffic: Traffic,
    /// The revision whose knobs each role should have: written to its config map first, then told to each process. A role
    /// that is not there keeps what it has.
    pub knobs: BTreeMap<Role, String>,
    /// Every workload that should be. One of ours that is not there is removed.
    pub workloads: Vec<WorkloadIntent>,
    /// A completion to run through the routers, once for each value.
    pub probe: Option<ProbeOrder>,
    /// Stored revisions that nobody needs any more.
    pub discard: Vec<String>,
    /// Whether the object keeps its finalizer.
    pub finalizer: bool,
    /// Written last.
    pub status: PDDeploymentStatus,
    /// When to look again, if nothing happens before.
    pub look_again: Option<Timestamp>,
}

/// One workload and the pods that it should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadIntent {
    /// The role.
    pub role: Role,
    /// The role's revision: what the workload is named after. The router's is that of its template.
    pub revision: String,
    /// The stored revision that has its template; none for a workload that exists already and of which only the number of
    /// pods matters.
    pub template: Option<String>,
    /// How many pods.
    pub replicas: i32,
}

/// What routers do with new requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// They go to engines.
    Admit,
    /// They wait in the router until then, and are refused afterwards.
    Queue {
        /// The end of the wait.
        until: Timestamp,
    },
    /// They are refused with 503 and Retry-After.
    Reject,
}

/// A completion to run on these pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProbeOrder {
    /// The revision that is measured.
    pub revision: String,
    /// A hash of the pods that are measured.
    pub pods: String,
    /// It has failed at this time.
    pub deadline: Timestamp,
}
