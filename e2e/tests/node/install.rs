//! Installing, upgrading and removing the operator under deployments that serve; taking nodes out of service.

use serde_json::json;
use tandem_crds::Role;
use tandem_e2e::node;
use tandem_e2e::node::release::NAMESPACE;
use tandem_e2e::node::serving::Stage;

#[test]
fn an_upgraded_removed_and_reinstalled_operator_restarts_no_engine() {
    node::test(async |nodes| {
        let stage = Stage::serving(nodes, "upgrade", json!({})).await;
        let before: Vec<_> = Role::ALL.map(|role| stage.incarnation(role)).to_vec();
        let still = |stage: &Stage| assert_eq!(Role::ALL.map(|role| stage.incarnation(role)).to_vec(), before);

        // Another default image, as a new version has.
        nodes.upgrade(&[
            "defaultImages.engine=localhost/tandem-engine:another",
            "operator.logFormat=text",
        ]);
        stage.promoted().await;
        still(&stage);

        nodes.helm(&["uninstall", "tandem", "--namespace", NAMESPACE, "--wait"]);
        let kept = nodes.kubectl(&["get", "pdd", "--namespace", &stage.namespace, "--output=name"], "");
        assert_eq!(kept.trim(), "pddeployment.tandem.dev/chat");
        still(&stage);

        nodes.install();
        // An edit that only a working operator carries out, and that restarts nothing.
        stage.edit(json!({"decode": {"knobs": {"maxRunning": 9}}})).await;
        stage.promoted().await;
        still(&stage);
        stage.remove().await;
    });
}

#[test]
fn a_node_with_the_only_pod_of_a_role_can_be_drained() {
    node::test(async |nodes| {
        let stage = Stage::serving(nodes, "drain", json!({})).await;
        let pod = stage.pod(Role::Decode);
        let node = pod["spec"]["nodeName"].as_str().expect("a node").to_owned();
        nodes.kubectl(
            &[
                "drain",
                &node,
                "--ignore-daemonsets",
                "--delete-emptydir-data",
                "--timeout=4m",
            ],
            "",
        );
        stage
            .until("decode serves elsewhere", |chat| {
                node::serving::is(chat, "Ready") == "True"
            })
            .await;
        assert!(
            stage
                .pods(Role::Decode)
                .iter()
                .all(|pod| pod["spec"]["nodeName"] != node.as_str())
        );
        nodes.kubectl(&["uncordon", &node], "");
        stage.remove().await;
    });
}
