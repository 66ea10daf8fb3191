//! Prefill and decode.

use k8s_openapi::api::apps::v1::{Deployment, DeploymentSpec, DeploymentStrategy};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use tandem_crds::{Backend, EngineRole, PDDeploymentSpec, Role};

use super::meta::{CONTRACT, Owner, REVISION};
use super::pod::{self, Program};
use super::ports::{ADMIN, CONTROL, DATA, OPS};

/// A Deployment's own deadline comes after the startup probe's: the probe's failure says more.
const AFTER_STARTUP_SECONDS: i32 = 60;

/// What identifies a revision of an engine role.
#[derive(Debug, Clone, Copy)]
pub struct Revision<'a> {
    /// Prefill or decode.
    pub role: Role,
    /// The role's hash: `p-` or `d-` and ten hex digits.
    pub hash: &'a str,
    /// The contract's hash: `k-` and ten hex digits.
    pub contract: &'a str,
    /// Resolved: not empty.
    pub image: &'a str,
}

/// The pod template of a revision. It is rendered once, when the revision is admitted, and stored.
pub fn template(owner: &Owner<'_>, spec: &PDDeploymentSpec, revision: Revision<'_>) -> PodTemplateSpec {
    let of = match revision.role {
        Role::Prefill => &spec.prefill,
        Role::Decode | Role::Router => &spec.decode,
    };
    let mut ports = vec![("control", CONTROL), ("ops", OPS), ("admin", ADMIN)];
    if revision.role == Role::Prefill {
        ports.push(("data", DATA));
    }
    let program = Program {
        role: revision.role,
        image: revision.image,
        command: "tandem-engine",
        args: args(spec, of, revision.role),
        ports,
        resources: &of.resources,
        gpus: Some((&spec.gpus.resource_name, of.gpus_per_replica)),
        pod: &of.pod,
        secrets: Vec::new(),
        labels: vec![
            (REVISION, revision.hash.to_owned()),
            (CONTRACT, revision.contract.to_owned()),
        ],
    };
    pod::template(owner, spec, program)
}

fn args(spec: &PDDeploymentSpec, of: &EngineRole, role: Role) -> Vec<String> {
    let backend = match of.backend {
        Backend::Auto => "auto",
        Backend::Cpu => "cpu",
    };
    let mut args = vec![
        format!("--role={}", role.field()),
        format!("--model={}", pod::model_path(spec)),
        format!("--served-name={}", spec.model.name),
        format!("--backend={backend}"),
        format!("--tensor-parallel={}", of.parallelism.tensor),
        format!("--page-tokens={}", spec.kv_cache.page_tokens),
        format!("--drain-ms={}", i64::from(spec.timeouts.drain_seconds) * 1000),
        format!("--listen=0.0.0.0:{CONTROL}"),
        format!("--ops-listen=0.0.0.0:{OPS}"),
        format!("--admin-listen=0.0.0.0:{ADMIN}"),
        format!("--admin-token-file={}", pod::token_path()),
        "--log-format=json".to_owned(),
    ];
    if role == Role::Prefill {
        args.push(format!("--data-listen=0.0.0.0:{DATA}"));
    }
    if !spec.model.revision.is_empty() {
        args.push(format!("--model-revision={}", spec.model.revision));
    }
    if let Some(tokens) = spec.model.max_length_tokens {
        args.push(format!("--max-length-tokens={tokens}"));
    }
    args
}

/// The name of a revision's Deployment.
pub fn name(owner: &Owner<'_>, hash: &str) -> String {
    owner.child(hash)
}

/// The Deployment of a revision: its template never changes, only the number of its pods.
pub fn deployment(
    owner: &Owner<'_>,
    spec: &PDDeploymentSpec,
    revision: Revision<'_>,
    template: PodTemplateSpec,
    replicas: i32,
) -> Deployment {
    let mut selecting = owner.selecting(Some(revision.role));
    selecting.insert(REVISION.to_owned(), revision.hash.to_owned());
    let mut metadata = owner.meta(name(owner, revision.hash), Some(revision.role));
    let labels = metadata.labels.get_or_insert_default();
    labels.insert(REVISION.to_owned(), revision.hash.to_owned());
    labels.insert(CONTRACT.to_owned(), revision.contract.to_owned());
    Deployment {
        metadata,
        spec: Some(DeploymentSpec {
            replicas: Some(replicas),
            selector: LabelSelector {
                match_labels: Some(selecting),
                ..LabelSelector::default()
            },
            // Nothing is ever rolled inside of it. Should somebody change the template by hand, no pod more than asked for
            // takes GPUs.
            strategy: Some(DeploymentStrategy {
                type_: Some("Recreate".to_owned()),
                ..DeploymentStrategy::default()
            }),
            progress_deadline_seconds: Some(spec.timeouts.startup_seconds + AFTER_STARTUP_SECONDS),
            // The revisions are kept by the operator, not by its ReplicaSets.
            revision_history_limit: Some(0),
            template,
            ..DeploymentSpec::default()
        }),
        ..Deployment::default()
    }
}
