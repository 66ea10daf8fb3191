//! What each step waits for, and what it does not.

use tandem_crds::status::{Direction, Step};
use tandem_crds::{Approval, PDDeploymentSpec, Role};
use tandem_plan::{Plan, Pod, Traffic, Trouble, Workload, WorkloadIntent};

use crate::sim::{Sim, TICK_SECONDS};
use crate::{ready, settled, spec};

/// The only pod of a role serves no more; whether something keeps it from coming back.
fn down(sim: &mut Sim, role: Role, in_trouble: bool) {
    let pod = sim.world.pods.iter_mut().find(|pod| pod.role == role).unwrap();
    pod.ready = false;
    pod.trouble = in_trouble.then(|| Trouble {
        reason: "CrashLoop".into(),
        message: "exit code 1".into(),
    });
}

/// Passes and ticks until a step is reached; the world has not moved on since.
#[track_caller]
fn until(sim: &mut Sim, step: Step) {
    sim.until(|sim| sim.status.step == step);
}

fn step(sim: &Sim) -> Step {
    sim.plan().status.step
}

#[test]
fn a_change_of_one_role_waits_for_another_that_comes_back_or_not_for_one_in_trouble() {
    for in_trouble in [false, true] {
        let mut sim = settled(spec());
        down(&mut sim, Role::Prefill, in_trouble);
        sim.edit(|spec| spec.decode.parallelism.tensor = 2);
        for _ in 0..2 {
            sim.reconcile(usize::MAX);
        }
        for pod in &mut sim.world.pods {
            pod.in_flight = 0;
        }
        assert_eq!(step(&sim), if in_trouble { Step::Decode } else { Step::Prefill });
    }
    // one of two that serves comes no more, and that which goes stands for none
    let mut start = spec();
    start.prefill.gpus_per_replica = 2;
    start.prefill.replicas = 2;
    let mut sim = settled(start);
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    until(&mut sim, Step::Quiesce);
    for pod in &mut sim.world.pods {
        pod.in_flight = 0;
    }
    down(&mut sim, Role::Prefill, true);
    let gone = sim
        .world
        .pods
        .iter()
        .find(|pod| pod.role == Role::Prefill)
        .unwrap()
        .clone();
    assert_eq!(step(&sim), Step::Decode);
    down(&mut sim, Role::Prefill, false);
    assert_eq!(step(&sim), Step::Prefill);
    sim.world.pods.push(Pod {
        terminating: true,
        uid: "gone".into(),
        ..gone
    });
    assert_eq!(step(&sim), Step::Prefill);
    // and so for what comes after the engines
    for in_trouble in [false, true] {
        let mut sim = settled(spec());
        sim.edit(|spec| spec.decode.parallelism.tensor = 2);
        until(&mut sim, Step::Gates);
        down(&mut sim, Role::Router, in_trouble);
        assert_eq!(step(&sim), Step::Gates);
    }
}

#[test]
fn what_is_scaled_up_is_waited_for_even_in_trouble() {
    let mut sim = settled(spec());
    sim.gpus_per_node = 3;
    sim.edit(|spec| {
        spec.decode.replicas = 2;
        spec.gpus.budget = 12;
    });
    for _ in 0..10 {
        sim.reconcile(usize::MAX);
        sim.tick();
    }
    sim.reconcile(usize::MAX);
    assert_eq!(sim.reason("CapacitySatisfied"), "Unschedulable");
    assert_eq!(sim.status.step, Step::Decode);

    let mut sim = settled(spec());
    let before = sim.uids(Role::Router);
    let routers = sim.spec.router.replicas;
    sim.edit(|spec| spec.router.replicas = routers + 1);
    until(&mut sim, Step::Router);
    sim.tick();
    let mut slow = sim.clone();
    let new = slow
        .world
        .pods
        .iter_mut()
        .find(|pod| pod.role == Role::Router && !pod.ready);
    new.unwrap().trouble = Some(Trouble {
        reason: "CrashLoop".into(),
        message: "exit code 1".into(),
    });
    assert_eq!(step(&slow), Step::Router);
    assert!(sim.rest(100), "{:#?}", sim.status);
    assert_eq!(sim.uids(Role::Router).len(), before.len() + 1);
}

