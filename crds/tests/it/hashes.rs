//! Golden values: a hash that moves restarts every deployment at the next upgrade of the operator.

use serde_json::json;
use tandem_crds::{Inputs, Manifest, Role};

fn minimal() -> Inputs {
    Inputs::of(&Manifest::read(super::minimal()).unwrap().spec)
}

fn large() -> Inputs {
    let mut manifest = super::with("spec.gpus.budget", json!(8));
    manifest["spec"]["prefill"] = json!({
        "replicas": 2, "backend": "Cpu", "gpusPerReplica": 4, "parallelism": {"tensor": 2},
        "knobs": {"maxRunning": 96, "prefixCache": {"mode": "Disabled"}},
        "pod": {
            "nodeSelector": {"kubernetes.io/hostname": "gpu-1"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "env": [{"name": "RUST_BACKTRACE", "value": "1"}],
        },
    });
    manifest["spec"]["timeouts"] = json!({"drainSeconds": 120});
    Inputs::of(&Manifest::read(manifest).unwrap().spec)
}

#[test]
fn the_hashes_of_two_specs_are_what_they_always_were() {
    let all = |inputs: &Inputs| {
        let role = |role| inputs.role(role, "registry/engine:1", "");
        let hashes = [
            inputs.target(),
            inputs.contract(),
            role(Role::Prefill),
            role(Role::Decode),
            role(Role::Router),
        ];
        hashes.join(" ")
    };
    assert_eq!(
        all(&minimal()),
        "5ff09f9b25 k-72ee67e12d p-dbb6cf1d7c d-2fec387ddd r-16ec502696"
    );
    assert_eq!(
        all(&large()),
        "a6032d22ac k-72ee67e12d p-ac0ba34974 d-f0ae1a67ac r-00464b781f"
    );
    assert_eq!(minimal().knobs(Role::Decode).hash(), "h-b95d9a89ab");
    assert_eq!(minimal().role(Role::Decode, "registry/engine:2", ""), "d-61234d7ee0");
    assert_eq!(
        minimal().role(Role::Decode, "registry/engine:1", "again"),
        "d-1aa0ff23d8"
    );
}

#[test]
fn what_is_written_out_at_its_default_hashes_as_if_it_were_not() {
    let mut manifest = super::with("spec.kvCache.pageTokens", json!(16));
    manifest["spec"]["decode"] = json!({
        "replicas": 1, "backend": "Auto", "image": "", "parallelism": {"tensor": 1},
        "knobs": {"maxRunning": 32}, "resources": {"requests": {}}, "pod": {"labels": {}, "env": [], "affinity": null},
    });
    manifest["spec"]["rollout"] = json!({"paused": true, "approval": "BeforeRestart"});
    let written = Inputs::of(&Manifest::read(manifest).unwrap().spec);
    assert_eq!(written.target(), minimal().target());
    for role in Role::ALL {
        assert_eq!(written.role(role, "i", ""), minimal().role(role, "i", ""));
        assert_eq!(written.knobs(role), minimal().knobs(role));
    }
    assert!(written.changes(&minimal()).is_empty());
}

#[test]
fn a_change_tells_both_values_as_people_write_them() {
    let changes = large().changes(&minimal());
    let told: Vec<String> = changes
        .iter()
        .map(|change| format!("{}: {:?} -> {:?}", change.path, change.from, change.to))
        .collect();
    for expected in [
        r#"prefill.replicas: "1" -> "2""#,
        r#"prefill.backend: "Auto" -> "Cpu""#,
        r#"prefill.knobs.prefixCache.mode: "Enabled" -> "Disabled""#,
        r#"prefill.pod.env: "" -> "[{\"name\":\"RUST_BACKTRACE\",\"value\":\"1\"}]""#,
        r#"timeouts.drainSeconds: "90" -> "120""#,
    ] {
        assert!(told.iter().any(|line| line == expected), "{expected}: {told:#?}");
    }
    assert!(!told.iter().any(|line| line.contains("budget")), "{told:#?}");
}
