//! What a record says, in the terms that the rules speak in.

use super::observation::{Note, Notes, Seconds, count, own_word, probes_line, range, routers_word};
use super::record::{
    Clients, Connection, Engine, HeardEngine, Inflight, Kept, Load, Outcome, Probe, Record, Side, Way,
};

/// What is known.
#[derive(Debug)]
pub struct Facts<'a> {
    pub stuck_ms: u64,
    /// Asked for, measured or not.
    pub via: Option<&'a str>,
    /// The router's last word on its clients, and where it stands among the observations.
    pub clients: Option<(&'a Clients, Note)>,
    /// The router's admin port was asked and did not answer.
    pub unread: Option<Note>,
    /// Requests in flight, ours left out.
    pub waits: Vec<Wait<'a>>,
    /// Connections whose client takes nothing.
    pub blocked: Vec<&'a Connection>,
    pub blocked_note: Note,
    /// Engines by their own word, with what the router says of each.
    pub engines: Vec<EngineFacts<'a>>,
    /// Sides without any process.
    pub missing: Vec<(Side, Note)>,
    /// The router names engines that nobody looked at: what these do is not known.
    pub strangers: bool,
    probes: Vec<(&'a Probe, Note)>,
}

/// A request in flight.
#[derive(Debug)]
pub struct Wait<'a> {
    pub state: &'a str,
    /// Since it last moved: a token, or another state.
    pub step_ms: u64,
    pub note: Note,
}

/// One engine.
#[derive(Debug)]
pub struct EngineFacts<'a> {
    pub side: Side,
    pub endpoint: &'a str,
    pub condition: Condition,
    /// It has more than it can hold, and steps: what waits for it waits for its turn.
    pub busy: bool,
    /// What its requests wait for, by its last report.
    pub inflight: &'a [Inflight],
    pub heard: Option<&'a HeardEngine>,
    /// Of its own word, and of the router's.
    pub notes: Vec<Note>,
}

/// How an engine is, by its own word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// It does not answer.
    Silent,
    /// It answers that its model is not there yet.
    Loading,
    /// It answers, and says nothing of its load.
    Unreported,
    /// It has nothing to compute.
    Idle,
    /// It has, and each step took at most so long.
    Steps { longest_ms: u64 },
    /// It has, and nothing was done for it for too long.
    Late { still_ms: u64 },
}

impl Condition {
    /// It has something to compute, and no step takes long.
    pub fn steps_well(self, stuck_ms: u64) -> bool {
        matches!(self, Self::Steps { longest_ms } if longest_ms < stuck_ms)
    }
}

impl<'a> Facts<'a> {
    /// Reads a record.
    pub fn of(record: &'a Record, notes: &mut Notes) -> Self {
        let mut facts = Self {
            stuck_ms: record.limits.stuck_ms,
            via: record.via.as_deref(),
            clients: None,
            unread: None,
            waits: Vec::new(),
            blocked: Vec::new(),
            blocked_note: 0,
            engines: Vec::new(),
            missing: Vec::new(),
            strangers: false,
            probes: Vec::new(),
        };
        facts.clients(record, notes);
        facts.engines(record, notes);
        facts.probes(record, notes);
        facts
    }

