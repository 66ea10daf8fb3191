//! Gathers what the planner is told: from the cache, and from the processes themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use serde::Deserialize as _;
use serde_json::Value;
use tandem_crds::{PDDeploymentSpec, PDDeploymentStatus, Role};
use tandem_plan::{Pod, Revision, World};
use tokio::time::Instant;

use super::pace::Pace;
use super::{CONFLICTS, Memory, PassError, Reconciler};
use crate::cluster::cache::{Child, Key, View};
use crate::cluster::kinds::Kind;
use crate::observe::pod::PodFacts;
use crate::observe::revision::Stored;
use crate::observe::routing;
use crate::observe::workload;
use crate::render::guard::TOKEN_KEY;
use crate::render::knobs as rendered;

/// What was observed of a deployment.
pub struct Observed {
    /// For the planner.
    pub world: World,
    /// Stored revisions with their templates, oldest first, and the highest number.
    pub stored: Vec<Stored>,
    /// Of the stored revisions.
    pub last_number: i64,
    /// Pods of this deployment whose processes can be asked.
    pub serving: Vec<PodFacts>,
    /// Whether there are any.
    pub has_processes: bool,
}

impl Reconciler {
    pub(super) async fn observe(
        &self,
        key: &Key,
        view: &View,
        spec: &PDDeploymentSpec,
        status: &PDDeploymentStatus,
        memory: &mut Memory,
        now: Timestamp,
    ) -> Result<Observed, PassError> {
        let (stored, last_number) = stored(key, view, &memory.uid);
        let revisions: Vec<Revision> = stored.iter().map(|stored| stored.revision.clone()).collect();
        let nodes = self.cache.nodes();
        let of_uid = view.pods.values().filter(|pod| pod.owner == memory.uid && !pod.ended);
        let pods: Vec<&PodFacts> = of_uid.map(|pod| &**pod).collect();
        let serving: Vec<PodFacts> = pods
            .iter()
            .filter(|pod| pod.answers() && !pod.is_lost(&nodes, now))
            .map(|pod| (*pod).clone())
            .collect();
        self.read_token(key, view, memory).await?;
        self.ask(key, &serving, memory, Pace::of(status, now).answers).await;
        self.look_at_conflicts(key, memory).await?;

        let of_spec = std::iter::once(spec).chain(revisions.iter().map(|revision| &revision.spec));
        let gpus: BTreeSet<&str> = of_spec.map(|spec| spec.gpus.resource_name.as_str()).collect();
        let mut world = World::default();
        let order = child(
            view,
            Kind::ConfigMap,
            &format!("{}-router-traffic", key.name),
            &memory.uid,
        );
        let order = order.and_then(|object| ConfigMap::deserialize(object).ok()?.data);
        world.order = order.as_ref().and_then(rendered::traffic_of);
        for role in Role::ALL {
            let name = format!("{}-{}-knobs", key.name, role.field());
            let object = child(view, Kind::ConfigMap, &name, &memory.uid);
            let hash = object
                .as_ref()
                .and_then(|object| object["metadata"]["annotations"][rendered::HASH].as_str());
            if let Some(hash) = hash {
                world.knobs.insert(role, hash.to_owned());
            }
        }
        for ((_, _), one) in view.children.iter().filter(|((kind, _), _)| *kind == Kind::Deployment) {
            let object = one.object();
            if !is_ours(&object, &memory.uid) {
                continue;
            }
            let Ok(deployment) = Deployment::deserialize(object) else {
                continue;
            };
            if let Some((workload, said)) = workload::workload(&deployment, &gpus) {
                world.pods.extend(workload::unseen(&workload, said, &pods));
                world.workloads.push(workload);
            }
        }
        for facts in &pods {
            let Some(role) = facts.role else { continue };
            let devices = facts.devices.iter().filter(|(name, _)| gpus.contains(name.as_str()));
            let mut pod = Pod {
                gpus: devices.map(|(_, count)| count).sum(),
                ready: facts.ready,
                terminating: facts.terminating,
                lost: facts.is_lost(&nodes, now),
                trouble: facts.trouble.clone(),
                ..Pod::unheard(facts.uid.clone(), facts.name.clone(), role, facts.revision.clone())
            };
            let known = memory.peers.get(&facts.uid).filter(|_| facts.answers());
            if let Some(said) = known.and_then(|known| known.facts.as_ref()) {
                said.tell(&mut pod, world.order, &revisions);
            }
            world.pods.push(pod);
        }
        let said = |uid: &str| memory.peers.get(uid).and_then(|known| known.facts.as_ref());
        world.unrouted = routing::unrouted(&serving, &revisions, said);
        let probe = memory.probe.lock().unwrap_or_else(PoisonError::into_inner);
        world.probe.clone_from(&probe.found);
        drop(probe);
        world.conflicts = memory
            .conflicts
            .iter()
            .map(|(kind, name)| format!("{} {name}", kind.name()))
            .collect();
        Ok(Observed {
            world,
            stored,
            last_number,
            has_processes: !serving.is_empty(),
            serving,
        })
    }

