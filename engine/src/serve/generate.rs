//! One request: admission at once, the prompt's KV pulled or computed, tokens, usage.
//!
//! The request runs in a task of its own, not in the response stream: a reader that stops reading stops neither timers nor
//! deadline. The task ends when the reader is gone or reads nothing for too long, and everything that the request holds goes
//! with it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tandem_telemetry::Span;
use tandem_wire::phase::Phase;
use tandem_wire::proto::generate_event::Event;
use tandem_wire::proto::{self, GenerateEvent, GenerateRequest, OnPrefillFailure};
use tandem_wire::{BootId, Failure, Reason, TransferKey};
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::node::{Shared, UnderWay};
use crate::exec::Logprob;
use crate::sched::{
    Admission, Admitted, Cause, First, GenParams, Sampling, SeqEvent, Stay, Stops, compile_grammar, read_sampling,
};
use crate::trace::failed;
use crate::transfer::{PullRequest, Pulled};

/// Events that wait for a slow reader; tokens beyond wait in the sequence's mailbox, bounded by the request.
const EVENTS: usize = 16;
/// No model has more.
const MAX_STOP_TOKENS: usize = 256;
/// The last event may be waited for so long after the request's own time is over.
const LAST_WORD: Duration = Duration::from_secs(2);
/// Longer request ids are cut.
const MAX_REQUEST_ID: usize = 128;

/// The reader of the events is gone.
struct Gone;

/// A request whose every field was read.
struct Asked {
    request_id: String,
    prompt: Arc<[u32]>,
    sampling: Sampling,
    /// The same as it came, for prefill.
    wire_sampling: proto::Sampling,
    stops: Stops,
    peer: Option<(TransferKey, String, BootId)>,
    recompute: bool,
    deadline: Option<Instant>,
    gather: bool,
}

/// Checks and admits a request and starts its task, which takes the span; the error refuses the call.
pub(super) async fn start(
    shared: &Arc<Shared>,
    request: GenerateRequest,
    span: &mut Span,
) -> Result<ReceiverStream<Result<GenerateEvent, Status>>, Failure> {
    shared.check_boot(&request.boot_id)?;
    let mut asked = read(shared, request)?;
    span.describe(|| {
        [
            ("tandem.request_id", asked.request_id.clone().into()),
            ("tandem.prompt_tokens", (asked.prompt.len() as i64).into()),
        ]
    });
    let compiled = compile_grammar(shared.scheduler.spec(), Some(&asked.wire_sampling), &asked.stops).await;
    asked.sampling.grammar = compiled.map_err(|(reason, why)| shared.failure(reason, why))?;
    let admitted = shared.scheduler.admit(&Admission {
        prompt: Arc::clone(&asked.prompt),
        max_new_tokens: asked.stops.max_new_tokens,
        pulled: asked.peer.is_some(),
    })?;
    let (sender, reader) = mpsc::channel(EVENTS);
    let gone = sender.clone();
    let waits_for = if asked.peer.is_some() {
        Phase::Accept
    } else {
        Phase::Prefill
    };
    let events = Events {
        sender,
        stall: shared.reader_stall,
        deadline: asked.deadline,
        stay: shared.scheduler.inflight().enter(waits_for),
        span: Mutex::new(std::mem::take(span)),
    };
    let shared = Arc::clone(shared);
    let (tracker, under_way) = (shared.requests.clone(), UnderWay::new(&shared));
    tracker.spawn(async move {
        let _under_way = under_way;
        tokio::select! {
            biased;
            () = gone.closed() => {
                tracing::debug!("the caller left");
                events.span.lock().describe(|| [("rpc.response.status_code", "CANCELLED".into())]);
            }
            () = shared.closing.cancelled() => {
                let failure = shared.last_word();
                let _ = fail(&events, &failure).await;
            }
            told = serve(&shared, asked, admitted, &events) => if told.is_ok() {
                events.taken().await;
            },
        }
    });
    Ok(ReceiverStream::new(reader))
}