    fn clients(&mut self, record: &'a Record, notes: &mut Notes) {
        let Some(last) = record.clients.last() else {
            return;
        };
        let place = last.place.as_str();
        let clients = match (last.read(), last.failed()) {
            (Some(clients), _) => clients,
            (None, why) => {
                let why = why.unwrap_or_default();
                self.unread = Some(notes.take(place, format!("the router's clients cannot be read: {why}")));
                return;
            }
        };
        let note = notes.take(
            place,
            format!(
                "{} in flight, {} open; {}",
                count(clients.in_flight, "request"),
                count(clients.open, "client connection"),
                match clients.last_answer_written_ms {
                    Some(ms) => format!("last answer fully written {} ago", Seconds(ms)),
                    None => "no answer written yet".to_owned(),
                },
            ),
        );
        self.clients = Some((clients, note));
        let lately = &clients.lately;
        if lately.ended > 0 {
            let failed: Vec<_> = lately
                .failed
                .iter()
                .map(|(code, count)| format!("{code} {count}"))
                .collect();
            let failed = if failed.is_empty() {
                String::new()
            } else {
                format!("; failed: {}", failed.join(", "))
            };
            notes.take(
                place,
                format!(
                    "of {} ended within {}: {} left by their client before the answer ended, {} cut off because their client took nothing{failed}",
                    count(lately.ended, "request"),
                    Seconds(lately.since_ms),
                    lately.client_gone,
                    lately.client_stalled,
                ),
            );
        }
        self.blocked = clients
            .connections
            .iter()
            .filter(|connection| connection.state == "blocked")
            .collect();
        if !self.blocked.is_empty() {
            let ages: Vec<u64> = self.blocked.iter().map(|connection| connection.state_ms).collect();
            let unsent: u64 = self.blocked.iter().fold(0, |sum, c| sum.saturating_add(c.unsent_bytes));
            self.blocked_note = notes.take(
                place,
                format!(
                    "{} blocked on write for {}, {unsent} bytes unsent",
                    count(ages.len() as u64, "client connection"),
                    range(&ages),
                ),
            );
        }
        // one line for each state
        let requests = || clients.connections.iter().flat_map(|connection| &connection.requests);
        let mut states: Vec<&str> = requests().map(|request| request.state.as_str()).collect();
        states.sort_unstable();
        states.dedup();
        for state in states {
            let of_state: Vec<u64> = requests()
                .filter(|request| request.state == state)
                .map(|request| request.state_ms.min(request.last_token_ms.unwrap_or(u64::MAX)))
                .collect();
            let note = notes.take(
                place,
                format!(
                    "{} in state {state}, last moved {} ago",
                    count(of_state.len() as u64, "request"),
                    range(&of_state)
                ),
            );
            self.waits
                .extend(of_state.into_iter().map(|step_ms| Wait { state, step_ms, note }));
        }
    }

    fn engines(&mut self, record: &'a Record, notes: &mut Notes) {
        let heard = record.heard.last();
        if let Some((place, why)) = heard.and_then(|heard| Some((&heard.place, heard.failed()?))) {
            notes.take(place, format!("the router's engines cannot be read: {why}"));
        }
        let named = heard
            .and_then(|heard| heard.read())
            .into_iter()
            .flat_map(|heard| &heard.engines);
        let looked_at = |of: &HeardEngine| record.engines.iter().any(|engine| engine.endpoint == of.endpoint);
        self.strangers = !named.into_iter().all(looked_at);
        for missing in &record.missing {
            let said = format!("no {} runs: {}", missing.side.name(), missing.why);
            self.missing.push((missing.side, notes.take(&missing.place, said)));
        }
        for engine in &record.engines {
            let known = heard.and_then(|heard| heard.read());
            let heard_of = known.and_then(|known| known.engines.iter().find(|heard| heard.endpoint == engine.endpoint));
            let worked_ms = self.worked_ms(engine.side);
            let (condition, full) = condition(engine, record.limits.stuck_ms, worked_ms);
            let place = engine.loads.last().map_or(&engine.info.place, |load| &load.place);
            let mut own = vec![notes.take(place, own_word(engine, condition))];
            if let (Some(of), Some(heard)) = (heard_of, heard) {
                own.push(notes.take(&heard.place, routers_word(of)));
            }
            self.engines.push(EngineFacts {
                side: engine.side,
                endpoint: &engine.endpoint,
                condition,
                // one that is slow is no excuse
                busy: full && condition.steps_well(self.stuck_ms),
                inflight: engine
                    .loads
                    .last()
                    .and_then(|load| load.read())
                    .map_or(&[], |load| &load.inflight),
                heard: heard_of,
                notes: own,
            });
        }
    }

