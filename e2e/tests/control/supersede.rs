//! Edits while a change is under way.

use std::time::Duration;

use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_crds::status::{Outcome, Step};
use tandem_e2e::cluster;
use tandem_e2e::cluster::kubelet::{Life, Runs, Start};
use tandem_e2e::cluster::peer::Script;

use crate::always;
use crate::stage::{Scripted, Stage, is_settled, outcomes, restarts, step};

/// The steps that a change of the contract goes through, as they can be seen from outside.
const STEPS: [Step; 5] = [Step::Quiesce, Step::Prefill, Step::Decode, Step::Router, Step::Gates];

/// Everything takes a while, so that each step can be met.
fn slow(script: &Scripted) {
    script.set(|_| Life {
        start: Start::Ready(Duration::from_millis(500)),
        runs: Runs::Peer(Script {
            delay: Duration::from_millis(100),
            ..Script::default()
        }),
        ..Life::default()
    });
}

fn model(name: &str) -> Value {
    json!({"model": {"name": name}})
}

#[test]
fn a_second_edit_at_each_step_ends_on_the_last() {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, "second", &[8], json!({})).await;
        slow(&stage.script);
        for (index, at) in STEPS.into_iter().enumerate() {
            let generation = stage.edit(model(&format!("a{index}"))).await;
            stage.meet(generation, at).await;
            stage.edit(model(&format!("b{index}"))).await;
            let chat = stage.promoted().await;
            assert_eq!(outcomes(&chat)[0], Outcome::Promoted, "at {at:?}");
            for (_, template) in stage.templates(Role::Prefill) {
                let text = template.to_string();
                assert!(text.contains(&format!("--served-name=b{index}")), "at {at:?}: {text}");
            }
        }
        always::check(&stage.events(), 8);
    });
}

#[test]
fn going_back_at_each_step_ends_where_it_began() {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, "back", &[8], json!({})).await;
        let begun: Vec<_> = Role::ALL.into_iter().map(|role| stage.templates(role)).collect();
        let running = stage.chat().status.expect("a status").revisions.running;
        slow(&stage.script);
        for at in STEPS {
            let generation = stage.edit(model("other")).await;
            stage.meet(generation, at).await;
            stage.edit(model("m")).await;
            let chat = stage.promoted().await;
            assert_eq!(chat.status.expect("a status").revisions.running, running, "at {at:?}");
            let now: Vec<_> = Role::ALL.into_iter().map(|role| stage.templates(role)).collect();
            assert_eq!(now, begun, "at {at:?}");
        }
        always::check(&stage.events(), 8);
    });
}

#[test]
fn pausing_and_approving_at_each_step_supersedes_nothing() {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, "pause", &[8], json!({})).await;
        slow(&stage.script);
        for (index, at) in STEPS.into_iter().enumerate() {
            let generation = stage.edit(model(&format!("p{index}"))).await;
            stage.meet(generation, at).await;
            stage.edit(json!({"rollout": {"paused": true}})).await;
            let paused = stage
                .until("it stands, or was done before", |chat| {
                    let status = chat.status.clone().unwrap_or_default();
                    Some(status.observed_generation) == chat.metadata.generation
                })
                .await;
            let target = paused.status.expect("a status").revisions.target;
            stage
                .edit(json!({"rollout": {"paused": false, "approvedRevision": "else"}}))
                .await;
            let chat = stage.promoted().await;
            assert_eq!(chat.status.expect("a status").revisions.target, target, "at {at:?}");
        }

        stage
            .edit(json!({"rollout": {"approval": "BeforeRestart", "approvedRevision": ""}}))
            .await;
        for approval in ["BeforeRestart", "BeforePromote"] {
            stage
                .edit(json!({"rollout": {"approval": approval}, "model": {"name": approval.to_lowercase()}}))
                .await;
            let waits = stage.until("it waits for a person", |chat| {
                let status = chat.status.clone().unwrap_or_default();
                step(chat) == Step::Approve && Some(status.observed_generation) == chat.metadata.generation
            });
            let target = waits.await.status.expect("a status").revisions.target;
            let approved = target.rsplit_once('-').expect("TARGET-VARIANT").0.to_owned();
            stage.edit(json!({"rollout": {"approvedRevision": approved}})).await;
            stage.promoted().await;
        }
        let chat = stage.chat();
        let all = outcomes(&chat);
        assert!(all.iter().all(|outcome| *outcome == Outcome::Promoted), "{all:?}");
        // the first, one for each step, and one for each kind of approval
        assert_eq!(all.len(), 1 + STEPS.len() + 2);
        always::check(&stage.events(), 8);
    });
}

#[test]
fn nothing_moves_while_paused() {
    cluster::test(async |cluster| {
        let (stage, _operator) = Stage::settled(cluster, "still", &[8], json!({})).await;
        let before: Vec<_> = Role::ALL.into_iter().map(|role| stage.untouched(role)).collect();
        let mut edit = restarts(Role::Decode, "1");
        edit["rollout"] = json!({"paused": true});
        stage.edit(edit).await;
        stage
            .until("it is seen", |chat| {
                let status = chat.status.clone().unwrap_or_default();
                Some(status.observed_generation) == chat.metadata.generation && status.rollout.is_some()
            })
            .await;
        let after: Vec<_> = Role::ALL.into_iter().map(|role| stage.untouched(role)).collect();
        assert_eq!(before, after);
        stage.edit(json!({"rollout": {"paused": false}})).await;
        let chat = stage.promoted().await;
        assert!(is_settled(&chat));
    });
}
