//! Nodes that no machine stands behind: a script says when each pod becomes ready, crashes, and is gone.
//!
//! All else is real: the scheduler places the pods, the controllers make and count them. Only what a kubelet would write into a
//! pod's status, and the last step of its deletion, come from here.

mod status;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::net::Ipv4Addr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::json;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::PATIENCE;
use super::api::{Api, Client, Patch, Refused};
use super::network::Network;

/// Every node's lease is renewed this often: a tenth of what makes it lost.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// The first pod's address, 10.244.1.0; those below are nobody's.
const FIRST_ADDRESS: u32 = u32::from_be_bytes([10, 244, 1, 0]);

/// What becomes of a pod once it is bound to a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Life {
    /// How it begins.
    pub start: Start,
    /// Once ready, it crashes after so long and stays down.
    pub crash_after: Option<Duration>,
    /// How long it takes to end once it is to be deleted.
    pub terminating: Duration,
}

/// How a pod begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Ready after so long.
    Ready(Duration),
    /// Its image is never found: it stays Pending.
    ImageMissing,
    /// It ends with an error each time that it is started.
    CrashLoop,
}

impl Default for Start {
    fn default() -> Self {
        Self::Ready(Duration::ZERO)
    }
}

type Script = Arc<dyn Fn(&Pod) -> Life + Send + Sync>;

/// All nodes of the cluster, and their pods.
pub struct Kubelet {
    runtime: Handle,
    proxy: String,
    world: Arc<World>,
}

struct World {
    client: Client,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By name: is its kubelet there?
    nodes: HashMap<String, bool>,
    /// By namespace; where there is none, pods become ready at once.
    scripts: HashMap<String, Script>,
    /// By uid.
    pods: HashMap<String, Tracked>,
    addresses: u32,
}

struct Tracked {
    pod: Pod,
    address: Ipv4Addr,
    doing: Option<(Phase, AbortHandle)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Living,
    Leaving,
}

impl fmt::Debug for Kubelet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.world.lock();
        f.debug_struct("Kubelet")
            .field("nodes", &state.nodes)
            .field("pods", &state.pods.len())
            .finish_non_exhaustive()
    }
}

impl Kubelet {
    /// Watches all pods from a thread of its own, for the rest of the process.
    pub fn start(network: &Network, proxy: &str) -> Self {
        network.enter(|| {
            // Its threads are in the namespace, and it is never dropped: neither are its nodes.
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .thread_name("scripted-kubelet")
                .enable_all()
                .build()
                .expect("a runtime");
            let world = Arc::new(World {
                client: Client::new(proxy.to_owned()),
                state: Mutex::default(),
            });
            runtime.spawn(watch(Arc::clone(&world)));
            runtime.spawn(heartbeats(Arc::clone(&world)));
            let handle = runtime.handle().clone();
            std::mem::forget(runtime);
            Self {
                runtime: handle,
                proxy: proxy.to_owned(),
                world,
            }
        })
    }

    /// Registers a node, and waits until pods can be scheduled to it.
    pub async fn node(&self, name: &str, gpus: u32, labels: &[(&str, &str)]) {
        // Of the caller's runtime: a connection ends with the runtime that made it.
        let api: Api<Node> = Api::all(&Client::new(self.proxy.clone()));
        let made = api.create(&status::node(name, gpus, labels)).await;
        made.expect("a node");
        self.world.lock().nodes.insert(name.to_owned(), true);
        crate::eventually("the node's taint for new nodes goes", PATIENCE, async || {
            let node = api.get(name).await.map_err(|refused| refused.to_string())?;
            match node.spec.and_then(|spec| spec.taints) {
                Some(taints) if !taints.is_empty() => Err(format!("{taints:?}")),
                _ => Ok(()),
            }
        })
        .await;
    }

    /// The node's kubelet is gone: no heartbeat, and its pods stay as they are.
    pub fn lose(&self, node: &str) {
        self.world.lock().nodes.insert(node.to_owned(), false);
    }

    /// It is back, and says that the node is ready.
    pub async fn restore(&self, node: &str) {
        {
            let _inside = self.runtime.enter();
            let mut state = self.world.lock();
            state.nodes.insert(node.to_owned(), true);
            let pods: Vec<Pod> = state.pods.values().map(|tracked| tracked.pod.clone()).collect();
            for pod in pods {
                self.world.see(&mut state, pod);
            }
        }
        let api: Api<Node> = Api::all(&Client::new(self.proxy.clone()));
        let told = api.patch_status(node, Patch::Strategic, &status::ready()).await;
        told.expect("the node's status");
    }

    /// Says what becomes of the namespace's pods from now on; those that live already go on as they began.
    pub fn script(&self, namespace: &str, script: impl Fn(&Pod) -> Life + Send + Sync + 'static) {
        self.world.lock().scripts.insert(namespace.to_owned(), Arc::new(script));
    }

    /// A ready pod is not ready any more: it has crashed, and stays down.
    pub async fn crash(&self, pod: &Pod) {
        let world = Arc::clone(&self.world);
        let pod = pod.clone();
        let task = self.runtime.spawn(async move {
            let address = world.lock().pods.get(&uid(&pod)).map(|tracked| tracked.address);
            let address = address.expect("a pod that has been seen");
            world.patch(&pod, &status::crashed(&pod, address)).await;
        });
        task.await.expect("the pod's status is written");
    }
}

