//! `spec`: what is to run.
//!
//! A field's comment says its meaning and unit. Its default and what a change of it restarts are added to the schema
//! from the types' defaults and from [`crate::class`], so that `kubectl explain` cannot say otherwise.
//! Integers are signed, as the Kubernetes conventions ask.

use kube_derive::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::role::{EngineRole, Resources};
use crate::rollout::{Restart, Rollout};
use crate::status::PDDeploymentStatus;
use crate::{pod::Pod, rules};

/// What is to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[kube(
    group = "tandem.dev",
    version = "v1alpha1",
    kind = "PDDeployment",
    plural = "pddeployments",
    shortname = "pdd",
    category = "all",
    namespaced,
    status = "PDDeploymentStatus",
    derive = "PartialEq",
    annotation("helm.sh/resource-policy", "keep"),
    doc = "A model served with prefill and decode as separate processes behind one router.",
    validation = rules::NAME,
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Prefill", type_ = "string", json_path = ".status.roles[?(@.name==\"Prefill\")].serving"),
    printcolumn(name = "Decode", type_ = "string", json_path = ".status.roles[?(@.name==\"Decode\")].serving"),
    printcolumn(name = "Router", type_ = "string", json_path = ".status.roles[?(@.name==\"Router\")].serving"),
    printcolumn(name = "Step", type_ = "string", json_path = ".status.step"),
    printcolumn(name = "Revision", type_ = "string", json_path = ".status.revisions.running"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Reason", type_ = "string", priority = 1, json_path = ".status.conditions[?(@.type==\"Ready\")].reason"),
    printcolumn(name = "LastGood", type_ = "string", priority = 1, json_path = ".status.revisions.lastGood"),
    attr = "x_kube(crates(kube_core = \"::kube_core\"))",
    crates(kube = "::kube_derive", kube_core = "::kube_core")
)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = rules::BOTH_OR_NEITHER,
    validation = rules::GPU_BUDGET,
    validation = rules::RESTART_QUEUE,
    validation = rules::PROGRESS_DEADLINE
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PDDeploymentSpec {
    /// The model, the same for both roles.
    pub model: Model,
    /// The shape of the KV cache, the same for both roles.
    #[serde(default)]
    #[x_kube(validation = rules::PAGE_TOKENS)]
    pub kv_cache: KvCache,
    /// The GPUs that prefill and decode share.
    #[serde(default)]
    pub gpus: Gpus,
    /// The engines that read prompts.
    #[serde(default)]
    #[x_kube(validation = rules::TENSOR_DIVIDES, validation = rules::GPUS_NEED_BACKEND)]
    pub prefill: EngineRole,
    /// The engines that write answers.
    #[serde(default)]
    #[x_kube(validation = rules::TENSOR_DIVIDES, validation = rules::GPUS_NEED_BACKEND)]
    pub decode: EngineRole,
    /// The OpenAI-compatible front.
    #[serde(default)]
    pub router: Router,
    /// The hand-off from prefill to decode.
    #[serde(default)]
    pub transfer: Transfer,
    /// Every deadline, in seconds.
    #[serde(default)]
    #[x_kube(validation = rules::STALL_BELOW_WATCHDOG, validation = rules::WATCHDOG_BELOW_DRAIN)]
    pub timeouts: Timeouts,
    /// How a change is carried out.
    #[serde(default)]
    pub rollout: Rollout,
    /// Asks for a restart without a change.
    #[serde(default)]
    pub restart: Restart,
    /// How many entries of `status.history`, and how many revisions that nothing runs, are kept.
    #[serde(default = "crate::defaults::history_limit")]
    #[schemars(range(min = 1, max = 100))]
    pub history_limit: i32,
}

/// The model to serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(crates(kube_core = "::kube_core"))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Model {
    /// What `/v1/models` shows and requests name; without spaces.
    #[schemars(length(min = 1, max = 128))]
    #[x_kube(validation = rules::MODEL_NAME)]
    pub name: String,
    /// Where the model's file or folder lies.
    pub source: ModelSource,
    /// The SHA-256 of the model's file in lower-case hex, or for a folder that of what `LC_ALL=C sha256sum *` prints in
    /// it, compared with the bytes found. Empty: not compared.
    #[serde(default)]
    #[schemars(length(max = 64))]
    #[x_kube(validation = rules::MODEL_REVISION)]
    pub revision: String,
    /// Prompt plus answer, in tokens; at most what the model's config allows. Unset: what the config allows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 16_777_216))]
    pub max_length_tokens: Option<i32>,
}

/// Where a model's file or folder lies: exactly one source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelSource {
    /// A file or folder in a persistent volume claim. On one machine a claim is a folder.
    pub pvc: PvcSource,
}

