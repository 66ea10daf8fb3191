//! Manifests that must be read, and manifests that must be refused by name.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod classes;
mod definition;
mod hashes;
mod manifest_page;

use proptest::prelude::*;
use serde_json::{Value, json};
use tandem_crds::{Backend, Manifest, OnPrefillFailure, PrefixCacheMode, RouterPolicy, TypeMeta};

fn minimal() -> Value {
    json!({
        "apiVersion": "tandem.dev/v1alpha1",
        "kind": "PDDeployment",
        "metadata": {"name": "chat"},
        "spec": {"model": {"name": "m", "source": {"pvc": {"claimName": "models", "path": "m/model.gguf"}}}},
    })
}

/// `minimal()` with the value at a dotted path set, its parents made where they are missing.
fn with(path: &str, value: Value) -> Value {
    let mut root = minimal();
    let mut at = &mut root;
    for key in path.split('.') {
        at = at.as_object_mut().unwrap().entry(key).or_insert_with(|| json!({}));
    }
    *at = value;
    root
}

fn read(value: Value) -> Result<Manifest, String> {
    Manifest::read(value).map_err(|error| error.to_string())
}

fn violations(value: Value) -> Vec<String> {
    read(value)
        .unwrap()
        .validate()
        .iter()
        .map(ToString::to_string)
        .collect()
}

#[test]
fn a_minimal_manifest_gets_every_default() {
    let object = read(minimal()).unwrap();
    assert_eq!(object.validate(), []);
    assert_eq!(object.metadata.namespace, "default");
    let spec = object.spec;
    assert_eq!((spec.model.revision.as_str(), spec.model.max_length_tokens), ("", None));
    assert_eq!(spec.kv_cache.page_tokens, 16);
    for role in [&spec.prefill, &spec.decode] {
        assert_eq!((role.replicas, role.backend), (1, Backend::Auto));
        assert_eq!(role.parallelism.tensor, 1);
        assert_eq!((role.knobs.chunked_prefill_tokens, role.knobs.max_running), (128, 32));
        assert_eq!(role.knobs.prefix_cache.mode, PrefixCacheMode::Enabled);
    }
    assert_eq!(spec.router.policy, RouterPolicy::LeastLoaded);
    assert_eq!(spec.transfer.on_prefill_failure, OnPrefillFailure::Retry);
    let t = spec.timeouts;
    assert_eq!(
        (t.queue_seconds, t.rendezvous_seconds, t.progress_seconds),
        (60, 30, 30)
    );
    assert_eq!(
        (t.stall_seconds, t.inflight_watchdog_seconds, t.drain_seconds),
        (10, 60, 90)
    );
    assert_eq!(
        (t.lease_seconds, t.startup_seconds, t.request_seconds),
        (30, 1200, 1800)
    );
}

#[test]
fn a_field_that_does_not_exist_is_refused_by_its_path() {
    for (path, value, expected) in [
        ("spec.scale", json!({}), "scale"),
        ("spec.kvCache.dtype", json!("Auto"), "dtype"),
        ("spec.prefill.memory", json!({"gpuFractionPercent": 90}), "memory"),
        ("spec.prefill.parallelism.data", json!(2), "data"),
        ("spec.prefill.knobs.hostTier", json!({}), "hostTier"),
        ("spec.prefill.pod.hostNetwork", json!(true), "hostNetwork"),
        ("spec.decode.knobs.attention", json!({}), "attention"),
        ("spec.transfer.tls", json!({}), "tls"),
        ("spec.rollout.gates.bench", json!({}), "bench"),
        ("spec.model.source.image", json!({}), "image"),
        ("metadata.uid", json!("x"), "uid"),
        ("status", json!({}), "status"),
    ] {
        let error = read(with(path, value)).unwrap_err();
        let parent = path.rsplit_once(expected).unwrap().0.trim_end_matches('.');
        assert!(
            error.contains(&format!("unknown field `{expected}`")),
            "{path}: {error}"
        );
        assert!(error.starts_with(parent), "{path}: {error}");
    }
}

#[test]
fn a_value_that_does_not_exist_is_refused_by_its_path() {
    for (path, value, expected) in [
        ("spec.prefill.backend", json!("Cuda"), "expected `Auto` or `Cpu`"),
        (
            "spec.router.policy",
            json!("CacheAware"),
            "expected `RoundRobin` or `LeastLoaded`",
        ),
        (
            "spec.transfer.onPrefillFailure",
            json!("retry"),
            "expected one of `Retry`, `Recompute`, `Fail`",
        ),
        ("spec.decode.replicas", json!("two"), "expected i32"),
        ("spec.timeouts.stallSeconds", json!(1.5), "expected i32"),
        ("spec.prefill.knobs.prefixCache.mode", json!(true), "expected"),
    ] {
        let error = read(with(path, value)).unwrap_err();
        assert!(
            error.starts_with(&format!("{path}: ")) && error.contains(expected),
            "{path}: {error}"
        );
    }
}

