//! Observations: each a line with its number and the place where it was read.

use std::fmt;

use super::facts::{Condition, passed, spent_most};
use super::record::{ANSWERED, Engine, HeardEngine, Kept, Outcome, Probe, Way};

/// A number of an observation.
pub type Note = usize;

/// One line: what was seen, and where.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Observation {
    pub number: Note,
    pub place: String,
    pub text: String,
}

/// All of them, in order.
#[derive(Debug, Default)]
pub struct Notes(pub Vec<Observation>);

impl Notes {
    /// One more.
    pub fn take(&mut self, place: &str, text: String) -> Note {
        let number = self.0.len() + 1;
        self.0.push(Observation {
            number,
            place: place.to_owned(),
            text,
        });
        number
    }
}

/// Time for people.
pub struct Seconds(pub u64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ms @ 0..10_000 => write!(f, "{}.{} s", ms / 1000, ms % 1000 / 100),
            ms => write!(f, "{} s", ms / 1000),
        }
    }
}

/// An engine, by its own word.
pub fn own_word(engine: &Engine, condition: Condition) -> String {
    let name = format!("{} {}", engine.side.name(), engine.endpoint);
    let failed = engine
        .loads
        .last()
        .and_then(|load| load.failed())
        .or(engine.info.failed());
    if let Some(why) = failed {
        let how = if engine.loading {
            "is loading"
        } else {
            "does not answer"
        };
        return format!("{name} {how}: {why}");
    }
    let Some(load) = engine.loads.iter().rev().find_map(|load| load.read()) else {
        return format!("{name} answers, and reports no load");
    };
    let steps = match condition {
        Condition::Silent | Condition::Loading | Condition::Unreported | Condition::Idle => {
            format!("idle, last step {} ago", Seconds(load.last_step_age_ms))
        }
        Condition::Steps { longest_ms } => format!("it steps, longest step {}", Seconds(longest_ms)),
        Condition::Late { still_ms } => format!("nothing computed for {}", Seconds(still_ms)),
    };
    let inflight = load.inflight.iter().map(|of| {
        let still = Seconds(of.still_ms);
        format!(", {} in state {} (still for {still})", of.count, of.state)
    });
    let inflight: String = inflight.collect();
    format!(
        "{name}: {} of {} running, {} waiting, {} transferring, {} of {} pages free{inflight}; {steps}{}",
        load.running,
        load.max_running,
        load.waiting,
        load.transferring,
        load.free_pages,
        load.total_pages,
        if load.draining { "; it drains" } else { "" },
    )
}

/// An engine, by the router's word.
pub fn routers_word(heard: &HeardEngine) -> String {
    let report = match heard.report_age_ms {
        Some(age) => format!("its last report {} old", Seconds(age)),
        None => "no report".to_owned(),
    };
    let reason = heard
        .reason
        .as_ref()
        .map(|reason| format!(": {reason}"))
        .unwrap_or_default();
    format!(
        "the router has {} {} as {}, {report}, {} there{reason}",
        heard.side,
        heard.endpoint,
        heard.state,
        count(heard.in_flight, "request"),
    )
}

/// Probes of one kind.
pub fn probes_line(probes: &[&Probe]) -> String {
    let Some(first) = probes.first() else {
        return String::new();
    };
    let what = match (first.way, first.connection) {
        (Way::Via | Way::Router, Kept::Fresh) => "fresh probe",
        (Way::Via | Way::Router, Kept::Reused) => "reused probe",
        (Way::Pair, _) => "direct probe of both legs",
        (Way::Decode, _) => "direct probe of decode alone",
    };
    let times: Vec<u64> = probes.iter().filter_map(|probe| passed(probe)).collect();
    if !times.is_empty() {
        let slowest = probes.iter().max_by_key(|probe| passed(probe));
        let spent = slowest.map(|probe| mostly(&probe.outcome)).unwrap_or_default();
        return format!(
            "{} passed, in {}{spent}{}",
            count(times.len() as u64, what),
            range(&times),
            not_kept(probes)
        );
    }
    let which = if first.connection == Kept::Reused {
        format!("{what}, number {} on its connection", first.round)
    } else {
        what.to_owned()
    };
    match &first.outcome {
        Outcome::Passed { .. } => which,
        Outcome::Failed {
            total_ms,
            status,
            code,
            reason,
            ..
        } => {
            let status = status.map(|status| format!(" {status}")).unwrap_or_default();
            let code = code.as_ref().map(|code| format!(" {code}")).unwrap_or_default();
            format!("{which}: failed after {}:{status}{code} {reason}", Seconds(*total_ms))
        }
        Outcome::Cut {
            total_ms,
            received_bytes,
        } => {
            format!(
                "{which}: cut off after {} and {received_bytes} bytes, before the answer ended",
                Seconds(*total_ms)
            )
        }
        Outcome::Hung {
            waited_ms,
            received_bytes,
            state,
        } => {
            let state = match state.as_deref() {
                Some(ANSWERED) => ", though the router has written the whole answer".to_owned(),
                Some(state) => format!(", then in state {state}"),
                None => String::new(),
            };
            format!(
                "{which}: hung: not complete after {}, {received_bytes} bytes came{state}",
                Seconds(*waited_ms)
            )
        }
        Outcome::NotMade { reason } => format!("{which}: not made: {reason}"),
    }
}

/// What is to be said of connections that were meant to be kept alive and were not.
fn not_kept(probes: &[&Probe]) -> String {
    let anew = |probe: &&&Probe| probe.connection == Kept::Reused && probe.round > 1 && probe.reused == Some(false);
    match probes.iter().filter(anew).count() {
        0 => String::new(),
        anew => format!(", of which {anew} had to come on a new connection: it was not kept alive"),
    }
}

/// Where most of its time went.
fn mostly(outcome: &Outcome) -> String {
    match spent_most(outcome) {
        Some((state, ms)) if ms >= 1.0 => format!(", of that {} in {state}", Seconds(ms as u64)),
        _ => String::new(),
    }
}

/// `1 request`, `2 requests`.
pub fn count(count: u64, what: &str) -> String {
    let (what, of) = what
        .split_once(" of ")
        .map_or((what, String::new()), |(what, of)| (what, format!(" of {of}")));
    let s = if count == 1 { "" } else { "s" };
    format!("{count} {what}{s}{of}")
}

/// `3 s`, or `3–5 s`.
pub fn range(ages: &[u64]) -> String {
    let (least, most) = (
        ages.iter().min().copied().unwrap_or(0),
        ages.iter().max().copied().unwrap_or(0),
    );
    let (least, most) = (Seconds(least).to_string(), Seconds(most).to_string());
    if least == most {
        most
    } else {
        format!("{}–{most}", least.trim_end_matches(" s"))
    }
}
