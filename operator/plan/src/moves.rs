//! One role's pods, from old revisions to the one that is wanted.
//!
//! Two replicas roll one at a time, so that all but one serve at every moment; a new pod counts once the routers know it. Where both revisions may not serve side by
//! side (another contract), or where there is one replica, the whole set goes first and comes after. Of GPUs, all moves
//! together never ask for more than the budget: a terminating pod counts until it is gone, a pod on a lost node does not.

use tandem_crds::Role;

use crate::intents::WorkloadIntent;
use crate::machine::ENGINES;
use crate::revision::Revision;
use crate::world::{Pod, Workload, World};

/// The workloads as they should be: as they are, until something is moved.
pub struct Desired<'a> {
    world: &'a World,
    workloads: Vec<(Workload, Option<String>)>,
}

impl World {
    /// Pods of a role that serve, of one revision or of all others.
    pub(crate) fn serving<'a>(&'a self, role: Role, revision: &'a str, others: bool) -> impl Iterator<Item = &'a Pod> {
        let of_role = self.pods.iter().filter(move |pod| pod.role == role);
        of_role.filter(move |pod| pod.serves() && (pod.revision == revision) != others)
    }

    /// Pods of a role that serve and are of this revision.
    pub(crate) fn ready(&self, role: Role, revision: &str) -> i32 {
        self.serving(role, revision, false).count() as i32
    }

    /// Those of them that every router knows.
    pub(crate) fn routed(&self, role: Role, revision: &str) -> i32 {
        let serving = self.serving(role, revision, false);
        serving.filter(|pod| !self.unrouted.contains(&pod.uid)).count() as i32
    }

    /// Of so many pods of a role and this revision, those that do not serve yet and that nothing keeps from it.
    pub(crate) fn coming(&self, role: Role, revision: &str, wanted: i32) -> i32 {
        let of_it = |pod: &&Pod| pod.role == role && pod.revision == revision && !pod.terminating;
        let stands = |pod: &&Pod| pod.serves() || pod.lost || pod.trouble.is_some();
        wanted - self.pods.iter().filter(of_it).filter(stands).count() as i32
    }

    /// Workloads of a role that are not of this revision and still ask for pods.
    pub(crate) fn old<'a>(&'a self, role: Role, revision: &'a str) -> impl Iterator<Item = &'a Workload> {
        let of_role = self.workloads.iter().filter(move |workload| workload.role == role);
        of_role.filter(move |workload| workload.revision != revision && workload.replicas > 0)
    }
}

impl Pod {
    /// Whether clients are served by it.
    pub(crate) fn serves(&self) -> bool {
        self.ready && !self.terminating && !self.lost
    }
}

/// Whether moving on takes all that a role serves with away for a while: its whole set goes, or, where GPUs are short, the
/// last pod that serves makes room.
pub fn has_outage(world: &World, goal: &Revision, budget: i32) -> bool {
    let goes = |role| {
        let (hash, wanted) = (goal.hash(role), goal.replicas(role));
        let whole = takes_whole_set(world, goal, role) && world.serving(role, hash, true).next().is_some();
        whole || (wanted == 0 && world.ready(role, hash) > 0)
    };
    let mut next = Desired::of(world);
    next.move_on(goal, budget);
    ENGINES.into_iter().any(|role| goes(role) || next.takes_last(role))
}

fn takes_whole_set(world: &World, goal: &Revision, role: Role) -> bool {
    let mut old = world.old(role, goal.hash(role)).peekable();
    old.peek().is_some() && (goal.replicas(role) <= 1 || old.any(|workload| workload.contract != goal.contract))
}

impl<'a> Desired<'a> {
    /// As it is.
    pub fn of(world: &'a World) -> Self {
        let workloads = world.workloads.iter().map(|workload| (workload.clone(), None));
        Self {
            world,
            workloads: workloads.collect(),
        }
    }

    /// Moves the engine roles on, as far as they can go now: decode once prefill stands.
    pub fn move_on(&mut self, goal: &Revision, budget: i32) {
        let _waits = ENGINES.into_iter().any(|role| self.move_engines(goal, role, budget));
    }

    /// Moves an engine role on, as far as it can go now. Whether it has more to do.
    pub fn move_engines(&mut self, goal: &Revision, role: Role, budget: i32) -> bool {
        let (hash, wanted, gpus) = (goal.hash(role), goal.replicas(role), goal.gpus(role));
        let routed = self.world.routed(role, hash);
        let whole = takes_whole_set(self.world, goal, role);
        self.keep_old(role, hash, if whole { 0 } else { (wanted - 1 - routed).max(0) });

        let at = self.entry(goal, role);
        let current = self.workloads[at].0.replicas;
        self.workloads[at].0.replicas = current.min(wanted);
        let old_left = self.old_replicas(role, hash) > 0;
        let may_add = match wanted - current {
            missing if missing > 0 && !old_left => missing,
            missing if missing > 0 && routed == current => 1,
            _ => 0,
        };
        for _ in 0..may_add {
            while self.asked() + gpus > budget && gpus > 0 && self.give_up_one(goal, role) {}
            if gpus > 0 && self.held() + gpus > budget {
                break;
            }
            self.workloads[at].0.replicas += 1;
        }
        self.workloads[at].0.replicas != wanted || {
            // A change of this pass counts only once it is seen, that of an old workload too.
            let seen = |workload: &&Workload| workload.role == role && workload.revision == hash;
            self.world.workloads.iter().find(seen).map(|workload| workload.replicas) != Some(wanted)
                || self.world.old(role, hash).next().is_some()
        }
    }

