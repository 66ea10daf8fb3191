//! Prefill's control stream: one task per attempt, from Open to the last word.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tandem_telemetry::Span;
use tandem_wire::frame::prompt_hash;
use tandem_wire::proto::{self, DecodeMessage, Open, PrefillMessage, decode_message, prefill_message};
use tandem_wire::reason::reason_from_wire;
use tandem_wire::state::{PrefillEvent as Event, PrefillState, Step};
use tandem_wire::{Failure, Reason, Source, TransferKey};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::peers::lost;
use super::source::{HandOff, Held, Shared};
use super::timers::TimerValues;
use super::wait::Overtime;
use crate::exec::Logprob;
use crate::sched::{Cause, PrefillEvent, PrefillParams, PrefillStream, Stops, compile_grammar};
use crate::trace::failed;

/// Messages that wait to be sent.
pub const OUTBOX: usize = 32;
/// Words that decode can do without (queue places, progress, renewals) are left out when fewer places than this are free,
/// so that the few that it needs always find one.
const KEPT_FOR_THE_NEEDED: usize = 12;
/// After the terminal, late words are answered this long at most.
const LINGER: Duration = Duration::from_secs(2);

type Outbox = mpsc::Sender<Result<PrefillMessage, Status>>;

/// What the manifest says beside what was sent.
struct Outcome {
    first_token: u32,
    first_logprob: Option<Logprob>,
    ends: Option<Cause>,
    queue: Duration,
    prefill: Duration,
}

struct Control {
    shared: Arc<Shared>,
    key: TransferKey,
    hand_off: Arc<HandOff>,
    inbound: Streaming<DecodeMessage>,
    outbox: Outbox,
    events: Option<PrefillStream>,
    prompt_hash: [u8; 32],
    begun: Instant,
    remaining: Option<Duration>,
    accepted: bool,
    cached_tokens: u32,
    outcome: Option<Outcome>,
    leased: Instant,
    overtime: Overtime<(PrefillState, Instant)>,
    span: Span,
}

/// Serves one control stream.
pub async fn run(shared: Arc<Shared>, mut inbound: Streaming<DecodeMessage>, outbox: Outbox, mut span: Span) {
    let Some(open) = first(&shared, &mut inbound, &outbox).await else {
        return;
    };
    span.describe(|| {
        [
            ("tandem.request_id", open.request_id.clone().into()),
            ("tandem.prompt_tokens", (open.prompt_tokens.len() as i64).into()),
            ("tandem.have_tokens", i64::from(open.have_tokens).into()),
        ]
    });
    match Control::open(&shared, inbound, outbox.clone(), open).await {
        Ok(mut control) => {
            control.span = span;
            control.serve().await;
            // what is answered after the end is no part of the work
            drop(std::mem::take(&mut control.span));
            control.linger().await;
        }
        Err(failure) => {
            failed(&mut span, &failure);
            tracing::info!(trace_id = span.parent().trace_id(), "refused a hand-off: {failure}");
            shared.metrics.refused(failure.reason);
            send(&outbox, prefill_message::Message::Failed(failure.to_wire()));
        }
    }
}

/// Reads up to Open. An Abort that comes first names an attempt that must not be opened any more.
async fn first(shared: &Shared, inbound: &mut Streaming<DecodeMessage>, outbox: &Outbox) -> Option<Open> {
    let limit = shared.timers.get().rendezvous;
    let read = async {
        loop {
            match inbound.message().await {
                Ok(Some(DecodeMessage { message: None })) => {
                    shared.metrics.unknown_messages.inc();
                }
                Ok(Some(DecodeMessage { message: Some(m) })) => return Some(m),
                Ok(None) => return None,
                Err(status) => {
                    tracing::debug!("a control stream broke before its Open: {status}");
                    return None;
                }
            }
        }
    };
    let Ok(message) = tokio::time::timeout(limit, read).await else {
        let detail = format!("rendezvous timer: no Open came for {} ms", limit.as_millis());
        let failure = Failure::new(Reason::RendezvousTimeout, Source::Prefill, detail);
        shared.metrics.refused(failure.reason);
        send(outbox, prefill_message::Message::Failed(failure.to_wire()));
        return None;
    };
    match message? {
        decode_message::Message::Open(open) => Some(open),
        decode_message::Message::Abort(abort) => {
            let failure = aborted_by(&abort);
            if let Ok(key) = TransferKey::from_wire(abort.key.as_ref())
                && let Some(live) = shared.registry.forbid(key, failure.clone())
            {
                live.cell.abort(failure);
            }
            None
        }
        decode_message::Message::Commit(_) | decode_message::Message::Renew(_) => {
            let failure = Failure::new(
                Reason::Invalid,
                Source::Prefill,
                "the first message of a control stream must be Open",
            );
            send(outbox, prefill_message::Message::Failed(failure.to_wire()));
            None
        }
    }
}

