//! What an edit restarts, in which order, and what it leaves alone.

use serde_json::json;
use tandem_crds::Role;
use tandem_e2e::cluster;
use tandem_e2e::cluster::kubelet::Life;
use tandem_e2e::cluster::record::{State, label};

use crate::always;
use crate::stage::{Stage, restarts, serves};

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
            terminating: std::time::Duration::from_secs(1),
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
fn of_three_decodes_two_serve_at_every_event() {
    cluster::test(async |cluster| {
        let spec = json!({"prefill": {"gpusPerReplica": 1}, "decode": {"gpusPerReplica": 1, "replicas": 3}});
        let (stage, _operator) = Stage::settled(cluster, "three", &[8], spec).await;
        let since = always::now(&stage.events());
        stage.edit(restarts(Role::Decode, "1")).await;
        stage.promoted().await;
        let events = stage.events();
        let mut state = State::default();
        for event in &events {
            state.apply(event);
            let decodes = state
                .all("pods")
                .filter(|pod| label(pod, "tandem.dev/role") == "decode");
            let serving = decodes.filter(|pod| serves(pod)).count();
            assert!(
                event.version <= since || serving >= 2,
                "{serving} serve at {}",
                event.version
            );
        }
        always::check(&events, 8);
    });
}