#[test]
fn a_missing_field_is_refused_by_name() {
    for (path, field) in [
        ("spec.model.source", "pvc"),
        ("spec.model", "name"),
        ("metadata", "name"),
    ] {
        let error = read(with(path, json!({}))).unwrap_err();
        assert!(
            error.starts_with(path) && error.contains(&format!("missing field `{field}`")),
            "{error}"
        );
    }
}

#[test]
fn each_rule_names_field_value_and_remedy() {
    let volume = |source: Value| {
        let mut volume = json!({"name": "v", "mountPath": "/v"});
        volume
            .as_object_mut()
            .unwrap()
            .extend(source.as_object().unwrap().clone());
        json!([volume])
    };
    let label = "is not a DNS label; write 1 to 63";
    for (path, value, expected) in [
        (
            "metadata.name",
            json!("Chat"),
            "metadata.name: \"Chat\": metadata.name is not a name",
        ),
        ("metadata.name", json!("1chat"), "write 1 to 40 of a-z"),
        ("metadata.name", json!("a".repeat(41)), "write 1 to 40 of a-z"),
        (
            "metadata.name",
            json!(""),
            "metadata.name: \"\": metadata.name is not a name",
        ),
        (
            "metadata.namespace",
            json!("-x"),
            "metadata.namespace: \"-x\": is not a DNS label",
        ),
        (
            "spec.model.name",
            json!(""),
            "spec.model.name: \"\": is out of bounds; write 1 to 128 characters",
        ),
        (
            "spec.model.name",
            json!("a b"),
            "spec.model.name: \"a b\": model.name has white space",
        ),
        ("spec.model.source.pvc.claimName", json!("a/b"), label),
        (
            "spec.model.source.pvc.path",
            json!("/m.gguf"),
            "does not name a file inside the claim",
        ),
        (
            "spec.model.source.pvc.path",
            json!("a/../../b"),
            "does not name a file inside the claim",
        ),
        (
            "spec.model.revision",
            json!("abc"),
            "spec.model.revision: \"abc\": model.revision is not a SHA-256 digest",
        ),
        ("spec.model.revision", json!("A".repeat(64)), "is not a SHA-256 digest"),
        (
            "spec.model.maxLengthTokens",
            json!(1),
            "spec.model.maxLengthTokens: 1: is out of bounds; write 2 to",
        ),
        (
            "spec.kvCache.pageTokens",
            json!(24),
            "spec.kvCache.pageTokens: 24: pageTokens is not a power of two",
        ),
        ("spec.gpus.resourceName", json!("gpu"), "is not the name of a resource"),
        (
            "spec.prefill.replicas",
            json!(0),
            "spec.prefill.replicas: 0: one of prefill.replicas",
        ),
        (
            "spec.decode.replicas",
            json!(0),
            "spec.decode.replicas: 0: one of prefill.replicas",
        ),
        (
            "spec.decode.replicas",
            json!(5),
            "spec.rollout.progressDeadlineSeconds: 7200: rollout.progressDeadline",
        ),
        (
            "spec.decode",
            json!({"backend": "Cpu", "gpusPerReplica": 1}),
            "spec.gpus.budget: 0: prefill and decode",
        ),
        (
            "spec.prefill",
            json!({"gpusPerReplica": 1, "replicas": 0}),
            "spec.prefill.backend: Auto: backend Auto never",
        ),
        (
            "spec.prefill.image",
            json!("a b"),
            "spec.prefill.image: \"a b\": has white space; write it without",
        ),
        (
            "spec.router.resources.requests",
            json!({"nvidia.com/gpu": "1"}),
            "requests names another resource",
        ),
        (
            "spec.router.resources.limits",
            json!({"hugepages-2Mi": "1"}),
            "limits names another resource",
        ),
        (
            "spec.router.resources.limits",
            json!({"cpu": "-1"}),
            "spec.router.resources.limits.cpu: \"-1\": is not a",
        ),
        ("spec.router.apiKeysSecretName", json!("A"), label),
        (
            "spec.decode.pod.labels",
            json!({"tandem.dev/role": "x"}),
            "\"tandem.dev/role\": labels of tandem.dev/",
        ),
        (
            "spec.decode.pod.env",
            json!([{"name": "1"}]),
            "is not the name of a variable",
        ),
        (
            "spec.decode.pod.env",
            json!([{"name": "A"}, {"name": "A"}]),
            "\"A\": is there twice",
        ),
        (
            "spec.decode.pod.env",
            json!([{"name": "A", "value": "x", "secretKeyRef": {"name": "s", "key": "k"}}]),
            "has both value and secretKeyRef",
        ),
        (
            "spec.decode.pod.volumes",
            volume(json!({})),
            "has not exactly one source",
        ),
        (
            "spec.decode.pod.volumes",
            volume(json!({"secret": "s", "configMap": "c"})),
            "has not exactly one source",
        ),
        (
            "spec.decode.pod.volumes",
            volume(json!({"secret": "s", "mountPath": "v/w"})),
            "is not an absolute path",
        ),
        (
            "spec.timeouts.restartQueueSeconds",
            json!(2909),
            "spec.timeouts.restartQueueSeconds: 2909: timeouts.restartQueueSeconds is less than",
        ),
        (
            "spec.rollout.progressDeadlineSeconds",
            json!(3179),
            "spec.rollout.progressDeadlineSeconds: 3179: rollout.progressDeadlineSeconds is less than",
        ),
        (
            "spec.timeouts.stallSeconds",
            json!(60),
            "spec.timeouts.stallSeconds: 60: stallSeconds is not below inflightWatchdogSeconds",
        ),
        (
            "spec.timeouts.drainSeconds",
            json!(60),
            "spec.timeouts.inflightWatchdogSeconds: 60: inflightWatchdogSeconds is not below drainSeconds",
        ),
    ] {
        let found = violations(with(path, value.clone()));
        assert!(
            found.iter().any(|line| line.contains(expected)),
            "{path} = {value}: {found:?}"
        );
    }
}

