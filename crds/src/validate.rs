//! The rules that no single type can hold; each will be a CEL rule of the schema too.

use std::fmt;
use std::ops::RangeInclusive;

use crate::spec::{EngineRole, Model, PDDeployment, Timeouts};

/// A DNS label's bound.
const MAX_LABEL: usize = 63;
/// Bound of `model.name`.
const MAX_MODEL_NAME: usize = 128;
/// Bound of `model.source.pvc.path`.
const MAX_PATH: usize = 1024;
/// A day: no deadline of a request or of a process is longer.
const MAX_SECONDS: i32 = 86_400;

/// One rule that a manifest breaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The field, for example `spec.timeouts.stallSeconds`.
    pub path: String,
    /// Its value.
    pub value: String,
    /// What is wrong with it.
    pub problem: String,
    /// What to write instead.
    pub remedy: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} {}; {}", self.path, self.value, self.problem, self.remedy)
    }
}

impl PDDeployment {
    /// Every rule that this object breaks, in the order of the fields.
    pub fn validate(&self) -> Vec<Violation> {
        let mut rules = Rules::default();
        rules.label("metadata.name", &self.metadata.name);
        rules.label("metadata.namespace", &self.metadata.namespace);
        let spec = &self.spec;
        model(&mut rules, &spec.model);
        rules.range("spec.kvCache.pageTokens", spec.kv_cache.page_tokens, 8..=256);
        if !spec.kv_cache.page_tokens.unsigned_abs().is_power_of_two() {
            rules.add(
                "spec.kvCache.pageTokens",
                spec.kv_cache.page_tokens,
                "is not a power of two",
                "write 8, 16, 32, 64, 128 or 256",
            );
        }
        role(&mut rules, "spec.prefill", &spec.prefill);
        role(&mut rules, "spec.decode", &spec.decode);
        if (spec.prefill.replicas == 0) != (spec.decode.replicas == 0) {
            let (zero, other) = if spec.prefill.replicas == 0 {
                ("prefill", "decode")
            } else {
                ("decode", "prefill")
            };
            rules.add(
                &format!("spec.{zero}.replicas"),
                0,
                &format!("leaves {other} without a peer"),
                "set both replicas to zero or neither",
            );
        }
        if !spec.router.api_keys_secret_name.is_empty() {
            rules.label("spec.router.apiKeysSecretName", &spec.router.api_keys_secret_name);
        }
        timeouts(&mut rules, &spec.timeouts);
        rules.broken
    }
}

fn model(rules: &mut Rules, model: &Model) {
    let name = &model.name;
    if name.is_empty()
        || name.chars().count() > MAX_MODEL_NAME
        || name.chars().any(|c| c.is_whitespace() || c.is_control())
    {
        rules.add(
            "spec.model.name",
            format!("{name:?}"),
            "is not a model name",
            &format!("write 1 to {MAX_MODEL_NAME} characters without spaces"),
        );
    }
    rules.label("spec.model.source.pvc.claimName", &model.source.pvc.claim_name);
    let path = &model.source.pvc.path;
    let inside = !path.is_empty()
        && path.len() <= MAX_PATH
        && !path.contains('\0')
        && path
            .split('/')
            .all(|part| !part.is_empty() && part != "." && part != "..");
    if !inside {
        rules.add(
            "spec.model.source.pvc.path",
            format!("{path:?}"),
            "does not name a file inside the claim",
            "write a relative path without \"..\", such as smollm2/model.gguf",
        );
    }
    let revision = &model.revision;
    let hex = revision.len() == 64 && revision.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if !revision.is_empty() && !hex {
        rules.add(
            "spec.model.revision",
            format!("{revision:?}"),
            "is not a SHA-256 digest",
            "write its 64 lower-case hex digits (sha256sum prints them), or leave it empty",
        );
    }
    if let Some(tokens) = model.max_length_tokens {
        rules.range("spec.model.maxLengthTokens", tokens, 2..=16_777_216);
    }
}

fn role(rules: &mut Rules, path: &str, role: &EngineRole) {
    rules.range(&format!("{path}.replicas"), role.replicas, 0..=64);
    rules.range(&format!("{path}.parallelism.tensor"), role.parallelism.tensor, 1..=64);
    rules.range(
        &format!("{path}.knobs.chunkedPrefillTokens"),
        role.knobs.chunked_prefill_tokens,
        1..=65_536,
    );
    rules.range(&format!("{path}.knobs.maxRunning"), role.knobs.max_running, 1..=4096);
}

fn timeouts(rules: &mut Rules, t: &Timeouts) {
    for (field, seconds) in [
        ("queueSeconds", t.queue_seconds),
        ("rendezvousSeconds", t.rendezvous_seconds),
        ("progressSeconds", t.progress_seconds),
        ("stallSeconds", t.stall_seconds),
        ("inflightWatchdogSeconds", t.inflight_watchdog_seconds),
        ("leaseSeconds", t.lease_seconds),
        ("drainSeconds", t.drain_seconds),
        ("startupSeconds", t.startup_seconds),
        ("requestSeconds", t.request_seconds),
    ] {
        rules.range(&format!("spec.timeouts.{field}"), seconds, 1..=MAX_SECONDS);
    }
    if t.stall_seconds >= t.inflight_watchdog_seconds {
        rules.add(
            "spec.timeouts.stallSeconds",
            t.stall_seconds,
            &format!("is not below inflightWatchdogSeconds ({})", t.inflight_watchdog_seconds),
            "lower it, or the watchdog ends a transfer before its own timer can say why",
        );
    }
    if t.inflight_watchdog_seconds >= t.drain_seconds {
        rules.add(
            "spec.timeouts.inflightWatchdogSeconds",
            t.inflight_watchdog_seconds,
            &format!("is not below drainSeconds ({})", t.drain_seconds),
            "raise drainSeconds, or a stopping process is killed while the watchdog still lets a request wait",
        );
    }
}

#[derive(Default)]
struct Rules {
    broken: Vec<Violation>,
}

impl Rules {
    fn add(&mut self, path: &str, value: impl fmt::Display, problem: &str, remedy: &str) {
        self.broken.push(Violation {
            path: path.to_owned(),
            value: value.to_string(),
            problem: problem.to_owned(),
            remedy: remedy.to_owned(),
        });
    }

    fn range(&mut self, path: &str, value: i32, bounds: RangeInclusive<i32>) {
        if !bounds.contains(&value) {
            let (low, high) = bounds.into_inner();
            self.add(path, value, "is out of bounds", &format!("write {low} to {high}"));
        }
    }

    fn label(&mut self, path: &str, value: &str) {
        let edge = |c: Option<u8>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        let bytes = value.as_bytes();
        let inner = bytes
            .iter()
            .all(|&c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-');
        if bytes.len() > MAX_LABEL || !inner || !edge(bytes.first().copied()) || !edge(bytes.last().copied()) {
            self.add(
                path,
                format!("{value:?}"),
                "is not a DNS label",
                &format!("write 1 to {MAX_LABEL} of a-z, 0-9 and -, with a letter or digit at both ends"),
            );
        }
    }
}