#[test]
fn a_router_is_replaced_once_the_old_one_serves_no_more() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.router.image = "router:2".into());
    until(&mut sim, Step::Gates);
    let mut old = Pod::unheard("old".into(), "old".into(), Role::Router, "r-old".into());
    assert_eq!(step(&sim), Step::Gates);
    old.ready = true;
    sim.world.pods.push(old);
    assert_eq!(step(&sim), Step::Router);
    sim.world.pods.last_mut().unwrap().terminating = true;
    assert_eq!(step(&sim), Step::Gates);
}

#[test]
fn decode_goes_back_to_a_contract_only_behind_its_prefill() {
    let mut sim = settled(spec());
    let first = sim.revisions[0].clone();
    sim.edit(|spec| spec.model.revision = "ab".repeat(32));
    until(&mut sim, Step::Router);
    sim.edit(|spec| spec.model.revision = String::new());
    // Prefill does not come back to what it was.
    sim.broken.insert(first.hash(Role::Prefill).to_owned());
    for _ in 0..60 {
        sim.reconcile(usize::MAX);
        sim.tick();
        let back = |pod: &Pod| pod.role == Role::Decode && pod.revision == first.hash(Role::Decode);
        assert!(!sim.world.pods.iter().any(back), "{:#?}", sim.world.workloads);
    }
    assert_eq!(
        (sim.wrong.len(), sim.status.step),
        (0, Step::Prefill),
        "{:?}",
        sim.wrong
    );
    sim.broken.clear();
    assert!(sim.rest(300), "{:#?}", sim.status);
    ready(&sim);
    assert_eq!(sim.status.revisions.running, first.id);
}

#[test]
fn a_revert_waits_for_each_role_that_the_change_had_restarted() {
    let mut sim = settled(spec());
    let first = sim.revisions[0].clone();
    sim.bad_probe.insert({
        let mut spec = sim.spec.clone();
        (spec.prefill.parallelism.tensor, spec.decode.parallelism.tensor) = (2, 2);
        tandem_crds::Inputs::of(&spec).target()
    });
    sim.edit(|spec| (spec.prefill.parallelism.tensor, spec.decode.parallelism.tensor) = (2, 2));
    until(&mut sim, Step::Gates);
    sim.broken.insert(first.hash(Role::Prefill).to_owned());
    for _ in 0..60 {
        sim.tick();
        sim.reconcile(usize::MAX);
    }
    let rollout = sim.status.rollout.as_ref().unwrap();
    assert_eq!((rollout.direction, sim.status.step), (Direction::Revert, Step::Prefill));
}

#[test]
fn a_queue_waits_as_long_as_the_last_change_may() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    sim.until(|sim| sim.serving(Role::Decode) == 0);
    let until = |sim: &Sim| match sim.world.order {
        Some(Traffic::Queue { until }) => until.as_second(),
        order => panic!("{order:?}"),
    };
    let queue = i64::from(sim.spec.timeouts.restart_queue_seconds);
    assert!(until(&sim) < sim.now + queue);
    sim.now += 20;
    sim.edit(|spec| spec.decode.parallelism.tensor = 4);
    let begun = sim.now;
    for _ in 0..2 {
        sim.reconcile(usize::MAX);
    }
    assert_eq!(until(&sim), begun + queue);
    // Who waits already was promised that.
    sim.edit(|spec| spec.timeouts.restart_queue_seconds /= 2);
    sim.reconcile(usize::MAX);
    assert_eq!(until(&sim), begun + queue);
}

