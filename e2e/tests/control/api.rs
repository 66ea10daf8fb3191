//! The API as the API server holds it, with no operator there: what it refuses, and how it explains itself.

use std::collections::BTreeSet;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use reqwest::Method;
use serde_json::{Value, json};
use tandem_crds::class::class;
use tandem_crds::rules::{self, Rule};
use tandem_e2e::cluster::api::{Client, path};
use tandem_e2e::cluster::{self, PATIENCE};
use tandem_e2e::eventually;

use crate::crd;

/// A manifest that only says what it must.
fn good() -> Value {
    json!({
        "apiVersion": "tandem.dev/v1alpha1",
        "kind": "PDDeployment",
        "metadata": {"name": "good"},
        "spec": {"model": {"name": "m", "source": {"pvc": {"claimName": "models", "path": "m.gguf"}}}},
    })
}

pub(crate) fn merge(into: &mut Value, patch: Value) {
    match (into, patch) {
        (Value::Object(into), Value::Object(patch)) => {
            for (key, value) in patch {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (into, patch) => *into = patch,
    }
}

/// Where a rule lies, the rule, and what breaks it and no other.
type Case = (String, Rule, Value);

fn cases() -> Vec<Case> {
    let spec = |spec: Value| json!({"spec": spec});
    let timeouts = |timeouts: Value| spec(json!({"timeouts": timeouts}));
    let mut cases: Vec<Case> = [
        ("", rules::NAME, json!({"metadata": {"name": "9-lives"}})),
        (
            "",
            rules::NAME,
            json!({"metadata": {"name": "n".repeat(rules::MAX_NAME + 1)}}),
        ),
        (
            "spec",
            rules::BOTH_OR_NEITHER,
            spec(json!({"prefill": {"replicas": 0}})),
        ),
        ("spec", rules::BOTH_OR_NEITHER, spec(json!({"decode": {"replicas": 0}}))),
        (
            "spec",
            rules::GPU_BUDGET,
            spec(
                json!({"gpus": {"budget": 7}, "prefill": {"backend": "Cpu", "gpusPerReplica": 4},
                "decode": {"backend": "Cpu", "gpusPerReplica": 4}}),
            ),
        ),
        (
            "spec",
            rules::RESTART_QUEUE,
            timeouts(json!({"restartQueueSeconds": 60})),
        ),
        (
            "spec",
            rules::PROGRESS_DEADLINE,
            spec(json!({"rollout": {"progressDeadlineSeconds": 60}})),
        ),
        (
            "spec.model.name",
            rules::MODEL_NAME,
            spec(json!({"model": {"name": "two words"}})),
        ),
        (
            "spec.model.revision",
            rules::MODEL_REVISION,
            spec(json!({"model": {"revision": "v1"}})),
        ),
        (
            "spec.model.source.pvc.path",
            rules::INSIDE_CLAIM,
            spec(json!({"model": {"source": {"pvc": {"path": "../m.gguf"}}}})),
        ),
        (
            "spec.kvCache",
            rules::PAGE_TOKENS,
            spec(json!({"kvCache": {"pageTokens": 24}})),
        ),
        (
            "spec.timeouts",
            rules::STALL_BELOW_WATCHDOG,
            timeouts(json!({"stallSeconds": 60, "inflightWatchdogSeconds": 60})),
        ),
        (
            "spec.timeouts",
            rules::WATCHDOG_BELOW_DRAIN,
            timeouts(json!({"inflightWatchdogSeconds": 60, "drainSeconds": 60})),
        ),
    ]
    .map(|(path, rule, patch)| (path.to_owned(), rule, patch))
    .into();

    for role in ["prefill", "decode"] {
        let of = |fields: Value| spec(json!({"gpus": {"budget": 8}, role: fields}));
        let path = format!("spec.{role}");
        let tensor = json!({"backend": "Cpu", "gpusPerReplica": 3, "parallelism": {"tensor": 2}});
        cases.push((path.clone(), rules::TENSOR_DIVIDES, of(tensor)));
        cases.push((path, rules::GPUS_NEED_BACKEND, of(json!({"gpusPerReplica": 1}))));
    }
    for role in ["prefill", "decode", "router"] {
        let of = |fields: Value| spec(json!({role: fields}));
        let gpu = json!({"nvidia.com/gpu": "1"});
        let resources = format!("spec.{role}.resources");
        cases.push((
            resources.clone(),
            rules::REQUESTED_RESOURCES,
            of(json!({"resources": {"requests": gpu}})),
        ));
        cases.push((
            resources,
            rules::LIMITED_RESOURCES,
            of(json!({"resources": {"limits": gpu}})),
        ));
        let pod = |fields: Value| of(json!({"pod": fields}));
        let path = |field: &str| format!("spec.{role}.pod.{field}");
        cases.push((
            path("labels"),
            rules::NOT_OUR_LABELS,
            pod(json!({"labels": {"tandem.dev/role": "x"}})),
        ));
        let both = json!({"name": "A", "value": "1", "secretKeyRef": {"name": "s", "key": "k"}});
        cases.push((path("env[]"), rules::ENV_SOURCE, pod(json!({"env": [both]}))));
        let none = json!({"name": "v", "mountPath": "/v"});
        cases.push((
            path("volumes[]"),
            rules::ONE_VOLUME_SOURCE,
            pod(json!({"volumes": [none]})),
        ));
    }
    cases
}

/// Each rule of a schema with its place; that of a list's items ends with `[]`, that of a map's values with `{}`.
fn rules_of(path: &str, schema: &Value, into: &mut BTreeSet<(String, String)>) {
    for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
        let message = rule["message"].as_str().unwrap_or_default();
        into.insert((path.to_owned(), message.to_owned()));
    }
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() {
            name.clone()
        } else {
            format!("{path}.{name}")
        };
        rules_of(&path, schema, into);
    }
    if schema["items"].is_object() {
        rules_of(&format!("{path}[]"), &schema["items"], into);
    }
    if schema["additionalProperties"].is_object() {
        rules_of(&format!("{path}{{}}"), &schema["additionalProperties"], into);
    }
}

