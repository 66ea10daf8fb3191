//! The planner in a simulated world: stories first, then invariants as properties.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

mod conditions;
mod gates;
mod health;
mod invariants;
mod page;
mod properties;
mod revisions;
mod sim;
mod steps;

use sim::{Node, Sim};
use tandem_crds::status::{Direction, Outcome, Step};
use tandem_crds::{
    Approval, EngineRole, Model, ModelSource, OnFailure, PDDeploymentSpec, PvcSource, RestartRoles, Role, Timeouts,
};
use tandem_plan::{Pod, Traffic, Trouble, target_of};

/// 4 + 4 GPUs of a budget of 8.
pub fn spec() -> PDDeploymentSpec {
    let role = || EngineRole {
        backend: tandem_crds::Backend::Cpu,
        gpus_per_replica: 4,
        ..EngineRole::default()
    };
    PDDeploymentSpec {
        model: Model {
            name: "m".into(),
            source: ModelSource {
                pvc: PvcSource {
                    claim_name: "models".into(),
                    path: "m.gguf".into(),
                },
            },
            revision: String::new(),
            max_length_tokens: None,
        },
        kv_cache: tandem_crds::KvCache::default(),
        gpus: tandem_crds::Gpus {
            budget: 8,
            ..tandem_crds::Gpus::default()
        },
        prefill: role(),
        decode: role(),
        router: tandem_crds::Router::default(),
        transfer: tandem_crds::Transfer::default(),
        timeouts: Timeouts::default(),
        rollout: tandem_crds::Rollout::default(),
        restart: tandem_crds::Restart::default(),
        history_limit: 20,
    }
}

fn settled(spec: PDDeploymentSpec) -> Sim {
    let mut sim = Sim::new(spec);
    assert!(sim.rest(100), "{:#?}", sim.status);
    ready(&sim);
    sim
}

fn ready(sim: &Sim) {
    assert_eq!(sim.wrong, [""; 0]);
    assert_eq!(sim.condition("Ready"), "True", "{:#?}", sim.status);
    assert_eq!(sim.condition("Available"), "True", "{:#?}", sim.status);
    assert_eq!(sim.condition("Stalled"), "False");
    assert_eq!(sim.world.order, Some(Traffic::Admit));
    let types = sim.status.conditions.iter().map(|condition| condition.type_.as_str());
    assert!(types.eq(tandem_crds::status::CONDITIONS), "metrics count these");
    for condition in &sim.status.conditions {
        let may = ["TransferHealthy", "ClientPathHealthy"].contains(&condition.type_.as_str());
        assert!(condition.status != "Unknown" || may, "{condition:?}");
    }
}

/// The steps of a run, each once in its order.
fn steps(sim: &mut Sim) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for _ in 0..400 {
        sim.reconcile(usize::MAX);
        if steps.last() != Some(&sim.status.step) {
            steps.push(sim.status.step);
        }
        if sim.status.rollout.is_none() && steps.len() > 1 {
            break;
        }
        sim.tick();
    }
    steps
}

#[test]
fn a_first_install_goes_through_the_steps_and_settles_with_no_more_writes() {
    let mut sim = Sim::new(spec());
    assert_eq!(
        steps(&mut sim),
        [
            Step::Admit,
            Step::Prefill,
            Step::Decode,
            Step::Router,
            Step::Gates,
            Step::Settled
        ]
    );
    assert!(sim.rest(20));
    ready(&sim);
    let writes = sim.writes.len();
    for _ in 0..10 {
        sim.reconcile(usize::MAX);
        sim.tick();
    }
    assert_eq!(sim.writes[writes..], [""; 0]);
    assert_eq!(sim.status.history[0].outcome, Outcome::Promoted);
}

#[test]
fn an_edit_of_decode_leaves_prefill_and_router_pods_alone() {
    for (role, step) in [(Role::Decode, Step::Decode), (Role::Prefill, Step::Prefill)] {
        let mut sim = settled(spec());
        let before: Vec<_> = Role::ALL.map(|role| sim.uids(role)).to_vec();
        sim.edit(|spec| {
            let of_role = if role == Role::Decode {
                &mut spec.decode
            } else {
                &mut spec.prefill
            };
            of_role.parallelism.tensor = 2;
        });
        assert_eq!(
            steps(&mut sim),
            [Step::Admit, Step::Quiesce, step, Step::Gates, Step::Settled]
        );
        sim.rest(20);
        ready(&sim);
        for (other, before) in Role::ALL.into_iter().zip(before) {
            assert_eq!(sim.uids(other) == before, other != role, "{other:?}");
        }
        assert_eq!(sim.status.history[0].restarted, [role]);
    }
}