fn aborted_by(abort: &proto::Abort) -> Failure {
    let why = tandem_wire::reason::meaning(reason_from_wire(abort.reason)).code;
    Failure::new(
        Reason::AbortedByPeer,
        Source::Decode,
        format!("decode aborted: {why}: {}", abort.detail),
    )
}

fn send(outbox: &Outbox, message: prefill_message::Message) {
    // full: only words that are not needed were left out before that; closed: the task hears of it by itself
    let _ = outbox.try_send(Ok(PrefillMessage { message: Some(message) }));
}

impl Control {
    async fn open(
        shared: &Arc<Shared>,
        inbound: Streaming<DecodeMessage>,
        outbox: Outbox,
        open: Open,
    ) -> Result<Self, Failure> {
        let (key, mut sampling, hand_off) = shared.check(&open)?;
        let stops = Stops {
            stop_token_ids: open.stop_token_ids,
            ignore_eos: open.ignore_eos,
            max_new_tokens: open.max_new_tokens,
        };
        sampling.grammar = compile_grammar(&shared.spec, open.sampling.as_ref(), &stops)
            .await
            .map_err(|(reason, why)| Failure::new(reason, Source::Prefill, why))?;
        let Some(hand_off) = shared.registry.insert(key, hand_off) else {
            return Err(Failure::new(
                Reason::StaleAttempt,
                Source::Prefill,
                format!("transfer {key} was seen before; a retry is a new attempt"),
            ));
        };
        let begun = Instant::now();
        let remaining = (open.remaining_ms > 0).then(|| Duration::from_millis(open.remaining_ms));
        let mut control = Self {
            shared: Arc::clone(shared),
            key,
            hand_off,
            inbound,
            outbox,
            events: None,
            prompt_hash: prompt_hash(&open.prompt_tokens),
            begun,
            remaining,
            accepted: false,
            cached_tokens: 0,
            outcome: None,
            leased: begun,
            overtime: Overtime::default(),
            span: Span::default(),
        };
        let events = shared.scheduler.prefill(PrefillParams {
            prompt: open.prompt_tokens.into(),
            sampling,
            stop_token_ids: stops.stop_token_ids,
            ignore_eos: stops.ignore_eos,
            max_new_tokens: stops.max_new_tokens,
            deadline: remaining.and_then(|r| begun.checked_add(r)),
            stay: control.hand_off.cell.stay(),
        });
        match events {
            Ok(events) => {
                // an abort that came meanwhile finds the computation here, or it is dropped here
                control.hand_off.cell.hold(Held::Computing(Arc::new(events.aborter())));
                control.events = Some(events);
                Ok(control)
            }
            Err(failure) => {
                control.hand_off.cell.fail(failure);
                Ok(control)
            }
        }
    }

    /// Runs until a terminal state.
    async fn serve(&mut self) {
        let mut changed = self.hand_off.cell.subscribe();
        let mut timers_changed = self.shared.timers.subscribe();
        let mut sent = self.hand_off.sent.subscribe();
        loop {
            let state = self.hand_off.cell.state();
            if state.is_terminal() {
                if let Some(failure) = self.hand_off.cell.failure() {
                    failed(&mut self.span, &failure);
                    tracing::info!(key = %self.key, trace_id = self.span.parent().trace_id(), "hand-off ended: {failure}");
                    send(&self.outbox, prefill_message::Message::Failed(failure.to_wire()));
                }
                return;
            }
            let timers = self.shared.timers.get();
            let own = self
                .wait(state, &timers)
                .and_then(|(since, limit)| Some(self.overtime.deadline((state, since), since.checked_add(limit)?)));
            // the request's own time is over everywhere
            let over = self.remaining.and_then(|r| self.begun.checked_add(r));
            let deadline = own.into_iter().chain(over).min();
            tokio::select! {
                biased;
                _ = changed.changed() => {}
                _ = timers_changed.changed() => {}
                message = self.inbound.message() => self.on_message(message),
                () = until(deadline) => self.on_timer(state, over, &timers),
                event = next(&mut self.events) => self.on_event(event),
                _ = sent.changed(), if state == PrefillState::Streaming => self.on_sent(),
            }
        }
    }

