//! `docs/manifest.md` against the types: every field, its default, and nothing else.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tandem_crds::PDDeployment;

const PAGE: &str = include_str!("../../../docs/manifest.md");

/// The page's rows: field to default, as written.
fn rows() -> BTreeMap<String, String> {
    let mut rows = BTreeMap::new();
    for line in PAGE.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        for field in cells[0].split(", ") {
            let old = rows.insert(
                field.trim_matches('`').to_owned(),
                cells[1].trim_matches('`').to_owned(),
            );
            assert!(old.is_none(), "{field} is listed twice");
        }
    }
    rows
}

fn leaves(path: &str, value: &Value, into: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                leaves(
                    &if path.is_empty() {
                        name.clone()
                    } else {
                        format!("{path}.{name}")
                    },
                    value,
                    into,
                );
            }
        }
        Value::String(text) => drop(into.insert(path.to_owned(), text.clone())),
        other => drop(into.insert(path.to_owned(), other.to_string())),
    }
}

#[test]
fn the_page_lists_every_field_with_its_default_and_no_other() {
    let mut object = PDDeployment::read(super::minimal()).unwrap();
    // What is left out when empty is still a field.
    object.spec.model.max_length_tokens = Some(1);
    object.metadata.labels.insert("a".into(), "b".into());
    object.metadata.annotations.insert("a".into(), "b".into());
    let mut written = serde_json::to_value(&object).unwrap();
    written["metadata"]["labels"] = json!("none");
    written["metadata"]["annotations"] = json!("none");
    written["spec"]["model"]["revision"] = json!("empty");
    written["spec"]["model"]["maxLengthTokens"] = json!("the model's own");
    written["spec"]["router"]["apiKeysSecretName"] = json!("empty");
    written["metadata"]["name"] = json!("required");
    written["spec"]["model"]["name"] = json!("required");
    written["spec"]["model"]["source"]["pvc"] = json!({"claimName": "required", "path": "required"});
    let mut fields = BTreeMap::new();
    leaves("", &written, &mut fields);
    fields.remove("apiVersion");
    fields.remove("kind");
    assert_eq!(rows(), fields);
}
