//! From what was observed to which layer is at fault. Pure: the same record gives the same verdict, now and later.
//!
//! The layers lie one in the other as the ways of the probes do, and that is the whole idea: a probe through `--via` goes on to
//! the router, one to the router goes on to the engines, one to both engines is decode's own work and prefill and transfer on
//! top. So a way that fails while the way inside it passes blames what lies between the two, and a way that fails together with
//! the one inside it blames nothing. Beside the probes stand the requests of real clients, each in a state that says whom it
//! waits for, and the engines' own word on their steps.
//!
//! A layer is named only by something that was measured there. Waiting for one's turn at an engine that is full and steps is no
//! fault of anybody.

use serde::Serialize;

use super::facts::{Condition, EngineFacts, Facts, Note, Notes, Observation, Probed, Seconds, count, spent_most};
use super::record::{Outcome, Probe, Record, Side, Way};

/// A part of the way of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layer {
    /// The client, and what lies between it and the router's socket.
    ClientPath,
    /// The router, and its way to the engines.
    Router,
    Prefill,
    /// KV on its way from prefill to decode.
    Transfer,
    Decode,
}

impl Layer {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClientPath => "client path",
            Self::Router => "router",
            Self::Prefill => "prefill",
            Self::Transfer => "transfer",
            Self::Decode => "decode",
        }
    }
}

/// What is known of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// The observations point to it.
    Suspected,
    /// Something is wrong, and the observations do not say whether it is here.
    Unclear,
    /// What goes through it fails, by what is known somewhere else: this layer cannot be seen.
    Hidden,
    /// The observations exclude it.
    Excluded,
    /// Nothing was observed of it.
    NotMeasured,
}

/// One layer, and why.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Opinion {
    pub layer: Layer,
    pub standing: Standing,
    pub reasons: Vec<Reason>,
    /// What would decide it, where it is unclear.
    pub decide: Vec<String>,
}

/// What speaks for an opinion: observations by their numbers.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Reason {
    pub text: String,
    pub by: Vec<Note>,
    #[serde(skip)]
    kind: Standing,
}

/// The end of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// These layers are pointed to.
    Fault,
    /// All layers were measured, and nothing is wrong.
    NoFault,
    /// Nothing is wrong inside Tandem; what only a client can see was not measured.
    NoFaultInside,
    /// Something is wrong and it is not known where, or too little was measured.
    Undecided,
}

/// What the record says.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    pub observations: Vec<Observation>,
    /// From the outside in.
    pub layers: Vec<Opinion>,
    pub finding: Finding,
    /// How things stand, in sentences.
    pub summary: Vec<String>,
}

impl Verdict {
    /// The layers that are pointed to.
    pub fn suspects(&self) -> impl Iterator<Item = &Opinion> {
        self.layers
            .iter()
            .filter(|opinion| opinion.standing == Standing::Suspected)
    }

    /// What would decide it.
    pub fn decide(&self) -> impl Iterator<Item = &str> {
        let open = self
            .layers
            .iter()
            .filter(|opinion| opinion.standing != Standing::Excluded);
        open.flat_map(|opinion| opinion.decide.iter().map(String::as_str))
    }
}

/// Judges a record.
pub fn verdict(record: &Record) -> Verdict {
    let mut notes = Notes::default();
    let facts = Facts::of(record, &mut notes);
    let layers: Vec<Opinion> = [client_path, router, prefill, transfer, decode]
        .into_iter()
        .map(|judge| judge(&facts))
        .collect();
    let any = |standing| layers.iter().any(|opinion| opinion.standing == standing);
    let unmeasured = |opinion: &Opinion| opinion.standing == Standing::NotMeasured;
    let finding = if any(Standing::Suspected) {
        Finding::Fault
    } else if any(Standing::Unclear) || any(Standing::Hidden) || layers[1..].iter().any(unmeasured) {
        Finding::Undecided
    } else if any(Standing::NotMeasured) {
        Finding::NoFaultInside
    } else {
        Finding::NoFault
    };
    let summary = summary(&facts, &layers[0]);
    Verdict {
        observations: notes.0,
        layers,
        finding,
        summary,
    }
}

