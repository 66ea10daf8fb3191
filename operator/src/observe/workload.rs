//! Deployments as workloads, and pods that only they tell of.

use std::collections::BTreeSet;

use k8s_openapi::api::apps::v1::Deployment;
use tandem_crds::Role;
use tandem_plan::{Pod, Trouble, Workload};

use super::pod::PodFacts;
use crate::render::meta::{CONTRACT, REVISION, ROLE};

/// A Deployment of ours as a workload, and how many pods it says that it has; none for one that bears no role. `gpus` are the
/// names of resources that count as such.
pub fn workload(deployment: &Deployment, gpus: &BTreeSet<&str>) -> Option<(Workload, i32)> {
    let spec = deployment.spec.as_ref()?;
    let template = spec.template.metadata.as_ref().and_then(|meta| meta.labels.as_ref())?;
    let label = |key: &str| template.get(key).cloned().unwrap_or_default();
    let role = label(ROLE);
    let role = Role::ALL.into_iter().find(|one| one.field() == role)?;
    let limits = spec
        .template
        .spec
        .iter()
        .flat_map(|spec| &spec.containers)
        .filter_map(|container| {
            let resources = container.resources.as_ref()?;
            resources.limits.as_ref()
        });
    let devices = limits.flatten().filter(|(name, _)| gpus.contains(name.as_str()));
    let status = deployment.status.as_ref();
    let conditions = status.iter().flat_map(|status| status.conditions.iter().flatten());
    let failure = conditions
        .into_iter()
        .find(|one| one.type_ == "ReplicaFailure" && one.status == "True");
    let workload = Workload {
        role,
        revision: label(REVISION),
        contract: label(CONTRACT),
        replicas: spec.replicas.unwrap_or(1),
        gpus: devices.filter_map(|(_, count)| count.0.parse::<i32>().ok()).sum(),
        trouble: failure.map(|failure| {
            let message = failure.message.clone().unwrap_or_default();
            let quota = message.contains("exceeded quota");
            let reason = if quota { "QuotaExceeded" } else { "PodsNotMade" };
            Trouble {
                reason: reason.to_owned(),
                message,
            }
        }),
    };
    Some((workload, status.and_then(|status| status.replicas).unwrap_or(0)))
}

/// The pods that workloads have and the watch has not shown yet: they may hold GPUs already.
pub fn unseen(workload: &Workload, said: i32, pods: &[&PodFacts]) -> impl Iterator<Item = Pod> {
    let of_it = |pod: &&&PodFacts| pod.role == Some(workload.role) && pod.revision == workload.revision;
    // A Deployment counts those that do not terminate.
    let alive = pods.iter().filter(of_it).filter(|pod| !pod.terminating && !pod.ended);
    let missing = if workload.role == Role::Router {
        // It has pods of two revisions while it rolls, and they hold no GPUs.
        0
    } else {
        said - alive.count() as i32
    };
    (0..missing.max(0)).map(|index| Pod::made(workload, format!("unseen-{}-{index}", workload.revision)))
}