    /// What is waited for in `state`: since when, and how long. A state without a timer here is the watchdog's.
    fn wait(&self, state: PrefillState, timers: &TimerValues) -> Option<(Instant, Duration)> {
        match state {
            PrefillState::Queued => Some((self.begun, timers.queue)),
            PrefillState::Streaming => Some((self.hand_off.cell.moved(), timers.stall)),
            PrefillState::AwaitCommit => Some((self.leased, timers.lease)),
            _ => None,
        }
    }

    fn fail(&self, reason: Reason, detail: String) {
        self.hand_off.cell.fail(Failure::new(reason, Source::Prefill, detail));
    }

    fn on_timer(&mut self, state: PrefillState, over: Option<Instant>, timers: &TimerValues) {
        let now = Instant::now();
        if over.is_some_and(|t| t <= now) {
            self.fail(
                Reason::Deadline,
                format!("the request's time is over in state {state:?}"),
            );
            return;
        }
        let Some((since, limit)) = self.wait(state, timers) else {
            return;
        };
        // frames go out in another task, which moves the beginning of the wait meanwhile
        if now.saturating_duration_since(since) < limit || !self.overtime.is_over((state, since)) {
            return;
        }
        let limit = limit.as_millis();
        match state {
            PrefillState::Queued => self.fail(
                Reason::NoCapacity,
                format!("queue timer: the run queue did not move on for {limit} ms"),
            ),
            PrefillState::Streaming => self.fail(
                Reason::Stalled,
                format!("stall timer: decode took no frame for {limit} ms; the pages are free"),
            ),
            _ => {
                let failure = Failure::new(
                    Reason::LeaseLost,
                    Source::Prefill,
                    format!(
                        "lease timer: neither Renew nor Commit came for {limit} ms after the manifest; the pages are free"
                    ),
                );
                self.hand_off.cell.end_by(Event::LeaseOver, failure);
            }
        }
    }

    fn on_message(&mut self, message: Result<Option<DecodeMessage>, Status>) {
        let cell = &self.hand_off.cell;
        let message = match message {
            Ok(Some(DecodeMessage { message: Some(m) })) => m,
            Ok(Some(DecodeMessage { message: None })) => {
                self.shared.metrics.unknown_messages.inc();
                return;
            }
            Ok(None) => {
                cell.abort(Failure::new(
                    Reason::AbortedByPeer,
                    Source::Prefill,
                    "decode closed the control stream without a commit",
                ));
                return;
            }
            Err(status) => {
                cell.fail(lost(&status, Source::Prefill, "control stream from decode"));
                return;
            }
        };
        match message {
            // said twice: the first one counts
            decode_message::Message::Open(_) => {}
            decode_message::Message::Renew(_) => {
                if cell.state() == PrefillState::AwaitCommit && cell.progress() {
                    self.leased = Instant::now();
                }
                let lease_ms = self.shared.timers.get().renewed_within().as_millis() as u64;
                self.send_if_room(prefill_message::Message::Renewed(proto::Renewed { lease_ms }));
            }
            decode_message::Message::Commit(_) => match cell.on(Event::Commit) {
                Step::Moved(_) => {
                    tracing::debug!(key = %self.key, "released");
                    send(&self.outbox, prefill_message::Message::Released(proto::Released {}));
                }
                Step::Same(_) => {}
                Step::Illegal(state) => self.fail(
                    Reason::Internal,
                    format!("decode broke the protocol: Commit in state {state:?}"),
                ),
            },
            decode_message::Message::Abort(abort) => {
                cell.abort(aborted_by(&abort));
            }
        }
    }

    fn on_event(&mut self, event: Option<PrefillEvent>) {
        match event {
            Some(PrefillEvent::Queued { ahead }) => {
                self.send_if_room(prefill_message::Message::Queued(proto::Queued { ahead }));
            }
            Some(PrefillEvent::Started { cached_tokens }) => self.on_started(cached_tokens),
            Some(PrefillEvent::Progress {
                computed_tokens,
                layer,
                chunk,
            }) => {
                // whole prompt computed, but not yet handed over: said once, by the last word below
                if self.hand_off.cell.progress() && computed_tokens < self.hand_off.to {
                    let progress = proto::Progress {
                        computed_tokens,
                        layer,
                        chunk,
                    };
                    self.send_if_room(prefill_message::Message::Progress(progress));
                }
            }
            Some(PrefillEvent::Done {
                first_token,
                first_logprob,
                ends,
                pages,
                hand_off,
                queue,
                prefill,
                ..
            }) => {
                self.events = None;
                self.on_started(0);
                self.outcome = Some(Outcome {
                    first_token,
                    first_logprob,
                    ends,
                    queue,
                    prefill,
                });
                if ends.is_some() {
                    drop(pages);
                    if let Step::Moved(_) = self.hand_off.cell.on(Event::FirstTokenEnds) {
                        self.send_manifest(&tandem_wire::frame::Digest::default());
                    }
                    return;
                }
                let held = Held::Pages(pages, hand_off);
                if let Step::Moved(_) = self.hand_off.cell.on_with_pages(Event::DataReady, held) {
                    // frames are due from here on
                    let progress = proto::Progress {
                        computed_tokens: self.hand_off.to,
                        layer: self.shared.spec.layout.layers,
                        chunk: u32::MAX,
                    };
                    send(&self.outbox, prefill_message::Message::Progress(progress));
                    if self.hand_off.from == self.hand_off.to {
                        self.hand_off
                            .sent
                            .send_replace(Some(tandem_wire::frame::Digest::default()));
                    }
                }
            }
            Some(PrefillEvent::Failed(failure)) => {
                self.events = None;
                self.hand_off.cell.fail(failure);
            }
            None => {
                self.events = None;
                self.fail(
                    Reason::Internal,
                    "the scheduler dropped the prefill without a word".to_owned(),
                );
            }
        }
    }

