//! What people are told of what is seen.

use jiff::Timestamp;
use tandem_crds::Role;
use tandem_crds::status::Direction;
use tandem_plan::{Traffic, Workload};

use crate::sim::Sim;
use crate::{settled, spec};

/// Status, reason and message of a condition as it is planned now.
fn told(sim: &Sim, type_: &str) -> (String, String, String) {
    let conditions = sim.plan().status.conditions;
    let one = conditions.into_iter().find(|one| one.type_ == type_).unwrap();
    (one.status, one.reason, one.message)
}

#[track_caller]
fn assert_told(sim: &Sim, type_: &str, status: &str, reason: &str) {
    let (now, why, message) = told(sim, type_);
    assert_eq!((now.as_str(), why.as_str()), (status, reason), "{message}");
}

#[test]
fn a_deployment_is_available_where_a_pair_serves_and_requests_go_there() {
    let sim = settled(spec());
    for role in Role::ALL {
        let mut sim = sim.clone();
        for pod in sim.world.pods.iter_mut().filter(|pod| pod.role == role) {
            pod.ready = false;
        }
        assert_told(&sim, "Available", "False", "NoneServes");
    }
    let mut apart = sim.clone();
    let of_decode = |workload: &&mut Workload| workload.role == Role::Decode;
    for workload in apart.world.workloads.iter_mut().filter(of_decode) {
        "another".clone_into(&mut workload.contract);
    }
    assert_told(&apart, "Available", "False", "NoPair");
    // One without a pod that serves is no half of a pair.
    let of_prefill = |workload: &&Workload| workload.role == Role::Prefill;
    let mut old = apart.world.workloads.iter().find(of_prefill).unwrap().clone();
    old.replicas = 0;
    "p-old".clone_into(&mut old.revision);
    "another".clone_into(&mut old.contract);
    apart.world.workloads.push(old);
    assert_told(&apart, "Available", "False", "NoPair");

    let until = Timestamp::from_second(sim.now + 100).unwrap();
    for (order, reason) in [(Traffic::Queue { until }, "Queued"), (Traffic::Reject, "Rejecting")] {
        let mut sim = sim.clone();
        sim.world.order = Some(order);
        assert_told(&sim, "Available", "False", reason);
    }
}

#[test]
fn a_change_says_whether_it_moves() {
    let mut sim = settled(spec());
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    for _ in 0..2 {
        sim.reconcile(usize::MAX);
        sim.tick();
    }
    assert_told(&sim, "Progressing", "True", "Quiesce");
    let mut paused = sim.clone();
    paused.edit(|spec| spec.rollout.paused = true);
    assert_told(&paused, "Progressing", "False", "Waiting");
    assert_told(&paused, "Stalled", "False", "NotStalled");
    let mut held = sim;
    held.status.rollout.as_mut().unwrap().direction = Direction::Held;
    assert_told(&held, "Progressing", "False", "Held");
}

#[test]
fn a_revert_that_does_not_end_is_told_once_it_is_overdue_with_what_is_in_its_way() {
    let mut sim = settled(spec());
    let good = sim.revisions[0].hash(Role::Decode).to_owned();
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    sim.reconcile(usize::MAX);
    let new = sim.revisions.last().unwrap().hash(Role::Decode).to_owned();
    sim.broken.extend([good, new]);
    let mut reverts = 0;
    while sim.condition("Stalled") != "True" {
        sim.reconcile(usize::MAX);
        sim.tick();
        let rollout = sim.status.rollout.as_ref().unwrap();
        reverts += i32::from(rollout.direction == Direction::Revert);
        assert!(reverts < 1_000);
    }
    let rollout = sim.status.rollout.as_ref().unwrap();
    assert!(sim.now >= rollout.deadline.0.as_second() && reverts > 100, "{reverts}");
    let (_, reason, message) = told(&sim, "Stalled");
    assert_eq!(reason, "RevertOverdue");
    assert!(message.contains("CrashLoop: exit code 1"), "{message}");
    assert!(message.ends_with("change what keeps it, or the spec"), "{message}");
}

#[test]
fn that_routers_know_no_pair_is_told_while_requests_are_let_through() {
    let mut sim = settled(spec());
    for pod in sim.world.pods.iter_mut().filter(|pod| pod.role == Role::Router) {
        pod.evidence.no_pair = Some("they speak different versions".into());
    }
    sim.now += 1_000;
    assert_told(&sim, "TransferHealthy", "False", "NoPair");
    sim.world.order = Some(Traffic::Reject);
    assert_told(&sim, "TransferHealthy", "True", "HandoffsFinish");
}
