//! What each step waits for, and what it does not.

use tandem_crds::status::{Direction, Step};
use tandem_crds::{Approval, PDDeploymentSpec, Role};
use tandem_plan::{Pod, Traffic, Trouble, Workload};

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
