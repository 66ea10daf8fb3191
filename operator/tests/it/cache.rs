//! What the API server said last.

use std::collections::BTreeSet;

use serde_json::json;
use tandem_operator::cluster::cache::{Cache, Child, Key, Watched};
use tandem_operator::cluster::kinds::Kind;

fn key() -> Key {
    Key {
        namespace: "serving".into(),
        name: "chat".into(),
    }
}

fn child(version: &str, data: &str) -> Child {
    Child::of(&json!({"metadata": {"name": "a", "uid": "u-1", "resourceVersion": version}, "data": data}))
}

fn data(cache: &Cache) -> Option<String> {
    let view = cache.view(&key());
    let child = view.children.get(&(Kind::ConfigMap, "a".to_owned()))?;
    child.object()["data"].as_str().map(str::to_owned)
}

#[test]
fn what_the_operator_wrote_is_not_undone_by_the_watchs_older_word() {
    let cache = Cache::default();
    assert!(cache.put_child(&key(), Kind::ConfigMap, "a", child("9", "mine")));
    assert!(!cache.put_child(&key(), Kind::ConfigMap, "a", child("8", "older")));
    assert!(
        !cache.put_child(&key(), Kind::ConfigMap, "a", child("9", "the same")),
        "no news"
    );
    assert_eq!(data(&cache).as_deref(), Some("mine"));
    assert!(
        cache.put_child(&key(), Kind::ConfigMap, "a", child("10", "newer")),
        "by number, not by text"
    );
    assert_eq!(data(&cache).as_deref(), Some("newer"));
}

#[test]
fn what_a_list_does_not_name_is_gone_and_only_that_of_its_kind_and_namespace() {
    let cache = Cache::default();
    let elsewhere = Key {
        namespace: "other".into(),
        name: "chat".into(),
    };
    for owner in [key(), elsewhere.clone()] {
        cache.put_child(&owner, Kind::ConfigMap, "a", child("1", "x"));
        cache.put_child(&owner, Kind::Service, "a", child("1", "x"));
    }
    let gone = cache.listed(Watched::Children(Kind::ConfigMap), Some("serving"), &BTreeSet::new());
    assert_eq!(gone, [key()]);
    assert_eq!(data(&cache), None);
    assert_eq!(cache.view(&key()).children.len(), 1, "the Service stays");
    assert_eq!(cache.view(&elsewhere).children.len(), 2, "another namespace's stay");
    let watch = |watched| (watched, Some("serving".to_owned()));
    assert!(cache.synced(&[watch(Watched::Children(Kind::ConfigMap))]));
    assert!(!cache.synced(&[watch(Watched::Children(Kind::ConfigMap)), watch(Watched::Pods)]));
}

#[test]
fn a_deployment_that_cannot_be_read_is_no_deployment_until_it_can() {
    let cache = Cache::default();
    let object = serde_json::from_value(json!({
        "apiVersion": "tandem.dev/v1alpha1", "kind": "PDDeployment",
        "metadata": {"name": "chat", "namespace": "serving", "resourceVersion": "5"},
        "spec": {"model": {"name": "m", "source": {"pvc": {"claimName": "c", "path": "p"}}}},
    }));
    let object: tandem_crds::PDDeployment = object.expect("a deployment");
    assert!(cache.put_deployment(&key(), object.clone()));
    assert!(cache.put_broken(&key(), "unknown field".into()));
    assert!(!cache.put_broken(&key(), "unknown field".into()), "told once");
    assert!(cache.view(&key()).object.is_none());
    assert_eq!(cache.counts(), (0, 1));
    assert!(cache.put_deployment(&key(), object));
    assert_eq!(cache.counts(), (1, 0));
}

#[test]
fn deployments_are_counted_by_what_their_conditions_say() {
    let cache = Cache::default();
    let deployment = |name: &str, ready: &str| -> (Key, tandem_crds::PDDeployment) {
        let object = json!({
            "apiVersion": "tandem.dev/v1alpha1", "kind": "PDDeployment",
            "metadata": {"name": name, "namespace": "serving", "resourceVersion": "5"},
            "spec": {"model": {"name": "m", "source": {"pvc": {"claimName": "c", "path": "p"}}}},
            "status": {"conditions": [{
                "type": "Ready", "status": ready, "reason": "Because", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
            }]},
        });
        let key = Key {
            namespace: "serving".into(),
            name: name.into(),
        };
        (key, serde_json::from_value(object).expect("a deployment"))
    };
    for (name, ready) in [("a", "True"), ("b", "False"), ("c", "True")] {
        let (key, object) = deployment(name, ready);
        cache.put_deployment(&key, object);
    }
    let says = |status: &str| {
        cache
            .conditions()
            .get(&("Ready".to_owned(), status.to_owned()))
            .copied()
    };
    assert_eq!((says("True"), says("False"), says("Unknown")), (Some(2), Some(1), None));
    let (key, _) = deployment("c", "");
    cache.remove(Watched::Deployments, &key, "c");
    assert_eq!(says("True"), Some(1), "one that is gone");
}
