//! The operator: runs `PDDeployment`s on Kubernetes.
//!
//! | module | does |
//! | --- | --- |
//! | [`config`] | the flags |
//! | [`cluster`] | speaks to the API server: watches, writes, the lease, events |
//! | [`observe`] | from what the API server said to what the planner is told. Pure |
//! | [`peers`] | speaks to engines and routers |
//! | [`reconcile`] | one deployment at a time: observe, plan, carry out, write down |
//! | [`render`] | from a spec to Kubernetes objects. Pure |
//! | [`apply`] | whether an object in the cluster is what was rendered. Pure |
//! | [`queue`] | which deployment is looked at next |
//! | [`metrics`] | `tandem_operator_*` |
//! | [`operator`] | all of it, started and stopped |

pub mod apply;
pub mod cluster;
pub mod config;
pub mod metrics;
pub mod observe;
pub mod operator;
pub mod peers;
pub mod queue;
pub mod reconcile;
pub mod render;
