//! The operator: runs `PDDeployment`s on Kubernetes.
//!
//! - [`render`]: from a spec to Kubernetes objects. Pure.
//! - [`apply`]: whether an object in the cluster is what was rendered. Pure.

pub mod apply;
pub mod render;
