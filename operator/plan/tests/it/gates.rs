//! What has to hold before a change counts.

use tandem_crds::status::{Direction, Gate, GateOutcome, Step};
use tandem_crds::{GateMode, Role};
use tandem_plan::{Pod, Probe};

use crate::sim::Sim;
use crate::{settled, spec};

/// A change whose pods are all there and whose gates look, with no probe made yet.
fn at_gates(sim: &mut Sim) {
    sim.edit(|spec| spec.decode.parallelism.tensor = 2);
    sim.world.probe = None;
    sim.until(|sim| sim.status.step == Step::Gates);
}

/// A pod of what ran before is still there.
fn left_over(sim: &mut Sim) {
    let decode = sim.world.pods.iter().find(|pod| pod.role == Role::Decode).unwrap();
    let old = Pod::unheard("old".into(), "of-before".into(), Role::Decode, "d-old".into());
    assert_ne!(decode.revision, old.revision);
    sim.world.pods.push(old);
}

/// Passes while nothing but time moves on; the change fails by `failure` at its gate's timeout, and not later.
#[track_caller]
fn assert_fails(sim: &mut Sim, timeout_seconds: i32, failure: &str) {
    let from = sim.now;
    while sim.status.rollout.as_ref().unwrap().direction == Direction::Forward {
        sim.now += 5;
        sim.reconcile(usize::MAX);
        assert!(sim.now - from < 10_000, "{:#?}", sim.status);
    }
    let (took, timeout) = (sim.now - from, i64::from(timeout_seconds));
    let rollout = sim.status.rollout.as_ref().unwrap();
    assert!(
        (timeout..=timeout + 5).contains(&took),
        "{took} of {timeout}: {rollout:#?}"
    );
    assert!(rollout.failure.contains(failure), "{rollout:#?}");
}

#[test]
fn a_probe_that_nobody_answers_fails_at_its_timeout_and_not_later() {
    let mut sim = settled(spec());
    at_gates(&mut sim);
    sim.reconcile(usize::MAX);
    let names: Vec<Gate> = sim.status.gates.iter().map(|record| record.name).collect();
    assert_eq!(names, [Gate::Health, Gate::Probe]);
    let timeout = sim.spec.rollout.gates.probe.timeout_seconds;
    assert_fails(&mut sim, timeout, "gate Probe failed: no answer within");
}

#[test]
fn health_that_does_not_come_fails_at_its_timeout_and_not_later() {
    let mut sim = settled(spec());
    at_gates(&mut sim);
    left_over(&mut sim);
    let timeout = sim.spec.rollout.gates.health.timeout_seconds;
    assert_fails(&mut sim, timeout, "gate Health failed: decode pod of-before");
}

#[test]
fn what_was_found_on_other_pods_counts_for_nothing() {
    let mut sim = settled(spec());
    at_gates(&mut sim);
    let order = sim.plan().probe.unwrap();
    let found = |pods: &str| {
        Some(Probe {
            revision: order.revision.clone(),
            pods: pods.to_owned(),
            outcome: GateOutcome::Passed,
            message: String::new(),
        })
    };
    sim.world.probe = found("others");
    assert_eq!(sim.plan().probe.as_ref(), Some(&order));
    sim.world.probe = found(&order.pods);
    assert!(sim.plan().probe.is_none());
    assert!(sim.plan().status.rollout.is_none());
    // Another pod in the place of one of them.
    let decode = sim
        .world
        .pods
        .iter_mut()
        .find(|pod| pod.role == Role::Decode && pod.ready);
    decode.unwrap().uid = "another".into();
    let again = sim.plan().probe.unwrap();
    assert_ne!(again.pods, order.pods);
    assert!(sim.plan().status.rollout.is_some());
}

#[test]
fn a_gate_that_recommends_or_is_off_keeps_no_change_from_its_end() {
    for mode in [GateMode::Recommend, GateMode::Off] {
        let mut sim = settled(spec());
        sim.edit(|spec| spec.rollout.gates.health.mode = mode);
        at_gates(&mut sim);
        left_over(&mut sim);
        if mode == GateMode::Recommend {
            assert!(sim.plan().probe.is_none(), "it waits for the timeout first");
            sim.reconcile(usize::MAX);
            sim.now += i64::from(sim.spec.rollout.gates.health.timeout_seconds);
            // that of before has its own timeout
            sim.status.gates.retain(|record| record.name == Gate::Health);
        }
        assert!(sim.plan().probe.is_some(), "{mode:?}");
    }
    for mode in [GateMode::Recommend, GateMode::Off] {
        let mut sim = settled(spec());
        sim.edit(|spec| {
            spec.rollout.gates.probe.mode = mode;
            spec.decode.parallelism.tensor = 2;
        });
        sim.bad_probe.insert(tandem_crds::Inputs::of(&sim.spec).target());
        assert!(sim.rest(200), "{:#?}", sim.status);
        assert_eq!(sim.condition("Ready"), "True", "{mode:?}");
    }
}
