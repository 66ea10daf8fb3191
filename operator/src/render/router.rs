//! The router.

use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy, RollingUpdateDeployment};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tandem_crds::{PDDeploymentSpec, Role};

use super::meta::{Owner, REVISION};
use super::network;
use super::pod::{self, Program};
use super::ports::{ADMIN, HTTP, OPS};

/// Where the keys of the API are, in a secret of the user's.
const KEYS: &str = "/etc/tandem/keys";

/// What identifies a revision of the router.
#[derive(Debug, Clone, Copy)]
pub struct Revision<'a> {
    /// `r-` and ten hex digits.
    pub hash: &'a str,
    /// The contract of the engines that it is to pair.
    pub contract: &'a str,
    /// Resolved: not empty.
    pub image: &'a str,
}

/// The pod template of a revision.
pub fn template(owner: &Owner<'_>, spec: &PDDeploymentSpec, revision: Revision<'_>) -> PodTemplateSpec {
    let mut args = vec![
        format!("--model-name={}", spec.model.name),
        format!("--tokenizer={}", pod::model_path(spec)),
        format!("--drain-ms={}", i64::from(spec.timeouts.drain_seconds) * 1000),
        format!("--listen=0.0.0.0:{HTTP}"),
        format!("--ops-listen=0.0.0.0:{OPS}"),
        format!("--admin-listen=0.0.0.0:{ADMIN}"),
        format!("--admin-token-file={}", pod::token_path()),
        "--log-format=json".to_owned(),
    ];
    for role in [Role::Prefill, Role::Decode] {
        let service = network::engines_name(owner, role, revision.contract);
        args.push(format!("--discover-{}={service}", role.field()));
    }
    if let Some(tokens) = spec.model.max_length_tokens {
        args.push(format!("--max-length-tokens={tokens}"));
    }
    let mut secrets = Vec::new();
    if !spec.router.api_keys_secret_name.is_empty() {
        args.push(format!("--api-key-file={KEYS}/api-keys"));
        secrets.push(("api-keys".to_owned(), spec.router.api_keys_secret_name.clone(), KEYS));
    }
    let program = Program {
        role: Role::Router,
        image: revision.image,
        command: "tandem-router",
        args,
        ports: vec![("http", HTTP), ("ops", OPS), ("admin", ADMIN)],
        resources: &spec.router.resources,
        gpus: None,
        pod: &spec.router.pod,
        secrets,
        labels: vec![(REVISION, revision.hash.to_owned())],
    };
    pod::template(owner, spec, program)
}

/// The one Deployment of the router: a new template rolls, one pod more at a time and none less.
pub fn deployment(owner: &Owner<'_>, spec: &PDDeploymentSpec, template: PodTemplateSpec, replicas: i32) -> Deployment {
    Deployment {
        metadata: owner.meta(owner.child("router"), Some(Role::Router)),
        spec: Some(DeploymentSpec {
            replicas: Some(replicas),
            selector: owner.selector(Role::Router),
            strategy: Some(DeploymentStrategy {
                type_: Some("RollingUpdate".to_owned()),
                rolling_update: Some(RollingUpdateDeployment {
                    max_surge: Some(IntOrString::Int(1)),
                    max_unavailable: Some(IntOrString::Int(0)),
                }),
            }),
            progress_deadline_seconds: Some(spec.timeouts.startup_seconds + 60),
            revision_history_limit: Some(0),
            template,
            ..DeploymentSpec::default()
        }),
        ..Deployment::default()
    }
}