/// Collects what speaks for and against one layer.
struct Case {
    layer: Layer,
    reasons: Vec<Reason>,
    decide: Vec<String>,
}

impl Case {
    fn of(layer: Layer) -> Self {
        Self {
            layer,
            reasons: Vec::new(),
            decide: Vec::new(),
        }
    }

    fn reason(&mut self, kind: Standing, text: impl Into<String>, by: Vec<Note>) {
        let text = text.into();
        self.reasons.push(Reason { text, by, kind });
    }

    fn points(&mut self, text: impl Into<String>, by: Vec<Note>) {
        self.reason(Standing::Suspected, text, by);
    }

    fn unclear(&mut self, text: impl Into<String>, by: Vec<Note>, decide: &str) {
        self.reason(Standing::Unclear, text, by);
        self.decide.push(decide.to_owned());
    }

    /// The way inside fails too.
    fn hidden(&mut self, by: Vec<Note>) {
        self.reason(
            Standing::Hidden,
            "what goes through it fails further in, or beside it",
            by,
        );
    }

    fn excludes(&mut self, text: impl Into<String>, by: Vec<Note>) {
        self.reason(Standing::Excluded, text, by);
    }

    /// What speaks against the layer outweighs what is unclear, and that what speaks for it.
    fn close(mut self) -> Opinion {
        let has = |kind| self.reasons.iter().any(|reason: &Reason| reason.kind == kind);
        let standing = [
            Standing::Suspected,
            Standing::Unclear,
            Standing::Hidden,
            Standing::Excluded,
        ]
        .into_iter()
        .find(|kind| has(*kind))
        .unwrap_or(Standing::NotMeasured);
        self.reasons.retain(|reason| reason.kind == standing);
        Opinion {
            layer: self.layer,
            standing,
            reasons: self.reasons,
            decide: self.decide,
        }
    }
}

/// The way from the client's program to the router's socket.
fn client_path(facts: &Facts<'_>) -> Opinion {
    let mut case = Case::of(Layer::ClientPath);
    if facts
        .blocked
        .iter()
        .any(|connection| connection.state_ms >= facts.stuck_ms)
    {
        case.points(
            "clients do not take the bytes that wait for them",
            vec![facts.blocked_note],
        );
    }
    if let Some(by) = facts.stuck_in(&["client"]) {
        case.points("clients make no room for more of their answers", by);
    }
    if let Some(by) = facts.stuck_in(&["body"]) {
        case.points("clients do not send the rest of their requests", by);
    }
    let (via, router) = (facts.way(Way::Via), facts.way(Way::Router));
    let past = router.notes();
    for (probe, note) in via.bad() {
        let by = [vec![note], past.clone()].concat();
        if by_tandem(probe) && router.fine() {
            case.unclear(
                "a probe came through and failed further in, others did not",
                by,
                "run it again",
            );
        } else if router.fine() {
            case.points("the way through fails, the way past it does not", by);
        } else if !router.measured() {
            case.unclear(
                "the way through fails, and the way past it was not measured",
                by,
                "give the router's own URL with --router",
            );
        } else {
            case.hidden(by);
        }
    }
    if via.fine() {
        case.excludes("probes pass on fresh and on reused connections", via.notes());
    }
    if facts.via.is_none() {
        case.decide
            .push("measure from the client's side with --via URL".to_owned());
    } else if !via.measured() {
        case.decide
            .push("no probe could be made through --via: see why above".to_owned());
    }
    case.close()
}