fn schema(crd: &CustomResourceDefinition) -> Value {
    let version = &crd.spec.versions[0];
    let schema = version
        .schema
        .as_ref()
        .and_then(|schema| schema.open_api_v3_schema.as_ref());
    serde_json::to_value(schema).expect("a schema")
}

/// What the API server says of a manifest: the place and text of each thing that it refuses.
async fn refused(client: &Client, namespace: &str, manifest: &Value) -> Result<(), Vec<(String, String)>> {
    let scope = format!("namespaces/{namespace}/");
    let path = path(tandem_crds::API_VERSION, &scope, "pddeployments") + "?dryRun=All";
    let answer = client.call(Method::POST, &path, Some(manifest)).await;
    let Err(refused) = answer else { return Ok(()) };
    let causes = refused.status["details"]["causes"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Err(causes
        .iter()
        .map(|cause| (place(&text(&cause["field"])), text(&cause["message"])))
        .collect())
}

/// `a.b[3].c` as `a.b[].c`; the object itself has no name.
fn place(field: &str) -> String {
    let mut place = String::new();
    let mut inside = false;
    for c in field.chars() {
        inside &= c != ']';
        if !inside {
            place.push(c);
        }
        inside |= c == '[';
    }
    if place == "<nil>" { String::new() } else { place }
}

#[test]
fn each_rule_refuses_its_bad_manifest_in_its_own_words() {
    cluster::test(async |cluster| {
        let crd = crd(cluster).await;
        let client = cluster.admin();
        let namespace = cluster.namespace("rules").await;
        assert_eq!(refused(&client, &namespace, &good()).await, Ok(()), "the good manifest");

        let mut tried = BTreeSet::new();
        for (path, (_, message), patch) in cases() {
            let mut manifest = good();
            merge(&mut manifest, patch.clone());
            let causes = refused(&client, &namespace, &manifest)
                .await
                .expect_err(&format!("{path}: {patch} is taken"));
            // A cause's text begins with the kind of fault and the value.
            let said = |(at, text): &(String, String)| *at == path && text.ends_with(message);
            assert!(
                causes.iter().any(said),
                "{path}: {patch}\nshould be refused with {message:?}\nsaid: {causes:#?}"
            );
            assert_eq!(causes.len(), 1, "{path}: {patch} breaks other rules too: {causes:#?}");
            tried.insert((path, message.to_owned()));
        }
        let mut all = BTreeSet::new();
        rules_of("", &schema(&crd), &mut all);
        let untried: Vec<_> = all.difference(&tried).collect();
        assert!(untried.is_empty(), "rules without a bad manifest: {untried:#?}");
    });
}

/// Each field below `path` with its schema.
fn fields<'a>(path: &str, schema: &'a Value, into: &mut Vec<(String, &'a Value)>) {
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        into.push((path.clone(), schema));
        // Kubernetes' own types speak for themselves.
        if !["affinity", "tolerations"].contains(&name.as_str()) {
            fields(&path, schema, into);
        }
    }
    for below in ["items", "additionalProperties"] {
        if schema[below].is_object() {
            fields(path, &schema[below], into);
        }
    }
}

