//! What processes say and are told.

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use tandem_crds::class::{CLASSES, Class};
use tandem_crds::status::GateOutcome;
use tandem_crds::{PDDeploymentSpec, Role};
use tandem_operator::peers::router::{Mode, Order, Probed, Told};
use tandem_operator::peers::{Facts, engine, knobs, router};
use tandem_operator::reconcile::probe::verdict;
use tandem_plan::{DefaultImages, Revision, Traffic};

fn spec(more: &Value) -> PDDeploymentSpec {
    let mut spec = json!({"model": {"name": "m", "source": {"pvc": {"claimName": "models", "path": "m.gguf"}}}});
    for (key, value) in more.as_object().expect("fields") {
        spec[key] = value.clone();
    }
    serde_json::from_value(spec).expect("a spec")
}

fn revision(more: &Value) -> Revision {
    let images = DefaultImages {
        engine: "e".into(),
        router: "r".into(),
    };
    Revision::admit(&spec(more), &images, None, None)
}

fn engine_with(spec: &PDDeploymentSpec, role: Role) -> Facts {
    let mut knobs = knobs::engine(spec, role);
    // what no spec names
    knobs.step_tokens = Some(512);
    Facts::Engine(engine::Info {
        boot_id: vec![1; 16],
        backend: "cpu-avx2".into(),
        knobs,
        kv_bytes_per_token: 1024,
        handoffs: None,
    })
}

/// A spec in which one hot field has another value than its default, by the field's path.
fn turned() -> Vec<(&'static str, Value)> {
    vec![
        (
            "prefill.knobs",
            json!({"prefill": {"knobs": {"chunkedPrefillTokens": 512}}}),
        ),
        ("prefill.knobs", json!({"prefill": {"knobs": {"maxRunning": 7}}})),
        (
            "prefill.knobs",
            json!({"prefill": {"knobs": {"prefixCache": {"mode": "Disabled"}}}}),
        ),
        ("decode.knobs", json!({"decode": {"knobs": {"maxRunning": 7}}})),
        ("router.policy", json!({"router": {"policy": "RoundRobin"}})),
        (
            "transfer.onPrefillFailure",
            json!({"transfer": {"onPrefillFailure": "Fail"}}),
        ),
        ("timeouts.queueSeconds", json!({"timeouts": {"queueSeconds": 5}})),
        (
            "timeouts.rendezvousSeconds",
            json!({"timeouts": {"rendezvousSeconds": 5}}),
        ),
        ("timeouts.progressSeconds", json!({"timeouts": {"progressSeconds": 5}})),
        ("timeouts.stallSeconds", json!({"timeouts": {"stallSeconds": 5}})),
        (
            "timeouts.inflightWatchdogSeconds",
            json!({"timeouts": {"inflightWatchdogSeconds": 50}}),
        ),
        ("timeouts.leaseSeconds", json!({"timeouts": {"leaseSeconds": 5}})),
        ("timeouts.requestSeconds", json!({"timeouts": {"requestSeconds": 5}})),
    ]
}

#[test]
fn every_hot_field_is_told_to_the_processes_that_take_it_and_read_back() {
    let plain = revision(&json!({}));
    for (path, _) in CLASSES.iter().filter(|(_, class)| matches!(class, Class::Hot(_))) {
        assert!(turned().iter().any(|(tried, _)| tried == path), "{path} is not tried");
    }
    for (path, more) in turned() {
        let Some(Class::Hot(roles)) = tandem_crds::class(path) else {
            panic!("{path} is not hot")
        };
        let changed = revision(&more);
        let both = [plain.clone(), changed.clone()];
        for role in Role::ALL {
            let runs = |of: &Revision| match role {
                Role::Router => Facts::Router(router::Info {
                    traffic: Told {
                        mode: Mode::Admit,
                        remaining_ms: None,
                        in_flight: 0,
                        queued: 0,
                    },
                    knobs: knobs::router(&of.spec),
                    seen: router::Seen::default(),
                    endpoints: None,
                    at: Timestamp::UNIX_EPOCH,
                }),
                Role::Prefill | Role::Decode => engine_with(&of.spec, role),
            };
            for of in &both {
                assert_eq!(
                    knobs::hash(&runs(of), role, &both),
                    Some(of.knobs(role)),
                    "{path}: {role:?}"
                );
            }
            let differs = plain.knobs(role) != changed.knobs(role);
            assert_eq!(differs, roles.contains(&role), "{path}: {role:?}");
            if differs {
                assert_eq!(
                    knobs::hash(&runs(&plain), role, std::slice::from_ref(&changed)),
                    None,
                    "{path}: {role:?}"
                );
            }
        }
    }
}

