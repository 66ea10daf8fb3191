//! Carries a plan out, in the order of its fields. Where one of them cannot be carried out, those after it wait.

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use serde_json::Value;
use tandem_crds::{PDDeploymentSpec, PDDeploymentStatus, Role};
use tandem_plan::{Plan, Revision, Traffic, WorkloadIntent};

use super::observe::{Observed, is_ours};
use super::{Memory, PassError, Reconciler, probe};
use crate::apply::Need;
use crate::cluster::cache::{Key, View};
use crate::cluster::kinds::Kind;
use crate::observe::pod::PodFacts;
use crate::observe::revision::{self, Stored};
use crate::peers::{Facts, Known, PeerError, knobs, router::Order};
use crate::render::meta::Owner;
use crate::render::{around, engine, guard, json, knobs as rendered, network, router};

/// A plan under way.
pub struct Carry<'a> {
    pub reconciler: &'a Reconciler,
    pub key: &'a Key,
    pub owner: Owner<'a>,
    pub spec: &'a PDDeploymentSpec,
    pub view: &'a View,
    pub observed: &'a Observed,
    pub memory: &'a mut Memory,
    pub deleting: bool,
    /// Something was written, or told and acknowledged.
    pub changed: bool,
}

impl Carry<'_> {
    pub async fn out(&mut self, plan: &Plan) -> Result<(), PassError> {
        let touches = !self.deleting && !self.spec.rollout.paused && self.observed.world.conflicts.is_empty();
        let mut stored = self.observed.stored.clone();
        if let Some(revision) = &plan.store {
            stored.push(self.store(revision).await?);
        }
        if touches {
            for child in around(&self.owner, self.spec, &self.reconciler.reach) {
                self.apply(&child).await?;
            }
            self.token().await?;
        }
        if touches || self.deleting {
            self.order(plan.traffic).await?;
        }
        if touches {
            for (role, id) in &plan.knobs {
                if let Some(of) = stored.iter().find(|stored| stored.revision.id == *id) {
                    self.knobs(*role, &of.revision).await?;
                }
            }
            self.workloads(&plan.workloads, &stored).await?;
            self.probe(plan);
            if self.is_written(plan) {
                for id in &plan.discard {
                    self.delete(Kind::ControllerRevision, &revision::name(&self.owner, id))
                        .await?;
                }
                self.sweep(plan, &stored).await?;
            }
        }
        Ok(())
    }

    /// Whether it is written down which revisions are needed. What the others leave behind goes only then: an operator that
    /// is killed in between would make it anew, for the change that is not over yet by what was written.
    fn is_written(&self, plan: &Plan) -> bool {
        let old = self.view.object.as_ref().and_then(|object| object.status.as_ref());
        let under_way = |status: &PDDeploymentStatus| status.rollout.as_ref().map(|rollout| rollout.target.clone());
        old.is_some_and(|old| old.revisions == plan.status.revisions && under_way(old) == under_way(&plan.status))
    }

    /// Applies one child, and takes down whose it is where it is somebody else's.
    async fn apply(&mut self, wanted: &Value) -> Result<(), PassError> {
        let name = wanted["metadata"]["name"].as_str().unwrap_or_default();
        let kind = Kind::of(wanted);
        let live = kind.and_then(|kind| self.view.children.get(&(kind, name.to_owned())));
        match self.reconciler.writer.apply(self.key, wanted, live).await? {
            Need::Nothing => {}
            Need::Foreign => self.foreign(kind, name),
            Need::Create | Need::Update | Need::Repair => self.changed = true,
        }
        Ok(())
    }

    fn foreign(&mut self, kind: Option<Kind>, name: &str) {
        // The next pass tells of it, and writes nothing else until it is gone.
        if let Some(kind) = kind {
            self.changed |= self.memory.conflicts.insert((kind, name.to_owned()));
        }
    }

    /// Removes a child that is there and ours.
    async fn delete(&mut self, kind: Kind, name: &str) -> Result<(), PassError> {
        let Some(child) = self.view.children.get(&(kind, name.to_owned())) else {
            return Ok(());
        };
        if is_ours(&child.object(), self.owner.uid) {
            self.reconciler.writer.delete(self.key, kind, name, &child.uid).await?;
            self.changed = true;
        }
        Ok(())
    }

    async fn store(&mut self, revision: &Revision) -> Result<Stored, PassError> {
        let stored = Stored::render(&self.owner, revision, &self.observed.stored);
        // The same content has the same name: one that is there already is this one.
        let object = json(stored.object(&self.owner, self.observed.last_number + 1));
        self.create(&object).await?;
        Ok(stored)
    }

    /// The admin token: made once and never again.
    async fn token(&mut self) -> Result<(), PassError> {
        let name = guard::token_name(&self.owner);
        if let Some(secret) = self.view.children.get(&(Kind::Secret, name.clone())) {
            if !is_ours(&secret.object(), self.owner.uid) {
                self.foreign(Some(Kind::Secret), &name);
            }
            return Ok(());
        }
        let [high, low] = rand::random::<[u128; 2]>();
        let secret = json(guard::token(&self.owner, &format!("{high:032x}{low:032x}")));
        self.create(&secret).await
    }

    /// Makes a child that is never changed, and takes down whose it is where one of its name is there already.
    async fn create(&mut self, wanted: &Value) -> Result<(), PassError> {
        let writer = &self.reconciler.writer;
        if writer.create(self.key, wanted).await?.is_some() {
            self.changed = true;
            return Ok(());
        }
        let name = wanted["metadata"]["name"].as_str().unwrap_or_default();
        let Some(kind) = Kind::of(wanted) else { return Ok(()) };
        let found = writer.read(kind, &self.key.namespace, name).await?;
        if found.is_some_and(|found| !is_ours(&found, self.owner.uid)) {
            self.foreign(Some(kind), name);
        }
        Ok(())
    }

    /// The order to the routers: first where one that starts finds it, then to each that runs.
    async fn order(&mut self, traffic: Traffic) -> Result<(), PassError> {
        let map = json(rendered::traffic(&self.owner, traffic));
        let name = rendered::traffic_name(&self.owner);
        // Nothing is made for a deployment that is being deleted.
        if !self.deleting || self.view.children.contains_key(&(Kind::ConfigMap, name)) {
            self.apply(&map).await?;
        }
        for pod in of_role(self.observed, Role::Router) {
            let Some(Facts::Router(info)) = self.said(pod) else {
                continue;
            };
            if info.traffic.order(info.at, Some(traffic)) == traffic {
                continue;
            }
            let order = Order::of(traffic, Timestamp::now());
            let token = self.token_text();
            let told = self.reconciler.peers.set_traffic(pod, &info, &token, &order).await;
            let done = |facts: &Facts| matches!(facts, Facts::Router(info) if info.traffic.order(info.at, Some(traffic)) == traffic);
            self.heard(pod, told, done);
        }
        Ok(())
    }

    /// The knobs of a role: first where one that starts finds them, then to each process that runs.
    async fn knobs(&mut self, role: Role, revision: &Revision) -> Result<(), PassError> {
        self.apply(&json(rendered::config_map(&self.owner, &revision.spec, role)))
            .await?;
        let wanted = std::slice::from_ref(revision);
        for pod in of_role(self.observed, role) {
            let Some(facts) = self.said(pod) else { continue };
            if knobs::hash(&facts, role, wanted).is_some() {
                continue;
            }
            let (peers, token) = (&self.reconciler.peers, self.token_text());
            let told = match &facts {
                Facts::Engine(info) => {
                    let knobs = knobs::engine(&revision.spec, role);
                    peers.set_knobs(pod, info, &token, knobs).await
                }
                Facts::Router(info) => {
                    let knobs = knobs::router(&revision.spec);
                    peers.set_router_knobs(pod, info, &token, &knobs).await
                }
            };
            self.heard(pod, told, |facts| knobs::hash(facts, role, wanted).is_some());
        }
        Ok(())
    }

    fn said(&self, pod: &PodFacts) -> Option<Facts> {
        self.memory.peers.get(&pod.uid)?.facts.clone()
    }

    fn token_text(&self) -> String {
        self.memory.token.clone().unwrap_or_default()
    }

    /// Takes down what a process answered. One that does not do as told is told again by a later pass; the planner waits for
    /// it as long as the step may take.
    fn heard(&mut self, pod: &PodFacts, told: Result<Known, PeerError>, done: impl Fn(&Facts) -> bool) {
        match told {
            Ok(known) => {
                self.changed |= known.facts.as_ref().is_some_and(done);
                self.memory.peers.insert(pod.uid.clone(), known);
            }
            Err(error) => {
                tracing::warn!(deployment = %self.key, %error, "a process was told in vain");
                if error.is_token() {
                    self.memory.token = None;
                }
            }
        }
    }

    async fn workloads(&mut self, intents: &[WorkloadIntent], stored: &[Stored]) -> Result<(), PassError> {
        for service in self.services(intents, stored) {
            self.apply(&service).await?;
        }
        for intent in intents {
            let of = intent
                .template
                .as_ref()
                .and_then(|id| stored.iter().find(|stored| stored.revision.id == *id));
            match of {
                Some(of) => {
                    let name = self.workload_name(intent);
                    // The watch may be behind: of a deployment that is being deleted nobody starts pods.
                    if !self.view.children.contains_key(&(Kind::Deployment, name)) && self.is_deleted().await? {
                        return Ok(());
                    }
                    let deployment = self.deployment(intent, of)?;
                    self.apply(&deployment).await?;
                }
                None => self.scale(intent).await?,
            }
        }
        Ok(())
    }

    /// Whether the deployment is being deleted or gone by now.
    async fn is_deleted(&self) -> Result<bool, PassError> {
        Ok(self.reconciler.writer.is_deleted(self.key, self.owner.uid).await?)
    }

    /// A workload of which nothing is stored any more: only the number of its pods is ours to say.
    async fn scale(&mut self, intent: &WorkloadIntent) -> Result<(), PassError> {
        let name = self.workload_name(intent);
        let child = self.view.children.get(&(Kind::Deployment, name.clone()));
        let replicas = child.and_then(|child| child.object()["spec"]["replicas"].as_i64());
        if replicas.is_some_and(|replicas| replicas != i64::from(intent.replicas)) {
            self.reconciler.writer.scale(self.key, &name, intent.replicas).await?;
            self.changed = true;
        }
        Ok(())
    }

    fn workload_name(&self, intent: &WorkloadIntent) -> String {
        match intent.role {
            Role::Prefill | Role::Decode => engine::name(&self.owner, &intent.revision),
            Role::Router => self.owner.child(Role::Router.field()),
        }
    }

    /// A workload with the template that was stored, as it was stored.
    fn deployment(&self, intent: &WorkloadIntent, of: &Stored) -> Result<Value, PassError> {
        let Stored { revision, .. } = of;
        let empty = PodTemplateSpec::default();
        let mut deployment = match intent.role {
            Role::Prefill | Role::Decode => {
                let named = engine::Revision {
                    role: intent.role,
                    hash: &intent.revision,
                    contract: &revision.contract,
                    image: revision.role(intent.role).map_or("", |role| &role.image),
                };
                json(engine::deployment(
                    &self.owner,
                    &revision.spec,
                    named,
                    empty,
                    intent.replicas,
                ))
            }
            Role::Router => json(router::deployment(&self.owner, &revision.spec, empty, intent.replicas)),
        };
        let template = of.template(intent.role).map_err(|error| PassError::Template {
            id: revision.id.clone(),
            role: intent.role.field(),
            reason: error.to_string(),
        })?;
        deployment["spec"]["template"] = template;
        Ok(deployment)
    }

    /// The Services of the contracts of which there are pods, or will be.
    fn services(&self, intents: &[WorkloadIntent], stored: &[Stored]) -> Vec<Value> {
        let contract = |intent: &WorkloadIntent| -> Option<String> {
            let of = intent
                .template
                .as_ref()
                .and_then(|id| stored.iter().find(|stored| stored.revision.id == *id));
            if let Some(of) = of {
                return Some(of.revision.contract.clone());
            }
            let is_it = |one: &&tandem_plan::Workload| one.role == intent.role && one.revision == intent.revision;
            let workload = self.observed.world.workloads.iter().find(is_it)?;
            Some(workload.contract.clone())
        };
        let has_pods = |intent: &WorkloadIntent| {
            let of_it = |pod: &tandem_plan::Pod| pod.role == intent.role && pod.revision == intent.revision;
            intent.replicas > 0 || self.observed.world.pods.iter().any(of_it)
        };
        let engines = intents
            .iter()
            .filter(|intent| intent.role != Role::Router && has_pods(intent));
        let pairs: BTreeSet<(Role, String)> = engines
            .filter_map(|intent| Some((intent.role, contract(intent)?)))
            .filter(|(_, contract)| !contract.is_empty())
            .collect();
        pairs
            .iter()
            .map(|(role, contract)| json(network::engines(&self.owner, *role, contract)))
            .collect()
    }

    fn probe(&mut self, plan: &Plan) {
        if let Some(order) = &plan.probe {
            probe::begin(self.reconciler, self.key, self.memory, self.observed, order);
        }
    }

    /// Removes what is ours and what the plan does not ask for.
    async fn sweep(&mut self, plan: &Plan, stored: &[Stored]) -> Result<(), PassError> {
        let mut keep: BTreeSet<(Kind, String)> = BTreeSet::new();
        let services = self.services(&plan.workloads, stored);
        let around = around(&self.owner, self.spec, &self.reconciler.reach);
        for object in around.iter().chain(&services) {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            keep.extend(Kind::of(object).map(|kind| (kind, name.to_owned())));
        }
        keep.extend(Role::ALL.map(|role| (Kind::ConfigMap, rendered::name(&self.owner, role))));
        keep.insert((Kind::ConfigMap, rendered::traffic_name(&self.owner)));
        keep.insert((Kind::Secret, guard::token_name(&self.owner)));
        keep.extend(
            plan.workloads
                .iter()
                .map(|intent| (Kind::Deployment, self.workload_name(intent))),
        );
        let spare: Vec<(Kind, String)> = self
            .view
            .children
            .keys()
            .filter(|at| at.0 != Kind::ControllerRevision && !keep.contains(at))
            .cloned()
            .collect();
        for (kind, name) in spare {
            self.delete(kind, &name).await?;
        }
        Ok(())
    }
}

fn of_role(observed: &Observed, role: Role) -> impl Iterator<Item = &PodFacts> {
    observed.serving.iter().filter(move |pod| pod.role == Some(role))
}
