//! Random worlds: edits, crashes between any two writes, dying pods, lost nodes, a clock that jumps.

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use tandem_crds::{Approval, OnFailure, RestartRoles, RestartScope, Role, TrafficDuringRestart};

use crate::sim::{Node, Sim, TICK_SECONDS};
use crate::spec;

/// What happens next.
#[derive(Debug, Clone)]
enum Happens {
    Edit(Edit),
    /// The operator makes a pass and dies after so many writes.
    Pass(usize),
    Tick,
    KillPod(usize),
    CrashPod(usize),
    LoseNode(usize),
    NodeBack(usize),
    NodeGone(usize),
    Clock(i64),
    /// Pods take so long to start and to end, and so long until routers know them.
    Slow(i64, i64, i64),
    RestartOperator,
    NewDefaults(u8),
    /// What runs of the newest revision never gets ready.
    Break(Role),
    BadProbe,
}

#[derive(Debug, Clone)]
enum Edit {
    Tensor(Role, i32),
    Replicas(Role, i32),
    Knob(i32),
    Contract(u8),
    RouterImage(u8),
    Gpus(i32, i32),
    /// As few GPUs as the pods need.
    Tight,
    Token(u8, RestartRoles),
    Pause(bool),
    Approval(Approval),
    Approve,
    OnFailure(OnFailure),
    Traffic(TrafficDuringRestart),
    Full(bool),
}

fn engine() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Prefill), Just(Role::Decode)]
}

fn edit() -> impl Strategy<Value = Edit> {
    prop_oneof![
        (engine(), prop_oneof![Just(1), Just(2)]).prop_map(|(role, tensor)| Edit::Tensor(role, tensor)),
        (engine(), 1..4).prop_map(|(role, replicas)| Edit::Replicas(role, replicas)),
        (1..4).prop_map(Edit::Knob),
        (0..3u8).prop_map(Edit::Contract),
        (0..3u8).prop_map(Edit::RouterImage),
        (1..3, 1..3).prop_map(|(prefill, decode)| Edit::Gpus(prefill, decode)),
        Just(Edit::Tight),
        (0..3u8, roles()).prop_map(|(token, roles)| Edit::Token(token, roles)),
        any::<bool>().prop_map(Edit::Pause),
        prop_oneof![
            Just(Approval::Automatic),
            Just(Approval::BeforeRestart),
            Just(Approval::BeforePromote)
        ]
        .prop_map(Edit::Approval),
        Just(Edit::Approve),
        prop_oneof![3 => Just(OnFailure::Revert), 1 => Just(OnFailure::Hold)].prop_map(Edit::OnFailure),
        prop_oneof![Just(TrafficDuringRestart::Queue), Just(TrafficDuringRestart::Reject)].prop_map(Edit::Traffic),
        any::<bool>().prop_map(Edit::Full),
    ]
}

fn roles() -> impl Strategy<Value = RestartRoles> {
    prop_oneof![
        Just(RestartRoles::Auto),
        Just(RestartRoles::Full),
        Just(RestartRoles::DecodeOnly)
    ]
}

fn happens() -> impl Strategy<Value = Happens> {
    prop_oneof![
        3 => edit().prop_map(Happens::Edit),
        6 => (0..6usize).prop_map(Happens::Pass),
        6 => Just(Happens::Pass(usize::MAX)),
        10 => Just(Happens::Tick),
        2 => (0..20usize).prop_map(Happens::KillPod),
        1 => (0..20usize).prop_map(Happens::CrashPod),
        1 => (0..2usize).prop_map(Happens::LoseNode),
        1 => (0..2usize).prop_map(Happens::NodeBack),
        1 => Just(Happens::NodeGone(0)),
        1 => (-5_000..5_000i64).prop_map(Happens::Clock),
        1 => (0..200i64, 0..200i64, 0..200i64).prop_map(|(start, stop, route)| Happens::Slow(start, stop, route)),
        1 => Just(Happens::RestartOperator),
        1 => (1..3u8).prop_map(Happens::NewDefaults),
        1 => engine().prop_map(Happens::Break),
        1 => Just(Happens::BadProbe),
    ]
}

