//! What an edit restarts.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_crds::{PDDeployment, Role};
use tandem_e2e::client;
use tandem_e2e::node::load::{End, Load};
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

/// How long each step of the change took that has just been promoted: from when it was first seen to when the next was.
fn steps(stage: &Stage, since: Instant) -> Vec<(String, Duration)> {
    let mut seen: Vec<(String, Instant)> = vec![("seen by the operator".into(), since)];
    for event in stage.recorder.events() {
        if event.kind != "pddeployments" || event.heard < since {
            continue;
        }
        let chat: PDDeployment = serde_json::from_value(event.object).expect("a deployment");
        let step = chat
            .status
            .map(|status| format!("{:?}", status.step))
            .unwrap_or_default();
        if seen.len() == 1 && step == "Settled" {
            continue;
        }
        if seen.last().is_some_and(|(last, _)| *last != step) {
            seen.push((step, event.heard));
        }
    }
    let spans = seen.windows(2).map(|two| (two[0].0.clone(), two[1].1 - two[0].1));
    spans.collect()
}

/// Streamed or not, while the only decode is replaced by one that takes so long to load its model.
#[test]
fn a_request_is_lost_while_a_new_engine_loads_for_long() {
    let seconds = std::env::var("TANDEM_TEST_LOAD_SECONDS").map_or(20, |text| text.parse().expect("seconds"));
    let load_time = Duration::from_secs(seconds);
    node::test(async |nodes| {
        let tag = nodes.load_faults();
        nodes.install();
        let stage = Stage::new(nodes, "load").await;
        let (faults, decode) = stage.faults(Role::Decode, &tag).await;
        stage
            .create(json!({"decode": decode, "router": {"service": {"type": "NodePort"}}}))
            .await;
        stage.promoted().await;
        let url = stage.node_port().await;
        faults
            .plant(&[&format!("delay-model-load {}", load_time.as_millis())])
            .await;

        let load = Load::start(&url, 4, 24);
        load.goes_on(8).await;
        let begun = Instant::now();
        stage
            .edit(json!({"decode": {"pod": {"annotations": {"change": "one"}}}}))
            .await;
        stage.promoted().await;
        let took = begun.elapsed();
        load.goes_on(8).await;
        let requests = load.stop().await;
        let wrong: Vec<_> = requests.iter().filter(|one| one.end != End::Answered).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        let held = |streamed| {
            requests
                .iter()
                .any(|one| one.streamed == streamed && one.took > load_time / 2)
        };
        assert!(held(true) && held(false), "none waited for the engine: {requests:?}");

        for (step, span) in steps(&stage, begun) {
            println!("{step:>24} {:6.1} s", span.as_secs_f64());
        }
        let own = took.saturating_sub(load_time);
        println!(
            "{:>24} {:6.1} s, {:.1} s of it beyond the {seconds} s that the model takes to load; {} requests, all answered",
            "all",
            took.as_secs_f64(),
            own.as_secs_f64(),
            requests.len()
        );
        // of the 20 s of every day
        let much = load_time.min(Duration::from_secs(20)) / 2;
        assert!(own < much, "the change is slow beside the model");
        stage.remove().await;
    });
}
