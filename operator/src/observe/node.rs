//! Nodes: reachable or not.

use k8s_openapi::api::core::v1::Node;

/// What a pass needs to know of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeFacts {
    /// Its kubelet is heard of, whether it calls the node ready or not.
    pub reachable: bool,
}

/// The facts of a node. One that has said nothing yet is there.
pub fn facts(node: &Node) -> NodeFacts {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let unknown = conditions
        .into_iter()
        .any(|one| one.type_ == "Ready" && one.status == "Unknown");
    NodeFacts { reachable: !unknown }
}
