//! What the processes measure of the ways between them is told, and blocks nothing.

use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_e2e::cluster;
use tandem_e2e::cluster::kubelet::{Life, Runs};
use tandem_e2e::cluster::peer::Script;

use crate::processes::{info, ready};
use crate::stage::{Stage, condition, is};

/// Every process does this from now on.
fn all(stage: &Stage, script: Script) {
    stage.script.set(move |_| Life {
        runs: Runs::Peer(script),
        ..Life::default()
    });
}

/// What is Unknown turns at once, what was told once turns once a minute.
fn without_probe() -> Value {
    json!({"rollout": {"gates": {"probe": {"mode": "Off"}}}})
}

#[test]
fn a_cut_link_and_lost_clients_are_told_with_their_numbers_and_hold_nothing_up() {
    cluster::test(async |cluster| {
        // Without a probe nothing has crossed yet.
        let (stage, _operator) = Stage::settled(cluster, "health", &[8], without_probe()).await;
        for (type_, reason) in [("TransferHealthy", "NoTraffic"), ("ClientPathHealthy", "NotProbed")] {
            assert_eq!(condition(&stage.chat(), type_), ("Unknown".into(), reason.into()));
        }
        let before: Vec<_> = Role::ALL.into_iter().map(|role| stage.untouched(role)).collect();

        let cut = Script {
            handoffs: (0, 3),
            clients: (20, 6),
            ..Script::default()
        };
        all(&stage, cut);
        let chat = stage
            .until("both are told", |chat| {
                is(chat, "TransferHealthy", "False") && is(chat, "ClientPathHealthy", "False")
            })
            .await;
        let message = |type_: &str| {
            let status = chat.status.as_ref().expect("a status");
            let found = status.conditions.iter().find(|one| one.type_ == type_);
            found.expect("a condition").message.clone()
        };
        assert_eq!(condition(&chat, "TransferHealthy").1, "HandoffsFail");
        assert!(
            message("TransferHealthy").contains("the last 3 hand-offs failed"),
            "{}",
            message("TransferHealthy")
        );
        assert!(
            message("TransferHealthy").contains("peer_lost 3"),
            "{}",
            message("TransferHealthy")
        );
        assert!(
            message("ClientPathHealthy").contains("6 clients left"),
            "{}",
            message("ClientPathHealthy")
        );
        for other in ["Ready", "Available"] {
            assert!(is(&chat, other, "True"), "{other}: {:?}", condition(&chat, other));
        }
        // A change goes through all the same: they inform and block nothing.
        stage.edit(json!({"decode": {"knobs": {"maxRunning": 7}}})).await;
        stage.promoted().await;
        let pod = ready(&stage.client, &stage.namespace, "decode").await;
        assert_eq!(info(&pod).await.knobs.and_then(|knobs| knobs.max_running), Some(7));
        let after: Vec<_> = Role::ALL.into_iter().map(|role| stage.untouched(role)).collect();
        assert_eq!(before, after, "no workload is touched");

        all(
            &stage,
            Script {
                handoffs: (5, 0),
                clients: (20, 0),
                ..Script::default()
            },
        );
        stage
            .until("both are well again", |chat| {
                is(chat, "TransferHealthy", "True") && is(chat, "ClientPathHealthy", "True")
            })
            .await;
    });
}

#[test]
fn engines_that_do_not_go_together_are_told() {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, "apart", &[8], without_probe()).await;
        all(
            &stage,
            Script {
                no_pair: true,
                ..Script::default()
            },
        );
        let chat = stage
            .until("it is told", |chat| is(chat, "TransferHealthy", "False"))
            .await;
        assert_eq!(condition(&chat, "TransferHealthy").1, "NoPair");
    });
}
