//! A [`PDDeployment`] in a file: its type, its name and its spec, and nothing else.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::spec::{PDDeployment, PDDeploymentSpec};
use crate::{API_VERSION, KIND};

/// What a person writes. An object read from a cluster has more metadata and a status: [`PDDeployment`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Manifest {
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
    /// 1 to 40 of a-z, 0-9 and -.
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

/// A field that does not fit the types.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}")]
pub struct FieldError<E: std::error::Error + 'static> {
    /// The field's path, `.` for the whole document.
    pub path: String,
    /// What the format's reader said; it may know the line.
    pub source: E,
}

impl Manifest {
    /// Reads the object and nothing else, from any serde format: an unknown field or value is an error that names its
    /// path.
    pub fn read<'de, D>(deserializer: D) -> Result<Self, FieldError<D::Error>>
    where
        D: Deserializer<'de>,
        D::Error: std::error::Error + 'static,
    {
        serde_path_to_error::deserialize(deserializer).map_err(|error| FieldError {
            path: error.path().to_string(),
            source: error.into_inner(),
        })
    }
}

impl From<Manifest> for PDDeployment {
    fn from(manifest: Manifest) -> Self {
        let mut object = Self::new(&manifest.metadata.name, manifest.spec);
        object.metadata.namespace = Some(manifest.metadata.namespace);
        let given = |map: BTreeMap<_, _>| (!map.is_empty()).then_some(map);
        object.metadata.labels = given(manifest.metadata.labels);
        object.metadata.annotations = given(manifest.metadata.annotations);
        object
    }
}

/// An object's type, readable from any Kubernetes object: looked at first, so that another kind of object is named as
/// such and not by its first unknown field.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TypeMeta {
    /// For example `apps/v1`.
    pub api_version: String,
    /// For example `Deployment`.
    pub kind: String,
}

impl TypeMeta {
    /// What is wrong with the type, if anything.
    pub fn check(&self) -> Result<(), String> {
        if self.kind != KIND {
            return Err(format!(
                "kind: {:?} is not {KIND:?}: this command reads one {KIND}",
                self.kind
            ));
        }
        if self.api_version != API_VERSION {
            return Err(format!(
                "apiVersion: {:?} is not known: write {API_VERSION}",
                self.api_version
            ));
        }
        Ok(())
    }
}