    /// Whether a role serves now, and no pod of those that do is asked for any more.
    fn takes_last(&self, role: Role) -> bool {
        let of_role = self.workloads.iter().map(|(workload, _)| workload);
        let of_role = of_role.filter(|workload| workload.role == role);
        let serving = |workload: &Workload| self.world.ready(role, &workload.revision);
        of_role.clone().any(|workload| serving(workload) > 0)
            && of_role
                .clone()
                .all(|workload| serving(workload).min(workload.replicas) == 0)
    }

    /// Gives the router its template and its number of pods; Kubernetes rolls it.
    pub fn set_router(&mut self, goal: &Revision) {
        let at = self.entry(goal, Role::Router);
        self.workloads[at].0.replicas = goal.replicas(Role::Router);
        let hash = goal.hash(Role::Router);
        self.workloads
            .retain(|(workload, _)| workload.role != Role::Router || workload.revision == hash);
    }

    /// What should be: without old workloads that have no pods left and that none of `needed` names.
    pub fn intents(&self, needed: &[&Revision]) -> Vec<WorkloadIntent> {
        let keeps = |workload: &Workload| {
            let of_it = |pod: &Pod| pod.role == workload.role && pod.revision == workload.revision;
            workload.replicas > 0
                || self.world.pods.iter().any(of_it)
                || needed
                    .iter()
                    .any(|revision| revision.hash(workload.role) == workload.revision)
        };
        let template = |workload: &Workload, given: &Option<String>| {
            let of_needed = needed
                .iter()
                .find(|revision| revision.hash(workload.role) == workload.revision);
            given.clone().or_else(|| of_needed.map(|revision| revision.id.clone()))
        };
        let kept = self.workloads.iter().filter(|(workload, _)| keeps(workload));
        let intent = |(workload, given): &(Workload, Option<String>)| WorkloadIntent {
            role: workload.role,
            revision: workload.revision.clone(),
            template: template(workload, given),
            replicas: workload.replicas,
        };
        kept.map(intent).collect()
    }

    /// The index of the goal's workload of a role, made with no pods where there is none.
    fn entry(&mut self, goal: &Revision, role: Role) -> usize {
        let hash = goal.hash(role);
        let of_goal = |(workload, _): &(Workload, _)| workload.role == role && workload.revision == hash;
        let at = self.workloads.iter().position(of_goal).unwrap_or_else(|| {
            let made = Workload {
                role,
                revision: hash.to_owned(),
                contract: goal.contract.clone(),
                replicas: 0,
                gpus: goal.gpus(role),
                trouble: None,
            };
            self.workloads.push((made, None));
            self.workloads.len() - 1
        });
        self.workloads[at].1 = Some(goal.id.clone());
        at
    }

    fn old_replicas(&self, role: Role, hash: &str) -> i32 {
        let old = self
            .workloads
            .iter()
            .filter(|(workload, _)| workload.role == role && workload.revision != hash);
        old.map(|(workload, _)| workload.replicas).sum()
    }

    /// Leaves so many old pods of a role, and takes those first that do not serve.
    fn keep_old(&mut self, role: Role, hash: &str, keep: i32) {
        while self.old_replicas(role, hash) > keep && self.drop_one(role, hash) {}
    }

    /// Takes one old pod of a role, from the workload with the most that do not serve.
    fn drop_one(&mut self, role: Role, hash: &str) -> bool {
        let world = self.world;
        let idle = |workload: &Workload| workload.replicas - world.routed(role, &workload.revision);
        let old = self.workloads.iter_mut().map(|(workload, _)| workload);
        let old = old.filter(|workload| workload.role == role && workload.revision != hash && workload.replicas > 0);
        let Some(first) = old.max_by_key(|workload| (idle(workload), workload.revision.clone())) else {
            return false;
        };
        first.replicas -= 1;
        true
    }

    /// Takes one old pod, of this role or of one that moves after it, to make room for a new one.
    fn give_up_one(&mut self, goal: &Revision, role: Role) -> bool {
        let from = ENGINES.into_iter().filter(|&other| other >= role);
        from.into_iter().any(|role| self.drop_one(role, goal.hash(role)))
    }

    /// GPUs that the workloads ask for.
    fn asked(&self) -> i32 {
        self.workloads
            .iter()
            .map(|(workload, _)| workload.gpus * workload.replicas)
            .sum()
    }

    /// GPUs that the workloads ask for, or asked for when last seen, and those of pods that are still there.
    fn held(&self) -> i32 {
        let seen = |workload: &Workload| {
            let is_it = |other: &&Workload| other.role == workload.role && other.revision == workload.revision;
            self.world.workloads.iter().find(is_it).map_or(0, |seen| seen.replicas)
        };
        let of = |workload: &Workload| {
            let mut alive = 0;
            let mut terminating = 0;
            for pod in &self.world.pods {
                if pod.role == workload.role && pod.revision == workload.revision && !pod.lost {
                    *(if pod.terminating { &mut terminating } else { &mut alive }) += 1;
                }
            }
            workload.gpus * (workload.replicas.max(seen(workload)).max(alive) + terminating)
        };
        let orphan = |pod: &&Pod| {
            let of_pod = |(workload, _): &(Workload, _)| workload.role == pod.role && workload.revision == pod.revision;
            !pod.lost && !self.workloads.iter().any(of_pod)
        };
        let orphans: i32 = self.world.pods.iter().filter(orphan).map(|pod| pod.gpus).sum();
        self.workloads.iter().map(|(workload, _)| of(workload)).sum::<i32>() + orphans
    }
}
