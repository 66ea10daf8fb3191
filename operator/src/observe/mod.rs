//! From what the API server and the processes said to what the planner is told. Pure.
//!
//! | module | reads |
//! | --- | --- |
//! | [`pod`] | pods: phase, readiness, and what keeps one from serving |
//! | [`node`] | nodes: reachable or not |
//! | [`workload`] | Deployments, and pods that only they tell of |
//! | [`routing`] | which engines the routers know |
//! | [`revision`] | `ControllerRevision`s: what was stored, and how it is |

pub mod node;
pub mod pod;
pub mod revision;
pub mod routing;
pub mod workload;