impl World {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Acts on a pod as it is now.
    fn see(self: &Arc<Self>, state: &mut State, pod: Pod) {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
        let Some(&there) = node.and_then(|node| state.nodes.get(node)) else {
            return;
        };
        let addresses = &mut state.addresses;
        let tracked = state.pods.entry(uid(&pod)).or_insert_with(|| {
            *addresses += 1;
            Tracked {
                pod: pod.clone(),
                address: Ipv4Addr::from(FIRST_ADDRESS + *addresses),
                doing: None,
            }
        });
        tracked.pod = pod;
        let phase = if tracked.pod.metadata.deletion_timestamp.is_some() {
            Phase::Leaving
        } else {
            Phase::Living
        };
        if !there {
            if let Some((_, task)) = tracked.doing.take() {
                task.abort();
            }
            return;
        }
        if tracked.doing.as_ref().is_some_and(|(doing, _)| *doing == phase) {
            return;
        }
        if let Some((_, task)) = tracked.doing.take() {
            task.abort();
        }
        let namespace = tracked.pod.metadata.namespace.clone().unwrap_or_default();
        let life = state
            .scripts
            .get(&namespace)
            .map_or_else(Life::default, |script| script(&tracked.pod));
        let (world, pod, address) = (Arc::clone(self), tracked.pod.clone(), tracked.address);
        let task = match phase {
            Phase::Living => tokio::spawn(async move { world.live(&pod, address, life).await }),
            Phase::Leaving => tokio::spawn(async move { world.leave(&pod, life).await }),
        };
        tracked.doing = Some((phase, task.abort_handle()));
    }

    async fn live(&self, pod: &Pod, address: Ipv4Addr, life: Life) {
        match life.start {
            Start::ImageMissing => return self.patch(pod, &status::image_missing(pod)).await,
            Start::CrashLoop => return self.patch(pod, &status::crashed(pod, address)).await,
            Start::Ready(after) => {
                self.patch(pod, &status::running(pod, address, after.is_zero())).await;
                if !after.is_zero() {
                    tokio::time::sleep(after).await;
                    self.patch(pod, &status::running(pod, address, true)).await;
                }
            }
        }
        if let Some(after) = life.crash_after {
            tokio::time::sleep(after).await;
            self.patch(pod, &status::crashed(pod, address)).await;
        }
    }

    async fn leave(&self, pod: &Pod, life: Life) {
        tokio::time::sleep(life.terminating).await;
        let options = json!({"gracePeriodSeconds": 0, "preconditions": {"uid": pod.metadata.uid}});
        if let Err(refused) = self.pods(pod).delete(name(pod), &options).await {
            gone_or(&refused, "the end of a pod");
        }
    }

    async fn patch(&self, pod: &Pod, status: &serde_json::Value) {
        if let Err(refused) = self.pods(pod).patch_status(name(pod), Patch::Strategic, status).await {
            gone_or(&refused, "a pod's status");
        }
    }

    fn pods(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(&self.client, pod.metadata.namespace.as_deref().unwrap_or_default())
    }

    /// Renews a node's lease. One that is refused is made up for by the next.
    async fn beat(&self, node: &str) {
        let api: Api<Lease> = Api::namespaced(&self.client, "kube-node-lease");
        let _ = api
            .patch(node, Patch::Apply("scripted-kubelet"), &status::lease(node))
            .await;
    }
}

/// A pod that was deleted meanwhile needs no status; anything else that is refused is a fault of the test.
fn gone_or(refused: &Refused, what: &str) {
    if !matches!(refused.code, 404 | 409) {
        eprintln!("scripted kubelet: {what}: {refused}");
    }
}

fn uid(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap_or_default()
}

fn name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

/// Lists all pods that are bound to a node and follows them; lists again whenever the API server ends that.
async fn watch(world: Arc<World>) {
    const BOUND: &str = "fieldSelector=spec.nodeName!=";
    let api: Api<Pod> = Api::all(&world.client);
    loop {
        let Ok((pods, version)) = api.snapshot(BOUND).await else {
            tokio::time::sleep(Duration::from_millis(200)).await;
            continue;
        };
        let there: HashSet<String> = pods.iter().map(uid).collect();
        {
            let mut state = world.lock();
            state.pods.retain(|uid, _| there.contains(uid));
            for pod in pods {
                world.see(&mut state, pod);
            }
        }
        let Ok(events) = api.watch(BOUND, &version).await else {
            continue;
        };
        let mut events = pin!(events);
        while let Some((kind, pod)) = events.next().await {
            let mut state = world.lock();
            if kind == "DELETED" {
                if let Some((_, task)) = state.pods.remove(&uid(&pod)).and_then(|tracked| tracked.doing) {
                    task.abort();
                }
            } else {
                world.see(&mut state, pod);
            }
        }
    }
}

async fn heartbeats(world: Arc<World>) {
    let mut tick = tokio::time::interval(HEARTBEAT);
    loop {
        tick.tick().await;
        let nodes: BTreeMap<String, bool> = world.lock().nodes.clone().into_iter().collect();
        let beats = nodes
            .iter()
            .filter(|(_, there)| **there)
            .map(|(node, _)| world.beat(node));
        futures::future::join_all(beats).await;
    }
}
