//! The rules against the records of known faults.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;
use tandem_faults::rows::Row;
use tandem_faults::rows::Row::*;

use super::code;
use super::observation::Observation;
use super::planted::{
    STUCK, all, clients, failed, hangs, heard, inflight, last_load, layer, passes, planted, remove, request, victim,
    well,
};
use super::record::*;
use super::verdict::{Finding, Layer, Standing, Verdict, verdict};

fn suspects(verdict: &Verdict) -> Vec<Layer> {
    verdict.suspects().map(|opinion| opinion.layer).collect()
}

#[test]
fn a_planted_fault_is_blamed_on_another_layer_or_on_none() {
    for fault in Row::ALL {
        for others in [false, true] {
            let verdict = verdict(&planted(fault, true, others));
            let expected: Vec<Layer> = layer(fault).into_iter().collect();
            assert_eq!(
                suspects(&verdict),
                expected,
                "{fault:?}, others: {others}: {verdict:#?}"
            );
            assert_eq!(
                json!(verdict.finding),
                fault.finding(),
                "{fault:?}, others: {others}: {verdict:#?}"
            );
        }
    }
}

#[test]
fn a_side_without_a_pod_is_named_and_excuses_the_router_of_that_alone() {
    for (side, layer) in [(Side::Prefill, Layer::Prefill), (Side::Decode, Layer::Decode)] {
        for via in [false, true] {
            for queued in [false, true] {
                let mut record = well(via, false);
                remove(&mut record, side);
                if queued {
                    victim(&mut record, request("queue", 9_000));
                }
                let verdict = verdict(&record);
                assert_eq!(suspects(&verdict), [layer], "{side:?} {via} {queued}: {verdict:#?}");
            }
        }
    }
    // Decode reads prompts itself, and requests do not get there.
    let mut record = well(true, false);
    remove(&mut record, Side::Prefill);
    victim(&mut record, request("accept", 9_000));
    for way in [Way::Via, Way::Router] {
        all(&mut record, way, &hangs(Some("accept")));
    }
    let verdict = verdict(&record);
    assert_eq!(suspects(&verdict), [Layer::Router, Layer::Prefill], "{verdict:#?}");
}

