//! A world for the planner: Kubernetes' controllers, nodes and processes, and an operator that may die between any two of
//! its writes. Time is a number, chance is the property's.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use tandem_crds::status::{Direction, GateOutcome};
use tandem_crds::{PDDeploymentSpec, PDDeploymentStatus, Role};
use tandem_plan::{
    DefaultImages, Input, Plan, Pod, Probe, Revision, Traffic, Trouble, Workload, WorkloadIntent, World,
};

pub const ENGINES: [Role; 2] = [Role::Prefill, Role::Decode];
/// A pod is deleted this long after its node was lost.
const EVICTION_SECONDS: i64 = 60;
/// One tick of the world.
pub const TICK_SECONDS: i64 = 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    Up,
    Lost { since: i64 },
    Gone,
}

/// What the simulated kubelet knows of a pod beside what the planner sees.
#[derive(Debug, Clone)]
struct Life {
    node: Option<usize>,
    since: i64,
    ready_since: i64,
    /// The routers know it.
    routed: bool,
}

pub fn serves(pod: &Pod) -> bool {
    pod.ready && !pod.terminating && !pod.lost
}

#[derive(Debug, Clone)]
pub struct Sim {
    pub now: i64,
    /// What the operator's clock says more than the world's.
    pub skew: i64,
    pub spec: PDDeploymentSpec,
    pub generation: i64,
    pub deleting: Option<i64>,
    pub finalizer: bool,
    pub status: PDDeploymentStatus,
    pub images: DefaultImages,
    pub revisions: Vec<Revision>,
    pub world: World,
    pub nodes: Vec<Node>,
    pub gpus_per_node: i32,
    /// Hashes of roles whose pods never get ready.
    pub broken: BTreeSet<String>,
    /// Targets whose probe fails.
    pub bad_probe: BTreeSet<String>,
    pub start_seconds: i64,
    pub stop_seconds: i64,
    /// A router knows an engine so long after it is ready.
    pub route_seconds: i64,
    /// Every write by its name.
    pub writes: Vec<String>,
    /// What went against an invariant.
    pub wrong: Vec<String>,
    lives: BTreeMap<String, Life>,
    next_uid: u64,
    probe_ordered: Option<(String, String)>,
}

impl Sim {
    pub fn new(spec: PDDeploymentSpec) -> Self {
        Self {
            now: 1_000_000,
            skew: 0,
            spec,
            generation: 1,
            deleting: None,
            finalizer: true,
            status: PDDeploymentStatus::default(),
            images: DefaultImages {
                engine: "engine:1".into(),
                router: "router:1".into(),
            },
            revisions: Vec::new(),
            world: World::default(),
            nodes: vec![Node::Up; 2],
            gpus_per_node: 8,
            broken: BTreeSet::new(),
            bad_probe: BTreeSet::new(),
            start_seconds: 30,
            stop_seconds: 20,
            route_seconds: 0,
            writes: Vec::new(),
            wrong: Vec::new(),
            lives: BTreeMap::new(),
            next_uid: 0,
            probe_ordered: None,
        }
    }

    pub fn edit(&mut self, change: impl FnOnce(&mut PDDeploymentSpec)) {
        change(&mut self.spec);
        self.generation += 1;
    }

    fn time(&self) -> Timestamp {
        Timestamp::from_second(self.now + self.skew).unwrap()
    }

    pub fn plan(&self) -> Plan {
        tandem_plan::plan(Input {
            now: self.time(),
            generation: self.generation,
            deleting: self.deleting.map(|at| Timestamp::from_second(at).unwrap()),
            spec: &self.spec,
            status: &self.status,
            images: &self.images,
            revisions: &self.revisions,
            world: &self.world,
        })
    }

    // ---- the operator ----