    /// Asks those processes that were not asked of late, all at once.
    async fn ask(&self, key: &Key, serving: &[PodFacts], memory: &mut Memory, max_age: Duration) {
        let there: BTreeSet<&str> = serving.iter().map(|pod| pod.uid.as_str()).collect();
        memory.peers.retain(|uid, _| there.contains(uid.as_str()));
        let stale = |pod: &&PodFacts| {
            !memory
                .peers
                .get(&pod.uid)
                .is_some_and(|known| known.is_fresh(pod, max_age))
        };
        let token = memory.token.clone().unwrap_or_default();
        let asked = serving.iter().filter(stale).map(|pod| async {
            let (known, error) = self.peers.ask(pod, &token).await;
            (pod.uid.clone(), known, error)
        });
        let mut asked: FuturesUnordered<_> = asked.collect();
        let mut answers = Vec::new();
        while let Some(answer) = asked.next().await {
            answers.push(answer);
        }
        drop(asked);
        for (uid, known, error) in answers {
            if let Some(error) = error {
                tracing::info!(deployment = %key, %error, "a process was asked in vain");
                if error.is_token() {
                    memory.token = None;
                }
            }
            memory.peers.insert(uid, known);
        }
    }

    /// Reads the admin token, once it is there.
    async fn read_token(&self, key: &Key, view: &View, memory: &mut Memory) -> Result<(), PassError> {
        let name = format!("{}-admin-token", key.name);
        let there = child(view, Kind::Secret, &name, &memory.uid).is_some();
        if memory.token.is_some() || !there {
            return Ok(());
        }
        let secret = self.writer.read(Kind::Secret, &key.namespace, &name).await?;
        let secret = secret.and_then(|secret| Secret::deserialize(secret).ok());
        let bytes = secret.and_then(|secret| secret.data?.remove(TOKEN_KEY));
        memory.token = bytes
            .and_then(|bytes| String::from_utf8(bytes.0).ok())
            .map(|text| text.trim().to_owned());
        Ok(())
    }

    /// Whether the objects of others that were in the way are still there.
    async fn look_at_conflicts(&self, key: &Key, memory: &mut Memory) -> Result<(), PassError> {
        if memory.conflicts.is_empty() || memory.looked.is_some_and(|at| at.elapsed() < CONFLICTS) {
            return Ok(());
        }
        memory.looked = Some(Instant::now());
        for (kind, name) in memory.conflicts.clone() {
            let found = self.writer.read(kind, &key.namespace, &name).await?;
            if found.is_none_or(|object| is_ours(&object, &memory.uid)) {
                memory.conflicts.remove(&(kind, name));
            }
        }
        Ok(())
    }
}

/// A child of this owner.
fn child(view: &View, kind: Kind, name: &str, uid: &str) -> Option<Value> {
    let object = view.children.get(&(kind, name.to_owned()))?.object();
    is_ours(&object, uid).then_some(object)
}

/// Whether an object belongs to the owner of this uid.
pub fn is_ours(object: &Value, uid: &str) -> bool {
    let owners = object["metadata"]["ownerReferences"].as_array();
    owners.is_some_and(|owners| owners.iter().any(|owner| owner["uid"] == uid))
}

fn stored(key: &Key, view: &View, uid: &str) -> (Vec<Stored>, i64) {
    let of_kind = view
        .children
        .iter()
        .filter(|((kind, _), _)| *kind == Kind::ControllerRevision);
    let mut numbered: BTreeMap<(i64, String), Stored> = BTreeMap::new();
    let mut last = 0;
    for ((_, name), one) in of_kind {
        let object = Child::object(one);
        if !is_ours(&object, uid) {
            continue;
        }
        match Stored::read(&object) {
            Ok((number, stored)) => {
                last = last.max(number);
                numbered.insert((number, name.clone()), stored);
            }
            Err(error) => {
                tracing::warn!(deployment = %key, name, %error, "a stored revision cannot be read; it counts as none");
            }
        }
    }
    (numbered.into_values().collect(), last)
}
