//! GPUs: what fits, what does not, and what waits for some.

use serde_json::json;
use tandem_crds::{PDDeployment, Role};
use tandem_e2e::node::serving::{NAME, Stage, is};
use tandem_e2e::node::{self, NODES, outcome};

fn message<'a>(chat: &'a PDDeployment, type_: &str) -> &'a str {
    let conditions = chat.status.iter().flat_map(|status| &status.conditions);
    let mut told = conditions.filter(|one| one.type_ == type_);
    told.next().map(|one| one.message.as_str()).unwrap_or_default()
}

#[test]
fn a_node_of_eight_holds_four_and_four_and_what_waits_for_more_says_so() {
    node::test(async |nodes| {
        let there = json!({"pod": {"nodeSelector": {"kubernetes.io/hostname": NODES[0]}}});
        let stage = Stage::serving(nodes, "eight", json!({"prefill": there, "decode": there})).await;
        for role in [Role::Prefill, Role::Decode] {
            assert_eq!(stage.pod(role)["spec"]["nodeName"], NODES[0]);
        }

        let mut over = nodes.kubectl_command();
        over.args(["patch", "pdd", NAME, "--namespace", &stage.namespace, "--type=merge"]);
        over.arg(r#"--patch={"spec":{"prefill":{"replicas":2}}}"#);
        let refused = outcome(&mut over, "");
        assert!(!refused.status.success(), "12 GPUs of a budget of 8");
        let why = String::from_utf8_lossy(&refused.stderr);
        assert!(why.contains("gpus.budget"), "{why}");

        stage
            .edit(json!({"gpus": {"budget": 12}, "prefill": {"replicas": 2}}))
            .await;
        // that the claim was bound a moment late at first may still be told
        let chat = stage
            .until("a pod waits for GPUs, and it is said", |chat| {
                is(chat, "CapacitySatisfied") == "False"
                    && message(chat, "CapacitySatisfied").contains("Insufficient nvidia.com/gpu")
            })
            .await;
        // the others go on
        assert_eq!(is(&chat, "Available"), "True");

        stage.edit(json!({"prefill": {"replicas": 1}})).await;
        stage
            .until("nothing waits any more", |chat| {
                is(chat, "CapacitySatisfied") == "True" && is(chat, "Ready") == "True"
            })
            .await;
        stage.remove().await;
    });
}
