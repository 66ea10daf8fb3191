//! Which roles another revision changes, and the images that it runs.

use tandem_crds::{PDDeploymentSpec, RestartScope, Role};
use tandem_plan::{DefaultImages, Revision};

use crate::spec;

fn images(engine: &str) -> DefaultImages {
    DefaultImages {
        engine: engine.into(),
        router: "router:1".into(),
    }
}

/// The roles that are other ones after an edit, and each role's image then.
fn changed(
    before: &PDDeploymentSpec,
    after: &PDDeploymentSpec,
    default: &str,
    restart: Option<(&str, &[Role])>,
) -> (Vec<Role>, [String; 3]) {
    let base = Revision::admit(before, &images("engine:1"), None, None);
    let next = Revision::admit(after, &images(default), Some(&base), restart);
    let image = |role| next.role(role).unwrap().image.clone();
    (next.restarts(Some(&base)), Role::ALL.map(image))
}

#[test]
fn a_role_that_is_not_touched_keeps_its_image_whatever_the_default_is() {
    let before = spec();
    let mut after = before.clone();
    after.decode.parallelism.tensor = 2;
    let touched = changed(&before, &after, "engine:2", None);
    assert_eq!(touched.0, [Role::Decode]);
    assert_eq!(touched.1, ["engine:1", "engine:2", "router:1"]);

    let same = changed(&before, &before, "engine:2", None);
    assert_eq!(same.0, []);
    assert_eq!(same.1, ["engine:1", "engine:1", "router:1"]);

    let restarted = changed(&before, &before, "engine:2", Some(("token", &[Role::Prefill])));
    assert_eq!(restarted.0, [Role::Prefill]);
    assert_eq!(restarted.1, ["engine:2", "engine:1", "router:1"]);
}

#[test]
fn an_image_that_a_spec_names_no_more_is_the_default() {
    let mut before = spec();
    before.decode.image = "engine:9".into();
    let mut after = before.clone();
    after.decode.image = String::new();
    let (roles, images) = changed(&before, &after, "engine:2", None);
    assert_eq!(roles, [Role::Decode]);
    assert_eq!(images, ["engine:1", "engine:2", "router:1"]);
    let (_, images) = changed(&after, &before, "engine:2", None);
    assert_eq!(images, ["engine:1", "engine:9", "router:1"]);
}

#[test]
fn with_the_full_scope_one_role_that_restarts_takes_all_with_it() {
    let mut before = spec();
    before.rollout.restart_scope = RestartScope::Full;
    let mut hot = before.clone();
    hot.decode.knobs.max_running = 96;
    assert_eq!(changed(&before, &hot, "engine:1", None).0, [], "no role restarts");
    let mut one = before.clone();
    one.decode.parallelism.tensor = 2;
    assert_eq!(changed(&before, &one, "engine:1", None).0, Role::ALL);
    let asked = changed(&before, &before, "engine:1", Some(("token", &[Role::Decode])));
    assert_eq!(asked.0, Role::ALL);
    let mut own = one.clone();
    own.rollout.restart_scope = RestartScope::default();
    assert_eq!(changed(&before, &own, "engine:1", None).0, [Role::Decode]);
}
