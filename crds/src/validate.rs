//! What the API server checks of an object, for a file: the schema's bounds and patterns, read from the schema itself, and
//! the rules of [`crate::rules`], with the field's value in what is said.

use std::fmt;
use std::sync::LazyLock;

use serde_json::Value;

use crate::manifest::Manifest;
use crate::pod::Pod;
use crate::role::{Backend, EngineRole, Resources};
use crate::rollout::TrafficDuringRestart;
use crate::rules::{self, Rule};
use crate::spec::PDDeploymentSpec;

/// One rule that a manifest breaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The field, for example `spec.timeouts.stallSeconds`.
    pub path: String,
    /// Its value.
    pub value: String,
    /// What is wrong with it, and what to write instead.
    pub problem: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.path, self.value, self.problem)
    }
}

static SPEC: LazyLock<Value> = LazyLock::new(|| {
    let definition = serde_json::to_value(crate::crd()).unwrap_or_default();
    let spec = definition.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/spec");
    spec.cloned().unwrap_or_default()
});

impl Manifest {
    /// Everything that this object breaks: bounds first, then rules.
    pub fn validate(&self) -> Vec<Violation> {
        let mut found = Violations::default();
        let name = &self.metadata.name;
        let fits = name.len() <= rules::MAX_NAME && dns_label(name) && !name.starts_with(|c: char| c.is_ascii_digit());
        found.check(fits, "metadata.name", &name, rules::NAME);
        let namespace = &self.metadata.namespace;
        if namespace.len() > 63 || !dns_label(namespace) {
            found.add("metadata.namespace", &namespace, meaning(rules::DNS_LABEL).to_owned());
        }
        found.bounds("spec", &SPEC, &serde_json::to_value(&self.spec).unwrap_or_default());
        found.rules(&self.spec);
        found.0
    }
}

#[derive(Default)]
struct Violations(Vec<Violation>);

impl Violations {
    fn add(&mut self, path: &str, value: &dyn fmt::Debug, problem: String) {
        self.0.push(Violation {
            path: path.to_owned(),
            value: format!("{value:?}"),
            problem,
        });
    }

    fn check(&mut self, holds: bool, path: &str, value: &dyn fmt::Debug, rule: Rule) {
        if !holds {
            self.add(path, value, rule.1.to_owned());
        }
    }

    /// The bounds and patterns of a value's schema and of all below.
    fn bounds(&mut self, path: &str, schema: &Value, value: &Value) {
        let limit = |name: &str| schema.get(name).and_then(Value::as_f64);
        let mut range = |size: f64, low: &str, high: &str, of: &str| {
            let (low, high) = (limit(low).unwrap_or(0.0), limit(high).unwrap_or(f64::INFINITY));
            if size < low || size > high {
                self.add(
                    path,
                    &Shown(value),
                    format!("is out of bounds; write {low} to {high}{of}"),
                );
            }
        };
        match value {
            Value::Number(number) => range(number.as_f64().unwrap_or_default(), "minimum", "maximum", ""),
            Value::String(text) => {
                range(text.chars().count() as f64, "minLength", "maxLength", " characters");
                let pattern = schema.get("pattern").and_then(Value::as_str);
                if let Some(pattern) = pattern.filter(|pattern| !matches(pattern, text)) {
                    self.add(path, &Shown(value), meaning(pattern).to_owned());
                }
            }
            Value::Array(items) => {
                range(items.len() as f64, "minItems", "maxItems", " items");
                for (index, item) in items.iter().enumerate() {
                    self.bounds(&format!("{path}[{index}]"), &schema["items"], item);
                }
            }
            Value::Object(fields) => {
                range(fields.len() as f64, "minProperties", "maxProperties", " entries");
                for (name, value) in fields {
                    let schema = schema["properties"]
                        .get(name)
                        .unwrap_or(&schema["additionalProperties"]);
                    self.bounds(&format!("{path}.{name}"), schema, value);
                }
            }
            Value::Null | Value::Bool(_) => {}
        }
    }

