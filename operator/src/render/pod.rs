//! What all pods have in common.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Capabilities, ConfigMapVolumeSource, Container, ContainerPort, EmptyDirVolumeSource, EnvVar, EnvVarSource,
    HTTPGetAction, LocalObjectReference, PersistentVolumeClaimVolumeSource, PodSecurityContext, PodSpec,
    PodTemplateSpec, Probe, ResourceRequirements, SeccompProfile, SecretKeySelector, SecretVolumeSource,
    SecurityContext, Toleration, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tandem_crds::{PDDeploymentSpec, Pod, Resources, Role};
use tandem_plan::Traffic;

use super::meta::{OWNER, Owner};
use super::{guard, knobs, ports};

/// Where the model's claim is mounted.
const MODELS: &str = "/models";
/// Where the admin token is.
const ADMIN: &str = "/etc/tandem/admin";
/// The user that the images are made for.
const USER: i64 = 65_532;
/// The container of a pod that matters.
pub const CONTAINER: &str = "tandem";
/// Between the end of the drain and SIGKILL.
const AFTER_DRAIN_SECONDS: i64 = 30;
/// A pod of a node that nobody hears of is replaced after so long: nobody can use it, and Kubernetes' own five minutes are ones
/// without its role. A node that is heard of and not ready may be so for a moment, and to load a model takes long.
const UNREACHABLE_SECONDS: i64 = 20;
/// The taint of such a node.
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";
/// The effect of a taint that ends pods.
const EVICTS: &str = "NoExecute";
/// Between two looks at a process that starts.
const STARTUP_PERIOD_SECONDS: i32 = 1;