fn apply(sim: &mut Sim, edit: &Edit) {
    sim.edit(|spec| {
        match *edit {
            Edit::Tensor(Role::Prefill, tensor) => spec.prefill.parallelism.tensor = tensor,
            Edit::Tensor(_, tensor) => spec.decode.parallelism.tensor = tensor,
            Edit::Replicas(Role::Prefill, replicas) => spec.prefill.replicas = replicas,
            Edit::Replicas(_, replicas) => spec.decode.replicas = replicas,
            Edit::Knob(running) => spec.decode.knobs.max_running = running,
            Edit::Contract(revision) => spec.model.revision = format!("{revision:064}"),
            Edit::RouterImage(image) => spec.router.image = format!("router:{image}"),
            Edit::Gpus(prefill, decode) => {
                spec.prefill.gpus_per_replica = prefill * 2;
                spec.decode.gpus_per_replica = decode * 2;
            }
            Edit::Tight => spec.gpus.budget = 0,
            Edit::Token(token, roles) => {
                spec.restart.token = token.to_string();
                spec.restart.scope = roles;
            }
            Edit::Pause(paused) => spec.rollout.paused = paused,
            Edit::Approval(approval) => spec.rollout.approval = approval,
            Edit::Approve => spec.rollout.approved_revision = tandem_crds::Inputs::of(spec).target(),
            Edit::OnFailure(failure) => spec.rollout.on_failure = failure,
            Edit::Traffic(traffic) => spec.rollout.traffic_during_restart = traffic,
            Edit::Full(full) => {
                spec.rollout.restart_scope = if full { RestartScope::Full } else { RestartScope::Auto };
            }
        }
        let gpus = |role: &tandem_crds::EngineRole| role.replicas * role.gpus_per_replica;
        spec.gpus.budget = spec.gpus.budget.max(gpus(&spec.prefill) + gpus(&spec.decode));
    });
}

fn happen(sim: &mut Sim, event: &Happens) {
    match event {
        Happens::Edit(edit) => apply(sim, edit),
        Happens::Pass(writes) => sim.reconcile(*writes),
        Happens::Tick => sim.tick(),
        Happens::KillPod(at) => sim.kill(*at),
        Happens::CrashPod(at) => sim.crash(*at),
        Happens::LoseNode(at) => {
            if sim.nodes[*at] == Node::Up {
                sim.nodes[*at] = Node::Lost { since: sim.now };
            }
        }
        Happens::NodeBack(at) if sim.nodes[*at] != Node::Gone => sim.nodes[*at] = Node::Up,
        Happens::NodeBack(_) => {}
        Happens::NodeGone(at) => sim.nodes[*at] = Node::Gone,
        Happens::Slow(start, stop, route) => {
            (sim.start_seconds, sim.stop_seconds, sim.route_seconds) = (*start, *stop, *route);
        }
        Happens::RestartOperator => sim.restart_operator(),
        Happens::Clock(by) => sim.skew += by,
        Happens::NewDefaults(image) => sim.images.engine = format!("engine:{image}"),
        Happens::Break(role) => {
            if let Some(revision) = sim.revisions.last() {
                let hash = revision.hash(*role).to_owned();
                // What was good before stays good.
                let good = [&sim.status.revisions.running, &sim.status.revisions.last_good];
                let is_good = sim
                    .revisions
                    .iter()
                    .any(|known| good.contains(&&known.id) && known.hash(*role) == hash);
                if !is_good {
                    sim.broken.insert(hash);
                }
            }
        }
        Happens::BadProbe => {
            sim.bad_probe.insert(tandem_crds::Inputs::of(&sim.spec).target());
        }
    }
}

/// The same worlds each time; fewer or more by `PROPTEST_CASES`, others by `PROPTEST_RNG_SEED`.
fn config(cases: u32) -> ProptestConfig {
    let given = ProptestConfig::default();
    let is_given = std::env::var_os("PROPTEST_CASES").is_some();
    ProptestConfig {
        cases: if is_given { given.cases } else { cases },
        failure_persistence: None,
        rng_seed: match given.rng_seed {
            RngSeed::Random => RngSeed::Fixed(1),
            fixed @ RngSeed::Fixed(_) => fixed,
        },
        ..given
    }
}

