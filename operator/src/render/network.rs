//! Services, and who may reach whom.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tandem_crds::spec::ServiceType;
use tandem_crds::{PDDeploymentSpec, Role};

use super::meta::{CONTRACT, Owner};
use super::ports::{ADMIN, CONTROL, DATA, HTTP, OPS};

/// Each namespace has its name as this label.
const NAMESPACE: &str = "kubernetes.io/metadata.name";

/// The name of the Service of a role's engines of one contract.
pub fn engines_name(owner: &Owner<'_>, role: Role, contract: &str) -> String {
    // `k-3e90…` is unique with the first letter of the role, and the name stays a DNS label.
    owner.child(&format!("{}{contract}", &role.field()[..1]))
}

/// Finds a role's ready engines of one contract. It has no address of its own: each engine is known by itself.
pub fn engines(owner: &Owner<'_>, role: Role, contract: &str) -> Service {
    let mut selector = owner.selecting(Some(role));
    selector.insert(CONTRACT.to_owned(), contract.to_owned());
    let mut metadata = owner.meta(engines_name(owner, role, contract), Some(role));
    let labels = metadata.labels.get_or_insert_default();
    labels.insert(CONTRACT.to_owned(), contract.to_owned());
    Service {
        metadata,
        spec: Some(ServiceSpec {
            type_: Some("ClusterIP".to_owned()),
            cluster_ip: Some("None".to_owned()),
            selector: Some(selector),
            ports: Some(vec![service_port("control", CONTROL)]),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    }
}

/// What clients reach the routers by: named as the deployment is, on port 80.
pub fn front(owner: &Owner<'_>, spec: &PDDeploymentSpec) -> Service {
    let type_ = match spec.router.service.type_ {
        ServiceType::ClusterIp => "ClusterIP",
        ServiceType::NodePort => "NodePort",
        ServiceType::LoadBalancer => "LoadBalancer",
    };
    Service {
        metadata: owner.meta(owner.name.to_owned(), Some(Role::Router)),
        spec: Some(ServiceSpec {
            type_: Some(type_.to_owned()),
            selector: Some(owner.selecting(Some(Role::Router))),
            ports: Some(vec![ServicePort {
                port: 80,
                target_port: Some(IntOrString::String("http".to_owned())),
                ..service_port("http", HTTP)
            }]),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    }
}

fn service_port(name: &str, port: u16) -> ServicePort {
    ServicePort {
        name: Some(name.to_owned()),
        port: i32::from(port),
        target_port: Some(IntOrString::String(name.to_owned())),
        protocol: Some("TCP".to_owned()),
        ..ServicePort::default()
    }
}

/// Which namespaces beside its own reach a deployment's pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reach {
    /// Where the operator runs, which may reach all of them.
    pub operator_namespace: String,
    /// From where metrics may be read.
    pub metrics_namespaces: Vec<String>,
}

/// Who may reach a role's pods: engines are for the router, for each other and for the operator; the router's API is for
/// everybody; metrics are for the namespaces that are named. The kubelet's probes come from the node, which no policy keeps out.
pub fn policy(owner: &Owner<'_>, reach: &Reach, role: Role) -> NetworkPolicy {
    let of = |role: Role| NetworkPolicyPeer {
        pod_selector: Some(owner.selector(role)),
        ..NetworkPolicyPeer::default()
    };
    let operator = NetworkPolicyPeer {
        namespace_selector: Some(labelled(NAMESPACE, &reach.operator_namespace)),
        pod_selector: Some(labelled("app.kubernetes.io/name", "tandem-operator")),
        ..NetworkPolicyPeer::default()
    };
    let scrapers = reach.metrics_namespaces.iter().map(|namespace| NetworkPolicyPeer {
        namespace_selector: Some(labelled(NAMESPACE, namespace)),
        ..NetworkPolicyPeer::default()
    });
    let mut rules = Vec::new();
    if !reach.metrics_namespaces.is_empty() {
        rules.push(rule(&[OPS], Some(scrapers.collect())));
    }
    match role {
        Role::Prefill => rules.push(rule(&[CONTROL, DATA], Some(vec![of(Role::Decode), of(Role::Router)]))),
        Role::Decode => rules.push(rule(&[CONTROL], Some(vec![of(Role::Router)]))),
        Role::Router => rules.push(rule(&[HTTP], None)),
    }
    let mut admins = vec![operator.clone()];
    if role == Role::Router {
        rules.push(rule(&[ADMIN], Some(admins)));
    } else {
        admins.insert(0, of(Role::Router));
        rules.push(rule(&[ADMIN], Some(admins)));
        rules.push(rule(&[CONTROL], Some(vec![operator])));
    }
    NetworkPolicy {
        metadata: owner.meta(owner.child(role.field()), Some(role)),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(owner.selector(role)),
            policy_types: Some(vec!["Ingress".to_owned()]),
            ingress: Some(rules),
            ..NetworkPolicySpec::default()
        }),
    }
}

fn labelled(key: &str, value: &str) -> LabelSelector {
    LabelSelector {
        match_labels: Some(BTreeMap::from([(key.to_owned(), value.to_owned())])),
        ..LabelSelector::default()
    }
}

fn rule(ports: &[u16], from: Option<Vec<NetworkPolicyPeer>>) -> NetworkPolicyIngressRule {
    let port = |&port: &u16| NetworkPolicyPort {
        port: Some(IntOrString::Int(i32::from(port))),
        protocol: Some("TCP".to_owned()),
        ..NetworkPolicyPort::default()
    };
    NetworkPolicyIngressRule {
        ports: Some(ports.iter().map(port).collect()),
        from,
    }
}
