//! `docs/manifest.md` against the schema: every field, its default, and nothing else.

use std::collections::BTreeMap;

use serde_json::Value;

use super::definition::{definition, walk};

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

#[test]
fn the_page_lists_every_field_with_its_default_and_no_other() {
    let schema = &definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    let mut fields = BTreeMap::new();
    walk("spec", schema, &mut |path, field| {
        // A pod's lists, and Kubernetes' own types in it, are one field each.
        let inside = path.split('.').nth(2) == Some("pod") && path.split('.').count() > 4;
        let leaf = !field["properties"].is_object() || path.ends_with(".affinity");
        if path.ends_with("[]") || inside || !leaf {
            return;
        }
        let text = field["description"].as_str().unwrap();
        let default = match &field["default"] {
            _ if text.contains("Required.") => "required".to_owned(),
            Value::Null => "none".to_owned(),
            Value::String(text) if text.is_empty() => "empty".to_owned(),
            Value::String(text) => text.clone(),
            value => value.to_string(),
        };
        fields.insert(path.to_owned(), default);
    });
    for (path, default) in [
        ("metadata.name", "required"),
        ("metadata.namespace", "default"),
        ("metadata.labels", "none"),
        ("metadata.annotations", "none"),
    ] {
        fields.insert(path.to_owned(), default.to_owned());
    }
    assert_eq!(rows(), fields);
}
