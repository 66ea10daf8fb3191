//! The types of the API.
//!
//! Integers are signed, as the Kubernetes conventions ask; their bounds are in [`crate::validate`].
//! "Restarts" on a field says what a change of it costs: a role's processes, both engines, or nothing.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A model served with prefill and decode as separate processes behind one router.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PDDeployment {
    /// `tandem.dev/v1alpha1`.
    pub api_version: String,
    /// `PDDeployment`.
    pub kind: String,
    /// Name and namespace.
    pub metadata: Metadata,
    /// What is to run.
    pub spec: PDDeploymentSpec,
}

/// The object's identity.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// A DNS label, at most 63 characters.
    pub name: String,
    /// Where the object lives; on one machine it has no effect. Default: `default`.
    #[serde(default = "crate::defaults::namespace")]
    pub namespace: String,
    /// Labels, kept as they are.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations, kept as they are.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// What is to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PDDeploymentSpec {
    /// The model, the same for both roles.
    pub model: Model,
    /// The shape of the KV cache, the same for both roles.
    #[serde(default)]
    pub kv_cache: KvCache,
    /// The engines that read prompts.
    #[serde(default)]
    pub prefill: EngineRole,
    /// The engines that write answers.
    #[serde(default)]
    pub decode: EngineRole,
    /// The OpenAI-compatible front.
    #[serde(default)]
    pub router: Router,
    /// The hand-off from prefill to decode.
    #[serde(default)]
    pub transfer: Transfer,
    /// Every deadline.
    #[serde(default)]
    pub timeouts: Timeouts,
}

/// The model to serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Model {
    /// What `/v1/models` shows and requests name; 1 to 128 characters without spaces. Restarts all roles.
    pub name: String,
    /// Where the model's file or folder lies. Restarts all roles.
    pub source: ModelSource,
    /// The SHA-256 of the model's file in lower-case hex, or for a folder that of what `LC_ALL=C sha256sum *` prints in it, compared
    /// with the bytes found. Empty: not compared.
    /// Default: empty. Restarts all roles.
    #[serde(default)]
    pub revision: String,
    /// Prompt plus answer, in tokens; at most what the model's config allows. Default: what the config allows.
    /// Restarts both engines and the router.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_length_tokens: Option<i32>,
}

/// Where a model's file or folder lies: exactly one source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelSource {
    /// A file or folder in a persistent volume claim. On one machine a claim is a folder.
    pub pvc: PvcSource,
}

/// A file or folder in a persistent volume claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PvcSource {
    /// The claim's name, a DNS label.
    pub claim_name: String,
    /// A .gguf file, or a folder with `config.json`, `tokenizer.json` and safetensors files: relative to the claim, without `..`.
    pub path: String,
}

/// The shape of the KV cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct KvCache {
    /// Tokens per page: a power of two. Default: 16. Restarts both engines.
    pub page_tokens: i32,
}

/// One engine role: prefill or decode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct EngineRole {
    /// Processes of this role; zero for both roles or for none. Default: 1. Restarts nothing.
    pub replicas: i32,
    /// What computes. Default: `Auto`. Restarts the role.
    pub backend: Backend,
    /// How one process splits the model.
    pub parallelism: Parallelism,
    /// What tunes speed and not results.
    pub knobs: EngineKnobs,
}

/// What computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backend {
    /// The best that the machine has.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
}

/// How one process splits the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parallelism {
    /// Parts of every layer, computed together; divides the model's KV heads. Default: 1. Restarts the role.
    pub tensor: i32,
}

/// What tunes an engine's speed and not its results.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct EngineKnobs {
    /// The most prompt tokens that one step computes. Default: 128. Hot.
    pub chunked_prefill_tokens: i32,
    /// The most requests that one step runs. Default: 32. Hot.
    pub max_running: i32,
    /// Whether computed prompt pages are kept for later prompts.
    pub prefix_cache: PrefixCache,
}

/// The prefix cache.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PrefixCache {
    /// Default: `Enabled`. Hot.
    pub mode: PrefixCacheMode,
}

/// Whether computed prompt pages are kept for later prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PrefixCacheMode {
    /// Kept until their room is needed.
    #[default]
    Enabled,
    /// Dropped when the request ends.
    Disabled,
}

/// The OpenAI-compatible front.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Router {
    /// How a prefill and a decode are chosen. Default: `LeastLoaded`. Hot.
    pub policy: RouterPolicy,
    /// The secret whose `api-keys` clients need one of; on one machine a folder. Empty: everybody may use the API.
    /// Default: empty. Restarts the router.
    pub api_keys_secret_name: String,
}

/// How engines are chosen for a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RouterPolicy {
    /// Each in turn.
    RoundRobin,
    /// The less loaded of two, by the load that the engines report.
    #[default]
    LeastLoaded,
}

/// The hand-off from prefill to decode.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Transfer {
    /// What happens to a request whose prefill failed before the first token. Default: `Retry`. Hot.
    pub on_prefill_failure: OnPrefillFailure,
}

/// What happens to a request whose prefill failed before the first token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Timeouts {
    /// A request waits at most this long for an engine. Default: 60. Hot.
    pub queue_seconds: i32,
    /// Decode and prefill find each other within this. Default: 30. Hot.
    pub rendezvous_seconds: i32,
    /// Prefill reports progress at least this often. Default: 30. Hot.
    pub progress_seconds: i32,
    /// A transfer without a new byte for this long has stalled. Default: 10. Hot.
    pub stall_seconds: i32,
    /// The watchdog ends what has not moved for this long, whoever should have ended it. Default: 60. Hot.
    pub inflight_watchdog_seconds: i32,
    /// Prefill keeps a request's KV this long without a sign from decode. Default: 30. Hot.
    pub lease_seconds: i32,
    /// A process that is asked to stop finishes its requests within this. Default: 90. Restarts all roles.
    pub drain_seconds: i32,
    /// A process is ready within this. Default: 1200. Restarts all roles.
    pub startup_seconds: i32,
    /// One request, from acceptance to its last token. Default: 1800. Hot.
    pub request_seconds: i32,
}
