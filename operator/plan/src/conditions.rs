//! What people are told: conditions, and what runs of each role.

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use tandem_crds::status::{Direction, RoleStatus};
use tandem_crds::{Backend, Role};

use crate::gates;
use crate::health::{self, Health};
use crate::intents::Traffic;
use crate::machine::Machine;
use crate::revision::Revision;
use crate::world::Trouble;

/// What mirrors an observation that comes and goes is well again no sooner than so long after it last turned.
const AT_MOST_EVERY: SignedDuration = SignedDuration::from_secs(60);
const MAX_MESSAGE: usize = 1000;

/// Brings roles and conditions up to date.
pub fn tell(machine: &mut Machine<'_>) {
    machine.status.observed_generation = machine.input.generation;
    machine.status.roles = Role::ALL.into_iter().map(|role| role_status(machine, role)).collect();
    for (type_, told, pace) in [
        ("Ready", ready(machine), Pace::AtOnce),
        ("Available", available(machine), Pace::AtOnce),
        ("Progressing", progressing(machine), Pace::AtOnce),
        ("Stalled", stalled(machine), Pace::AtOnce),
        ("KnobsLive", knobs_live(machine), Pace::AtOnce),
        ("CapacitySatisfied", capacity(machine), Pace::Damped),
    ] {
        set(machine, type_, told, pace);
    }
    for (type_, health, none) in [
        ("TransferHealthy", transfer(machine), "NoTraffic"),
        (
            "ClientPathHealthy",
            health::client_path(machine.input.world),
            "NotProbed",
        ),
    ] {
        let is_told = machine
            .status
            .conditions
            .iter()
            .any(|condition| condition.type_ == type_);
        if health != Health::Unheard || !is_told {
            set(machine, type_, measured(health, none), Pace::Measured);
        }
    }
}

/// How a condition follows what it tells of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// At once.
    AtOnce,
    /// To False at once; else it turns at most once in [`AT_MOST_EVERY`].
    Damped,
    /// Likewise, save from Unknown; and it says what gave it its reason for as long as that is the reason, for the numbers of a
    /// measurement always move.
    Measured,
}

/// Status, reason and message.
type Told = (&'static str, String, String);

fn told(holds: bool, reason: &str, message: impl Into<String>) -> Told {
    (if holds { "True" } else { "False" }, reason.to_owned(), message.into())
}

fn set(machine: &mut Machine<'_>, type_: &str, (status, reason, message): Told, pace: Pace) {
    let now = machine.input.now;
    let message: String = message.chars().take(MAX_MESSAGE).collect();
    let conditions = &mut machine.status.conditions;
    let Some(old) = conditions.iter_mut().find(|condition| condition.type_ == type_) else {
        conditions.push(Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason,
            message,
            last_transition_time: Time(now),
            observed_generation: Some(machine.input.generation),
        });
        return;
    };
    old.last_transition_time.0 = old.last_transition_time.0.min(now);
    let since = old.last_transition_time.0;
    let waits = match pace {
        Pace::AtOnce => false,
        Pace::Damped => status != "False",
        Pace::Measured => status != "False" && old.status != "Unknown",
    };
    if waits && old.status != status && now.duration_since(since) < AT_MOST_EVERY {
        let again = since.saturating_add(AT_MOST_EVERY).unwrap_or(now);
        machine.wake(again);
        return;
    }
    old.observed_generation = Some(machine.input.generation);
    if pace == Pace::Measured && old.status == status && old.reason == reason {
        return;
    }
    if old.status != status {
        status.clone_into(&mut old.status);
        old.last_transition_time = Time(now);
    }
    old.reason = reason;
    old.message = message;
}

/// What should serve now: the target once a change has gone that far, else what runs.
fn goal<'a>(machine: &Machine<'a>) -> Option<&'a Revision> {
    let rollout = machine.status.rollout.as_ref();
    let forward = rollout.filter(|rollout| rollout.direction != Direction::Revert);
    let target = forward.and_then(|rollout| {
        machine
            .input
            .revisions
            .iter()
            .find(|stored| stored.id == rollout.target)
    });
    target.or(machine.running())
}

