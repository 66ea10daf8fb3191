//! The steps of a change.
//!
//! The step is derived on each pass from what runs: no step is believed because it was planned. Remembered, in status, are
//! the change's identity, its deadlines and what the gates found. One pass decides one thing; the next one sees what came
//! of it, whoever makes it.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tandem_crds::status::{Direction, HistoryEntry, Outcome, RolloutStatus, Step};
use tandem_crds::{Approval, Inputs, OnFailure, PDDeploymentStatus, Role, TrafficDuringRestart};

use crate::conditions;
use crate::gates::{self, Verdict, later};
use crate::intents::{Plan, ProbeOrder, Traffic};
use crate::moves::{Desired, has_outage};
use crate::revision::{Revision, restarted_by, target_of};
use crate::world::{Input, Pod, Trouble, Workload};

/// In the order in which they move.
pub const ENGINES: [Role; 2] = [Role::Prefill, Role::Decode];
/// Looked at again no sooner than this, in seconds.
const SOONEST: i32 = 5;
/// Bound of a text in status, in characters.
const MAX_TEXT: usize = 1000;

/// What should be, given what is.
pub fn plan(input: Input<'_>) -> Plan {
    Machine::new(input).run()
}

pub struct Machine<'a> {
    pub input: Input<'a>,
    pub status: PDDeploymentStatus,
    pub desired: Desired<'a>,
    pub traffic: Traffic,
    /// What is waited for, for people.
    pub waiting: String,
    store: Option<Revision>,
    /// A change was begun by this pass.
    begun: bool,
    knobs: BTreeMap<Role, String>,
    probe: Option<ProbeOrder>,
    look_again: Option<Timestamp>,
}

impl<'a> Machine<'a> {
    fn new(input: Input<'a>) -> Self {
        Self {
            input,
            status: input.status.clone(),
            desired: Desired::of(input.world),
            traffic: input.world.order.unwrap_or(Traffic::Admit),
            waiting: String::new(),
            store: None,
            begun: false,
            knobs: BTreeMap::new(),
            probe: None,
            look_again: None,
        }
    }

    fn run(mut self) -> Plan {
        if let Some(since) = self.input.deleting {
            return self.delete(since);
        }
        let token = &self.input.spec.restart.token;
        self.status.restart_token.get_or_insert_with(|| token.clone());
        if self.input.world.conflicts.is_empty() {
            self.choose_target();
            self.step();
        } else {
            self.waiting = format!(
                "objects of others bear our names: {}",
                self.input.world.conflicts.join(", ")
            );
        }
        self.finish(true)
    }

    // ---- which revision ----