#[test]
fn requests_that_never_end_hold_a_change_up_for_the_drain_once() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.model.revision = "ab".repeat(32));
    let mut quiesced = Vec::new();
    let mut last = Step::Admit;
    for _ in 0..100 {
        sim.reconcile(usize::MAX);
        match (last, sim.status.step) {
            (Step::Quiesce, Step::Quiesce) => {}
            (_, Step::Quiesce) => quiesced.push((sim.now, 0)),
            (Step::Quiesce, _) => quiesced.last_mut().unwrap().1 = sim.now,
            _ => {}
        }
        last = sim.status.step;
        sim.tick();
        for pod in sim.world.pods.iter_mut().filter(|pod| pod.role == Role::Router) {
            pod.in_flight = 1;
        }
    }
    let [(from, to)] = quiesced[..] else {
        panic!("{quiesced:?}")
    };
    let drain = i64::from(sim.spec.timeouts.drain_seconds);
    assert!((drain..=drain + TICK_SECONDS).contains(&(to - from)), "{}", to - from);
}

#[test]
fn knobs_are_live_only_once_both_the_processes_and_the_next_ones_have_them() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.decode.knobs.max_running = 96);
    sim.reconcile(usize::MAX);
    let live = {
        let mut sim = sim.clone();
        sim.reconcile(usize::MAX);
        sim
    };
    assert_eq!(step(&live), Step::Gates);
    let mut told_alone = live.clone();
    let old = sim.world.knobs[&Role::Decode].clone();
    assert_ne!(live.world.knobs[&Role::Decode], old);
    told_alone.world.knobs.insert(Role::Decode, old.clone());
    assert_eq!(step(&told_alone), Step::Apply);
    let mut written_alone = live;
    let decode = written_alone.world.pods.iter_mut().find(|pod| pod.role == Role::Decode);
    decode.unwrap().knobs = Some(old);
    assert_eq!(step(&written_alone), Step::Apply);
}

#[test]
fn a_router_that_has_not_heard_the_order_is_waited_for_with_nothing_in_flight() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    until(&mut sim, Step::Quiesce);
    for pod in &mut sim.world.pods {
        pod.in_flight = 0;
    }
    assert_eq!(step(&sim), Step::Decode);
    let router = sim.world.pods.iter_mut().find(|pod| pod.role == Role::Router);
    router.unwrap().order = Some(Traffic::Admit);
    assert_eq!(step(&sim), Step::Quiesce);
}

#[test]
fn approval_is_asked_before_anything_is_moved_and_not_amid_it() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    sim.until(|sim| {
        let hash = sim.revisions.last().unwrap().hash(Role::Decode);
        let new = |workload: &&Workload| workload.revision == hash;
        sim.world
            .workloads
            .iter()
            .find(new)
            .is_some_and(|new| new.replicas == 1)
    });
    // What another change has begun goes on in this one.
    sim.edit(|spec| {
        spec.router.image = "router:2".into();
        spec.rollout.approval = Approval::BeforeRestart;
    });
    sim.reconcile(usize::MAX);
    let hash = sim.revisions.last().unwrap().hash(Role::Decode).to_owned();
    let of_it = |workload: &&mut Workload| workload.revision == hash;
    let begun = sim.world.workloads.iter_mut().find(of_it).unwrap();
    assert_eq!(begun.replicas, 1);
    begun.replicas = 0;
    assert_eq!(step(&sim), Step::Approve, "it is there and asks for no pod");
    sim.world.workloads.iter_mut().find(of_it).unwrap().replicas = 1;
    assert_ne!(step(&sim), Step::Approve);
}

#[test]
fn a_clock_that_goes_back_lets_nothing_wait_for_longer_than_it_may() {
    let change = |spec: &mut PDDeploymentSpec| {
        spec.rollout.approval = Approval::BeforePromote;
        spec.decode.parallelism.tensor = 2;
    };
    let mut sim = settled(spec());
    sim.edit(change);
    until(&mut sim, Step::Quiesce);
    sim.skew = -50_000;
    sim.reconcile(usize::MAX);
    let (now, limit) = (
        sim.now + sim.skew,
        i64::from(sim.spec.rollout.progress_deadline_seconds),
    );
    let rollout = sim.status.rollout.clone().unwrap();
    assert_eq!(rollout.deadline.0.as_second(), now + limit);
    assert_eq!(rollout.step_started_at.0.as_second(), now);
    // The same for one that stands.
    let mut sim = settled(spec());
    sim.edit(change);
    until(&mut sim, Step::Approve);
    sim.skew = -50_000;
    sim.reconcile(usize::MAX);
    let rollout = sim.status.rollout.clone().unwrap();
    assert_eq!(rollout.stopped_at.unwrap().0.as_second(), sim.now + sim.skew);
}

