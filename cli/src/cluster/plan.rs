//! What a file would change of a deployment on a cluster, as the API server would take it.

use std::path::Path;

use kube::api::{Patch, PatchParams, ValidationDirective};
use serde_json::Value;
use tandem_plan::rehearsal;

use super::connect::{Cluster, ClusterError, Need, RESOURCE};
use super::deployment::Deployment;
use super::{ClusterArgs, merge};
use crate::console;
use crate::manifest;

/// What `kubectl apply` remembers of the file that it sent.
pub const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The field manager of `kubectl apply --server-side`.
pub const MANAGER: &str = "kubectl";

/// How the file would be applied.
#[derive(Debug, Clone, Copy)]
pub enum Applied<'a> {
    /// As `kubectl apply` does.
    ByClient,
    /// As `kubectl apply --server-side` does, by this field manager.
    ByServer(&'a str),
}

/// The steps of the change, as `tandem plan` tells them.
pub async fn plan(
    args: &ClusterArgs,
    name: Option<&str>,
    path: &Path,
    applied: Applied<'_>,
) -> Result<String, ClusterError> {
    let file = manifest::object(path).map_err(|error| ClusterError::Refused(error.to_string()))?;
    let mut cluster = args.connect().await?;
    let name = identity(&mut cluster, args.namespace(), name, &file)?;
    let live = Deployment::find(&cluster, &name).await?;
    let wanted = dry_run(&cluster, &name, &file, live.as_ref(), applied).await?.spec()?;
    let Some(live) = live else {
        return Ok(rehearsal::tell(None, &wanted));
    };
    for note in notes(&live) {
        console::note(&note);
    }
    let running = live.running(&cluster).await?;
    Ok(rehearsal::tell(running.as_ref(), &wanted))
}

/// The name that is meant, and the namespace, which the file may name too.
fn identity(
    cluster: &mut Cluster,
    namespace: Option<&str>,
    name: Option<&str>,
    file: &Value,
) -> Result<String, ClusterError> {
    let in_file = |field: &str| file["metadata"][field].as_str();
    if let (Some(given), Some(written)) = (name, in_file("name"))
        && given != written
    {
        return Err(ClusterError::Refused(format!(
            "the file is of {written:?}, not of {given:?}: leave the name out, or give another file"
        )));
    }
    if let Some(written) = in_file("namespace") {
        if let Some(given) = namespace
            && given != written
        {
            return Err(ClusterError::Refused(format!(
                "the namespace of the file, {written:?}, is not {given:?}: leave -n out, or the file's"
            )));
        }
        written.clone_into(&mut cluster.namespace);
    }
    let name = name.or(in_file("name")).unwrap_or_default();
    if name.is_empty() {
        return Err(ClusterError::Refused(
            "the file has no metadata.name: write one".to_owned(),
        ));
    }
    Ok(name.to_owned())
}

/// The object as it would be, checked by the API server with its defaults and rules, and not kept.
async fn dry_run(
    cluster: &Cluster,
    name: &str,
    file: &Value,
    live: Option<&Deployment>,
    applied: Applied<'_>,
) -> Result<Deployment, ClusterError> {
    let api = cluster.deployments();
    let need = Need::edit(if live.is_some() { "patch" } else { "create" }, RESOURCE);
    let mut params = PatchParams {
        dry_run: true,
        field_validation: Some(ValidationDirective::Strict),
        ..PatchParams::default()
    };
    // What is not there yet is made by either in the same way.
    let patch = match (live, applied) {
        (Some(live), Applied::ByClient) => {
            let last = live
                .object
                .metadata
                .annotations
                .as_ref()
                .and_then(|all| all.get(LAST_APPLIED));
            let last = last
                .and_then(|last| serde_json::from_str(last).ok())
                .unwrap_or(Value::Null);
            let now = serde_json::to_value(&live.object).unwrap_or_default();
            Patch::Merge(merge::patch(&last, file, &now))
        }
        (None, Applied::ByClient) => {
            params.field_manager = Some(MANAGER.to_owned());
            Patch::Apply(file.clone())
        }
        (_, Applied::ByServer(manager)) => {
            params.field_manager = Some(manager.to_owned());
            Patch::Apply(file.clone())
        }
    };
    let asked = cluster.ask(need, api.patch(name, &params, &patch)).await;
    Deployment::read(asked?)
}

/// What changes the meaning of the steps.
fn notes(live: &Deployment) -> Vec<String> {
    let mut notes = Vec::new();
    if let Some(rollout) = &live.status.rollout {
        notes.push(format!(
            "a change to {} is under way, at step {:?}; the steps are told from what ran before it",
            rollout.target, rollout.step
        ));
    }
    if live.is_paused() {
        notes.push("rollout.paused is set: no step is taken before it is not".to_owned());
    }
    notes
}
