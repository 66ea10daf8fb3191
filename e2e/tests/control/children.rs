//! What the operator renders, on a real API server with real controllers.

use std::collections::BTreeMap;
use std::process::Command;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod, Secret};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use serde_json::{Value, json};
use tandem_crds::{API_VERSION, Inputs, PDDeployment, Role};
use tandem_e2e::cluster::api::{Api, Client, Patch, path};
use tandem_e2e::cluster::{self, PATIENCE};
use tandem_e2e::eventually;
use tandem_operator::apply::{Need, need, signed};
use tandem_operator::render::meta::{CONTRACT, Owner};
use tandem_operator::render::{around, engine, guard, json as sent, knobs, network, router};
use tandem_plan::Traffic;

use crate::crd;
use crate::fixtures::with_nodes;

/// The manager of fields that children are applied as.
const MANAGER: &str = "tandem-operator";
const IMAGE: &str = "nobody/pulls:this";

pub(crate) fn deployment(namespace: &str) -> PDDeployment {
    let object = json!({
        "apiVersion": "tandem.dev/v1alpha1", "kind": "PDDeployment", "metadata": {"name": "chat", "namespace": namespace},
        "spec": {
            "model": {"name": "m", "source": {"pvc": {"claimName": "models", "path": tandem_e2e::model().file_name().and_then(|name| name.to_str())}}, "maxLengthTokens": 2048},
            "gpus": {"budget": 8},
            "prefill": {"backend": "Cpu", "gpusPerReplica": 4, "resources": {"requests": {"cpu": "0.5", "memory": "1024Mi"}},
                "pod": {"env": [{"name": "EMPTY"}], "tolerations": [{"operator": "Exists"}],
                    "volumes": [{"name": "v", "mountPath": "/v", "emptyDirSize": "0.5Gi"}]}},
            "decode": {"backend": "Cpu", "gpusPerReplica": 4},
            "router": {"apiKeysSecretName": "keys", "replicas": 2},
        },
    });
    serde_json::from_value(object).expect("a deployment")
}

/// Every child of a deployment, its engines on their first revision.
pub(crate) fn children(object: &PDDeployment) -> Vec<Value> {
    let of = |field: &Option<String>| field.clone().expect("name, namespace and uid");
    let meta = &object.metadata;
    let (name, namespace, uid) = (of(&meta.name), of(&meta.namespace), of(&meta.uid));
    let owner = Owner {
        name: &name,
        namespace: &namespace,
        uid: &uid,
    };
    let spec = &object.spec;
    let inputs = Inputs::of(spec);
    let contract = inputs.contract();
    let reach = network::Reach {
        operator_namespace: "tandem-system".into(),
        metrics_namespaces: Vec::new(),
    };
    let mut children = around(&owner, spec, &reach);
    children.extend(Role::ALL.map(|role| sent(knobs::config_map(&owner, spec, role))));
    children.push(sent(knobs::traffic(&owner, Traffic::Admit)));
    children.push(sent(guard::token(&owner, &"t".repeat(32))));
    for (role, replicas) in [
        (Role::Prefill, spec.prefill.replicas),
        (Role::Decode, spec.decode.replicas),
    ] {
        let hash = inputs.role(role, IMAGE, "");
        let revision = engine::Revision {
            role,
            hash: &hash,
            contract: &contract,
            image: IMAGE,
        };
        let template = engine::template(&owner, spec, revision);
        children.push(sent(engine::deployment(&owner, spec, revision, template, replicas)));
        children.push(sent(network::engines(&owner, role, &contract)));
    }
    let hash = inputs.role(Role::Router, IMAGE, "");
    let revision = router::Revision {
        hash: &hash,
        contract: &contract,
        image: IMAGE,
    };
    let template = router::template(&owner, spec, revision);
    children.push(sent(router::deployment(&owner, spec, template, spec.router.replicas)));
    children
}

