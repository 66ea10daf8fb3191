//! The admin token, the service accounts, and how many pods may be evicted at once.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
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

/// The service account of a role: an identity without any right.
pub fn account(owner: &Owner<'_>, role: Role) -> ServiceAccount {
    ServiceAccount {
        metadata: owner.meta(account_name(owner, role), Some(role)),
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
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
