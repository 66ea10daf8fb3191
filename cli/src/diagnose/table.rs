//! The rules against the records of known faults.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::code;
use super::planted::Fault::*;
use super::planted::{
    STUCK, TABLE, all, clients, failed, hangs, inflight, last_load, passes, planted, request, victim, well,
};
use super::record::*;
use super::verdict::{Finding, Layer, Standing, Verdict, verdict};

fn suspects(verdict: &Verdict) -> Vec<Layer> {
    verdict.suspects().map(|opinion| opinion.layer).collect()
}

#[test]
fn a_planted_fault_is_blamed_on_another_layer_or_on_none() {
    for (fault, layer) in TABLE {
        for others in [false, true] {
            let verdict = verdict(&planted(fault, true, others));
            let expected: Vec<Layer> = layer.into_iter().collect();
            assert_eq!(
                suspects(&verdict),
                expected,
                "{fault:?}, others: {others}: {verdict:#?}"
            );
            let finding = if layer.is_some() {
                Finding::Fault
            } else {
                Finding::NoFault
            };
            assert_eq!(verdict.finding, finding, "{fault:?}, others: {others}: {verdict:#?}");
        }
    }
}

#[test]
fn without_a_clients_vantage_a_wrong_layer_is_named() {
    for (fault, layer) in TABLE {
        for others in [false, true] {
            let verdict = verdict(&planted(fault, false, others));
            // what only a client can see is not seen
            let seen = layer.filter(|_| !matches!(fault, ProxyHolds | ProxyExhausted | ProxyCuts));
            let expected: Vec<Layer> = seen.into_iter().collect();
            assert_eq!(
                suspects(&verdict),
                expected,
                "{fault:?}, others: {others}: {verdict:#?}"
            );
            let summary: Vec<&str> = verdict.summary.iter().map(String::as_str).collect();
            match (fault, others) {
                (ProxyHolds | ProxyExhausted | Idle, false) => {
                    let said =
                        "nothing in flight inside Tandem, last answer fully written 41 s ago, client side not measured";
                    assert_eq!(summary, [said]);
                    assert_eq!((verdict.finding, code(&verdict)), (Finding::NoFaultInside, 4));
                }
                (ProxyHolds | ProxyExhausted | Idle, true) => assert_eq!(
                    summary,
                    [
                        "8 requests in flight, all progressing (oldest step 0.1 s)",
                        "last answer fully written 0.2 s ago, client side not measured"
                    ]
                ),
                (ProxyCuts, _) => {
                    let said = "2 client connections closed before their answer ended, client side not measured";
                    assert_eq!(summary.last(), Some(&said));
                }
                (DecodeOverloaded, _) => assert!(summary[0].contains("all progressing"), "{summary:?}"),
                _ => {}
            }
        }
    }
}

/// Engines that do not say what their requests wait for yet.
#[test]
fn an_older_engine_hides_a_fault_or_makes_one_up() {
    for (fault, layer) in TABLE {
        let mut record = planted(fault, true, true);
        for load in record.engines.iter_mut().flat_map(|engine| &mut engine.loads) {
            if let Found::Read(load) = &mut load.found {
                load.inflight.clear();
            }
        }
        let expected: Vec<Layer> = layer.into_iter().collect();
        assert_eq!(suspects(&verdict(&record)), expected, "{fault:?}");
    }
}

/// Only what can be looked at without sending anything.
#[test]
fn without_probes_more_is_claimed_than_was_measured() {
    for (fault, layer) in TABLE {
        let mut record = planted(fault, false, false);
        record.probes.clear();
        let verdict = verdict(&record);
        for suspect in suspects(&verdict) {
            assert_eq!(Some(suspect), layer, "{fault:?}: {verdict:#?}");
        }
        let told = matches!(fault, ClientNotReading | PrefillDead | TransferStalled | DecodeWedged);
        let finding = if told { Finding::Fault } else { Finding::Undecided };
        assert_eq!(verdict.finding, finding, "{fault:?}: {verdict:#?}");
        assert!(told || verdict.decide().next().is_some(), "{fault:?}");
    }
}