/// The objects of a child's kind in its namespace.
fn api(client: &Client, object: &Value) -> Api<Value> {
    let kind = object["kind"].as_str().expect("a kind").to_lowercase();
    let plural = kind
        .strip_suffix('y')
        .map_or_else(|| format!("{kind}s"), |stem| format!("{stem}ies"));
    let version = object["apiVersion"].as_str().expect("a version");
    let namespace = object["metadata"]["namespace"].as_str().expect("a namespace");
    Api::at(client, &path(version, &format!("namespaces/{namespace}/"), &plural))
}

pub(crate) fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().expect("a name")
}

pub(crate) async fn apply(client: &Client, object: &Value) {
    let result = api(client, object)
        .patch(name(object), Patch::Apply(MANAGER), &signed(object))
        .await;
    result.unwrap_or_else(|refused| panic!("{} {}: {refused}", object["kind"], name(object)));
}

async fn needed(client: &Client, object: &Value) -> Need {
    match api(client, object).get(name(object)).await {
        Ok(live) => need(Some(&live), object),
        Err(refused) if refused.code == 404 => need(None, object),
        Err(refused) => panic!("{} {}: {refused}", object["kind"], name(object)),
    }
}

/// A new deployment as the API server keeps it: with its defaults and its uid.
pub(crate) async fn create(client: &Client, namespace: &str) -> PDDeployment {
    let api = Api::at(
        client,
        &path(API_VERSION, &format!("namespaces/{namespace}/"), "pddeployments"),
    );
    api.create(&deployment(namespace)).await.expect("a deployment")
}

/// What pods mount: a claim with the model, and a secret with the keys of clients.
pub(crate) async fn models(client: &Client, namespace: &str) {
    let volume: PersistentVolume = serde_json::from_value(json!({
        "metadata": {"name": namespace},
        "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadOnlyMany"], "hostPath": {"path": tandem_e2e::model().parent()},
            "storageClassName": "none", "claimRef": {"namespace": namespace, "name": "models"},
        },
    }))
    .expect("a volume");
    let claim: PersistentVolumeClaim = serde_json::from_value(json!({
        "metadata": {"name": "models"},
        "spec": {
            "accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "none", "volumeName": namespace,
        },
    }))
    .expect("a claim");
    let made = Api::all(client).create(&volume).await;
    made.expect("a volume");
    let made = Api::namespaced(client, namespace).create(&claim).await;
    made.expect("a claim");
    let keys: Secret =
        serde_json::from_value(json!({"metadata": {"name": "keys"}, "stringData": {"api-keys": "k".repeat(32)}}))
            .expect("a secret");
    let made = Api::namespaced(client, namespace).create(&keys).await;
    made.expect("a secret");
}

#[test]
fn rendered_children_run_and_need_no_second_write() {
    cluster::test(async |cluster| {
        crd(cluster).await;
        let (client, namespace) = with_nodes(cluster, "children", &[8]).await;
        models(&client, &namespace).await;
        let object = create(&client, &namespace).await;
        let children = children(&object);
        for child in &children {
            assert_eq!(needed(&client, child).await, Need::Create, "{}", name(child));
            apply(&client, child).await;
        }

        let workloads: Api<Deployment> = Api::namespaced(&client, &namespace);
        eventually("all pods are ready", PATIENCE, async || {
            let mut ready = BTreeMap::new();
            for one in workloads.list("").await {
                let count = one.status.and_then(|status| status.ready_replicas).unwrap_or(0);
                ready.insert(one.metadata.name.unwrap_or_default(), count);
            }
            let sum: i32 = ready.values().sum();
            (ready.len() == 3 && sum == 4)
                .then_some(())
                .ok_or_else(|| format!("{ready:?}"))
        })
        .await;

        // With all that the API server and the controllers have added.
        for child in &children {
            assert_eq!(needed(&client, child).await, Need::Nothing, "{}", name(child));
        }

        // An engine is found by its contract alone.
        let pods: Api<Pod> = Api::namespaced(&client, &namespace);
        let slices: Api<EndpointSlice> = Api::namespaced(&client, &namespace);
        let contract = Inputs::of(&object.spec).contract();
        for role in ["prefill", "decode"] {
            let pod = pods.list(&format!("tandem.dev/role={role}")).await.remove(0);
            assert_eq!(pod.metadata.labels.expect("labels")[CONTRACT], contract);
            let address = pod.status.and_then(|status| status.pod_ip).expect("an address");
            let of = format!("tandem.dev/role={role},{CONTRACT}={contract}");
            eventually("the Service's endpoint", PATIENCE, async || {
                let found = slices.list(&of).await;
                let all: Vec<String> = found
                    .iter()
                    .flat_map(|slice| &slice.endpoints)
                    .flat_map(|endpoint| endpoint.addresses.clone())
                    .collect();
                (all == [address.clone()])
                    .then_some(())
                    .ok_or_else(|| format!("{all:?} is not {address}"))
            })
            .await;
        }
    });
}

