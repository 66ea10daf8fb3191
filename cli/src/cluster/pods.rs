//! The pods of a deployment, where their processes listen, and what opens the admin ports.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::future::join_all;
use k8s_openapi::api::core::v1::{Event, Pod, Secret};
use kube::Api;
use kube::api::{ListParams, LogParams};
use serde_json::{Value, json};
use tandem_secrets::{SecretFile, Token};

use super::connect::{Cluster, ClusterArgs, ClusterError, Need};
use super::deployment::Deployment;
use super::forward::{Pods, hindrance};
use super::plan::LAST_APPLIED;
use crate::console;

const DEPLOYMENT: &str = "tandem.dev/deployment";
const ROLE: &str = "tandem.dev/role";
/// The uid of the deployment: a pod of an earlier one of the same name is none of this one's.
const OWNER: &str = "tandem.dev/owner";
/// The container of a pod that matters.
const CONTAINER: &str = "tandem";
/// The key of the admin token in its Secret.
const TOKEN_KEY: &str = "admin-token";
/// Of each log.
const LOG_LINES: i64 = 20_000;

/// A deployment on a cluster, and the way to its processes.
#[derive(Debug)]
pub struct Found {
    /// The router's pod that is looked at: its address, and that of its admin port. None: none has an address.
    pub router: Option<(String, String)>,
    pub token: Token,
    /// Control ports.
    pub prefills: Vec<String>,
    pub decodes: Vec<String>,
    /// What there is instead of a process, where a role should have one and no pod of it has an address.
    pub no_prefill: Option<String>,
    pub no_decode: Option<String>,
    /// Where each process shows its metrics, by its pod.
    pub ops: Vec<(String, String)>,
    pub model: Option<String>,
    pub road: Arc<Pods>,
    pub run: Run,
}

/// What the cluster itself knows of it.
pub struct Run {
    cluster: Cluster,
    deployment: Deployment,
    pods: Vec<Pod>,
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run")
            .field("deployment", &self.deployment.name())
            .finish_non_exhaustive()
    }
}

/// Looks for a deployment's pods and reads its admin token.
pub async fn find(args: &ClusterArgs, name: &str, router_pod: Option<&str>) -> Result<Found, ClusterError> {
    let cluster = args.connect().await?;
    let deployment = Deployment::get(&cluster, name).await?;
    let api: Api<Pod> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let labelled = ListParams::default().labels(&format!("{DEPLOYMENT}={name}"));
    let mut pods = cluster
        .ask(Need::view("list", "pods"), api.list(&labelled))
        .await?
        .items;
    pods.retain(|pod| label(pod, OWNER) == deployment.object.metadata.uid.as_deref());
    let token = token(&cluster, name).await?;

    let hindered = hindered(&cluster, &api, &pods).await?;
    let mut names = BTreeMap::new();
    let (mut routers, mut ops) = (Vec::new(), Vec::new());
    let (mut prefills, mut decodes) = (Vec::new(), Vec::new());
    for pod in pods.iter().filter(|pod| !hindered.contains(pod_name(pod))) {
        let Some(ip) = ip(pod) else { continue };
        let place = |port: Option<u16>| {
            port.map(|port| {
                if ip.contains(':') {
                    format!("[{ip}]:{port}")
                } else {
                    format!("{ip}:{port}")
                }
            })
        };
        let name = pod_name(pod);
        names.extend(ports(pod).map(|(_, port)| ((ip.to_owned(), port), name.to_owned())));
        ops.extend(place(port(pod, "ops")).map(|place| (name.to_owned(), place)));
        let control = place(port(pod, "control"));
        match label(pod, ROLE) {
            Some("prefill") => prefills.extend(control),
            Some("decode") => decodes.extend(control),
            Some("router") if pod.metadata.deletion_timestamp.is_none() => {
                let both = place(port(pod, "http")).zip(place(port(pod, "admin")));
                routers.extend(both.map(|both| (name, both)));
            }
            _ => {}
        }
    }
    let road = Arc::new(Pods::new(api, names));
    let router = choose(name, &routers, router_pod)?;
    if prefills.is_empty() && decodes.is_empty() && !hindered.is_empty() {
        return Err(ClusterError::Refused(format!(
            "no engine of {name} can be looked at from here"
        )));
    }
    Ok(Found {
        router: router.map(|(http, admin)| (format!("http://{http}"), admin)),
        token,
        prefills,
        decodes,
        no_prefill: absent(&deployment.object.data["spec"], &pods, "prefill"),
        no_decode: absent(&deployment.object.data["spec"], &pods, "decode"),
        ops,
        model: deployment.object.data["spec"]["model"]["name"]
            .as_str()
            .map(str::to_owned),
        road,
        run: Run {
            cluster,
            deployment,
            pods,
        },
    })
}

