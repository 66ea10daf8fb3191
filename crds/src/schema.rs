//! The `CustomResourceDefinition`: the derived schema with what the types cannot say.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube_core::CustomResourceExt as _;
use serde_json::{Map, Value, json};

use crate::class::class;
use crate::spec::PDDeployment;

/// Bounds of what Kubernetes' own types leave open.
const MAX_STRING: u64 = 1024;
const MAX_ITEMS: u64 = 32;
const MAX_ENTRIES: u64 = 64;

/// The definition as it is installed: every field's text tells its default and what a change restarts, and every string,
/// list and map has a bound.
pub fn crd() -> CustomResourceDefinition {
    #[expect(clippy::expect_used, reason = "derived from types alone: a test builds it")]
    let mut definition = serde_json::to_value(PDDeployment::crd()).expect("a definition is JSON");
    if let Some(object) = definition.pointer_mut("/spec/versions/0/schema/openAPIV3Schema") {
        bound(object);
        if let Some(spec) = object.pointer_mut("/properties/spec") {
            describe("", spec);
        }
    }
    #[expect(clippy::expect_used, reason = "derived from types alone: a test builds it")]
    serde_json::from_value(definition).expect("JSON is a definition")
}

/// Gives each string, list and map below a bound where it has none.
fn bound(schema: &mut Value) {
    let Some(schema) = schema.as_object_mut() else { return };
    let (limit, value) = match schema.get("type").and_then(Value::as_str) {
        Some("string") if !schema.contains_key("enum") && schema.get("format") != Some(&json!("date-time")) => {
            ("maxLength", MAX_STRING)
        }
        Some("array") => ("maxItems", MAX_ITEMS),
        Some("object") if schema.contains_key("additionalProperties") => ("maxProperties", MAX_ENTRIES),
        _ => ("", 0),
    };
    if !limit.is_empty() {
        schema.entry(limit).or_insert_with(|| value.into());
    }
    below(schema).for_each(bound);
}

/// The schemas of an object's fields, of a list's items and of a map's values.
fn below(schema: &mut Map<String, Value>) -> impl Iterator<Item = &mut Value> {
    schema.iter_mut().flat_map(|(key, value)| -> Vec<&mut Value> {
        match key.as_str() {
            "properties" => value
                .as_object_mut()
                .map(|fields| fields.values_mut().collect())
                .unwrap_or_default(),
            "items" | "additionalProperties" => vec![value],
            _ => Vec::new(),
        }
    })
}

/// Adds to each field's text its default and what a change of it does.
fn describe(path: &str, schema: &mut Value) {
    if let Some(items) = schema.get_mut("items") {
        describe(path, items);
    }
    let required = schema.get("required").cloned().unwrap_or_default();
    let Some(fields) = schema.get_mut("properties").and_then(Value::as_object_mut) else {
        return;
    };
    for (name, field) in fields {
        let below = if path.is_empty() {
            name.clone()
        } else {
            format!("{path}.{name}")
        };
        describe(&below, field);
        let is_required = required
            .as_array()
            .is_some_and(|names| names.iter().any(|known| known == name));
        let mut text = field
            .get("description")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        if field.get("properties").is_none() {
            text = format!("{text} {}", default(field, is_required));
        }
        if let Some(class) = class(&below) {
            text = format!("{text} {class}");
        }
        field["description"] = text.into();
    }
}

fn default(field: &Value, required: bool) -> String {
    match field.get("default") {
        _ if required => "Required.".to_owned(),
        None => "Default: none.".to_owned(),
        Some(Value::String(text)) if text.is_empty() => "Default: empty.".to_owned(),
        Some(Value::String(text)) => format!("Default: {text}."),
        Some(value) => format!("Default: {value}."),
    }
}
