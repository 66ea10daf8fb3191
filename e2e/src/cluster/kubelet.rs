//! Nodes that no machine stands behind: a script says when each pod's process starts, crashes, and is gone.
//!
//! All else is real: the scheduler places the pods, the controllers make and count them. What a kubelet does comes from here: it
//! starts a container's process on the pod's own address, with the arguments and files of its template, asks it whether it is
//! ready, starts it again when it ends, and writes the pod's status. The process is the shipped binary, or a
//! [`Peer`](super::peer) that speaks its contracts.
//!
//! | module | holds |
//! | --- | --- |
//! | [`container`] | a container's arguments and files |
//! | [`process`] | its process |
//! | [`status`] | what is written into a node's and a pod's status |

mod container;
mod process;
mod status;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Container, Node, Pod};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::{Metadata, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::PATIENCE;
use super::api::{Api, Client, Patch, Refused};
use super::network::Network;
use super::peer::{self, Peer};
use super::servers::Reaper;
use process::Process;

/// Every node's lease is renewed this often: a tenth of what makes it lost.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// The first pod's address, 10.244.1.0; those below are nobody's.
const FIRST_ADDRESS: u32 = u32::from_be_bytes([10, 244, 1, 0]);
/// Until a process is ready it is asked this often: a test need not wait for the period of its probe.
const STARTING: Duration = Duration::from_millis(50);
/// What a container lacks, a config map for example, is looked for this often.
const LACKING: Duration = Duration::from_millis(200);

/// What becomes of a pod once it is bound to a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Life {
    /// How it begins.
    pub start: Start,
    /// What runs in it, where its container names one of our binaries.
    pub runs: Runs,
    /// Once ready, it crashes after so long and stays down.
    pub crash_after: Option<Duration>,
    /// How long it takes to end once it is to be deleted.
    pub terminating: Duration,
}

/// How a pod begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Its process starts after so long; a pod without one is ready then.
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

/// What runs in a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runs {
    /// A process that speaks the contracts and computes nothing.
    Peer(peer::Script),
    /// The shipped binary.
    Real,
}

