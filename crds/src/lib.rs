//! `PDDeployment` (`tandem.dev/v1alpha1`): one manifest, the same types on a cluster and on one machine.
//!
//! The API offers only what works: a field or value whose mechanism does not exist yet is not in these types, and is
//! refused by name. Nothing here does I/O.
//!
//! - [`spec`]: the types, each field with its unit, its default and what a change of it restarts.
//! - [`defaults`]: every default, in one place.
//! - [`validate`]: the rules that no single type can hold.
//! - [`parse`]: from any serde format, with errors that name the field's path.

pub mod defaults;
pub mod parse;
pub mod spec;
pub mod validate;

pub use parse::{FieldError, TypeMeta};
pub use spec::{
    Backend, EngineKnobs, EngineRole, KvCache, Metadata, Model, ModelSource, OnPrefillFailure, PDDeployment,
    PDDeploymentSpec, PrefixCache, PrefixCacheMode, PvcSource, Router, RouterPolicy, Timeouts, Transfer,
};
pub use validate::Violation;

/// The API group and version of these types.
pub const API_VERSION: &str = "tandem.dev/v1alpha1";
/// The kind of these types.
pub const KIND: &str = "PDDeployment";