fn read(shared: &Shared, request: GenerateRequest) -> Result<Asked, Failure> {
    let invalid = |detail: String| shared.failure(Reason::Invalid, detail);
    let role = shared.scheduler.role();
    if !role.generates() {
        return Err(invalid(format!(
            "a {} engine does not serve Generate; use a decode or unified engine",
            role.name()
        )));
    }
    let vocab_size = shared.scheduler.spec().vocab_size;
    let sampling = read_sampling(request.sampling.as_ref(), vocab_size, request.max_new_tokens).map_err(invalid)?;
    if request.stop_token_ids.len() > MAX_STOP_TOKENS {
        let found = request.stop_token_ids.len();
        return Err(invalid(format!(
            "stop_token_ids has {found} entries, allowed are {MAX_STOP_TOKENS}"
        )));
    }
    let peer = match &request.prefill {
        None => None,
        Some(peer) => {
            let key = TransferKey::from_wire(request.key.as_ref()).map_err(|e| invalid(format!("key: {e}")))?;
            let boot = BootId::from_wire(&peer.boot_id).map_err(|e| invalid(format!("prefill: {e}")))?;
            if peer.endpoint.is_empty() {
                return Err(invalid("prefill.endpoint is empty".to_owned()));
            }
            Some((key, peer.endpoint.clone(), boot))
        }
    };
    let recompute = request.on_prefill_failure() == OnPrefillFailure::Recompute;
    let mut request_id = request.request_id;
    if let Some((end, _)) = request_id.char_indices().nth(MAX_REQUEST_ID) {
        request_id.truncate(end);
    }
    let remaining = (request.remaining_ms > 0).then(|| Duration::from_millis(request.remaining_ms));
    Ok(Asked {
        request_id,
        prompt: request.prompt_tokens.into(),
        sampling,
        wire_sampling: request.sampling.unwrap_or_default(),
        stops: Stops {
            stop_token_ids: request.stop_token_ids,
            ignore_eos: request.ignore_eos,
            max_new_tokens: request.max_new_tokens,
        },
        peer,
        recompute,
        deadline: remaining.and_then(|r| Instant::now().checked_add(r)),
        gather: request.batch_tokens,
    })
}

/// Where the events of one request go.
struct Events {
    sender: mpsc::Sender<Result<GenerateEvent, Status>>,
    /// A reader that takes nothing for so long is gone, though it may answer pings.
    stall: Duration,
    deadline: Option<Instant>,
    stay: Arc<Stay>,
    /// Ends with the request's task.
    span: Mutex<Span>,
}

impl Events {
    fn trace_id(&self) -> Option<String> {
        self.span.lock().parent().trace_id()
    }

    /// How long the reader has from now on: not beyond the request's time, but time enough to take the word that it is over.
    fn patience(&self) -> Duration {
        let left = self.deadline.map(|d| d.saturating_duration_since(Instant::now()));
        left.map_or(self.stall, |left| left.max(LAST_WORD).min(self.stall))
    }

    /// Waits until the reader took every event: what it has not taken is lost when the process ends.
    async fn taken(&self) {
        let _held_up = self.stay.held_up();
        let _ = tokio::time::timeout(self.patience(), self.sender.reserve_many(EVENTS)).await;
    }
}

async fn send(events: &Events, event: Event) -> Result<(), Gone> {
    let event = match events.sender.try_send(Ok(GenerateEvent { event: Some(event) })) {
        Ok(()) => return Ok(()),
        Err(TrySendError::Closed(_)) => return Err(Gone),
        Err(TrySendError::Full(event)) => event,
    };
    let _held_up = events.stay.held_up();
    let limit = events.patience();
    let Ok(sent) = tokio::time::timeout(limit, events.sender.send(event)).await else {
        tracing::warn!(waited_ms = limit.as_millis(), "the caller reads nothing and is left");
        return Err(Gone);
    };
    sent.map_err(|_| Gone)
}

async fn phase(events: &Events, kind: Phase) -> Result<(), Gone> {
    events.stay.move_to(kind);
    send(events, Event::Phase(proto::Phase { kind: kind.into() })).await
}

