//! How soon a deployment is looked at again, where no watch tells of what it waits for.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use tandem_crds::PDDeploymentStatus;
use tandem_crds::status::{Direction, RolloutStatus, Step};

/// Settled deployments' processes are asked this often: a link that breaks is noticed by its ends within 15 s, and told within
/// 30 s.
const SETTLED: Duration = Duration::from_secs(10);
/// No watch tells of a request that ends, of knobs that were taken or of a router that knows an engine. Most steps end soon: while
/// one is young, and while a deletion waits for requests, it is looked at this often …
const BRISK: Duration = Duration::from_secs(1);
/// … and later this often.
pub(super) const WAITING: Duration = Duration::from_secs(5);
/// How long a step is young.
const YOUTH: SignedDuration = SignedDuration::from_mins(1);
/// What a process said so lately is not asked for again by what happens meanwhile: a little less than [`BRISK`].
const FRESH: Duration = Duration::from_millis(900);

/// Of one deployment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    /// It is looked at again after this.
    pub again: Duration,
    /// How old what its processes have said may be then.
    pub answers: Duration,
}

/// A change that waits for a person.
pub(super) fn stands(rollout: &RolloutStatus) -> bool {
    rollout.direction == Direction::Held || rollout.stopped_at.is_some()
}

impl Pace {
    pub fn of(status: &PDDeploymentStatus, now: Timestamp) -> Self {
        let (again, answers) = match &status.rollout {
            _ if status.step == Step::Delete => (BRISK, FRESH),
            Some(rollout) if stands(rollout) => (SETTLED, FRESH),
            Some(rollout) if now.duration_since(rollout.step_started_at.0) < YOUTH => (BRISK, FRESH),
            Some(_) => (WAITING, FRESH),
            None => (SETTLED, SETTLED),
        };
        Self { again, answers }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use serde_json::json;

    use super::*;

    fn seconds(status: serde_json::Value, at: i64) -> u64 {
        let status: PDDeploymentStatus = serde_json::from_value(status).unwrap();
        let pace = Pace::of(&status, Timestamp::from_second(at).unwrap());
        assert!(
            pace.answers <= pace.again,
            "it looks again at what it has heard before: {pace:?}"
        );
        pace.again.as_secs()
    }

    #[test]
    fn what_waits_for_processes_is_looked_at_soon_with_answers_of_then() {
        let rollout = |direction: &str, stopped: Option<&str>| {
            json!({
                "step": "Gates",
                "rollout": {
                    "target": "t", "attempt": 1, "restarts": [], "direction": direction, "step": "Gates",
                    "startedAt": "1970-01-01T00:00:00Z", "stepStartedAt": "1970-01-01T00:10:00Z",
                    "deadline": "1970-01-01T01:00:00Z", "stoppedAt": stopped, "failure": "",
                },
            })
        };
        assert_eq!(seconds(rollout("Forward", None), 659), 1);
        assert_eq!(seconds(rollout("Revert", None), 659), 1);
        assert_eq!(seconds(rollout("Forward", None), 660), 5);
        assert_eq!(seconds(rollout("Held", None), 601), 10);
        assert_eq!(seconds(rollout("Forward", Some("1970-01-01T00:10:00Z")), 601), 10);
        assert_eq!(seconds(json!({"step": "Settled"}), 601), 10);
        assert_eq!(seconds(json!({"step": "Delete"}), 601), 1);
    }
}
