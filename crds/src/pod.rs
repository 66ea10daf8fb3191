//! What a manifest may say of a role's pods: an allowlist, not a pod template.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, Toleration};
use kube_derive::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::rules;

/// Where and with what else a role's pods run. On one machine none of it has an effect.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[x_kube(crates(kube_core = "::kube_core"))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Pod {
    /// Labels that a node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub node_selector: BTreeMap<String, String>,
    /// Rules about nodes and other pods, as in a pod's spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// Taints that the pods tolerate, as in a pod's spec. A node that is unreachable is tolerated for 20 s, unless one of these
    /// speaks of that.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub tolerations: Vec<Toleration>,
    /// Further labels of the pods.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    #[x_kube(validation = rules::NOT_OUR_LABELS)]
    pub labels: BTreeMap<String, String>,
    /// Further annotations of the pods.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub annotations: BTreeMap<String, String>,
    /// The pods' priority class. Empty: the cluster's default.
    #[serde(default)]
    #[schemars(length(max = 253))]
    pub priority_class_name: String,
    /// The pods' runtime class, for example `nvidia`. Empty: the cluster's default.
    #[serde(default)]
    #[schemars(length(max = 253))]
    pub runtime_class_name: String,
    /// Secrets in the object's namespace that images are pulled with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub image_pull_secrets: Vec<SecretName>,
    /// Environment variables. None of Tandem's own changes results; these are for what surrounds it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub env: Vec<EnvVar>,
    /// Further volumes, each mounted at one path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub volumes: Vec<Volume>,
}

// k8s-openapi's types have no `Eq` because a few hold floats; those in `Pod` hold none.
impl Eq for Pod {}

/// A secret in the object's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretName {
    /// The secret's name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// One environment variable: a value, or a secret's key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(crates(kube_core = "::kube_core"), validation = rules::ENV_SOURCE)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EnvVar {
    /// The variable's name.
    #[schemars(length(min = 1, max = 128), regex(pattern = rules::ENV_NAME))]
    pub name: String,
    /// Its value.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 4096))]
    pub value: String,
    /// A secret's key that holds the value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_key_ref: Option<SecretKey>,
}

/// A key of a secret in the object's namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretKey {
    /// The secret's name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// The key in it.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// One volume, mounted at one path: exactly one source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[x_kube(crates(kube_core = "::kube_core"), validation = rules::ONE_VOLUME_SOURCE)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Volume {
    /// The volume's name, a DNS label.
    #[schemars(length(min = 1, max = 63), regex(pattern = rules::DNS_LABEL))]
    pub name: String,
    /// Where the container sees it; an absolute path.
    #[schemars(length(min = 2, max = 512), regex(pattern = rules::ABSOLUTE_PATH))]
    pub mount_path: String,
    /// Whether the container may only read it; always so for secrets and config maps.
    #[serde(default)]
    pub read_only: bool,
    /// A secret's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub secret: String,
    /// A config map's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub config_map: String,
    /// A persistent volume claim's name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub claim_name: String,
    /// The size of an empty folder that lives as long as the pod, for example `10Gi`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 32))]
    pub empty_dir_size: String,
}
