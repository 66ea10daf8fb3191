//! A side's engines as a cluster tells of them: the ready endpoints of one Service.
//!
//! What is told is a level: each look begins with a list of all, so an event that was missed costs nothing but time. While the API
//! server cannot be asked, what it last said holds: engines that have gone since are found out by their connections.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client};
use tokio::time::timeout;

use super::discovery::Discovery;
use super::pool::Pool;
use crate::metrics::DiscoveryGauges;

/// The slices of a Service name it by this label.
const SERVICE: &str = "kubernetes.io/service-name";
/// The port of a Service that is an engine's control port; one without a name counts where it is the only one.
const CONTROL: &str = "control";
/// A list is answered within this.
const LIST: Duration = Duration::from_secs(15);
/// API servers send a bookmark about once a minute; one that is silent for longer is asked again.
const SILENCE: Duration = Duration::from_secs(90);
/// After this the API server ends a watch by itself.
const WATCH_SECONDS: u32 = 290;
/// Between two looks in vain: doubled up to the second.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Why a cluster cannot be asked.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// No pod, and no file.
    #[error("no cluster to find engines in: {0}; run in a pod with its service account's token, or give --kubeconfig")]
    Pod(#[from] kube::config::InClusterError),
    /// The file.
    #[error("--kubeconfig: {0}")]
    File(#[from] kube::config::KubeconfigError),
    /// What they say.
    #[error("no connection to the cluster can be made: {0}")]
    Client(#[from] kube::Error),
}

/// The namespace of a cluster where the engines are.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    namespace: String,
}

impl Cluster {
    /// By `kubeconfig`, or as the pod that this runs in; the namespace is that of either unless it is given.
    pub async fn new(kubeconfig: Option<&Path>, namespace: Option<&str>) -> Result<Self, ClusterError> {
        let mut config = match kubeconfig {
            None => kube::Config::incluster()?,
            Some(path) => {
                kube::Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &KubeConfigOptions::default())
                    .await?
            }
        };
        // it is asked again here, and what it answered is told
        config.default_retry = false;
        config.connect_timeout = Some(LIST);
        Ok(Self {
            namespace: namespace.unwrap_or(&config.default_namespace).to_owned(),
            client: Client::try_from(config)?,
        })
    }
}

/// The endpoints of one Service.
pub struct EndpointSlices {
    api: Api<EndpointSlice>,
    selector: String,
    /// For people.
    name: String,
    gauges: DiscoveryGauges,
    /// The last look failed.
    failing: bool,
}

impl EndpointSlices {
    /// Those of `service`.
    pub fn new(cluster: &Cluster, service: &str, gauges: DiscoveryGauges) -> Self {
        Self {
            api: Api::namespaced(cluster.client.clone(), &cluster.namespace),
            selector: format!("{SERVICE}={service}"),
            name: format!("service {}/{service}", cluster.namespace),
            gauges,
            failing: false,
        }
    }

    /// What it is, for people.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lists, and follows the changes until that fails; says why. None: the API server ended it in due time.
    async fn look(&mut self, pool: &Pool) -> Option<String> {
        let list = ListParams::default().labels(&self.selector);
        let listed = match timeout(LIST, self.api.list(&list)).await {
            Ok(Ok(listed)) => listed,
            Ok(Err(error)) => return Some(error.to_string()),
            Err(_) => return Some(format!("no answer within {} s", LIST.as_secs())),
        };
        let named = |slice: EndpointSlice| Some((slice.metadata.name.clone()?, Slice::of(&slice)));
        let version = listed.metadata.resource_version.unwrap_or_default();
        let mut slices: BTreeMap<String, Slice> = listed.items.into_iter().filter_map(named).collect();
        let mut told = ready(&slices);
        pool.set(&told);
        self.failing = false;
        if self.gauges.current.set(1) == 0 {
            tracing::info!(from = self.name, engines = told.len(), "engines are known");
        }

        let watch = WatchParams::default().labels(&self.selector).timeout(WATCH_SECONDS);
        let events = match timeout(LIST, self.api.watch(&watch, &version)).await {
            Ok(Ok(events)) => events,
            Ok(Err(error)) => return Some(error.to_string()),
            Err(_) => return Some(format!("no answer within {} s", LIST.as_secs())),
        };
        let mut events = std::pin::pin!(events);
        loop {
            match timeout(SILENCE, events.next()).await {
                Err(_) => return Some(format!("silent for {} s", SILENCE.as_secs())),
                Ok(None) => return None,
                Ok(Some(Err(error))) => return Some(error.to_string()),
                Ok(Some(Ok(event))) => match event {
                    WatchEvent::Added(slice) | WatchEvent::Modified(slice) => slices.extend(named(slice)),
                    WatchEvent::Deleted(slice) => drop(slice.metadata.name.and_then(|name| slices.remove(&name))),
                    WatchEvent::Bookmark(_) => continue,
                    WatchEvent::Error(status) => return Some(status.to_string()),
                },
            }
            let now = ready(&slices);
            if now != told {
                pool.set(&now);
                told = now;
            }
        }
    }
}