/// What a role's pod runs.
#[derive(Debug)]
pub struct Program<'a> {
    /// The role.
    pub role: Role,
    /// Resolved: not empty.
    pub image: &'a str,
    /// The binary's name in the image.
    pub command: &'a str,
    /// The arguments that a template is made with; the knobs are added.
    pub args: Vec<String>,
    /// Name and number.
    pub ports: Vec<(&'a str, u16)>,
    /// What the spec says of CPU and memory.
    pub resources: &'a Resources,
    /// GPUs: the resource's name and how many.
    pub gpus: Option<(&'a str, i32)>,
    /// What the spec says of the pod.
    pub pod: &'a Pod,
    /// Further secrets: name, key, and the folder to see it in.
    pub secrets: Vec<(String, String, &'static str)>,
    /// Labels beside those of all children.
    pub labels: Vec<(&'static str, String)>,
}

/// The path of the model in a pod.
pub fn model_path(spec: &PDDeploymentSpec) -> String {
    format!("{MODELS}/{}", spec.model.source.pvc.path)
}

/// The path of the admin token in a pod.
pub fn token_path() -> String {
    format!("{ADMIN}/{}", guard::TOKEN_KEY)
}

/// A pod template: restricted, probed; only the router's has a token for the API server, where it finds the engines.
pub fn template(owner: &Owner<'_>, spec: &PDDeploymentSpec, program: Program<'_>) -> PodTemplateSpec {
    let Program { role, pod, .. } = program;
    let config_map = knobs::name(owner, role);
    let tunable = knobs::of(spec, role);
    let mut args = program.args;
    args.extend(tunable.iter().map(knobs::Knob::argument));
    let mut env: Vec<EnvVar> = tunable.iter().map(|knob| knob.source(&config_map)).collect();
    if role == Role::Router {
        let config_map = knobs::traffic_name(owner);
        let order = knobs::traffic_knobs(Traffic::Admit);
        args.extend(order.iter().map(knobs::Knob::argument));
        env.extend(order.iter().map(|knob| knob.source(&config_map)));
    }
    env.extend(pod.env.iter().map(variable));

    let mut volumes = vec![
        (models(spec), mount("models", MODELS, true)),
        (
            secret("admin-token", &guard::token_name(owner)),
            mount("admin-token", ADMIN, true),
        ),
    ];
    for (name, key, path) in &program.secrets {
        volumes.push((secret(name, key), mount(name, path, true)));
    }
    for (index, volume) in pod.volumes.iter().enumerate() {
        // By its place: with a prefix a long name of the spec's would be none any more.
        let name = format!("extra-{index}");
        volumes.push((foreign(&name, volume), foreign_mount(&name, volume)));
    }
    let (volumes, volume_mounts) = volumes.into_iter().unzip();

    let mut labels = owner.labels(Some(role));
    labels.insert(OWNER.to_owned(), owner.uid.to_owned());
    labels.extend(program.labels.into_iter().map(|(key, value)| (key.to_owned(), value)));
    labels.extend(pod.labels.clone());

    let container = Container {
        name: CONTAINER.to_owned(),
        image: Some(program.image.to_owned()),
        command: Some(vec![program.command.to_owned()]),
        args: Some(args),
        env: Some(env),
        ports: Some(
            program
                .ports
                .iter()
                .map(|&(name, port)| named_port(name, port))
                .collect(),
        ),
        resources: Some(resources(program.resources, program.gpus)),
        startup_probe: Some(Probe {
            // one more than fit, so that none is late by a rounding; one that hangs counts as long as one that fails
            failure_threshold: Some(spec.timeouts.startup_seconds / STARTUP_PERIOD_SECONDS + 1),
            timeout_seconds: Some(STARTUP_PERIOD_SECONDS),
            ..probe("/readyz", STARTUP_PERIOD_SECONDS)
        }),
        readiness_probe: Some(probe("/readyz", 2)),
        // It answers even when the rest is stuck; whether that is so, the watchdogs judge.
        liveness_probe: Some(Probe {
            failure_threshold: Some(6),
            ..probe("/livez", 10)
        }),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            capabilities: Some(Capabilities {
                drop: Some(vec!["ALL".to_owned()]),
                ..Capabilities::default()
            }),
            ..SecurityContext::default()
        }),
        volume_mounts: Some(volume_mounts),
        ..Container::default()
    };
    PodTemplateSpec {
        metadata: Some(ObjectMeta {
            labels: Some(labels),
            annotations: some(pod.annotations.clone()),
            ..ObjectMeta::default()
        }),
        spec: Some(PodSpec {
            containers: vec![container],
            service_account_name: Some(guard::account_name(owner, role)),
            automount_service_account_token: Some(role == Role::Router),
            termination_grace_period_seconds: Some(i64::from(spec.timeouts.drain_seconds) + AFTER_DRAIN_SECONDS),
            security_context: Some(PodSecurityContext {
                run_as_non_root: Some(true),
                run_as_user: Some(USER),
                run_as_group: Some(USER),
                fs_group: Some(USER),
                fs_group_change_policy: Some("OnRootMismatch".to_owned()),
                seccomp_profile: Some(SeccompProfile {
                    type_: "RuntimeDefault".to_owned(),
                    ..SeccompProfile::default()
                }),
                ..PodSecurityContext::default()
            }),
            volumes: Some(volumes),
            node_selector: some(pod.node_selector.clone()),
            affinity: pod.affinity.clone(),
            tolerations: Some(tolerations(&pod.tolerations)),
            priority_class_name: text(&pod.priority_class_name),
            runtime_class_name: text(&pod.runtime_class_name),
            image_pull_secrets: (!pod.image_pull_secrets.is_empty()).then(|| {
                let named = |secret: &tandem_crds::pod::SecretName| LocalObjectReference {
                    name: secret.name.clone(),
                };
                pod.image_pull_secrets.iter().map(named).collect()
            }),
            ..PodSpec::default()
        }),
    }
}

/// Those that are given, and one of a node that is unreachable where none of them speaks of that.
fn tolerations(given: &[Toleration]) -> Vec<Toleration> {
    let speaks = |one: &Toleration| {
        let is_any_or = |given: &Option<String>, what| given.as_deref().is_none_or(|it| it.is_empty() || it == what);
        is_any_or(&one.key, UNREACHABLE) && is_any_or(&one.effect, EVICTS)
    };
    let own = (!given.iter().any(speaks)).then(|| Toleration {
        key: Some(UNREACHABLE.to_owned()),
        operator: Some("Exists".to_owned()),
        effect: Some(EVICTS.to_owned()),
        toleration_seconds: Some(UNREACHABLE_SECONDS),
        ..Toleration::default()
    });
    given.iter().cloned().chain(own).collect()
}

fn text(value: &str) -> Option<String> {
    (!value.is_empty()).then(|| value.to_owned())
}

fn some(map: BTreeMap<String, String>) -> Option<BTreeMap<String, String>> {
    (!map.is_empty()).then_some(map)
}

fn named_port(name: &str, port: u16) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: i32::from(port),
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    }
}

