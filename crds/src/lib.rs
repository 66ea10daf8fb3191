//! `PDDeployment` (`tandem.dev/v1alpha1`): one manifest, the same types on a cluster and on one machine.
//!
//! The API offers only what works: a field or value whose mechanism does not exist yet is not in these types, and is
//! refused by name. Nothing here does I/O.
//!
//! - [`spec`], [`role`], [`pod`], [`rollout`]: what a person writes, each field with its unit.
//! - [`status`]: what the operator observed and has to remember.
//! - [`defaults`]: every default, in one place.
//! - [`rules`]: what no single type can hold, in CEL with a message; [`validate`] applies it to a file.
//! - [`class`]: what a change of each field costs, one table.
//! - [`inputs`]: a spec's inputs, and the hashes and differences of them.
//! - [`schema`]: the `CustomResourceDefinition`; it lies beside this crate as YAML.
//! - [`manifest`]: an object in a file, with errors that name the field's path.

pub mod class;
pub mod defaults;
pub mod inputs;
pub mod manifest;
pub mod pod;
pub mod role;
pub mod rollout;
pub mod rules;
pub mod schema;
pub mod spec;
pub mod status;
pub mod validate;

pub use class::{Class, class};
pub use inputs::{Inputs, Knobs};
pub use manifest::{FieldError, Manifest, Metadata, TypeMeta};
pub use pod::Pod;
pub use role::{Backend, EngineKnobs, EngineRole, Parallelism, PrefixCache, PrefixCacheMode, Resources};
pub use rollout::{
    Approval, GateMode, Gates, OnFailure, Restart, RestartRoles, RestartScope, Rollout, TrafficDuringRestart,
};
pub use schema::crd;
pub use spec::{
    Gpus, KvCache, Model, ModelSource, OnPrefillFailure, PDDeployment, PDDeploymentSpec, PvcSource, Router,
    RouterPolicy, Timeouts, Transfer,
};
pub use status::{PDDeploymentStatus, Role};
pub use validate::Violation;

/// The API group and version of these types.
pub const API_VERSION: &str = "tandem.dev/v1alpha1";
/// The kind of these types.
pub const KIND: &str = "PDDeployment";