    fn stored(&self, id: &str) -> Option<&'a Revision> {
        self.input.revisions.iter().find(|revision| revision.id == id)
    }

    /// The revision last promoted or reverted to.
    pub fn running(&self) -> Option<&'a Revision> {
        self.stored(&self.status.revisions.running)
    }

    /// Begins a change where the spec or a restart token asks for one, whatever is under way.
    fn choose_target(&mut self) {
        let spec = self.input.spec;
        let wanted = Inputs::of(spec).target();
        let asked = self.status.restart_token.as_ref() != Some(&spec.restart.token);
        let revisions = &self.status.revisions;
        match &self.status.rollout {
            Some(rollout) if target_of(&rollout.target) != wanted => {
                let cut = self.restarts_of(rollout);
                self.end(Outcome::Superseded);
                self.begin(asked, &cut);
            }
            Some(rollout) if rollout.direction == Direction::Held && asked => self.begin(true, &[]),
            // Somebody removed what was stored.
            Some(rollout) if self.stored(&rollout.target).is_none() => self.begin(asked, &[]),
            Some(_) => {}
            None if asked && !revisions.running.is_empty() => self.begin(true, &[]),
            None if target_of(&revisions.running) == wanted => self.status.revisions.rejected.clear(),
            None if target_of(&revisions.rejected) == wanted && !revisions.running.is_empty() => {}
            None => self.begin(asked, &[]),
        }
    }

    /// The roles that a change under way restarts because a token asked for it.
    fn restarts_of(&self, rollout: &RolloutStatus) -> Vec<Role> {
        let (target, running) = (self.stored(&rollout.target), self.running());
        let asked = |role: &Role| {
            let of = |revision: Option<&'a Revision>| revision?.role(*role).map(|role| role.restart.as_str());
            let token = self.status.restart_token.as_deref().filter(|token| !token.is_empty());
            running.is_some() && token.is_some() && of(target) == token && of(running) != token
        };
        let forward = rollout.direction == Direction::Forward;
        Role::ALL.into_iter().filter(|role| forward && asked(role)).collect()
    }

    /// `asked`: by a new token. `cut`: these roles too, by a change that this one cuts off.
    fn begin(&mut self, asked: bool, cut: &[Role]) {
        let Input { spec, images, now, .. } = self.input;
        let base = self.running();
        let mut roles = cut.to_vec();
        if asked {
            roles.extend(restarted_by(spec, images, base));
        }
        let token = spec.restart.token.as_str();
        let revision = Revision::admit(spec, images, base, (!roles.is_empty()).then_some((token, &roles)));
        let tried = |entry: &&HistoryEntry| target_of(&entry.revision) == target_of(&revision.id);
        let failed = |entry: &&HistoryEntry| matches!(entry.outcome, Outcome::Reverted | Outcome::Held);
        let attempts = self.status.history.iter().take_while(tried).filter(failed).count() as i32;
        self.begun = true;
        self.status.restart_token = Some(token.to_owned());
        self.status.revisions.target.clone_from(&revision.id);
        self.status.rollout = Some(RolloutStatus {
            target: revision.id.clone(),
            attempt: attempts + 1,
            restarts: revision.restarts(base),
            direction: Direction::Forward,
            step: Step::Admit,
            started_at: Time(now),
            step_started_at: Time(now),
            deadline: Time(later(now, spec.rollout.progress_deadline_seconds)),
            stopped_at: None,
            failure: String::new(),
        });
        if self.stored(&revision.id).is_none() {
            self.store = Some(revision);
        }
    }

    // ---- which step ----

    fn step(&mut self) {
        let Some(rollout) = self.status.rollout.clone() else {
            self.settle();
            return;
        };
        let paused = self.input.spec.rollout.paused;
        if paused {
            self.stop_clock();
            "rollout.paused is set".clone_into(&mut self.waiting);
        }
        // Its deadlines are written down before anything is done by them.
        if self.begun {
            self.enter(Step::Admit);
        }
        if paused || self.begun {
            return;
        }
        let goal = match rollout.direction {
            Direction::Forward => self.stored(&rollout.target),
            Direction::Revert => self.stored(&self.status.revisions.last_good),
            Direction::Held => None,
        };
        let Some(goal) = goal else {
            self.traffic = Traffic::Admit;
            self.waiting = rollout.failure;
            return;
        };
        self.mend_clock();
        let awaits = |machine: &Self, approval, restarted| machine.awaits(&rollout, approval, restarted);
        if awaits(
            self,
            Approval::BeforeRestart,
            !rollout.restarts.is_empty() && self.is_untouched(goal, &rollout),
        ) {
            self.traffic = Traffic::Admit;
            self.approve(&rollout);
            return;
        }
        self.run_clock();
        let deadline = self
            .status
            .rollout
            .as_ref()
            .map_or(self.input.now, |rollout| rollout.deadline.0);
        if rollout.direction == Direction::Forward && self.input.now >= deadline {
            self.fail(&format!("not done by its deadline, at step {:?}", rollout.step));
            return;
        }
        if rollout.direction == Direction::Forward
            && let Some(why) = self.gave_up(goal)
        {
            self.fail(&why);
            return;
        }
        self.wake(deadline);
        let step = self.towards(goal, &rollout);
        match step {
            Step::Promote if awaits(self, Approval::BeforePromote, true) => self.approve(&rollout),
            Step::Promote => self.promote(goal),
            // The gates have failed the change.
            Step::Settled => {}
            step => self.enter(step),
        }
    }

    /// Why a pod of this revision will never serve, where one has ended for good.
    fn gave_up(&self, goal: &Revision) -> Option<String> {
        let of_goal = |pod: &&Pod| pod.revision == goal.hash(pod.role) && !pod.terminating;
        let mut troubles = self
            .input
            .world
            .pods
            .iter()
            .filter(of_goal)
            .filter_map(|pod| pod.trouble.as_ref());
        let last = troubles.find(|trouble| trouble.reason == Trouble::GAVE_UP)?;
        Some(last.message.clone())
    }

    /// Everything is as it should be, or is brought back to that.
    fn settle(&mut self) {
        self.status.step = Step::Settled;
        self.status.gates.clear();
        let Some(running) = self.running() else { return };
        if self.input.spec.rollout.paused {
            return;
        }
        self.traffic = Traffic::Admit;
        for role in Role::ALL {
            self.knobs.insert(role, running.id.clone());
        }
        self.desired.move_on(running, self.input.spec.gpus.budget);
        self.desired.set_router(running);
    }

    /// Does what the first unfinished step asks for, and says which it is.
    fn towards(&mut self, goal: &'a Revision, rollout: &RolloutStatus) -> Step {
        let (world, from) = (self.input.world, self.running());
        let budget = self.input.spec.gpus.budget;
        let changes = goal.restarts(from);
        let outage = has_outage(world, goal, budget);
        let holding = self.traffic != Traffic::Admit;
        if outage && !(holding && self.is_quiesced(rollout)) {
            self.traffic = self.held_traffic(rollout);
            return Step::Quiesce;
        }
        if outage || holding {
            self.traffic = self.held_traffic(rollout);
        }

        for role in Role::ALL.into_iter().filter(|role| !changes.contains(role)) {
            self.knobs.insert(role, goal.id.clone());
        }
        for role in Role::ALL.into_iter().filter(|role| !changes.contains(role)) {
            let knobs = goal.knobs(role);
            let hot = from.is_some_and(|from| from.knobs(role) != knobs);
            if hot && !self.runs_knobs(role, knobs) {
                self.waiting = format!("{} takes its knobs", role.field());
                return Step::Apply;
            }
        }
        let is_foreign = |workload: &Workload| workload.contract != goal.contract;
        for role in ENGINES {
            self.knobs.insert(role, goal.id.clone());
            let moving = self.desired.move_engines(goal, role, budget);
            let scaled = from.is_none_or(|from| from.replicas(role) != goal.replicas(role));
            // Decode never goes to another contract than that of a ready prefill, whatever brought prefill there.
            let leads = role == Role::Prefill && world.old(Role::Decode, goal.hash(Role::Decode)).any(is_foreign);
            // Of a change that was cut off, or of a pod that died: what comes by itself is waited for, what is in trouble is not.
            let comes = world.coming(role, goal.hash(role), goal.replicas(role)) > 0;
            let waits = changes.contains(&role) || rollout.restarts.contains(&role) || scaled || leads || comes;
            let (ready, wanted) = (world.ready(role, goal.hash(role)), goal.replicas(role));
            if moving || (waits && ready < wanted) {
                self.waiting = format!(
                    "{ready} of {wanted} {} pods of {} are ready",
                    role.field(),
                    goal.hash(role)
                );
                return if role == Role::Prefill {
                    Step::Prefill
                } else {
                    Step::Decode
                };
            }
        }
        self.knobs.insert(Role::Router, goal.id.clone());
        self.desired.set_router(goal);
        let (ready, wanted) = (
            world.ready(Role::Router, goal.hash(Role::Router)),
            goal.replicas(Role::Router),
        );
        let old = world.serving(Role::Router, goal.hash(Role::Router), true).count();
        let scaled = from.is_none_or(|from| from.replicas(Role::Router) != wanted);
        if (changes.contains(&Role::Router) || scaled) && (ready != wanted || old > 0) {
            self.waiting = format!(
                "{ready} of {wanted} router pods of {} are ready",
                goal.hash(Role::Router)
            );
            return Step::Router;
        }
        self.measure(goal, rollout, from.is_some_and(|from| only_scales(goal, from)))
    }

    fn measure(&mut self, goal: &Revision, rollout: &RolloutStatus, only_scales: bool) -> Step {
        if rollout.direction == Direction::Revert {
            // What ran before is what there is: only that it runs again is waited for.
            let world = self.input.world;
            if let Some(problem) = gates::unhealthy(world, goal, None).or_else(|| gates::unrouted(world, goal)) {
                self.waiting = problem;
                return Step::Gates;
            }
            self.traffic = Traffic::Admit;
            // It is back once clients are served again.
            let admits = self.input.world.order == Some(Traffic::Admit);
            if let Some(problem) = gates::unhealthy(self.input.world, goal, Some(Traffic::Admit)) {
                self.waiting = problem;
                return Step::Gates;
            }
            return if admits { Step::Promote } else { Step::Gates };
        }
        let records = &mut self.status.gates;
        let (verdict, probe) = gates::look(&self.input, goal, self.traffic, !only_scales, records);
        match verdict {
            Verdict::Looking(until) => {
                self.wake(until);
                self.probe = probe;
                let looks = |record: &&tandem_crds::status::GateRecord| record.outcome.is_none();
                let looking = self.status.gates.iter().find(looks);
                self.waiting = looking.map_or_else(String::new, |record| {
                    format!("gate {:?}: {}", record.name, record.message)
                });
                Step::Gates
            }
            Verdict::Failed(reason) => {
                self.fail(&reason);
                Step::Settled
            }
            Verdict::Passed => {
                self.traffic = Traffic::Admit;
                Step::Promote
            }
        }
    }

    fn runs_knobs(&self, role: Role, hash: &str) -> bool {
        let world = self.input.world;
        let mut serving = world.pods.iter().filter(|pod| pod.role == role && pod.serves());
        world.knobs.get(&role).is_some_and(|held| held == hash) && serving.all(|pod| pod.knobs.as_deref() == Some(hash))
    }

    // ---- traffic ----

    /// What routers do with new requests while a role cannot serve. The wait of a queue that is there already is never cut.
    fn held_traffic(&self, rollout: &RolloutStatus) -> Traffic {
        let spec = self.input.spec;
        if spec.rollout.traffic_during_restart == TrafficDuringRestart::Reject {
            return Traffic::Reject;
        }
        let begun = later(rollout.deadline.0, -spec.rollout.progress_deadline_seconds);
        let until = later(begun, spec.timeouts.restart_queue_seconds);
        match self.traffic {
            Traffic::Queue { until: earlier } => Traffic::Queue {
                until: until.max(earlier),
            },
            _ => Traffic::Queue { until },
        }
    }

    /// Whether every router holds new requests and none has one with an engine; or whether that was waited for long enough.
    fn is_quiesced(&mut self, rollout: &RolloutStatus) -> bool {
        let was = |step| {
            matches!(
                step,
                Step::Apply | Step::Prefill | Step::Decode | Step::Router | Step::Gates
            )
        };
        let cap = later(rollout.step_started_at.0, self.input.spec.timeouts.drain_seconds);
        if was(rollout.step) || (rollout.step == Step::Quiesce && self.input.now >= cap) {
            return true;
        }
        self.wake(cap);
        let order = self.held_traffic(rollout);
        let left = self.busy_routers(order);
        self.waiting = left.unwrap_or_default();
        self.waiting.is_empty()
    }

    fn busy_routers(&self, order: Traffic) -> Option<String> {
        let routers = self
            .input
            .world
            .pods
            .iter()
            .filter(|pod| pod.role == Role::Router && pod.serves());
        let silent = routers.clone().filter(|pod| pod.order != Some(order)).count();
        let running: u64 = routers.map(|pod| pod.in_flight).sum();
        (silent > 0 || running > 0)
            .then(|| format!("{silent} routers have not acknowledged their order, {running} requests still run"))
    }

    // ---- approval ----

    fn awaits(&self, rollout: &RolloutStatus, approval: Approval, applies: bool) -> bool {
        let settings = &self.input.spec.rollout;
        let approved =
            settings.approved_revision == target_of(&rollout.target) || settings.approved_revision == rollout.target;
        applies
            && settings.approval == approval
            && rollout.direction == Direction::Forward
            && self.running().is_some()
            && !approved
    }

    /// Whether nothing was moved to the goal yet, nor taken away for it.
    fn is_untouched(&self, goal: &Revision, rollout: &RolloutStatus) -> bool {
        let has_begun = matches!(rollout.step, Step::Prefill | Step::Decode | Step::Router | Step::Gates);
        let changes = goal.restarts(self.running());
        let moved = |workload: &Workload| {
            changes.contains(&workload.role) && goal.hash(workload.role) == workload.revision && workload.replicas > 0
        };
        !has_begun && !self.input.world.workloads.iter().any(moved)
    }

    fn approve(&mut self, rollout: &RolloutStatus) {
        self.enter(Step::Approve);
        self.stop_clock();
        self.waiting = format!("write {} to rollout.approvedRevision", target_of(&rollout.target));
    }

    // ---- the clock of a change ----

    fn enter(&mut self, step: Step) {
        self.status.step = step;
        if let Some(rollout) = &mut self.status.rollout
            && rollout.step != step
        {
            rollout.step = step;
            rollout.step_started_at = Time(self.input.now);
        }
    }

    fn stop_clock(&mut self) {
        if let Some(rollout) = &mut self.status.rollout {
            rollout.stopped_at.get_or_insert(Time(self.input.now));
        }
    }

    /// What the clock stood for does not count.
    fn run_clock(&mut self) {
        if let Some(rollout) = &mut self.status.rollout
            && let Some(stopped) = rollout.stopped_at.take()
        {
            let stood = self.input.now.duration_since(stopped.0).as_secs().max(0) as i32;
            rollout.deadline.0 = later(rollout.deadline.0, stood);
            rollout.step_started_at.0 = later(rollout.step_started_at.0, stood);
        }
    }

    /// A clock that went back must not make anything wait for longer than it may.
    fn mend_clock(&mut self) {
        let (now, spec) = (self.input.now, self.input.spec);
        if let Some(rollout) = &mut self.status.rollout {
            let latest = later(now, spec.rollout.progress_deadline_seconds);
            rollout.deadline.0 = rollout.deadline.0.min(latest);
            rollout.step_started_at.0 = rollout.step_started_at.0.min(now);
            if let Some(stopped) = &mut rollout.stopped_at {
                stopped.0 = stopped.0.min(now);
            }
        }
    }

    pub fn wake(&mut self, at: Timestamp) {
        let at = at.max(later(self.input.now, SOONEST));
        self.look_again = Some(self.look_again.map_or(at, |earlier| earlier.min(at)));
    }

    // ---- how it ends ----

    fn fail(&mut self, reason: &str) {
        let revert = self.input.spec.rollout.on_failure == OnFailure::Revert;
        let back = self.stored(&self.status.revisions.last_good);
        let Some(mut rollout) = self.status.rollout.take() else {
            return;
        };
        rollout.failure = reason.chars().take(MAX_TEXT).collect();
        self.status.revisions.rejected.clone_from(&rollout.target);
        rollout.direction = if revert && back.is_some() {
            Direction::Revert
        } else {
            Direction::Held
        };
        rollout.step = Step::Admit;
        rollout.step_started_at = Time(self.input.now);
        rollout.deadline = Time(later(self.input.now, self.input.spec.rollout.progress_deadline_seconds));
        let held = rollout.direction == Direction::Held;
        self.status.rollout = Some(rollout);
        if held {
            self.record(Outcome::Held);
        }
        self.wake(self.input.now);
    }

    fn promote(&mut self, goal: &Revision) {
        let revert = self
            .status
            .rollout
            .as_ref()
            .is_some_and(|rollout| rollout.direction == Direction::Revert);
        self.end(if revert { Outcome::Reverted } else { Outcome::Promoted });
        let revisions = &mut self.status.revisions;
        if !revert {
            revisions.rejected.clear();
            revisions.last_good.clone_from(&goal.id);
        }
        revisions.running.clone_from(&goal.id);
        revisions.contract.clone_from(&goal.contract);
        self.settle();
    }

    fn end(&mut self, outcome: Outcome) {
        // What is held was written down when it failed.
        if self
            .status
            .rollout
            .as_ref()
            .is_some_and(|rollout| rollout.direction != Direction::Held)
        {
            self.record(outcome);
        }
        self.status.rollout = None;
    }

    fn record(&mut self, outcome: Outcome) {
        let Some(rollout) = &self.status.rollout else { return };
        let changed = match (self.stored(&rollout.target), self.running()) {
            (Some(target), Some(from)) => Inputs::of(&target.spec).changes(&Inputs::of(&from.spec)),
            _ => Vec::new(),
        };
        let entry = HistoryEntry {
            revision: rollout.target.clone(),
            outcome,
            changed: changed.into_iter().take(64).collect(),
            restarted: rollout.restarts.clone(),
            started_at: rollout.started_at.clone(),
            ended_at: Time(self.input.now),
            failure: rollout.failure.clone(),
        };
        self.status.history.insert(0, entry);
        self.status
            .history
            .truncate(self.input.spec.history_limit.max(1) as usize);
    }

    /// Running requests end, at most so long; nothing is made.
    fn delete(mut self, since: Timestamp) -> Plan {
        self.status.step = Step::Delete;
        self.traffic = Traffic::Reject;
        let cap = later(since.min(self.input.now), self.input.spec.timeouts.drain_seconds);
        self.wake(cap);
        let busy = self.busy_routers(Traffic::Reject);
        self.waiting = busy.unwrap_or_default();
        let keeps = !self.waiting.is_empty() && self.input.now < cap;
        self.finish(keeps)
    }

    fn finish(mut self, finalizer: bool) -> Plan {
        conditions::tell(&mut self);
        let revisions = &self.status.revisions;
        let rollout = self.status.rollout.as_ref().map(|rollout| rollout.target.as_str());
        let names = [
            revisions.running.as_str(),
            revisions.last_good.as_str(),
            rollout.unwrap_or_default(),
        ];
        let needed: Vec<&Revision> = names.iter().filter_map(|id| self.stored(id)).collect();
        let workloads = self.desired.intents(&needed);
        // Templates are of these three alone: what moves, moves to one of them.
        let ids = self.input.revisions.iter().map(|revision| &revision.id);
        let spare: Vec<String> = ids.filter(|id| !names.contains(&id.as_str())).cloned().collect();
        let surplus = spare
            .len()
            .saturating_sub(self.input.spec.history_limit.max(0) as usize);
        let deleting = self.input.deleting.is_some();
        Plan {
            store: self.store,
            traffic: self.traffic,
            knobs: self.knobs,
            workloads,
            probe: self.probe,
            discard: if deleting {
                Vec::new()
            } else {
                spare.into_iter().take(surplus).collect()
            },
            finalizer,
            status: self.status,
            look_again: self.look_again,
        }
    }
}

/// Whether two revisions differ in numbers of pods alone.
fn only_scales(goal: &Revision, from: &Revision) -> bool {
    let same_knobs = |role: &Role| goal.knobs(*role) == from.knobs(*role);
    goal.restarts(Some(from)).is_empty() && Role::ALL.iter().all(same_knobs)
}