fn probe(path: &str, period_seconds: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::Int(i32::from(ports::OPS)),
            ..HTTPGetAction::default()
        }),
        period_seconds: Some(period_seconds),
        timeout_seconds: Some(2),
        ..Probe::default()
    }
}

fn resources(of: &Resources, gpus: Option<(&str, i32)>) -> ResourceRequirements {
    let map = |given: &BTreeMap<String, tandem_crds::role::Quantity>| -> BTreeMap<String, Quantity> {
        given
            .iter()
            .map(|(name, quantity)| (name.clone(), Quantity(quantity.0.clone())))
            .collect()
    };
    let mut limits = map(&of.limits);
    if let Some((name, count)) = gpus.filter(|(_, count)| *count > 0) {
        limits.insert(name.to_owned(), Quantity(count.to_string()));
    }
    let some = |map: BTreeMap<String, Quantity>| (!map.is_empty()).then_some(map);
    ResourceRequirements {
        limits: some(limits),
        requests: some(map(&of.requests)),
        ..ResourceRequirements::default()
    }
}

fn variable(of: &tandem_crds::pod::EnvVar) -> EnvVar {
    EnvVar {
        name: of.name.clone(),
        value: text(&of.value),
        value_from: of.secret_key_ref.as_ref().map(|secret| EnvVarSource {
            secret_key_ref: Some(SecretKeySelector {
                name: secret.name.clone(),
                key: secret.key.clone(),
                optional: None,
            }),
            ..EnvVarSource::default()
        }),
    }
}

fn models(spec: &PDDeploymentSpec) -> Volume {
    claim("models", &spec.model.source.pvc.claim_name, true)
}

fn claim(name: &str, claim: &str, read_only: bool) -> Volume {
    Volume {
        name: name.to_owned(),
        persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
            claim_name: claim.to_owned(),
            read_only: read_only.then_some(true),
        }),
        ..Volume::default()
    }
}

fn secret(name: &str, secret: &str) -> Volume {
    Volume {
        name: name.to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(secret.to_owned()),
            default_mode: Some(0o440),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    }
}

fn mount(name: &str, path: &str, read_only: bool) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    }
}

/// A volume of the spec's.
fn foreign(name: &str, of: &tandem_crds::pod::Volume) -> Volume {
    if !of.secret.is_empty() {
        return secret(name, &of.secret);
    }
    if !of.claim_name.is_empty() {
        return claim(name, &of.claim_name, of.read_only);
    }
    if !of.config_map.is_empty() {
        return Volume {
            name: name.to_owned(),
            config_map: Some(ConfigMapVolumeSource {
                name: of.config_map.clone(),
                ..ConfigMapVolumeSource::default()
            }),
            ..Volume::default()
        };
    }
    Volume {
        name: name.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource {
            size_limit: text(&of.empty_dir_size).map(Quantity),
            ..EmptyDirVolumeSource::default()
        }),
        ..Volume::default()
    }
}

fn foreign_mount(name: &str, of: &tandem_crds::pod::Volume) -> VolumeMount {
    let read_only = of.read_only || !of.secret.is_empty() || !of.config_map.is_empty();
    mount(name, &of.mount_path, read_only)
}
