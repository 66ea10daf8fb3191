//! Gates that do not hold.

use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_crds::status::{Direction, Outcome};
use tandem_e2e::cluster;
use tandem_e2e::cluster::kubelet::{Life, Runs};
use tandem_e2e::cluster::operator::Operator;
use tandem_e2e::cluster::peer::{Completions, Obeys, Script};

use crate::always;
use crate::stage::{Stage, condition, is, is_settled, outcomes, restarts};

fn short() -> Value {
    json!({"rollout": {"gates": {"probe": {"timeoutSeconds": 15}, "health": {"timeoutSeconds": 10}}}})
}

/// Pods of this annotation do this, others behave.
fn only_changed(stage: &Stage, script: Script) {
    stage.script.set(move |pod| {
        let annotations = pod.metadata.annotations.as_ref();
        let changed = annotations.is_some_and(|all| all.contains_key("change"));
        Life {
            runs: Runs::Peer(if changed { script } else { Script::default() }),
            ..Life::default()
        }
    });
}

/// An edit of decode that a gate does not let through.
fn a_failed_gate_reverts(purpose: &'static str, script: Script) {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, purpose, &[8], short()).await;
        let templates: Vec<_> = Role::ALL.into_iter().map(|role| stage.templates(role)).collect();
        let good = stage.chat().status.expect("a status").revisions.running;
        only_changed(&stage, script);
        stage.edit(restarts(Role::Decode, "1")).await;
        let asked = stage.chat().spec;
        let chat = stage
            .until("it is reverted", |chat| {
                is_settled(chat) && outcomes(chat).first() == Some(&Outcome::Reverted) && is(chat, "Available", "True")
            })
            .await;
        let status = chat.status.clone().expect("a status");
        assert_eq!(status.revisions.running, good);
        assert_eq!(status.revisions.rejected, status.history[0].revision);
        assert!(!status.history[0].failure.is_empty(), "it says why");
        assert_eq!(condition(&chat, "Ready"), ("False".into(), "Reverted".into()));
        assert_eq!(condition(&chat, "Available"), ("True".into(), "Serving".into()));
        let now: Vec<_> = Role::ALL.into_iter().map(|role| stage.templates(role)).collect();
        assert_eq!(now, templates);
        assert_eq!(chat.spec.decode.pod.annotations["change"], "1", "{asked:#?}");

        // An edit that no pod sees does not try it again.
        stage.edit(json!({"rollout": {"approvedRevision": "nothing"}})).await;
        let chat = stage.until("it is seen", is_settled).await;
        assert_eq!(outcomes(&chat), [Outcome::Reverted, Outcome::Promoted]);
        always::check(&stage.events(), 8);
    });
}

#[test]
fn a_decode_that_ignores_the_hand_off_is_reverted() {
    let script = Script {
        completions: Completions::Recomputed,
        ..Script::default()
    };
    a_failed_gate_reverts("no-kv", script);
}

#[test]
fn a_decode_that_fails_completions_is_reverted() {
    let script = Script {
        completions: Completions::Failed,
        ..Script::default()
    };
    a_failed_gate_reverts("failing", script);
}

#[test]
fn a_hot_knob_that_is_said_to_be_taken_and_is_not_is_reverted() {
    cluster::test(async |cluster| {
        let mut spec = short();
        spec["timeouts"] =
            json!({"drainSeconds": 4, "inflightWatchdogSeconds": 3, "stallSeconds": 2, "startupSeconds": 3});
        spec["rollout"]["progressDeadlineSeconds"] = json!(60);
        let (stage, _operator) = Stage::settled(cluster, "deaf", &[8], spec).await;
        stage.script.set(|_| Life {
            runs: Runs::Peer(Script {
                knobs: Obeys::Ignores,
                ..Script::default()
            }),
            ..Life::default()
        });
        stage.edit(json!({"decode": {"knobs": {"maxRunning": 7}}})).await;
        stage
            .until("it is reverted", |chat| {
                is_settled(chat) && outcomes(chat).first() == Some(&Outcome::Reverted) && is(chat, "Available", "True")
            })
            .await;
    });
}

#[test]
fn a_first_install_that_fails_is_held() {
    cluster::test(async |cluster| {
        let stage = Stage::new(cluster, "held", &[8]).await;
        stage.script.set(|_| Life {
            runs: Runs::Peer(Script {
                completions: Completions::Recomputed,
                ..Script::default()
            }),
            ..Life::default()
        });
        let _operator = Operator::start(&stage.options);
        stage.create(short()).await;
        let chat = stage
            .until("it is held", |chat| {
                let rollout = chat.status.as_ref().and_then(|status| status.rollout.as_ref());
                rollout.is_some_and(|rollout| rollout.direction == Direction::Held)
            })
            .await;
        assert_eq!(condition(&chat, "Stalled"), ("True".into(), "Held".into()));
        assert_eq!(condition(&chat, "Ready").0, "False");
        // What was wrong is mended, and a new target is tried.
        stage.script.set(|_| Life::default());
        stage.edit(restarts(Role::Decode, "1")).await;
        stage.promoted().await;
    });
}