    /// What [`rules`] says in CEL.
    fn rules(&mut self, spec: &PDDeploymentSpec) {
        let (t, gates) = (&spec.timeouts, &spec.rollout.gates);
        let (prefill, decode) = (&spec.prefill, &spec.decode);
        let wide = i64::from;
        let gates = wide(gates.health.timeout_seconds) + wide(gates.probe.timeout_seconds);

        let (zero, both) = if prefill.replicas == 0 {
            ("prefill", decode)
        } else {
            ("decode", prefill)
        };
        let lonely = (prefill.replicas == 0) != (decode.replicas == 0) && both.replicas != 0;
        self.check(!lonely, &format!("spec.{zero}.replicas"), &0, rules::BOTH_OR_NEITHER);
        let gpus = |role: &EngineRole| wide(role.replicas) * wide(role.gpus_per_replica);
        let fits = gpus(prefill) + gpus(decode) <= wide(spec.gpus.budget);
        self.check(fits, "spec.gpus.budget", &spec.gpus.budget, rules::GPU_BUDGET);
        let needed = wide(t.drain_seconds) + 2 * wide(t.startup_seconds) + gates;
        let rejects = spec.rollout.traffic_during_restart == TrafficDuringRestart::Reject;
        let (path, value) = ("spec.timeouts.restartQueueSeconds", t.restart_queue_seconds);
        self.check(rejects || wide(value) >= needed, path, &value, rules::RESTART_QUEUE);
        let each = wide(t.drain_seconds) + wide(t.startup_seconds);
        let replicas = wide(prefill.replicas) + wide(decode.replicas);
        let needed = 2 * wide(t.drain_seconds) + replicas * each + gates;
        let (path, value) = (
            "spec.rollout.progressDeadlineSeconds",
            spec.rollout.progress_deadline_seconds,
        );
        self.check(wide(value) >= needed, path, &value, rules::PROGRESS_DEADLINE);

        let model = &spec.model;
        let plain = !model.name.contains(|c: char| c.is_whitespace() || c.is_control());
        self.check(plain, "spec.model.name", &model.name, rules::MODEL_NAME);
        let hex = |text: &str| text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let digest = model.revision.is_empty() || hex(&model.revision);
        self.check(digest, "spec.model.revision", &model.revision, rules::MODEL_REVISION);
        let path = &model.source.pvc.path;
        let inside = path.split('/').all(|part| !["", ".", ".."].contains(&part));
        self.check(inside, "spec.model.source.pvc.path", path, rules::INSIDE_CLAIM);
        let tokens = spec.kv_cache.page_tokens;
        let power = [8, 16, 32, 64, 128, 256].contains(&tokens);
        self.check(power, "spec.kvCache.pageTokens", &tokens, rules::PAGE_TOKENS);

        for (path, role) in [("spec.prefill", prefill), ("spec.decode", decode)] {
            let (gpus, tensor) = (role.gpus_per_replica, role.parallelism.tensor);
            let divides = tensor != 0 && gpus % tensor == 0;
            self.check(
                divides,
                &format!("{path}.parallelism.tensor"),
                &tensor,
                rules::TENSOR_DIVIDES,
            );
            let used = gpus == 0 || role.backend == Backend::Cpu;
            self.check(
                used,
                &format!("{path}.backend"),
                &role.backend,
                rules::GPUS_NEED_BACKEND,
            );
            self.pod(path, &role.resources, &role.pod);
        }
        self.pod("spec.router", &spec.router.resources, &spec.router.pod);

        let (stall, watchdog, drain) = (t.stall_seconds, t.inflight_watchdog_seconds, t.drain_seconds);
        let path = "spec.timeouts.stallSeconds";
        self.check(stall < watchdog, path, &stall, rules::STALL_BELOW_WATCHDOG);
        let path = "spec.timeouts.inflightWatchdogSeconds";
        self.check(watchdog < drain, path, &watchdog, rules::WATCHDOG_BELOW_DRAIN);
    }

