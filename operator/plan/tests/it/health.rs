//! What is said of the ways between processes, by what they measured.

use tandem_crds::Role;
use tandem_crds::status::GateOutcome;
use tandem_plan::health::{self, Health};
use tandem_plan::{Clients, DefaultImages, Evidence, Handoffs, Pod, Probe, Revision, World};

use crate::sim::Sim;

fn running() -> Revision {
    let images = DefaultImages {
        engine: "e".into(),
        router: "r".into(),
    };
    Revision::admit(&crate::spec(), &images, None, None)
}

fn pod(role: Role, evidence: Evidence) -> Pod {
    Pod {
        ready: true,
        evidence,
        ..Pod::unheard(
            format!("uid-of-{}", role.field()),
            role.field().into(),
            role,
            String::new(),
        )
    }
}

/// Engines that say this of their hand-offs, and a router that says that of the pair.
fn world(prefill: Option<Handoffs>, decode: Option<Handoffs>, no_pair: Option<&str>) -> World {
    let engine = |role, handoffs| {
        pod(
            role,
            Evidence {
                handoffs,
                ..Evidence::default()
            },
        )
    };
    let router = Evidence {
        no_pair: no_pair.map(str::to_owned),
        ..Evidence::default()
    };
    World {
        pods: vec![
            engine(Role::Prefill, prefill),
            engine(Role::Decode, decode),
            pod(Role::Router, router),
        ],
        ..World::default()
    }
}

fn handoffs(finished: u64, failed_since: u64, recent: u32, recent_failed: u32) -> Handoffs {
    let failed = vec![("stalled".to_owned(), u64::from(recent_failed))];
    Handoffs {
        finished,
        failed,
        failed_since,
        recent,
        recent_failed,
    }
}

#[test]
fn a_way_is_said_to_be_well_or_ill_that_was_not_measured_so() {
    let running = running();
    for (prefill, decode, expected) in [
        (None, None, "Unheard"),
        (Some(handoffs(0, 0, 0, 0)), None, "Unheard"),
        (Some(handoffs(0, 0, 0, 0)), Some(handoffs(0, 0, 0, 0)), "Unknown"),
        (Some(handoffs(0, 0, 0, 0)), Some(handoffs(1, 0, 1, 0)), "Well"),
        (Some(handoffs(1, 0, 1, 0)), None, "Well"),
        // one that failed last, on either side
        (None, Some(handoffs(0, 1, 1, 1)), "Ill"),
        (None, Some(handoffs(99, 1, 64, 1)), "Ill"),
        (Some(handoffs(99, 1, 64, 1)), Some(handoffs(99, 0, 64, 0)), "Ill"),
        // a share of those lately
        (None, Some(handoffs(99, 0, 64, 6)), "Well"),
        (None, Some(handoffs(99, 0, 64, 7)), "Ill"),
        (None, Some(handoffs(99, 0, 0, 0)), "Well"),
    ] {
        let world = world(prefill, decode, None);
        let said = match health::transfer(&world, Some(&running)) {
            Health::Unheard => "Unheard",
            Health::Unknown => "Unknown",
            Health::Well(_) => "Well",
            Health::Ill(reason, message) => {
                assert_eq!(reason, "HandoffsFail");
                assert!(message.contains("stalled"), "{message}");
                assert!(message.contains(" pod ") && !message.contains("uid-of-"), "{message}");
                "Ill"
            }
        };
        assert_eq!(said, expected, "{world:#?}");
    }
}

#[test]
fn which_hand_offs_failed_is_not_said() {
    for (handoffs, said) in [
        (
            handoffs(99, 3, 64, 9),
            "the last 3 hand-offs failed; since it started 99 finished and 9 failed (stalled 9)",
        ),
        (
            handoffs(99, 0, 64, 7),
            "7 of the last 64 hand-offs failed; since it started 99 finished and 7 failed",
        ),
    ] {
        let health = health::transfer(&world(None, Some(handoffs), None), Some(&running()));
        let Health::Ill(_, message) = health else {
            panic!("{health:?}")
        };
        assert!(message.contains(said), "{message}");
    }
}

#[test]
fn where_nobody_can_hand_over_all_is_well() {
    let running = running();
    let well = || world(None, Some(handoffs(9, 0, 9, 0)), None);
    let judged = |world: &World| health::transfer(world, Some(&running));
    assert_eq!(judged(&well()), Health::Well("HandoffsFinish"));
    for role in [Role::Prefill, Role::Decode] {
        for spoil in [
            |pod: &mut Pod| pod.ready = false,
            |pod: &mut Pod| pod.lost = true,
            |pod: &mut Pod| pod.terminating = true,
        ] {
            let mut world = well();
            world.pods.iter_mut().filter(|pod| pod.role == role).for_each(spoil);
            let Health::Ill("NoPair", message) = judged(&world) else {
                panic!("{world:?}")
            };
            assert!(message.contains(role.field()), "{message}");
            // while requests are held, what serves them is not there on purpose
            assert!(!matches!(health::transfer(&world, None), Health::Ill(..)));
        }
    }
    let apart = world(None, Some(handoffs(9, 0, 9, 0)), Some("another model"));
    assert_eq!(judged(&apart), Health::Ill("NoPair", "another model".into()));
    let mut one_of_two = apart;
    one_of_two.pods.push(pod(Role::Router, Evidence::default()));
    assert_eq!(
        judged(&one_of_two),
        Health::Well("HandoffsFinish"),
        "another router knows a pair"
    );
}