/// The router, from its socket to its calls to the engines.
fn router(facts: &Facts<'_>) -> Opinion {
    let mut case = Case::of(Layer::Router);
    let probed = facts.way(Way::Router);
    let (inner, inner_notes) = inner(facts);
    if let Some(by) = facts.stuck_in(&["text"]) {
        case.points("requests wait for template and tokenizer", by);
    }
    // whoever waits for engines that are well waits for the router
    if let Some(by) = facts.stuck_in(&["queue", "accept"])
        && engines_are_well(facts)
    {
        let by = [by, inner_notes.clone()].concat();
        match inner {
            Inner::Fine => case.points("requests are not with an engine, and the engines take others", by),
            Inner::Bad => {}
            Inner::NotMeasured => case.unclear(
                "requests are not with an engine",
                by,
                "give the engines' control ports with --prefill and --decode",
            ),
        }
    }
    if let Some(by) = facts.stuck_in(&["prefill_queue", "prefill", "transfer", "decode"])
        && !facts.engines.is_empty()
        && facts.engines.iter().all(|engine| engine.condition == Condition::Idle)
        && inner == Inner::Fine
    {
        let engines = facts.engines.iter().flat_map(|engine| engine.notes.clone());
        case.points(
            "requests wait for engines that have nothing to do",
            by.into_iter().chain(engines).collect(),
        );
    }
    for engine in &facts.engines {
        let answers = !matches!(engine.condition, Condition::Silent);
        if answers && engine.heard.is_some() && !engine.heard_well(facts.stuck_ms) && inner == Inner::Fine {
            let by = [engine.notes.clone(), inner_notes.clone()].concat();
            case.points(
                format!(
                    "it does not hear {} {}, which answers",
                    engine.side.name(),
                    engine.endpoint
                ),
                by,
            );
        }
    }
    for (probe, note) in probed.bad() {
        let by = [vec![note], inner_notes.clone()].concat();
        if unreachable(probe) {
            case.points("nobody answers at its address", vec![note]);
        } else if waits_its_turn(facts, probe) {
            // load
        } else {
            match inner {
                Inner::Fine => case.points("a probe through it does not pass, directly to the engines it does", by),
                Inner::Bad => case.hidden(by),
                Inner::NotMeasured => case.unclear(
                    "a probe through it does not pass",
                    by,
                    "give the engines' control ports with --prefill and --decode",
                ),
            }
        }
    }
    if probed.fine() {
        case.excludes("probes pass on fresh and on reused connections", probed.notes());
    } else if !probed.measured() {
        case.decide
            .push("let probes be made to the router: give its URL with --router".to_owned());
    }
    if let Some(note) = facts.unread {
        case.unclear(
            "its admin port cannot be read",
            vec![note],
            "give --router-admin and --admin-token-file of this router",
        );
    }
    case.close()
}

/// Prefill.
fn prefill(facts: &Facts<'_>) -> Opinion {
    let mut case = Case::of(Layer::Prefill);
    engines(facts, Side::Prefill, &mut case);
    for leg in legs(facts) {
        match leg.at {
            Some("prefill") => case.points(
                "a probe of both legs does not get through prefill, decode alone passes",
                leg.by,
            ),
            Some(_) => {}
            None => case.unclear(
                "a probe of both legs fails, decode alone passes",
                leg.by,
                "run it again while it lasts",
            ),
        }
    }
    exclude_by(facts, &[Way::Pair, Way::Router, Way::Via], &mut case);
    case.close()
}

/// The hand-off of KV.
fn transfer(facts: &Facts<'_>) -> Opinion {
    let mut case = Case::of(Layer::Transfer);
    if let Some(by) = facts.stuck_in(&["transfer"])
        && engines_are_well(facts)
    {
        let engines = facts.engines.iter().filter_map(|engine| engine.notes.first().copied());
        case.points(
            "KV does not arrive, though both engines are well",
            by.into_iter().chain(engines).collect(),
        );
    }
    for leg in legs(facts) {
        match leg.at {
            Some("transfer") => case.points("KV of a probe does not arrive, decode alone passes", leg.by),
            Some(_) => {}
            None => case.unclear(
                "a probe of both legs fails, decode alone passes",
                leg.by,
                "run it again while it lasts",
            ),
        }
    }
    exclude_by(facts, &[Way::Pair, Way::Router, Way::Via], &mut case);
    case.close()
}

