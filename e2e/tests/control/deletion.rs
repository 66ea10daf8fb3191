//! The end of a deployment.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use tandem_crds::status::Step;
use tandem_e2e::cluster;
use tandem_e2e::cluster::kubelet::{Life, Start};
use tandem_e2e::cluster::record::{Event, State};

use crate::stage::{LIMIT, NAME, Stage, serves};

/// What the operator makes, of what is recorded.
const MADE: [&str; 3] = ["deployments", "controllerrevisions", "configmaps"];

fn uid(event: &Event) -> String {
    event.object["metadata"]["uid"].to_string()
}

/// Objects that were made after the deployment was to be deleted.
fn made_after_deletion(events: &[Event]) -> Vec<String> {
    let mut known = BTreeSet::new();
    let mut deleted = false;
    let mut late = Vec::new();
    for event in events {
        let is_new = known.insert(uid(event));
        if deleted && is_new && MADE.contains(&event.kind) {
            late.push(format!("{} {}", event.kind, event.object["metadata"]["name"]));
        }
        deleted |= event.kind == "pddeployments" && !event.object["metadata"]["deletionTimestamp"].is_null();
    }
    assert!(deleted, "nothing was deleted");
    late
}

fn deletion_creates_nothing(policy: &'static str, mid: bool) {
    cluster::test(async |cluster| {
        let purpose = format!("{}{}", policy.to_lowercase(), if mid { "-mid" } else { "" });
        let (stage, _operator) = Stage::settled(cluster, &purpose, &[8], json!({})).await;
        if mid {
            stage.script.set(|_| Life {
                start: Start::Ready(Duration::from_hours(1)),
                ..Life::default()
            });
            let generation = stage.edit(json!({"model": {"name": "m2"}})).await;
            stage.meet(generation, Step::Prefill).await;
            // The old pod is gone, the new one takes its time: the operator waits.
            let waits = |state: &State| match state.all("pods").filter(|pod| !serves(pod)).count() {
                1 => Ok(()),
                other => Err(format!("{other} pods do not serve")),
            };
            stage.recorder.until("the new prefill is made", LIMIT, waits).await;
        }
        let deleted = stage.api().delete(NAME, &json!({"propagationPolicy": policy})).await;
        deleted.expect("a deletion");
        let gone = |state: &State| {
            let left = state
                .all("pddeployments")
                .chain(state.all("deployments"))
                .chain(state.all("pods"));
            let left = left.count();
            if left == 0 {
                Ok(())
            } else {
                Err(format!("{left} are left"))
            }
        };
        stage.recorder.until("all of it is gone", LIMIT, gone).await;
        assert_eq!(made_after_deletion(&stage.events()), Vec::<String>::new());
    });
}

#[test]
fn a_foreground_deletion_creates_nothing() {
    deletion_creates_nothing("Foreground", false);
}

#[test]
fn a_foreground_deletion_amid_a_change_creates_nothing() {
    deletion_creates_nothing("Foreground", true);
}

#[test]
fn a_background_deletion_amid_a_change_creates_nothing() {
    deletion_creates_nothing("Background", true);
}
