//! A change, until it has ended.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use futures::StreamExt as _;
use jiff::{SignedDuration, Timestamp};
use kube::runtime::watcher::{self, watch_object};
use kube::runtime::{WatchStreamExt as _, watcher::Error};
use tandem_crds::PDDeploymentStatus;
use tandem_crds::status::{Direction, Outcome};
use tokio::time::{Instant, timeout_at};

use super::connect::{Cluster, ClusterError, Need, RESOURCE};
use super::deployment::Deployment;
use super::status::headline;
use super::{MOVING, OVERTAKEN, STUCK};
use crate::console;

/// Beyond a change's own deadline, by which the operator ends it.
const AFTER_DEADLINE: Duration = Duration::from_mins(1);
/// Where nothing says how long a change may take.
const DEADLINE: Duration = Duration::from_hours(2);
/// Without a deadline a watch lasts as long as anything.
const FOREVER: Duration = Duration::from_hours(24 * 365);

/// Whether to stay until the change has ended.
#[derive(Debug, Args)]
pub struct WaitArgs {
    /// Wait until the change has ended, and say each step; the exit code says how it ended
    #[arg(long)]
    pub wait: bool,
    /// Wait no longer than this, such as 90s or 1h30m [default: rollout.progressDeadlineSeconds and a minute]
    #[arg(long, value_name = "DURATION", requires = "wait", value_parser = duration)]
    timeout: Option<Duration>,
}

fn duration(text: &str) -> Result<Duration, String> {
    let parsed: SignedDuration = text.parse().map_err(|error| format!("{error}"))?;
    Duration::try_from(parsed).map_err(|_| "it is negative".to_owned())
}

/// Which change is followed.
#[derive(Debug)]
pub struct Change {
    /// It begins when the operator has seen this token.
    pub token: Option<String>,
    /// Its target, once it is known.
    pub target: Option<String>,
}

/// Follows a change to its end.
pub async fn wait(
    cluster: &Cluster,
    deployment: &Deployment,
    mut change: Change,
    args: &WaitArgs,
) -> Result<ExitCode, ClusterError> {
    let seconds = deployment.object.data["spec"]["rollout"]["progressDeadlineSeconds"].as_u64();
    let own = seconds.map_or(DEADLINE, Duration::from_secs) + AFTER_DEADLINE;
    let ended = follow(cluster, deployment.name(), args.timeout.unwrap_or(own), |now| {
        change.ended(&now.status)
    });
    let (code, text) = match ended.await? {
        Followed::Ended(code, text) => (code, text),
        Followed::Gone => (OVERTAKEN, "it was deleted".to_owned()),
        Followed::Late(limit) => (MOVING, format!("not ended within {limit:?}; it goes on")),
    };
    println!("{text}");
    Ok(ExitCode::from(code))
}

/// Shows each turn until the deployment is gone.
pub async fn watch(cluster: &Cluster, name: &str) -> Result<ExitCode, ClusterError> {
    // whether there is one at all
    Deployment::get(cluster, name).await?;
    follow(cluster, name, FOREVER, |_| None).await?;
    println!("it was deleted");
    Ok(ExitCode::SUCCESS)
}

impl Change {
    /// How it ended: an exit code and a sentence.
    fn ended(&mut self, status: &PDDeploymentStatus) -> Option<(u8, String)> {
        if self.token.is_some() && self.token != status.restart_token {
            return None;
        }
        if let Some(rollout) = &status.rollout {
            let target = self.target.get_or_insert_with(|| rollout.target.clone());
            if rollout.target == *target {
                let held = rollout.direction == Direction::Held;
                return held.then(|| (STUCK, format!("held: {}", rollout.failure)));
            }
        }
        // What has ended so fast that it was never seen is the newest.
        let is_it = |revision: &str| self.target.as_deref().is_none_or(|target| target == revision);
        let entry = status.history.iter().find(|entry| is_it(&entry.revision))?;
        Some(match entry.outcome {
            Outcome::Promoted => (0, format!("promoted: {} runs", entry.revision)),
            Outcome::Reverted => (
                STUCK,
                format!("reverted to {}: {}", status.revisions.last_good, entry.failure),
            ),
            Outcome::Held => (STUCK, format!("held: {}", entry.failure)),
            Outcome::Superseded => (
                OVERTAKEN,
                format!("superseded: {} is wanted now", status.revisions.target),
            ),
        })
    }
}

enum Followed {
    Ended(u8, String),
    Gone,
    Late(Duration),
}