/// Decode.
fn decode(facts: &Facts<'_>) -> Opinion {
    let mut case = Case::of(Layer::Decode);
    engines(facts, Side::Decode, &mut case);
    for (probe, note) in facts.way(Way::Decode).bad() {
        let silent = facts
            .side(Side::Decode)
            .any(|engine| engine.endpoint == probe.place && engine.condition == Condition::Silent);
        if !silent && !waits_its_turn(facts, probe) {
            case.points("a probe of decode alone does not pass", vec![note]);
        }
    }
    exclude_by(facts, &[Way::Decode, Way::Pair, Way::Router, Way::Via], &mut case);
    case.close()
}

/// What engines of a side say of themselves.
fn engines(facts: &Facts<'_>, side: Side, case: &mut Case) {
    for engine in facts.side(side) {
        let (name, by) = (format!("{} {}", side.name(), engine.endpoint), engine.notes.clone());
        match engine.condition {
            Condition::Silent if engine.heard_well(facts.stuck_ms) => {
                case.unclear(
                    format!("{name} answers the router, and not here"),
                    by,
                    "look from where the router runs",
                );
            }
            Condition::Silent => case.points(format!("{name} does not answer"), by),
            Condition::Late { longest_ms } => {
                case.points(
                    format!(
                        "{name} has something to compute and made no step for {}",
                        Seconds(longest_ms)
                    ),
                    by,
                );
            }
            Condition::Idle | Condition::Steps { .. } => {}
        }
    }
}

/// The first way that was measured excludes a layer by which it goes, if each probe of it passed.
fn exclude_by(facts: &Facts<'_>, ways: &[Way], case: &mut Case) {
    let measured = ways.iter().map(|way| facts.way(*way)).find(Probed::measured);
    match measured {
        Some(probed) if probed.fine() => case.excludes("probes go through it and pass", probed.notes()),
        // load is no fault
        Some(probed) if probed.bad().all(|(probe, _)| waits_its_turn(facts, probe)) => {
            case.excludes(
                "probes wait for their turn at an engine that is full and steps",
                probed.notes(),
            );
        }
        Some(probed) => case.hidden(probed.notes()),
        None => case.decide.push(format!("no probe went through {}", case.layer.name())),
    }
}

/// A probe of both legs that did not pass or was slow, where decode alone is fine.
struct Leg {
    /// The layer that it did not get through, where that is known.
    at: Option<&'static str>,
    by: Vec<Note>,
}

fn legs(facts: &Facts<'_>) -> Vec<Leg> {
    let alone = facts.way(Way::Decode);
    if !alone.fine() {
        return Vec::new();
    }
    let known = |engine: &EngineFacts<'_>| matches!(engine.condition, Condition::Silent | Condition::Late { .. });
    // an engine that says itself what is wrong with it needs no probe
    if facts.engines.iter().any(known) {
        return Vec::new();
    }
    let pairs = facts.way(Way::Pair);
    let bad = pairs.bad().filter(|(probe, _)| !waits_its_turn(facts, probe));
    bad.map(|(probe, note)| Leg {
        at: at(&probe.outcome),
        by: [vec![note], alone.notes()].concat(),
    })
    .collect()
}

/// The layer that a probe of both legs hung or failed in, or spent most of its time in.
fn at(outcome: &Outcome) -> Option<&'static str> {
    let state = match outcome {
        Outcome::Hung { state, .. } => state.as_deref(),
        Outcome::Failed { source, .. } => source.as_deref(),
        Outcome::Passed { .. } => spent_most(outcome).map(|(state, _)| state),
        Outcome::Cut { .. } | Outcome::NotMade { .. } => None,
    };
    match state? {
        "prefill" | "prefill_queue" => Some("prefill"),
        "transfer" => Some("transfer"),
        _ => None,
    }
}

