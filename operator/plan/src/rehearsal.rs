//! A change, rehearsed: the planner itself in a world where everything goes well at once.
//!
//! What is told of a change before it is made is then what the planner will do, and not what somebody thinks that it does.

use std::fmt::Write as _;

use jiff::Timestamp;
use tandem_crds::status::{GateOutcome, Step};
use tandem_crds::{Inputs, PDDeploymentSpec, PDDeploymentStatus, Role};

use crate::intents::{Plan, Traffic};
use crate::machine::plan;
use crate::revision::{DefaultImages, Revision};
use crate::world::{Input, Pod, Probe, Workload, World};

/// No change takes more passes where everything goes well: each of 2 x 64 pods goes and comes in a few.
const MAX_PASSES: usize = 2000;

/// What a change from one spec to another does, step by step, as text; without `from` a first install.
pub fn tell(from: Option<&PDDeploymentSpec>, to: &PDDeploymentSpec) -> String {
    let mut to = to.clone();
    let waits = std::mem::take(&mut to.rollout.approval);
    to.rollout.paused = false;
    let mut stage = Stage::new(from.unwrap_or(&to).clone());
    let mut text = String::new();
    let target = Inputs::of(&to).target();
    if let Some(from) = from {
        stage.play(|_, _| {});
        let changes = Inputs::of(&to).changes(&Inputs::of(from));
        let _ = writeln!(text, "target {target}");
        for change in &changes {
            let class = tandem_crds::class(&change.path).map_or_else(String::new, |class| class.to_string());
            let _ = writeln!(
                text,
                "  {}: {} -> {}. {class}",
                change.path,
                shown(&change.from),
                shown(&change.to)
            );
        }
        stage.spec = to;
        if changes.is_empty() && stage.spec.restart.token == from.restart.token {
            text.push_str("nothing changes that a process sees: no step is taken\n");
            return text;
        }
    } else {
        let _ = writeln!(text, "target {target}, a first install");
    }
    let before = stage.world.pods.clone();
    let mut last = (None, None);
    let mut lines: Vec<String> = Vec::new();
    if waits == tandem_crds::Approval::BeforeRestart && from.is_some() {
        lines.push(format!(
            "Approve: waits for {target} in rollout.approvedRevision; all goes on as before"
        ));
    }
    stage.play(|stage, plan| {
        let step = plan.status.step;
        for line in moves(stage, plan) {
            lines.push(format!("{step:?}: {line}"));
        }
        if last.0 != Some(plan.traffic) && !(last.0.is_none() && plan.traffic == Traffic::Admit) {
            lines.push(traffic(&stage.spec, plan.traffic));
        }
        if last.1 != Some(step) {
            lines.extend(waiting(&stage.spec, step));
        }
        last = (Some(plan.traffic), Some(step));
    });
    if waits == tandem_crds::Approval::BeforePromote && from.is_some() {
        lines.push(format!(
            "Approve: waits for {target} in rollout.approvedRevision; the target serves"
        ));
    }
    lines.push("Promote: the target is what a later change goes back to if it fails".to_owned());
    for (index, line) in lines.iter().enumerate() {
        let _ = writeln!(text, "{:>2}. {line}", index + 1);
    }
    if from.is_some() {
        let stays = |role: &Role| {
            let uids = |pods: &[Pod]| -> Vec<String> {
                pods.iter()
                    .filter(|pod| pod.role == *role)
                    .map(|pod| pod.uid.clone())
                    .collect()
            };
            uids(&before) == uids(&stage.world.pods)
        };
        let names = |stay: bool| -> Vec<&str> {
            Role::ALL
                .into_iter()
                .filter(|role| stays(role) == stay)
                .map(Role::field)
                .collect()
        };
        let list = |names: Vec<&str>| {
            if names.is_empty() {
                "nothing".to_owned()
            } else {
                names.join(", ")
            }
        };
        let _ = writeln!(
            text,
            "new pods: {}; the same pods as before: {}",
            list(names(false)),
            list(names(true))
        );
    }
    text
}

fn shown(value: &str) -> &str {
    if value.is_empty() { "none" } else { value }
}

/// What a plan moves.
fn moves(stage: &Stage, plan: &Plan) -> Vec<String> {
    let (world, timeouts) = (&stage.world, &stage.spec.timeouts);
    let mut lines = Vec::new();
    for role in Role::ALL {
        let name = role.field();
        if let (Some(id), Some(held), Step::Apply) = (plan.knobs.get(&role), world.knobs.get(&role), plan.status.step)
            && stage.stored(id).is_some_and(|revision| revision.knobs(role) != held)
        {
            lines.push(format!("{name} takes its new knobs while it runs"));
        }
        for intent in plan.workloads.iter().filter(|intent| intent.role == role) {
            let is_it = |workload: &&Workload| workload.role == role && workload.revision == intent.revision;
            let from = world
                .workloads
                .iter()
                .find(is_it)
                .map_or(0, |workload| workload.replicas);
            let (revision, to) = (&intent.revision, intent.replicas);
            if role == Role::Router && from != to {
                lines.push(format!("{name} {revision}: {to} pods, new ones before old ones go"));
            } else if from < to {
                let seconds = timeouts.startup_seconds;
                lines.push(format!(
                    "{name} {revision}: {from} -> {to} pods, ready within {seconds} s"
                ));
            } else if from > to {
                let seconds = timeouts.drain_seconds;
                lines.push(format!(
                    "{name} {revision}: {from} -> {to} pods, which end their requests within {seconds} s"
                ));
            }
        }
    }
    lines
}

