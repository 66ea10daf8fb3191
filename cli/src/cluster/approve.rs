//! `tandem approve`: a person lets a change go on.

use std::process::ExitCode;

use clap::Args;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tandem_crds::status::Step;

use super::connect::{ClusterArgs, ClusterError, Need, RESOURCE};
use super::deployment::Deployment;
use super::finish;
use super::follow::{Change, WaitArgs, wait};
use super::status::headline;
use crate::console;

/// In whose name the approval is written.
const MANAGER: &str = "kubectl-tandem";

/// `tandem approve`.
#[derive(Debug, Args)]
pub struct ApproveArgs {
    /// The deployment
    #[arg(value_name = "NAME")]
    name: String,
    /// Approve this change beforehand: the target as `plan` names it [default: what waits now]
    #[arg(long, value_name = "TARGET", conflicts_with = "wait", value_parser = revision)]
    revision: Option<String>,
    #[command(flatten)]
    wait: WaitArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// `TARGET` or `TARGET-VARIANT`, in hex digits.
fn revision(text: &str) -> Result<String, String> {
    let (target, variant) = text.split_once('-').unwrap_or((text, "0"));
    let is_hex = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    if target.len() == 10 && is_hex(target) && is_hex(variant) {
        Ok(text.to_owned())
    } else {
        Err("a target is ten hex digits, as `plan` prints them".to_owned())
    }
}

/// Approves what waits.
pub async fn approve(args: ApproveArgs) -> ExitCode {
    finish(run(&args).await)
}

async fn run(args: &ApproveArgs) -> Result<ExitCode, ClusterError> {
    let cluster = args.cluster.connect().await?;
    let deployment = Deployment::get(&cluster, &args.name).await?;
    let revision = match &args.revision {
        Some(revision) => revision.clone(),
        None => waiting(&deployment)?,
    };
    let patch = json!({"spec": {"rollout": {"approvedRevision": revision}}});
    let params = PatchParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    };
    let api = cluster.deployments();
    let patch = Patch::Merge(&patch);
    cluster
        .ask(Need::edit("patch", RESOURCE), api.patch(&args.name, &params, &patch))
        .await?;
    println!("{}: {revision} is approved", args.name);
    if deployment.object.data["spec"]["rollout"]["approval"] == "Automatic" {
        console::note("rollout.approval is Automatic: no change waits for an approval");
    }
    if !args.wait.wait {
        return Ok(ExitCode::SUCCESS);
    }
    let change = Change {
        token: None,
        target: Some(revision),
    };
    wait(&cluster, &deployment, change, &args.wait).await
}

/// The change that waits. Its whole name is approved, which also says the images and the restart: another restart of the same spec
/// waits again.
fn waiting(deployment: &Deployment) -> Result<String, ClusterError> {
    let refused = |why: String| {
        let name = deployment.name();
        Err(ClusterError::Refused(format!(
            "{name} waits for no approval: {why}; --revision TARGET approves a change beforehand"
        )))
    };
    if deployment.unseen().is_some() {
        return refused(format!("{}, try again then", headline(deployment)));
    }
    match &deployment.status.rollout {
        Some(_) if deployment.is_paused() => refused("rollout.paused is set".to_owned()),
        Some(rollout) if deployment.status.step == Step::Approve => Ok(rollout.target.clone()),
        _ => refused(headline(deployment)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn anything_is_taken_for_a_target() {
        for text in ["e664d62eb1", "e664d62eb1-0b"] {
            assert!(revision(text).is_ok(), "{text}");
        }
        for text in ["chat", "e664d62eb", "e664d62eb1-", "", "e664d62eb1-x"] {
            assert!(revision(text).is_err(), "{text}");
        }
    }
}
