//! A plan, carried out: its intents become children, its knobs and orders are told to those that run.

use tandem_crds::Role;
use tandem_plan::{Plan, Revision, Traffic, Trouble, Workload, WorkloadIntent};

use super::child::{Limits, Order};
use super::kids::Kid;
use super::ports::Ports;
use super::render::{self, Made, Process, seconds};
use super::slots::{self, Slot};
use super::stack::{EXIT_GRACE, Stack};
use super::state::ProcessState;
use super::{UpError, gate};

impl Stack {
    /// Whether anything came of it.
    pub(super) async fn carry(&mut self, plan: &Plan) -> Result<bool, UpError> {
        let mut changed = plan.status != self.status;
        if let Some(revision) = &plan.store {
            self.revisions.push(revision.clone());
        }
        if !self.spec.rollout.paused {
            changed |= self.order(plan).await;
            changed |= self.knobs(plan).await;
            changed |= self.workloads(&plan.workloads)?;
            self.probe(plan);
            self.revisions.retain(|revision| !plan.discard.contains(&revision.id));
        }
        Ok(changed)
    }

    async fn order(&mut self, plan: &Plan) -> bool {
        let mut changed = self.kids.order != Some(plan.traffic);
        self.kids.order = Some(plan.traffic);
        if changed {
            self.redefine();
        }
        let traffic: Vec<Traffic> = self
            .kids
            .all
            .iter()
            .map(|kid| self.kids.traffic(kid, plan.traffic))
            .collect();
        for (kid, traffic) in self.kids.all.iter_mut().zip(traffic) {
            if kid.role() == Role::Router && kid.answers() && kid.facts.is_some() && !kid.obeys(traffic) {
                changed |= kid.set_traffic(&self.http, &self.token, traffic).await;
            }
        }
        changed
    }

    async fn knobs(&mut self, plan: &Plan) -> bool {
        let mut changed = false;
        for (role, id) in &plan.knobs {
            let Some(revision) = self.stored(id).cloned() else {
                continue;
            };
            let held = self.kids.knobs.get(role).map(|held| held.knobs(*role));
            if held != Some(revision.knobs(*role)) {
                self.kids.knobs.insert(*role, revision.clone());
                self.redefine();
                changed = true;
            }
            let of_role = self
                .kids
                .all
                .iter_mut()
                .filter(|kid| kid.role() == *role && !kid.stopping);
            for kid in of_role.filter(|kid| kid.answers() && kid.facts.is_some()) {
                if !kid.has_knobs(&revision) {
                    changed |= kid.set_knobs(&self.http, &self.token, &revision).await;
                }
            }
        }
        changed
    }

    fn workloads(&mut self, intents: &[WorkloadIntent]) -> Result<bool, UpError> {
        let wanted: Vec<(Workload, String)> = intents.iter().map(|intent| self.workload(intent)).collect();
        let mut changed = wanted != self.kids.workloads;
        self.kids.workloads = wanted;
        for uid in self.surplus() {
            let Some(kid) = self.kids.all.iter_mut().find(|kid| kid.uid == uid) else {
                continue;
            };
            changed = true;
            match kid.index {
                Some(index) if !self.supervisor.ended(index) => {
                    kid.stopping = true;
                    self.supervisor.order(index, Order::Stop);
                }
                _ => self.kids.remove(uid),
            }
        }
        for (workload, template) in self.kids.workloads.clone() {
            let alive = self
                .kids
                .all
                .iter()
                .filter(|kid| is_of(kid, &workload) && !kid.stopping)
                .count() as i32;
            for _ in alive..workload.replicas {
                // Its place may still be taken by one that is on its way out.
                let Some(slot) = self.free(workload.role)? else { break };
                self.begin(&workload, &template, slot)?;
                changed = true;
            }
        }
        Ok(changed)
    }

    fn workload(&self, intent: &WorkloadIntent) -> (Workload, String) {
        let is_it = |(old, _): &&(Workload, String)| old.role == intent.role && old.revision == intent.revision;
        let old = self.kids.workloads.iter().find(is_it);
        let template = intent.template.as_ref().or(old.map(|(_, template)| template));
        let template = template.cloned().unwrap_or_default();
        let stored = self.stored(&template);
        let workload = Workload {
            role: intent.role,
            revision: intent.revision.clone(),
            contract: old.map_or_else(
                || stored.map_or_else(String::new, |stored| stored.contract.clone()),
                |(old, _)| old.contract.clone(),
            ),
            replicas: intent.replicas,
            gpus: stored.map_or(0, |stored| stored.gpus(intent.role)),
            trouble: None,
        };
        (workload, template)
    }