/// What a role's workload of the newest stored revision asks for, as it is planned now.
fn asked(sim: &Sim, role: Role) -> i32 {
    let hash = sim.revisions.last().unwrap().hash(role).to_owned();
    let mut intents = sim.plan().workloads.into_iter();
    let of_it = intents.find(|intent| intent.role == role && intent.revision == hash);
    of_it.map_or(0, |intent| intent.replicas)
}

// The API takes both roles to zero or none; the planner leaves that to it.
#[test]
fn a_role_that_goes_to_zero_is_quiesced_once() {
    let mut start = spec();
    start.gpus.budget = 12;
    let mut sim = settled(start);
    sim.edit(|spec| spec.decode.replicas = 0);
    until(&mut sim, Step::Quiesce);
    until(&mut sim, Step::Decode);
    assert!(sim.rest(100), "{:#?}", sim.status);
    assert_eq!(sim.serving(Role::Decode), 0);
    // It is not there to be taken away, and a role beside it has room.
    sim.edit(|spec| spec.router.image = "router:2".into());
    let writes = sim.writes.len();
    assert!(sim.rest(100), "{:#?}", sim.status);
    let held = |write: &String| write.contains("Queue");
    assert!(!sim.writes[writes..].iter().any(held), "{:?}", sim.writes);
}

#[test]
fn a_role_that_goes_to_zero_is_quiesced_before_anything_moves() {
    let mut start = spec();
    (start.prefill.replicas, start.prefill.gpus_per_replica) = (3, 1);
    start.gpus.budget = 16;
    let mut sim = settled(start);
    sim.edit(|spec| {
        spec.prefill.image = "engine:2".into();
        spec.decode.replicas = 0;
    });
    let steps = crate::steps(&mut sim);
    assert_eq!(steps[..3], [Step::Admit, Step::Quiesce, Step::Prefill]);
    assert_eq!(steps.iter().filter(|step| **step == Step::Quiesce).count(), 1);
}

#[test]
fn a_new_contract_keeps_none_of_the_old_replicas() {
    let mut start = spec();
    (start.prefill.replicas, start.prefill.gpus_per_replica) = (3, 1);
    (start.decode.replicas, start.decode.gpus_per_replica) = (3, 1);
    start.gpus.budget = 16;
    let mut sim = settled(start);
    sim.edit(|spec| spec.model.revision = "ab".repeat(32));
    for (step, role) in [(Step::Prefill, Role::Prefill), (Step::Decode, Role::Decode)] {
        until(&mut sim, step);
        let hash = sim.revisions.last().unwrap().hash(role).to_owned();
        let old = |workload: &&Workload| workload.role == role && workload.revision != hash;
        let left: i32 = sim.world.workloads.iter().filter(old).map(|old| old.replicas).sum();
        assert_eq!((left, asked(&sim, role)), (0, 3), "{role:?}");
    }
    assert!(sim.rest(200), "{:#?}", sim.status);
    ready(&sim);
}

#[test]
fn replicas_are_added_at_once_where_none_is_replaced() {
    let mut sim = settled(spec());
    sim.edit(|spec| {
        spec.gpus.budget = 16;
        spec.decode.replicas = 3;
    });
    sim.reconcile(usize::MAX);
    assert_eq!(asked(&sim, Role::Decode), 3);
}

#[test]
fn a_pod_without_gpus_waits_for_none() {
    let mut sim = settled(spec());
    sim.edit(|spec| {
        spec.gpus.budget = 4;
        spec.decode.gpus_per_replica = 0;
    });
    until(&mut sim, Step::Decode);
    assert!(sim.world.pods.iter().map(|pod| pod.gpus).sum::<i32>() > 4);
    assert_eq!(asked(&sim, Role::Decode), 1);
}