#[test]
fn an_edit_of_the_router_touches_no_engine_and_holds_no_traffic() {
    let mut sim = settled(spec());
    let before = [sim.uids(Role::Prefill), sim.uids(Role::Decode)];
    sim.edit(|spec| spec.router.image = "router:2".into());
    assert_eq!(steps(&mut sim), [Step::Admit, Step::Router, Step::Gates, Step::Settled]);
    sim.rest(20);
    ready(&sim);
    assert_eq!([sim.uids(Role::Prefill), sim.uids(Role::Decode)], before);
    assert!(
        !sim.writes.iter().any(|write| write.contains("Queue")),
        "{:?}",
        sim.writes
    );
}

#[test]
fn a_new_contract_takes_the_whole_set_in_order_within_the_budget() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.model.revision = "ab".repeat(32));
    assert_eq!(
        steps(&mut sim),
        [
            Step::Admit,
            Step::Quiesce,
            Step::Prefill,
            Step::Decode,
            Step::Router,
            Step::Gates,
            Step::Settled
        ]
    );
    sim.rest(20);
    ready(&sim);
}

#[test]
fn a_role_that_grows_takes_its_gpus_from_one_that_shrinks() {
    let mut sim = settled(spec());
    sim.edit(|spec| {
        spec.prefill.gpus_per_replica = 6;
        spec.decode.gpus_per_replica = 2;
    });
    assert!(sim.rest(200), "{:#?}", sim.status);
    ready(&sim);
}

#[test]
fn no_last_pod_makes_room_while_requests_come() {
    let mut sim = settled(spec());
    // Two of half the size: one at a time, were there room beside the one that serves.
    sim.edit(|spec| {
        spec.prefill.gpus_per_replica = 2;
        spec.prefill.replicas = 2;
    });
    assert_eq!(
        steps(&mut sim),
        [Step::Admit, Step::Quiesce, Step::Prefill, Step::Gates, Step::Settled]
    );
    sim.rest(20);
    ready(&sim);
}

#[test]
fn hot_knobs_restart_nothing_and_are_live_before_they_count() {
    let mut sim = settled(spec());
    let before: Vec<_> = Role::ALL.map(|role| sim.uids(role)).to_vec();
    sim.edit(|spec| {
        spec.decode.knobs.max_running = 96;
        spec.timeouts.request_seconds = 900;
    });
    let writes = sim.writes.len();
    assert_eq!(steps(&mut sim), [Step::Admit, Step::Apply, Step::Gates, Step::Settled]);
    assert_eq!(sim.condition("KnobsLive"), "True");
    sim.rest(20);
    ready(&sim);
    assert_eq!(Role::ALL.map(|role| sim.uids(role)).to_vec(), before);
    assert!(
        !sim.writes[writes..].iter().any(|write| write.starts_with("scale")),
        "{:?}",
        sim.writes
    );
    // The next process starts with them, also while no operator runs.
    sim.kill(1);
    for _ in 0..10 {
        sim.tick();
    }
    let knobs = sim.world.knobs[&Role::Decode].clone();
    assert!(
        sim.world
            .pods
            .iter()
            .filter(|pod| pod.role == Role::Decode)
            .all(|pod| pod.knobs.as_ref() == Some(&knobs))
    );
}

#[test]
fn three_replicas_roll_with_two_serving_at_every_moment() {
    let mut spec = spec();
    spec.decode.replicas = 3;
    spec.decode.gpus_per_replica = 1;
    let mut sim = settled(spec);
    sim.edit(|spec| spec.decode.parallelism.tensor = 1);
    sim.edit(|spec| spec.decode.image = "engine:2".into());
    let mut steps = Vec::new();
    for _ in 0..200 {
        sim.reconcile(usize::MAX);
        steps.push(sim.status.step);
        assert!(sim.serving(Role::Decode) >= 2, "{:#?}", sim.world.workloads);
        sim.tick();
        assert!(sim.serving(Role::Decode) >= 2, "{:#?}", sim.world.workloads);
    }
    assert!(!steps.contains(&Step::Quiesce));
    ready(&sim);
    assert!(
        sim.world
            .pods
            .iter()
            .filter(|pod| pod.role == Role::Decode)
            .all(|pod| pod.revision == sim.status.roles[1].revision)
    );
}