#[test]
fn the_least_and_the_most_of_a_rule_hold() {
    for (path, value) in [
        ("spec.timeouts.restartQueueSeconds", json!(2910)),
        ("spec.rollout.progressDeadlineSeconds", json!(3180)),
        ("metadata.name", json!("a".repeat(40))),
        ("spec.prefill.parallelism.tensor", json!(64)),
    ] {
        assert_eq!(violations(with(path, value)), Vec::<String>::new(), "{path}");
    }
    let mut all = with("spec.gpus.budget", json!(8));
    all["spec"]["prefill"] = json!({"backend": "Cpu", "gpusPerReplica": 4, "parallelism": {"tensor": 2}});
    all["spec"]["decode"] = all["spec"]["prefill"].clone();
    assert_eq!(violations(all.clone()), Vec::<String>::new());
    all["spec"]["decode"]["parallelism"]["tensor"] = json!(3);
    assert_eq!(violations(all).len(), 1);
    let mut rejects = with("spec.timeouts.restartQueueSeconds", json!(1));
    rejects["spec"]["rollout"] = json!({"trafficDuringRestart": "Reject"});
    assert_eq!(violations(rejects), Vec::<String>::new());
}

#[test]
fn both_roles_at_zero_is_a_legal_pause() {
    let mut manifest = with("spec.prefill.replicas", json!(0));
    manifest["spec"]["decode"] = json!({"replicas": 0});
    assert_eq!(violations(manifest), Vec::<String>::new());
}

#[test]
fn another_kind_of_object_is_named_as_such() {
    let check = |api: &str, kind: &str| {
        serde_json::from_value::<TypeMeta>(json!({"apiVersion": api, "kind": kind, "spec": {"x": 1}}))
            .unwrap()
            .check()
    };
    assert!(
        check("apps/v1", "Deployment")
            .unwrap_err()
            .contains("kind: \"Deployment\" is not \"PDDeployment\"")
    );
    assert!(
        check("tandem.dev/v2", "PDDeployment")
            .unwrap_err()
            .contains("write tandem.dev/v1alpha1")
    );
    assert!(serde_json::from_value::<TypeMeta>(json!({})).unwrap().check().is_err());
    check("tandem.dev/v1alpha1", "PDDeployment").unwrap();
}

proptest! {
    /// Whatever is accepted survives being written and read again, and is judged the same.
    #[test]
    fn a_manifest_written_back_reads_the_same(
        replicas in 0..100, stall in -5..120, watchdog in -5..120, drain in -5..120,
        tokens in proptest::option::of(-5..100_000), name in "[a-zA-Z0-9-]{0,70}",
    ) {
        let mut object = read(minimal()).unwrap();
        object.metadata.name = name;
        object.spec.model.max_length_tokens = tokens;
        object.spec.decode.replicas = replicas;
        object.spec.timeouts.stall_seconds = stall;
        object.spec.timeouts.inflight_watchdog_seconds = watchdog;
        object.spec.timeouts.drain_seconds = drain;
        let again = read(serde_json::to_value(&object).unwrap()).unwrap();
        prop_assert_eq!(&again, &object);
        prop_assert_eq!(again.validate(), object.validate());
        if object.validate().is_empty() {
            prop_assert!(0 < stall && stall < watchdog && watchdog < drain);
        }
    }
}
