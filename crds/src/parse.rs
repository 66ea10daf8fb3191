//! Reading a [`PDDeployment`] from any serde format.

use serde::{Deserialize, Deserializer};

use crate::spec::PDDeployment;
use crate::{API_VERSION, KIND};

/// A field that does not fit the types.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}")]
pub struct FieldError<E: std::error::Error + 'static> {
    /// The field's path, `.` for the whole document.
    pub path: String,
    /// What the format's reader said; it may know the line.
    pub source: E,
}

impl PDDeployment {
    /// Reads the object and nothing else: an unknown field or value is an error that names its path.
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
