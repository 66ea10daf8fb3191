//! Which child is of which revision, and what it says of itself: the planner's world.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::future::join_all;
use tandem_crds::Role;
use tandem_operator::peers::{Facts, PeerError, Target, engine, knobs, router};
use tandem_plan::{Pod, Probe, Revision, Traffic, Trouble, Workload, World};
use tokio::time::{Instant, timeout};

use super::slots::Slot;
use super::state::ProcessState;

/// One question to a process.
const DEADLINE: Duration = Duration::from_secs(3);

/// A process of one revision, from its start until it is stopped; it may die and start again meanwhile.
#[derive(Debug)]
pub struct Kid {
    /// Unique in this run.
    pub uid: u64,
    /// Its name and its addresses.
    pub slot: Slot,
    /// The role's revision that it is of.
    pub revision: String,
    /// The stored revision that it was made from.
    pub template: String,
    /// The contract of that.
    pub contract: String,
    pub gpus: i32,
    /// Its supervisor's number; none: it could not be started.
    pub index: Option<usize>,
    /// What others are told of it.
    pub shown: ProcessState,
    pub stopping: bool,
    /// Why it will never serve.
    pub trouble: Option<Trouble>,
    /// What it said last, and when it was asked.
    pub facts: Option<Facts>,
    pub asked: Option<Instant>,
}

/// What runs, and what was ordered: all that the planner is told.
#[derive(Debug, Default)]
pub struct Kids {
    pub all: Vec<Kid>,
    /// What should run, and the stored revision that has its template.
    pub workloads: Vec<(Workload, String)>,
    /// The revision whose knobs each role starts with.
    pub knobs: BTreeMap<Role, Revision>,
    /// What the router was told.
    pub order: Option<Traffic>,
    /// What the last probe found.
    pub probe: Option<Probe>,
    pub born: u64,
}

impl Kids {
    /// As the planner sees it.
    pub fn world(&self, revisions: &[Revision]) -> World {
        World {
            workloads: self.workloads.iter().map(|(workload, _)| workload.clone()).collect(),
            pods: self.all.iter().map(|kid| self.pod(kid, revisions)).collect(),
            unrouted: self.unrouted(),
            knobs: self
                .knobs
                .iter()
                .map(|(role, revision)| (*role, revision.knobs(*role).to_owned()))
                .collect(),
            order: self.order,
            probe: self.probe.clone(),
            conflicts: Vec::new(),
        }
    }

    /// The engines that a router of their contract does not know; one that was asked in vain knows none.
    fn unrouted(&self) -> BTreeSet<String> {
        let serving = self.all.iter().filter(|kid| kid.shown.ready && !kid.stopping);
        let (routers, engines): (Vec<&Kid>, Vec<&Kid>) = serving.partition(|kid| kid.role() == Role::Router);
        let knows = |router: &Kid, engine: &Kid| match &router.facts {
            Some(Facts::Router(info)) => {
                let all = info.endpoints.as_ref();
                all.is_none_or(|all| all.knows_port(&engine.slot.listen.to_string()))
            }
            _ => false,
        };
        let is_unknown = |engine: &&Kid| {
            let mut of_contract = routers.iter().filter(|router| router.contract == engine.contract);
            of_contract.any(|router| !knows(router, engine))
        };
        let unknown = engines.into_iter().filter(is_unknown);
        unknown.map(|engine| engine.uid.to_string()).collect()
    }

    fn pod(&self, kid: &Kid, revisions: &[Revision]) -> Pod {
        let mut pod = Pod {
            gpus: kid.gpus,
            ready: kid.shown.ready,
            terminating: kid.stopping,
            trouble: kid.trouble.clone(),
            ..Pod::unheard(
                kid.uid.to_string(),
                kid.slot.name.clone(),
                kid.role(),
                kid.revision.clone(),
            )
        };
        if let Some(said) = &kid.facts {
            said.tell(&mut pod, self.order, revisions);
        }
        pod
    }

    /// What a router is told. One on its way out may hold requests that were made for the model of another contract: no engine
    /// may get them any more.
    pub fn traffic(&self, kid: &Kid, traffic: Traffic) -> Traffic {
        let serves = |workload: &Workload| workload.role == Role::Decode && workload.replicas > 0;
        let mut decodes = self.workloads.iter().filter(|(workload, _)| serves(workload));
        let other = decodes.any(|(workload, _)| workload.contract != kid.contract);
        if kid.stopping && other {
            Traffic::Reject
        } else {
            traffic
        }
    }

    pub fn of_index(&mut self, index: usize) -> Option<&mut Kid> {
        self.all.iter_mut().find(|kid| kid.index == Some(index))
    }