/// A file or folder in a persistent volume claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(crates(kube_core = "::kube_core"))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PvcSource {
    /// The claim's name, a DNS label.
    #[schemars(length(min = 1, max = 63), regex(pattern = rules::DNS_LABEL))]
    pub claim_name: String,
    /// A .gguf file, or a folder with `config.json`, `tokenizer.json` and safetensors files: relative to the claim,
    /// without `..`.
    #[schemars(length(min = 1, max = 1024))]
    #[x_kube(validation = rules::INSIDE_CLAIM)]
    pub path: String,
}

/// The shape of the KV cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct KvCache {
    /// Tokens per page: a power of two.
    #[schemars(range(min = 8, max = 256))]
    pub page_tokens: i32,
}

/// The GPUs that prefill and decode share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Gpus {
    /// The most GPUs that prefill and decode hold together, also while a change is under way.
    #[schemars(range(min = 0, max = 8192))]
    pub budget: i32,
    /// The resource that a node offers its GPUs as.
    #[schemars(length(min = 3, max = 128), regex(pattern = rules::RESOURCE_NAME))]
    pub resource_name: String,
}

/// The OpenAI-compatible front.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Router {
    /// Router pods. On one machine one process serves whatever is written here.
    #[schemars(range(min = 1, max = 16))]
    pub replicas: i32,
    /// How a prefill and a decode are chosen.
    pub policy: RouterPolicy,
    /// The Service that clients reach the routers by.
    pub service: Service,
    /// The secret whose key `api-keys` has the keys that clients need one of, one on each line; on one machine a folder
    /// with a file of that name. Empty: everybody may use the API.
    #[schemars(length(max = 63), regex(pattern = rules::DNS_LABEL_OR_EMPTY))]
    pub api_keys_secret_name: String,
    /// The router's image. Empty: the operator's default when the revision is admitted.
    #[schemars(length(max = 512), regex(pattern = rules::NO_SPACES))]
    pub image: String,
    /// CPU and memory of one pod.
    pub resources: Resources,
    /// Where and with what else the pods run.
    pub pod: Pod,
}

/// How engines are chosen for a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RouterPolicy {
    /// Each in turn.
    RoundRobin,
    /// The less loaded of two, by the load that the engines report.
    #[default]
    LeastLoaded,
}

/// The Service that clients reach the routers by.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Service {
    /// Who can reach it: `ClusterIP` the cluster, `NodePort` and `LoadBalancer` others too.
    #[serde(rename = "type")]
    pub type_: ServiceType,
}

/// Who can reach a Service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ServiceType {
    /// Pods of the cluster.
    #[default]
    #[serde(rename = "ClusterIP")]
    ClusterIp,
    /// Whoever reaches a node.
    NodePort,
    /// Whoever reaches the load balancer that the cluster sets up.
    LoadBalancer,
}

/// The hand-off from prefill to decode.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Transfer {
    /// What happens to a request whose prefill failed before the first token.
    pub on_prefill_failure: OnPrefillFailure,
}

/// What happens to a request whose prefill failed before the first token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnPrefillFailure {
    /// Another prefill reads the prompt.
    #[default]
    Retry,
    /// Decode reads the prompt itself.
    Recompute,
    /// The client gets the error.
    Fail,
}

/// Every deadline, in seconds. Stall < in-flight watchdog < drain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Timeouts {
    /// A request waits at most this long for an engine, in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub queue_seconds: i32,
    /// While a role restarts, a request waits at most this long in the router instead, in seconds.
    #[schemars(range(min = 1, max = 604_800))]
    pub restart_queue_seconds: i32,
    /// Decode and prefill find each other within this, in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub rendezvous_seconds: i32,
    /// Prefill reports progress at least this often, in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub progress_seconds: i32,
    /// A transfer without a new byte for this long has stalled, in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub stall_seconds: i32,
    /// The watchdog ends what has not moved for this long, whoever should have ended it; in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub inflight_watchdog_seconds: i32,
    /// Prefill keeps a request's KV this long without a sign from decode, in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub lease_seconds: i32,
    /// A process that is asked to stop finishes its requests within this, in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub drain_seconds: i32,
    /// A process is ready within this, in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub startup_seconds: i32,
    /// One request, from acceptance to its last token, in seconds.
    #[schemars(range(min = 1, max = 86_400))]
    pub request_seconds: i32,
}
