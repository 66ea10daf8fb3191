//! How a deployment stands.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;

use jiff::Timestamp;
use tandem_crds::status::{Direction, RolloutStatus, Step};
use tandem_plan::target_of;

use super::connect::{Cluster, ClusterError};
use super::deployment::Deployment;
use super::table::{age, columns, or_none, span};
use super::{MOVING, STUCK, follow};

/// In one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Ready,
    Moving,
    Stuck,
}

/// Shows one; the exit code says how it stands.
pub async fn show(cluster: &Cluster, name: &str, json: bool) -> Result<ExitCode, ClusterError> {
    let mut deployment = Deployment::get(cluster, name).await?;
    let code = code(&deployment);
    let text = if json {
        deployment.object.metadata.managed_fields = None;
        serde_json::to_string_pretty(&deployment.object).unwrap_or_default() + "\n"
    } else {
        describe(&deployment)
    };
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(code)
}

/// Shows how it stands now, and a line for each turn that it takes from then on, until it is gone.
pub async fn watch(cluster: &Cluster, name: &str) -> Result<ExitCode, ClusterError> {
    follow::watch(cluster, name).await
}

fn standing(deployment: &Deployment) -> Standing {
    let status = &deployment.status;
    let is = |type_: &str| {
        deployment
            .condition(type_)
            .is_some_and(|condition| condition.status == "True")
    };
    let stands = status
        .rollout
        .as_ref()
        .is_some_and(|rollout| rollout.stopped_at.is_some());
    if deployment.unseen().is_some() {
        Standing::Moving
    } else if is("Ready") {
        Standing::Ready
    } else if is("Stalled") || stands || (status.rollout.is_none() && !status.revisions.rejected.is_empty()) {
        Standing::Stuck
    } else {
        Standing::Moving
    }
}

fn code(deployment: &Deployment) -> ExitCode {
    match standing(deployment) {
        Standing::Ready => ExitCode::SUCCESS,
        Standing::Moving => ExitCode::from(MOVING),
        Standing::Stuck => ExitCode::from(STUCK),
    }
}

/// How it stands, on one line.
pub fn headline(deployment: &Deployment) -> String {
    let status = &deployment.status;
    if let Some(generation) = deployment.unseen() {
        return format!(
            "the operator has not looked at generation {generation} yet (at {} last)",
            status.observed_generation
        );
    }
    let said = |type_: &str| {
        let condition = deployment.condition(type_);
        condition.map_or("", |condition| condition.message.as_str())
    };
    let Some(rollout) = &status.rollout else {
        let Some(ready) = deployment.condition("Ready") else {
            return "the operator has not looked at it yet".to_owned();
        };
        return match ready.status.as_str() {
            "True" => format!("ready: {}", ready.message),
            _ => with("not ready", &ready.reason, &ready.message),
        };
    };
    let waits = said("Progressing");
    match rollout.direction {
        Direction::Forward => with(&format!("to {}", rollout.target), &format!("{:?}", status.step), waits),
        Direction::Revert => {
            let back = format!("back to {}", status.revisions.last_good);
            let waits = with(waits, "because", &rollout.failure);
            with(&back, &format!("{:?}", status.step), &waits)
        }
        Direction::Held => with("held", &rollout.target, &rollout.failure),
    }
}

/// `what, reason: message`, without what is empty.
fn with(what: &str, reason: &str, message: &str) -> String {
    let begin = [what, reason].into_iter().filter(|part| !part.is_empty());
    let begin = begin.collect::<Vec<_>>().join(", ");
    if message.is_empty() {
        begin
    } else {
        format!("{begin}: {message}")
    }
}

fn describe(deployment: &Deployment) -> String {
    let status = &deployment.status;
    let mut text = format!(
        "{} in {}: {}\n",
        deployment.name(),
        deployment.namespace(),
        headline(deployment)
    );
    let mut section = |title: &str, rows: &[Vec<String>]| {
        if !rows.is_empty() {
            text.push_str(title);
            text.push('\n');
            text.push_str(&columns("  ", rows));
        }
    };
    let conditions = status.conditions.iter().map(|condition| {
        vec![
            condition.type_.clone(),
            condition.status.clone(),
            condition.reason.clone(),
            age(condition.last_transition_time.0),
            condition.message.clone(),
        ]
    });
    section(
        "conditions",
        &headed(["TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"], conditions),
    );
    let roles = status.roles.iter().map(|role| {
        vec![
            format!("{:?}", role.name),
            role.serving.clone(),
            role.lost.to_string(),
            role.gpus.to_string(),
            or_none(&role.backend),
            or_none(&role.revision),
        ]
    });
    section(
        "roles",
        &headed(["NAME", "READY", "LOST", "GPUS", "BACKEND", "REVISION"], roles),
    );
    let revisions = &status.revisions;
    let named = [
        ("running", &revisions.running),
        ("target", &revisions.target),
        ("lastGood", &revisions.last_good),
        ("rejected", &revisions.rejected),
        ("contract", &revisions.contract),
    ];
    let rows: Vec<_> = named
        .map(|(name, revision)| vec![name.to_owned(), or_none(revision)])
        .to_vec();
    section("revisions", &rows);
    if let Some(rollout) = &status.rollout {
        section("rollout", &change(deployment, rollout));
    }
    let gates = status.gates.iter().map(|gate| {
        let outcome = gate
            .outcome
            .map_or_else(|| "Looking".to_owned(), |outcome| format!("{outcome:?}"));
        vec![
            format!("{:?}", gate.name),
            outcome,
            age(gate.started_at.0),
            gate.message.clone(),
        ]
    });
    section("gates", &headed(["NAME", "OUTCOME", "SINCE", "MESSAGE"], gates));
    if status.step == Step::Approve
        && let Some(rollout) = &status.rollout
    {
        let target = target_of(&rollout.target);
        let name = deployment.name();
        let _ = writeln!(text, "{target} waits for a person: kubectl tandem approve {name}");
    }
    text
}

