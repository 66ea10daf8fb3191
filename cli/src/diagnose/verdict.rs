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

use super::facts::{Condition, EngineFacts, Facts, Probed, spent_most};
use super::observation::{Note, Notes, Observation, Seconds};
use super::record::{ANSWERED, Outcome, Probe, Record, Side, Way};
use super::summary::summary;

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

/// All of them in order, each once.
pub fn notes<'a>(of: impl IntoIterator<Item = &'a [Note]>) -> Vec<Note> {
    let mut all: Vec<Note> = of.into_iter().flatten().copied().collect();
    all.sort_unstable();
    all.dedup();
    all
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

    fn reason(&mut self, kind: Standing, text: impl Into<String>, mut by: Vec<Note>) {
        let text = text.into();
        let same = |reason: &&mut Reason| reason.kind == kind && reason.text == text;
        if let Some(reason) = self.reasons.iter_mut().find(same) {
            reason.by.extend(by);
            reason.by = notes([reason.by.as_slice()]);
        } else {
            by.sort_unstable();
            by.dedup();
            self.reasons.push(Reason { text, by, kind });
        }
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
    let past = router.notes.clone();
    for (probe, note) in &via.bad {
        let by = [vec![*note], past.clone()].concat();
        if by_tandem(probe) && router.fine() {
            case.unclear(
                "a probe came through and failed further in, others did not",
                by,
                "run it again",
            );
        } else if router.fares_better_than(probe) {
            case.points("the way through fails, the way past it does not", by);
        } else if answered(probe) {
            case.points("the router has written a whole answer that did not come", vec![*note]);
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
        case.excludes(via.well_on_connections(), via.notes.clone());
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
    let (probed, direct) = (facts.way(Way::Router), direct(facts));
    let with_direct = |by: Vec<Note>| [by, direct.notes.clone()].concat();
    if let Some(by) = facts.stuck_in(&["text"]) {
        case.points("requests wait for template and tokenizer", by);
    }
    // without an engine they wait in its queue, and nowhere further in
    let idle = if facts.missing.is_empty() {
        &["queue", "accept"][..]
    } else {
        &["accept"]
    };
    if let Some(by) = facts.stuck_in(idle)
        && engines_are_free(facts)
    {
        if direct.fine() && !facts.strangers {
            let text = "requests are with no engine, and the engines take others";
            case.points(text, with_direct(by));
        } else if direct.fine() || !direct.measured() {
            case.unclear("requests are with no engine", by, ENGINES);
        }
    }
    if let Some(by) = facts.stuck_in(&["prefill_queue", "prefill", "transfer", "decode"])
        && !facts.engines.is_empty()
        && !facts.strangers
        && facts.engines.iter().all(|engine| engine.condition == Condition::Idle)
        && direct.fine()
    {
        let engines = facts.engines.iter().flat_map(|engine| engine.notes.clone());
        let by = by.into_iter().chain(engines).collect();
        case.points("requests wait for engines that have nothing to do", by);
    }
    for engine in &facts.engines {
        let serves = !matches!(engine.condition, Condition::Silent | Condition::Loading);
        if let Some(heard) = engine.heard
            && serves
            && !engine.heard_well(facts.stuck_ms)
            && direct.fine()
        {
            let (side, endpoint) = (engine.side.name(), engine.endpoint);
            let by = with_direct(engine.notes.clone());
            let how = if heard.state == "down" { "use" } else { "hear" };
            case.points(format!("it does not {how} {side} {endpoint}, which answers"), by);
        }
    }
    if facts.blocked.is_empty()
        && facts.stuck_in(&["client"]).is_none()
        && let Some(by) = facts.still_in("client")
    {
        if facts.only_ours_in("client") {
            let text = "it does not take what engines have for it, and no client holds it up";
            case.points(text, by);
        } else {
            let text =
                "somebody does not take what engines have for them, and this router is not the only one who asks there";
            case.unclear(text, by, "look at each router");
        }
    }
    for (probe, note) in &probed.bad {
        let by = with_direct(vec![*note]);
        if unreachable(probe) && facts.way(Way::Via).fine() {
            case.unclear(
                "nobody answers at its address here, and the way through --via passes",
                [vec![*note], facts.way(Way::Via).notes].concat(),
                "look from where its clients connect",
            );
        } else if unreachable(probe) {
            case.points("nobody answers at its address", vec![*note]);
        } else if !facts.missing.is_empty() && lacks_engines(probe) {
            let missing = facts.missing.iter().map(|(_, note)| *note);
            case.hidden(missing.chain([*note]).collect());
        } else if direct.fares_better_than(probe) {
            case.points("the way through it fails, the way past it does not", by);
        } else if direct.measured() {
            case.hidden(by);
        } else {
            case.unclear(
                "the way through it fails, and the way past it was not measured",
                by,
                ENGINES,
            );
        }
    }
    if probed.fine() {
        case.excludes(probed.well_on_connections(), probed.notes.clone());
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

/// What would decide about an engine that does not serve yet.
const LOADED: &str = "look again when it has loaded its model";
/// What would decide about one that takes nothing new.
const DRAINED: &str = "look again when it takes requests again";
/// What would decide between the router and what lies behind it.
const ENGINES: &str = "give the engines' control ports with --prefill and --decode";

/// Prefill.
fn prefill(facts: &Facts<'_>) -> Opinion {
    let mut case = Case::of(Layer::Prefill);
    engines(facts, Side::Prefill, &mut case);
    both_legs(
        facts,
        "prefill",
        "a probe of both legs does not get through prefill, decode alone passes",
        &mut case,
    );
    exclude_by(facts, &[Way::Pair, Way::Router, Way::Via], &mut case);
    case.close()
}

/// The hand-off of KV.
fn transfer(facts: &Facts<'_>) -> Opinion {
    let mut case = Case::of(Layer::Transfer);
    // by the router's account, and by the engines' own
    let still = [facts.stuck_in(&["transfer"]), facts.still_in("transfer")];
    for by in still
        .into_iter()
        .flatten()
        .filter(|_| engines_are_well(facts) && !facts.strangers)
    {
        case.points("KV does not arrive, and the engines are well", by);
    }
    both_legs(
        facts,
        "transfer",
        "KV of a probe does not arrive, decode alone passes",
        &mut case,
    );
    exclude_by(facts, &[Way::Pair, Way::Router, Way::Via], &mut case);
    case.close()
}

/// Decode.
fn decode(facts: &Facts<'_>) -> Opinion {
    let mut case = Case::of(Layer::Decode);
    engines(facts, Side::Decode, &mut case);
    for (probe, note) in facts.way(Way::Decode).bad {
        let mut asked = facts.side(Side::Decode).filter(|engine| engine.endpoint == probe.place);
        match asked.next() {
            // it has said itself what is wrong with it
            Some(engine) if matches!(engine.condition, Condition::Silent | Condition::Loading) => {}
            // nothing stands still there, or its condition would be another
            Some(engine) if !failed(probe) && engine.condition.steps_well(facts.stuck_ms) => case.unclear(
                "a probe of decode alone takes long, and each of its steps does not",
                [vec![note], engine.notes.clone()].concat(),
                "run it again, and look for what else its machine does",
            ),
            _ if refuses(probe) => case.unclear("it drains, and takes no probe of decode alone", vec![note], DRAINED),
            _ if failed(probe) => case.points("a probe of decode alone fails", vec![note]),
            _ => case.points("a probe of decode alone does not pass in time", vec![note]),
        }
    }
    exclude_by(facts, &[Way::Decode, Way::Pair, Way::Router, Way::Via], &mut case);
    case.close()
}

/// What engines of a side say of themselves.
fn engines(facts: &Facts<'_>, side: Side, case: &mut Case) {
    for (_, note) in facts.missing.iter().filter(|(missing, _)| *missing == side) {
        case.points(format!("no {} runs", side.name()), vec![*note]);
    }
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
            Condition::Loading => case.unclear(format!("{name} is loading its model"), by, LOADED),
            Condition::Late { still_ms } => {
                let still = Seconds(still_ms);
                case.points(
                    format!("{name} did nothing for a request that it computes for {still}"),
                    by,
                );
            }
            Condition::Unreported | Condition::Idle | Condition::Steps { .. } => {}
        }
    }
}

/// The first way that was measured excludes a layer by which it goes, if nothing is wrong with it.
fn exclude_by(facts: &Facts<'_>, ways: &[Way], case: &mut Case) {
    let by_kv = matches!(case.layer, Layer::Prefill | Layer::Transfer);
    // whoever asks the router leaves it to decode whether it reads the prompt by itself
    let goes = |(way, probed): &(Way, Probed<'_>)| {
        probed.measured() && (*way == Way::Pair || !by_kv || !probed.fine() || probed.moved_kv())
    };
    let ways = ways.iter().map(|way| (*way, facts.way(*way)));
    match ways.into_iter().find(goes).map(|(_, probed)| probed) {
        Some(probed) if probed.fine() => case.excludes(probed.well("through it"), probed.notes),
        Some(probed) => case.hidden(probed.notes),
        None => case.decide.push(format!("no probe went through {}", case.layer.name())),
    }
}

/// What probes of both legs that did not pass or were slow say of `layer`, where decode alone is fine: `text`, if that is
/// where they did not get through.
fn both_legs(facts: &Facts<'_>, layer: &str, text: &str, case: &mut Case) {
    let alone = facts.way(Way::Decode);
    let known = |engine: &EngineFacts<'_>| {
        matches!(
            engine.condition,
            Condition::Silent | Condition::Loading | Condition::Late { .. }
        )
    };
    // an engine that says itself what is wrong with it needs no probe
    if !alone.fine() || facts.engines.iter().any(known) {
        return;
    }
    for (probe, note) in facts.way(Way::Pair).bad {
        if !alone.fares_better_than(probe) {
            continue;
        }
        let by = [vec![note], alone.notes.clone()].concat();
        match at(&probe.outcome) {
            Some(at) if at == layer && refuses(probe) => {
                case.unclear("it drains, and takes no probe of both legs", by, DRAINED);
            }
            Some(at) if at == layer => case.points(text, by),
            Some(_) => {}
            None => case.unclear(
                "a probe of both legs fails, decode alone passes",
                by,
                "run it again while it lasts",
            ),
        }
    }
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

/// How the engines answer without the router: by probes of both legs, or of decode alone where there is no prefill.
fn direct<'a>(facts: &Facts<'a>) -> Probed<'a> {
    let prefill = facts.side(Side::Prefill).next().is_some();
    facts.way(if prefill { Way::Pair } else { Way::Decode })
}

/// Each answers, and steps where it has something to compute.
fn engines_are_well(facts: &Facts<'_>) -> bool {
    let well = |engine: &EngineFacts<'_>| matches!(engine.condition, Condition::Idle | Condition::Steps { .. });
    facts.engines.iter().all(well)
}

/// So they do, and none is full.
fn engines_are_free(facts: &Facts<'_>) -> bool {
    engines_are_well(facts) && !facts.engines.iter().any(|engine| engine.busy)
}

/// The router has written the whole answer, which did not come.
fn answered(probe: &Probe) -> bool {
    matches!(&probe.outcome, Outcome::Hung { state: Some(state), .. } if state == ANSWERED)
}

/// It ended, and not well.
fn failed(probe: &Probe) -> bool {
    matches!(probe.outcome, Outcome::Failed { .. } | Outcome::Cut { .. })
}

/// It came to nothing for want of an engine.
fn lacks_engines(probe: &Probe) -> bool {
    match &probe.outcome {
        Outcome::Failed { code: Some(code), .. } => {
            ["no_prefill_engine", "no_decode_engine", "no_capacity"].contains(&code.as_str())
        }
        Outcome::Hung { state: Some(state), .. } => ["queue", "held"].contains(&state.as_str()),
        _ => false,
    }
}

/// An engine takes nothing new, as it was told.
fn refuses(probe: &Probe) -> bool {
    matches!(&probe.outcome, Outcome::Failed { code: Some(code), .. } if code == "draining")
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
