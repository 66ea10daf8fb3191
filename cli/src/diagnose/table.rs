//! The rules against records of known faults, each alone and amid the requests of others, with a client's vantage and without.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::code;
use super::record::*;
use super::verdict::{Finding, Layer, Standing, Verdict, verdict};

const STUCK: u64 = 5_000;
const HUNG: u64 = 15_000;

/// What is planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    ClientNotReading,
    ProxyHolds,
    ProxyExhausted,
    ProxyCuts,
    RouterBlocked,
    PrefillSlow,
    PrefillDead,
    TransferStalled,
    DecodeWedged,
    DecodeOverloaded,
    Idle,
}

use Fault::*;

/// Each with the layer that has to come out with `--via`.
const TABLE: [(Fault, Option<Layer>); 11] = [
    (ClientNotReading, Some(Layer::ClientPath)),
    (ProxyHolds, Some(Layer::ClientPath)),
    (ProxyExhausted, Some(Layer::ClientPath)),
    (ProxyCuts, Some(Layer::ClientPath)),
    (RouterBlocked, Some(Layer::Router)),
    (PrefillSlow, Some(Layer::Prefill)),
    (PrefillDead, Some(Layer::Prefill)),
    (TransferStalled, Some(Layer::Transfer)),
    (DecodeWedged, Some(Layer::Decode)),
    (DecodeOverloaded, None),
    (Idle, None),
];

fn reading<T>(place: &str, at_ms: u64, found: T) -> Reading<T> {
    Reading {
        place: place.to_owned(),
        at_ms,
        found: Found::Read(found),
    }
}

fn failed<T>(place: &str, at_ms: u64) -> Reading<T> {
    Reading {
        place: place.to_owned(),
        at_ms,
        found: Found::Failed("connection refused".to_owned()),
    }
}

fn request(state: &str, ms: u64) -> Connection {
    Connection {
        state: state.to_owned(),
        state_ms: ms,
        requests: vec![Running {
            state: state.to_owned(),
            state_ms: ms,
            ..Running::default()
        }],
        ..Connection::default()
    }
}

fn inflight(state: &str, count: u64, oldest_ms: u64, still_ms: u64) -> Inflight {
    Inflight {
        state: state.to_owned(),
        count,
        oldest_ms,
        still_ms,
    }
}

fn passes(total_ms: u64, spent: &[(&str, f64)]) -> Outcome {
    Outcome::Passed {
        total_ms,
        first_token_ms: total_ms / 2,
        spent_ms: spent.iter().map(|(state, ms)| ((*state).to_owned(), *ms)).collect(),
    }
}

fn hangs(state: Option<&str>) -> Outcome {
    Outcome::Hung {
        waited_ms: HUNG,
        received_bytes: 0,
        state: state.map(str::to_owned),
    }
}

fn probe(way: Way, connection: Kept, round: u32, outcome: Outcome) -> Probe {
    Probe {
        way,
        place: format!("{way:?}"),
        at_ms: 10,
        connection,
        round,
        reused: (connection == Kept::Reused).then_some(round > 1),
        outcome,
    }
}

/// All probes of one way come to the same end.
fn all(record: &mut Record, way: Way, outcome: &Outcome) {
    for probe in record.probes.iter_mut().filter(|probe| probe.way == way) {
        probe.outcome = outcome.clone();
    }
}

fn load() -> Load {
    Load {
        max_running: 16,
        free_pages: 90,
        total_pages: 100,
        last_step_age_ms: 41_000,
        last_progress_age_ms: 41_000,
        ..Load::default()
    }
}

fn engine(side: Side, load: Load) -> Engine {
    let endpoint = format!("10.0.0.{}:7101", side as u8);
    Engine {
        side,
        info: reading(&endpoint, 1, Info::default()),
        loads: vec![reading(&endpoint, 2, load.clone()), reading(&endpoint, 15_000, load)],
        endpoint,
    }
}

fn heard(side: Side) -> HeardEngine {
    HeardEngine {
        side: side.name().to_owned(),
        endpoint: format!("10.0.0.{}:7101", side as u8),
        state: "up".to_owned(),
        report_age_ms: Some(300),
        ..HeardEngine::default()
    }
}

/// Nothing is wrong; `load`: 8 requests of others run.
fn well(via: bool, others: bool) -> Record {
    let mut clients = Clients {
        open: 3,
        last_answer_written_ms: Some(41_200),
        lately: Lately {
            since_ms: 60_000,
            ended: 12,
            ..Lately::default()
        },
        ..Clients::default()
    };
    let mut decode = load();
    if others {
        clients.in_flight = 8;
        clients.open = 11;
        clients.last_answer_written_ms = Some(200);
        clients.connections = (0..8).map(|_| request("decode", 9_000)).collect();
        for connection in &mut clients.connections {
            connection.requests[0].last_token_ms = Some(100);
        }
        decode.running = 8;
        decode.last_step_age_ms = 120;
        decode.inflight = vec![inflight("decode", 8, 9_000, 60)];
    }
    let mut probes = Vec::new();
    for way in [Way::Via, Way::Router]
        .into_iter()
        .filter(|way| via || *way == Way::Router)
    {
        probes.push(probe(way, Kept::Fresh, 1, passes(360, &[("decode", 300.0)])));
        probes.extend((1..=6).map(|round| probe(way, Kept::Reused, round, passes(350, &[("decode", 290.0)]))));
    }
    probes.push(probe(Way::Decode, Kept::Fresh, 1, passes(300, &[("decode", 250.0)])));
    probes.push(probe(Way::Pair, Kept::Fresh, 1, passes(320, &[("decode", 250.0)])));
    Record {
        version: VERSION,
        tandem: "0".to_owned(),
        taken: "2026-01-01T00:00:00Z".to_owned(),
        limits: Limits {
            stuck_ms: STUCK,
            probe_ms: HUNG,
        },
        via: via.then(|| "https://proxy".to_owned()),
        clients: vec![
            reading("router", 1, clients.clone()),
            reading("router", 15_000, clients),
        ],
        heard: vec![reading(
            "router",
            15_000,
            Heard {
                engines: vec![heard(Side::Prefill), heard(Side::Decode)],
            },
        )],
        engines: vec![engine(Side::Prefill, load()), engine(Side::Decode, decode)],
        probes,
    }
}