/// Prints a line for each turn, until `ended` says that it was the last.
async fn follow(
    cluster: &Cluster,
    name: &str,
    limit: Duration,
    mut ended: impl FnMut(&Deployment) -> Option<(u8, String)>,
) -> Result<Followed, ClusterError> {
    let until = Instant::now() + limit;
    let objects = watch_object(cluster.deployments(), name).default_backoff();
    let mut objects = std::pin::pin!(objects);
    let mut last = String::new();
    loop {
        let Ok(next) = timeout_at(until, objects.next()).await else {
            return Ok(Followed::Late(limit));
        };
        let deployment = match next {
            Some(Ok(Some(object))) => Deployment::read(object)?,
            Some(Ok(None)) => return Ok(Followed::Gone),
            Some(Err(error)) => {
                give_up(cluster, error)?;
                continue;
            }
            // it starts anew by itself
            None => return Ok(Followed::Late(limit)),
        };
        let line = headline(&deployment);
        if line != last {
            println!("{} {line}", Timestamp::now().strftime("%H:%M:%SZ"));
            last = line;
        }
        if let Some((code, text)) = ended(&deployment) {
            return Ok(Followed::Ended(code, text));
        }
    }
}

/// What is refused stays refused; all else is tried again.
fn give_up(cluster: &Cluster, error: Error) -> Result<(), ClusterError> {
    let need = Need::view("watch", RESOURCE);
    match error {
        Error::InitialListFailed(error) | Error::WatchStartFailed(error) if is_refusal(&error) => {
            Err(cluster.refused(need, &error))
        }
        error => {
            console::note(&format!("the watch was cut, and begins anew: {}", told(&error)));
            Ok(())
        }
    }
}

fn is_refusal(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 401 | 403 | 404))
}

fn told(error: &watcher::Error) -> String {
    console::with_causes(error)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn status(token: &str, rollout: Option<Value>, history: &[(&str, &str)]) -> PDDeploymentStatus {
        let at = "2026-12-01T00:00:00Z";
        let mut status = json!({
            "restartToken": token, "revisions": {"target": "new-1", "lastGood": "old-1"},
            "history": history.iter().map(|(revision, outcome)| json!({
                "revision": revision, "outcome": outcome, "startedAt": at, "endedAt": at, "failure": "why",
            })).collect::<Vec<_>>(),
        });
        if let Some(mut rollout) = rollout {
            for (name, value) in [
                ("attempt", json!(1)),
                ("restarts", json!([])),
                ("step", json!("Decode")),
            ] {
                rollout[name] = value;
            }
            for name in ["startedAt", "stepStartedAt", "deadline"] {
                rollout[name] = at.into();
            }
            status["rollout"] = rollout;
        }
        serde_json::from_value(status).unwrap()
    }

    fn change() -> Change {
        Change {
            token: Some("t".into()),
            target: None,
        }
    }

    #[test]
    fn the_change_before_is_taken_for_the_one_that_is_waited_for() {
        let mut change = change();
        let before = status("old", None, &[("a-0", "Promoted")]);
        assert_eq!(change.ended(&before), None);
        let forward = json!({"target": "a-1", "direction": "Forward"});
        let during = status("t", Some(forward), &[("a-0", "Promoted")]);
        assert_eq!(change.ended(&during), None);
        let after = status("t", None, &[("a-1", "Reverted"), ("a-0", "Promoted")]);
        assert_eq!(
            change.ended(&after).unwrap(),
            (STUCK, "reverted to old-1: why".to_owned())
        );
    }

    #[test]
    fn another_change_is_taken_for_the_one_that_is_waited_for() {
        let mut change = change();
        let forward = |target: &str| json!({"target": target, "direction": "Forward"});
        assert_eq!(change.ended(&status("t", Some(forward("a-1")), &[])), None);
        let other = status("t", Some(forward("b-1")), &[("a-1", "Superseded")]);
        assert_eq!(change.ended(&other).unwrap().0, OVERTAKEN);
    }

    #[test]
    fn one_that_ended_unseen_is_waited_for_until_the_deadline() {
        let after = status("t", None, &[("a-1", "Promoted"), ("a-0", "Reverted")]);
        assert_eq!(change().ended(&after).unwrap().0, 0);
        let held = json!({"target": "a-1", "direction": "Held", "failure": "no GPU"});
        assert_eq!(
            change().ended(&status("t", Some(held), &[])).unwrap(),
            (STUCK, "held: no GPU".to_owned())
        );
    }

    #[test]
    fn a_time_of_kubectl_is_not_understood() {
        for (text, seconds) in [("90s", 90), ("5m", 300), ("1h30m", 5400)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)));
        }
        assert!(duration("5").is_err());
        assert!(duration("-5s").is_err());
    }
}