#[test]
fn no_old_pod_goes_and_no_request_is_let_through_before_the_routers_know_the_new_pods() {
    let mut spec = spec();
    spec.decode.replicas = 3;
    spec.decode.gpus_per_replica = 1;
    let mut sim = settled(spec);
    sim.route_seconds = 100;
    sim.edit(|spec| spec.decode.image = "engine:2".into());
    for _ in 0..200 {
        sim.reconcile(usize::MAX);
        assert!(sim.serving(Role::Decode) >= 2, "{:#?}", sim.world);
        sim.tick();
        assert!(sim.serving(Role::Decode) >= 2, "{:#?}", sim.world);
    }
    ready(&sim);
    // Of a role that is gone for a while.
    sim.edit(|spec| spec.prefill.image = "engine:2".into());
    for _ in 0..200 {
        sim.reconcile(usize::MAX);
        let admits = sim.world.order == Some(Traffic::Admit);
        assert!(!admits || sim.serving(Role::Prefill) == 1 || sim.status.step == Step::Admit);
        sim.tick();
    }
    assert!(sim.rest(20));
    ready(&sim);
}

#[test]
fn more_replicas_scale_and_only_health_is_asked() {
    let mut sim = settled(spec());
    let before = sim.uids(Role::Decode);
    sim.edit(|spec| {
        spec.decode.replicas = 2;
        spec.gpus.budget = 12;
    });
    assert_eq!(steps(&mut sim), [Step::Admit, Step::Decode, Step::Settled]);
    sim.rest(20);
    ready(&sim);
    assert_eq!(sim.serving(Role::Decode), 2);
    assert!(before.iter().all(|uid| sim.uids(Role::Decode).contains(uid)));
}

#[test]
fn a_failed_change_goes_back_to_the_same_workloads_and_is_not_tried_again() {
    for (broken, bad_probe) in [(true, false), (false, true)] {
        let mut sim = settled(spec());
        let running = sim.status.revisions.running.clone();
        let hashes: Vec<String> = sim.status.roles.iter().map(|role| role.revision.clone()).collect();
        sim.images.engine = "engine:9".into();
        sim.edit(|spec| spec.decode.parallelism.tensor = 2);
        sim.reconcile(usize::MAX);
        let target = sim.status.revisions.target.clone();
        let hash = sim.revisions.last().unwrap().hash(Role::Decode).to_owned();
        if broken {
            sim.broken.insert(hash);
        }
        if bad_probe {
            sim.bad_probe.insert(target_of(&target).to_owned());
        }
        assert!(sim.rest(2000), "{:#?}", sim.status);
        assert_eq!(sim.wrong, [""; 0]);
        assert_eq!(sim.status.revisions.running, running);
        assert_eq!(sim.status.revisions.rejected, target);
        assert_eq!(sim.status.history[0].outcome, Outcome::Reverted);
        assert_eq!((sim.condition("Ready"), sim.reason("Ready")), ("False", "Reverted"));
        assert_eq!(sim.condition("Available"), "True");
        let now: Vec<String> = sim.status.roles.iter().map(|role| role.revision.clone()).collect();
        assert_eq!(now, hashes);
        let writes = sim.writes.len();
        for _ in 0..50 {
            sim.tick();
            sim.reconcile(usize::MAX);
        }
        assert_eq!(sim.writes[writes..], [""; 0]);
        // A token tries it again, and now it works.
        sim.broken.clear();
        sim.bad_probe.clear();
        sim.edit(|spec| spec.restart.token = "again".into());
        assert!(sim.rest(200), "{:#?}", sim.status);
        ready(&sim);
        assert_eq!(target_of(&sim.status.revisions.running), target_of(&target));
    }
}