    fn pod(&mut self, path: &str, resources: &Resources, pod: &Pod) {
        let known = |name: &&String| ["cpu", "memory", "ephemeral-storage"].contains(&name.as_str());
        let other = |names: &std::collections::BTreeMap<String, _>| names.keys().find(|name| !known(name)).cloned();
        if let Some(name) = other(&resources.requests) {
            self.check(
                false,
                &format!("{path}.resources.requests"),
                &name,
                rules::REQUESTED_RESOURCES,
            );
        }
        if let Some(name) = other(&resources.limits) {
            self.check(
                false,
                &format!("{path}.resources.limits"),
                &name,
                rules::LIMITED_RESOURCES,
            );
        }
        let ours = |key: &&String| key.starts_with("tandem.dev/") || key.starts_with("app.kubernetes.io/");
        if let Some(key) = pod.labels.keys().find(ours) {
            self.check(false, &format!("{path}.pod.labels"), key, rules::NOT_OUR_LABELS);
        }
        for variable in &pod.env {
            let one = variable.value.is_empty() || variable.secret_key_ref.is_none();
            self.check(one, &format!("{path}.pod.env"), &variable.name, rules::ENV_SOURCE);
        }
        for volume in &pod.volumes {
            let sources = [
                &volume.secret,
                &volume.config_map,
                &volume.claim_name,
                &volume.empty_dir_size,
            ];
            let one = sources.iter().filter(|source| !source.is_empty()).count() == 1;
            self.check(
                one,
                &format!("{path}.pod.volumes"),
                &volume.name,
                rules::ONE_VOLUME_SOURCE,
            );
        }
        self.once(&format!("{path}.pod.env"), pod.env.iter().map(|item| &item.name));
        self.once(
            &format!("{path}.pod.volumes"),
            pod.volumes.iter().map(|item| &item.name),
        );
        self.once(
            &format!("{path}.pod.imagePullSecrets"),
            pod.image_pull_secrets.iter().map(|item| &item.name),
        );
    }

    /// Lists that are maps by name.
    fn once<'a>(&mut self, path: &str, names: impl Iterator<Item = &'a String>) {
        let mut names: Vec<_> = names.collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            self.add(path, pair[0], "is there twice; write each name once".to_owned());
        }
    }
}

/// A JSON value as it is written.
struct Shown<'a>(&'a Value);

impl fmt::Debug for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

fn dns_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !text.is_empty() && text.chars().all(inner) && !text.starts_with('-') && !text.ends_with('-')
}

/// Whether a text fits one of the patterns of [`rules`]; a test holds this to what the patterns say.
fn matches(pattern: &str, text: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match pattern {
        rules::DNS_LABEL => dns_label(text),
        rules::DNS_LABEL_OR_EMPTY => text.is_empty() || dns_label(text),
        rules::RESOURCE_NAME => text.split_once('/').is_some_and(|(domain, name)| {
            let edges = |text: &str, edge: fn(char) -> bool| text.starts_with(edge) && text.ends_with(edge);
            let lower = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
            edges(domain, lower)
                && edges(name, |c| c.is_ascii_alphanumeric())
                && domain.chars().all(|c| lower(c) || c == '-' || c == '.')
                && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        }),
        // `\s` is ASCII's white space in the API server's patterns.
        rules::NO_SPACES => !text.contains(['\t', '\n', '\x0c', '\r', ' ']),
        rules::QUANTITY => {
            let suffix = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
            let number = &text[..text.len() - suffix.len()];
            let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
            let unit = suffix.strip_suffix('i').map_or_else(
                || suffix.is_empty() || ["n", "u", "m", "k", "M", "G", "T", "P", "E"].contains(&suffix),
                |unit| ["K", "M", "G", "T", "P", "E"].contains(&unit),
            );
            digits(whole) && digits(fraction) && unit
        }
        rules::ENV_NAME => {
            let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
            !text.is_empty() && text.chars().all(word) && !text.starts_with(|c: char| c.is_ascii_digit())
        }
        rules::ABSOLUTE_PATH => text.len() > 1 && text.starts_with('/') && !text[1..].starts_with('\n'),
        _ => false,
    }
}

/// What a pattern asks for.
fn meaning(pattern: &str) -> &'static str {
    match pattern {
        rules::DNS_LABEL | rules::DNS_LABEL_OR_EMPTY => {
            "is not a DNS label; write 1 to 63 of a-z, 0-9 and -, with a letter or digit at both ends"
        }
        rules::RESOURCE_NAME => "is not the name of a resource; write a domain and a name, such as nvidia.com/gpu",
        rules::NO_SPACES => "has white space; write it without",
        rules::QUANTITY => "is not a quantity; write a number with a unit, such as 500m, 4 or 16Gi",
        rules::ENV_NAME => "is not the name of a variable; write letters, digits and _, with no digit in front",
        rules::ABSOLUTE_PATH => "is not an absolute path; write one such as /data",
        _ => "does not fit its pattern",
    }
}