fn role_status(machine: &Machine<'_>, role: Role) -> RoleStatus {
    let world = machine.input.world;
    let pods = || world.pods.iter().filter(move |pod| pod.role == role);
    let goal = goal(machine);
    let (desired, revision) = goal.map_or((0, ""), |goal| (goal.replicas(role), goal.hash(role)));
    let ready = pods().filter(|pod| pod.serves()).count() as i32;
    let said = pods()
        .find(|pod| !pod.backend.is_empty())
        .map(|pod| pod.backend.clone());
    let planned = goal.map(|goal| match role {
        Role::Prefill => goal.spec.prefill.backend,
        Role::Decode | Role::Router => goal.spec.decode.backend,
    });
    let backend = match (role, said, planned) {
        (Role::Router, ..) => String::new(),
        (_, Some(said), _) => said,
        (_, None, Some(Backend::Cpu)) => "cpu".to_owned(),
        (_, None, _) => String::new(),
    };
    RoleStatus {
        name: role,
        backend,
        desired,
        ready,
        serving: format!("{ready}/{desired}"),
        lost: pods().filter(|pod| pod.lost).count() as i32,
        revision: revision.to_owned(),
        gpus: pods().filter(|pod| !pod.lost).map(|pod| pod.gpus).sum(),
    }
}

/// Ready: what the spec asks for is what runs, all of it, and its gates held.
fn ready(machine: &Machine<'_>) -> Told {
    let status = &machine.status;
    if machine.input.deleting.is_some() {
        return told(false, "Deleting", machine.waiting.clone());
    }
    if !machine.input.world.conflicts.is_empty() {
        return told(false, "NameConflict", machine.waiting.clone());
    }
    if let Some(rollout) = &status.rollout {
        let reason = match rollout.direction {
            Direction::Forward if machine.input.spec.rollout.paused => "Paused".to_owned(),
            Direction::Forward => format!("{:?}", status.step),
            Direction::Revert => "Reverting".to_owned(),
            Direction::Held => "Held".to_owned(),
        };
        return (
            "False",
            reason,
            if rollout.failure.is_empty() {
                machine.waiting.clone()
            } else {
                rollout.failure.clone()
            },
        );
    }
    if !status.revisions.rejected.is_empty() {
        let failure = status
            .history
            .first()
            .map(|entry| entry.failure.clone())
            .unwrap_or_default();
        return told(false, "Reverted", failure);
    }
    let Some(running) = machine.running() else {
        return told(false, "NothingRuns", "no revision was promoted yet");
    };
    match gates::unhealthy(machine.input.world, running, Some(Traffic::Admit)) {
        Some(problem) => told(false, "PodsNotReady", problem),
        None => told(true, "Running", format!("revision {} runs", running.id)),
    }
}

/// Available: a request that comes now is served.
fn available(machine: &Machine<'_>) -> Told {
    let world = machine.input.world;
    let serves = |role| world.pods.iter().any(|pod| pod.role == role && pod.serves());
    if let Some(role) = Role::ALL.into_iter().find(|role| !serves(*role)) {
        return told(false, "NoneServes", format!("no {} pod is ready", role.field()));
    }
    let contracts = |role| {
        let ready = world.workloads.iter().filter(move |workload| workload.role == role);
        ready
            .filter(|workload| world.ready(workload.role, &workload.revision) > 0)
            .map(|workload| &workload.contract)
    };
    if !contracts(Role::Prefill).any(|prefill| contracts(Role::Decode).any(|decode| prefill == decode)) {
        return told(false, "NoPair", "no prefill and decode pods of one contract are ready");
    }
    match world.order {
        None | Some(Traffic::Admit) => told(true, "Serving", ""),
        Some(Traffic::Queue { until }) => told(false, "Queued", format!("new requests wait, at most until {until}")),
        Some(Traffic::Reject) => told(false, "Rejecting", "new requests are refused with Retry-After"),
    }
}

