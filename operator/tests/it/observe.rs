//! What is read from pods, nodes and Deployments.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_operator::observe::node::{self, NodeFacts};
use tandem_operator::observe::pod::{self, PodFacts};
use tandem_operator::observe::workload::{unseen, workload};

fn pod(more: Value) -> PodFacts {
    let mut object = json!({
        "metadata": {"name": "chat-d-1", "uid": "u-7", "labels": {
            "tandem.dev/role": "decode", "tandem.dev/revision": "d-1", "tandem.dev/owner": "o-1",
        }},
        "spec": {"nodeName": "n-1", "containers": [{"name": "tandem", "resources": {
            "limits": {"nvidia.com/gpu": "4", "memory": "1Gi"},
        }}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [
            {"type": "Ready", "status": "True"},
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        ]},
    });
    merge(&mut object, more);
    let pod: Pod = serde_json::from_value(object).expect("a pod");
    pod::facts(&pod)
}

fn merge(into: &mut Value, patch: Value) {
    match (into, patch) {
        (Value::Object(into), Value::Object(patch)) => {
            for (key, value) in patch {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, patch) => *into = patch,
    }
}

#[test]
fn a_pod_that_serves_is_what_its_labels_and_conditions_say() {
    let facts = pod(json!({}));
    assert_eq!(
        (facts.role, facts.revision.as_str(), facts.owner.as_str()),
        (Some(Role::Decode), "d-1", "o-1")
    );
    assert_eq!(facts.devices, BTreeMap::from([("nvidia.com/gpu".to_owned(), 4)]));
    assert!(facts.ready && facts.answers() && facts.trouble.is_none());
}

#[test]
fn a_pod_that_ends_or_has_ended_is_not_asked() {
    let terminating = pod(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    assert!(terminating.terminating && !terminating.answers());
    for phase in ["Failed", "Succeeded"] {
        let ended = pod(json!({"status": {"phase": phase}}));
        assert!(ended.ended && !ended.answers(), "{phase}");
    }
    assert!(!pod(json!({"status": {"podIP": null}})).answers());
    assert!(!pod(json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}})).answers());
}

#[test]
fn each_trouble_has_its_name() {
    let waiting = |reason: &str| {
        json!({"status": {"phase": "Pending", "conditions": [], "containerStatuses": [{
            "name": "tandem", "image": "", "imageID": "", "ready": false, "restartCount": 3,
            "state": {"waiting": {"reason": reason, "message": "in its words"}},
            "lastState": {"terminated": {"exitCode": 3, "reason": "Error"}},
        }]}})
    };
    for (reason, name) in [
        ("ImagePullBackOff", Some("ImagePullFailed")),
        ("ErrImagePull", Some("ImagePullFailed")),
        ("InvalidImageName", Some("ImagePullFailed")),
        ("CreateContainerConfigError", Some("ContainerNotMade")),
        ("CrashLoopBackOff", Some("CrashLoop")),
        ("ContainerCreating", None),
    ] {
        let facts = pod(waiting(reason));
        assert_eq!(
            facts.trouble.as_ref().map(|trouble| trouble.reason.as_str()),
            name,
            "{reason}"
        );
        assert_eq!(facts.restarts, 3);
        if let Some(trouble) = facts.trouble {
            assert!(
                trouble.message.contains("in its words"),
                "{reason}: {}",
                trouble.message
            );
        }
    }
    let crashed = pod(waiting("CrashLoopBackOff")).trouble.expect("a trouble");
    assert!(crashed.message.contains("exit code 3"), "{}", crashed.message);

    let unplaced = pod(
        json!({"spec": {"nodeName": null}, "status": {"phase": "Pending", "podIP": null, "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient nvidia.com/gpu"},
        ]}}),
    );
    assert_eq!(unplaced.trouble.expect("a trouble").reason, "Unschedulable");
}

