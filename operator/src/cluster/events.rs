//! Events: told when something changes, never while it stays as it is.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use tandem_crds::status::{Direction, Outcome};
use tandem_crds::{API_VERSION, KIND, PDDeploymentStatus};

use super::cache::Key;
use super::write::{MANAGER, WriteError, Writer};

/// Bound of a note, in characters: an event takes 1 KiB.
const MAX_NOTE: usize = 900;
/// The conditions whose changes are told.
const TOLD: [&str; 3] = ["Ready", "Available", "Stalled"];

/// One thing that changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    /// Worth a look.
    pub warning: bool,
    /// What changed, in one word.
    pub reason: String,
    /// In the course of what.
    pub action: &'static str,
    /// In full.
    pub note: String,
}

/// What changed from one status to the next.
pub fn transitions(old: &PDDeploymentStatus, new: &PDDeploymentStatus) -> Vec<Transition> {
    let mut all = Vec::new();
    // The newest entry is the one that ended; several never end at once.
    if let Some(entry) = new.history.first().filter(|entry| old.history.first() != Some(entry)) {
        let (warning, reason) = match entry.outcome {
            Outcome::Promoted => (false, "Promoted"),
            Outcome::Superseded => (false, "Superseded"),
            Outcome::Reverted => (true, "Reverted"),
            Outcome::Held => (true, "Held"),
        };
        all.push(Transition {
            warning,
            reason: reason.to_owned(),
            action: "Rollout",
            note: join(&format!("revision {}", entry.revision), &entry.failure),
        });
    }
    let direction = |status: &PDDeploymentStatus| {
        let rollout = status.rollout.as_ref();
        rollout.map(|rollout| (rollout.target.clone(), rollout.attempt, rollout.direction))
    };
    if let Some(rollout) = new.rollout.as_ref().filter(|_| direction(old) != direction(new)) {
        let (warning, reason) = match rollout.direction {
            Direction::Forward => (false, "Begun"),
            Direction::Revert => (true, "Reverting"),
            // told as the outcome
            Direction::Held => (true, ""),
        };
        if !reason.is_empty() {
            all.push(Transition {
                warning,
                reason: reason.to_owned(),
                action: "Rollout",
                note: join(&format!("revision {}", rollout.target), &rollout.failure),
            });
        }
    }
    if old.step != new.step {
        all.push(Transition {
            warning: false,
            reason: format!("{:?}", new.step),
            action: "Step",
            note: format!("from {:?} to {:?}", old.step, new.step),
        });
    }
    for type_ in TOLD {
        let of = |status: &PDDeploymentStatus| status.conditions.iter().find(|one| one.type_ == type_).cloned();
        let Some(condition) = of(new) else { continue };
        let before = of(old).map_or_else(|| "Unknown".to_owned(), |condition| condition.status);
        if before == condition.status || (before == "Unknown" && type_ == "Stalled" && condition.status == "False") {
            continue;
        }
        let well = if type_ == "Stalled" { "False" } else { "True" };
        all.push(Transition {
            // Before the first install nothing is ready or available: no news.
            warning: condition.status != well && before != "Unknown",
            reason: condition.reason.clone(),
            action: type_,
            note: join(&format!("{type_} is {}", condition.status), &condition.message),
        });
    }
    all
}

fn join(head: &str, tail: &str) -> String {
    let text = if tail.is_empty() {
        head.to_owned()
    } else {
        format!("{head}: {tail}")
    };
    text.chars().take(MAX_NOTE).collect()
}

/// Tells them.
#[derive(Clone)]
pub struct Events {
    recorder: Recorder,
    writer: Writer,
}

impl Events {
    /// In the name of this operator.
    pub fn new(writer: Writer, identity: String) -> Self {
        let reporter = Reporter {
            controller: MANAGER.to_owned(),
            instance: Some(identity),
        };
        Self {
            recorder: Recorder::new(writer.client(), reporter),
            writer,
        }
    }

    /// Tells what changed. One that is refused is logged and not told again: nothing depends on it.
    pub async fn tell(&self, key: &Key, uid: &str, transitions: &[Transition]) {
        let about = ObjectReference {
            api_version: Some(API_VERSION.to_owned()),
            kind: Some(KIND.to_owned()),
            name: Some(key.name.clone()),
            namespace: Some(key.namespace.clone()),
            uid: Some(uid.to_owned()),
            ..ObjectReference::default()
        };
        for transition in transitions {
            let event = Event {
                type_: if transition.warning {
                    EventType::Warning
                } else {
                    EventType::Normal
                },
                reason: transition.reason.clone(),
                note: Some(transition.note.clone()),
                action: transition.action.to_owned(),
                secondary: None,
            };
            let what = || format!("event {} of {KIND} {key}", transition.reason);
            let told = self
                .writer
                .write("Event", "create", what, self.recorder.publish(&event, &about))
                .await;
            match told {
                Ok(()) => {}
                Err(WriteError::NotLeading { .. }) => return,
                Err(error) => tracing::warn!(deployment = %key, %error, "an event was not told"),
            }
        }
    }
}