    /// One pass that dies after so many writes.
    pub fn reconcile(&mut self, mut writes: usize) {
        let plan = self.plan();
        let seen = self.world.clone();
        self.judge(&plan);
        let mut may = |sim: &mut Self, name: String| {
            let may = writes > 0;
            if may {
                writes -= 1;
                sim.writes.push(name);
            }
            may
        };
        if let Some(revision) = &plan.store {
            if !may(self, format!("store {}", revision.id)) {
                return;
            }
            self.revisions.push(revision.clone());
        }
        if self.world.order != Some(plan.traffic) {
            if !may(self, format!("order {:?}", plan.traffic)) {
                return;
            }
            self.world.order = Some(plan.traffic);
        }
        for at in 0..self.world.pods.len() {
            let pod = &self.world.pods[at];
            if pod.role == Role::Router && pod.ready && !pod.lost && pod.order != Some(plan.traffic) {
                if !may(self, format!("tell {} {:?}", self.world.pods[at].uid, plan.traffic)) {
                    return;
                }
                self.world.pods[at].order = Some(plan.traffic);
            }
        }
        for (role, id) in &plan.knobs {
            let Some(revision) = self.revisions.iter().find(|revision| &revision.id == id) else {
                continue;
            };
            let hash = revision.knobs(*role).to_owned();
            if self.world.knobs.get(role) != Some(&hash) {
                if !may(self, format!("knobs {role:?} {hash}")) {
                    return;
                }
                self.world.knobs.insert(*role, hash.clone());
            }
            for at in 0..self.world.pods.len() {
                let pod = &self.world.pods[at];
                if pod.role == *role && pod.ready && !pod.lost && pod.knobs.as_ref() != Some(&hash) {
                    if !may(self, format!("set knobs of {}", self.world.pods[at].uid)) {
                        return;
                    }
                    self.world.pods[at].knobs = Some(hash.clone());
                }
            }
        }
        for intent in &plan.workloads {
            let found = self
                .world
                .workloads
                .iter()
                .position(|workload| workload.role == intent.role && workload.revision == intent.revision);
            let replicas = found.map(|at| self.world.workloads[at].replicas);
            if replicas == Some(intent.replicas) {
                continue;
            }
            if !may(
                self,
                format!("scale {} {:?} -> {}", intent.revision, replicas, intent.replicas),
            ) {
                return;
            }
            self.scale(intent, found, replicas.unwrap_or(0), &seen);
        }
        let stays = |workload: &Workload| {
            let is_it = |intent: &WorkloadIntent| intent.role == workload.role && intent.revision == workload.revision;
            plan.workloads.iter().any(is_it)
        };
        // What is not needed any more goes only once it is written down that it is not.
        let under_way = |status: &PDDeploymentStatus| status.rollout.as_ref().map(|rollout| rollout.target.clone());
        let is_written =
            self.status.revisions == plan.status.revisions && under_way(&self.status) == under_way(&plan.status);
        let touches = is_written && self.deleting.is_none() && !self.spec.rollout.paused;
        for workload in self.world.workloads.clone() {
            if touches && !stays(&workload) {
                if !may(self, format!("remove {}", workload.revision)) {
                    return;
                }
                self.world.workloads.retain(|other| *other != workload);
            }
        }
        for id in plan.discard.iter().filter(|_| touches) {
            if !may(self, format!("discard {id}")) {
                return;
            }
            self.revisions.retain(|revision| revision.id != *id);
        }
        if let Some(order) = &plan.probe {
            self.probe_ordered = Some((order.revision.clone(), order.pods.clone()));
        }
        self.finalizer = plan.finalizer;
        if self.status != plan.status && may(self, format!("status {:?}", plan.status.step)) {
            self.status = plan.status;
        }
    }