/// What there is instead of a process of a role.
fn absent(spec: &Value, pods: &[Pod], role: &str) -> Option<String> {
    let of_role = || pods.iter().filter(|pod| label(pod, ROLE) == Some(role));
    let wanted = spec[role]["replicas"].as_i64().unwrap_or(1);
    if wanted == 0 || of_role().any(|pod| ip(pod).is_some()) {
        return None;
    }
    let told = |pod: &Pod| format!("pod {} {}", pod_name(pod), waits_for(pod));
    let there: Vec<String> = of_role().map(told).collect();
    Some(if there.is_empty() {
        "there is no pod of it".to_owned()
    } else {
        there.join("; ")
    })
}

/// Why a pod has no address, as the cluster says it.
fn waits_for(pod: &Pod) -> String {
    let status = pod.status.as_ref();
    let conditions = status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut failed = conditions.filter(|one| one.status == "False" && one.message.is_some());
    let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
    match failed.next() {
        Some(one) => {
            let words = [one.reason.as_deref(), one.message.as_deref()];
            let words: Vec<&str> = words.into_iter().flatten().collect();
            format!("is {phase}: {}", words.join(": "))
        }
        None => format!("is {phase} and has no address"),
    }
}

/// The pods to which no port is forwarded; each is told of. What a process behind it does is not known from here, and nothing is said of
/// it.
async fn hindered(cluster: &Cluster, api: &Api<Pod>, pods: &[Pod]) -> Result<BTreeSet<String>, ClusterError> {
    let running = pods.iter().filter(|pod| ip(pod).is_some());
    let asked = running.filter_map(|pod| {
        let (name, (_, port)) = (pod_name(pod), ports(pod).next()?);
        Some(async move { (name, hindrance(cluster, api, name, port).await) })
    });
    let mut hindered = BTreeSet::new();
    for (name, found) in join_all(asked).await {
        if let Some(why) = found? {
            console::note(&format!(
                "pod {name} is not looked at: its ports cannot be forwarded: {why}"
            ));
            hindered.insert(name.to_owned());
        }
    }
    Ok(hindered)
}

/// One look is at one router: its clients are its own.
fn choose(
    name: &str,
    routers: &[(&str, (String, String))],
    wanted: Option<&str>,
) -> Result<Option<(String, String)>, ClusterError> {
    let names: Vec<&str> = routers.iter().map(|(pod, _)| *pod).collect();
    let names = names.join(", ");
    match (wanted, routers) {
        (Some(wanted), _) => {
            let found = routers.iter().find(|(pod, _)| *pod == wanted);
            let found = found.map(|(_, places)| Some(places.clone()));
            found.ok_or_else(|| {
                ClusterError::Refused(format!(
                    "{wanted:?} is no router of {name} with an address; there are: {names}"
                ))
            })
        }
        (None, [(_, places)]) => Ok(Some(places.clone())),
        (None, []) => {
            console::note(&format!(
                "no router of {name} has an address: only its engines are looked at"
            ));
            Ok(None)
        }
        (None, _) => Err(ClusterError::Refused(format!(
            "{name} has several routers, each with clients of its own: name the one to look at with --router-pod, and look at each: {names}"
        ))),
    }
}

async fn token(cluster: &Cluster, name: &str) -> Result<Token, ClusterError> {
    let secret = format!("{name}-admin-token");
    let api: Api<Secret> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let found = cluster.ask(Need::diagnose("get", "secrets"), api.get(&secret)).await?;
    let bytes = found
        .data
        .and_then(|mut data| data.remove(TOKEN_KEY))
        .unwrap_or_default();
    let file = SecretFile::private("the Secret", secret);
    Token::parse(&file, &bytes.0).map_err(|error| ClusterError::Refused(error.to_string()))
}

fn label<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    pod.metadata.labels.as_ref()?.get(name).map(String::as_str)
}

fn pod_name(pod: &Pod) -> &str {
    pod.metadata.name.as_deref().unwrap_or_default()
}

fn ip(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.pod_ip.as_deref().filter(|ip| !ip.is_empty())
}