async fn fail(events: &Events, failure: &Failure) -> Result<(), Gone> {
    failed(&mut events.span.lock(), failure);
    send(events, Event::Failure(failure.to_wire())).await
}

/// Everything after admission.
async fn serve(shared: &Shared, asked: Asked, admitted: Admitted, events: &Events) -> Result<(), Gone> {
    let boot_id = shared.boot_id.to_wire();
    send(events, Event::Started(proto::Started { boot_id })).await?;
    let mut usage = proto::Usage {
        prompt_tokens: asked.prompt.len() as u32,
        ..proto::Usage::default()
    };
    let Some((key, endpoint, boot)) = asked.peer.clone() else {
        phase(events, Phase::Prefill).await?;
        return generate(shared, asked, admitted, None, usage, events).await;
    };
    let pulled = pull(shared, &asked, &admitted, (key, endpoint, boot), events).await;
    match pulled {
        Ok(pulled) => {
            usage.cached_tokens = pulled.cached_tokens;
            usage.moved_tokens = pulled.moved_tokens;
            usage.moved_bytes = pulled.moved_bytes;
            usage.queue_us = pulled.queue_us;
            usage.prefill_us = pulled.prefill_us;
            usage.transfer_us = pulled.transfer_us;
            if let Some(cause) = pulled.finished {
                // no KV came and none is needed
                drop(admitted);
                shared.scheduler.metrics().finished();
                if cause == Cause::Length {
                    usage.completion_tokens = 1;
                    let logprobs = pulled.first_logprob.as_slice();
                    send(events, tokens(vec![pulled.first_token], logprobs)).await?;
                }
                return finish(events, cause, usage).await;
            }
            let first = First {
                token: pulled.first_token,
                logprob: pulled.first_logprob,
            };
            generate(shared, asked, admitted, Some(first), usage, events).await
        }
        Err(failure) if asked.recompute && recomputable(&failure, asked.deadline) => {
            tracing::info!(%key, request_id = asked.request_id, trace_id = events.trace_id(), "prefilling here: {failure}");
            let admitted = match computable(shared, &asked, admitted) {
                Ok(admitted) => admitted,
                Err(refused) => return fail(events, &refused).await,
            };
            usage.recomputed = true;
            shared.scheduler.metrics().recomputed();
            phase(events, Phase::Prefill).await?;
            generate(shared, asked, admitted, None, usage, events).await
        }
        Err(failure) => {
            // the caller may try again at once: what this attempt held is free before it knows
            drop(admitted);
            shared.scheduler.metrics().failure(failure.reason);
            fail(events, &failure).await
        }
    }
}

/// Pulls the prompt's KV, telling where it waits.
async fn pull(
    shared: &Shared,
    asked: &Asked,
    admitted: &Admitted,
    (key, endpoint, boot_id): (TransferKey, String, BootId),
    events: &Events,
) -> Result<Pulled, Failure> {
    let request = PullRequest {
        key,
        endpoint,
        boot_id,
        prompt: Arc::clone(&asked.prompt),
        pages: Arc::clone(&admitted.pages),
        have_tokens: admitted.pages.cached_tokens(),
        sampling: asked.wire_sampling.clone(),
        stops: asked.stops.clone(),
        remaining: asked.deadline.map(|d| d.saturating_duration_since(Instant::now())),
        request_id: asked.request_id.clone(),
        stay: Arc::clone(&events.stay),
        trace: events.span.lock().parent().clone(),
    };
    let told = |kind: Phase| {
        // a hint: where the channel is full its reader has other things to read first
        let event = Event::Phase(proto::Phase { kind: kind.into() });
        let _ = events.sender.try_send(Ok(GenerateEvent { event: Some(event) }));
    };
    shared.puller.pull(request, told).await
}

/// Is the prefill, or the way to it, at fault, and is there time left to do its work here?
fn recomputable(failure: &Failure, deadline: Option<Instant>) -> bool {
    failure.meaning().http >= 500 && deadline.is_none_or(|d| Instant::now() < d)
}