#[test]
fn what_cannot_be_read_is_taken_for_a_fault_of_an_engine() {
    // the admin port refuses us, all else is well
    let mut record = well(true, false);
    record.clients = vec![failed("router", 1), failed("router", 9)];
    record.heard = vec![failed("router", 9)];
    let found = verdict(&record);
    assert_eq!(
        (suspects(&found), found.finding),
        (vec![], Finding::Undecided),
        "{found:#?}"
    );
    assert!(found.summary.is_empty());

    // nobody listens where the router should
    let gone = Outcome::Failed {
        total_ms: 1,
        status: None,
        code: None,
        source: None,
        reason: "connection refused".to_owned(),
    };
    all(&mut record, Way::Router, &gone);
    all(&mut record, Way::Via, &gone);
    assert_eq!(suspects(&verdict(&record)), [Layer::Router]);

    // an engine that the router reaches, and this machine does not
    let mut record = well(true, false);
    record.engines[1].info = failed("decode", 5);
    record.engines[1].loads.clear();
    record
        .probes
        .retain(|probe| matches!(probe.way, Way::Via | Way::Router));
    let found = verdict(&record);
    assert_eq!(
        (suspects(&found), found.finding),
        (vec![], Finding::Undecided),
        "{found:#?}"
    );

    // a key is missing: nothing was measured by that
    let mut record = well(true, false);
    let locked = Outcome::NotMade {
        reason: "401: no API key".to_owned(),
    };
    all(&mut record, Way::Via, &locked);
    let found = verdict(&record);
    assert_eq!(
        (suspects(&found), found.finding),
        (vec![], Finding::NoFaultInside),
        "{found:#?}"
    );
    assert!(found.decide().any(|line| line.contains("--via")));
}

/// Its last step was long ago because nobody asked for one.
#[test]
fn an_engine_that_has_just_got_work_is_stuck() {
    for known in [true, false] {
        let mut record = well(true, false);
        let decode = last_load(&mut record, Side::Decode);
        decode.running = 1;
        if known {
            decode.inflight = vec![inflight("decode", 1, 20, 20)];
        }
        assert_eq!(verdict(&record).finding, Finding::NoFault, "{known}");
    }
}

/// One that was caught between two steps.
#[test]
fn a_prefill_with_a_prompt_in_its_queue_is_told_to_be_full() {
    for (oldest_ms, full) in [(300, false), (STUCK, true)] {
        let mut record = well(true, true);
        let prefill = last_load(&mut record, Side::Prefill);
        prefill.running = 1;
        prefill.waiting = 1;
        prefill.last_step_age_ms = 300;
        prefill.inflight = vec![
            inflight("prefill", 1, 200, 200),
            inflight("prefill_queue", 1, oldest_ms, oldest_ms),
        ];
        let summary = verdict(&record).summary;
        let told = summary.iter().any(|line| line.contains("is full and steps"));
        assert_eq!(told, full, "{summary:?}");
    }
}

/// A machine that has too much to do.
#[test]
fn a_decode_whose_steps_are_short_is_blamed_for_a_slow_probe() {
    let mut record = well(true, true);
    let slow = passes(STUCK + 1_000, &[("decode", 5_000.0)]);
    for way in [Way::Via, Way::Router, Way::Pair, Way::Decode] {
        all(&mut record, way, &slow);
    }
    let found = verdict(&record);
    assert_eq!(
        (suspects(&found), found.finding),
        (vec![], Finding::Undecided),
        "{found:#?}"
    );
    all(&mut record, Way::Decode, &hangs(Some("decode")));
    assert_eq!(suspects(&verdict(&record)), [Layer::Decode]);
}

#[test]
fn a_router_that_does_not_hear_an_engine_is_well() {
    let mut record = well(true, false);
    let Found::Read(heard) = &mut record.heard[0].found else {
        unreachable!()
    };
    heard.engines[1].report_age_ms = Some(9_000);
    assert_eq!(suspects(&verdict(&record)), [Layer::Router]);
}

