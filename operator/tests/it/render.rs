//! What is rendered, as it is sent. `golden/*.yaml` holds it for people to read; a difference is shown by the test.

use std::path::PathBuf;

use k8s_openapi::api::core::v1::PodTemplateSpec;
use serde_json::Value;
use tandem_crds::{PDDeploymentSpec, Role};
use tandem_operator::render::meta::Owner;
use tandem_operator::render::{around, engine, guard, json, knobs, network, router};
use tandem_plan::Traffic;

const OWNER: Owner<'static> = Owner {
    name: "chat",
    namespace: "serving",
    uid: "2f6a1f0e-5f0c-4b0e-9d51-3a5d2a1c0b7e",
};
const CONTRACT: &str = "k-3e90aa11bb";

fn spec(more: &Value) -> PDDeploymentSpec {
    let mut spec = serde_json::json!({"model": {"name": "smollm2", "source": {"pvc": {"claimName": "models", "path": "smollm2/model.gguf"}}}});
    for (key, value) in more.as_object().expect("fields") {
        spec[key] = value.clone();
    }
    serde_json::from_value(spec).expect("a spec")
}

fn of(role: Role) -> engine::Revision<'static> {
    engine::Revision {
        role,
        hash: match role {
            Role::Prefill => "p-7c1d000001",
            Role::Decode | Role::Router => "d-9f2e000001",
        },
        contract: CONTRACT,
        image: "registry.example/tandem-engine:0.1.0",
    }
}

const ROUTER: router::Revision<'static> = router::Revision {
    hash: "r-11aa000001",
    contract: CONTRACT,
    image: "registry.example/tandem-router:0.1.0",
};

/// Compares with a golden file; a missing or different one is written beside it, and the test fails.
fn golden(name: &str, objects: &[Value]) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let documents: Vec<String> = objects
        .iter()
        .map(|object| serde_saphyr::to_string(object).expect("YAML"))
        .collect();
    let text = documents.join("---\n");
    let path = folder.join(format!("{name}.yaml"));
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    if committed != text {
        let new = folder.join(format!("{name}.new.yaml"));
        std::fs::write(&new, &text).expect("the new file");
        panic!(
            "{} is not what is rendered now: compare it with {}",
            path.display(),
            new.display()
        );
    }
}

#[test]
fn the_children_of_a_plain_deployment() {
    let spec = spec(&serde_json::json!({}));
    let mut objects = Vec::new();
    for role in [Role::Prefill, Role::Decode] {
        let template = engine::template(&OWNER, &spec, of(role));
        objects.push(json(engine::deployment(&OWNER, &spec, of(role), template, 1)));
        objects.push(json(network::engines(&OWNER, role, CONTRACT)));
    }
    let template = router::template(&OWNER, &spec, ROUTER);
    objects.push(json(router::deployment(&OWNER, &spec, template, 1)));
    objects.push(json(network::front(&OWNER, &spec)));
    golden("workloads", &objects);

    let reach = network::Reach {
        operator_namespace: "tandem-system".to_owned(),
        metrics_namespaces: vec!["monitoring".to_owned()],
    };
    let mut objects = around(&OWNER, &spec, &reach);
    objects.extend(Role::ALL.map(|role| json(knobs::config_map(&OWNER, &spec, role))));
    objects.push(json(knobs::traffic(&OWNER, Traffic::Admit)));
    objects.push(json(guard::token(&OWNER, "0123456789abcdef0123456789abcdef")));
    golden("around", &objects);
}

#[test]
fn an_engine_has_a_token_for_the_api_server_or_the_router_has_none() {
    let spec = spec(&serde_json::json!({}));
    let mounts = |template: PodTemplateSpec| template.spec.and_then(|spec| spec.automount_service_account_token);
    assert_eq!(mounts(router::template(&OWNER, &spec, ROUTER)), Some(true));
    for role in [Role::Prefill, Role::Decode] {
        assert_eq!(mounts(engine::template(&OWNER, &spec, of(role))), Some(false));
    }
}

#[test]
fn a_pod_takes_all_that_the_spec_says_of_it() {
    let spec = spec(&serde_json::json!({
        "gpus": {"budget": 8, "resourceName": "example.com/gpu"},
        "decode": {
            "backend": "Cpu", "gpusPerReplica": 4, "parallelism": {"tensor": 2},
            "resources": {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "32Gi"}},
            "pod": {
                "nodeSelector": {"pool": "gpu"},
                "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
                "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
                ]}}},
                "labels": {"team": "search"}, "annotations": {"note": "x"},
                "priorityClassName": "high", "runtimeClassName": "nvidia",
                "imagePullSecrets": [{"name": "pull"}],
                "env": [{"name": "A", "value": "1"}, {"name": "B", "secretKeyRef": {"name": "s", "key": "k"}}],
                "volumes": [
                    {"name": "scratch", "mountPath": "/scratch", "emptyDirSize": "10Gi"},
                    {"name": "certs", "mountPath": "/certs", "secret": "tls"},
                    {"name": "conf", "mountPath": "/conf", "configMap": "conf"},
                    {"name": "more", "mountPath": "/more", "claimName": "more", "readOnly": true},
                ],
            },
        },
    }));
    golden("pod", &[json(engine::template(&OWNER, &spec, of(Role::Decode)))]);
}

