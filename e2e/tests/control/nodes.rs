//! Nodes that go.

use serde_json::json;
use tandem_e2e::cluster;
use tandem_e2e::cluster::record::{State, label};

use crate::stage::{LIMIT, Stage, serves};

#[test]
fn a_change_after_a_node_is_gone_for_good_ends_on_the_other() {
    cluster::test(async |cluster| {
        // Prefill's three fill one node and decode's the other: whichever goes, its GPUs are free elsewhere once it has.
        let spec = json!({"prefill": {"gpusPerReplica": 2}, "decode": {"gpusPerReplica": 2}});
        let (stage, _operator) = Stage::settled(cluster, "gone", &[4, 4], spec).await;
        let state = stage.recorder.state();
        let decode = state.all("pods").find(|pod| label(pod, "tandem.dev/role") == "decode");
        let node = decode.expect("a decode pod")["spec"]["nodeName"]
            .as_str()
            .expect("a node")
            .to_owned();
        cluster.kubelet().lose(&node);
        let lost = |state: &State| {
            let there = state
                .all("pods")
                .filter(|pod| pod["spec"]["nodeName"] == node.as_str() && serves(pod));
            match there.count() {
                0 => Ok(()),
                more => Err(format!("{more} still serve")),
            }
        };
        stage.recorder.until("its pods are lost", LIMIT, lost).await;
        stage.edit(json!({"model": {"name": "m2"}})).await;
        let chat = stage
            .until("the change is promoted", |chat| {
                crate::stage::is_settled(chat)
                    && crate::stage::is(chat, "Ready", "True")
                    && chat.spec.model.name == "m2"
            })
            .await;
        assert_eq!(crate::stage::condition(&chat, "Available").0, "True");
        let state = stage.recorder.state();
        for pod in state.all("pods").filter(|pod| serves(pod)) {
            assert_ne!(pod["spec"]["nodeName"], node.as_str());
        }
    });
}