    /// For how long the router says that engines of a side have had something to compute.
    fn worked_ms(&self, side: Side) -> u64 {
        let state = side.name();
        self.waits
            .iter()
            .filter(|wait| wait.state == state)
            .map(|wait| wait.step_ms)
            .max()
            .unwrap_or(0)
    }

    fn probes(&mut self, record: &'a Record, notes: &mut Notes) {
        // passed ones of a kind are one line
        let mut rest: Vec<&'a Probe> = record.probes.iter().collect();
        while let Some(first) = rest.first().copied() {
            let alike = |probe: &&Probe| {
                (probe.way, &probe.place, probe.connection) == (first.way, &first.place, first.connection)
                    && passed(probe).is_some() == passed(first).is_some()
            };
            let (group, others): (Vec<_>, Vec<_>) = rest.into_iter().partition(alike);
            let note = notes.take(&first.place, probes_line(&group));
            self.probes.extend(group.into_iter().map(|probe| (probe, note)));
            rest = others;
        }
    }

    /// The probes of one way that could be made.
    pub fn way(&self, way: Way) -> Probed<'a> {
        let mut probed = Probed::default();
        for (probe, note) in &self.probes {
            if probe.way != way || matches!(probe.outcome, Outcome::NotMade { .. }) {
                continue;
            }
            probed.notes.push(*note);
            probed.all.push(probe);
            let well = passed(probe).is_some_and(|total_ms| total_ms < self.stuck_ms);
            probed.slowest_ms = probed.slowest_ms.max(passed(probe).unwrap_or(0));
            if !well && self.waits_its_turn(probe) {
                probed.waits = true;
            } else if !well {
                probed.bad.push((*probe, *note));
            }
        }
        probed.notes.dedup();
        probed
    }

    /// Is it by load, or by order, that a probe did not pass in time?
    fn waits_its_turn(&self, probe: &Probe) -> bool {
        let (decode, prefill) = (self.busy(Side::Decode), self.busy(Side::Prefill));
        let state = match &probe.outcome {
            Outcome::Hung { state, .. } => state.as_deref(),
            Outcome::Passed { .. } => spent_most(&probe.outcome).map(|(state, _)| state),
            Outcome::Failed { code, .. } => match code.as_deref() {
                Some("no_capacity" | "queue_full") => Some("queue"),
                _ => None,
            },
            Outcome::Cut { .. } | Outcome::NotMade { .. } => None,
        };
        let Some(state) = state else {
            return false;
        };
        match state {
            "held" => true,
            // an engine that does all by itself has one queue
            _ if probe.way == Way::Decode => decode,
            "queue" => decode || prefill,
            "prefill_queue" => prefill,
            "accept" | "decode" => decode,
            _ => false,
        }
    }

    /// Engines of a side.
    pub fn side(&self, side: Side) -> impl Iterator<Item = &EngineFacts<'a>> {
        self.engines.iter().filter(move |engine| engine.side == side)
    }

    /// Those that take in more than they can hold, and step: what waits for them waits for its turn.
    pub fn busy(&self, side: Side) -> bool {
        self.side(side).any(|engine| engine.busy)
    }

    /// Since the request last moved, as far as that is known: an engine whose answer is not streamed tells little on the way,
    /// but its steps are the request's.
    pub fn step_ms(&self, wait: &Wait<'_>) -> u64 {
        let side = match wait.state {
            "prefill_queue" | "prefill" => Side::Prefill,
            "decode" => Side::Decode,
            "queue" | "accept" if self.busy(Side::Decode) => Side::Decode,
            "queue" if self.busy(Side::Prefill) => Side::Prefill,
            _ => return wait.step_ms,
        };
        let steps = self.side(side).filter_map(|engine| match engine.condition {
            Condition::Steps { longest_ms } => Some(longest_ms),
            _ => None,
        });
        steps.max().map_or(wait.step_ms, |longest| wait.step_ms.min(longest))
    }

    /// Engines by whose own word a request stands still in `state`, by their observations.
    pub fn still_in(&self, state: &str) -> Option<Vec<Note>> {
        let still = |engine: &&EngineFacts<'_>| {
            let mut of_state = engine.inflight.iter().filter(|inflight| inflight.state == state);
            of_state.any(|inflight| inflight.still_ms >= self.stuck_ms)
        };
        let engines = self.engines.iter().filter(still);
        let notes: Vec<Note> = engines.filter_map(|engine| engine.notes.first().copied()).collect();
        (!notes.is_empty()).then_some(notes)
    }

    /// Has this router as many requests at each engine as stand still there in `state`?
    pub fn only_ours_in(&self, state: &str) -> bool {
        self.engines.iter().all(|engine| {
            let there: u64 = engine
                .inflight
                .iter()
                .filter(|of| of.state == state)
                .map(|of| of.count)
                .sum();
            there == 0 || engine.heard.is_some_and(|heard| heard.in_flight >= there)
        })
    }

    /// Requests in one of `states` that have not moved for too long, by their observations.
    pub fn stuck_in(&self, states: &[&str]) -> Option<Vec<Note>> {
        let stuck = |wait: &&Wait<'_>| states.contains(&wait.state) && self.step_ms(wait) >= self.stuck_ms;
        let mut notes: Vec<Note> = self.waits.iter().filter(stuck).map(|wait| wait.note).collect();
        notes.dedup();
        (!notes.is_empty()).then_some(notes)
    }
}

