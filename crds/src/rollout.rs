//! How a change is carried out, and how a restart is asked for.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a change is carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Rollout {
    /// Leaves everything that runs as it is; status goes on.
    pub paused: bool,
    /// Which roles a change restarts.
    pub restart_scope: RestartScope,
    /// Whether a change waits for a person.
    pub approval: Approval,
    /// The target's hash, as `status.rollout.target` and `tandem plan` name it: the change that is approved, before or
    /// while it waits.
    #[schemars(length(max = 64))]
    pub approved_revision: String,
    /// What happens to new requests while a role cannot serve.
    pub traffic_during_restart: TrafficDuringRestart,
    /// A change that is not done within this has failed, in seconds; waiting for a person does not count.
    #[schemars(range(min = 1, max = 2_592_000))]
    pub progress_deadline_seconds: i32,
    /// What happens after a failure.
    pub on_failure: OnFailure,
    /// What has to hold before a change counts as good.
    pub gates: Gates,
}

/// Which roles a change restarts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RestartScope {
    /// Those whose inputs changed.
    #[default]
    Auto,
    /// All, as soon as one has to.
    Full,
}

/// Whether a change waits for a person, who writes its hash to `approvedRevision`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Approval {
    /// It does not.
    #[default]
    Automatic,
    /// Before the first process is stopped.
    BeforeRestart,
    /// After the gates, before it counts as good.
    BeforePromote,
}

/// What happens to new requests while a role cannot serve.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TrafficDuringRestart {
    /// They wait in the router, at most `timeouts.restartQueueSeconds`.
    #[default]
    Queue,
    /// They are refused with 503 and Retry-After.
    Reject,
}

/// What happens after a failure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnFailure {
    /// The last good revision comes back, as it was.
    #[default]
    Revert,
    /// Everything stays as it is until the spec changes.
    Hold,
}

/// What has to hold before a change counts as good.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Gates {
    /// All processes are ready and run the knobs that they should.
    pub health: HealthGate,
    /// A real completion goes through router, prefill and decode, and its KV crosses between them.
    pub probe: ProbeGate,
}

/// All processes are ready and run the knobs that they should.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct HealthGate {
    /// What a failure of the gate means.
    pub mode: GateMode,
    /// It has failed if it does not hold within this, in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub timeout_seconds: i32,
}

/// A real completion through all roles.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ProbeGate {
    /// What a failure of the gate means.
    pub mode: GateMode,
    /// It has failed if it has no answer within this, in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub timeout_seconds: i32,
}

/// What a failure of a gate means.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum GateMode {
    /// The change has failed.
    #[default]
    Enforce,
    /// It is written down, and the change goes on.
    Recommend,
    /// Nothing: the gate is not looked at.
    Off,
}

/// Asks for a restart without a change.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Restart {
    /// Another value than before asks for one restart; any text, such as a date. The first value of a new object asks
    /// for none.
    #[schemars(length(max = 64))]
    pub token: String,
    /// Which roles restart.
    pub scope: RestartRoles,
}

/// Which roles a restart token restarts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RestartRoles {
    /// The roles whose default image changed, else all.
    #[default]
    Auto,
    /// All.
    Full,
    /// Decode.
    DecodeOnly,
}
