//! From a spec to Kubernetes objects. Pure: the same spec gives the same bytes, whoever asks and when.
//!
//! | room | renders |
//! | --- | --- |
//! | [`meta`] | names, labels and owners |
//! | [`knobs`] | the config map that a role's processes read their knobs from when they start |
//! | [`engine`] | the pod template and Deployment of prefill and decode |
//! | [`router`] | the router's |
//! | [`pod`] | what all pods have in common |
//! | [`network`] | Services, and who may reach whom |
//! | [`guard`] | the admin token, the service accounts and their rights, and how many pods may be evicted at once |

pub mod engine;
pub mod guard;
pub mod knobs;
pub mod meta;
pub mod network;
pub mod pod;
pub mod router;

use serde::Serialize;
use serde_json::Value;
use tandem_crds::{PDDeploymentSpec, Role};

use meta::Owner;

/// What stands around the workloads and follows from the spec alone: accounts, evictions, who reaches whom, and the Service
/// for clients.
pub fn around(owner: &Owner<'_>, spec: &PDDeploymentSpec, reach: &network::Reach) -> Vec<Value> {
    let mut children = vec![
        json(network::front(owner, spec)),
        json(guard::permission(owner)),
        json(guard::grant(owner)),
    ];
    for role in Role::ALL {
        children.push(json(guard::account(owner, role)));
        children.push(json(guard::eviction(owner, role)));
        children.push(json(network::policy(owner, reach, role)));
    }
    children
}

/// An object as it is sent.
pub fn json(object: impl Serialize) -> Value {
    #[expect(
        clippy::expect_used,
        reason = "Kubernetes' types have string keys only and no float, so that nothing can fail"
    )]
    serde_json::to_value(object).expect("an object is JSON")
}

/// Ports of the pods: the same in each, so that a policy can name them.
pub mod ports {
    /// Engines: Generate, GetInfo, KvTransfer.Prefill.
    pub const CONTROL: u16 = 7101;
    /// All: `/metrics`, `/livez`, `/readyz`.
    pub const OPS: u16 = 7102;
    /// Prefill: KvTransfer.Fetch.
    pub const DATA: u16 = 7103;
    /// All: what changes a process, behind the token.
    pub const ADMIN: u16 = 7104;
    /// Router: the OpenAI API.
    pub const HTTP: u16 = 8080;
}
