//! One look at a deployment, from the cache to the status.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tandem_crds::{PDDeployment, PDDeploymentStatus};
use tandem_plan::{Input, Plan, plan};
use tokio::time::Instant;

use super::carry::Carry;
use super::observe::Observed;
use super::pace::{Pace, WAITING, stands};
use super::{CONFLICTS, Ended, Memory, PassError, Reconciler};
use crate::cluster::cache::Key;
use crate::cluster::events::transitions;
use crate::cluster::write::FINALIZER;
use crate::metrics::PassResult;
use crate::render::meta::Owner;

impl Reconciler {
    pub(super) async fn pass(&self, key: &Key, memory: &mut Memory) -> Result<Ended, PassError> {
        let view = self.cache.view(key);
        let Some(object) = view.object.clone() else {
            self.memories.forget(key);
            return Ok(settled(None));
        };
        let uid = object.metadata.uid.clone().unwrap_or_default();
        if memory.uid != uid {
            *memory = Memory {
                uid: uid.clone(),
                ..Memory::default()
            };
        }
        let deleting = object.metadata.deletion_timestamp.as_ref().map(|time| time.0);
        let has_finalizer = object.metadata.finalizers.iter().flatten().any(|one| one == FINALIZER);
        match (deleting, has_finalizer) {
            // Whatever is left goes with it.
            (Some(_), false) => return Ok(settled(None)),
            (None, false) => {
                self.writer.finalizer(key, &uid, true).await?;
                return Ok(changed());
            }
            _ => {}
        }
        let owner = Owner {
            name: &key.name,
            namespace: &key.namespace,
            uid: &uid,
        };
        let old = object.status.clone().unwrap_or_default();
        let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
        let observed = self.observe(key, &view, &object.spec, &old, memory, now).await?;
        let revisions: Vec<_> = observed.stored.iter().map(|stored| stored.revision.clone()).collect();
        let plan = plan(Input {
            now,
            generation: object.metadata.generation.unwrap_or(0),
            deleting,
            spec: &object.spec,
            status: &old,
            images: &self.images,
            revisions: &revisions,
            world: &observed.world,
        });
        let mut carry = Carry {
            reconciler: self,
            key,
            owner,
            spec: &object.spec,
            view: &view,
            observed: &observed,
            memory,
            deleting: deleting.is_some(),
            changed: false,
        };
        let carried = carry.out(&plan).await;
        let mut has_changed = carry.changed;
        memory.advanced = has_changed;
        carried?;
        if !plan.finalizer {
            self.writer.finalizer(key, &uid, false).await?;
            return Ok(settled(None));
        }
        if plan.status != old {
            has_changed = true;
            self.write_status(key, &object, &old, &plan.status).await?;
        }
        Ok(ended(&plan, &observed, has_changed, now, memory))
    }

    async fn write_status(
        &self,
        key: &Key,
        object: &Arc<PDDeployment>,
        old: &PDDeploymentStatus,
        new: &PDDeploymentStatus,
    ) -> Result<(), PassError> {
        // A write of the finalizer may have come between: that is no change of what was planned on.
        self.writer.status(key, object, new).await?;
        let transitions = transitions(old, new);
        for transition in &transitions {
            let (reason, action, note) = (&transition.reason, transition.action, &transition.note);
            if transition.warning {
                tracing::warn!(deployment = %key, action, reason, "{note}");
            } else {
                tracing::info!(deployment = %key, action, reason, "{note}");
            }
        }
        let uid = object.metadata.uid.as_deref().unwrap_or_default();
        self.events.tell(key, uid, &transitions).await;
        Ok(())
    }
}

fn changed() -> Ended {
    Ended {
        result: PassResult::Changed,
        again: Some(Instant::now()),
    }
}

fn settled(again: Option<Instant>) -> Ended {
    Ended {
        result: PassResult::Settled,
        again,
    }
}

/// When to look again.
fn ended(plan: &Plan, observed: &Observed, has_changed: bool, now: Timestamp, memory: &Memory) -> Ended {
    if has_changed {
        return changed();
    }
    let at = Instant::now();
    let soon = at
        + if observed.has_processes {
            Pace::of(&plan.status, now).again
        } else {
            CONFLICTS
        };
    let planned = plan.look_again.map(|again| {
        let left = again.duration_since(now).as_millis().max(0);
        at + Duration::from_millis(left as u64).max(WAITING)
    });
    let looks = observed.has_processes || !memory.conflicts.is_empty();
    let again = match planned {
        Some(planned) => Some(planned.min(soon)),
        None => looks.then_some(soon),
    };
    Ended {
        result: if plan.status.rollout.as_ref().is_some_and(|rollout| !stands(rollout)) {
            PassResult::Waiting
        } else {
            PassResult::Settled
        },
        again,
    }
}