#[test]
fn a_probe_that_moved_kv_between_these_pods_is_not_believed_or_that_of_others_is() {
    let mut sim = crate::settled(crate::spec());
    assert_eq!(health::transfer(&sim.world, None), Health::Well("HandoffsFinish"));
    assert_eq!(sim.condition("TransferHealthy"), "True");
    let probe = sim.world.probe.clone().unwrap();
    for other in [
        Probe {
            outcome: GateOutcome::Failed,
            ..probe.clone()
        },
        Probe {
            pods: "others".into(),
            ..probe
        },
    ] {
        sim.world.probe = Some(other);
        assert_eq!(health::transfer(&sim.world, None), Health::Unheard);
    }
}

/// A settled deployment whose decode says this of its hand-offs.
fn says(sim: &mut Sim, handoffs: &Handoffs) {
    let decodes = sim.world.pods.iter_mut().filter(|pod| pod.role == Role::Decode);
    decodes.for_each(|pod| pod.evidence.handoffs = Some(handoffs.clone()));
    sim.reconcile(usize::MAX);
}

fn told(sim: &Sim) -> (String, String) {
    let condition = sim
        .status
        .conditions
        .iter()
        .find(|one| one.type_ == "TransferHealthy")
        .unwrap();
    (condition.status.clone(), condition.message.clone())
}

#[test]
fn what_is_measured_over_and_over_is_written_over_and_over() {
    let mut sim = crate::settled(crate::spec());
    sim.now += 100;
    says(&mut sim, &handoffs(9, 2, 11, 2));
    let first = told(&sim);
    assert_eq!(first.0, "False");
    let writes = sim.writes.len();
    // its numbers grow, and it turns to and fro
    for (at, finished, failed) in [(10, 9, 3), (20, 9, 4), (30, 10, 0), (40, 10, 5)] {
        sim.now += 10;
        says(&mut sim, &handoffs(finished, failed, 64, 4));
        assert_eq!(told(&sim), first, "after {at} s");
    }
    assert_eq!(sim.writes[writes..], [""; 0]);
    sim.now += 30;
    says(&mut sim, &handoffs(99, 0, 64, 0));
    assert_eq!(told(&sim).0, "True");
    sim.now += 1;
    says(&mut sim, &handoffs(99, 5, 64, 5));
    assert_eq!(told(&sim).0, "False", "what is wrong is told at once");
    let decodes = sim.world.pods.iter_mut().filter(|pod| pod.role == Role::Decode);
    decodes.for_each(|pod| pod.ready = false);
    sim.reconcile(usize::MAX);
    assert_eq!(
        told(&sim),
        ("False".into(), "no decode pod is ready".into()),
        "another reason"
    );
    let decodes = sim.world.pods.iter_mut().filter(|pod| pod.role == Role::Decode);
    decodes.for_each(|pod| pod.ready = true);
    sim.reconcile(usize::MAX);
    assert!(told(&sim).1.contains("hand-offs failed"), "{:?}", told(&sim));
    assert_eq!(sim.condition("Ready"), "True", "it informs, and blocks nothing");
}

#[test]
fn clients_that_leave_are_blamed_on_the_way_by_a_few_or_not_at_all() {
    for (ended, gone, stalled, blocked, expected) in [
        (0, 0, 0, 0, "Unknown"),
        (1, 0, 0, 0, "Well"),
        (4, 4, 0, 0, "Well"),
        (5, 5, 0, 0, "Ill"),
        (25, 3, 2, 0, "Ill"),
        (26, 3, 2, 0, "Well"),
        (20, 0, 0, 5, "Ill"),
        (0, 0, 0, 5, "Ill"),
        (0, 0, 0, 4, "Unknown"),
    ] {
        let clients = Some(Clients {
            ended,
            gone,
            stalled,
            blocked,
        });
        let world = World {
            pods: vec![pod(
                Role::Router,
                Evidence {
                    clients,
                    ..Evidence::default()
                },
            )],
            ..World::default()
        };
        let said = match health::client_path(&world) {
            Health::Unheard => "Unheard",
            Health::Unknown => "Unknown",
            Health::Well(_) => "Well",
            Health::Ill(_, message) => {
                for number in [ended, gone, stalled, blocked] {
                    assert!(message.contains(&number.to_string()), "{message}");
                }
                "Ill"
            }
        };
        assert_eq!(said, expected, "{ended} {gone} {stalled} {blocked}");
    }
}

#[test]
fn routers_alone_tell_of_clients() {
    let mut world = world(None, None, None);
    assert_eq!(health::client_path(&world), Health::Unheard, "the router was not heard");
    world.pods.retain(|pod| pod.role != Role::Router);
    assert_eq!(health::client_path(&world), Health::Unheard, "there is no router");
    let clients = Clients {
        ended: 9,
        gone: 9,
        ..Clients::default()
    };
    let evidence = Evidence {
        clients: Some(clients),
        ..Evidence::default()
    };
    world.pods.push(Pod {
        ready: false,
        ..pod(Role::Router, evidence)
    });
    assert_eq!(
        health::client_path(&world),
        Health::Unheard,
        "what a router said before it went"
    );
}
