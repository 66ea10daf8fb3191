//! One prompt from admission to its last token, as a stream of events.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::Stream;
use tandem_telemetry::Span;
use tandem_wire::proto::generate_event::Event as Wire;
use tandem_wire::proto::{self, GenerateEvent, GenerateRequest, finished, phase};
use tandem_wire::reason::FAILURE_KEY;
use tandem_wire::{Failure, Reason, Source, TransferId, TransferKey};
use tonic::Streaming;

use super::Flow;
use super::ending::{LAST_WORDS, read_to_end};
use super::piece::{Piece, Waiting};
use super::progress::Progress;
use super::queue::{Admitted, Asking, Ticket};
use super::spec::{Asker, Spec, fit};
use super::together::Part;
use super::traffic::Pass;
use super::verdict::{MAX_ATTEMPTS, Met};
use crate::engines::{Avoid, Lease, Leg, Need, Prefer, Side, Verdict};
use crate::error::RouterError;
use crate::evidence::{Stage, Stay};
use crate::metrics::Phase;
use crate::text::{TextError, TextStream};

/// Before the second retry; the first goes at once.
const PAUSE: Duration = Duration::from_millis(100);

fn stream(flow: &Flow, spec: &Spec) -> Result<TextStream, TextError> {
    let mut stream = flow.text.stream(&spec.stops)?;
    if let Some(format) = spec.calls {
        stream = stream.with_markers(format.markers());
    }
    let scored = spec.sampling.logprobs.is_some();
    Ok(stream.with_special_tokens(spec.show_special_tokens).with_places(scored))
}

/// What happens to a choice, in order.
#[derive(Debug)]
pub enum Event {
    /// An engine has it. At most once.
    Accepted,
    /// More of the answer.
    Text(Piece),
    /// An engine failed and another begins anew: what came so far counts no more. Only where nothing is streamed.
    Restarted,
    /// The end of a good answer.
    Done(Done),
    /// The end of a failed one.
    Failed(RouterError),
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// By itself, or at a stop.
    Stop,
    /// It has as many tokens as were asked for.
    Length,
    /// By itself, with calls of tools.
    ToolCalls,
}

impl Finish {
    /// The same end of an answer that has calls.
    #[must_use]
    pub fn with_calls(self) -> Self {
        match self {
            Self::Stop | Self::ToolCalls => Self::ToolCalls,
            Self::Length => Self::Length,
        }
    }

    /// OpenAI's `finish_reason`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// The end of a good answer.
#[derive(Debug, Clone)]
pub struct Done {
    /// The last piece.
    pub piece: Piece,
    /// Why it ended.
    pub finish: Finish,
    /// Tokens of the prompt; 0 where another choice of the same prompt counts them.
    pub prompt_tokens: u32,
    /// Of those, found in a prefix cache; none where a stop string ended the call before the engine said so.
    pub cached_tokens: Option<u32>,
    /// Tokens of the answer.
    pub completion_tokens: u32,
    /// What the engine says of its work; none where a stop string ended the call before it did.
    pub usage: Option<proto::Usage>,
}

/// One choice. Dropping it cancels everything below it.
#[derive(Debug)]
pub struct Choice {
    flow: Arc<Flow>,
    spec: Spec,
    text: TextStream,
    /// Tokens whose text is held back, where their log-probabilities were asked for.
    scores: Waiting,
    part: Part,
    prefer: Prefer,
    /// Follows another choice, which counts the prompt.
    follows: bool,
    ticket: Ticket,
    transfer: TransferId,
    /// Calls made, for the key: each names another attempt.
    calls: u32,
    /// Calls that count against [`MAX_ATTEMPTS`].
    attempts: u32,
    avoid: Avoid,
    last: Option<Failure>,
    accepted: bool,
    /// Text has left for the consumer.
    spoken: bool,
    progress: Arc<Progress>,
    /// What it waits for; none: it is over.
    stay: Option<Stay>,
    /// Tokens of the answer that `progress` has of it.
    counted: u32,
    /// Time spent in the queue, all attempts together.
    waited: Duration,
    /// The last call's.
    span: Span,
    state: State,
}

#[derive(Debug)]
enum State {
    Waiting,
    Running(Box<Running>),
    Over,
}

#[derive(Debug)]
struct Running {
    // first, so that the stream goes before the places at the engines do
    events: Streaming<GenerateEvent>,
    lease: Box<Lease>,
    _pass: Option<Pass>,
    /// On the prefill engine whose work the end of the call tells about.
    unjudged: Option<Verdict>,
}

impl Choice {
    /// A choice that has not begun. The error names the stop string at fault.
    pub fn new(flow: Arc<Flow>, spec: Spec, part: Part, progress: Arc<Progress>) -> Result<Self, RouterError> {
        let follows = matches!(part, Part::Follows(_));
        if !follows {
            progress.begins(spec.prompt.len() as u32);
        }
        Ok(Self {
            scores: Waiting::default(),
            part,
            prefer: Prefer::default(),
            follows,
            stay: Some(progress.stay(Stage::Queue)),
            progress,
            counted: 0,
            text: stream(&flow, &spec)?,
            ticket: flow.queue.ticket(),
            flow,
            spec,
            transfer: TransferId::random(),
            calls: 0,
            attempts: 0,
            avoid: Avoid::default(),
            last: None,
            accepted: false,
            spoken: false,
            waited: Duration::ZERO,
            span: Span::default(),
            state: State::Waiting,
        })
    }

