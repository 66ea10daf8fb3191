//! Stored revisions.

use serde_json::{Value, json};
use tandem_crds::{PDDeploymentSpec, Role};
use tandem_operator::observe::revision::Stored;
use tandem_operator::render::meta::Owner;
use tandem_plan::{DefaultImages, Revision};

const OWNER: Owner<'static> = Owner {
    name: "chat",
    namespace: "serving",
    uid: "o-1",
};

fn spec(more: &Value) -> PDDeploymentSpec {
    let mut spec = json!({"model": {"name": "m", "source": {"pvc": {"claimName": "models", "path": "m.gguf"}}}});
    for (key, value) in more.as_object().expect("fields") {
        spec[key] = value.clone();
    }
    serde_json::from_value(spec).expect("a spec")
}

fn images() -> DefaultImages {
    DefaultImages {
        engine: "engine:1".into(),
        router: "router:1".into(),
    }
}

#[test]
fn what_was_stored_comes_back_byte_for_byte() {
    let revision = Revision::admit(
        &spec(&json!({"prefill": {"pod": {"env": [{"name": "EMPTY"}]}}})),
        &images(),
        None,
        None,
    );
    let stored = Stored::render(&OWNER, &revision, &[]);
    let sent = serde_json::to_value(stored.object(&OWNER, 7)).expect("JSON");
    // An API server may put fields into any order.
    let mut sorted = sent.clone();
    sorted.sort_all_objects();
    for object in [sent, sorted] {
        let (number, read) = Stored::read(&object).expect("a revision");
        assert_eq!(number, 7);
        assert_eq!(read, stored);
        for role in Role::ALL {
            assert_eq!(read.templates[&role].as_bytes(), stored.templates[&role].as_bytes());
            let template = read.template(role).expect("a template");
            assert_eq!(
                template.to_string(),
                read.templates[&role],
                "{role:?}: what is applied is what was stored"
            );
        }
    }
}

#[test]
fn a_role_that_does_not_change_keeps_the_template_that_an_earlier_operator_rendered() {
    let first = Revision::admit(&spec(&json!({})), &images(), None, None);
    let mut earlier = Stored::render(&OWNER, &first, &[]);
    // As another version would have rendered it.
    for text in earlier.templates.values_mut() {
        *text = text.replacen("--log-format=json", "--log-format=text", 1);
    }
    let edited = spec(&json!({"decode": {"resources": {"requests": {"cpu": "2"}}}}));
    let second = Revision::admit(&edited, &images(), Some(&first), None);
    let stored = Stored::render(&OWNER, &second, std::slice::from_ref(&earlier));
    for role in [Role::Prefill, Role::Router] {
        assert_eq!(stored.templates[&role], earlier.templates[&role], "{role:?}");
    }
    assert_ne!(stored.templates[&Role::Decode], earlier.templates[&Role::Decode]);
    assert!(stored.templates[&Role::Decode].contains("--log-format=json"));
}

#[test]
fn a_revision_that_cannot_be_read_is_an_error_and_not_another_revision() {
    assert!(Stored::read(&json!({"revision": 1, "data": {"revision": {"id": "x"}}})).is_err());
    assert!(Stored::read(&json!({"revision": 1})).is_err());
}
