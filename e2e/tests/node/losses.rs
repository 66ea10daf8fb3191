//! Pods, processes and nodes that are lost under load.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_e2e::node::load::{End, Load, Request, ask};
use tandem_e2e::node::lost::Lost;
use tandem_e2e::node::serving::{MODEL, Stage, is};
use tandem_e2e::node::{self, LIMIT, NODES};
use tandem_e2e::{eventually, probe};

/// So long a new request may wait for a worker, and so much longer nothing stays open.
const QUEUE_SECONDS: u64 = 20;
const CLOSED: Duration = Duration::from_secs(20 + QUEUE_SECONDS);
/// A node's label.
const HOST: &str = "kubernetes.io/hostname";

async fn stage(nodes: &'static node::Nodes, purpose: &str, [prefill, decode]: [Value; 2]) -> (Stage, String) {
    let spec = json!({
        "prefill": {"pod": prefill},
        "decode": {"pod": decode},
        // beside the port that clients come by
        "router": {"service": {"type": "NodePort"}, "pod": {"nodeSelector": {HOST: NODES[0]}}},
        "timeouts": {"queueSeconds": QUEUE_SECONDS},
        "transfer": {"onPrefillFailure": "Retry"},
    });
    let stage = Stage::serving(nodes, purpose, spec).await;
    let url = stage.node_port().await;
    (stage, url)
}

/// Pods that are on this node, if they can be.
fn rather_on(node: &str) -> Value {
    let there = json!({"matchExpressions": [{"key": HOST, "operator": "In", "values": [node]}]});
    let wish = json!([{"weight": 100, "preference": there}]);
    json!({"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": wish}}})
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
        let (stage, url) = stage(nodes, "delete", [json!({}), json!({})]).await;
        for role in [Role::Prefill, Role::Decode, Role::Router] {
            let load = Load::start(&url, 4, 24);
            load.goes_on(4).await;
            let before = stage.incarnation(role);
            let pod = stage.pod(role);
            let pod = pod["metadata"]["name"].as_str().expect("a name").to_owned();
            nodes.kubectl(
                &["delete", "pod", "--namespace", &stage.namespace, &pod, "--wait=false"],
                "",
            );
            anew(&stage, role, &before).await;
            load.goes_on(8).await;
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
        let (stage, url) = stage(nodes, "kill", [json!({}), json!({})]).await;
        for role in [Role::Prefill, Role::Decode] {
            let load = Load::start(&url, 4, 24);
            load.goes_on(4).await;
            let before = stage.incarnation(role);
            assert!(stage.kill(&stage.pod(role)), "its container was not there");
            anew(&stage, role, &before).await;
            load.goes_on(8).await;
            judge(&load.stop().await);
        }
        stage.remove().await;
    });
}

/// Loses the node of a role's only pod, with everything else on the other one.
fn a_lost_node_of(role: Role, purpose: &'static str) {
    node::test(async |nodes| {
        let pods = [Role::Prefill, Role::Decode].map(|one| rather_on(NODES[usize::from(one == role)]));
        let (stage, url) = stage(nodes, purpose, pods).await;
        let before = stage.incarnation(role);
        assert_eq!(stage.pod(role)["spec"]["nodeName"], NODES[1]);
        stage
            .until("hand-offs are seen to finish", |chat| {
                is(chat, "TransferHealthy") == "True"
            })
            .await;
        let load = Load::start(&url, 4, 24);
        load.goes_on(8).await;

        let lost = Lost::cut(nodes, NODES[1]);
        let said = stage
            .until("it is told", |chat| is(chat, "TransferHealthy") == "False")
            .await;
        println!("{role:?}: TransferHealthy is False after {:.0?}", lost.since.elapsed());
        let reason = said.status.iter().flat_map(|status| &status.conditions);
        for one in reason.filter(|one| one.status == "False") {
            println!("  {} {}: {}", one.type_, one.reason, one.message);
        }
        lost.unknown(LIMIT).await;
        let unknown = Instant::now();
        println!("{role:?}: the node is Unknown after {:.0?}", lost.since.elapsed());
        stage
            .until("nothing serves", |chat| is(chat, "Available") == "False")
            .await;
        anew(&stage, role, &before).await;
        stage
            .until("it serves again", |chat| {
                is(chat, "Available") == "True" && is(chat, "Ready") == "True"
            })
            .await;
        let again = eventually("an answer", LIMIT, async || {
            let one = ask(&url, 1 << 40, true, 24).await;
            if one.end == End::Answered {
                Ok(unknown.elapsed())
            } else {
                Err(format!("{one:?}"))
            }
        })
        .await;
        println!("{role:?}: it serves again {again:.0?} after that");
        // Few failures among many that finish, and not before a minute is over.
        stage
            .until("hand-offs are seen to finish again", |chat| {
                is(chat, "TransferHealthy") == "True"
            })
            .await;
        let requests = load.stop().await;
        judge(&requests);
        let longest = requests.iter().map(|one| one.took).max().unwrap_or_default();
        let failed = requests.iter().filter(|one| one.end == End::Failed).count();
        let refused = requests.iter().filter(|one| matches!(one.end, End::Refused(_))).count();
        println!(
            "{role:?}: {} requests, {refused} refused, {failed} cut off with an error event, the longest took {longest:.0?}",
            requests.len()
        );
        drop(lost);
        stage.remove().await;
    });
}

#[test]
fn a_node_that_is_lost_with_the_only_prefill_leaves_requests_open_or_the_deployment_dead() {
    a_lost_node_of(Role::Prefill, "lost-prefill");
}

#[test]
fn a_node_that_is_lost_with_the_only_decode_leaves_requests_open_or_the_deployment_dead() {
    a_lost_node_of(Role::Decode, "lost-decode");
}

#[test]
fn a_pod_that_is_deleted_cuts_off_the_long_answer_that_it_gives() {
    node::test(async |nodes| {
        let (stage, url) = stage(nodes, "grace", [json!({}), json!({})]).await;
        let body = json!({
            "model": MODEL, "max_tokens": 1_000, "stream": true, "temperature": 0, "ignore_eos": true,
            "messages": [{"role": "user", "content": "Count."}],
        });
        let sent = probe::http()
            .post(format!("{url}/v1/chat/completions"))
            .json(&body)
            .send();
        let mut answer = sent.await.expect("an answer");
        let mut text = Vec::new();
        text.extend(answer.chunk().await.expect("a piece").expect("a piece"));
        let pod = stage.pod(Role::Decode);
        let pod = pod["metadata"]["name"].as_str().expect("a name");
        nodes.kubectl(
            &["delete", "pod", "--namespace", &stage.namespace, pod, "--wait=false"],
            "",
        );
        while let Some(piece) = answer.chunk().await.expect("it goes on") {
            text.extend(piece);
        }
        let state = stage.recorder.state();
        let left = state.get("pods", pod).expect("it was not waited for");
        assert!(left["metadata"]["deletionTimestamp"].is_string(), "{left}");
        let text = String::from_utf8_lossy(&text);
        assert!(text.contains("\"finish_reason\":\"length\""), "{text}");
        assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
        stage.remove().await;
    });
}
