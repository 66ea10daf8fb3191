//! When a child is written.

use serde_json::{Value, json};
use tandem_operator::apply::{Need, need, signed};

fn wanted() -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "a", "ownerReferences": [{"uid": "u-1", "name": "chat"}], "labels": {"x": "1"}},
        "data": {"queue-ms": "60000"},
        "list": [{"name": "one", "port": 1}, {"name": "two", "port": 2}],
    })
}

/// As an API server returns it: with defaults, and with what others have added.
fn live() -> Value {
    let mut live = signed(&wanted());
    live["metadata"]["resourceVersion"] = "7".into();
    live["metadata"]["labels"]["theirs"] = "2".into();
    live["list"][0]["protocol"] = "TCP".into();
    live["list"]
        .as_array_mut()
        .expect("a list")
        .insert(1, json!({"name": "theirs"}));
    live
}

#[test]
fn what_is_as_it_should_be_is_not_written_again() {
    assert_eq!(need(Some(&live()), &wanted()), Need::Nothing);
}

#[test]
fn the_same_fields_in_another_order_are_an_update() {
    let mut turned = serde_json::Map::new();
    let wanted = wanted();
    for (key, value) in wanted.as_object().unwrap().iter().rev() {
        turned.insert(key.clone(), value.clone());
    }
    assert_eq!(need(Some(&live()), &turned.into()), Need::Nothing);
}

#[test]
fn what_is_not_there_is_created() {
    assert_eq!(need(None, &wanted()), Need::Create);
}

#[test]
fn another_rendering_is_an_update_also_where_it_only_takes_away() {
    let mut more = wanted();
    more["data"]["stall-ms"] = "1".into();
    assert_eq!(need(Some(&live()), &more), Need::Update);
    let mut less = wanted();
    less["list"].as_array_mut().expect("a list").pop();
    assert_eq!(need(Some(&live()), &less), Need::Update);
}

#[test]
fn what_somebody_changed_or_removed_is_repaired_wherever_it_lies() {
    type Change = fn(&mut Value);
    let changes: [Change; 4] = [
        |live| live["data"]["queue-ms"] = "1".into(),
        |live| live["list"][2]["port"] = 3.into(),
        |live| drop(live["list"].as_array_mut().expect("a list").remove(0)),
        |live| drop(live["metadata"]["labels"].as_object_mut().expect("labels").remove("x")),
    ];
    for (index, change) in changes.iter().enumerate() {
        let mut live = live();
        change(&mut live);
        assert_eq!(need(Some(&live), &wanted()), Need::Repair, "change {index}");
    }
}

#[test]
fn an_object_of_another_owner_is_left_alone() {
    let mut other = live();
    other["metadata"]["ownerReferences"][0]["uid"] = "u-2".into();
    assert_eq!(need(Some(&other), &wanted()), Need::Foreign);
    other["metadata"]
        .as_object_mut()
        .expect("metadata")
        .remove("ownerReferences");
    assert_eq!(need(Some(&other), &wanted()), Need::Foreign);
}

#[test]
fn what_the_api_server_writes_in_its_own_way_is_no_drift() {
    let mut wanted = wanted();
    wanted["spec"] = json!({"readOnly": false, "value": "", "args": [], "affinity": {}});
    for (ours, theirs, same) in [
        ("0.5", "500m", true),
        ("1000m", "1", true),
        ("1024Mi", "1Gi", true),
        ("0.5Gi", "512Mi", true),
        ("1000M", "1G", true),
        ("1500000n", "1500u", true),
        ("1", "1", true),
        ("1", "2", false),
        ("1G", "1Gi", false),
        ("500m", "500M", false),
        ("1", "one", false),
        ("999999999999999999999999999999E", "1", false),
    ] {
        wanted["resources"] = json!({"limits": {"memory": ours}});
        let mut live = signed(&wanted);
        live["spec"] = json!({});
        live["resources"]["limits"]["memory"] = theirs.into();
        let expected = if same { Need::Nothing } else { Need::Repair };
        assert_eq!(need(Some(&live), &wanted), expected, "{ours} as {theirs}");
    }
    // anywhere else a text is a text
    wanted["data"]["queue-ms"] = "1000m".into();
    let mut live = signed(&wanted);
    live["data"]["queue-ms"] = "1".into();
    assert_eq!(need(Some(&live), &wanted), Need::Repair);
}