/// The router's last word on its clients.
fn clients(record: &mut Record) -> &mut Clients {
    match &mut record.clients[1].found {
        Found::Read(clients) => clients,
        Found::Failed(_) => unreachable!(),
    }
}

fn last_load(record: &mut Record, side: Side) -> &mut Load {
    match &mut record.engines[side as usize].loads[1].found {
        Found::Read(load) => load,
        Found::Failed(_) => unreachable!(),
    }
}

/// A client's own request that is stuck.
fn victim(record: &mut Record, connection: Connection) {
    let clients = clients(record);
    clients.in_flight += 1;
    clients.connections.push(connection);
}

fn planted(fault: Fault, via: bool, others: bool) -> Record {
    let mut record = well(via, others);
    plant(&mut record, fault);
    record
}

fn plant(record: &mut Record, fault: Fault) {
    match fault {
        Idle => {}
        ClientNotReading => {
            let mut connection = request("client", 8_000);
            connection.state = "blocked".to_owned();
            connection.unsent_bytes = 4096;
            victim(record, connection);
            last_load(record, Side::Decode)
                .inflight
                .push(inflight("client", 1, 8_000, 8_000));
        }
        ProxyHolds => {
            for probe in &mut record.probes {
                if probe.way == Way::Via && probe.connection == Kept::Reused && probe.round >= 3 {
                    probe.outcome = hangs(Some(ANSWERED));
                }
            }
            record.probes.retain(|probe| probe.way != Way::Via || probe.round <= 3);
        }
        ProxyExhausted => all(record, Way::Via, &hangs(None)),
        ProxyCuts => {
            clients(record).lately.client_gone = 2;
            let cut = Outcome::Cut {
                total_ms: 90,
                received_bytes: 700,
            };
            all(record, Way::Via, &cut);
        }
        RouterBlocked => {
            victim(record, request("accept", 9_000));
            all(record, Way::Via, &hangs(Some("accept")));
            all(record, Way::Router, &hangs(Some("accept")));
        }
        PrefillSlow => {
            victim(record, request("prefill", 6_000));
            for way in [Way::Via, Way::Router, Way::Pair] {
                all(record, way, &passes(6_400, &[("prefill", 6_000.0), ("decode", 250.0)]));
            }
            let prefill = last_load(record, Side::Prefill);
            prefill.running = 1;
            prefill.last_step_age_ms = 5_800;
            // layer by layer it moves
            prefill.inflight = vec![inflight("prefill", 1, 6_000, 200)];
        }
        PrefillDead => {
            let Found::Read(heard) = &mut record.heard[0].found else {
                unreachable!()
            };
            heard.engines[0].state = "down".to_owned();
            heard.engines[0].report_age_ms = None;
            record.engines[0].info = failed("prefill", 5);
            record.engines[0].loads.clear();
            let refused = Outcome::Failed {
                total_ms: 3,
                status: None,
                code: Some("peer_lost".to_owned()),
                source: Some("prefill".to_owned()),
                reason: "connection refused".to_owned(),
            };
            all(record, Way::Pair, &refused);
        }
        TransferStalled => {
            victim(record, request("transfer", 8_000));
            for way in [Way::Via, Way::Router, Way::Pair] {
                all(record, way, &hangs(Some("transfer")));
            }
            for side in [Side::Prefill, Side::Decode] {
                let load = last_load(record, side);
                load.running += u64::from(side == Side::Decode);
                load.transferring = 1;
                load.inflight.push(inflight("transfer", 1, 8_000, 8_000));
            }
        }
        DecodeWedged => {
            victim(record, request("decode", 9_000));
            for connection in &mut clients(record).connections {
                connection.requests[0].last_token_ms = Some(9_000);
            }
            for way in [Way::Via, Way::Router, Way::Pair, Way::Decode] {
                all(record, way, &hangs(Some("decode")));
            }
            let decode = last_load(record, Side::Decode);
            decode.running += 1;
            decode.last_step_age_ms = 9_000;
            decode.inflight = vec![inflight("decode", decode.running, 9_000, 9_000)];
        }
        DecodeOverloaded => {
            for _ in 0..6 {
                victim(record, request("queue", 12_000));
            }
            for _ in 0..2 {
                victim(record, request("decode", 12_000));
            }
            all(record, Way::Via, &hangs(Some("queue")));
            all(record, Way::Router, &hangs(Some("queue")));
            all(record, Way::Pair, &passes(8_000, &[("decode", 7_000.0)]));
            all(record, Way::Decode, &hangs(Some("prefill")));
            for at in 0..2 {
                let Found::Read(decode) = &mut record.engines[1].loads[at].found else {
                    unreachable!()
                };
                decode.running = 2;
                decode.max_running = 2;
                decode.waiting = 1;
                decode.last_step_age_ms = 80;
                // one waits for its turn
                decode.inflight = vec![inflight("decode", 3, 12_000, 12_000)];
            }
        }
    }
}

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