    /// A move of the planner, held to the invariants of moves.
    fn scale(&mut self, intent: &WorkloadIntent, found: Option<usize>, before: i32, seen: &World) {
        if self.deleting.is_some() {
            self.wrong
                .push(format!("{} is scaled while the object is deleted", intent.revision));
        }
        let at = found.unwrap_or_else(|| {
            let template = intent
                .template
                .as_ref()
                .and_then(|id| self.revisions.iter().find(|stored| &stored.id == id));
            let template = template.unwrap_or_else(|| panic!("{intent:?} has no stored template"));
            assert_eq!(template.hash(intent.role), intent.revision, "{intent:?}");
            self.world.workloads.push(Workload {
                role: intent.role,
                revision: intent.revision.clone(),
                contract: template.contract.clone(),
                replicas: 0,
                gpus: template.gpus(intent.role),
                trouble: None,
            });
            self.world.workloads.len() - 1
        });
        self.world.workloads[at].replicas = intent.replicas;
        let workload = self.world.workloads[at].clone();
        if intent.replicas <= before {
            return;
        }
        let used: i32 = self
            .world
            .workloads
            .iter()
            .map(|workload| {
                let pods = |terminating| {
                    let of_it = |pod: &&Pod| pod.revision == workload.revision && pod.role == workload.role;
                    let pods = seen.pods.iter().filter(of_it);
                    pods.filter(|pod| !pod.lost && pod.terminating == terminating).count() as i32
                };
                workload.gpus * (workload.replicas.max(pods(false)) + pods(true))
            })
            .sum();
        if workload.gpus > 0 && used > self.spec.gpus.budget {
            self.wrong
                .push(format!("{used} GPUs of {} after {intent:?}", self.spec.gpus.budget));
        }
        let ready = |role, contract: &str| {
            let of_contract = |pod: &&Pod| {
                let its = self
                    .world
                    .workloads
                    .iter()
                    .find(|other| other.revision == pod.revision && other.role == role);
                pod.role == role && pod.ready && its.is_some_and(|its| its.contract == contract)
            };
            seen.pods.iter().any(|pod| of_contract(&pod))
        };
        let fresh = !seen
            .pods
            .iter()
            .any(|pod| pod.role == Role::Decode && pod.revision == workload.revision);
        if workload.role == Role::Decode && fresh && !ready(Role::Prefill, &workload.contract) {
            self.wrong.push(format!(
                "decode {} goes before a ready prefill of its contract",
                workload.revision
            ));
        }
        if workload.role == Role::Router
            && before == 0
            && ENGINES.into_iter().any(|role| !ready(role, &workload.contract))
        {
            self.wrong.push(format!(
                "router {} goes before ready engines of its contract",
                workload.revision
            ));
        }
    }

    // ---- Kubernetes and the processes ----

    /// Time goes on by one tick.
    pub fn tick(&mut self) {
        self.now += TICK_SECONDS;
        self.lose();
        self.control();
        self.schedule();
        self.run();
        if let Some((revision, pods)) = self.probe_ordered.take() {
            let bad = self.bad_probe.contains(tandem_plan::target_of(&revision));
            self.world.probe = Some(Probe {
                revision,
                pods,
                outcome: if bad { GateOutcome::Failed } else { GateOutcome::Passed },
                message: if bad { "no KV crossed".into() } else { String::new() },
            });
        }
    }

    fn lose(&mut self) {
        for pod in &mut self.world.pods {
            let node = self.lives[&pod.uid].node.map(|at| &self.nodes[at]);
            pod.lost = matches!(node, Some(Node::Lost { .. } | Node::Gone));
            if pod.lost {
                pod.ready = false;
            }
            match node {
                Some(Node::Lost { since }) if self.now - since > EVICTION_SECONDS => pod.terminating = true,
                _ => {}
            }
        }
        let lives = &self.lives;
        let nodes = &self.nodes;
        self.world
            .pods
            .retain(|pod| lives[&pod.uid].node.is_none_or(|at| nodes[at] != Node::Gone));
    }