    /// Its events. The last one is [`Event::Done`] or [`Event::Failed`].
    pub fn events(self) -> impl Stream<Item = Event> + Send {
        futures::stream::unfold(self, |mut choice| async move {
            let event = choice.next().await?;
            Some((event, choice))
        })
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            let event = match std::mem::replace(&mut self.state, State::Over) {
                State::Waiting => self.begin().await,
                State::Running(running) => self.step(running).await,
                State::Over => return None,
            };
            if matches!(self.state, State::Over) {
                self.stay = None;
            }
            if event.is_some() {
                return event;
            }
        }
    }

    async fn begin(&mut self) -> Option<Event> {
        self.waits_for(Stage::Queue);
        if let Some(follow) = self.part.follow() {
            self.prefer = follow.turn().await;
        }
        let waits = Instant::now();
        let until = (waits + self.spec.knobs.queue().saturating_sub(self.waited)).min(self.spec.deadline);
        let need = Need {
            prompt_tokens: self.spec.prompt.len() as u32,
            new_tokens: self.spec.max_new_tokens,
            max_length_tokens: self.spec.max_length_tokens,
            prefer: self.prefer,
        };
        // whom it follows was admitted, and it with that
        let again = self.calls > 0 || self.follows;
        let asking = Asking {
            ticket: self.ticket,
            need: &need,
            avoid: &self.avoid,
            knobs: &self.spec.knobs,
            again,
            exempt: self.spec.asker == Asker::Probe,
            until,
            stay: self.stay.as_mut(),
        };
        let admitted = self.flow.admit(asking).await;
        self.waited += waits.elapsed();
        let (lease, pass) = match admitted {
            Ok(Admitted { lease, pass, held }) => {
                self.waited -= held;
                self.spec.deadline += held;
                (lease, pass)
            }
            Err(RouterError::QueueTimeout { .. }) => {
                return Some(Event::Failed(RouterError::QueueTimeout { waited: self.waited }));
            }
            Err(error) => return Some(Event::Failed(self.no_pair(error))),
        };
        if lease.bypass && self.counts() {
            self.flow.metrics.prefill_bypassed.inc();
        }
        let own = self.spec.max_length_tokens.unwrap_or(u32::MAX);
        let max_new_tokens = match fit(&self.spec, lease.decode.session().max_length_tokens().min(own)) {
            Ok(max_new_tokens) => max_new_tokens,
            Err(error) => return Some(Event::Failed(error)),
        };
        let request = self.request(&lease, max_new_tokens);
        self.waits_for(Stage::Accept);
        self.calls += 1;
        self.attempts += 1;
        self.progress.attempt(self.calls);
        let mut client = lease.decode.session().client.clone();
        let waited = self.waited.as_micros() as i64;
        self.span = self
            .progress
            .trace()
            .call("tandem.v1.Engine/Generate", &lease.decode.session().endpoint);
        self.span.describe(|| {
            [
                ("tandem.attempt", i64::from(self.calls).into()),
                ("tandem.queue_us", waited.into()),
            ]
        });
        #[cfg(feature = "faults")]
        tandem_faults::pass_async(tandem_faults::Fault::BlockUpstream).await;
        match client.generate(self.span.parent().carried_by(request)).await {
            Ok(events) => {
                self.state = State::Running(Box::new(Running {
                    events: events.into_inner(),
                    lease,
                    _pass: pass,
                    unjudged: None,
                }));
                None
            }
            Err(status) => {
                drop(pass);
                self.broke(lease, &status).await
            }
        }
    }