impl Default for Runs {
    fn default() -> Self {
        Self::Peer(peer::Script::default())
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
    /// Its own, which leads to the API server.
    kubeconfig: Value,
    http: reqwest::Client,
    dir: PathBuf,
    reaper: Arc<Reaper>,
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
    /// By uid: what routers watch.
    slices: HashMap<String, EndpointSlice>,
    addresses: u32,
}

struct Tracked {
    pod: Pod,
    address: Ipv4Addr,
    task: Option<Task>,
}

/// What the kubelet does for a pod.
struct Task {
    phase: watch::Sender<Phase>,
    kill: Arc<Notify>,
    handle: AbortHandle,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
enum Phase {
    Living,
    Crashed,
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
    /// Watches all pods from threads of its own, for the rest of the process. Files of pods lie below `dir`.
    pub fn start(network: &Network, proxy: &str, kubeconfig: &Path, dir: &Path, reaper: Arc<Reaper>) -> Self {
        let dir = dir.join("pods");
        std::fs::create_dir(&dir).expect("a folder");
        let kubeconfig = std::fs::read(kubeconfig).expect("the kubelet's kubeconfig");
        let kubeconfig = serde_json::from_slice(&kubeconfig).expect("JSON");
        network.enter(|| {
            // Its threads are in the namespace, and it is never dropped: neither are its nodes.
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .thread_name("scripted-kubelet")
                .enable_all()
                .build()
                .expect("a runtime");
            let http = reqwest::Client::builder()
                // as a kubelet does it: a probe is a connection
                .pool_max_idle_per_host(0)
                .timeout(Duration::from_secs(2))
                .build();
            let world = Arc::new(World {
                client: Client::new(proxy.to_owned()),
                kubeconfig,
                http: http.expect("a client"),
                dir,
                reaper,
                state: Mutex::default(),
            });
            runtime.spawn(pods(Arc::clone(&world)));
            runtime.spawn(slices(Arc::clone(&world)));
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

    /// The node is gone, and its kubelet with it: no heartbeat, no process, and its pods stay as they are.
    pub fn lose(&self, node: &str) {
        let mut state = self.world.lock();
        state.nodes.insert(node.to_owned(), false);
        let of_it = |tracked: &&mut Tracked| node_of(&tracked.pod) == Some(node);
        for tracked in state.pods.values_mut().filter(of_it) {
            tracked.task = None;
        }
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

    /// Says what becomes of the namespace's pods. How a pod begins is asked for when it does, what its peer does at each call, and
    /// how long it takes to end when it is to be deleted.
    pub fn script(&self, namespace: &str, script: impl Fn(&Pod) -> Life + Send + Sync + 'static) {
        self.world.lock().scripts.insert(namespace.to_owned(), Arc::new(script));
    }

    /// The pod's process has crashed, and stays down.
    pub fn crash(&self, pod: &Pod) {
        let state = self.world.lock();
        let tracked = state.pods.get(&uid(pod)).expect("a pod that has been seen");
        if let Some(task) = &tracked.task {
            task.phase.send_if_modified(|phase| {
                let lives = *phase == Phase::Living;
                if lives {
                    *phase = Phase::Crashed;
                }
                lives
            });
        }
    }

    /// `kill -9` to the pod's process: a new one is started in its place.
    pub fn kill(&self, pod: &Pod) {
        let state = self.world.lock();
        let tracked = state.pods.get(&uid(pod)).expect("a pod that has been seen");
        if let Some(task) = &tracked.task {
            task.kill.notify_one();
        }
    }

    /// What the pod's process has written, all its restarts together; empty for a peer.
    pub fn log(&self, pod: &Pod) -> String {
        std::fs::read_to_string(self.world.log_of(pod)).unwrap_or_default()
    }
}

impl World {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the script says of a pod.
    fn life(&self, pod: &Pod) -> Life {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let script = self.lock().scripts.get(namespace).map(Arc::clone);
        script.map_or_else(Life::default, |script| script(pod))
    }

    /// Acts on a pod as it is now.
    fn see(self: &Arc<Self>, state: &mut State, pod: Pod) {
        let Some(&there) = node_of(&pod).and_then(|node| state.nodes.get(node)) else {
            return;
        };
        let addresses = &mut state.addresses;
        let tracked = state.pods.entry(uid(&pod)).or_insert_with(|| {
            *addresses += 1;
            Tracked {
                pod: pod.clone(),
                address: Ipv4Addr::from(FIRST_ADDRESS + *addresses),
                task: None,
            }
        });
        tracked.pod = pod;
        if !there {
            return;
        }
        let leaving = tracked.pod.metadata.deletion_timestamp.is_some();
        let phase = if leaving { Phase::Leaving } else { Phase::Living };
        if let Some(task) = &tracked.task {
            // A crashed pod stays so until it leaves.
            task.phase.send_if_modified(|now| {
                let later = phase > *now;
                if later {
                    *now = phase;
                }
                later
            });
            return;
        }
        let (sender, receiver) = watch::channel(phase);
        let kill = Arc::new(Notify::new());
        let (world, pod, address) = (Arc::clone(self), tracked.pod.clone(), tracked.address);
        let killed = Arc::clone(&kill);
        let task = tokio::spawn(async move { world.run(&pod, address, receiver, &killed).await });
        tracked.task = Some(Task {
            phase: sender,
            kill,
            handle: task.abort_handle(),
        });
    }

    /// All of a pod's life on its node.
    async fn run(self: &Arc<Self>, pod: &Pod, address: Ipv4Addr, mut phase: watch::Receiver<Phase>, kill: &Notify) {
        let mut process = None;
        // The sender outlives this task.
        let now = tokio::select! {
            biased;
            now = phase.wait_for(|now| *now != Phase::Living) => now.map_or(Phase::Leaving, |now| *now),
            () = self.live(pod, address, kill, &mut process) => Phase::Crashed,
        };
        if now == Phase::Crashed {
            process = None;
            self.patch(pod, &status::crashed(pod, address)).await;
            let _ = phase.wait_for(|now| *now == Phase::Leaving).await;
        }
        let grace = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
        if let Some(process) = process {
            process.end(Duration::from_secs(grace.unwrap_or(30) as u64)).await;
        }
        tokio::time::sleep(self.life(pod).terminating).await;
        let options = json!({"gracePeriodSeconds": 0, "preconditions": {"uid": pod.metadata.uid}});
        if let Err(refused) = self.pods(pod).delete(name(pod), &options).await {
            gone_or(&refused, "the end of a pod");
        }
        let _ = std::fs::remove_dir_all(self.dir_of(pod));
    }

    /// Runs its process until it crashes for good.
    async fn live(self: &Arc<Self>, pod: &Pod, address: Ipv4Addr, kill: &Notify, process: &mut Option<Process>) {
        let life = self.life(pod);
        match life.start {
            Start::ImageMissing => {
                self.patch(pod, &status::image_missing(pod)).await;
                std::future::pending::<()>().await;
            }
            Start::CrashLoop => return,
            Start::Ready(after) => {
                if !after.is_zero() {
                    self.patch(pod, &status::running(pod, address, false, 0)).await;
                    tokio::time::sleep(after).await;
                }
            }
        }
        let Some(container) = container::of(pod) else {
            self.patch(pod, &status::running(pod, address, true, 0)).await;
            match life.crash_after {
                Some(after) => return tokio::time::sleep(after).await,
                None => std::future::pending().await,
            }
        };
        for restarts in 0.. {
            let started = self.launch(pod, container, address, life.runs).await;
            self.patch(pod, &status::running(pod, address, false, restarts)).await;
            let running = process.insert(started);
            tokio::select! {
                () = running.ended() => {}
                () = kill.notified() => {}
                () = self.probe(pod, container, address, restarts, life.crash_after) => return,
            }
            *process = None;
        }
    }

    /// Starts a container's process, once all that it names is there.
    async fn launch(self: &Arc<Self>, pod: &Pod, container: &Container, address: Ipv4Addr, runs: Runs) -> Process {
        let mut said = String::new();
        loop {
            match self.try_launch(pod, container, address, runs).await {
                Ok(process) => return process,
                Err(lacking) if lacking != said => {
                    self.patch(pod, &status::lacking(pod, &lacking)).await;
                    said = lacking;
                }
                Err(_) => {}
            }
            tokio::time::sleep(LACKING).await;
        }
    }

    async fn try_launch(
        self: &Arc<Self>,
        pod: &Pod,
        container: &Container,
        address: Ipv4Addr,
        runs: Runs,
    ) -> Result<Process, String> {
        let mut args = container::arguments(&self.client, pod, container, address, &self.dir_of(pod)).await?;
        let program = container::program(container).unwrap_or_default();
        if runs == Runs::Real {
            args.extend(container::account(&self.client, pod, &self.kubeconfig, &self.dir_of(pod)).await?);
            return Ok(Process::real(program, &args, &self.log_of(pod), &self.reaper));
        }
        let (world, of) = (Arc::clone(self), pod.clone());
        let script = Arc::new(move || match world.life(&of).runs {
            Runs::Peer(script) => script,
            Runs::Real => peer::Script::default(),
        });
        let (world, of) = (Arc::clone(self), pod.metadata.namespace.clone().unwrap_or_default());
        let endpoints = Arc::new(move |service: &str| world.endpoints(&of, service));
        Peer::start(program, &args, script, endpoints).await.map(Process::Peer)
    }

    /// Asks the process whether it is ready, as its probe says, and writes down each change. It ends where the pod is to crash.
    async fn probe(
        &self,
        pod: &Pod,
        container: &Container,
        address: Ipv4Addr,
        restarts: u32,
        crash_after: Option<Duration>,
    ) {
        let (url, period) = status::probe(container, address);
        let mut was = false;
        loop {
            let answer = self.http.get(&url).send().await;
            let ready = answer.is_ok_and(|answer| answer.status().is_success());
            if ready != was {
                self.patch(pod, &status::running(pod, address, ready, restarts)).await;
                was = ready;
                if let Some(after) = crash_after.filter(|_| ready) {
                    tokio::time::sleep(after).await;
                    return;
                }
            }
            tokio::time::sleep(if ready { period } else { STARTING }).await;
        }
    }

    /// The ready pods of a Service.
    fn endpoints(&self, namespace: &str, service: &str) -> Vec<Ipv4Addr> {
        let of_it = |slice: &&EndpointSlice| {
            let labels = slice.metadata.labels.as_ref();
            slice.metadata.namespace.as_deref() == Some(namespace)
                && labels
                    .and_then(|labels| labels.get("kubernetes.io/service-name"))
                    .map(String::as_str)
                    == Some(service)
        };
        let state = self.lock();
        let all = state.slices.values().filter(of_it).flat_map(|slice| &slice.endpoints);
        let ready = all.filter(|endpoint| {
            let conditions = endpoint.conditions.as_ref();
            conditions.is_some_and(|of| of.ready == Some(true) && of.terminating != Some(true))
        });
        let mut found: Vec<Ipv4Addr> = ready
            .flat_map(|endpoint| &endpoint.addresses)
            .filter_map(|text| text.parse().ok())
            .collect();
        found.sort_unstable();
        found
    }

    async fn patch(&self, pod: &Pod, status: &serde_json::Value) {
        if let Err(refused) = self.pods(pod).patch_status(name(pod), Patch::Strategic, status).await {
            gone_or(&refused, "a pod's status");
        }
    }

    fn pods(&self, pod: &Pod) -> Api<Pod> {
        Api::namespaced(&self.client, pod.metadata.namespace.as_deref().unwrap_or_default())
    }

    fn dir_of(&self, pod: &Pod) -> PathBuf {
        self.dir.join(uid(pod))
    }

    fn log_of(&self, pod: &Pod) -> PathBuf {
        self.dir.join(format!("{}.log", uid(pod)))
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

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Follows all pods that are bound to a node.
async fn pods(world: Arc<World>) {
    let api: Api<Pod> = Api::all(&world.client);
    follow(&api, "fieldSelector=spec.nodeName!=", |change| {
        let mut state = world.lock();
        match change {
            Change::All(pods) => {
                let there: HashSet<String> = pods.iter().map(uid).collect();
                state.pods.retain(|uid, _| there.contains(uid));
                for pod in pods {
                    world.see(&mut state, pod);
                }
            }
            Change::Is(pod) => world.see(&mut state, pod),
            Change::Gone(pod) => drop(state.pods.remove(&uid(&pod))),
        }
    })
    .await;
}

/// Follows what routers watch.
async fn slices(world: Arc<World>) {
    let api: Api<EndpointSlice> = Api::all(&world.client);
    let key = |slice: &EndpointSlice| slice.metadata.uid.clone().unwrap_or_default();
    follow(&api, "", |change| {
        let mut state = world.lock();
        match change {
            Change::All(slices) => state.slices = slices.into_iter().map(|slice| (key(&slice), slice)).collect(),
            Change::Is(slice) => drop(state.slices.insert(key(&slice), slice)),
            Change::Gone(slice) => drop(state.slices.remove(&key(&slice))),
        }
    })
    .await;
}

enum Change<K> {
    All(Vec<K>),
    Is(K),
    Gone(K),
}

/// Lists objects and follows them; lists again whenever the API server ends that.
async fn follow<K>(api: &Api<K>, query: &str, mut act: impl FnMut(Change<K>))
where
    K: Resource + Metadata<Ty = ObjectMeta> + Serialize + DeserializeOwned,
{
    loop {
        let Ok((all, version)) = api.snapshot(query).await else {
            tokio::time::sleep(LACKING).await;
            continue;
        };
        act(Change::All(all));
        let Ok(events) = api.watch(query, &version).await else {
            continue;
        };
        let mut events = pin!(events);
        while let Some((kind, object)) = events.next().await {
            act(if kind == "DELETED" {
                Change::Gone(object)
            } else {
                Change::Is(object)
            });
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