#[test]
fn a_routers_acknowledgement_is_the_order_only_if_it_is_that_order() {
    let now: Timestamp = "2026-01-01T00:00:00Z".parse().expect("a time");
    let until = now.saturating_add(SignedDuration::from_secs(600)).expect("a time");
    let wanted = Traffic::Queue { until };
    let order = Order::of(wanted, now);
    assert_eq!(
        order,
        Order {
            mode: Mode::Queue,
            remaining_ms: Some(600_000)
        }
    );
    let told = |mode, remaining_ms| Told {
        mode,
        remaining_ms,
        in_flight: 0,
        queued: 0,
    };
    // Asked a while later, it counts from when it was told.
    let later = now.saturating_add(SignedDuration::from_secs(100)).expect("a time");
    assert_eq!(told(Mode::Queue, Some(499_700)).order(later, Some(wanted)), wanted);
    assert_ne!(
        told(Mode::Queue, Some(400_000)).order(later, Some(wanted)),
        wanted,
        "another end"
    );
    assert_eq!(told(Mode::Admit, None).order(later, Some(wanted)), Traffic::Admit);
    assert_eq!(told(Mode::Reject, None).order(later, Some(wanted)), Traffic::Reject);
    // A queue whose time is over is still that queue.
    let over = until.saturating_add(SignedDuration::from_secs(900)).expect("a time");
    assert_eq!(Order::of(wanted, over).remaining_ms, Some(0));
    assert_eq!(told(Mode::Queue, Some(0)).order(over, Some(wanted)), wanted);
}

const GOOD: Probed = Probed {
    prompt_tokens: 40,
    completion_tokens: 2,
    cached_tokens: 0,
    moved_tokens: 40,
    moved_bytes: 40 * 1024,
    computed_tokens: 0,
};

#[test]
fn a_probe_passes_only_if_all_kv_of_its_prompt_crossed() {
    assert_eq!(verdict(&GOOD, 1024).0, GateOutcome::Passed);
    for (bad, layout, said) in [
        (
            Probed {
                completion_tokens: 0,
                ..GOOD
            },
            1024,
            "no token",
        ),
        (
            Probed {
                computed_tokens: 40,
                moved_tokens: 0,
                moved_bytes: 0,
                ..GOOD
            },
            1024,
            "computed 40",
        ),
        (
            Probed {
                moved_tokens: 0,
                moved_bytes: 0,
                ..GOOD
            },
            1024,
            "no KV crossed",
        ),
        (
            Probed {
                moved_tokens: 24,
                moved_bytes: 24 * 1024,
                cached_tokens: 16,
                ..GOOD
            },
            1024,
            "24 of 40",
        ),
        (
            Probed {
                moved_bytes: 40 * 1024 - 1,
                ..GOOD
            },
            1024,
            "40959 bytes",
        ),
        (GOOD, 2048, "are 81920"),
        (GOOD, 0, "do not say"),
    ] {
        let (outcome, message) = verdict(&bad, layout);
        assert_eq!(outcome, GateOutcome::Failed, "{bad:?}");
        assert!(message.contains(said), "{message:?} lacks {said:?}");
    }
}