impl EngineFacts<'_> {
    /// The router uses it, and has heard of it a moment ago.
    pub fn heard_well(&self, stuck_ms: u64) -> bool {
        let fresh =
            |heard: &HeardEngine| heard.state != "down" && heard.report_age_ms.is_some_and(|age| age < stuck_ms);
        self.heard.is_some_and(fresh)
    }
}

/// How the probes of one way did.
#[derive(Debug, Default)]
pub struct Probed<'a> {
    /// Those that did not pass, or were slow, and not because they wait for their turn.
    pub bad: Vec<(&'a Probe, Note)>,
    /// Some wait for their turn at an engine that is full and steps.
    pub waits: bool,
    /// Of those that passed.
    pub slowest_ms: u64,
    /// All of them …
    pub all: Vec<&'a Probe>,
    /// … and their observations.
    pub notes: Vec<Note>,
}

impl Probed<'_> {
    /// Was this way measured?
    pub fn measured(&self) -> bool {
        !self.notes.is_empty()
    }

    /// It was, and nothing is wrong with it.
    pub fn fine(&self) -> bool {
        self.measured() && self.bad.is_empty()
    }

    /// Did `outer`, a probe of the way around this one, fare worse than this way? One that only took long did where it took twice
    /// as long.
    pub fn fares_better_than(&self, outer: &Probe) -> bool {
        self.fine() && passed(outer).is_none_or(|total_ms| total_ms / 2 >= self.slowest_ms)
    }

    /// Was KV moved for one of them? A decode that reads the prompt by itself passes prefill by.
    pub fn moved_kv(&self) -> bool {
        self.all.iter().any(|probe| match &probe.outcome {
            Outcome::Passed { spent_ms, .. } => spent_ms.get("transfer").is_some_and(|ms| *ms > 0.0),
            _ => false,
        })
    }

    /// That nothing is wrong, in words, of a way that HTTP connections take.
    pub fn well_on_connections(&self) -> String {
        let fresh = self.all.iter().any(|probe| probe.connection == Kept::Fresh);
        // one that was meant to be kept alive may not have been
        let reused = self.all.iter().any(|probe| probe.reused == Some(true));
        self.well(match (fresh, reused) {
            (true, true) => "on fresh and on reused connections",
            (false, true) => "on reused connections",
            (_, false) => "on fresh connections",
        })
    }

    /// The same of any way. `how`: on which.
    pub fn well(&self, how: &str) -> String {
        let turn = if self.waits {
            ", or wait for their turn at an engine that is full and steps"
        } else {
            ""
        };
        format!("probes pass {how}{turn}")
    }
}

