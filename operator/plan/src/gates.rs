//! What has to hold before a change counts as good. A finding is bound to a revision and to the pods that it was made on;
//! other pods need another look.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tandem_crds::status::{Gate, GateOutcome, GateRecord};
use tandem_crds::{GateMode, Role};

use crate::hash;
use crate::intents::{ProbeOrder, Traffic};
use crate::machine::ENGINES;
use crate::revision::Revision;
use crate::world::{Input, World};

/// How the gates stand.
pub enum Verdict {
    /// All that count hold.
    Passed,
    /// One still looks, at most until then.
    Looking(Timestamp),
    /// One that counts does not hold.
    Failed(String),
}

/// What there is to wait for until a revision is healthy; none: it is.
pub fn unhealthy(world: &World, goal: &Revision, order: Option<Traffic>) -> Option<String> {
    for role in Role::ALL {
        let (hash, wanted) = (goal.hash(role), goal.replicas(role));
        let ready = world.ready(role, hash);
        if ready != wanted {
            return Some(format!("{ready} of {wanted} {} pods of {hash} are ready", role.field()));
        }
        let stays = |pod: &&crate::world::Pod| pod.role == role && !pod.terminating && !pod.lost;
        if let Some(pod) = world.pods.iter().filter(stays).find(|pod| pod.revision != hash) {
            return Some(format!(
                "{} pod {} of {} is still there",
                role.field(),
                pod.name,
                pod.revision
            ));
        }
        let knobs = goal.knobs(role);
        let mut serving = world.serving(role, hash, false);
        if let Some(pod) = serving.find(|pod| pod.knobs.as_deref() != Some(knobs)) {
            let why = match pod.knobs {
                Some(_) => format!("does not run the knobs {knobs} yet"),
                None => format!("does not say which knobs it runs; {knobs} are wanted"),
            };
            return Some(format!("{} pod {} {why}", role.field(), pod.name));
        }
        let mut serving = world.serving(role, hash, false);
        let heard = |pod: &crate::world::Pod| role != Role::Router || order.is_none() || pod.order == order;
        if let Some(pod) = serving.find(|pod| !heard(pod)) {
            return Some(format!("router pod {} has not acknowledged its order yet", pod.name));
        }
    }
    None
}

/// An engine pod of a revision that a router does not know yet: what there is to wait for before requests are let through.
pub fn unrouted(world: &World, goal: &Revision) -> Option<String> {
    let serving = ENGINES
        .into_iter()
        .flat_map(|role| world.serving(role, goal.hash(role), false));
    let mut unknown = serving.filter(|pod| world.unrouted.contains(&pod.uid));
    let pod = unknown.next()?;
    Some(format!(
        "a router does not know {} pod {} yet",
        pod.role.field(),
        pod.name
    ))
}

/// A name for the pods that serve now.
pub fn pods(world: &World) -> String {
    let serving = world.pods.iter().filter(|pod| pod.serves());
    let mut uids: Vec<&str> = serving.map(|pod| pod.uid.as_str()).collect();
    uids.sort_unstable();
    hash::short(uids)
}

/// Looks through the gates in their order, and writes down what each finds.
pub fn look(
    input: &Input<'_>,
    goal: &Revision,
    order: Traffic,
    with_probe: bool,
    records: &mut Vec<GateRecord>,
) -> (Verdict, Option<ProbeOrder>) {
    let gates = &input.spec.rollout.gates;
    let pods = pods(input.world);
    let problem = unhealthy(input.world, goal, Some(order)).or_else(|| unrouted(input.world, goal));

    let timeout = gates.health.timeout_seconds;
    let found = match &problem {
        None => Ok(Some((GateOutcome::Passed, String::new()))),
        Some(problem) => Err(problem.clone()),
    };
    let health = observe(input.now, records, (Gate::Health, goal, ""), timeout, found);
    if let Some(verdict) = judge(gates.health.mode, Gate::Health, &health) {
        return (verdict, None);
    }
    if !with_probe || gates.probe.mode == GateMode::Off {
        return (Verdict::Passed, None);
    }
    let found = input
        .world
        .probe
        .as_ref()
        .filter(|probe| probe.revision == goal.id && probe.pods == pods);
    let timeout = gates.probe.timeout_seconds;
    let found = Ok(found.map(|probe| (probe.outcome, probe.message.clone())));
    let probe = observe(input.now, records, (Gate::Probe, goal, &pods), timeout, found);
    let order = ProbeOrder {
        revision: goal.id.clone(),
        pods,
        deadline: probe.deadline,
    };
    match judge(gates.probe.mode, Gate::Probe, &probe) {
        Some(Verdict::Looking(until)) => (Verdict::Looking(until), Some(order)),
        Some(verdict) => (verdict, None),
        None => (Verdict::Passed, None),
    }
}

struct Observed {
    outcome: Option<GateOutcome>,
    message: String,
    deadline: Timestamp,
}

/// Brings the record of a gate on a revision and its pods up to date with what was found: an outcome, nothing yet, or
/// what does not hold at present.
fn observe(
    now: Timestamp,
    records: &mut Vec<GateRecord>,
    (gate, goal, pods): (Gate, &Revision, &str),
    timeout: i32,
    found: Result<Option<(GateOutcome, String)>, String>,
) -> Observed {
    let old = records
        .iter()
        .position(|record| record.name == gate)
        .map(|at| records.remove(at));
    let same = old.filter(|record| record.revision == goal.id && record.pods == pods);
    let mut record = same.unwrap_or_else(|| GateRecord {
        name: gate,
        revision: goal.id.clone(),
        pods: pods.to_owned(),
        started_at: Time(now),
        outcome: None,
        message: String::new(),
    });
    // A clock that went back must not make a gate wait for longer than its timeout.
    record.started_at.0 = record.started_at.0.min(now);
    let deadline = later(record.started_at.0, timeout);
    match found {
        // Health is a state: what held may hold no more.
        Err(problem) => {
            record.outcome = (now >= deadline).then_some(GateOutcome::Failed);
            record.message = problem;
        }
        Ok(Some((outcome, message))) => {
            record.outcome = Some(outcome);
            record.message = message;
        }
        Ok(None) if record.outcome.is_none() && now >= deadline => {
            record.outcome = Some(GateOutcome::Failed);
            record.message = format!("no answer within {timeout} s");
        }
        Ok(None) => {}
    }
    let observed = Observed {
        outcome: record.outcome,
        message: record.message.clone(),
        deadline,
    };
    records.push(record);
    records.sort_by_key(|record| record.name);
    observed
}

/// What a gate's finding means; none: go on.
fn judge(mode: GateMode, gate: Gate, observed: &Observed) -> Option<Verdict> {
    match (mode, observed.outcome) {
        (GateMode::Off, _) | (_, Some(GateOutcome::Passed)) | (GateMode::Recommend, Some(GateOutcome::Failed)) => None,
        (GateMode::Enforce | GateMode::Recommend, None) => Some(Verdict::Looking(observed.deadline)),
        (GateMode::Enforce, Some(GateOutcome::Failed)) => {
            Some(Verdict::Failed(format!("gate {gate:?} failed: {}", observed.message)))
        }
    }
}

/// So many seconds later.
pub fn later(time: Timestamp, seconds: i32) -> Timestamp {
    time.saturating_add(SignedDuration::from_secs(seconds.into()))
        .unwrap_or(time)
}
