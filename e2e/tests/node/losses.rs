//! Pods, processes and nodes that are lost under load.

use std::time::Duration;

use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_e2e::eventually;
use tandem_e2e::node::load::{End, Load, Request};
use tandem_e2e::node::serving::Stage;
use tandem_e2e::node::{self, LIMIT};

/// So long a new request may wait for a worker, and so much longer nothing stays open.
const QUEUE_SECONDS: u64 = 20;
const CLOSED: Duration = Duration::from_secs(20 + QUEUE_SECONDS);

async fn stage(nodes: &'static node::Nodes, purpose: &str) -> (Stage, String) {
    let spec = json!({
        "router": {"service": {"type": "NodePort"}},
        "timeouts": {"queueSeconds": QUEUE_SECONDS},
        "transfer": {"onPrefillFailure": "Retry"},
    });
    let stage = Stage::serving(nodes, purpose, spec).await;
    let url = stage.node_port().await;
    (stage, url)
}

/// Waits until so many more requests have begun.
async fn goes_on(load: &Load, more: u64) {
    let from = load.begun();
    eventually("requests go on", LIMIT, async || {
        let begun = load.begun();
        if begun >= from + more {
            Ok(())
        } else {
            Err(format!("{begun} of {}", from + more))
        }
    })
    .await;
}

fn judge(requests: &[Request]) {
    let answered = requests.iter().filter(|one| one.end == End::Answered).count();
    assert!(answered > 0, "{requests:?}");
    for one in requests {
        assert!(!matches!(one.end, End::Broken(_)), "{one:?}");
        // An answer takes as long as a busy machine needs; to be told that there is none does not.
        assert!(
            one.end == End::Answered || one.took < CLOSED,
            "open for too long: {one:?}"
        );
    }
}

fn serves(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"))
}

/// Waits until a role's pod is another one, or another process, and ready.
async fn anew(stage: &Stage, role: Role, before: &[(Value, Value)]) {
    eventually("another pod is ready", LIMIT, async || {
        let now = stage.incarnation(role);
        let ready = stage.pods(role).iter().all(serves);
        if now.len() == 1 && now != before && ready {
            Ok(())
        } else {
            Err(format!("{now:?}, ready: {ready}"))
        }
    })
    .await;
}

#[test]
fn a_deleted_pod_of_a_role_costs_no_request_its_sense() {
    node::test(async |nodes| {
        let (stage, url) = stage(nodes, "delete").await;
        for role in [Role::Prefill, Role::Decode, Role::Router] {
            let load = Load::start(&url, 4, 24);
            goes_on(&load, 4).await;
            let before = stage.incarnation(role);
            let pod = stage.pod(role);
            let pod = pod["metadata"]["name"].as_str().expect("a name").to_owned();
            nodes.kubectl(
                &["delete", "pod", "--namespace", &stage.namespace, &pod, "--wait=false"],
                "",
            );
            anew(&stage, role, &before).await;
            goes_on(&load, 8).await;
            let requests = load.stop().await;
            if role == Role::Router {
                // A connection that reaches the Service while no router is behind it is refused by the kernel.
                let answered = requests.iter().filter(|one| one.end == End::Answered).count();
                assert!(answered > 0, "{requests:?}");
            } else {
                judge(&requests);
            }
        }
        stage.promoted().await;
        stage.remove().await;
    });
}

#[test]
fn a_killed_container_is_started_again_and_serves() {
    node::test(async |nodes| {
        let (stage, url) = stage(nodes, "kill").await;
        for role in [Role::Prefill, Role::Decode] {
            let load = Load::start(&url, 4, 24);
            goes_on(&load, 4).await;
            let before = stage.incarnation(role);
            let pod = stage.pod(role);
            let id = pod["status"]["containerStatuses"][0]["containerID"]
                .as_str()
                .expect("an id");
            let id = id.strip_prefix("containerd://").expect("containerd's");
            let node = pod["spec"]["nodeName"].as_str().expect("a node");
            nodes.on(
                node,
                &["ctr", "--namespace=k8s.io", "tasks", "kill", "--signal=SIGKILL", id],
            );
            anew(&stage, role, &before).await;
            goes_on(&load, 8).await;
            judge(&load.stop().await);
        }
        stage.remove().await;
    });
}
