//! The `CustomResourceDefinition`: the YAML beside the crate, and what its schema has to say everywhere.

use serde_json::{Value, json};
use tandem_crds::{Manifest, class};

const YAML: &str = include_str!("../../../charts/tandem-crds/templates/pddeployments.yaml");

pub fn definition() -> Value {
    serde_json::to_value(tandem_crds::crd()).unwrap()
}

fn schema() -> Value {
    definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

/// Calls `visit` with the path and schema of each field below, lists and maps walked through.
pub fn walk(path: &str, schema: &Value, visit: &mut impl FnMut(&str, &Value)) {
    for inner in ["items", "additionalProperties"] {
        if schema[inner].is_object() {
            visit(&format!("{path}[]"), &schema[inner]);
            walk(path, &schema[inner], visit);
        }
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let below = if path.is_empty() {
            name.clone()
        } else {
            format!("{path}.{name}")
        };
        visit(&below, field);
        walk(&below, field, visit);
    }
}

#[test]
fn the_yaml_of_the_chart_is_the_definition() {
    let written = serde_saphyr::to_string(&tandem_crds::crd()).unwrap();
    assert!(
        written == YAML,
        "write it anew: cargo build --release --workspace --example crd && target/release/examples/crd > charts/tandem-crds/templates/pddeployments.yaml"
    );
    let read: Value = serde_saphyr::from_str(YAML).unwrap();
    assert_eq!(read["metadata"]["name"], "pddeployments.tandem.dev");
}

#[test]
fn every_field_tells_its_meaning_its_default_and_what_a_change_restarts() {
    let schema = schema();
    let mut leaves = 0;
    walk("", &schema["properties"]["spec"], &mut |path, field| {
        if path.ends_with("[]") {
            return;
        }
        let text = field["description"].as_str().unwrap_or_default();
        let kubernetes = path.contains(".affinity.") || path.contains(".tolerations.");
        let begins = |c: char| kubernetes || c.is_uppercase() || c == '`';
        assert!(text.len() > 20 && text.starts_with(begins), "{path}: {text:?}");
        if field["properties"].is_object() {
            return;
        }
        leaves += 1;
        assert!(
            text.contains("Default: ") || text.contains("Required."),
            "{path}: {text:?}"
        );
        assert!(text.contains("A change "), "{path}: {text:?}");
        let name = path.rsplit('.').next().unwrap();
        for (suffix, unit) in [("Seconds", "second"), ("Tokens", "oken")] {
            assert!(
                kubernetes || !name.ends_with(suffix) || text.contains(unit),
                "{path} names no unit: {text:?}"
            );
        }
    });
    assert!(leaves > 80, "{leaves}");
    walk("", &schema["properties"]["status"], &mut |path, field| {
        let text = field["description"].as_str().unwrap_or_default();
        assert!(path.ends_with("[]") || text.len() > 5, "{path}: {text:?}");
    });
}

#[test]
fn every_string_list_and_map_is_bounded_and_every_number_has_a_minimum() {
    let schema = schema();
    walk("", &schema, &mut |path, field| {
        let has = |limit: &str| assert!(field.get(limit).is_some(), "{path} has no {limit}: {field}");
        match field["type"].as_str() {
            Some("string") if field.get("enum").is_none() && field["format"] != "date-time" => has("maxLength"),
            Some("array") => has("maxItems"),
            Some("object") if field.get("additionalProperties").is_some() => has("maxProperties"),
            _ => {}
        }
    });
    walk("", &schema["properties"]["spec"], &mut |path, field| {
        if field["type"] == "integer" && !path.contains(".pod.") {
            assert!(
                field.get("minimum").is_some() && field.get("maximum").is_some(),
                "{path}: {field}"
            );
        }
    });
}

#[test]
fn every_rule_has_a_message_of_one_line_with_a_remedy() {
    let mut rules = 0;
    let mut check = |path: &str, field: &Value| {
        for rule in field["x-kubernetes-validations"].as_array().into_iter().flatten() {
            rules += 1;
            let message = rule["message"].as_str().unwrap_or_default();
            assert!(message.contains("; ") && !message.contains('\n'), "{path}: {rule}");
        }
    };
    let schema = schema();
    check("", &schema);
    walk("", &schema, &mut check);
    // Those of a role's resources and pod stand there once for each role.
    assert_eq!(
        rules,
        11 + 2 * 2 + 3 * 5,
        "a rule is declared and not attached, or the other way round"
    );
}

#[test]
fn lists_with_names_are_maps_by_name_and_conditions_by_type() {
    let mut maps = Vec::new();
    walk("", &schema(), &mut |path, field| {
        if field["x-kubernetes-list-type"] == "map" && !path.contains(".affinity.") {
            maps.push(format!(
                "{path} by {}",
                field["x-kubernetes-list-map-keys"][0].as_str().unwrap()
            ));
        }
    });
    for expected in [
        "status.conditions by type",
        "status.roles by name",
        "status.gates by name",
    ] {
        assert!(maps.iter().any(|map| map == expected), "{expected}: {maps:?}");
    }
    for role in ["prefill", "decode", "router"] {
        for list in ["env", "volumes", "imagePullSecrets"] {
            let expected = format!("spec.{role}.pod.{list} by name");
            assert!(maps.contains(&expected), "{expected}: {maps:?}");
        }
    }
}

#[test]
fn columns_point_at_fields_that_exist() {
    let version = &definition()["spec"]["versions"][0];
    let columns = version["additionalPrinterColumns"].as_array().unwrap();
    let names: Vec<_> = columns.iter().map(|column| column["name"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "Ready", "Prefill", "Decode", "Router", "Step", "Revision", "Age", "Reason", "LastGood"
        ]
    );
    for column in columns {
        let path = column["jsonPath"].as_str().unwrap();
        let mut at = &schema();
        for part in path
            .trim_start_matches('.')
            .split('.')
            .filter(|part| !part.starts_with("type=="))
        {
            if part == "metadata" {
                return;
            }
            let (name, list) = part.split_once('[').map_or((part, false), |(name, _)| (name, true));
            let name = name.split(')').next_back().unwrap().trim_start_matches(']');
            if name.is_empty() || name.contains('=') {
                continue;
            }
            at = &at["properties"][name];
            assert!(at.is_object(), "{path}: {part}");
            if list {
                at = &at["items"];
            }
        }
    }
}

/// What the bounds of the schema refuse, `validate` refuses, and what they allow it allows.
#[test]
fn a_file_is_held_to_the_bounds_of_the_schema() {
    let mut numbers = Vec::new();
    walk("spec", &schema()["properties"]["spec"], &mut |path, field| {
        if let (Some(low), Some(high)) = (field["minimum"].as_f64(), field["maximum"].as_f64())
            && !path.contains(".pod.")
        {
            numbers.push((path.to_owned(), low as i64, high as i64));
        }
    });
    assert!(numbers.len() > 25, "{numbers:?}");
    for (path, low, high) in numbers {
        for (value, refused) in [(low - 1, true), (low, false), (high, false), (high + 1, true)] {
            let manifest = Manifest::read(super::with(&path, json!(value))).unwrap();
            let found = manifest.validate();
            let bounds = found
                .iter()
                .any(|violation| violation.path == path && violation.problem.contains("bounds"));
            assert_eq!(bounds, refused, "{path} = {value}: {found:?}");
        }
    }
}

#[test]
fn every_field_of_the_schema_has_a_class() {
    walk("", &schema()["properties"]["spec"], &mut |path, field| {
        if !path.ends_with("[]") && !field["properties"].is_object() {
            assert!(class(path).is_some(), "{path} has no class");
        }
    });
}

/// `kubectl apply` writes the object into an annotation, which may have 256 KiB.
#[test]
fn the_definition_can_be_applied_by_kubectl() {
    let bytes = serde_json::to_string(&definition()).unwrap().len();
    assert!(bytes < 200_000, "{bytes}");
}
