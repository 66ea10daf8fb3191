//! What people are told of what is seen.

use jiff::Timestamp;
use tandem_crds::status::{Direction, RoleStatus};
use tandem_crds::{Approval, Role};
use tandem_plan::{Traffic, Trouble, Workload};

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
    for _ in 0..5_000 {
        sim.reconcile(usize::MAX);
        sim.tick();
        let rollout = sim.status.rollout.as_ref().unwrap();
        reverts += i32::from(rollout.direction == Direction::Revert);
        if sim.condition("Stalled") == "True" {
            break;
        }
    }
    assert_eq!(sim.condition("Stalled"), "True");
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

/// What is told of a role as it is planned now.
fn role(sim: &Sim, role: Role) -> RoleStatus {
    let mut roles = sim.plan().status.roles.into_iter();
    roles.find(|one| one.name == role).unwrap()
}

fn trouble(reason: &str) -> Trouble {
    Trouble {
        reason: reason.into(),
        message: "of some kind".into(),
    }
}

#[test]
fn a_role_is_told_by_its_own_pods_and_those_of_lost_nodes_hold_no_gpus() {
    let mut spec = spec();
    spec.decode.replicas = 2;
    spec.gpus.budget = 12;
    let mut sim = settled(spec);
    assert_eq!(role(&sim, Role::Decode).backend, "cpu", "as the spec says it");
    let mut decodes = sim.world.pods.iter_mut().filter(|pod| pod.role == Role::Decode);
    let (first, second) = (decodes.next().unwrap(), decodes.next().unwrap());
    (first.backend, second.backend) = (String::new(), "cuda".into());
    (second.ready, second.lost) = (false, true);
    let told = role(&sim, Role::Decode);
    let numbers = (told.ready, told.desired, told.lost, told.gpus);
    assert_eq!(numbers, (1, 2, 1, 4));
    assert_eq!((told.serving.as_str(), told.backend.as_str()), ("1/2", "cuda"));
    let told = role(&sim, Role::Prefill);
    assert_eq!((told.ready, told.desired, told.lost, told.gpus), (1, 1, 0, 4));
    let told = role(&sim, Role::Router);
    assert_eq!((told.ready, told.gpus, told.backend.as_str()), (told.desired, 0, ""));
}

#[test]
fn a_role_is_told_by_the_revision_that_is_gone_to() {
    let mut sim = settled(spec());
    let before = role(&sim, Role::Decode).revision;
    // The one that runs is not the first that was stored.
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    sim.reconcile(usize::MAX);
    let target = sim.revisions.last().unwrap().hash(Role::Decode).to_owned();
    assert_ne!(before, target);
    assert_eq!(role(&sim, Role::Decode).revision, target);
    sim.status.rollout.as_mut().unwrap().direction = Direction::Held;
    assert_eq!(role(&sim, Role::Decode).revision, target);
    sim.status.rollout.as_mut().unwrap().direction = Direction::Revert;
    assert_eq!(role(&sim, Role::Decode).revision, before);
}

#[test]
fn ready_says_why_it_is_not() {
    let mut sim = settled(spec());
    sim.edit(|spec| {
        spec.rollout.approval = Approval::BeforeRestart;
        spec.decode.parallelism.tensor = 2;
    });
    sim.reconcile(usize::MAX);
    assert_told(&sim, "Ready", "False", "Approve");
    sim.reconcile(usize::MAX);
    assert_told(&sim, "Stalled", "True", "AwaitsApproval");
    sim.edit(|spec| spec.rollout.paused = true);
    assert_told(&sim, "Ready", "False", "Paused");
    assert_told(&sim, "Stalled", "False", "NotStalled");
}

#[test]
fn a_pod_of_another_revision_that_stays_is_told_and_one_that_goes_is_not() {
    let sim = settled(spec());
    let mut old = sim
        .world
        .pods
        .iter()
        .find(|pod| pod.role == Role::Decode)
        .unwrap()
        .clone();
    "d-old".clone_into(&mut old.revision);
    "of-before".clone_into(&mut old.name);
    "another".clone_into(&mut old.uid);
    old.ready = false;
    for (terminating, lost, stays) in [(false, false, true), (true, false, false), (false, true, false)] {
        let mut sim = sim.clone();
        (old.terminating, old.lost) = (terminating, lost);
        sim.world.pods.push(old.clone());
        let (status, reason, message) = told(&sim, "Ready");
        let said = (status.as_str(), reason.as_str(), message.contains("of-before"));
        let expected = if stays {
            ("False", "PodsNotReady", true)
        } else {
            ("True", "Running", false)
        };
        assert_eq!(said, expected, "{message}");
    }
}

#[test]
fn only_pods_that_stay_lack_capacity() {
    let sim = settled(spec());
    for (reason, terminating, lost, lacks) in [
        ("Unschedulable", false, false, true),
        ("QuotaExceeded", false, false, true),
        ("CrashLoop", false, false, false),
        ("Unschedulable", true, false, false),
        ("Unschedulable", false, true, false),
    ] {
        let mut sim = sim.clone();
        let pod = &mut sim.world.pods[0];
        pod.trouble = Some(trouble(reason));
        (pod.ready, pod.terminating, pod.lost) = (false, terminating, lost);
        let expected = if lacks { ("False", reason) } else { ("True", "Enough") };
        assert_told(&sim, "CapacitySatisfied", expected.0, expected.1);
    }
    let mut sim = sim;
    sim.world.workloads[0].trouble = Some(trouble("QuotaExceeded"));
    assert_told(&sim, "CapacitySatisfied", "False", "QuotaExceeded");
}

#[test]
fn capacity_is_short_at_once_and_enough_a_minute_later() {
    let mut sim = settled(spec());
    sim.now += 1_000;
    for pass in 0..3 {
        let from = sim.now;
        sim.world.pods[0].trouble = Some(trouble("Unschedulable"));
        sim.reconcile(usize::MAX);
        assert_eq!(sim.condition("CapacitySatisfied"), "False", "{pass}");
        sim.world.pods[0].trouble = None;
        sim.now = from + 59;
        sim.reconcile(usize::MAX);
        assert_eq!(sim.condition("CapacitySatisfied"), "False", "{pass}");
        let again = sim.plan().look_again.unwrap();
        assert!((60..=65).contains(&(again.as_second() - from)), "{again}");
        sim.now = from + 60;
        sim.reconcile(usize::MAX);
        assert_eq!(sim.condition("CapacitySatisfied"), "True", "{pass}");
        sim.now += 1;
    }
}