fn headed<const N: usize>(head: [&str; N], rows: impl Iterator<Item = Vec<String>>) -> Vec<Vec<String>> {
    let rows: Vec<_> = rows.collect();
    if rows.is_empty() {
        return rows;
    }
    let head = head.map(str::to_owned).to_vec();
    std::iter::once(head).chain(rows).collect()
}

fn change(deployment: &Deployment, rollout: &RolloutStatus) -> Vec<Vec<String>> {
    let left = rollout.deadline.0.duration_since(Timestamp::now()).as_secs();
    let deadline = match &rollout.stopped_at {
        Some(since) => format!(
            "stands since {}: {}",
            age(since.0),
            if deployment.is_paused() {
                "rollout.paused is set"
            } else {
                "waits for a person"
            }
        ),
        None if rollout.direction == Direction::Held => "held".to_owned(),
        None if left < 0 => format!("{} ago", span(-left)),
        None => format!(
            "in {} ({})",
            span(left),
            rollout.deadline.0.strftime("%Y-%m-%dT%H:%M:%SZ")
        ),
    };
    let restarts: Vec<_> = rollout.restarts.iter().map(|role| role.field()).collect();
    let rows = [
        ("target", format!("{}, attempt {}", rollout.target, rollout.attempt)),
        ("direction", format!("{:?}", rollout.direction)),
        ("restarts", or_none(&restarts.join(", "))),
        (
            "step",
            format!("{:?}, for {}", rollout.step, age(rollout.step_started_at.0)),
        ),
        ("began", format!("{} ago", age(rollout.started_at.0))),
        ("deadline", deadline),
        ("failure", or_none(&rollout.failure)),
    ];
    rows.map(|(name, value)| vec![name.to_owned(), value]).to_vec()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(status: &serde_json::Value) -> Deployment {
        let object = json!({
            "apiVersion": "tandem.dev/v1alpha1", "kind": "PDDeployment",
            "metadata": {"name": "chat", "namespace": "serving", "generation": 7},
            "spec": {}, "status": status,
        });
        Deployment::read(serde_json::from_value(object).unwrap()).unwrap()
    }

    fn condition(type_: &str, status: &str, reason: &str, message: &str) -> serde_json::Value {
        json!({"type": type_, "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-12-01T00:00:00Z"})
    }

    fn rollout(extra: &serde_json::Value) -> serde_json::Value {
        let mut rollout = json!({
            "target": "9ab0000000-1234", "attempt": 1, "restarts": ["Decode"], "direction": "Forward", "step": "Approve",
            "startedAt": "2026-12-01T00:00:00Z", "stepStartedAt": "2026-12-01T00:00:00Z", "deadline": "2026-12-01T02:00:00Z",
        });
        for (name, value) in extra.as_object().unwrap() {
            rollout[name] = value.clone();
        }
        rollout
    }

    #[test]
    fn an_old_status_counts_as_ready() {
        let ready = json!([condition("Ready", "True", "Running", "revision a-1 runs")]);
        let old = of(&json!({"observedGeneration": 6, "conditions": ready}));
        assert_eq!(standing(&old), Standing::Moving);
        assert!(
            headline(&old).contains("has not looked at generation 7"),
            "{}",
            headline(&old)
        );
        let now = of(&json!({"observedGeneration": 7, "conditions": ready}));
        assert_eq!(standing(&now), Standing::Ready);
        assert_eq!(headline(&now), "ready: revision a-1 runs");
    }

    #[test]
    fn what_waits_for_a_person_counts_as_moving() {
        let waits = of(&json!({
            "observedGeneration": 7, "step": "Approve",
            "rollout": rollout(&json!({"stoppedAt": "2026-12-01T00:00:00Z"})),
            "conditions": [condition("Progressing", "False", "Waiting", "write 9ab0000000 to rollout.approvedRevision")],
        }));
        assert_eq!(standing(&waits), Standing::Stuck);
        let text = describe(&waits);
        assert!(text.contains("kubectl tandem approve chat"), "{text}");
        assert!(text.contains("waits for a person"), "{text}");
        let reverted = of(&json!({
            "observedGeneration": 7, "revisions": {"running": "a-1", "rejected": "b-1"},
            "conditions": [condition("Ready", "False", "Reverted", "gate Probe failed")],
        }));
        assert_eq!(standing(&reverted), Standing::Stuck);
        assert_eq!(headline(&reverted), "not ready, Reverted: gate Probe failed");
    }

    #[test]
    fn a_change_that_goes_on_counts_as_stuck() {
        let moving = of(&json!({
            "observedGeneration": 7, "step": "Decode", "rollout": rollout(&json!({"step": "Decode"})),
            "conditions": [condition("Progressing", "True", "Decode", "0 of 1 decode pods of d-1 are ready")],
        }));
        assert_eq!(standing(&moving), Standing::Moving);
        assert_eq!(
            headline(&moving),
            "to 9ab0000000-1234, Decode: 0 of 1 decode pods of d-1 are ready"
        );
    }
}
