//! What an edit restarts.

use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_e2e::client;
use tandem_e2e::node::serving::{Stage, is};
use tandem_e2e::node::{self};

fn made_at(pod: &Value) -> &str {
    pod["metadata"]["creationTimestamp"].as_str().expect("a time")
}

#[test]
fn a_restart_edit_of_decode_leaves_the_prefill_pod_alone() {
    node::test(async |nodes| {
        let stage = Stage::serving(nodes, "restart", json!({})).await;
        let (prefill, decode) = (stage.incarnation(Role::Prefill), stage.incarnation(Role::Decode));
        stage
            .edit(json!({"decode": {"pod": {"annotations": {"change": "one"}}}}))
            .await;
        stage.promoted().await;
        assert_eq!(stage.incarnation(Role::Prefill), prefill);
        assert_ne!(stage.incarnation(Role::Decode), decode);
        stage.remove().await;
    });
}

#[test]
fn a_hot_knob_touches_no_pod_and_is_what_the_process_says() {
    node::test(async |nodes| {
        let stage = Stage::serving(nodes, "knob", json!({})).await;
        let before: Vec<_> = Role::ALL.map(|role| stage.incarnation(role)).to_vec();
        stage.edit(json!({"decode": {"knobs": {"maxRunning": 7}}})).await;
        stage.promoted().await;
        // A condition that has just turned does not turn again within a minute.
        stage
            .until("the knobs are seen live", |chat| is(chat, "KnobsLive") == "True")
            .await;
        assert_eq!(Role::ALL.map(|role| stage.incarnation(role)).to_vec(), before);
        let pod = stage.pod(Role::Decode);
        let target = format!("pod/{}", pod["metadata"]["name"].as_str().expect("a name"));
        let control = nodes.forward(&stage.namespace, &target, 7101);
        let info = client::info(&mut client::connect(&control.address).await).await;
        assert_eq!(info.knobs.and_then(|knobs| knobs.max_running), Some(7));
        stage.remove().await;
    });
}

#[test]
fn a_contract_edit_restarts_prefill_before_decode_and_the_router_last() {
    node::test(async |nodes| {
        let stage = Stage::serving(nodes, "contract", json!({})).await;
        let before: Vec<_> = Role::ALL.map(|role| stage.incarnation(role)).to_vec();
        stage.edit(json!({"model": {"name": "another"}})).await;
        stage.promoted().await;
        let after: Vec<_> = Role::ALL.map(|role| stage.incarnation(role)).to_vec();
        assert!(
            before.iter().zip(&after).all(|(before, after)| before != after),
            "{before:?} {after:?}"
        );
        let [prefill, decode, router] = [Role::Prefill, Role::Decode, Role::Router].map(|role| stage.pod(role));
        let ready = |pod: &Value| {
            let conditions = pod["status"]["conditions"].as_array().expect("conditions");
            let ready = conditions.iter().find(|one| one["type"] == "Ready").expect("Ready");
            ready["lastTransitionTime"].as_str().expect("a time").to_owned()
        };
        // Times of Kubernetes are whole seconds in UTC, so that as text they have the same order.
        assert!(
            ready(&prefill).as_str() <= made_at(&decode),
            "decode was made before prefill was ready"
        );
        assert!(
            ready(&decode).as_str() <= made_at(&router),
            "the router was made before decode was ready"
        );
        stage.remove().await;
    });
}