#[test]
fn a_pod_that_has_ended_for_good_is_waited_for_until_the_deadline() {
    let mut sim = settled(spec());
    let running = sim.status.revisions.running.clone();
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    let hash = |sim: &Sim| sim.revisions.last().unwrap().hash(Role::Decode).to_owned();
    let ended = (0..100).any(|_| {
        sim.reconcile(usize::MAX);
        sim.tick();
        let hash = hash(&sim);
        let new = sim.world.pods.iter_mut().find(|pod| pod.revision == hash);
        let Some(pod) = new else { return false };
        (pod.ready, pod.trouble) = (
            false,
            Some(Trouble {
                reason: Trouble::GAVE_UP.into(),
                message: "exit code 1".into(),
            }),
        );
        true
    });
    assert!(ended);
    let plan = sim.plan();
    let rollout = plan.status.rollout.unwrap();
    assert_eq!(
        (rollout.direction, rollout.failure.as_str()),
        (Direction::Revert, "exit code 1")
    );
    assert!(sim.rest(200), "{:#?}", sim.status);
    assert_eq!(sim.status.revisions.running, running);
    assert_eq!(sim.status.history[0].outcome, Outcome::Reverted);
}

#[test]
fn a_change_fails_by_a_new_pod_that_ends_for_good_unless_it_was_told_to() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    sim.reconcile(usize::MAX);
    let (old, new) = (
        sim.revisions[0].hash(Role::Decode).to_owned(),
        sim.revisions.last().unwrap().hash(Role::Decode).to_owned(),
    );
    for (revision, terminating, reason, fails) in [
        (&new, false, Trouble::GAVE_UP, true),
        (&new, false, "CrashLoop", false),
        (&new, true, Trouble::GAVE_UP, false),
        (&old, false, Trouble::GAVE_UP, false),
        (&old, true, Trouble::GAVE_UP, false),
    ] {
        let mut sim = sim.clone();
        sim.world.pods.push(Pod {
            terminating,
            trouble: Some(Trouble {
                reason: reason.into(),
                message: "exit code 1".into(),
            }),
            ..Pod::unheard("one".into(), "one".into(), Role::Decode, revision.clone())
        });
        let rollout = sim.plan().status.rollout.unwrap();
        assert_eq!(
            rollout.direction == Direction::Revert,
            fails,
            "{revision} {terminating} {reason}"
        );
    }
}

#[test]
fn a_first_install_that_fails_holds_until_somebody_acts() {
    let mut sim = Sim::new(spec());
    sim.bad_probe.insert(tandem_crds::Inputs::of(&sim.spec).target());
    sim.rest(100);
    assert_eq!((sim.condition("Stalled"), sim.reason("Stalled")), ("True", "Held"));
    assert_eq!(sim.status.history.len(), 1);
    assert_eq!(sim.status.history[0].outcome, Outcome::Held);
    sim.edit(|spec| spec.decode.knobs.max_running = 8);
    assert!(sim.rest(200), "{:#?}", sim.status);
    ready(&sim);
}

#[test]
fn what_is_held_is_tried_again_at_a_new_token_alone() {
    let mut sim = Sim::new(spec());
    sim.bad_probe.insert(tandem_crds::Inputs::of(&sim.spec).target());
    sim.rest(100);
    assert_eq!(sim.reason("Stalled"), "Held");
    let (history, writes) = (sim.status.history.len(), sim.writes.len());
    sim.bad_probe.clear();
    for _ in 0..20 {
        sim.tick();
        sim.reconcile(usize::MAX);
    }
    assert_eq!(sim.writes[writes..], [""; 0]);
    sim.edit(|spec| spec.restart.token = "again".into());
    assert!(sim.rest(200), "{:#?}", sim.status);
    ready(&sim);
    assert!(sim.status.history.len() > history);
    assert_eq!(sim.status.history[0].outcome, Outcome::Promoted);
}

#[test]
fn a_token_amid_a_change_waits_for_its_end() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    sim.reconcile(usize::MAX);
    sim.tick();
    sim.reconcile(usize::MAX);
    let rollout = sim.status.rollout.clone().unwrap();
    sim.edit(|spec| spec.restart.token = "again".into());
    sim.reconcile(usize::MAX);
    assert_eq!(sim.status.rollout.clone().unwrap().target, rollout.target);
    assert!(sim.rest(300), "{:#?}", sim.status);
    ready(&sim);
    let outcomes: Vec<Outcome> = sim.status.history.iter().map(|entry| entry.outcome).take(2).collect();
    assert_eq!(outcomes, [Outcome::Promoted; 2]);
    assert_eq!(sim.status.history[0].restarted, Role::ALL);
}

#[test]
fn a_target_that_somebody_removed_is_stored_again() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    sim.reconcile(usize::MAX);
    sim.tick();
    let gone = sim.revisions.pop().unwrap();
    assert_eq!(sim.status.revisions.target, gone.id);
    assert!(sim.rest(200), "{:#?}", sim.status);
    ready(&sim);
    assert_eq!(target_of(&sim.status.revisions.running), target_of(&gone.id));
}