    fn waits_for(&mut self, stage: Stage) {
        if let Some(stay) = &mut self.stay {
            stay.move_to(stage);
        }
    }

    /// Why there is no pair: none could ever hold it; else the failure of the attempt before says more, unless that only said
    /// to look elsewhere.
    fn no_pair(&mut self, error: RouterError) -> RouterError {
        let engines = &self.flow.engines;
        let too_long = match &error {
            RouterError::NoDecode(_) => engines.longest(Side::Decode).and_then(|max| fit(&self.spec, max).err()),
            RouterError::NoPrefill(_) => engines
                .longest(Side::Prefill)
                .filter(|max| self.spec.prompt.len() as u64 >= u64::from(*max))
                .and_then(|max| fit(&self.spec, max).err()),
            _ => None,
        };
        if let Some(too_long) = too_long {
            return too_long;
        }
        match (&error, self.last.take()) {
            (RouterError::NoDecode(_) | RouterError::NoPrefill(_), Some(failure))
                if !matches!(failure.reason, Reason::StaleBoot | Reason::Loading | Reason::Draining) =>
            {
                failure.into()
            }
            _ => error,
        }
    }

    fn request(&self, lease: &Lease, max_new_tokens: u32) -> GenerateRequest {
        let on_prefill_failure = if self.spec.knobs.recompute() {
            proto::OnPrefillFailure::Recompute
        } else {
            proto::OnPrefillFailure::Fail
        };
        let remaining = self.spec.deadline.saturating_duration_since(Instant::now());
        GenerateRequest {
            boot_id: lease.decode.session().boot.to_wire(),
            key: Some(
                TransferKey {
                    id: self.transfer,
                    attempt: self.calls,
                }
                .to_wire(),
            ),
            request_id: self.spec.request_id.clone(),
            prompt_tokens: self.spec.prompt.to_vec(),
            sampling: Some(self.spec.sampling.clone()),
            max_new_tokens,
            stop_token_ids: self.spec.stop_token_ids.clone(),
            ignore_eos: self.spec.ignore_eos,
            prefill: lease.prefill.as_ref().map(|leg| proto::Peer {
                endpoint: leg.session().endpoint.clone(),
                boot_id: leg.session().boot.to_wire(),
            }),
            on_prefill_failure: on_prefill_failure.into(),
            remaining_ms: (remaining.as_millis() as u64).max(1),
            // the others wait for its first token
            batch_tokens: !self.spec.streamed && !matches!(self.part, Part::Leads(_)),
        }
    }

    async fn step(&mut self, mut running: Box<Running>) -> Option<Event> {
        match running.events.message().await {
            Ok(Some(message)) => match message.event {
                Some(Wire::Started(_)) => {
                    self.state = State::Running(running);
                    (!std::mem::replace(&mut self.accepted, true)).then_some(Event::Accepted)
                }
                Some(Wire::Tokens(tokens)) => self.take(running, tokens),
                Some(Wire::Phase(phase)) => {
                    match phase.kind() {
                        phase::Kind::Queued => self.waits_for(Stage::PrefillQueue),
                        phase::Kind::Prefill => self.waits_for(Stage::Prefill),
                        phase::Kind::Transfer => self.waits_for(Stage::Transfer),
                        phase::Kind::Decode => {
                            self.waits_for(Stage::Decode);
                            self.prefilled(&mut running);
                        }
                        phase::Kind::Accept => self.waits_for(Stage::Accept),
                        phase::Kind::Unspecified | phase::Kind::Client => {}
                    }
                    self.state = State::Running(running);
                    None
                }
                Some(Wire::Finished(finished)) => {
                    let done = self.finish(&mut running, &finished);
                    read_to_end(running.events, LAST_WORDS);
                    Some(done)
                }
                Some(Wire::Failure(failure)) => {
                    let failure = Failure::from_wire(&failure);
                    drop(running.events);
                    self.fail(running.lease, failure, true).await
                }
                None => {
                    tracing::debug!(
                        request_id = self.spec.request_id,
                        "an event of a newer engine is ignored"
                    );
                    self.state = State::Running(running);
                    None
                }
            },
            Ok(None) => {
                let detail = "the engine's stream ended without a last message";
                let failure = Failure::new(Reason::Incomplete, Source::Router, detail);
                self.fail(running.lease, failure, false).await
            }
            Err(status) => self.broke(running.lease, &status).await,
        }
    }

