//! What a kubelet writes: a node, its lease, and the status of a pod.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Node, Pod};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

/// A ready node with room for everything but GPUs, of which it has so many.
pub fn node(name: &str, gpus: u32, labels: &[(&str, &str)]) -> Node {
    let mut labels: BTreeMap<&str, &str> = labels.iter().copied().collect();
    labels.insert("kubernetes.io/hostname", name);
    let resources = json!({
        "cpu": "256", "memory": "1Ti", "ephemeral-storage": "1Ti", "pods": "5000", "nvidia.com/gpu": gpus.to_string(),
    });
    let node = json!({
        "metadata": {"name": name, "labels": labels},
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [ready_condition()],
        },
    });
    serde_json::from_value(node).expect("a node")
}

fn ready_condition() -> Value {
    json!({
        "type": "Ready", "status": "True", "reason": "Scripted", "message": "no kubelet stands behind it",
        "lastHeartbeatTime": now(), "lastTransitionTime": now(),
    })
}

/// A node's status, once it is back: the node controller had taken it for lost.
pub fn ready() -> Value {
    json!({"status": {"conditions": [ready_condition()]}})
}

/// A node's lease, renewed now.
pub fn lease(node: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": node},
        // microseconds, always six digits
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": format!("{:.6}", Timestamp::now())},
    })
}

/// All containers run; they are ready or not yet.
pub fn running(pod: &Pod, address: Ipv4Addr, ready: bool, restarts: u32) -> Value {
    let state = json!({"running": {"startedAt": now()}});
    status(pod, "Running", Some(address), ready, &state, restarts)
}

/// All containers have ended with an error and wait to be started again.
pub fn crashed(pod: &Pod, address: Ipv4Addr) -> Value {
    let state =
        json!({"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s restarting failed container"}});
    status(pod, "Running", Some(address), false, &state, 3)
}

/// No container could be started.
pub fn image_missing(pod: &Pod) -> Value {
    let state = json!({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}});
    status(pod, "Pending", None, false, &state, 0)
}

/// What a container names is not there.
pub fn lacking(pod: &Pod, what: &str) -> Value {
    let state = json!({"waiting": {"reason": "CreateContainerConfigError", "message": what}});
    status(pod, "Pending", None, false, &state, 0)
}

/// Where a container is asked whether it is ready, and how often once it is.
pub fn probe(container: &Container, address: Ipv4Addr) -> (String, Duration) {
    let probe = container.readiness_probe.as_ref();
    let get = probe.and_then(|probe| probe.http_get.as_ref());
    let path = get.and_then(|get| get.path.as_deref()).unwrap_or("/");
    let port = match get.map(|get| &get.port) {
        Some(IntOrString::Int(port)) => *port,
        _ => 80,
    };
    let period = probe.and_then(|probe| probe.period_seconds).unwrap_or(10);
    (
        format!("http://{address}:{port}{path}"),
        Duration::from_secs(period as u64),
    )
}

fn status(pod: &Pod, phase: &str, address: Option<Ipv4Addr>, ready: bool, state: &Value, restarts: u32) -> Value {
    let condition = |kind: &str, ready: bool| {
        let mut condition =
            json!({"type": kind, "status": if ready { "True" } else { "False" }, "lastTransitionTime": now()});
        if !ready {
            condition["reason"] = "ContainersNotReady".into();
        }
        condition
    };
    let containers: Vec<Value> = pod
        .spec
        .iter()
        .flat_map(|spec| &spec.containers)
        .map(|container| {
            json!({
                "name": container.name, "image": container.image, "imageID": "", "ready": ready, "started": ready,
                "restartCount": restarts, "state": state,
            })
        })
        .collect();
    let mut status = json!({
        "phase": phase,
        "startTime": now(),
        "conditions": [condition("Initialized", true), condition("ContainersReady", ready), condition("Ready", ready)],
        "containerStatuses": containers,
    });
    if let Some(address) = address {
        status["podIP"] = address.to_string().into();
        status["podIPs"] = json!([{"ip": address.to_string()}]);
    }
    json!({"metadata": {"uid": pod.metadata.uid}, "status": status})
}

fn now() -> String {
    format!("{:.0}", Timestamp::now())
}