    fn on_started(&mut self, cached_tokens: u32) {
        if std::mem::replace(&mut self.accepted, true) {
            return;
        }
        self.cached_tokens = cached_tokens;
        if let Step::Moved(_) = self.hand_off.cell.on(Event::Started) {
            let accepted = proto::Accepted {
                transport: "grpc".to_owned(),
                ranks: vec![proto::Rank {
                    endpoint: self.shared.advertise.clone(),
                    boot_id: self.shared.boot_id.to_wire(),
                }],
                cached_tokens,
            };
            send(&self.outbox, prefill_message::Message::Accepted(accepted));
        }
    }

    fn on_sent(&mut self) {
        let Some(digest) = *self.hand_off.sent.borrow() else {
            return;
        };
        self.leased = Instant::now();
        if let Step::Moved(_) = self.hand_off.cell.on(Event::ManifestSent) {
            self.send_manifest(&digest);
        }
    }

    fn send_manifest(&mut self, digest: &tandem_wire::frame::Digest) {
        let Some(outcome) = &self.outcome else { return };
        let manifest = proto::Manifest {
            prompt_hash: Bytes::copy_from_slice(&self.prompt_hash),
            from_token: self.hand_off.from,
            to_token: self.hand_off.to,
            frames: digest.frames(),
            payload_bytes: digest.bytes(),
            digest: digest.value(),
            first_tokens: vec![outcome.first_token],
            finished: outcome.ends.is_some(),
            finish_cause: outcome.ends.map_or(0, |cause| cause.to_wire().into()),
            cached_tokens: self.cached_tokens,
            queue_us: outcome.queue.as_micros() as u64,
            prefill_us: outcome.prefill.as_micros() as u64,
            lease_ms: self.shared.timers.get().renewed_within().as_millis() as u64,
            first_logprobs: outcome.first_logprob.iter().map(Logprob::to_wire).collect(),
        };
        self.span.describe(|| {
            [
                ("tandem.queue_us", (manifest.queue_us as i64).into()),
                ("tandem.prefill_us", (manifest.prefill_us as i64).into()),
                ("tandem.cached_tokens", i64::from(manifest.cached_tokens).into()),
                ("tandem.sent_bytes", (manifest.payload_bytes as i64).into()),
                ("rpc.response.status_code", "OK".into()),
            ]
        });
        send(&self.outbox, prefill_message::Message::Manifest(manifest));
    }

    fn send_if_room(&self, message: prefill_message::Message) {
        if self.outbox.capacity() > KEPT_FOR_THE_NEEDED {
            send(&self.outbox, message);
        }
    }

    /// Answers late words from the terminal until decode closes its half; nothing is held any more.
    async fn linger(&mut self) {
        self.events = None;
        self.shared.registry.bury(self.key);
        let failure = self.hand_off.cell.failure();
        if failure.is_some() {
            return;
        }
        let Self { inbound, outbox, .. } = self;
        let answer = async {
            while let Ok(Some(message)) = inbound.message().await {
                if let Some(decode_message::Message::Commit(_)) = message.message {
                    send(outbox, prefill_message::Message::Released(proto::Released {}));
                }
            }
        };
        tokio::select! {
            () = answer => {}
            () = outbox.closed() => {}
            () = tokio::time::sleep(LINGER) => {}
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // only a panic or a runtime that shuts down comes here live
        self.fail(Reason::Internal, "prefill's control task ended".to_owned());
        self.shared.registry.bury(self.key);
    }
}

async fn next(events: &mut Option<PrefillStream>) -> Option<PrefillEvent> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}