    /// The prefill's part is over: its place is free for the next.
    fn prefilled(&mut self, running: &mut Running) {
        let lease = &mut running.lease;
        let boot = |leg: &Leg| leg.session().boot;
        let prefer = || Prefer {
            decode: Some(boot(&lease.decode)),
            prefill: lease.prefill.as_ref().map(boot),
        };
        self.part.arrived(prefer);
        let Some(mut leg) = lease.prefill.take() else {
            return;
        };
        if self.spec.knobs.recompute() {
            // decode may have done the work in its stead, and says so only at the end
            running.unjudged = Some(leg.leave());
        } else {
            leg.succeeded();
        }
    }

    fn take(&mut self, mut running: Box<Running>, tokens: proto::Tokens) -> Option<Event> {
        let ids = &tokens.ids;
        if !ids.is_empty() {
            self.waits_for(Stage::Decode);
            self.progress.token(self.spec.came.elapsed());
            self.count(self.counted.saturating_add(ids.len() as u32));
        }
        self.prefilled(&mut running);
        if self.spec.sampling.logprobs.is_some()
            && let Err(detail) = self.scores.take(ids, tokens.logprobs)
        {
            return Some(Event::Failed(RouterError::Internal(detail)));
        }
        let delta = match self.text.push(ids) {
            Ok(delta) => delta,
            Err(error) => return Some(Event::Failed(error.into())),
        };
        let piece = Piece {
            text: delta.text.to_owned(),
            tokens: self.scores.leave(delta.begins),
        };
        if delta.stopped.is_some() {
            // `running` is dropped here, which cancels what the engine would still do
            running.lease.decode.succeeded();
            let tokens = self.text.tokens() as u32;
            return Some(Event::Done(self.done(piece, Finish::Stop, tokens, None)));
        }
        self.state = State::Running(running);
        if piece.is_empty() {
            return None;
        }
        self.spoken = true;
        Some(Event::Text(piece))
    }

    fn finish(&mut self, running: &mut Running, finished: &proto::Finished) -> Event {
        running.lease.decode.succeeded();
        let usage = finished.usage.unwrap_or_default();
        self.prefilled(running);
        if let Some(mut prefill) = running.unjudged.take() {
            if usage.recomputed {
                prefill.failed();
            } else {
                prefill.succeeded();
            }
        }
        let phases = [
            (Phase::PrefillQueue, usage.queue_us),
            (Phase::Prefill, usage.prefill_us),
            (Phase::Transfer, usage.transfer_us),
            (Phase::Decode, usage.decode_us),
        ];
        for (phase, micros) in phases.into_iter().filter(|_| self.counts()) {
            self.flow.metrics.phase(phase, micros as f64 / 1e6);
        }
        let delta = self.text.finish();
        let stopped = delta.stopped.is_some();
        let piece = Piece {
            text: delta.text.to_owned(),
            tokens: self.scores.leave(delta.begins),
        };
        let finish = match finished.cause() {
            _ if stopped => Finish::Stop,
            finished::Cause::Length => Finish::Length,
            finished::Cause::Stop | finished::Cause::Unspecified => Finish::Stop,
        };
        Event::Done(self.done(piece, finish, usage.completion_tokens, Some(usage)))
    }

