//! Records of known faults, each alone and amid the requests of others, with a client's vantage and without.

use tandem_faults::rows::Row;
use tandem_faults::rows::Row::*;

use super::record::*;
use super::verdict::Layer;

pub const STUCK: u64 = 5_000;
const HUNG: u64 = 15_000;

/// The layer that has to come out with `--via`.
pub fn layer(row: Row) -> Option<Layer> {
    let layers = [
        Layer::ClientPath,
        Layer::Router,
        Layer::Prefill,
        Layer::Transfer,
        Layer::Decode,
    ];
    row.layer().map(|name| {
        let named = |layer: &Layer| serde_json::json!(layer) == name;
        layers.into_iter().find(named).expect("a layer of that name")
    })
}

fn reading<T>(place: &str, at_ms: u64, found: T) -> Reading<T> {
    Reading {
        place: place.to_owned(),
        at_ms,
        found: Found::Read(found),
    }
}

pub fn failed<T>(place: &str, at_ms: u64) -> Reading<T> {
    Reading {
        place: place.to_owned(),
        at_ms,
        found: Found::Failed("connection refused".to_owned()),
    }
}

pub fn request(state: &str, ms: u64) -> Connection {
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

pub fn inflight(state: &str, count: u64, oldest_ms: u64, still_ms: u64) -> Inflight {
    Inflight {
        state: state.to_owned(),
        count,
        oldest_ms,
        still_ms,
    }
}

pub fn passes(total_ms: u64, spent: &[(&str, f64)]) -> Outcome {
    Outcome::Passed {
        total_ms,
        first_token_ms: total_ms / 2,
        spent_ms: spent.iter().map(|(state, ms)| ((*state).to_owned(), *ms)).collect(),
    }
}

pub fn hangs(state: Option<&str>) -> Outcome {
    Outcome::Hung {
        waited_ms: HUNG,
        received_bytes: 0,
        state: state.map(str::to_owned),
    }
}

fn refused(status: Option<u16>, code: &str, source: &str) -> Outcome {
    Outcome::Failed {
        total_ms: 3,
        status,
        code: Some(code.to_owned()),
        source: Some(source.to_owned()),
        reason: "it does not serve".to_owned(),
    }
}

fn probe(way: Way, connection: Kept, round: u32, outcome: Outcome) -> Probe {
    Probe {
        way,
        // the others are told apart by more than that
        place: match way {
            Way::Decode => endpoint(Side::Decode),
            _ => format!("{way:?}"),
        },
        at_ms: 10,
        connection,
        round,
        reused: (connection == Kept::Reused).then_some(round > 1),
        outcome,
    }
}

/// All probes of one way come to the same end.
pub fn all(record: &mut Record, way: Way, outcome: &Outcome) {
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

fn endpoint(side: Side) -> String {
    format!("10.0.0.{}:7101", side as u8)
}

fn engine(side: Side, load: Load) -> Engine {
    let endpoint = endpoint(side);
    Engine {
        side,
        info: reading(&endpoint, 1, Info::default()),
        loading: false,
        loads: vec![reading(&endpoint, 2, load.clone()), reading(&endpoint, 15_000, load)],
        endpoint,
    }
}

fn hears(side: Side) -> HeardEngine {
    HeardEngine {
        side: side.name().to_owned(),
        endpoint: endpoint(side),
        state: "up".to_owned(),
        report_age_ms: Some(300),
        ..HeardEngine::default()
    }
}

/// Nothing is wrong; `load`: 8 requests of others run.
pub fn well(via: bool, others: bool) -> Record {
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
                engines: vec![hears(Side::Prefill), hears(Side::Decode)],
            },
        )],
        engines: vec![engine(Side::Prefill, load()), engine(Side::Decode, decode)],
        missing: Vec::new(),
        probes,
    }
}

/// The router's last word on its clients.
pub fn clients(record: &mut Record) -> &mut Clients {
    match &mut record.clients[1].found {
        Found::Read(clients) => clients,
        Found::Failed(_) => unreachable!(),
    }
}

/// The router's word on its engines: prefill, decode.
pub fn heard(record: &mut Record) -> &mut Vec<HeardEngine> {
    match &mut record.heard[0].found {
        Found::Read(heard) => &mut heard.engines,
        Found::Failed(_) => unreachable!(),
    }
}

pub fn last_load(record: &mut Record, side: Side) -> &mut Load {
    match &mut record.engines[side as usize].loads[1].found {
        Found::Read(load) => load,
        Found::Failed(_) => unreachable!(),
    }
}

/// No pod of a side has an address any more: its Service has no endpoint, and the router knows none.
pub fn remove(record: &mut Record, side: Side) {
    record.missing.push(Missing {
        side,
        place: "the pods of d/chat".to_owned(),
        why: "none is there".to_owned(),
    });
    heard(record).retain(|heard| heard.side != side.name());
    record.engines.retain(|engine| engine.side != side);
    record
        .probes
        .retain(|probe| probe.way != Way::Pair && (side == Side::Prefill || probe.way != Way::Decode));
    let code = format!("no_{}_engine", side.name());
    for way in [Way::Via, Way::Router] {
        all(record, way, &refused(Some(503), &code, "router"));
    }
}

/// A client's own request that is stuck.
pub fn victim(record: &mut Record, connection: Connection) {
    let clients = clients(record);
    clients.in_flight += 1;
    clients.connections.push(connection);
}

pub fn planted(fault: Row, via: bool, others: bool) -> Record {
    let mut record = well(via, others);
    plant(&mut record, fault);
    record
}

fn plant(record: &mut Record, fault: Row) {
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
        TokenizerSlow => {
            victim(record, request("text", 9_000));
            all(record, Way::Via, &hangs(Some("text")));
            all(record, Way::Router, &hangs(Some("text")));
        }
        DecodeLoading => {
            let heard = &mut heard(record)[1];
            heard.state = "down".to_owned();
            heard.report_age_ms = None;
            record.engines[1].info = failed("decode", 5);
            record.engines[1].loading = true;
            record.engines[1].loads.clear();
            all(record, Way::Via, &refused(Some(503), "no_decode_engine", "router"));
            all(record, Way::Router, &refused(Some(503), "no_decode_engine", "router"));
            all(record, Way::Pair, &refused(None, "loading", "decode"));
            all(record, Way::Decode, &refused(None, "loading", "decode"));
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
            let heard = &mut heard(record)[0];
            heard.state = "down".to_owned();
            heard.report_age_ms = None;
            record.engines[0].info = failed("prefill", 5);
            record.engines[0].loads.clear();
            all(record, Way::Pair, &refused(None, "peer_lost", "prefill"));
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