/// Did it wait at an engine that is full and steps?
fn waits_its_turn(facts: &Facts<'_>, probe: &Probe) -> bool {
    let busy = |side| facts.busy(side);
    let waited = match &probe.outcome {
        Outcome::Hung { state, .. } => state.as_deref(),
        Outcome::Passed { .. } => spent_most(&probe.outcome).map(|(state, _)| state),
        Outcome::Failed { code, .. } => {
            let refused = matches!(code.as_deref(), Some("no_capacity" | "queue_full"));
            return refused && (busy(Side::Decode) || busy(Side::Prefill));
        }
        Outcome::Cut { .. } | Outcome::NotMade { .. } => return false,
    };
    match waited {
        Some("queue") => busy(Side::Decode) || busy(Side::Prefill),
        Some("prefill_queue") => busy(Side::Prefill),
        Some("accept" | "decode") => busy(Side::Decode),
        _ => false,
    }
}

/// How the engines answer without the router.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Inner {
    Fine,
    Bad,
    NotMeasured,
}

/// By probes of both legs; of decode alone where there is no prefill.
fn inner(facts: &Facts<'_>) -> (Inner, Vec<Note>) {
    let way = if facts.side(Side::Prefill).next().is_some() {
        Way::Pair
    } else {
        Way::Decode
    };
    let probed = facts.way(way);
    let inner = match (probed.measured(), probed.fine()) {
        (false, _) => Inner::NotMeasured,
        (true, true) => Inner::Fine,
        (true, false) => Inner::Bad,
    };
    (inner, probed.notes())
}

/// Each answers, and steps where it has something to compute; none is full.
fn engines_are_well(facts: &Facts<'_>) -> bool {
    let well = |engine: &EngineFacts<'_>| {
        matches!(engine.condition, Condition::Idle | Condition::Steps { .. }) && !engine.busy()
    };
    facts.engines.iter().all(well)
}

/// The failure was told by Tandem.
fn by_tandem(probe: &Probe) -> bool {
    matches!(&probe.outcome, Outcome::Failed { code: Some(_), .. })
}

/// Nobody answered at all.
fn unreachable(probe: &Probe) -> bool {
    matches!(
        &probe.outcome,
        Outcome::Failed {
            status: None,
            code: None,
            ..
        }
    )
}

/// How things stand, whatever the finding is.
fn summary(facts: &Facts<'_>, client_path: &Opinion) -> Vec<String> {
    let mut lines = Vec::new();
    let Some((clients, _)) = facts.clients else {
        return lines;
    };
    let answered = match clients.last_answer_written_ms {
        Some(ms) => format!("last answer fully written {} ago", Seconds(ms)),
        None => "no answer written yet".to_owned(),
    };
    if clients.in_flight == 0 {
        lines.push(format!("nothing in flight inside Tandem, {answered}"));
    } else {
        let steps: Vec<u64> = facts.waits.iter().map(|wait| facts.step_ms(wait)).collect();
        let still = steps.iter().filter(|ms| **ms >= facts.stuck_ms).count() as u64;
        let oldest = Seconds(steps.into_iter().max().unwrap_or(0));
        let moving = if still == 0 {
            format!("all progressing (oldest step {oldest})")
        } else {
            format!("{still} of them without a step (oldest step {oldest})")
        };
        lines.push(format!("{} in flight, {moving}", count(clients.in_flight, "request")));
        for engine in facts.engines.iter().filter(|engine| engine.busy()) {
            lines.push(format!(
                "{} {} is full and steps: others wait for their turn",
                engine.side.name(),
                engine.endpoint
            ));
        }
        lines.push(answered);
    }
    if clients.lately.client_gone > 0 {
        let gone = count(clients.lately.client_gone, "client connection");
        lines.push(format!("{gone} closed before their answer ended"));
    }
    if client_path.standing == Standing::NotMeasured
        && let Some(last) = lines.last_mut()
    {
        last.push_str(", client side not measured");
    }
    lines
}