impl Discovery for EndpointSlices {
    async fn follow(mut self, pool: Arc<Pool>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let began = Instant::now();
            if let Some(reason) = self.look(&pool).await {
                self.gauges.failures.inc();
                self.gauges.current.set(0);
                if std::mem::replace(&mut self.failing, true) {
                    tracing::debug!(
                        from = self.name,
                        reason,
                        "the API server still does not tell of engines"
                    );
                } else {
                    tracing::warn!(
                        from = self.name,
                        reason,
                        "the API server does not tell of engines: those that it told of last are used"
                    );
                }
            }
            if began.elapsed() > LONGEST_PAUSE {
                pause = FIRST_PAUSE;
            }
            // not all routers at once
            tokio::time::sleep(pause.mul_f32(rand::random_range(0.5..1.0))).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// What matters of a slice.
#[derive(Debug, Default)]
struct Slice(Vec<One>);

/// An endpoint that is ready and stays so.
#[derive(Debug)]
struct One {
    /// Its pod, or itself.
    of: String,
    at: SocketAddr,
}

impl Slice {
    fn of(slice: &EndpointSlice) -> Self {
        let ports = slice.ports.as_deref().unwrap_or_default();
        let port = match ports {
            [only] if only.name.as_deref().unwrap_or_default().is_empty() => only.port,
            ports => ports
                .iter()
                .find(|port| port.name.as_deref() == Some(CONTROL))
                .and_then(|port| port.port),
        };
        let Some(port) = port.and_then(|port| u16::try_from(port).ok()) else {
            return Self::default();
        };
        Self(
            slice
                .endpoints
                .iter()
                .filter_map(|endpoint| One::of(endpoint, port))
                .collect(),
        )
    }
}

impl One {
    fn of(endpoint: &Endpoint, port: u16) -> Option<Self> {
        let conditions = endpoint.conditions.clone().unwrap_or_default();
        // unknown is ready, by the API's own word
        if !conditions.ready.unwrap_or(true) || conditions.terminating.unwrap_or(false) {
            return None;
        }
        // several addresses mean the same; a slice of names is of no use
        let address: IpAddr = endpoint.addresses.first()?.parse().ok()?;
        let at = SocketAddr::new(address, port);
        let pod = endpoint.target_ref.as_ref().and_then(|target| target.uid.clone());
        Some(Self {
            of: pod.unwrap_or_else(|| at.to_string()),
            at,
        })
    }
}

/// Each engine once, though several slices have it while it moves between them, and each family of addresses has one.
fn ready(slices: &BTreeMap<String, Slice>) -> Vec<String> {
    let mut engines: BTreeMap<&str, SocketAddr> = BTreeMap::new();
    for one in slices.values().flat_map(|slice| &slice.0) {
        engines
            .entry(&one.of)
            // IPv4 comes before IPv6, so the choice does not depend on which slice came first
            .and_modify(|at| *at = (*at).min(one.at))
            .or_insert(one.at);
    }
    let mut endpoints: Vec<_> = engines.into_values().map(|at| at.to_string()).collect();
    endpoints.sort();
    endpoints.dedup();
    endpoints
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn slice(family: &str, ports: &Value, endpoints: &Value) -> Slice {
        let slice = json!({
            "metadata": {"name": "s"}, "addressType": family, "ports": ports, "endpoints": endpoints,
        });
        Slice::of(&serde_json::from_value(slice).unwrap())
    }

    fn control() -> Value {
        json!([{"name": "ops", "port": 7102}, {"name": "control", "port": 7101}])
    }

    fn of(slices: Vec<Slice>) -> Vec<String> {
        ready(
            &slices
                .into_iter()
                .enumerate()
                .map(|(at, slice)| (at.to_string(), slice))
                .collect(),
        )
    }

    #[test]
    fn an_endpoint_that_is_not_ready_or_goes_is_an_engine() {
        let endpoints = json!([
            {"addresses": ["10.0.0.1"], "conditions": {"ready": true}},
            {"addresses": ["10.0.0.2"], "conditions": {"ready": false, "serving": true}},
            {"addresses": ["10.0.0.3"], "conditions": {"ready": true, "terminating": true}},
            {"addresses": ["10.0.0.4"], "conditions": {}},
            {"addresses": ["10.0.0.5"]},
            {"addresses": ["engine.example"], "conditions": {"ready": true}},
        ]);
        let expected = ["10.0.0.1:7101", "10.0.0.4:7101", "10.0.0.5:7101"];
        assert_eq!(of(vec![slice("IPv4", &control(), &endpoints)]), expected);
    }

    #[test]
    fn an_engine_in_several_slices_or_of_two_families_is_several() {
        let pod =
            |address: &str, uid: &str| json!([{"addresses": [address], "targetRef": {"kind": "Pod", "uid": uid}}]);
        let slices = || {
            vec![
                slice("IPv6", &control(), &pod("fd00::1", "a")),
                slice("IPv4", &control(), &pod("10.0.0.1", "a")),
                slice("IPv4", &control(), &pod("10.0.0.1", "a")),
                slice("IPv6", &control(), &pod("fd00::2", "b")),
                slice("IPv4", &control(), &json!([{"addresses": ["10.0.0.9"]}])),
                slice("IPv4", &control(), &json!([{"addresses": ["10.0.0.9"]}])),
                slice("IPv4", &json!([{"port": 9}]), &json!([{"addresses": ["10.0.0.9"]}])),
            ]
        };
        let expected = ["10.0.0.1:7101", "10.0.0.9:7101", "10.0.0.9:9", "[fd00::2]:7101"];
        assert_eq!(of(slices()), expected);
        let mut backwards = slices();
        backwards.reverse();
        assert_eq!(of(backwards), expected);
    }

    #[test]
    fn another_port_than_the_control_port_is_taken() {
        let one = json!([{"addresses": ["10.0.0.1"]}]);
        for (ports, expected) in [
            (json!([{"port": 5}]), vec!["10.0.0.1:5"]),
            (json!([{"name": "", "port": 5}]), vec!["10.0.0.1:5"]),
            (json!([{"name": "ops", "port": 5}]), vec![]),
            (json!([{"name": "control"}]), vec![]),
            (json!(null), vec![]),
        ] {
            assert_eq!(of(vec![slice("IPv4", &ports, &one)]), expected, "{ports}");
        }
        assert!(of(vec![slice("IPv4", &control(), &Value::Null)]).is_empty());
    }
}