fn ports(pod: &Pod) -> impl Iterator<Item = (&str, u16)> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let ports = containers
        .filter(|one| one.name == CONTAINER)
        .flat_map(|one| one.ports.iter().flatten());
    ports.filter_map(|port| Some((port.name.as_deref()?, u16::try_from(port.container_port).ok()?)))
}

fn port(pod: &Pod, name: &str) -> Option<u16> {
    ports(pod).find(|(one, _)| *one == name).map(|(_, port)| port)
}

impl Run {
    /// What its pods are told by.
    pub fn place(&self) -> String {
        format!("the pods of {}/{}", self.cluster.namespace, self.deployment.name())
    }

    /// The object, without what kubectl keeps in it: that has values of variables as text.
    pub fn object(&self) -> Value {
        let mut object = self.deployment.object.clone();
        object.metadata.managed_fields = None;
        if let Some(annotations) = &mut object.metadata.annotations {
            annotations.remove(LAST_APPLIED);
        }
        json!(object)
    }

    /// How each pod stands.
    pub fn pods(&self) -> Value {
        let told = |pod: &Pod| {
            json!({
                "name": pod.metadata.name, "labels": pod.metadata.labels, "created": pod.metadata.creation_timestamp,
                "deleted": pod.metadata.deletion_timestamp, "node": pod.spec.as_ref().map(|spec| &spec.node_name), "status": pod.status,
            })
        };
        self.pods.iter().map(told).collect()
    }

    /// What the cluster has written of it and its children, as far as it may be read.
    pub async fn events(&self) -> Value {
        let api: Api<Event> = Api::namespaced(self.cluster.client.clone(), &self.cluster.namespace);
        let all = ListParams::default();
        let asked = self.cluster.ask(Need::view("list", "events"), api.list(&all));
        let (name, below) = (self.deployment.name(), format!("{}-", self.deployment.name()));
        let of_it = |event: &Event| {
            let about = event.involved_object.name.as_deref().unwrap_or_default();
            about == name || about.starts_with(&below)
        };
        match asked.await {
            Ok(found) => found
                .items
                .into_iter()
                .filter(of_it)
                .map(|event| json!(event))
                .collect(),
            Err(error) => json!({"notRead": error.to_string()}),
        }
    }

    /// The end of each log by its file's name; of a container that was started again, of the one before too.
    pub async fn logs(&self) -> Vec<(String, Result<String, String>)> {
        let api: &Api<Pod> = &Api::namespaced(self.cluster.client.clone(), &self.cluster.namespace);
        let wanted = self.pods.iter().flat_map(|pod| {
            let states = pod
                .status
                .iter()
                .flat_map(|status| status.container_statuses.iter().flatten());
            let again = states
                .filter(|state| state.name == CONTAINER)
                .any(|state| state.restart_count > 0);
            let name = pod_name(pod);
            [(name, false)].into_iter().chain(again.then_some((name, true)))
        });
        let asked = wanted.map(|(pod, previous)| async move {
            let params = LogParams {
                container: Some(CONTAINER.to_owned()),
                previous,
                tail_lines: Some(LOG_LINES),
                ..LogParams::default()
            };
            let log = self
                .cluster
                .ask(Need::view("get", "pods/log"), api.logs(pod, &params))
                .await;
            let file = if previous {
                format!("{pod}.previous.log")
            } else {
                format!("{pod}.log")
            };
            (file, log.map_err(|error| error.to_string()))
        });
        join_all(asked).await
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

    use super::*;

    fn pod(role: &str, status: &Value) -> Pod {
        let object = json!({"metadata": {"name": "one", "labels": {ROLE: role}}, "status": status});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_role_without_an_address_is_told_by_what_its_pods_wait_for() {
        let pending = json!({
            "phase": "Pending",
            "conditions": [
                {"type": "Initialized", "status": "True"},
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available"},
            ],
        });
        let serves = json!({"phase": "Running", "podIP": "10.0.0.1"});
        for (role, replicas, status, expected) in [
            (
                "prefill",
                json!(1),
                &pending,
                Some("pod one is Pending: Unschedulable: 0/2 nodes are available"),
            ),
            (
                "prefill",
                json!(1),
                &json!({}),
                Some("pod one is Pending and has no address"),
            ),
            ("prefill", Value::Null, &serves, None),
            ("decode", json!(1), &serves, Some("there is no pod of it")),
            ("prefill", json!(0), &pending, None),
        ] {
            let spec = json!({"prefill": {"replicas": replicas}});
            let said = absent(&spec, &[pod(role, status)], "prefill");
            assert_eq!(said.as_deref(), expected, "{role} {status}");
        }
    }
}