/// Worlds of each run.
const WORLDS: u32 = 10_000;

proptest! {
    #![proptest_config(config(WORLDS))]

    /// Whatever happened: once nothing more does, the deployment settles, or stalls with a reason that a person can act on;
    /// no plan on the way went against an invariant.
    #[test]
    fn every_world_ends_settled_or_stalled_for_a_reason(events in prop::collection::vec(happens(), 0..80)) {
        let mut sim = Sim::new(spec());
        sim.nodes.push(Node::Up);
        for event in &events {
            happen(&mut sim, event);
        }
        sim.edit(|spec| spec.rollout.paused = false);
        // The second one was lost for a while.
        happen(&mut sim, &Happens::NodeBack(1));
        let rests = sim.rest(3_000);
        prop_assert_eq!(&sim.wrong, &Vec::<String>::new());
        let status = &sim.status;
        if !rests {
            let message = status.conditions.iter().find(|one| one.type_ == "Stalled").map(|one| one.message.clone());
            let remedy = match sim.reason("Stalled") {
                "Held" => "change the spec, or set restart.token to try again",
                "AwaitsApproval" => "to rollout.approvedRevision",
                "RevertOverdue" if sim.is_broken(&status.revisions.last_good) => "change what keeps it, or the spec",
                _ => "no reason that a person can act on",
            };
            prop_assert_eq!(sim.condition("Stalled"), "True");
            prop_assert!(message.is_some_and(|text| text.contains(remedy)), "{:#?}\n{:#?}", status, sim.world);
            return Ok(());
        }
        let target = tandem_crds::Inputs::of(&sim.spec).target();
        let rejected = tandem_plan::target_of(&status.revisions.rejected) == target;
        // What was promoted while it ran may never come back once its process dies.
        let crashes = sim.is_broken(&status.revisions.running);
        if rejected {
            prop_assert_eq!(sim.reason("Ready"), "Reverted");
            prop_assert_eq!(&status.revisions.running, &status.revisions.last_good);
        } else if crashes && sim.condition("Ready") == "False" {
            prop_assert_eq!(sim.reason("Ready"), "PodsNotReady");
        } else {
            prop_assert_eq!(sim.condition("Ready"), "True", "{:#?}\n{:#?}", status, sim.world);
            prop_assert_eq!(tandem_plan::target_of(&status.revisions.running), target);
        }
        // Planned again, nothing is.
        let writes = sim.writes.len();
        for _ in 0..3 {
            sim.reconcile(usize::MAX);
        }
        prop_assert_eq!(&sim.writes[writes..], &Vec::<String>::new()[..]);
    }
}