    pub fn remove(&mut self, uid: u64) {
        self.all.retain(|kid| kid.uid != uid);
    }

    /// Asks those that answer and were not asked of late, all at once.
    pub async fn ask(&mut self, http: &reqwest::Client, token: &str, max_age: Duration) {
        let is_due = |kid: &&mut Kid| kid.asked.is_none_or(|asked| asked.elapsed() >= max_age);
        let due = self.all.iter_mut().filter(|kid| kid.answers()).filter(is_due);
        let asked = due.map(async |kid| {
            let to = kid.target();
            let asked = async {
                match kid.role() {
                    Role::Router => router::info(http, &to, token).await.map(Facts::Router),
                    Role::Prefill | Role::Decode => engine::info(&to).await.map(Facts::Engine),
                }
            };
            kid.facts = within(asked).await.and_then(Result::ok);
            kid.asked = Some(Instant::now());
        });
        join_all(asked).await;
    }

    /// What others are told of a place: of the process that serves from it, or will.
    pub fn shown(&self, slot: &Slot) -> ProcessState {
        let here = || self.all.iter().filter(|kid| kid.slot.name == slot.name);
        let kid = here().find(|kid| !kid.stopping).or(here().next_back());
        kid.map_or_else(|| ProcessState::not_started(slot), |kid| kid.shown.clone())
    }

    /// KV of a token, as an engine says.
    pub fn kv_bytes_per_token(&self) -> u64 {
        let said = self.all.iter().filter_map(|kid| match &kid.facts {
            Some(Facts::Engine(info)) => Some(info.kv_bytes_per_token),
            _ => None,
        });
        said.max().unwrap_or(0)
    }
}

impl Kid {
    pub fn role(&self) -> Role {
        self.slot.role.into()
    }

    /// Whether it can be asked and told. A router on its way out still has requests that wait for an order.
    pub fn answers(&self) -> bool {
        self.shown.ready && (!self.stopping || self.role() == Role::Router)
    }

    /// Where it is asked and told.
    pub fn target(&self) -> Target {
        Target {
            name: self.slot.name.clone(),
            control: self.slot.listen.to_string(),
            admin: self.slot.admin.to_string(),
        }
    }

    /// Tells a process its knobs. Whether it has them now.
    pub async fn set_knobs(&mut self, http: &reqwest::Client, token: &str, of: &Revision) -> bool {
        let (to, role) = (self.target(), self.role());
        let told: Option<Result<Facts, PeerError>> = match self.facts.clone() {
            Some(Facts::Engine(info)) => {
                let told = engine::set_knobs(&to, &info, token, knobs::engine(&of.spec, role));
                within(told).await.map(|told| told.map(Facts::Engine))
            }
            Some(Facts::Router(info)) => {
                let wanted = knobs::router(&of.spec);
                let told = router::set_knobs(http, &to, token, &wanted);
                let with = |knobs| Facts::Router(router::Info { knobs, ..info });
                within(told).await.map(|told| told.map(with))
            }
            None => None,
        };
        self.heard(told);
        self.has_knobs(of)
    }

    /// Whether it says that it runs with these knobs.
    pub fn has_knobs(&self, of: &Revision) -> bool {
        let has = |facts| knobs::hash(facts, self.role(), std::slice::from_ref(of)).is_some();
        self.facts.as_ref().is_some_and(has)
    }

    /// Tells a router what to do with new requests. Whether it has acknowledged it.
    pub async fn set_traffic(&mut self, http: &reqwest::Client, token: &str, traffic: Traffic) -> bool {
        let Some(Facts::Router(info)) = self.facts.clone() else {
            return false;
        };
        let at = jiff::Timestamp::now();
        let order = router::Order::of(traffic, at);
        let to = self.target();
        let told = within(router::set_traffic(http, &to, token, &order)).await;
        let with = |traffic| Facts::Router(router::Info { traffic, at, ..info });
        self.heard(told.map(|told| told.map(with)));
        self.obeys(traffic)
    }

    /// Whether a router says that it does so.
    pub fn obeys(&self, traffic: Traffic) -> bool {
        match &self.facts {
            Some(Facts::Router(info)) => info.traffic.order(info.at, Some(traffic)) == traffic,
            _ => false,
        }
    }

    /// What was not answered is asked for again.
    fn heard(&mut self, told: Option<Result<Facts, PeerError>>) {
        match told {
            Some(Ok(facts)) => {
                self.facts = Some(facts);
                self.asked = Some(Instant::now());
            }
            Some(Err(_)) | None => self.asked = None,
        }
    }
}

async fn within<T>(asked: impl Future<Output = T>) -> Option<T> {
    timeout(DEADLINE, asked).await.ok()
}
