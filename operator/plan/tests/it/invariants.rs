//! What has to hold of every plan, whatever happened before.

use tandem_crds::Role;
use tandem_crds::status::{Direction, GateOutcome, Outcome};
use tandem_plan::{Plan, Pod, Revision, Traffic, Workload, WorkloadIntent};

use crate::sim::{ENGINES, Sim, serves};

impl Sim {
    /// A plan, held to what must be true of each by what was seen.
    pub fn judge(&mut self, plan: &Plan) {
        if self.deleting.is_some() {
            return;
        }
        let stored = |id: &str| {
            let new = plan.store.as_ref();
            self.revisions.iter().chain(new).find(|revision| revision.id == id)
        };
        let mut wrong: Vec<String> = Vec::new();
        let (old, new) = (&self.status, &plan.status);
        let running = stored(&new.revisions.running);

        let is_ready = new
            .conditions
            .iter()
            .any(|one| one.type_ == "Ready" && one.status == "True");
        if is_ready {
            let target = tandem_crds::Inputs::of(&self.spec).target();
            if tandem_plan::target_of(&new.revisions.running) != target {
                wrong.push("Ready on another target than the spec's".into());
            }
            wrong.extend(running.map_or(Some("Ready, and nothing runs".into()), |running| self.differs(running)));
            if self.world.order != Some(Traffic::Admit) {
                wrong.push("Ready while requests are held".into());
            }
        }
        let ended = new.history.first().filter(|entry| old.history.first() != Some(entry));
        match ended.map(|entry| entry.outcome) {
            Some(Outcome::Promoted | Outcome::Reverted) if !self.world.unrouted.is_empty() => {
                wrong.push(format!("done while the routers do not know {:?}", self.world.unrouted));
            }
            Some(Outcome::Promoted) => {
                wrong.extend(running.and_then(|running| self.differs(running)));
                let before = stored(&old.revisions.running);
                let only_scales = running.zip(before).is_some_and(|(running, before)| {
                    running.restarts(Some(before)).is_empty()
                        && Role::ALL.iter().all(|role| running.knobs(*role) == before.knobs(*role))
                });
                let probed = self.world.probe.as_ref().is_some_and(|probe| {
                    probe.revision == new.revisions.running && probe.outcome == GateOutcome::Passed
                });
                if !only_scales && !probed {
                    wrong.push(format!("{} is promoted without a probe", new.revisions.running));
                }
            }
            Some(Outcome::Reverted) => {
                wrong.extend(running.and_then(|running| self.differs(running)));
                if new.revisions.running != new.revisions.last_good {
                    wrong.push("reverted to something else than what was good last".into());
                }
            }
            _ => {}
        }

        let goal = match &new.rollout {
            None => running,
            Some(rollout) => match rollout.direction {
                Direction::Forward => stored(&rollout.target),
                Direction::Revert => stored(&new.revisions.last_good),
                Direction::Held => None,
            },
        };
        let asked = |workload: &Workload| {
            let of_it = |intent: &&WorkloadIntent| intent.role == workload.role && intent.revision == workload.revision;
            plan.workloads.iter().find(of_it).map_or(0, |intent| intent.replicas)
        };
        for workload in &self.world.workloads {
            let is_goal = goal.filter(|goal| goal.hash(workload.role) == workload.revision);
            if is_goal.is_some_and(|goal| asked(workload) < workload.replicas.min(goal.replicas(workload.role))) {
                wrong.push(format!("{} is what is wanted, and loses pods", workload.revision));
            }
        }
        let holds = self.world.order != Some(Traffic::Admit) || plan.traffic != Traffic::Admit;
        for role in ENGINES {
            let of_role = self.world.workloads.iter().filter(|workload| workload.role == role);
            let serves = |workload: &Workload| {
                let of_it = |pod: &&Pod| pod.role == role && pod.revision == workload.revision && serves(pod);
                self.world.pods.iter().filter(of_it).count() as i32
            };
            let before: i32 = of_role.clone().map(serves).sum();
            let after: i32 = of_role.map(|workload| serves(workload).min(asked(workload))).sum();
            if before > 0 && after == 0 && !holds {
                wrong.push(format!(
                    "the last {role:?} pods that serve are taken while requests come"
                ));
            }
        }
        self.wrong.extend(wrong);
    }

    /// What keeps what runs from being this revision, all of it and nothing else.
    fn differs(&self, revision: &Revision) -> Option<String> {
        let wrong = Role::ALL.into_iter().find(|&role| {
            let (hash, knobs) = (revision.hash(role), revision.knobs(role));
            let of_role = || self.world.pods.iter().filter(move |pod| pod.role == role);
            let ready = of_role().filter(|pod| serves(pod) && pod.revision == hash).count();
            ready as i32 != revision.replicas(role)
                || of_role().any(|pod| serves(pod) && (pod.revision != hash || pod.knobs.as_deref() != Some(knobs)))
        });
        wrong.map(|role| format!("{role:?} is not what {} says", revision.id))
    }
}