proptest! {
    #![proptest_config(config(WORLDS / 10))]

    /// An operator that dies after each write comes to the same end by the same moves as one that never does.
    #[test]
    fn dying_after_any_write_changes_neither_the_end_nor_the_moves(
        edits in prop::collection::vec(edit(), 1..4), deaths in prop::collection::vec(1..4usize, 0..60),
    ) {
        let stops = |edit: &Edit| matches!(edit, Edit::Pause(_) | Edit::Approval(_));
        let run = |deaths: &[usize]| {
            let mut sim = Sim::new(spec());
            sim.rest(100);
            for edit in edits.iter().filter(|edit| !stops(edit)) {
                apply(&mut sim, edit);
            }
            let from = sim.writes.len();
            for writes in deaths {
                sim.reconcile(*writes);
            }
            let rests = sim.rest(3_000);
            let moves: Vec<String> = sim.writes[from..].iter().filter(|write| write.starts_with("scale")).cloned().collect();
            (rests, moves, sim.status.revisions.clone(), sim.wrong)
        };
        let (undisturbed, disturbed) = (run(&[]), run(&deaths));
        prop_assert!(undisturbed.0);
        prop_assert_eq!(undisturbed, disturbed);
    }

    /// Edits that restart engines under an unchanged contract, one cutting the other off, some of them never getting ready:
    /// of each role all but one pod serve at every moment.
    #[test]
    fn all_but_one_serve_while_a_role_of_an_unchanged_contract_restarts(
        replicas in (1..4, 1..4), spare in 0..3, times in (0..100i64, 0..100i64, 0..100i64),
        changes in prop::collection::vec((restart(), 0..40usize, prop::bool::weighted(0.2)), 1..5),
        deaths in prop::collection::vec(0..6usize, 0..80),
    ) {
        let mut start = spec();
        (start.prefill.replicas, start.decode.replicas) = replicas;
        (start.prefill.gpus_per_replica, start.decode.gpus_per_replica) = (2, 2);
        start.gpus.budget = 2 * (replicas.0 + replicas.1) + spare;
        let mut sim = Sim::new(start);
        sim.rest(100);
        (sim.start_seconds, sim.stop_seconds, sim.route_seconds) = times;
        let mut deaths = deaths.into_iter();
        let mut fewest = (replicas.0 as usize, replicas.1 as usize);
        let mut live = |sim: &mut Sim| {
            sim.reconcile(deaths.next().unwrap_or(usize::MAX));
            sim.tick();
            let now = (sim.serving(Role::Prefill), sim.serving(Role::Decode));
            fewest = (fewest.0.min(now.0), fewest.1.min(now.1));
        };
        for (edit, ticks, breaks) in &changes {
            apply(&mut sim, edit);
            for tick in 0..*ticks {
                live(&mut sim);
                if tick == 0 && *breaks {
                    happen(&mut sim, &Happens::Break(Role::Prefill));
                    happen(&mut sim, &Happens::Break(Role::Decode));
                }
            }
        }
        // Until the last has failed by its deadline and is reverted, or is seen not to come back by another.
        for _ in 0..2_000 {
            live(&mut sim);
            let ends = sim.status.rollout.is_none() || sim.condition("Stalled") == "True";
            if ends && sim.status.observed_generation == sim.generation {
                break;
            }
        }
        prop_assert_eq!(&sim.wrong, &Vec::<String>::new());
        // What was promoted right before it broke is what is reverted to.
        let stalls = sim.reason("Stalled") == "RevertOverdue" && sim.is_broken(&sim.status.revisions.last_good);
        prop_assert!(sim.status.rollout.is_none() || stalls, "{:#?}", sim.status);
        prop_assert!(fewest >= (replicas.0 as usize - 1, 0) && fewest.1 + 1 >= replicas.1 as usize, "{:?} of {:?}", fewest, replicas);
    }

    /// Whatever happened before and after: of a deployment that is deleted nothing is made, and it lets go within its drain.
    #[test]
    fn a_deployment_that_is_deleted_makes_nothing_and_lets_go(
        before in prop::collection::vec(happens(), 0..40), after in prop::collection::vec(happens(), 0..20),
    ) {
        let mut sim = Sim::new(spec());
        for event in &before {
            happen(&mut sim, event);
        }
        sim.deleting = Some(sim.now + sim.skew);
        let (workloads, stored) = (sim.world.workloads.clone(), sim.revisions.len());
        for event in &after {
            happen(&mut sim, event);
        }
        sim.skew = 0;
        let drain = i64::from(sim.spec.timeouts.drain_seconds);
        for _ in 0..=drain / TICK_SECONDS {
            sim.reconcile(usize::MAX);
            sim.tick();
        }
        sim.reconcile(usize::MAX);
        prop_assert_eq!(&sim.wrong, &Vec::<String>::new());
        prop_assert_eq!((&sim.world.workloads, sim.revisions.len()), (&workloads, stored));
        prop_assert!(!sim.finalizer);
    }
}

fn restart() -> impl Strategy<Value = Edit> {
    prop_oneof![
        (engine(), 1..3).prop_map(|(role, tensor)| Edit::Tensor(role, tensor)),
        (0..4u8, roles()).prop_map(|(token, roles)| Edit::Token(token, roles)),
        any::<bool>().prop_map(Edit::Full),
    ]
}
