//! An engine role: prefill or decode.

use std::collections::BTreeMap;

use kube_derive::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{pod::Pod, rules};

/// One engine role: prefill or decode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct EngineRole {
    /// Processes of this role; zero for both roles or for none.
    #[schemars(range(min = 0, max = 64))]
    pub replicas: i32,
    /// What computes.
    pub backend: Backend,
    /// GPUs that one process holds.
    #[schemars(range(min = 0, max = 64))]
    pub gpus_per_replica: i32,
    /// How one process splits the model.
    pub parallelism: Parallelism,
    /// The engine's image. Empty: the operator's default when the revision is admitted.
    #[schemars(length(max = 512), regex(pattern = rules::NO_SPACES))]
    pub image: String,
    /// What tunes speed and not results.
    pub knobs: EngineKnobs,
    /// CPU and memory of one pod; GPUs are `gpusPerReplica`.
    pub resources: Resources,
    /// Where and with what else the pods run.
    pub pod: Pod,
}

/// What computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Backend {
    /// The best that the machine has; never the CPU for a process that holds GPUs.
    #[default]
    Auto,
    /// The CPU, whatever GPUs the process holds.
    Cpu,
}

/// How one process splits the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parallelism {
    /// Parts of every layer, computed together; divides the model's KV heads.
    #[schemars(range(min = 1, max = 64))]
    pub tensor: i32,
}

/// What tunes an engine's speed and not its results.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct EngineKnobs {
    /// The most prompt tokens that one step computes.
    #[schemars(range(min = 1, max = 65_536))]
    pub chunked_prefill_tokens: i32,
    /// The most requests that one step runs.
    #[schemars(range(min = 1, max = 4096))]
    pub max_running: i32,
    /// Whether computed prompt pages are kept for later prompts.
    pub prefix_cache: PrefixCache,
}

/// The prefix cache.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PrefixCache {
    /// Whether computed prompt pages are kept until their room is needed, or dropped when the request ends.
    pub mode: PrefixCacheMode,
}

/// Whether computed prompt pages are kept for later prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PrefixCacheMode {
    /// Kept until their room is needed.
    #[default]
    Enabled,
    /// Dropped when the request ends.
    Disabled,
}

/// CPU and memory of one pod, as Kubernetes quantities.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = rules::REQUESTED_RESOURCES,
    validation = rules::LIMITED_RESOURCES
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Resources {
    /// What a node must have free: `cpu`, `memory` and `ephemeral-storage`, for example `{cpu: "4", memory: 16Gi}`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 8))]
    pub requests: BTreeMap<String, Quantity>,
    /// What the pod may not exceed: `cpu`, `memory` and `ephemeral-storage`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 8))]
    pub limits: BTreeMap<String, Quantity>,
}

/// A Kubernetes quantity, for example `500m`, `4` or `16Gi`, written as a string.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Quantity(
    /// The quantity as written.
    #[schemars(length(min = 1, max = 32), regex(pattern = rules::QUANTITY))]
    pub String,
);
