//! Events are told of transitions and of nothing else.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use tandem_crds::PDDeploymentStatus;
use tandem_crds::status::{HistoryEntry, Outcome, Step};
use tandem_operator::cluster::events::transitions;

fn status(ready: &str, reason: &str, message: &str) -> PDDeploymentStatus {
    let condition = |type_: &str, status: &str| Condition {
        type_: type_.into(),
        status: status.into(),
        reason: reason.into(),
        message: message.into(),
        last_transition_time: Time(Timestamp::UNIX_EPOCH),
        observed_generation: Some(1),
    };
    PDDeploymentStatus {
        conditions: vec![condition("Ready", ready), condition("Stalled", "False")],
        ..PDDeploymentStatus::default()
    }
}

#[test]
fn what_stays_as_it_is_is_not_told() {
    let told = transitions(
        &status("False", "Decode", "0 of 1 ready"),
        &status("False", "Gates", "gate Health"),
    );
    assert_eq!(told, [], "another reason and message of the same state");
    assert_eq!(
        transitions(&PDDeploymentStatus::default(), &PDDeploymentStatus::default()),
        []
    );
}

#[test]
fn a_condition_that_turns_is_told_with_its_reason_and_only_bad_news_are_warnings() {
    let (up, down) = (
        status("True", "Running", "it runs"),
        status("False", "PodsNotReady", "0 of 1"),
    );
    let told = transitions(&up, &down);
    assert_eq!(told.len(), 1);
    assert_eq!(
        (told[0].reason.as_str(), told[0].action, told[0].warning),
        ("PodsNotReady", "Ready", true)
    );
    let told = transitions(&down, &up);
    assert_eq!((told[0].reason.as_str(), told[0].warning), ("Running", false));
    let told = transitions(&PDDeploymentStatus::default(), &down);
    assert!(!told[0].warning, "nothing was ready before either");
}

#[test]
fn a_change_that_ended_and_a_step_are_told_once() {
    let old = status("False", "Gates", "");
    let mut new = old.clone();
    new.step = Step::Settled;
    new.history.insert(
        0,
        HistoryEntry {
            revision: "9ab0-11".into(),
            outcome: Outcome::Reverted,
            changed: Vec::new(),
            restarted: Vec::new(),
            started_at: Time(Timestamp::UNIX_EPOCH),
            ended_at: Time(Timestamp::UNIX_EPOCH),
            failure: "gate Probe failed".into(),
        },
    );
    let mut from = old;
    from.step = Step::Gates;
    let told = transitions(&from, &new);
    let reasons: Vec<(&str, bool)> = told.iter().map(|one| (one.reason.as_str(), one.warning)).collect();
    assert_eq!(reasons, [("Reverted", true), ("Settled", false)]);
    assert!(told[0].note.contains("gate Probe failed"));
    assert_eq!(transitions(&new, &new), []);
}