#[test]
fn fewer_replicas_are_waited_for() {
    let mut start = spec();
    (start.decode.replicas, start.decode.gpus_per_replica) = (3, 1);
    let mut sim = settled(start);
    sim.edit(|spec| spec.decode.replicas = 2);
    sim.reconcile(usize::MAX);
    assert_eq!((step(&sim), asked(&sim, Role::Decode)), (Step::Decode, 2));
    assert!(sim.rest(100), "{:#?}", sim.status);
    ready(&sim);
}

#[test]
fn the_last_old_replica_is_waited_for_until_the_new_ones_are_known() {
    let mut start = spec();
    (start.decode.replicas, start.decode.gpus_per_replica) = (2, 1);
    let mut sim = settled(start);
    sim.edit(|spec| spec.decode.image = "engine:2".into());
    sim.reconcile(usize::MAX);
    let hash = sim.revisions.last().unwrap().hash(Role::Decode).to_owned();
    let new = |sim: &Sim| -> Vec<String> {
        let ready = sim.world.pods.iter().filter(|pod| pod.ready && pod.revision == hash);
        ready.map(|pod| pod.uid.clone()).collect()
    };
    sim.route_seconds = 100_000;
    sim.until(|sim| new(sim).len() == 1);
    assert_eq!(step(&sim), Step::Decode);
    let old = |plan: &Plan| {
        let intents = plan.workloads.iter().filter(|intent| intent.role == Role::Decode);
        intents
            .filter(|intent| intent.revision != hash)
            .map(|intent| intent.replicas)
            .sum::<i32>()
    };
    assert_eq!(old(&sim.plan()), 1);
}

#[test]
fn a_workload_goes_only_with_its_last_pod_and_what_may_come_back_stays() {
    let mut sim = settled(spec());
    let old = sim.revisions[0].hash(Role::Decode).to_owned();
    sim.stop_seconds = 10_000;
    sim.edit(|spec| (spec.gpus.budget, spec.decode.parallelism.tensor) = (16, 2));
    let has = |sim: &Sim| {
        let plan = sim.plan();
        let template = |intent: &WorkloadIntent| {
            let stored = sim
                .revisions
                .iter()
                .find(|stored| Some(&stored.id) == intent.template.as_ref());
            stored.is_none_or(|stored| stored.hash(intent.role) == intent.revision)
        };
        assert!(plan.workloads.iter().all(template), "{:#?}", plan.workloads);
        plan.workloads.iter().any(|intent| intent.revision == old)
    };
    until(&mut sim, Step::Gates);
    let of_old = |pod: &Pod| pod.revision == old;
    assert!(sim.world.pods.iter().any(of_old));
    let mut without = sim.clone();
    without.world.pods.retain(|pod| !of_old(pod));
    assert!(has(&without), "a revert would need it");
    sim.until(|sim| sim.status.rollout.is_none());
    assert!(has(&sim), "its last pod ends yet");
    sim.world.pods.retain(|pod| !of_old(pod));
    assert!(!has(&sim));
    // Its name alone, of another role, is not its own.
    let other = Pod::unheard("other".into(), "other".into(), Role::Prefill, old.clone());
    sim.world.pods.push(other);
    assert!(!has(&sim));
}

#[test]
fn a_pod_whose_workload_is_gone_holds_its_gpus_until_it_is_gone_too() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    until(&mut sim, Step::Decode);
    let new = sim.revisions.last().unwrap().clone();
    let is_old = |role, revision: &str| role == Role::Decode && revision != new.hash(Role::Decode);
    sim.world
        .workloads
        .retain(|workload| !is_old(workload.role, &workload.revision));
    sim.world.pods.retain(|pod| !is_old(pod.role, &pod.revision));
    assert_eq!(asked(&sim, Role::Decode), 1);
    for revision in ["d-gone", new.hash(Role::Prefill)] {
        let mut sim = sim.clone();
        sim.world.pods.push(Pod {
            gpus: 4,
            terminating: true,
            ..Pod::unheard("gone".into(), "gone".into(), Role::Decode, revision.into())
        });
        assert_eq!(asked(&sim, Role::Decode), 0, "{revision}");
        sim.world.pods.last_mut().unwrap().lost = true;
        assert_eq!(asked(&sim, Role::Decode), 1, "{revision}");
    }
}