#[test]
fn a_change_by_somebody_else_is_seen_and_repaired_once() {
    cluster::test(async |cluster| {
        crd(cluster).await;
        let client = cluster.admin();
        let namespace = cluster.namespace("drift").await;
        let children = children(&create(&client, &namespace).await);
        let knobs = children
            .iter()
            .find(|child| name(child) == "chat-decode-knobs")
            .expect("knobs");
        apply(&client, knobs).await;

        let maps: Api<ConfigMap> = Api::namespaced(&client, &namespace);
        let edit = async |data: Value| {
            let patch = json!({"data": data});
            let edited = maps.patch("chat-decode-knobs", Patch::Merge, &patch).await;
            edited.expect("an edit");
        };
        edit(json!({"theirs": "1"})).await;
        assert_eq!(
            needed(&client, knobs).await,
            Need::Nothing,
            "a foreign field is left alone"
        );
        edit(json!({"max-running": "1"})).await;
        assert_eq!(needed(&client, knobs).await, Need::Repair);
        apply(&client, knobs).await;
        assert_eq!(needed(&client, knobs).await, Need::Nothing);
        let data = maps
            .get("chat-decode-knobs")
            .await
            .expect("the map")
            .data
            .expect("its data");
        assert_eq!((data["max-running"].as_str(), data["theirs"].as_str()), ("32", "1"));
    });
}

#[test]
fn rendered_arguments_are_flags_of_the_binaries() {
    let mut object = deployment("default");
    object.metadata.uid = Some("u-1".into());
    let children = children(&object);
    let of_kind = |kind: &str| {
        children
            .iter()
            .filter(|child| child["kind"] == kind)
            .cloned()
            .collect::<Vec<_>>()
    };
    let maps: BTreeMap<String, Value> = of_kind("ConfigMap")
        .into_iter()
        .map(|map| (name(&map).to_owned(), map))
        .collect();
    let workloads = of_kind("Deployment");
    assert_eq!(workloads.len(), 3);
    for workload in workloads {
        let container = &workload["spec"]["template"]["spec"]["containers"][0];
        // As the kubelet does it: each $(NAME) is a key of a config map.
        let mut args: Vec<String> = serde_json::from_value(container["args"].clone()).expect("arguments");
        for variable in container["env"].as_array().expect("variables") {
            let key = &variable["valueFrom"]["configMapKeyRef"];
            if key.is_null() {
                continue; // the spec's own
            }
            let map = &maps[key["name"].as_str().expect("a map's name")];
            let value = map["data"][key["key"].as_str().expect("a key")]
                .as_str()
                .expect("a value");
            let name = format!("$({})", variable["name"].as_str().expect("a name"));
            args = args.into_iter().map(|arg| arg.replace(&name, value)).collect();
        }
        assert!(!args.iter().any(|arg| arg.contains("$(")), "{args:?}");
        let program = container["command"][0].as_str().expect("a program");
        // A flag that is not there, or a value that it does not take, is an error before the last one is reached.
        let output = Command::new(tandem_e2e::bin(program))
            .args(&args)
            .arg("--help")
            .output()
            .expect("it starts");
        assert!(
            output.status.success(),
            "{program} {args:?}\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    assert_eq!(
        knobs::of(&object.spec, Role::Router).len(),
        4,
        "each is in a config map and thus an argument"
    );
}
