//! `status`: what was observed, and what the planner must remember from one pass to the next.
//!
//! Unlike the spec's types these accept unknown fields: another version of the operator may have written them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube_derive::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The types of the conditions.
pub const CONDITIONS: [&str; 8] = [
    "Ready",
    "Available",
    "Progressing",
    "Stalled",
    "KnobsLive",
    "CapacitySatisfied",
    "TransferHealthy",
    "ClientPathHealthy",
];

/// What was observed, with the generation that was planned on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[x_kube(crates(kube_core = "::kube_core"))]
#[serde(rename_all = "camelCase")]
pub struct PDDeploymentStatus {
    /// The generation of the spec that the rest of the status is about.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub observed_generation: i64,
    /// The step that the machine is at.
    #[serde(default)]
    pub step: Step,
    /// Ready, Available, Progressing, TransferHealthy, KnobsLive, CapacitySatisfied, ClientPathHealthy and Stalled.
    #[serde(default)]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
    /// What runs of each role.
    #[serde(default)]
    #[schemars(length(max = 3))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub roles: Vec<RoleStatus>,
    /// Which revisions run and are wanted.
    #[serde(default)]
    pub revisions: Revisions,
    /// The change under way, or the one that is held; absent when settled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<RolloutStatus>,
    /// What the gates found, each for one revision and one set of pods.
    #[serde(default)]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub gates: Vec<GateRecord>,
    /// The restart token that was last acted on; absent before the first pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub restart_token: Option<String>,
    /// Changes that ended, newest first; at most `historyLimit`.
    #[serde(default)]
    #[schemars(length(max = 100))]
    pub history: Vec<HistoryEntry>,
}

/// A role of the processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Role {
    /// Reads prompts.
    Prefill,
    /// Writes answers.
    Decode,
    /// Speaks to clients.
    Router,
}

impl Role {
    /// In the order in which they are restarted.
    pub const ALL: [Self; 3] = [Self::Prefill, Self::Decode, Self::Router];

    /// As in the spec: `prefill`.
    pub fn field(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Router => "router",
        }
    }
}

/// A step of the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Step {
    /// Nothing to do.
    #[default]
    Settled,
    /// The target is stored, with its images resolved.
    Admit,
    /// Waits for a person.
    Approve,
    /// New requests wait in the router, running ones end.
    Quiesce,
    /// Knobs are applied to running processes.
    Apply,
    /// Prefill moves to the target.
    Prefill,
    /// Decode moves to the target.
    Decode,
    /// The router moves to the target.
    Router,
    /// The target is measured.
    Gates,
    /// The target is about to count as good.
    Promote,
    /// The object is being deleted: running requests end.
    Delete,
}

/// What runs of one role.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleStatus {
    /// The role.
    pub name: Role,
    /// What its processes say that they compute with; empty before the first says so, and for the router.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub backend: String,
    /// Pods that should run.
    pub desired: i32,
    /// Pods that serve, of whatever revision.
    pub ready: i32,
    /// `ready/desired`, for people.
    #[serde(default)]
    #[schemars(length(max = 16))]
    pub serving: String,
    /// Pods on nodes that are unreachable or gone.
    #[serde(default)]
    pub lost: i32,
    /// The revision of the role that should run now.
    #[serde(default)]
    #[schemars(length(max = 64))]
    pub revision: String,
    /// GPUs that its pods hold, those of terminating pods included and those of lost ones not.
    #[serde(default)]
    pub gpus: i32,
}

/// Which revisions run and are wanted, as `TARGET-VARIANT`: the hash of the spec's inputs, and a short one of the images
/// and restarts that were resolved for it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Revisions {
    /// The one last promoted or reverted to; empty before the first.
    #[schemars(length(max = 64))]
    pub running: String,
    /// The one that the spec asks for.
    #[schemars(length(max = 64))]
    pub target: String,
    /// The one last promoted: what a revert goes back to.
    #[schemars(length(max = 64))]
    pub last_good: String,
    /// The target that failed; not tried again until the spec changes or a restart is asked for. Else empty.
    #[schemars(length(max = 64))]
    pub rejected: String,
    /// What the handshake of the running revision has to agree on, as far as the spec says it.
    #[schemars(length(max = 64))]
    pub contract: String,
}

/// A change under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutStatus {
    /// The revision that is wanted; its part before the last `-` is what `rollout.approvedRevision` approves.
    #[schemars(length(max = 64))]
    pub target: String,
    /// Attempts at this target, this one included.
    pub attempt: i32,
    /// The roles whose pods are replaced.
    #[schemars(length(max = 3))]
    pub restarts: Vec<Role>,
    /// Whether it goes to the target or back.
    pub direction: Direction,
    /// The step that it is at.
    pub step: Step,
    /// When it began.
    pub started_at: Time,
    /// When the step began.
    pub step_started_at: Time,
    /// When the change has failed.
    pub deadline: Time,
    /// Since when its clock stands, because it is paused or waits for a person.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_at: Option<Time>,
    /// Why it failed; empty while it has not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub failure: String,
}

/// Where a change goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Direction {
    /// To the target.
    #[default]
    Forward,
    /// Back to the last good revision, after a failure.
    Revert,
    /// Nowhere: it failed, and everything stays as it is.
    Held,
}

/// A gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum Gate {
    /// All processes are ready and run the knobs that they should.
    Health,
    /// A real completion goes through all roles.
    Probe,
}

/// What a gate found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GateRecord {
    /// The gate.
    pub name: Gate,
    /// The revision that it looked at.
    #[schemars(length(max = 64))]
    pub revision: String,
    /// A hash of the pods that it looked at; other pods need another look.
    #[schemars(length(max = 64))]
    pub pods: String,
    /// When it began.
    pub started_at: Time,
    /// What it found; absent while it looks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<GateOutcome>,
    /// What was measured, or what failed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub message: String,
}

/// What a gate found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GateOutcome {
    /// It holds.
    Passed,
    /// It does not.
    Failed,
}

/// A change that ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HistoryEntry {
    /// The revision that was wanted.
    #[schemars(length(max = 64))]
    pub revision: String,
    /// How it ended.
    pub outcome: Outcome,
    /// What differed from the revision that ran before; at most 64 fields.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub changed: Vec<Change>,
    /// The roles whose pods were to be replaced; a hot knob replaces none.
    #[serde(default)]
    #[schemars(length(max = 3))]
    pub restarted: Vec<Role>,
    /// When it began.
    pub started_at: Time,
    /// When it ended.
    pub ended_at: Time,
    /// Why it failed; empty where it did not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    pub failure: String,
}

/// How a change ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Outcome {
    /// It is what runs.
    Promoted,
    /// It failed, and the last good revision runs again.
    Reverted,
    /// It failed, and everything stayed as it was.
    Held,
    /// Another change came before its end.
    Superseded,
}

/// One field that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Change {
    /// The field, for example `decode.knobs.maxRunning`.
    #[schemars(length(max = 256))]
    pub path: String,
    /// Its value before, cut off after 256 characters.
    #[schemars(length(max = 260))]
    pub from: String,
    /// Its value now, cut off after 256 characters.
    #[schemars(length(max = 260))]
    pub to: String,
}
