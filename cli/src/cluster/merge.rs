//! What `kubectl apply` sends: a JSON merge patch of three ways.

use serde_json::{Map, Value};

/// Of what was applied last, the file, and what is there: what the file says and is otherwise, and as null what was applied last
/// and is not in the file any more. What others have set stays.
pub fn patch(last: &Value, file: &Value, live: &Value) -> Value {
    let mut patch = Map::new();
    for (name, wanted) in file.as_object().into_iter().flatten() {
        let live = &live[name];
        if wanted.is_object() && live.is_object() {
            let below = self::patch(&last[name], wanted, live);
            if below.as_object().is_some_and(|below| !below.is_empty()) {
                patch.insert(name.clone(), below);
            }
        } else if wanted != live {
            patch.insert(name.clone(), wanted.clone());
        }
    }
    for name in last.as_object().into_iter().flatten().map(|(name, _)| name) {
        if file.get(name).is_none() && live.get(name).is_some() {
            patch.insert(name.clone(), Value::Null);
        }
    }
    Value::Object(patch)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_field_of_others_goes_or_one_that_was_taken_out_stays() {
        let last = json!({"spec": {"decode": {"image": "a", "replicas": 2}, "router": {"replicas": 1}}});
        let file = json!({"spec": {"decode": {"replicas": 3, "pod": {"labels": {"a": "b"}}}, "args": [1, 2]}});
        let live = json!({
            "spec": {"decode": {"image": "a", "replicas": 2, "backend": "Cpu"}, "restart": {"token": "t"}, "args": [1], "router": {"replicas": 1}},
            "status": {},
        });
        let wanted = json!({
            "spec": {"decode": {"image": null, "replicas": 3, "pod": {"labels": {"a": "b"}}}, "args": [1, 2], "router": null},
        });
        assert_eq!(patch(&last, &file, &live), wanted);
        assert_eq!(patch(&file, &file, &file), json!({}));
    }
}