    fn control(&mut self) {
        for workload in self.world.workloads.clone() {
            let of_it = |pod: &Pod| pod.role == workload.role && pod.revision == workload.revision && !pod.terminating;
            let alive = self.world.pods.iter().filter(|pod| of_it(pod)).count() as i32;
            for _ in alive..workload.replicas {
                self.next_uid += 1;
                let uid = format!("{}-{}", workload.revision, self.next_uid);
                self.lives.insert(
                    uid.clone(),
                    Life {
                        node: None,
                        since: self.now,
                        ready_since: self.now,
                        routed: false,
                    },
                );
                self.world.pods.push(Pod::made(&workload, uid));
            }
            for _ in workload.replicas..alive {
                let mut pods: Vec<&mut Pod> = self.world.pods.iter_mut().filter(|pod| of_it(pod)).collect();
                // The one that is ready for the shortest time, as a ReplicaSet does.
                pods.sort_by_key(|pod| (pod.ready, Reverse(self.lives[&pod.uid].ready_since)));
                pods[0].terminating = true;
                pods[0].ready = false;
                self.lives.get_mut(&pods[0].uid).unwrap().since = self.now;
            }
        }
        // A workload that was removed takes its pods with it; a router's new template takes the old one's.
        let workloads = &self.world.workloads;
        let router_ready = |pods: &[Pod], hash: &str| {
            pods.iter()
                .any(|pod| pod.role == Role::Router && pod.revision == hash && pod.ready)
        };
        let router = workloads
            .iter()
            .find(|workload| workload.role == Role::Router)
            .map(|router| router.revision.clone());
        let rolled = router.is_some_and(|hash| router_ready(&self.world.pods, &hash));
        for pod in &mut self.world.pods {
            let owned = workloads
                .iter()
                .any(|workload| workload.role == pod.role && workload.revision == pod.revision);
            if !owned && !pod.terminating && (pod.role != Role::Router || rolled) {
                pod.terminating = true;
                pod.ready = false;
                self.lives.get_mut(&pod.uid).unwrap().since = self.now;
            }
        }
    }

    fn schedule(&mut self) {
        for at in 0..self.world.pods.len() {
            let pod = &self.world.pods[at];
            if self.lives[&pod.uid].node.is_some() || pod.terminating {
                continue;
            }
            let free = |node: usize| {
                let on = |pod: &&Pod| self.lives[&pod.uid].node == Some(node);
                self.gpus_per_node - self.world.pods.iter().filter(on).map(|pod| pod.gpus).sum::<i32>()
            };
            let fits = (0..self.nodes.len()).find(|&node| self.nodes[node] == Node::Up && free(node) >= pod.gpus);
            let uid = pod.uid.clone();
            let life = self.lives.get_mut(&uid).unwrap();
            life.node = fits;
            life.since = self.now;
            self.world.pods[at].trouble = fits.is_none().then(|| Trouble {
                reason: "Unschedulable".into(),
                message: "Insufficient nvidia.com/gpu".into(),
            });
        }
    }

    fn run(&mut self) {
        let knobs = self.world.knobs.clone();
        let order = self.world.order;
        let (lives, now, start, broken) = (&mut self.lives, self.now, self.start_seconds, &self.broken);
        for pod in &mut self.world.pods {
            let life = lives.get_mut(&pod.uid).unwrap();
            let runs = !pod.terminating && !pod.lost && life.node.is_some();
            if runs && !pod.ready && now - life.since >= start {
                if broken.contains(&pod.revision) {
                    pod.trouble = Some(Trouble {
                        reason: "CrashLoop".into(),
                        message: "exit code 1".into(),
                    });
                    continue;
                }
                pod.ready = true;
                (life.ready_since, life.routed) = (now, false);
                pod.backend = "cpu".into();
                pod.knobs = knobs.get(&pod.role).cloned();
                pod.order = order.filter(|_| pod.role == Role::Router);
            }
            if pod.role == Role::Router {
                let admits = matches!(pod.order, None | Some(Traffic::Admit));
                pod.in_flight = if admits && pod.ready {
                    3
                } else {
                    pod.in_flight.saturating_sub(1)
                };
            }
        }
        self.route();
        let (lives, stop) = (&self.lives, self.stop_seconds);
        let stopped = |pod: &Pod| {
            pod.terminating && !pod.lost && (lives[&pod.uid].node.is_none() || now - lives[&pod.uid].since >= stop)
        };
        self.world.pods.retain(|pod| !stopped(pod));
    }

    /// A router that starts is ready once it knows the engines that there are.
    fn route(&mut self) {
        let contract = |pod: &Pod| {
            let mut stored = self.revisions.iter();
            stored
                .find(|stored| stored.hash(pod.role) == pod.revision)
                .map(|stored| &stored.contract)
        };
        let routers = self
            .world
            .pods
            .iter()
            .filter(|pod| pod.role == Role::Router && serves(pod));
        let contracts: BTreeSet<_> = routers.map(contract).collect();
        for pod in &self.world.pods {
            let life = self.lives.get_mut(&pod.uid).unwrap();
            life.routed |= self.now - life.ready_since >= self.route_seconds || !contracts.contains(&contract(pod));
        }
        let new = |pod: &&Pod| pod.role != Role::Router && pod.ready && !self.lives[&pod.uid].routed;
        let new = self.world.pods.iter().filter(new).map(|pod| pod.uid.clone()).collect();
        self.world.unrouted = new;
    }