/// The object that a field or each item of its list is.
fn object(field: &Value) -> &Value {
    if field["items"].is_object() {
        &field["items"]
    } else {
        field
    }
}

fn has_fields(field: &Value) -> bool {
    object(field)["properties"].is_object()
}

/// Text without the breaks and indents of lines.
fn words(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn kubectl_explains_each_field_with_meaning_unit_default_and_what_a_change_restarts() {
    cluster::test(async |cluster| {
        let schema = schema(&crd(cluster).await);
        let explain = async |path: &str| {
            // The API server publishes a schema some time after the CRD is established.
            eventually(path, PATIENCE, async || {
                let output = cluster.kubectl(&["explain", path, "--api-version=tandem.dev/v1alpha1"], "");
                let text = words(&String::from_utf8_lossy(&output.stdout));
                let error = String::from_utf8_lossy(&output.stderr).into_owned();
                output.status.success().then_some(text).ok_or(error)
            })
            .await
        };
        let mut all = Vec::new();
        for part in ["spec", "status"] {
            all.push((format!("pddeployments.{part}"), &schema["properties"][part]));
            fields(&format!("pddeployments.{part}"), &schema["properties"][part], &mut all);
        }
        let mut wrong = Vec::new();
        for (path, field) in &all {
            let said = field["description"].as_str().unwrap_or_default();
            let mut needs = vec![];
            if said.split_whitespace().count() < 2 {
                needs.push("a meaning");
            }
            if path.ends_with("Seconds") && !said.contains("second") {
                needs.push("its unit");
            }
            if let Some(below) = path.strip_prefix("pddeployments.spec.").filter(|_| !has_fields(field)) {
                let class = class(below).unwrap_or_else(|| panic!("{below} is in no class"));
                if !said.contains("Default:") && !said.contains("Required.") {
                    needs.push("its default");
                }
                if !said.contains(&class.to_string()) {
                    needs.push("what a change restarts");
                }
            }
            if !needs.is_empty() {
                wrong.push(format!("{path} lacks {}: {said:?}", needs.join(", ")));
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");

        // One call shows all fields of an object.
        for (path, node) in all.iter().filter(|(_, field)| has_fields(field)) {
            let text = explain(path).await;
            for (name, field) in object(node)["properties"].as_object().into_iter().flatten() {
                let said = words(field["description"].as_str().unwrap_or_default());
                assert!(
                    text.contains(&said),
                    "kubectl explain {path} does not show of {name}: {said}\n{text}"
                );
            }
        }
    });
}