    /// Those that no workload asks for any more: the ones that do not serve first. A router goes only once another one
    /// serves: both accept from the same socket, so that no client is refused in between.
    fn surplus(&self) -> Vec<u64> {
        let wanted = |kid: &Kid| {
            let found = self.kids.workloads.iter().find(|(workload, _)| is_of(kid, workload));
            found.map_or(0, |(workload, _)| workload.replicas as usize)
        };
        let mut alive: Vec<&Kid> = self.kids.all.iter().filter(|kid| !kid.stopping).collect();
        alive.sort_by_key(|kid| (!kid.shown.ready, kid.uid));
        let relieved = alive
            .iter()
            .any(|kid| kid.role() == Role::Router && kid.shown.ready && wanted(kid) > 0);
        let mut keeps: Vec<&Kid> = Vec::new();
        let mut surplus = Vec::new();
        for kid in alive {
            let same = |other: &&&Kid| other.role() == kid.role() && other.revision == kid.revision;
            let stays = keeps.iter().filter(same).count() < wanted(kid);
            if stays || (kid.role() == Role::Router && kid.shown.ready && !relieved) {
                keeps.push(kid);
            } else {
                surplus.push(kid.uid);
            }
        }
        surplus
    }

    /// A place for one more process of a role. Engines have theirs, known to the router; a router takes new ports where the
    /// old one still runs.
    fn free(&mut self, role: Role) -> Result<Option<Slot>, UpError> {
        let of_role = |slot: &&Slot| Role::from(slot.role) == role;
        let taken = |slot: &&Slot| self.kids.all.iter().any(|kid| kid.slot.admin == slot.admin);
        let free = self.slots.iter().filter(of_role).find(|slot| !taken(slot)).cloned();
        let router = self.slots.iter().find(|slot| slot.role == slots::Role::Router);
        match (free, router) {
            (None, Some(router)) if role == Role::Router => {
                let ports = Ports::reserve(slots::ROUTER_PORTS).map_err(|error| UpError::Ports(error.to_string()))?;
                Ok(Some(router.moved(&ports.list())))
            }
            (free, _) => Ok(free),
        }
    }

    fn begin(&mut self, workload: &Workload, template: &str, slot: Slot) -> Result<(), UpError> {
        self.kids.born += 1;
        let mut kid = Kid {
            uid: self.kids.born,
            shown: ProcessState::not_started(&slot),
            slot,
            revision: workload.revision.clone(),
            template: template.to_owned(),
            contract: workload.contract.clone(),
            gpus: workload.gpus,
            index: None,
            stopping: false,
            trouble: None,
            facts: None,
            asked: None,
        };
        match self.process(&kid) {
            Ok((process, limits)) => {
                for port in kid.slot.ports() {
                    self.ports.release(port);
                }
                let log_dir = self.state.log_dir.clone();
                let started = self.supervisor.start(process, limits, log_dir.as_deref());
                kid.index = Some(started.map_err(|source| UpError::Logs {
                    dir: log_dir.unwrap_or_default(),
                    source,
                })?);
            }
            Err(error) if self.status.revisions.running.is_empty() => return Err(error),
            Err(error) => {
                kid.trouble = Some(Trouble {
                    reason: Trouble::GAVE_UP.to_owned(),
                    message: format!("{} cannot be started: {error}", kid.slot.name),
                });
            }
        }
        self.kids.all.push(kid);
        Ok(())
    }

    /// What a child is, if it starts now.
    fn process(&self, kid: &Kid) -> Result<(Process, Limits), UpError> {
        let Some(of) = self.stored(&kid.template) else {
            return Err(UpError::Held(format!(
                "revision {} is not stored any more",
                kid.template
            )));
        };
        let hot = self.kids.knobs.get(&kid.role()).unwrap_or(of);
        let found = self.names.find(&of.spec)?;
        let made = Made {
            spec: &of.spec,
            hot: &hot.spec,
            found: &found,
            traffic: self.kids.order.unwrap_or(Traffic::Admit),
        };
        let process = render::process(made, &self.machine, &kid.slot, &self.slots);
        let times = &of.spec.timeouts;
        let limits = Limits {
            startup: seconds(times.startup_seconds),
            stop: seconds(times.drain_seconds) + EXIT_GRACE,
        };
        Ok((process, limits))
    }

    /// A child that dies from now on starts with the knobs and the order of now.
    fn redefine(&self) {
        for kid in self.kids.all.iter().filter(|kid| !kid.stopping) {
            if let (Some(index), Ok((process, _))) = (kid.index, self.process(kid)) {
                self.supervisor.redefine(index, process);
            }
        }
    }

    fn probe(&mut self, plan: &Plan) {
        let Some(order) = &plan.probe else { return };
        let about = (order.revision.clone(), order.pods.clone());
        let is_it = |probe: &tandem_plan::Probe| (&probe.revision, &probe.pods) == (&about.0, &about.1);
        if self.probing.as_ref() == Some(&about) || self.kids.probe.as_ref().is_some_and(is_it) {
            return;
        }
        let mut routers = self.kids.all.iter().filter(|kid| kid.role() == Role::Router);
        let router = routers.find(|kid| kid.shown.ready && !kid.stopping);
        let Some(router) = router.map(Kid::target) else {
            return;
        };
        self.probes.abort_all();
        self.probing = Some(about);
        let (http, token, kv) = (self.http.clone(), self.token.clone(), self.kids.kv_bytes_per_token());
        self.probes.spawn(gate::probe(http, router, token, order.clone(), kv));
    }

    pub(super) fn stored(&self, id: &str) -> Option<&Revision> {
        self.revisions.iter().find(|revision| revision.id == id)
    }
}

fn is_of(kid: &Kid, workload: &Workload) -> bool {
    kid.role() == workload.role && kid.revision == workload.revision
}
