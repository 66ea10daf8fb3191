//! Names, labels and owners.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference};
use tandem_crds::{API_VERSION, KIND, Role};

/// The deployment's name, on each child and pod.
pub const DEPLOYMENT: &str = "tandem.dev/deployment";
/// `prefill`, `decode` or `router`.
pub const ROLE: &str = "tandem.dev/role";
/// The role revision of a pod.
pub const REVISION: &str = "tandem.dev/revision";
/// What an engine's handshake has to agree on: only engines of one contract are ever paired.
pub const CONTRACT: &str = "tandem.dev/contract";
/// The uid of the deployment, on each pod: a pod of an earlier deployment of the same name is none of this one's.
pub const OWNER: &str = "tandem.dev/owner";

/// The object whose children are rendered.
#[derive(Debug, Clone, Copy)]
pub struct Owner<'a> {
    /// At most 40 characters.
    pub name: &'a str,
    /// Its namespace, and that of its children.
    pub namespace: &'a str,
    /// Its uid: a new object of the same name does not own the old one's children.
    pub uid: &'a str,
}

impl Owner<'_> {
    /// The name of a child that there is one of.
    pub fn child(&self, suffix: &str) -> String {
        format!("{}-{suffix}", self.name)
    }

    /// Metadata of a child. A role's children are labelled with it.
    pub fn meta(&self, name: String, role: Option<Role>) -> ObjectMeta {
        ObjectMeta {
            name: Some(name),
            namespace: Some(self.namespace.to_owned()),
            labels: Some(self.labels(role)),
            owner_references: Some(vec![OwnerReference {
                api_version: API_VERSION.to_owned(),
                kind: KIND.to_owned(),
                name: self.name.to_owned(),
                uid: self.uid.to_owned(),
                controller: Some(true),
                block_owner_deletion: Some(true),
            }]),
            ..ObjectMeta::default()
        }
    }

    /// Labels of a child.
    pub fn labels(&self, role: Option<Role>) -> BTreeMap<String, String> {
        let mut labels = self.selecting(role);
        for (key, value) in [
            ("app.kubernetes.io/name", "tandem"),
            ("app.kubernetes.io/instance", self.name),
            ("app.kubernetes.io/managed-by", "tandem-operator"),
        ] {
            labels.insert(key.to_owned(), value.to_owned());
        }
        if let Some(role) = role {
            labels.insert("app.kubernetes.io/component".to_owned(), role.field().to_owned());
        }
        labels
    }

    /// The labels that pods of a role, or all of the deployment's, are found by.
    pub fn selecting(&self, role: Option<Role>) -> BTreeMap<String, String> {
        let mut labels = BTreeMap::from([(DEPLOYMENT.to_owned(), self.name.to_owned())]);
        if let Some(role) = role {
            labels.insert(ROLE.to_owned(), role.field().to_owned());
        }
        labels
    }

    /// A selector of a role's pods.
    pub fn selector(&self, role: Role) -> LabelSelector {
        LabelSelector {
            match_labels: Some(self.selecting(Some(role))),
            ..LabelSelector::default()
        }
    }
}