#[test]
fn the_last_of_several_edits_wins_and_an_edit_back_ends_where_it_began() {
    let mut sim = settled(spec());
    let first = sim.status.revisions.running.clone();
    let mut superseded = 0;
    for cut in 0..25 {
        for tensor in [2, 4] {
            sim.edit(|spec| spec.decode.parallelism.tensor = tensor);
            for _ in 0..cut {
                sim.reconcile(usize::MAX);
                sim.tick();
            }
        }
        sim.edit(|spec| spec.decode.parallelism.tensor = 1);
        assert!(sim.rest(300), "{cut}: {:#?}", sim.status);
        ready(&sim);
        assert_eq!(sim.status.revisions.running, first, "{cut}");
        let of_this = sim.status.history.iter().take(3);
        superseded += of_this.filter(|entry| entry.outcome == Outcome::Superseded).count();
    }
    assert!(superseded > 10, "{superseded}");
}

#[test]
fn approving_and_pausing_at_any_moment_supersedes_nothing() {
    for approval in [Approval::BeforeRestart, Approval::BeforePromote] {
        for cut in 0..20 {
            let mut sim = settled(spec());
            sim.edit(|spec| {
                spec.rollout.approval = approval;
                spec.decode.parallelism.tensor = 2;
            });
            for _ in 0..cut {
                sim.reconcile(usize::MAX);
                sim.tick();
            }
            sim.edit(|spec| spec.rollout.paused = true);
            let (workloads, uids) = (sim.world.workloads.clone(), sim.uids(Role::Decode));
            sim.reconcile(usize::MAX);
            sim.now += 20_000;
            for _ in 0..20 {
                sim.tick();
                sim.reconcile(usize::MAX);
            }
            if sim.status.rollout.is_some() && cut > 0 {
                assert_eq!(sim.world.workloads, workloads, "{cut}");
                assert!(uids.iter().filter(|uid| !sim.uids(Role::Decode).contains(uid)).count() <= 1);
            }
            sim.edit(|spec| spec.rollout.paused = false);
            for _ in 0..60 {
                sim.tick();
                sim.reconcile(usize::MAX);
            }
            sim.now += 20_000;
            sim.reconcile(usize::MAX);
            assert_eq!(sim.status.step, Step::Approve, "{cut}");
            assert_eq!(sim.condition("Available"), "True");
            let target = target_of(&sim.status.revisions.target).to_owned();
            assert!(
                sim.status
                    .conditions
                    .iter()
                    .any(|condition| condition.message.contains(&target))
            );
            sim.edit(|spec| spec.rollout.approved_revision = target);
            assert!(sim.rest(200), "{:#?}", sim.status);
            ready(&sim);
            assert!(
                sim.status
                    .history
                    .iter()
                    .all(|entry| entry.outcome == Outcome::Promoted)
            );
        }
    }
}

#[test]
fn a_change_that_restarts_nothing_or_has_begun_to_waits_for_nobody() {
    let mut start = spec();
    start.rollout.approval = Approval::BeforeRestart;
    let mut sim = settled(start);
    sim.edit(|spec| spec.decode.knobs.max_running = 96);
    assert!(sim.rest(100), "{:#?}", sim.status);
    ready(&sim);
    sim.edit(|spec| {
        spec.rollout.approval = Approval::Automatic;
        spec.decode.parallelism.tensor = 2;
    });
    sim.until(|sim| sim.serving(Role::Decode) == 0);
    sim.edit(|spec| spec.rollout.approval = Approval::BeforeRestart);
    assert!(sim.rest(200), "{:#?}", sim.status);
    ready(&sim);
}

#[test]
fn a_restart_token_restarts_its_roles_once_and_brings_new_default_images() {
    for (scope, image, expected) in [
        (RestartRoles::DecodeOnly, "engine:1", vec![Role::Decode]),
        (RestartRoles::Full, "engine:1", Role::ALL.to_vec()),
        (RestartRoles::Auto, "engine:1", Role::ALL.to_vec()),
        (RestartRoles::Auto, "engine:2", vec![Role::Prefill, Role::Decode]),
    ] {
        let mut sim = settled(spec());
        sim.images.engine = image.into();
        let writes = sim.writes.len();
        sim.rest(20);
        assert_eq!(sim.writes[writes..], [""; 0], "another default changes nobody");
        let before = Role::ALL.map(|role| sim.uids(role));
        sim.edit(|spec| {
            spec.restart.token = "2026-12-01".into();
            spec.restart.scope = scope;
        });
        assert!(sim.rest(300), "{:#?}", sim.status);
        ready(&sim);
        for (role, before) in Role::ALL.into_iter().zip(before) {
            assert_eq!(sim.uids(role) != before, expected.contains(&role), "{scope:?} {role:?}");
        }
        let promoted = sim.status.history.len();
        sim.rest(20);
        assert_eq!(sim.status.history.len(), promoted);
    }
}

