//! The operator is killed after each write: the write is done, and it never learns of it.

use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_e2e::cluster;
use tandem_e2e::cluster::fault::{Fault, Proxy};
use tandem_e2e::cluster::operator::Operator;

use crate::always;
use crate::stage::{Stage, restarts};

/// No change has so many writes.
const ENOUGH: u32 = 80;

/// One change in which each operator that comes is killed after its first write.
fn killed_after_each_write(purpose: &'static str, edit: Value) {
    cluster::test(async |cluster| {
        let mut stage = Stage::new(cluster, purpose, &[8]).await;
        let proxy = Proxy::start(cluster.plain(&stage.options.kubeconfig)).await;
        stage.options.kubeconfig = cluster.kubeconfig_of(&format!("{}-proxy", stage.namespace), &proxy.server());
        let mut operator = Operator::start(&stage.options);
        stage.create(json!({})).await;
        stage.promoted().await;
        // The same change undisturbed, and back: so many writes it has.
        let before = stage.writes().len();
        stage.edit(edit.clone()).await;
        let undisturbed = stage.promoted().await;
        let writes = stage.writes().len() - before;
        let begun: Vec<_> = Role::ALL.into_iter().map(|role| stage.templates(role)).collect();
        stage
            .edit(
                json!({"model": {"name": "m"}, "prefill": {"pod": {"annotations": {"change": null}}},
            "decode": {"pod": {"annotations": {"change": null}}, "knobs": {"maxRunning": 32}},
            "router": {"pod": {"annotations": {"change": null}}}}),
            )
            .await;
        stage.promoted().await;

        proxy.rule(|seen| if seen.writes() { Fault::Hold } else { Fault::None });
        let since = always::now(&stage.events());
        let mut held = proxy.held();
        held.borrow_and_update();
        stage.edit(edit).await;
        let mut kills = 0;
        let promoted = async {
            let mut done = std::pin::pin!(stage.promoted());
            loop {
                tokio::select! {
                    chat = &mut done => return chat,
                    _ = held.changed() => {
                        kills += 1;
                        assert!(kills < ENOUGH, "still not done after {kills} kills: {:#?}", stage.writes());
                        operator.kill_and_restart();
                    }
                }
            }
        }
        .await;
        // Those that only tell how far it is come together where an operator finds more done than was told.
        assert!(kills >= 3, "{kills} kills, {writes} writes undisturbed");
        let now: Vec<_> = Role::ALL.into_iter().map(|role| stage.templates(role)).collect();
        assert_eq!(now, begun, "the same end");
        let status = promoted.status.expect("a status");
        let calm = undisturbed.status.expect("a status");
        assert_eq!(status.revisions.running, calm.revisions.running);
        assert_eq!(status.history[0].restarted, calm.history[0].restarted);
        let events = stage.events();
        always::check(&events, 8);
        let restarted = &status.history[0].restarted;
        let revisions: Vec<_> = status
            .roles
            .iter()
            .filter(|role| restarted.contains(&role.name))
            .map(|role| (role.name.field(), role.revision.as_str()))
            .collect();
        always::order(&events, since, &revisions);
        println!("{purpose}: {kills} kills, {writes} writes undisturbed");
    });
}

#[test]
fn killed_after_each_write_of_a_prefill_edit() {
    killed_after_each_write("kill-prefill", restarts(Role::Prefill, "1"));
}

#[test]
fn killed_after_each_write_of_a_decode_edit() {
    killed_after_each_write("kill-decode", restarts(Role::Decode, "1"));
}

#[test]
fn killed_after_each_write_of_a_router_edit() {
    killed_after_each_write("kill-router", restarts(Role::Router, "1"));
}

#[test]
fn killed_after_each_write_of_a_change_of_the_contract() {
    killed_after_each_write("kill-contract", json!({"model": {"name": "m2"}}));
}

#[test]
fn killed_after_each_write_of_a_hot_edit() {
    killed_after_each_write("kill-hot", json!({"decode": {"knobs": {"maxRunning": 7}}}));
}
