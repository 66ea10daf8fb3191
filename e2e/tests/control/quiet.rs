//! A settled deployment is left alone: by resyncs, by another operator, by an operator with other defaults.

use serde_json::json;
use tandem_crds::Role;
use tandem_crds::status::Outcome;
use tandem_e2e::cluster;
use tandem_e2e::cluster::api::Patch;
use tandem_e2e::cluster::kubelet::{Life, Runs};
use tandem_e2e::cluster::operator::Operator;
use tandem_e2e::cluster::peer::{Completions, Script};
use tandem_e2e::eventually;

use crate::stage::{LIMIT, NAME, Stage, is, is_settled, outcomes, restarts};

/// Passes that the operator has made.
async fn passes(operator: &Operator) -> f64 {
    operator.metrics().await.sum("tandem_operator_passes_total", &[])
}

async fn resync(stage: &Stage, operator: &Operator, number: u32) {
    let before = passes(operator).await;
    let touch = json!({"metadata": {"annotations": {"test/touched": number.to_string()}}});
    stage.api().patch(NAME, Patch::Merge, &touch).await.expect("a touch");
    eventually("a pass", LIMIT, async || {
        let now = passes(operator).await;
        if now > before {
            Ok(())
        } else {
            Err(format!("{now} passes"))
        }
    })
    .await;
}

#[test]
fn ten_resyncs_of_a_settled_deployment_write_nothing() {
    cluster::test(async |cluster| {
        let (stage, mut operator) = Stage::settled(cluster, "quiet", &[8], json!({})).await;
        // What a change leaves to do comes within a pass or two.
        for number in 0..2 {
            resync(&stage, &operator, number).await;
        }
        let before = stage.writes();
        for number in 10..20 {
            resync(&stage, &operator, number).await;
        }
        operator.kill_and_restart();
        operator.ready().await;
        resync(&stage, &operator, 20).await;
        let after = stage.writes();
        assert_eq!(after[before.len()..], [] as [String; 0]);
    });
}

#[test]
fn an_operator_with_other_defaults_changes_nobody_and_a_revert_is_byte_equal() {
    cluster::test(async |cluster| {
        let (mut stage, mut operator) = Stage::settled(cluster, "upgrade", &[8], json!({})).await;
        let before: Vec<_> = Role::ALL.into_iter().map(|role| stage.untouched(role)).collect();
        let templates: Vec<_> = Role::ALL.into_iter().map(|role| stage.templates(role)).collect();
        operator.process().kill();
        stage.options.engine_image = "tandem.test/engine:2".into();
        stage.options.router_image = "tandem.test/router:2".into();
        operator = Operator::start(&stage.options);
        operator.ready().await;
        resync(&stage, &operator, 1).await;
        let after: Vec<_> = Role::ALL.into_iter().map(|role| stage.untouched(role)).collect();
        assert_eq!(before, after);

        // The new default comes with an edit of the role; it does not hold, and all is as it was.
        stage.script.set(|pod| {
            let image = pod.spec.as_ref().and_then(|spec| spec.containers[0].image.as_deref());
            let completions = if image == Some("tandem.test/engine:2") {
                Completions::Recomputed
            } else {
                Completions::Moved
            };
            Life {
                runs: Runs::Peer(Script {
                    completions,
                    ..Script::default()
                }),
                ..Life::default()
            }
        });
        let mut edit = restarts(Role::Decode, "1");
        edit["rollout"] = json!({"gates": {"probe": {"timeoutSeconds": 6}}});
        stage.edit(edit).await;
        let chat = stage.until("it is reverted", |chat| {
            is_settled(chat) && outcomes(chat).first() == Some(&Outcome::Reverted) && is(chat, "Available", "True")
        });
        chat.await;
        let now: Vec<_> = Role::ALL.into_iter().map(|role| stage.templates(role)).collect();
        assert_eq!(now, templates);
    });
}