/// Pages into which this engine may compute. With the whole prompt cached there is no page left for its last token.
fn computable(shared: &Shared, asked: &Asked, admitted: Admitted) -> Result<Admitted, Failure> {
    if (admitted.pages.cached_tokens() as usize) < asked.prompt.len() {
        return Ok(admitted);
    }
    drop(admitted);
    shared.scheduler.admit(&Admission {
        prompt: Arc::clone(&asked.prompt),
        max_new_tokens: asked.stops.max_new_tokens,
        pulled: false,
    })
}

/// Runs the sequence to its end. `first`: the token that prefill sampled; without it the prompt is computed here.
async fn generate(
    shared: &Shared,
    asked: Asked,
    admitted: Admitted,
    first: Option<First>,
    mut usage: proto::Usage,
    events: &Events,
) -> Result<(), Gone> {
    let pulled = first.is_some();
    let computed = if pulled {
        usage.prompt_tokens
    } else {
        admitted.pages.cached_tokens()
    };
    let mut stream = shared.scheduler.generate(
        admitted,
        GenParams {
            sampling: asked.sampling,
            max_new_tokens: asked.stops.max_new_tokens,
            stop_token_ids: asked.stops.stop_token_ids,
            ignore_eos: asked.stops.ignore_eos,
            first,
            computed,
            deadline: asked.deadline,
            stay: Some(Arc::clone(&events.stay)),
            gather: asked.gather,
        },
    );
    // from here on a pulled prompt waits for nothing but this engine, whatever it does first
    let mut decoding = pulled;
    if pulled {
        phase(events, Phase::Decode).await?;
    }
    loop {
        match stream.recv().await {
            Some(SeqEvent::Tokens { ids, logprobs }) => {
                if !std::mem::replace(&mut decoding, true) {
                    phase(events, Phase::Decode).await?;
                }
                send(events, tokens(ids, &logprobs)).await?;
            }
            Some(SeqEvent::Finished(done)) => {
                usage.completion_tokens = done.completion_tokens;
                usage.computed_tokens = done.computed_tokens;
                usage.decode_us = done.decode.as_micros() as u64;
                if !pulled {
                    usage.cached_tokens = done.cached_tokens;
                    usage.queue_us = done.queue.as_micros() as u64;
                    usage.prefill_us = done.prefill.as_micros() as u64;
                }
                return finish(events, done.cause, usage).await;
            }
            Some(SeqEvent::Failed(failure)) => {
                tracing::warn!(
                    request_id = asked.request_id,
                    trace_id = events.trace_id(),
                    "request failed: {failure}"
                );
                return fail(events, &failure).await;
            }
            None => {
                let failure = shared.failure(Reason::Internal, "the sequence ended without a word");
                return fail(events, &failure).await;
            }
        }
    }
}

fn tokens(ids: Vec<u32>, logprobs: &[Logprob]) -> Event {
    Event::Tokens(proto::Tokens {
        ids,
        logprobs: logprobs.iter().map(Logprob::to_wire).collect(),
    })
}

async fn finish(events: &Events, cause: Cause, usage: proto::Usage) -> Result<(), Gone> {
    events.span.lock().describe(|| {
        let number = |value: u64| (value as i64).into();
        [
            ("tandem.queue_us", number(usage.queue_us)),
            ("tandem.prefill_us", number(usage.prefill_us)),
            ("tandem.transfer_us", number(usage.transfer_us)),
            ("tandem.decode_us", number(usage.decode_us)),
            ("tandem.cached_tokens", number(usage.cached_tokens.into())),
            ("tandem.moved_tokens", number(usage.moved_tokens.into())),
            ("tandem.completion_tokens", number(usage.completion_tokens.into())),
            ("tandem.recomputed", usage.recomputed.into()),
            ("rpc.response.status_code", "OK".into()),
        ]
    });
    let finished = proto::Finished {
        cause: cause.to_wire().into(),
        usage: Some(usage),
    };
    send(events, Event::Finished(finished)).await
}
