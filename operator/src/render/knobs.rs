//! A role's hot fields, in a config map.
//!
//! The container's arguments name its keys, and the kubelet puts the values in when the container starts: a template stays
//! the same while knobs change, and a process that restarts by itself starts with the newest. The process reads
//! arguments only.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, ConfigMapKeySelector, EnvVar, EnvVarSource};
use tandem_crds::{EngineRole, Inputs, OnPrefillFailure, PDDeploymentSpec, PrefixCacheMode, Role, RouterPolicy};
use tandem_plan::Traffic;

use super::meta::Owner;

/// A flag whose value can change without a new template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Knob {
    /// Without `--`.
    pub flag: &'static str,
    /// As the flag takes it.
    pub value: String,
}

/// The knobs of a role, each a flag of its binary.
pub fn of(spec: &PDDeploymentSpec, role: Role) -> Vec<Knob> {
    match role {
        Role::Prefill => engine(spec, &spec.prefill),
        Role::Decode => engine(spec, &spec.decode),
        Role::Router => router(spec),
    }
}

fn engine(spec: &PDDeploymentSpec, role: &EngineRole) -> Vec<Knob> {
    let times = &spec.timeouts;
    vec![
        knob("chunked-prefill-tokens", &role.knobs.chunked_prefill_tokens),
        knob("max-running", &role.knobs.max_running),
        knob(
            "no-prefix-cache",
            &(role.knobs.prefix_cache.mode == PrefixCacheMode::Disabled),
        ),
        millis("queue-ms", times.queue_seconds),
        millis("rendezvous-ms", times.rendezvous_seconds),
        millis("progress-ms", times.progress_seconds),
        millis("stall-ms", times.stall_seconds),
        millis("watchdog-ms", times.inflight_watchdog_seconds),
        millis("lease-ms", times.lease_seconds),
    ]
}

fn router(spec: &PDDeploymentSpec) -> Vec<Knob> {
    let policy = match spec.router.policy {
        RouterPolicy::RoundRobin => "round-robin",
        RouterPolicy::LeastLoaded => "least-loaded",
    };
    let on_prefill_failure = match spec.transfer.on_prefill_failure {
        OnPrefillFailure::Retry => "retry",
        OnPrefillFailure::Recompute => "recompute",
        OnPrefillFailure::Fail => "fail",
    };
    vec![
        knob("policy", &policy),
        knob("on-prefill-failure", &on_prefill_failure),
        millis("queue-ms", spec.timeouts.queue_seconds),
        millis("request-ms", spec.timeouts.request_seconds),
    ]
}

fn knob(flag: &'static str, value: &impl ToString) -> Knob {
    let value = value.to_string();
    Knob { flag, value }
}

fn millis(flag: &'static str, seconds: i32) -> Knob {
    knob(flag, &(i64::from(seconds) * 1000))
}

impl Knob {
    fn variable(&self) -> String {
        format!("TANDEM_KNOB_{}", self.flag.replace('-', "_").to_uppercase())
    }

    /// The container's argument, the same whatever the value.
    pub fn argument(&self) -> String {
        format!("--{}=$({})", self.flag, self.variable())
    }

    /// What the kubelet puts into the argument.
    pub fn source(&self, config_map: &str) -> EnvVar {
        let key = ConfigMapKeySelector {
            name: config_map.to_owned(),
            key: self.flag.to_owned(),
            optional: None,
        };
        EnvVar {
            name: self.variable(),
            value_from: Some(EnvVarSource {
                config_map_key_ref: Some(key),
                ..EnvVarSource::default()
            }),
            ..EnvVar::default()
        }
    }
}

/// The name of a role's config map.
pub fn name(owner: &Owner<'_>, role: Role) -> String {
    owner.child(&format!("{}-knobs", role.field()))
}

/// The annotation with the hash of the knobs that lie in a config map.
pub const HASH: &str = "tandem.dev/knobs";

/// The config map of a role.
pub fn config_map(owner: &Owner<'_>, spec: &PDDeploymentSpec, role: Role) -> ConfigMap {
    let mut metadata = owner.meta(name(owner, role), Some(role));
    let hash = Inputs::of(spec).knobs(role).hash();
    metadata.annotations = Some(BTreeMap::from([(HASH.to_owned(), hash)]));
    let data: BTreeMap<String, String> = of(spec, role)
        .into_iter()
        .map(|knob| (knob.flag.to_owned(), knob.value))
        .collect();
    ConfigMap {
        metadata,
        data: Some(data),
        ..ConfigMap::default()
    }
}

/// The name of the config map with the order to the routers.
pub fn traffic_name(owner: &Owner<'_>) -> String {
    owner.child("router-traffic")
}

/// The order to the routers as flags of theirs.
pub fn traffic_knobs(traffic: Traffic) -> Vec<Knob> {
    let (mode, until) = match traffic {
        Traffic::Admit => ("admit", None),
        Traffic::Reject => ("reject", None),
        Traffic::Queue { until } => ("queue", Some(until)),
    };
    // Always a time, so that the argument is one; only a queue looks at it.
    let until = until.unwrap_or(Timestamp::UNIX_EPOCH);
    vec![knob("traffic", &mode), knob("traffic-until", &until)]
}

/// The config map with the order to the routers: a router that starts takes it from there.
pub fn traffic(owner: &Owner<'_>, traffic: Traffic) -> ConfigMap {
    let data = traffic_knobs(traffic).into_iter();
    ConfigMap {
        metadata: owner.meta(traffic_name(owner), Some(Role::Router)),
        data: Some(data.map(|knob| (knob.flag.to_owned(), knob.value)).collect()),
        ..ConfigMap::default()
    }
}

/// The order that lies in such a config map; none where somebody wrote something else.
pub fn traffic_of(data: &BTreeMap<String, String>) -> Option<Traffic> {
    match data.get("traffic")?.as_str() {
        "admit" => Some(Traffic::Admit),
        "reject" => Some(Traffic::Reject),
        "queue" => {
            let until = data.get("traffic-until")?.parse().ok()?;
            Some(Traffic::Queue { until })
        }
        _ => None,
    }
}
