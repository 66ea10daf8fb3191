//! `docs/rollouts.md` shows what `tandem plan` prints.

use tandem_crds::{Manifest, PDDeploymentSpec};
use tandem_plan::rehearsal::tell;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/rollouts.md");
const EXAMPLE: &str = include_str!("../../../../examples/smollm2.yaml");

fn example() -> PDDeploymentSpec {
    let read =
        |deserializer: serde_saphyr::Deserializer<'_, '_>| Manifest::read(deserializer).map_err(|error| error.source);
    serde_saphyr::with_deserializer_from_str(EXAMPLE, read).unwrap().spec
}

fn edited(edit: impl FnOnce(&mut PDDeploymentSpec)) -> PDDeploymentSpec {
    let mut spec = example();
    edit(&mut spec);
    spec
}

#[test]
fn the_page_shows_what_the_planner_does() {
    let three = || edited(|spec| spec.decode.replicas = 3);
    let mut image = three();
    image.decode.image = "registry.example/tandem-engine:2".into();
    let page = std::fs::read_to_string(PAGE).unwrap();
    let mut missing = Vec::new();
    for text in [
        tell(None, &example()),
        tell(Some(&example()), &edited(|spec| spec.decode.knobs.max_running = 96)),
        tell(
            Some(&example()),
            &edited(|spec| {
                spec.decode.resources.requests = [("cpu".into(), tandem_crds::role::Quantity("2".into()))].into();
            }),
        ),
        tell(
            Some(&example()),
            &edited(|spec| spec.model.source.pvc.path = "smollm2/v2.gguf".into()),
        ),
        tell(Some(&three()), &image),
        tell(
            Some(&example()),
            &edited(|spec| spec.rollout.progress_deadline_seconds = 9000),
        ),
    ] {
        let block = format!("```\n{text}```\n");
        if !page.contains(&block) {
            missing.push(block);
        }
    }
    assert!(missing.is_empty(), "the page lacks:\n{}", missing.join("\n"));
}

#[test]
fn a_change_that_waits_for_a_person_says_so_and_where() {
    for (approval, place) in [
        (tandem_crds::Approval::BeforeRestart, " 1. Approve: waits for "),
        (tandem_crds::Approval::BeforePromote, "the target serves"),
    ] {
        let new = edited(|spec| {
            spec.rollout.approval = approval;
            spec.kv_cache.page_tokens = 32;
        });
        let text = tell(Some(&example()), &new);
        assert!(text.contains(place), "{text}");
        assert!(
            text.contains("new pods: prefill, decode; the same pods as before: router"),
            "{text}"
        );
    }
}
