//! The kinds of children, and where the API server has them.

use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::core::ApiResource;
use serde_json::Value;

/// A kind of children.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Stored revisions.
    ControllerRevision,
    /// Knobs, and the order to the routers.
    ConfigMap,
    /// The admin token; only its metadata is watched.
    Secret,
    /// Identities of the pods.
    ServiceAccount,
    /// What the router may read.
    Role,
    /// Who may.
    RoleBinding,
    /// How many pods may be evicted.
    PodDisruptionBudget,
    /// Who reaches whom.
    NetworkPolicy,
    /// Engines of a contract, and the clients' way in.
    Service,
    /// Workloads.
    Deployment,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::ControllerRevision,
        Self::ConfigMap,
        Self::Secret,
        Self::ServiceAccount,
        Self::Role,
        Self::RoleBinding,
        Self::PodDisruptionBudget,
        Self::NetworkPolicy,
        Self::Service,
        Self::Deployment,
    ];

    /// The kind of an object that was rendered; none for one that the operator makes nothing of.
    pub fn of(object: &Value) -> Option<Self> {
        let kind = object["kind"].as_str()?;
        Self::ALL.into_iter().find(|one| one.name() == kind)
    }

    /// As objects name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::ControllerRevision => "ControllerRevision",
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
            Self::ServiceAccount => "ServiceAccount",
            Self::Role => "Role",
            Self::RoleBinding => "RoleBinding",
            Self::PodDisruptionBudget => "PodDisruptionBudget",
            Self::NetworkPolicy => "NetworkPolicy",
            Self::Service => "Service",
            Self::Deployment => "Deployment",
        }
    }

    /// Where the API server has it.
    pub fn resource(self) -> ApiResource {
        match self {
            Self::ControllerRevision => ApiResource::erase::<ControllerRevision>(&()),
            Self::ConfigMap => ApiResource::erase::<ConfigMap>(&()),
            Self::Secret => ApiResource::erase::<Secret>(&()),
            Self::ServiceAccount => ApiResource::erase::<ServiceAccount>(&()),
            Self::Role => ApiResource::erase::<Role>(&()),
            Self::RoleBinding => ApiResource::erase::<RoleBinding>(&()),
            Self::PodDisruptionBudget => ApiResource::erase::<PodDisruptionBudget>(&()),
            Self::NetworkPolicy => ApiResource::erase::<NetworkPolicy>(&()),
            Self::Service => ApiResource::erase::<Service>(&()),
            Self::Deployment => ApiResource::erase::<Deployment>(&()),
        }
    }
}
