//! `tandem restart`: a new token in `spec.restart`, and nothing else.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tandem_crds::RestartRoles;
use tandem_plan::rehearsal;

use super::connect::{ClusterArgs, ClusterError, Need, RESOURCE};
use super::deployment::Deployment;
use super::finish;
use super::follow::{Change, WaitArgs, wait};
use super::plan::LAST_APPLIED;
use crate::console;

/// In whose name the token is written.
const MANAGER: &str = "kubectl-tandem";

/// `tandem restart`.
#[derive(Debug, Args)]
pub struct RestartArgs {
    /// The deployment
    #[arg(value_name = "NAME")]
    name: String,
    /// Which roles restart
    #[arg(long, value_enum, default_value_t = Scope::Auto)]
    scope: Scope,
    #[command(flatten)]
    wait: WaitArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scope {
    /// The roles for which the operator has another default image by now, else all
    Auto,
    /// Decode
    DecodeOnly,
    /// Prefill, decode and router, in this order
    Full,
}

impl From<Scope> for RestartRoles {
    fn from(scope: Scope) -> Self {
        match scope {
            Scope::Auto => Self::Auto,
            Scope::DecodeOnly => Self::DecodeOnly,
            Scope::Full => Self::Full,
        }
    }
}

/// Asks for a restart.
pub async fn restart(args: RestartArgs) -> ExitCode {
    finish(run(&args).await)
}

async fn run(args: &RestartArgs) -> Result<ExitCode, ClusterError> {
    let cluster = args.cluster.connect().await?;
    let deployment = Deployment::get(&cluster, &args.name).await?;
    let token = Timestamp::now().to_string();
    let scope = RestartRoles::from(args.scope);
    let text = told(&deployment, deployment.running(&cluster).await?.as_ref(), &token, scope)?;
    let patch = json!({"spec": {"restart": {"token": token, "scope": scope}}});
    let params = PatchParams {
        field_manager: Some(MANAGER.to_owned()),
        ..PatchParams::default()
    };
    let api = cluster.deployments();
    let patch = Patch::Merge(&patch);
    let written = cluster
        .ask(Need::edit("patch", RESOURCE), api.patch(&args.name, &params, &patch))
        .await?;
    println!("{} is asked to restart: spec.restart.token is {token}", args.name);
    print!("{text}");
    for note in notes(&deployment, args.scope) {
        console::note(&note);
    }
    if !args.wait.wait {
        return Ok(ExitCode::SUCCESS);
    }
    let change = Change {
        token: Some(token),
        target: None,
    };
    wait(&cluster, &Deployment::read(written)?, change, &args.wait).await
}

/// The steps of the restart, as `tandem plan` tells them.
fn told(
    deployment: &Deployment,
    running: Option<&tandem_crds::PDDeploymentSpec>,
    token: &str,
    scope: RestartRoles,
) -> Result<String, ClusterError> {
    let mut wanted = deployment.spec()?;
    token.clone_into(&mut wanted.restart.token);
    wanted.restart.scope = scope;
    Ok(rehearsal::tell(running, &wanted))
}

/// What may surprise.
fn notes(deployment: &Deployment, scope: Scope) -> Vec<String> {
    let mut notes = Vec::new();
    if scope == Scope::Auto {
        notes
            .push("if the operator has another default image by now, only the roles that it is for restart".to_owned());
    }
    if deployment.is_paused() {
        notes.push("rollout.paused is set: nothing restarts before it is not".to_owned());
    }
    if let Some(rollout) = &deployment.status.rollout {
        notes.push(format!(
            "a change to {} is under way: the restart comes after it",
            rollout.target
        ));
    }
    if let Some(by) = owner(deployment) {
        notes.push(format!(
            "{by} sets spec.restart.token too: with the next apply it has its old value, which asks for one more restart"
        ));
    }
    notes
}

/// Which file has the token, if one has.
fn owner(deployment: &Deployment) -> Option<String> {
    let metadata = &deployment.object.metadata;
    let last = metadata.annotations.as_ref().and_then(|all| all.get(LAST_APPLIED));
    let last: Option<Value> = last.and_then(|last| serde_json::from_str(last).ok());
    if last.is_some_and(|last| !last["spec"]["restart"]["token"].is_null()) {
        return Some("the file of kubectl apply".to_owned());
    }
    let fields = metadata.managed_fields.iter().flatten();
    let has_token = |fields: &Value| !fields["f:spec"]["f:restart"]["f:token"].is_null();
    fields
        .filter(|entry| entry.operation.as_deref() == Some("Apply"))
        .find(|entry| entry.fields_v1.as_ref().is_some_and(|fields| has_token(&fields.0)))
        .map(|entry| format!("field manager {}", entry.manager.as_deref().unwrap_or_default()))
}
