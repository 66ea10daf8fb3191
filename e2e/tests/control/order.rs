//! What an edit restarts, in which order, and what it leaves alone.

use std::time::Duration;

use serde_json::json;
use tandem_crds::Role;
use tandem_e2e::cluster;
use tandem_e2e::cluster::kubelet::{Life, Runs};
use tandem_e2e::cluster::peer::Script;
use tandem_e2e::cluster::record::{State, label};

use crate::always;
use crate::stage::{LIMIT, Stage, restarts, serves};

#[test]
fn an_edit_of_one_role_leaves_the_others_untouched() {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, "roles", &[8], json!({})).await;
        for role in Role::ALL {
            let others = Role::ALL.into_iter().filter(|other| *other != role);
            let before: Vec<_> = others.clone().map(|other| stage.untouched(other)).collect();
            let own = stage.untouched(role);
            stage.edit(restarts(role, "1")).await;
            stage.promoted().await;
            let after: Vec<_> = others.map(|other| stage.untouched(other)).collect();
            assert_eq!(before, after, "an edit of {role:?}");
            assert_ne!(own, stage.untouched(role), "an edit of {role:?} restarts it");
        }
        always::check(&stage.events(), 8);
    });
}

#[test]
fn a_change_of_the_contract_goes_in_order_mixes_no_pair_and_stays_within_the_gpus() {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, "contract", &[8], json!({})).await;
        // A pod takes a moment to end, and holds its GPUs until then.
        stage.script.set(|_| Life {
            terminating: Duration::from_secs(1),
            ..Life::default()
        });
        let since = always::now(&stage.events());
        stage.edit(json!({"model": {"name": "m2"}})).await;
        let chat = stage.promoted().await;
        let roles = chat.status.expect("a status").roles;
        let revisions: Vec<_> = roles
            .iter()
            .map(|role| (role.name.field(), role.revision.as_str()))
            .collect();
        let events = stage.events();
        always::check(&events, 8);
        always::order(&events, since, &revisions);
    });
}

#[test]
fn of_three_pods_of_a_role_two_serve_at_every_event() {
    cluster::test(async |cluster| {
        let engine = json!({"gpusPerReplica": 1, "replicas": 3});
        // Of the longest change that these replicas may make.
        let rollout = json!({"progressDeadlineSeconds": 20000});
        let spec = json!({"prefill": engine, "decode": engine, "router": {"replicas": 3}, "rollout": rollout});
        let (stage, _operator) = Stage::settled(cluster, "three", &[8], spec).await;
        for role in Role::ALL {
            let since = always::now(&stage.events());
            stage.edit(restarts(role, "1")).await;
            stage.promoted().await;
            let mut state = State::default();
            for event in &stage.events() {
                state.apply(event);
                let of_role = state
                    .all("pods")
                    .filter(|pod| label(pod, "tandem.dev/role") == role.field());
                let serving = of_role.filter(|pod| serves(pod)).count();
                assert!(
                    event.version <= since || serving >= 2,
                    "{serving} {} pods serve at {}",
                    role.field(),
                    event.version
                );
            }
        }
        always::check(&stage.events(), 8);
    });
}

#[test]
fn no_old_pod_goes_before_the_routers_know_the_new_one() {
    cluster::test(async |cluster| {
        let spec = json!({"prefill": {"gpusPerReplica": 1}, "decode": {"gpusPerReplica": 1, "replicas": 2}});
        let (stage, _operator) = Stage::settled(cluster, "unknown", &[8], spec).await;
        let finds_none = |finds_none: bool| {
            stage.script.set(move |_| Life {
                runs: Runs::Peer(Script {
                    finds_none,
                    ..Script::default()
                }),
                ..Life::default()
            });
        };
        finds_none(true);
        stage.edit(restarts(Role::Decode, "1")).await;
        let replicas = |state: &State| {
            let of_role = state
                .all("deployments")
                .filter(|one| label(one, "tandem.dev/role") == "decode");
            let mut all: Vec<_> = of_role
                .map(|one| {
                    (
                        one["spec"]["replicas"].as_u64(),
                        one["status"]["readyReplicas"].as_u64(),
                    )
                })
                .collect();
            all.sort_unstable();
            all
        };
        let one_each = [(Some(1), Some(1)); 2];
        let looked = |state: &State| {
            (replicas(state) == one_each)
                .then_some(())
                .ok_or(format!("{:?}", replicas(state)))
        };
        stage.recorder.until("the first new pod is ready", LIMIT, looked).await;
        // Long enough for another look of the operator's.
        tokio::time::sleep(Duration::from_secs(8)).await;
        assert_eq!(replicas(&stage.recorder.state()), one_each);
        finds_none(false);
        stage.promoted().await;
        always::check(&stage.events(), 8);
    });
}