#[test]
fn requests_that_an_order_holds_back_are_taken_for_a_fault() {
    let mut record = well(true, false);
    victim(&mut record, request("held", 60_000));
    for way in [Way::Via, Way::Router] {
        all(&mut record, way, &hangs(Some("held")));
    }
    let found = verdict(&record);
    assert_eq!(found.finding, Finding::NoFault, "{found:#?}");
    assert!(
        found.summary.iter().any(|line| line.contains("held back by the order")),
        "{found:#?}"
    );
}

/// Some of a record, right or wrong.
fn records() -> impl Strategy<Value = Record> {
    let at = 0..TABLE.len();
    let age = prop_oneof![Just(0), Just(STUCK), Just(u64::MAX), 0..20_000_u64];
    (at.clone(), at, any::<bool>(), any::<[bool; 8]>(), age).prop_map(|(one, other, via, kept, age)| {
        let mut record = planted(TABLE[one].0, via, kept[0]);
        // two faults at a time, each in a part of the record
        let second = planted(TABLE[other].0, via, kept[0]);
        if kept[1] {
            record.probes = second.probes;
        }
        if kept[2] {
            record.engines = second.engines;
        }
        if kept[3] {
            record.clients = Vec::new();
        } else if kept[4] {
            let clients = clients(&mut record);
            clients.last_answer_written_ms = Some(age);
            for connection in &mut clients.connections {
                connection.state_ms = age;
                connection.requests[0].state_ms = age;
            }
        }
        if kept[5] {
            record.heard = Vec::new();
        }
        if kept[6] {
            record.engines.retain(|engine| (engine.side == Side::Decode) == kept[7]);
        }
        if kept[7] {
            record.probes.retain(|probe| matches!(probe.way, Way::Via) == kept[6]);
        }
        for reading in record.engines.iter_mut().flat_map(|engine| &mut engine.loads) {
            if kept[4]
                && let Found::Read(load) = &mut reading.found
            {
                load.last_step_age_ms = age;
                // clocks that go backwards
                reading.at_ms = age;
            }
        }
        record
    })
}

/// Was anything observed of it?
fn measured(record: &Record, layer: Layer) -> bool {
    let clients = record.clients.last().is_some();
    let probed = |ways: &[Way]| record.probes.iter().any(|probe| ways.contains(&probe.way));
    let engines = |side| record.engines.iter().any(|engine| engine.side == side);
    match layer {
        Layer::ClientPath => clients || probed(&[Way::Via]),
        Layer::Router => clients || !record.heard.is_empty() || probed(&[Way::Router]) || engines(Side::Decode),
        Layer::Prefill => engines(Side::Prefill) || probed(&[Way::Pair]),
        Layer::Transfer => clients || probed(&[Way::Pair]) || engines(Side::Prefill) || engines(Side::Decode),
        Layer::Decode => engines(Side::Decode) || probed(&[Way::Decode]),
    }
}

proptest! {
    #[test]
    fn a_layer_of_which_nothing_was_observed_is_named(record in records()) {
        let found = verdict(&record);
        let numbers: BTreeMap<usize, &str> =
            found.observations.iter().map(|observation| (observation.number, observation.place.as_str())).collect();
        for opinion in &found.layers {
            if opinion.standing == Standing::Suspected {
                prop_assert!(measured(&record, opinion.layer), "{:#?}", found);
            }
            for reason in &opinion.reasons {
                prop_assert!(!reason.by.is_empty(), "{:#?}", found);
                prop_assert!(reason.by.iter().all(|number| numbers.contains_key(number)), "{:#?}", found);
            }
        }
        if record.via.is_none() && found.finding == Finding::NoFault {
            return Err(TestCaseError::fail("the client's side was not measured"));
        }
    }

    #[test]
    fn a_recordthat_was_kept_is_judged_anew(record in records()) {
        let kept: Record = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        prop_assert_eq!(&kept, &record);
        prop_assert_eq!(verdict(&kept), verdict(&record));
    }
}
