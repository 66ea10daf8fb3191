//! The planner: from spec, status and what was observed to what should be. It knows neither Kubernetes nor the clock:
//! `plan(input)` is a function, and what it says is applied by others.
//!
//! | module | holds |
//! | --- | --- |
//! | [`revision`] | a spec with its images resolved, stored once and never changed |
//! | [`world`] | what the planner is told |
//! | [`intents`] | what it answers: the whole state that should be |
//! | `machine` | the steps: Settled → Admit → (Approve) → Quiesce → Apply → Prefill → Decode → Router → Gates → (Approve) → Promote |
//! | `moves` | one role's pods from old revisions to the one that is wanted, within the GPU budget |
//! | `gates` | what has to hold before a change counts as good |
//! | [`health`] | what the processes' own measurements say of the ways between them |
//! | `conditions` | what people are told |
//! | [`rehearsal`] | a change played through in a world without a fault, as text |

mod conditions;
mod gates;
mod hash;
pub mod health;
pub mod intents;
mod machine;
mod moves;
pub mod rehearsal;
pub mod revision;
pub mod world;

pub use intents::{Plan, ProbeOrder, Traffic, WorkloadIntent};
pub use machine::plan;
pub use revision::{DefaultImages, Revision, RoleRevision, target_of};
pub use world::{Clients, Evidence, Handoffs, Input, Pod, Probe, Trouble, Workload, World};