#[test]
fn a_node_that_is_unreachable_is_tolerated_for_20_s_unless_the_spec_speaks_of_that() {
    for (given, expected) in [
        (serde_json::json!([]), Some(20)),
        (serde_json::json!([{"operator": "Exists"}]), None),
        (
            serde_json::json!([{"operator": "Exists", "effect": "NoSchedule"}]),
            Some(20),
        ),
        (
            serde_json::json!([{
                "key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 90,
            }]),
            Some(90),
        ),
    ] {
        let spec = spec(&serde_json::json!({"decode": {"backend": "Cpu", "pod": {"tolerations": given}}}));
        let made = json(engine::template(&OWNER, &spec, of(Role::Decode)));
        let all = made["spec"]["tolerations"].as_array().expect("tolerations");
        let one = all.iter().find(|one| one["key"] == "node.kubernetes.io/unreachable");
        let seconds = one.and_then(|one| one["tolerationSeconds"].as_i64());
        assert_eq!(seconds, expected, "{all:?}");
    }
}

#[test]
fn a_revision_that_the_spec_names_does_not_reach_the_engines() {
    let digest = "0f".repeat(32);
    let mut named = spec(&serde_json::json!({}));
    let flag = format!("--model-revision={digest}");
    for (revision, expected) in [(String::new(), 0), (digest, 1)] {
        named.model.revision = revision;
        for role in [Role::Prefill, Role::Decode] {
            let pod = engine::template(&OWNER, &named, of(role)).spec.expect("a pod");
            let args = pod.containers[0].args.clone().unwrap_or_default();
            let given = args.iter().filter(|arg| arg.starts_with("--model-revision"));
            assert_eq!(given.clone().count(), expected, "{args:?}");
            assert!(given.into_iter().all(|arg| *arg == flag), "{args:?}");
        }
    }
}

#[test]
fn a_router_with_keys_reads_them_from_their_secret() {
    let spec = spec(&serde_json::json!({"router": {"apiKeysSecretName": "keys", "service": {"type": "LoadBalancer"}}}));
    golden(
        "router-with-keys",
        &[
            json(router::template(&OWNER, &spec, ROUTER)),
            json(network::front(&OWNER, &spec)),
        ],
    );
}

#[test]
fn a_knob_changes_no_template() {
    let plain = spec(&serde_json::json!({}));
    let tuned = spec(&serde_json::json!({
        "prefill": {"knobs": {"chunkedPrefillTokens": 512, "maxRunning": 7, "prefixCache": {"mode": "Disabled"}}},
        "decode": {"knobs": {"maxRunning": 9}},
        "router": {"policy": "RoundRobin"},
        "transfer": {"onPrefillFailure": "Fail"},
        "timeouts": {"queueSeconds": 5, "stallSeconds": 7, "requestSeconds": 60, "leaseSeconds": 9},
    }));
    let templates = |spec: &PDDeploymentSpec| -> [PodTemplateSpec; 3] {
        [
            engine::template(&OWNER, spec, of(Role::Prefill)),
            engine::template(&OWNER, spec, of(Role::Decode)),
            router::template(&OWNER, spec, ROUTER),
        ]
    };
    assert_eq!(templates(&plain), templates(&tuned));
    for role in Role::ALL {
        let (old, new) = (
            knobs::config_map(&OWNER, &plain, role),
            knobs::config_map(&OWNER, &tuned, role),
        );
        assert_ne!(old.data, new.data, "{role:?}");
        assert_eq!(old.metadata.name, new.metadata.name, "{role:?}");
        assert_ne!(old.metadata.annotations, new.metadata.annotations, "{role:?}: its hash");
    }
}

#[test]
fn names_stay_dns_labels_with_the_longest_name_of_a_deployment() {
    let name = "a".repeat(tandem_crds::rules::MAX_NAME);
    let owner = Owner { name: &name, ..OWNER };
    let spec = spec(&serde_json::json!({}));
    let template = PodTemplateSpec::default;
    let mut names = vec![
        engine::deployment(&owner, &spec, of(Role::Prefill), template(), 1)
            .metadata
            .name,
        network::engines(&owner, Role::Prefill, CONTRACT).metadata.name,
        router::deployment(&owner, &spec, template(), 1).metadata.name,
        network::front(&owner, &spec).metadata.name,
        guard::token(&owner, "t").metadata.name,
        guard::permission(&owner).metadata.name,
        guard::grant(&owner).metadata.name,
    ];
    for role in Role::ALL {
        names.push(knobs::config_map(&owner, &spec, role).metadata.name);
        names.push(guard::account(&owner, role).metadata.name);
    }
    for name in names {
        let name = name.expect("a name");
        assert!(name.len() <= 63, "{name} has {} characters", name.len());
    }
}

#[test]
fn old_and_new_contracts_are_never_behind_one_service() {
    let (old, new) = ("k-0000000001", "k-0000000002");
    for role in [Role::Prefill, Role::Decode] {
        let template = |contract| {
            let revision = engine::Revision { contract, ..of(role) };
            engine::template(&OWNER, &spec(&serde_json::json!({})), revision)
        };
        let selects = |contract: &str, template: PodTemplateSpec| {
            let wanted = network::engines(&OWNER, role, contract)
                .spec
                .and_then(|spec| spec.selector)
                .expect("a selector");
            let labels = template.metadata.and_then(|meta| meta.labels).expect("labels");
            wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
        };
        assert!(selects(old, template(old)));
        assert!(!selects(old, template(new)));
        assert!(!selects(new, template(old)));
    }
}