    fn done(&mut self, piece: Piece, finish: Finish, completion_tokens: u32, usage: Option<proto::Usage>) -> Done {
        self.span = Span::default();
        let (prompt_tokens, cached_tokens) = if self.follows {
            (0, Some(0))
        } else {
            let cached_tokens = usage.map(|usage| usage.cached_tokens);
            (self.spec.prompt.len() as u32, cached_tokens)
        };
        self.count(completion_tokens);
        if self.counts() {
            self.tally(prompt_tokens, cached_tokens.unwrap_or(0), completion_tokens);
        }
        Done {
            piece,
            finish,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            usage,
        }
    }

    /// Is it one of those that metrics tell of?
    fn counts(&self) -> bool {
        self.spec.asker != Asker::Diagnosis
    }

    /// Counts a good answer.
    fn tally(&self, prompt_tokens: u32, cached_tokens: u32, completion_tokens: u32) {
        let metrics = &self.flow.metrics;
        metrics.phase(Phase::Queue, self.waited.as_secs_f64());
        if let Some(first_token) = self.progress.first_token() {
            metrics.first_token(self.spec.endpoint, first_token.as_secs_f64());
        }
        metrics.prompt_tokens.inc_by(prompt_tokens.into());
        metrics.cached_tokens.inc_by(cached_tokens.into());
        metrics.completion_tokens.inc_by(completion_tokens.into());
    }

    /// So many tokens of the answer are there now.
    fn count(&mut self, tokens: u32) {
        self.progress.tokens(self.counted, tokens);
        self.counted = tokens;
    }

    /// The call failed by its status.
    async fn broke(&mut self, lease: Box<Lease>, status: &tonic::Status) -> Option<Event> {
        let carried = status.metadata().get_bin(FAILURE_KEY).is_some();
        let mut failure = Failure::from_status(status, Source::Router);
        if !carried {
            let endpoint = &lease.decode.session().endpoint;
            failure.detail = format!("the call to decode {endpoint} broke: {}", failure.detail);
        }
        self.fail(lease, failure, carried).await
    }

    /// Judges a failure; none: the next attempt is due.
    async fn fail(&mut self, mut lease: Box<Lease>, failure: Failure, carried: bool) -> Option<Event> {
        let met = Met {
            failure: &failure,
            carried,
            with_prefill: lease.prefill.is_some(),
        };
        let side = met.side();
        let leg = match (side, &mut lease.prefill) {
            (Side::Prefill, Some(leg)) => leg,
            _ => &mut lease.decode,
        };
        if met.fault() {
            leg.failed();
        }
        if met.doubt() {
            leg.session().doubt();
        }
        match failure.reason {
            Reason::NoCapacity => leg.session().refused(),
            Reason::Draining => leg.session().drains(),
            _ => {}
        }
        let delivered = self.spoken && self.spec.streamed;
        let again = met.again(self.spec.knobs.on_prefill_failure, self.attempts, delivered);
        self.span.fail(failure.meaning().code, || failure.to_string());
        tracing::info!(
            request_id = self.spec.request_id,
            trace_id = self.progress.trace().trace_id(),
            engine = leg.session().endpoint,
            side = side.name(),
            call = self.calls,
            again,
            %failure,
            "an attempt failed"
        );
        if !again {
            return Some(Event::Failed(failure.into()));
        }
        if self.counts() {
            self.flow.metrics.retry(failure.reason);
        }
        if failure.reason == Reason::NoCapacity {
            self.attempts -= 1;
        } else {
            self.avoid.sessions.push(Arc::clone(leg.session()));
        }
        drop(lease);
        self.count(0);
        let pause = self.attempts + 1 >= MAX_ATTEMPTS;
        self.last = Some(failure);
        self.span = Span::default();
        self.state = State::Waiting;
        let restarted = std::mem::take(&mut self.spoken);
        match stream(&self.flow, &self.spec) {
            Ok(text) => (self.text, self.scores) = (text, Waiting::default()),
            Err(error) => return Some(Event::Failed(error.into())),
        }
        if pause {
            tokio::time::sleep(PAUSE).await;
        }
        restarted.then_some(Event::Restarted)
    }
}