fn node(conditions: &Value) -> NodeFacts {
    let node: Node = serde_json::from_value(json!({"metadata": {"name": "n-1"}, "status": {"conditions": conditions}}))
        .expect("a node");
    node::facts(&node)
}

#[test]
fn a_pod_is_lost_with_its_node_and_not_because_the_watch_of_nodes_is_behind() {
    let at = |text: &str| text.parse::<Timestamp>().expect("a time");
    let soon = at("2026-01-01T00:00:30Z");
    let later = at("2026-01-01T00:02:00Z");
    let nodes = |facts: Option<NodeFacts>| facts.into_iter().map(|facts| ("n-1".to_owned(), facts)).collect();
    for (conditions, lost) in [
        (json!([{"type": "Ready", "status": "Unknown"}]), true),
        (json!([{"type": "Ready", "status": "False"}]), false),
        (json!([{"type": "Ready", "status": "True"}]), false),
        (json!([]), false),
    ] {
        let nodes: BTreeMap<_, _> = nodes(Some(node(&conditions)));
        assert_eq!(pod(json!({})).is_lost(&nodes, soon), lost, "{conditions}");
    }
    let none: BTreeMap<_, _> = nodes(None);
    assert!(
        !pod(json!({})).is_lost(&none, soon),
        "the node may not have been seen yet"
    );
    assert!(pod(json!({})).is_lost(&none, later), "the node is gone");
    assert!(
        !pod(json!({"spec": {"nodeName": null}})).is_lost(&none, later),
        "it has no node to lose"
    );
}

fn deployment(status: &Value) -> Deployment {
    let object = json!({
        "metadata": {"name": "chat-d-1"},
        "spec": {"replicas": 2, "selector": {}, "template": {
            "metadata": {"labels": {"tandem.dev/role": "decode", "tandem.dev/revision": "d-1", "tandem.dev/contract": "k-1"}},
            "spec": {"containers": [{"name": "tandem", "resources": {"limits": {"nvidia.com/gpu": "4", "example.com/nic": "1"}}}]},
        }},
        "status": status,
    });
    serde_json::from_value(object).expect("a deployment")
}

#[test]
fn pods_that_only_their_workload_tells_of_are_counted() {
    let gpus = BTreeSet::from(["nvidia.com/gpu"]);
    let (of, said) = workload(&deployment(&json!({"replicas": 2})), &gpus).expect("a workload");
    assert_eq!((of.role, of.replicas, of.gpus, said), (Role::Decode, 2, 4, 2));
    let count = |pods: &[&PodFacts]| unseen(&of, said, pods).count();
    let shown = pod(json!({}));
    let ends = pod(json!({"metadata": {"uid": "u-8", "deletionTimestamp": "2026-01-01T00:00:00Z"}}));
    let other = pod(json!({"metadata": {"labels": {"tandem.dev/revision": "d-2"}}}));
    assert_eq!(count(&[]), 2);
    assert_eq!(count(&[&shown]), 1);
    assert_eq!(count(&[&shown, &shown]), 0);
    assert_eq!(
        count(&[&shown, &ends]),
        1,
        "a Deployment does not count those that terminate"
    );
    assert_eq!(count(&[&shown, &other]), 1, "another revision's");
    let hidden = unseen(&of, said, &[]).next().expect("a pod");
    assert_eq!((hidden.gpus, hidden.ready), (4, false));
}

#[test]
fn a_quota_is_told_from_other_reasons_why_pods_are_not_made() {
    let failure = |message: &str| {
        let status = json!({"conditions": [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}]});
        let (workload, _) = workload(&deployment(&status), &BTreeSet::new()).expect("a workload");
        workload.trouble.expect("a trouble").reason
    };
    assert_eq!(
        failure("pods \"a\" is forbidden: exceeded quota: gpus"),
        "QuotaExceeded"
    );
    assert_eq!(failure("pods \"a\" is forbidden: violates PodSecurity"), "PodsNotMade");
}
