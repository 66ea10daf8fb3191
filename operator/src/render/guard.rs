//! The admin token, the service accounts with what the router's may do, and how many pods may be evicted at once.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::api::rbac::v1 as rbac;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use k8s_openapi::{ByteString, Resource};
use tandem_crds::Role;

use super::meta::Owner;

/// The key of the admin token in its secret.
pub const TOKEN_KEY: &str = "admin-token";

/// The name of the admin token's secret.
pub fn token_name(owner: &Owner<'_>) -> String {
    owner.child("admin-token")
}

/// The secret of the admin token. It is made once for each deployment and never again: `token` is new random text.
pub fn token(owner: &Owner<'_>, token: &str) -> Secret {
    Secret {
        metadata: owner.meta(token_name(owner), None),
        type_: Some("Opaque".to_owned()),
        data: Some(BTreeMap::from([(
            TOKEN_KEY.to_owned(),
            ByteString(token.as_bytes().to_vec()),
        )])),
        ..Secret::default()
    }
}

/// The name of a role's service account.
pub fn account_name(owner: &Owner<'_>, role: Role) -> String {
    owner.child(role.field())
}

/// The service account of a role: an identity, without any right but the router's [`permission`].
pub fn account(owner: &Owner<'_>, role: Role) -> ServiceAccount {
    ServiceAccount {
        metadata: owner.meta(account_name(owner, role), Some(role)),
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    }
}

/// What a router may do on the API server: see where engines are.
pub fn permission(owner: &Owner<'_>) -> rbac::Role {
    let verbs = ["get", "list", "watch"].map(str::to_owned);
    rbac::Role {
        metadata: owner.meta(account_name(owner, Role::Router), Some(Role::Router)),
        rules: Some(vec![rbac::PolicyRule {
            api_groups: Some(vec![EndpointSlice::GROUP.to_owned()]),
            resources: Some(vec![EndpointSlice::URL_PATH_SEGMENT.to_owned()]),
            verbs: verbs.to_vec(),
            ..rbac::PolicyRule::default()
        }]),
    }
}

/// Gives it to the router's account.
pub fn grant(owner: &Owner<'_>) -> rbac::RoleBinding {
    let name = account_name(owner, Role::Router);
    rbac::RoleBinding {
        metadata: owner.meta(name.clone(), Some(Role::Router)),
        role_ref: rbac::RoleRef {
            api_group: rbac::Role::GROUP.to_owned(),
            kind: rbac::Role::KIND.to_owned(),
            name: name.clone(),
        },
        subjects: Some(vec![rbac::Subject {
            kind: ServiceAccount::KIND.to_owned(),
            name,
            namespace: Some(owner.namespace.to_owned()),
            ..rbac::Subject::default()
        }]),
    }
}

/// At most one pod of a role is evicted at a time; where there is only one, a node can still be drained.
pub fn eviction(owner: &Owner<'_>, role: Role) -> PodDisruptionBudget {
    PodDisruptionBudget {
        metadata: owner.meta(owner.child(role.field()), Some(role)),
        spec: Some(PodDisruptionBudgetSpec {
            max_unavailable: Some(IntOrString::Int(1)),
            selector: Some(owner.selector(role)),
            ..PodDisruptionBudgetSpec::default()
        }),
        ..PodDisruptionBudget::default()
    }
}