    /// Somebody deletes a pod.
    pub fn kill(&mut self, at: usize) {
        let now = self.now;
        if let Some((pod, life)) = self.some(at) {
            pod.terminating = true;
            pod.ready = false;
            life.since = now;
        }
    }

    /// A pod's process ends, and another is started in its place.
    pub fn crash(&mut self, at: usize) {
        let now = self.now;
        if let Some((pod, life)) = self.some(at).filter(|(pod, _)| !pod.terminating) {
            pod.ready = false;
            pod.in_flight = 0;
            life.since = now;
        }
    }

    fn some(&mut self, at: usize) -> Option<(&mut Pod, &mut Life)> {
        let at = at.checked_rem(self.world.pods.len())?;
        let pod = &mut self.world.pods[at];
        let life = self.lives.get_mut(&pod.uid)?;
        Some((pod, life))
    }

    /// Another operator takes the place of this one: what it had not written down is lost.
    pub fn restart_operator(&mut self) {
        self.probe_ordered = None;
        self.world.probe = None;
    }

    // ---- what tests ask ----

    pub fn condition(&self, type_: &str) -> &str {
        let found = self.status.conditions.iter().find(|condition| condition.type_ == type_);
        found.map_or("", |condition| condition.status.as_str())
    }

    pub fn reason(&self, type_: &str) -> &str {
        let found = self.status.conditions.iter().find(|condition| condition.type_ == type_);
        found.map_or("", |condition| condition.reason.as_str())
    }

    /// Whether pods of a stored revision would never get ready.
    pub fn is_broken(&self, id: &str) -> bool {
        let of_id = self.revisions.iter().filter(|stored| stored.id == id);
        of_id
            .flat_map(|stored| &stored.roles)
            .any(|role| self.broken.contains(&role.hash))
    }

    /// How many pods of a role serve and are known to the routers.
    pub fn serving(&self, role: Role) -> usize {
        let of_role = self.world.pods.iter().filter(|pod| pod.role == role && serves(pod));
        of_role.filter(|pod| !self.world.unrouted.contains(&pod.uid)).count()
    }

    pub fn uids(&self, role: Role) -> Vec<String> {
        self.world
            .pods
            .iter()
            .filter(|pod| pod.role == role)
            .map(|pod| pod.uid.clone())
            .collect()
    }

    /// Passes and ticks until it is so after a pass.
    #[track_caller]
    pub fn until(&mut self, is_so: impl Fn(&Self) -> bool) {
        for _ in 0..500 {
            self.reconcile(usize::MAX);
            if is_so(self) {
                return;
            }
            self.tick();
        }
        panic!("it is never so: {:#?}", self.status);
    }

    /// Ticks and passes until nothing changes or a person is waited for, at most so often; whether it is settled then.
    pub fn rest(&mut self, ticks: usize) -> bool {
        for _ in 0..ticks {
            self.reconcile(usize::MAX);
            let (before, writes) = (self.world.clone(), self.writes.len());
            self.tick();
            self.reconcile(usize::MAX);
            // A pod of a node that is lost will be replaced.
            let stands = |pod: &Pod| pod.ready || (pod.lost && pod.terminating) || pod.trouble.is_some();
            if self.world != before || self.writes.len() > writes || !self.world.pods.iter().all(stands) {
                continue;
            }
            let rollout = self.status.rollout.as_ref();
            if rollout.is_none_or(|rollout| rollout.direction == Direction::Held || rollout.stopped_at.is_some()) {
                return rollout.is_none();
            }
            // Only the clock moves on: to when the operator would look again.
            if let Some(again) = self.plan().look_again {
                self.now = self.now.max(again.as_second() - self.skew);
            }
        }
        false
    }
}