fn progressing(machine: &Machine<'_>) -> Told {
    match &machine.status.rollout {
        Some(rollout) if rollout.direction == Direction::Held => told(false, "Held", rollout.failure.clone()),
        Some(rollout) if rollout.stopped_at.is_some() => told(false, "Waiting", machine.waiting.clone()),
        Some(_) => told(true, &format!("{:?}", machine.status.step), machine.waiting.clone()),
        None => told(false, "Settled", ""),
    }
}

/// Stalled: nothing moves until somebody acts, and the message says how.
fn stalled(machine: &Machine<'_>) -> Told {
    let conflicts = &machine.input.world.conflicts;
    if !conflicts.is_empty() {
        let remedy = format!("{}; remove or rename them", machine.waiting);
        return told(true, "NameConflict", remedy);
    }
    match &machine.status.rollout {
        Some(rollout) if rollout.direction == Direction::Held => {
            let remedy = format!(
                "{}; change the spec, or set restart.token to try again",
                rollout.failure
            );
            told(true, "Held", remedy)
        }
        Some(rollout) if rollout.direction == Direction::Revert && machine.input.now >= rollout.deadline.0 => {
            let remedy = format!(
                "the last good revision does not come back: {}{}; change what keeps it, or the spec",
                machine.waiting,
                blame(machine)
            );
            told(true, "RevertOverdue", remedy)
        }
        Some(rollout) if rollout.stopped_at.is_some() && !machine.input.spec.rollout.paused => {
            told(true, "AwaitsApproval", machine.waiting.clone())
        }
        _ => told(false, "NotStalled", ""),
    }
}

fn knobs_live(machine: &Machine<'_>) -> Told {
    let Some(goal) = goal(machine) else {
        return told(true, "NothingRuns", "");
    };
    let world = machine.input.world;
    for role in Role::ALL {
        let wanted = goal.knobs(role);
        let mut serving = world.serving(role, goal.hash(role), false);
        if let Some(pod) = serving.find(|pod| pod.knobs.as_deref() != Some(wanted)) {
            return told(
                false,
                "Differ",
                format!("{} pod {} does not run {wanted}", role.field(), pod.name),
            );
        }
    }
    told(true, "Live", "")
}

fn troubles<'a>(machine: &Machine<'a>) -> impl Iterator<Item = &'a Trouble> {
    let world = machine.input.world;
    let workloads = world.workloads.iter().filter_map(|workload| workload.trouble.as_ref());
    let pods = world.pods.iter().filter(|pod| !pod.terminating && !pod.lost);
    workloads.chain(pods.filter_map(|pod| pod.trouble.as_ref()))
}

fn blame(machine: &Machine<'_>) -> String {
    troubles(machine).next().map_or_else(String::new, |trouble| {
        format!(" ({}: {})", trouble.reason, trouble.message)
    })
}

fn capacity(machine: &Machine<'_>) -> Told {
    let lacks = |trouble: &&Trouble| ["Unschedulable", "QuotaExceeded"].contains(&trouble.reason.as_str());
    match troubles(machine).find(lacks) {
        Some(trouble) => told(false, &trouble.reason, trouble.message.clone()),
        None => told(true, "Enough", ""),
    }
}

/// The way from prefill to decode, with what should be there while requests are let through.
fn transfer(machine: &Machine<'_>) -> Health {
    let held = !matches!(machine.input.world.order, None | Some(Traffic::Admit));
    let serves = machine.running().filter(|_| !held && machine.input.deleting.is_none());
    health::transfer(machine.input.world, serves)
}

fn measured(health: Health, none: &str) -> Told {
    match health {
        Health::Unheard | Health::Unknown => ("Unknown", none.to_owned(), String::new()),
        Health::Well(reason) => told(true, reason, ""),
        Health::Ill(reason, message) => told(false, reason, message),
    }
}