fn traffic(spec: &PDDeploymentSpec, order: Traffic) -> String {
    match order {
        Traffic::Admit => "Traffic: new requests go to engines".to_owned(),
        Traffic::Queue { .. } => format!(
            "Traffic: new requests wait in the router, at most {} s",
            spec.timeouts.restart_queue_seconds
        ),
        Traffic::Reject => "Traffic: new requests are refused with 503 and Retry-After".to_owned(),
    }
}

fn waiting(spec: &PDDeploymentSpec, step: Step) -> Option<String> {
    let gates = &spec.rollout.gates;
    match step {
        Step::Quiesce => Some(format!(
            "Quiesce: waits until no request is with an engine, at most {} s",
            spec.timeouts.drain_seconds
        )),
        Step::Gates => Some(format!(
            "Gates: Health ({:?}, {} s), Probe ({:?}, {} s)",
            gates.health.mode, gates.health.timeout_seconds, gates.probe.mode, gates.probe.timeout_seconds
        )),
        _ => None,
    }
}

/// A deployment in a world without a fault.
struct Stage {
    now: i64,
    spec: PDDeploymentSpec,
    status: PDDeploymentStatus,
    images: DefaultImages,
    revisions: Vec<Revision>,
    world: World,
    pods: usize,
}

impl Stage {
    fn new(spec: PDDeploymentSpec) -> Self {
        let image = || "default".to_owned();
        Self {
            now: 0,
            spec,
            status: PDDeploymentStatus::default(),
            images: DefaultImages {
                engine: image(),
                router: image(),
            },
            revisions: Vec::new(),
            world: World::default(),
            pods: 0,
        }
    }

    /// Passes until nothing is left to do; `seen` is told of each before it is done.
    fn play(&mut self, mut seen: impl FnMut(&Self, &Plan)) {
        for _ in 0..MAX_PASSES {
            let input = Input {
                now: Timestamp::from_second(self.now).unwrap_or_default(),
                generation: 1,
                deleting: None,
                spec: &self.spec,
                status: &self.status,
                images: &self.images,
                revisions: &self.revisions,
                world: &self.world,
            };
            let plan = plan(input);
            seen(self, &plan);
            let world = self.world.clone();
            let settled = plan.status.rollout.is_none() && self.status.rollout.is_none();
            self.apply(plan);
            self.now += 1;
            if settled && world == self.world {
                return;
            }
        }
    }

    fn stored(&self, id: &str) -> Option<&Revision> {
        self.revisions.iter().find(|revision| revision.id == id)
    }

    fn apply(&mut self, plan: Plan) {
        self.revisions.extend(plan.store);
        let revisions = &self.revisions;
        let stored = |id: &str| revisions.iter().find(|revision| revision.id == id);
        let world = &mut self.world;
        world.order = Some(plan.traffic);
        for (role, id) in &plan.knobs {
            if let Some(revision) = stored(id) {
                world.knobs.insert(*role, revision.knobs(*role).to_owned());
            }
        }
        let made = plan.workloads.iter().map(|intent| {
            let old = world
                .workloads
                .iter()
                .find(|old| old.role == intent.role && old.revision == intent.revision);
            let template = intent.template.as_deref().and_then(stored);
            Workload {
                role: intent.role,
                revision: intent.revision.clone(),
                contract: old.map_or_else(
                    || template.map_or_else(String::new, |template| template.contract.clone()),
                    |old| old.contract.clone(),
                ),
                replicas: intent.replicas,
                gpus: old.map_or_else(
                    || template.map_or(0, |template| template.gpus(intent.role)),
                    |old| old.gpus,
                ),
                trouble: None,
            }
        });
        world.workloads = made.collect();
        for workload in &world.workloads {
            let of_it = |pod: &Pod| pod.role == workload.role && pod.revision == workload.revision;
            let mut left = workload.replicas;
            world.pods.retain(|pod| {
                left -= i32::from(of_it(pod));
                !of_it(pod) || left >= 0
            });
            for _ in 0..left.max(0) {
                self.pods += 1;
                world.pods.push(pod(workload, self.pods));
            }
        }
        let workloads = &world.workloads;
        world.pods.retain(|pod| {
            workloads
                .iter()
                .any(|of| of.role == pod.role && of.revision == pod.revision)
        });
        for pod in &mut world.pods {
            pod.knobs = world.knobs.get(&pod.role).cloned();
            pod.order = world.order;
        }
        world.probe = plan.probe.map(|order| Probe {
            revision: order.revision,
            pods: order.pods,
            outcome: GateOutcome::Passed,
            message: String::new(),
        });
        self.status = plan.status;
    }
}

fn pod(workload: &Workload, number: usize) -> Pod {
    Pod {
        ready: true,
        ..Pod::made(workload, number.to_string())
    }
}