#[test]
fn a_restart_that_an_edit_cuts_off_is_not_forgotten() {
    let mut sim = settled(spec());
    let before = Role::ALL.map(|role| sim.uids(role));
    sim.edit(|spec| spec.restart.token = "2026-12-01".into());
    sim.reconcile(usize::MAX);
    sim.edit(|spec| spec.decode.knobs.max_running = 96);
    assert!(sim.rest(300), "{:#?}", sim.status);
    ready(&sim);
    for (role, before) in Role::ALL.into_iter().zip(before) {
        assert_ne!(sim.uids(role), before, "{role:?}");
    }
}

#[test]
fn a_restart_that_is_done_is_not_done_again_by_an_edit_that_cuts_another_off() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.restart.token = "2026-12-01".into());
    assert!(sim.rest(300), "{:#?}", sim.status);
    let prefill = sim.uids(Role::Prefill);
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    sim.reconcile(usize::MAX);
    sim.edit(|spec| spec.router.image = "router:2".into());
    sim.reconcile(usize::MAX);
    assert_eq!(
        sim.status.rollout.as_ref().unwrap().restarts,
        [Role::Decode, Role::Router]
    );
    assert!(sim.rest(300), "{:#?}", sim.status);
    ready(&sim);
    assert_eq!(sim.uids(Role::Prefill), prefill);
}

#[test]
fn a_restart_of_one_role_that_is_cut_off_restarts_no_other() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.restart.token = "one".into());
    assert!(sim.rest(300), "{:#?}", sim.status);
    let before = Role::ALL.map(|role| sim.uids(role));
    sim.edit(|spec| {
        spec.restart.token = "two".into();
        spec.restart.scope = RestartRoles::DecodeOnly;
    });
    sim.reconcile(usize::MAX);
    sim.edit(|spec| spec.router.image = "router:2".into());
    assert!(sim.rest(300), "{:#?}", sim.status);
    ready(&sim);
    let restarted = Role::ALL.map(|role| !before.contains(&sim.uids(role)));
    let expected = Role::ALL.map(|role| role != Role::Prefill);
    assert_eq!(restarted, expected);
}

#[test]
fn history_says_which_fields_changed() {
    let mut sim = settled(spec());
    sim.edit(|spec| {
        spec.decode.parallelism.tensor = 2;
        spec.router.image = "router:2".into();
    });
    assert!(sim.rest(300), "{:#?}", sim.status);
    let mut changed: Vec<&str> = sim.status.history[0]
        .changed
        .iter()
        .map(|one| one.path.as_str())
        .collect();
    changed.sort_unstable();
    assert_eq!(changed, ["decode.parallelism.tensor", "router.image"]);
}

#[test]
fn so_many_revisions_are_kept_beside_those_in_use_and_the_newest() {
    let mut start = spec();
    start.history_limit = 2;
    let mut sim = settled(start);
    let mut made = vec![sim.revisions[0].id.clone()];
    for image in ["engine:2", "engine:3", "engine:4", "engine:5"] {
        sim.edit(|spec| spec.decode.image = image.into());
        assert!(sim.rest(300), "{:#?}", sim.status);
        ready(&sim);
        made.push(sim.status.revisions.running.clone());
    }
    let kept: Vec<&str> = sim.revisions.iter().map(|stored| stored.id.as_str()).collect();
    assert_eq!(kept, made[2..]);
}

