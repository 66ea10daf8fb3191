//! The table of classes against the schema and against what the hashes do with it.

use serde_json::{Value, json};
use tandem_crds::class::CLASSES;
use tandem_crds::{Class, Inputs, Manifest, Role, class};

use super::definition::{definition, walk};

fn inputs(path: &str, value: Value) -> Inputs {
    Inputs::of(&Manifest::read(super::with(path, value)).unwrap().spec)
}

#[test]
fn every_entry_of_the_table_is_a_field_and_none_hides_another() {
    let schema = &definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    let mut fields = Vec::new();
    walk("", schema, &mut |path, _| fields.push(path.to_owned()));
    for (index, (path, _)) in CLASSES.iter().enumerate() {
        assert!(fields.iter().any(|field| field == path), "{path} is no field");
        let above = CLASSES[..index]
            .iter()
            .find(|(above, _)| path.starts_with(&format!("{above}.")));
        assert_eq!(above, None, "{path} is decided twice");
    }
    assert_eq!(class("model"), None);
    assert_eq!(class("model.nameX"), None);
    assert_eq!(class("prefill.pod.env"), class("prefill.pod"));
}

/// A value of each field that is not its default.
fn other(path: &str, schema: &Value) -> Value {
    let field = path.split('.').fold(schema, |at, name| &at["properties"][name]);
    if let Some(values) = field["enum"].as_array() {
        return values.iter().find(|value| **value != field["default"]).unwrap().clone();
    }
    match (path, field["type"].as_str().unwrap()) {
        ("model.revision", _) => json!("ab".repeat(32)),
        ("gpus.resourceName", _) => json!("amd.com/gpu"),
        (_, "integer") => json!(field["default"].as_i64().unwrap_or(2) * 2 + 2),
        (_, "string") => json!("other"),
        (_, "boolean") => json!(true),
        (_, "array") if path.ends_with("tolerations") => json!([{"key": "other"}]),
        (_, "array") => json!([{"name": "other", "mountPath": "/other"}]),
        (_, "object") if path.ends_with("affinity") => json!({"nodeAffinity": {}, "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "other"}]}}),
        (_, "object") => json!({"cpu": "1"}),
        other => panic!("{other:?}"),
    }
}

/// Each field of the schema, changed alone: it moves the hashes of its class and no other.
#[test]
fn a_change_of_a_field_moves_exactly_the_hashes_of_its_class() {
    let schema = &definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    let mut fields = Vec::new();
    walk("", schema, &mut |path, field| {
        let pod_list = field["type"] == "array" && !path.ends_with("[]");
        let inside = path.contains(".pod.") && path.split('.').count() > 3;
        if !path.ends_with("[]")
            && !inside
            && (!field["properties"].is_object() || path.ends_with("affinity") || pod_list)
        {
            fields.push(path.to_owned());
        }
    });
    let before = inputs("metadata.name", json!("chat"));
    let role = |inputs: &Inputs, role| inputs.role(role, "image", "");
    for path in fields {
        let mut value = other(&path, schema);
        if path.ends_with("imagePullSecrets") || path.ends_with("env") {
            value = json!([{"name": "other"}]);
        }
        let after = inputs(&format!("spec.{path}"), value);
        let moved: Vec<Role> = Role::ALL
            .into_iter()
            .filter(|&r| role(&before, r) != role(&after, r))
            .collect();
        let hot: Vec<Role> = Role::ALL
            .into_iter()
            .filter(|&r| before.knobs(r) != after.knobs(r))
            .collect();
        let contract = before.contract() != after.contract();
        let target = before.target() != after.target();
        let expected: (&[Role], &[Role], bool, bool) = match class(&path).unwrap() {
            Class::Contract => (&Role::ALL, &[], true, true),
            // The image that counts is the one resolved.
            Class::Restart(_) if path.split('.').next_back() == Some("image") => (&[], &[], false, true),
            Class::Restart(roles) => (roles, &[], false, true),
            Class::Hot(roles) => (&[], roles, false, true),
            Class::Scale(_) => (&[], &[], false, true),
            Class::Operator => (&[], &[], false, false),
        };
        assert_eq!((&*moved, &*hot, contract, target), expected, "{path}");
        let changes = after.changes(&before);
        assert_eq!(changes.is_empty(), !target, "{path}: {changes:?}");
        assert!(
            changes.iter().all(|change| change.path.starts_with(&path)),
            "{path}: {changes:?}"
        );
    }
}
