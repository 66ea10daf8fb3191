//! Pods: phase, readiness, and what keeps one from serving.

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodCondition};
use tandem_crds::Role;
use tandem_plan::Trouble;

use super::node::NodeFacts;
use crate::render::meta::{OWNER, REVISION, ROLE};
use crate::render::pod::CONTAINER;

/// A pod on a node that is not known is lost once it has been bound for so long: the watch of nodes may be behind that of
/// pods.
const NODE_UNKNOWN: SignedDuration = SignedDuration::from_secs(60);
/// Bound of a message of somebody else's, in characters.
const MAX_MESSAGE: usize = 500;

/// What a pass needs to know of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFacts {
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
    /// The uid of its deployment, by its label.
    pub owner: String,
    /// Its role, by its label.
    pub role: Option<Role>,
    /// Its role's revision, by its label.
    pub revision: String,
    /// Its address, once it has one.
    pub ip: Option<String>,
    /// Its node, once it has one.
    pub node: Option<String>,
    /// Since when it is bound to its node.
    pub bound: Option<Timestamp>,
    /// What it asks for beside CPU and memory, by the resource's name.
    pub devices: BTreeMap<String, i32>,
    /// Ready, as its probe says.
    pub ready: bool,
    /// Asked to stop.
    pub terminating: bool,
    /// Ended for good: it holds nothing any more.
    pub ended: bool,
    /// How often its process was started again: another number is another process.
    pub restarts: i32,
    /// Why it does not serve.
    pub trouble: Option<Trouble>,
}

/// The facts of a pod.
pub fn facts(pod: &Pod) -> PodFacts {
    let meta = &pod.metadata;
    let (spec, status) = (pod.spec.as_ref(), pod.status.as_ref());
    let label = |key: &str| meta.labels.as_ref().and_then(|labels| labels.get(key)).cloned();
    let role = label(ROLE);
    let role = Role::ALL.into_iter().find(|one| role.as_deref() == Some(one.field()));
    let conditions = || status.iter().flat_map(|status| status.conditions.iter().flatten());
    let condition = |type_: &str| conditions().find(|condition| condition.type_ == type_);
    let containers = status
        .iter()
        .flat_map(|status| status.container_statuses.iter().flatten());
    let main = containers.into_iter().find(|container| container.name == CONTAINER);
    let limits = spec.iter().flat_map(|spec| &spec.containers).filter_map(|container| {
        let resources = container.resources.as_ref()?;
        resources.limits.as_ref()
    });
    let devices = limits.flatten().filter(|(name, _)| name.contains('/'));
    let phase = status.and_then(|status| status.phase.as_deref());
    PodFacts {
        name: meta.name.clone().unwrap_or_default(),
        uid: meta.uid.clone().unwrap_or_default(),
        owner: label(OWNER).unwrap_or_default(),
        role,
        revision: label(REVISION).unwrap_or_default(),
        ip: status
            .and_then(|status| status.pod_ip.clone())
            .filter(|ip| !ip.is_empty()),
        node: spec.and_then(|spec| spec.node_name.clone()),
        bound: condition("PodScheduled")
            .filter(|condition| condition.status == "True")
            .and_then(|condition| condition.last_transition_time.as_ref())
            .map(|time| time.0),
        devices: devices
            .filter_map(|(name, count)| Some((name.clone(), count.0.parse().ok()?)))
            .collect(),
        ready: condition("Ready").is_some_and(|condition| condition.status == "True"),
        terminating: meta.deletion_timestamp.is_some(),
        ended: matches!(phase, Some("Failed" | "Succeeded")),
        restarts: main.map_or(0, |container| container.restart_count),
        trouble: main
            .and_then(of_container)
            .or_else(|| condition("PodScheduled").and_then(of_scheduling)),
    }
}

fn of_scheduling(condition: &PodCondition) -> Option<Trouble> {
    let unplaced = condition.status == "False" && condition.reason.as_deref() == Some("Unschedulable");
    unplaced.then(|| trouble("Unschedulable", condition.message.as_deref()))
}

fn of_container(container: &ContainerStatus) -> Option<Trouble> {
    let state = container.state.as_ref()?;
    let waiting = state.waiting.as_ref();
    let reason = waiting.and_then(|waiting| waiting.reason.as_deref());
    let said = waiting.and_then(|waiting| waiting.message.as_deref());
    match reason {
        Some("ImagePullBackOff" | "ErrImagePull" | "ErrImageNeverPull" | "InvalidImageName" | "ImageInspectError") => {
            Some(trouble("ImagePullFailed", said))
        }
        Some("CreateContainerConfigError" | "CreateContainerError" | "RunContainerError") => {
            Some(trouble("ContainerNotMade", said))
        }
        Some("CrashLoopBackOff") => {
            let ended = container.last_state.as_ref().and_then(|last| last.terminated.as_ref());
            let how = ended.map(|ended| {
                let reason = ended.reason.as_deref().unwrap_or("it ended");
                format!("{reason}, exit code {}: ", ended.exit_code)
            });
            Some(trouble(
                "CrashLoop",
                Some(&format!("{}{}", how.unwrap_or_default(), said.unwrap_or_default())),
            ))
        }
        _ => None,
    }
}

fn trouble(reason: &str, message: Option<&str>) -> Trouble {
    Trouble {
        reason: reason.to_owned(),
        message: message.unwrap_or_default().chars().take(MAX_MESSAGE).collect(),
    }
}

impl PodFacts {
    /// Whether its node is unreachable or gone.
    pub fn is_lost(&self, nodes: &BTreeMap<String, NodeFacts>, now: Timestamp) -> bool {
        let Some(node) = &self.node else { return false };
        match nodes.get(node) {
            Some(node) => !node.reachable,
            None => self.bound.is_some_and(|bound| now.duration_since(bound) > NODE_UNKNOWN),
        }
    }

    /// Whether its process can be asked.
    pub fn answers(&self) -> bool {
        self.ready && !self.terminating && !self.ended && self.ip.is_some()
    }
}
