//! Which engines count as known to the routers.

use std::collections::BTreeSet;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tandem_crds::Role;
use tandem_operator::observe::pod::{PodFacts, facts};
use tandem_operator::observe::routing::unrouted;
use tandem_operator::peers::router::{Endpoints, Info, Mode, Seen, Told};
use tandem_operator::peers::{Facts, knobs};
use tandem_plan::{DefaultImages, Revision};

fn revision(model: &str) -> Revision {
    let spec = json!({"model": {"name": model, "source": {"pvc": {"claimName": "models", "path": "m.gguf"}}}});
    let images = DefaultImages {
        engine: "e".into(),
        router: "r".into(),
    };
    Revision::admit(&serde_json::from_value(spec).unwrap(), &images, None, None)
}

fn pod(uid: &str, role: Role, revision: &Revision, ip: &str) -> PodFacts {
    let object = json!({
        "metadata": {"name": uid, "uid": uid, "labels": {
            "tandem.dev/role": role.field(), "tandem.dev/revision": revision.hash(role), "tandem.dev/owner": "o",
        }},
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]},
    });
    let pod: Pod = serde_json::from_value(object).unwrap();
    facts(&pod)
}

fn router(endpoints: Option<&Value>) -> Facts {
    let endpoints = endpoints.map(|all| serde_json::from_value::<Endpoints>(json!({"endpoints": all})).unwrap());
    Facts::Router(Info {
        traffic: Told {
            mode: Mode::Admit,
            remaining_ms: None,
            in_flight: 0,
            queued: 0,
        },
        knobs: knobs::router(&revision("m").spec),
        seen: Seen::default(),
        endpoints,
        at: Timestamp::UNIX_EPOCH,
    })
}

#[test]
fn an_engine_counts_as_known_once_every_router_of_its_contract_says_so() {
    let (of, other) = (revision("m"), revision("m2"));
    let both = [of.clone(), other.clone()];
    let engine = |ip: &str| pod("engine", Role::Decode, &of, ip);
    let up = |endpoint: &str, state: &str| json!([{"side": "decode", "endpoint": endpoint, "state": state}]);
    let there = up("10.0.0.1:7101", "up");
    let unknown = |ip: &str, serves: &Revision, said: [Option<Facts>; 2]| {
        let routers = ["r1", "r2"].map(|uid| pod(uid, Role::Router, serves, "10.0.0.9"));
        let all: Vec<PodFacts> = routers.into_iter().chain([engine(ip)]).collect();
        let unrouted = unrouted(&all, &both, |uid| said[usize::from(uid == "r2")].as_ref());
        assert!(
            unrouted.is_subset(&BTreeSet::from(["engine".to_owned()])),
            "{unrouted:?}"
        );
        !unrouted.is_empty()
    };
    let say = |one: &Value, two: &Value| [Some(router(Some(one))), Some(router(Some(two)))];
    assert!(!unknown("10.0.0.1", &of, say(&there, &there)));
    assert!(unknown("10.0.0.1", &of, say(&there, &json!([]))), "one knows it not");
    assert!(
        unknown("10.0.0.1", &of, say(&there, &up("10.0.0.1:7101", "down"))),
        "one does not reach it"
    );
    assert!(!unknown("10.0.0.1", &of, say(&there, &up("10.0.0.1:7101", "doubted"))));
    assert!(unknown("10.0.0.11", &of, say(&there, &there)), "another address");
    assert!(
        unknown("10.0.0.1", &of, [Some(router(Some(&there))), None]),
        "one was asked in vain"
    );
    assert!(
        !unknown("10.0.0.1", &of, [Some(router(Some(&there))), Some(router(None))]),
        "one is too old to say"
    );
    assert!(
        !unknown("10.0.0.1", &other, say(&json!([]), &json!([]))),
        "they serve another contract"
    );
    let six = up("[fd00::1]:7101", "up");
    assert!(!unknown("fd00::1", &of, say(&six, &six)));
    assert!(
        unrouted(&[engine("10.0.0.1")], &both, |_| None).is_empty(),
        "there is no router yet"
    );
}