#[test]
fn attempts_of_the_same_change_are_counted_until_one_succeeds() {
    let mut sim = settled(spec());
    let mut bad = sim.spec.clone();
    bad.decode.parallelism.tensor = 2;
    sim.bad_probe.insert(tandem_crds::Inputs::of(&bad).target());
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    let attempt = |sim: &mut Sim| {
        sim.reconcile(usize::MAX);
        sim.status.rollout.as_ref().unwrap().attempt
    };
    for (token, expected) in [("", 1), ("two", 2), ("three", 3)] {
        sim.edit(|spec| spec.restart.token = token.into());
        assert_eq!(attempt(&mut sim), expected);
        assert!(sim.rest(500), "{:#?}", sim.status);
        assert_eq!(sim.status.history[0].outcome, Outcome::Reverted);
    }
    sim.edit(|spec| spec.decode.parallelism.tensor = 4);
    assert_eq!(attempt(&mut sim), 1, "another change");
    assert!(sim.rest(500), "{:#?}", sim.status);
    ready(&sim);
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    assert_eq!(attempt(&mut sim), 1, "another one came between");
    sim.bad_probe.clear();
    assert!(sim.rest(500), "{:#?}", sim.status);
    sim.edit(|spec| spec.restart.token = "four".into());
    assert_eq!(attempt(&mut sim), 1, "it has succeeded");
}

#[test]
fn a_change_that_is_cut_off_is_finished_in_order() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.prefill.parallelism.tensor = 2);
    sim.until(|sim| sim.serving(Role::Prefill) == 0);
    // Prefill is to be again what it was, and is not yet.
    sim.edit(|spec| {
        spec.prefill.parallelism.tensor = 1;
        spec.decode.parallelism.tensor = 2;
    });
    assert!(sim.rest(300), "{:#?}", sim.status);
    ready(&sim);
}

#[test]
fn a_lost_node_stalls_no_change() {
    let mut sim = settled(spec());
    sim.nodes[0] = Node::Lost { since: sim.now };
    sim.edit(|spec| spec.model.revision = "cd".repeat(32));
    assert!(sim.rest(400), "{:#?}", sim.status);
    ready(&sim);
    assert!(sim.status.roles.iter().any(|role| role.lost > 0));
    sim.nodes[0] = Node::Gone;
    assert!(sim.rest(100));
    ready(&sim);
    assert!(sim.status.roles.iter().all(|role| role.lost == 0));
}

#[test]
fn deletion_ends_requests_within_the_drain_and_makes_nothing() {
    for stuck in [false, true] {
        let mut sim = settled(spec());
        sim.edit(|spec| spec.decode.parallelism.tensor = 2);
        sim.reconcile(usize::MAX);
        sim.deleting = Some(sim.now);
        let workloads = sim.world.workloads.clone();
        let mut ticks = 0;
        while sim.finalizer {
            sim.reconcile(usize::MAX);
            assert_eq!(sim.world.workloads, workloads);
            sim.tick();
            for pod in &mut sim.world.pods {
                pod.in_flight = if stuck { 1 } else { pod.in_flight };
            }
            ticks += 1;
            assert!(ticks < 12);
        }
        assert_eq!(sim.world.order, Some(Traffic::Reject));
        assert_eq!(sim.wrong, [""; 0]);
        assert_eq!(stuck, ticks > 8, "{ticks}");
    }
}

#[test]
fn a_deletion_waits_for_requests_until_the_drain_is_over_and_no_longer() {
    let mut sim = settled(spec());
    sim.deleting = Some(sim.now);
    let drain = i64::from(sim.spec.timeouts.drain_seconds);
    for (later, waits) in [(drain - 1, true), (drain, false)] {
        let mut sim = sim.clone();
        sim.now += later;
        assert_eq!(sim.plan().finalizer, waits, "{later}");
    }
}

#[test]
fn a_hold_stays_where_it_failed() {
    let mut start = spec();
    start.rollout.on_failure = OnFailure::Hold;
    let mut sim = settled(start);
    sim.bad_probe.insert({
        let mut spec = sim.spec.clone();
        spec.decode.parallelism.tensor = 2;
        tandem_crds::Inputs::of(&spec).target()
    });
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    sim.rest(100);
    assert_eq!((sim.reason("Stalled"), sim.reason("Ready")), ("Held", "Held"));
    let target = sim.status.rollout.as_ref().unwrap().target.clone();
    let hash = sim
        .revisions
        .iter()
        .find(|stored| stored.id == target)
        .unwrap()
        .hash(Role::Decode)
        .to_owned();
    assert!(
        sim.world
            .pods
            .iter()
            .filter(|pod| pod.role == Role::Decode)
            .all(|pod| pod.revision == hash)
    );
    assert_eq!(sim.world.order, Some(Traffic::Admit));
}