#[test]
fn without_a_clients_vantage_a_wrong_layer_is_named() {
    for fault in Row::ALL {
        for others in [false, true] {
            let verdict = verdict(&planted(fault, false, others));
            // what only a client can see is not seen
            let seen = layer(fault).filter(|_| !matches!(fault, ProxyHolds | ProxyExhausted | ProxyCuts));
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
    for fault in Row::ALL {
        let mut record = planted(fault, true, true);
        for load in record.engines.iter_mut().flat_map(|engine| &mut engine.loads) {
            if let Found::Read(load) = &mut load.found {
                load.inflight.clear();
            }
        }
        let expected: Vec<Layer> = layer(fault).into_iter().collect();
        assert_eq!(suspects(&verdict(&record)), expected, "{fault:?}");
    }
}

/// Only what can be looked at without sending anything.
#[test]
fn without_probes_more_is_claimed_than_was_measured() {
    for fault in Row::ALL {
        let mut record = planted(fault, false, false);
        record.probes.clear();
        let verdict = verdict(&record);
        for suspect in suspects(&verdict) {
            assert_eq!(Some(suspect), layer(fault), "{fault:?}: {verdict:#?}");
        }
        let told = matches!(
            fault,
            ClientNotReading | TokenizerSlow | PrefillDead | TransferStalled | DecodeWedged
        );
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
    for outcome in [slow, hangs(Some("decode"))] {
        all(&mut record, Way::Decode, &outcome);
        let found = verdict(&record);
        assert_eq!(
            (suspects(&found), found.finding),
            (vec![], Finding::Undecided),
            "{found:#?}"
        );
    }
    let decode = last_load(&mut record, Side::Decode);
    decode.last_step_age_ms = 9_000;
    decode.inflight = vec![inflight("decode", 8, 9_000, 9_000)];
    assert_eq!(suspects(&verdict(&record)), [Layer::Decode]);
}

#[test]
fn a_router_that_does_not_hear_an_engine_is_well() {
    let mut record = well(true, false);
    heard(&mut record)[1].report_age_ms = Some(9_000);
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

/// Whether the observations of `layer` leave it in `standing`.
fn stands(record: &Record, layer: Layer, standing: Standing) {
    let found = verdict(record);
    let opinion = found.layers.iter().find(|opinion| opinion.layer == layer);
    assert_eq!(opinion.map(|opinion| opinion.standing), Some(standing), "{found:#?}");
}

#[test]
fn a_way_past_the_proxy_that_nobody_took_is_said_to_pass() {
    let mut record = well(true, false);
    record.probes.retain(|probe| probe.way == Way::Via);
    all(&mut record, Way::Via, &hangs(Some(ANSWERED)));
    let found = verdict(&record);
    assert_eq!(suspects(&found), [Layer::ClientPath]);
    let reason = &found.layers[0].reasons[0].text;
    assert_eq!(reason, "the router has written a whole answer that did not come");
}

#[test]
fn a_proxy_that_keeps_no_connection_is_said_to_pass_probes_on_reused_ones() {
    let mut record = well(true, false);
    for probe in record.probes.iter_mut().filter(|probe| probe.way == Way::Via) {
        probe.reused = probe.reused.map(|_| false);
    }
    let found = verdict(&record);
    assert_eq!(found.layers[0].reasons[0].text, "probes pass on fresh connections");
    let told = |observation: &Observation| observation.text.contains("of which 5 had to come on a new connection");
    assert!(found.observations.iter().any(told), "{found:#?}");
}

#[test]
fn engines_that_nobody_looked_at_are_taken_to_be_well() {
    for (fault, layer) in [(RouterBlocked, Layer::Router), (TransferStalled, Layer::Transfer)] {
        let mut record = planted(fault, false, false);
        record
            .probes
            .retain(|probe| matches!(probe.way, Way::Decode | Way::Pair));
        if fault == TransferStalled {
            record.probes.clear();
        }
        assert_eq!(suspects(&verdict(&record)), [layer], "{fault:?}");
        heard(&mut record).push(HeardEngine {
            side: "decode".to_owned(),
            endpoint: "10.0.0.9:7101".to_owned(),
            state: "up".to_owned(),
            ..HeardEngine::default()
        });
        assert_eq!(suspects(&verdict(&record)), [], "{fault:?}");
    }
}

#[test]
fn a_router_is_blamed_for_what_another_one_does_not_take() {
    let mut record = well(true, false);
    last_load(&mut record, Side::Decode)
        .inflight
        .push(inflight("client", 1, 8_000, 8_000));
    stands(&record, Layer::Router, Standing::Unclear);
    heard(&mut record)[1].in_flight = 1;
    stands(&record, Layer::Router, Standing::Suspected);
}

#[test]
fn a_router_that_only_its_clients_can_reach_is_blamed() {
    let mut record = well(true, false);
    let gone = Outcome::Failed {
        total_ms: 1,
        status: None,
        code: None,
        source: None,
        reason: "connection refused".to_owned(),
    };
    all(&mut record, Way::Router, &gone);
    stands(&record, Layer::Router, Standing::Unclear);
    all(&mut record, Way::Via, &gone);
    stands(&record, Layer::Router, Standing::Suspected);
}

#[test]
fn an_engine_that_says_nothing_of_its_load_is_idle() {
    let mut record = well(true, false);
    victim(&mut record, request("decode", 9_000));
    stands(&record, Layer::Router, Standing::Suspected);
    for engine in &mut record.engines {
        engine.loads.clear();
    }
    stands(&record, Layer::Router, Standing::Excluded);
}

#[test]
fn probes_whose_prompt_decode_read_by_itself_went_through_prefill() {
    for (moved, standing) in [(0.0, Standing::NotMeasured), (3.0, Standing::Excluded)] {
        let mut record = well(true, false);
        record.probes.retain(|probe| probe.way != Way::Pair);
        let passed = passes(350, &[("decode", 290.0), ("transfer", moved)]);
        for way in [Way::Via, Way::Router] {
            all(&mut record, way, &passed);
        }
        stands(&record, Layer::Prefill, standing);
        stands(&record, Layer::Transfer, standing);
        stands(&record, Layer::Decode, Standing::Excluded);
    }
}

#[test]
fn an_engine_that_drains_is_blamed_for_taking_nothing() {
    for source in ["decode", "prefill"] {
        let mut record = well(true, false);
        let drains = Outcome::Failed {
            total_ms: 1,
            status: None,
            code: Some("draining".to_owned()),
            source: Some(source.to_owned()),
            reason: "it drains".to_owned(),
        };
        all(&mut record, Way::Pair, &drains);
        if source == "decode" {
            all(&mut record, Way::Decode, &drains);
        }
        let found = verdict(&record);
        assert_eq!(
            (suspects(&found), found.finding),
            (vec![], Finding::Undecided),
            "{found:#?}"
        );
    }
}

#[test]
fn requests_that_were_not_looked_at_are_said_to_progress() {
    let mut record = well(false, true);
    clients(&mut record).in_flight = 9;
    let told = "9 requests in flight, of 8 that are named, all progressing (oldest step 0.1 s)";
    assert_eq!(verdict(&record).summary[0], told);
    for connection in &mut clients(&mut record).connections {
        connection.requests[0].state = "held".to_owned();
    }
    clients(&mut record).in_flight = 8;
    assert_eq!(verdict(&record).summary[0], "8 requests in flight");
}

/// Some of a record, right or wrong.
fn records() -> impl Strategy<Value = Record> {
    let at = prop::sample::select(Row::ALL.to_vec());
    let age = prop_oneof![Just(0), Just(STUCK), Just(u64::MAX), 0..20_000_u64];
    (at.clone(), at, any::<bool>(), any::<[bool; 8]>(), age).prop_map(|(one, other, via, kept, age)| {
        let mut record = planted(one, via, kept[0]);
        // two faults at a time, each in a part of the record
        let second = planted(other, via, kept[0]);
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
    fn a_record_that_was_kept_is_judged_anew(record in records()) {
        let kept: Record = serde_json::from_str(&serde_json::to_string(&record).unwrap()).unwrap();
        prop_assert_eq!(&kept, &record);
        prop_assert_eq!(verdict(&kept), verdict(&record));
    }
}