/// How long it took, if it passed.
pub fn passed(probe: &Probe) -> Option<u64> {
    match probe.outcome {
        Outcome::Passed { total_ms, .. } => Some(total_ms),
        _ => None,
    }
}

/// Its condition over all its reports, and whether it was full at one of them. `worked_ms`: for so long the router says that it
/// has had something to compute.
fn condition(engine: &Engine, stuck_ms: u64, worked_ms: u64) -> (Condition, bool) {
    if engine.loading {
        return (Condition::Loading, false);
    }
    if engine.info.read().is_none() || engine.loads.last().is_some_and(|load| load.read().is_none()) {
        return (Condition::Silent, false);
    }
    if engine.loads.is_empty() {
        return (Condition::Unreported, false);
    }
    let mut since = None;
    let mut steps = None;
    let mut full = false;
    let mut late = None;
    for reading in &engine.loads {
        let Some(load) = reading.read() else { continue };
        let all_places = load.max_running > 0 && load.running >= load.max_running;
        let full_now = load.waiting > 0 || all_places;
        full |= all_places || queues(engine.side, load, stuck_ms);
        if !computes(engine.side, load) {
            since = None;
            continue;
        }
        // an engine that has just got its first work made its last step long ago
        let since = *since.get_or_insert(reading.at_ms);
        let worked = reading.at_ms.saturating_sub(since).max(worked_ms);
        let oldest = computing(engine.side, load).map(|inflight| inflight.oldest_ms);
        let step = load.last_step_age_ms.min(oldest.fold(worked, u64::max));
        steps = steps.max(Some(step));
        late = late.max(if load.inflight.is_empty() {
            Some(step)
        } else {
            // a long step may move; a request that does not may wait for its turn at an engine that is full
            let still = computing(engine.side, load).map(|inflight| inflight.still_ms).max();
            still.filter(|_| step >= stuck_ms || !full_now)
        });
    }
    let condition = match (steps, late) {
        (_, Some(still_ms)) if still_ms >= stuck_ms => Condition::Late { still_ms },
        (Some(longest_ms), _) => Condition::Steps { longest_ms },
        (None, _) => Condition::Idle,
    };
    (condition, full)
}

/// Does anything wait for its turn there? Every prompt is in a prefill's queue until its next step, which is no more than that.
fn queues(side: Side, load: &Load, stuck_ms: u64) -> bool {
    if side == Side::Decode || load.inflight.is_empty() {
        return load.waiting > 0;
    }
    let mut queued = load.inflight.iter().filter(|of| of.state == "prefill_queue");
    queued.any(|of| of.oldest_ms >= stuck_ms / 4)
}

/// Its requests that wait for its steps.
fn computing(side: Side, load: &Load) -> impl Iterator<Item = &Inflight> {
    let states: &[&str] = match side {
        Side::Prefill => &["prefill"],
        // a decode may read a prompt by itself
        Side::Decode => &["prefill", "decode"],
    };
    load.inflight
        .iter()
        .filter(|inflight| states.contains(&inflight.state.as_str()))
}

/// Has it something to compute? What only waits for bytes of a hand-off is nothing.
fn computes(side: Side, load: &Load) -> bool {
    if !load.inflight.is_empty() {
        return computing(side, load).next().is_some();
    }
    let running = match side {
        Side::Prefill => load.running,
        Side::Decode => load.running.saturating_sub(load.transferring),
    };
    running > 0 || load.transferring == 0 && load.waiting > 0
}

/// The state that most of its time went to.
pub fn spent_most(outcome: &Outcome) -> Option<(&str, f64)> {
    let Outcome::Passed { spent_ms, .. } = outcome else {
        return None;
    };
    let most = spent_ms.iter().max_by(|a, b| a.1.total_cmp(b.1))?;
    Some((most.0.as_str(), *most.1))
}
