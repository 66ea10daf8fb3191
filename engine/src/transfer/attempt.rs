//! Decode's side of one attempt, from dialling to commit.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use tandem_wire::proto::kv_transfer_client::KvTransferClient;
use tandem_wire::proto::{self, DecodeMessage, PrefillMessage, decode_message, prefill_message};
use tandem_wire::state::{DecodeEvent, DecodeState, Step};
use tandem_wire::{BootId, Failure, Reason, Source};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::data;
use super::inbox::Inbox;
use super::peers::{Lane, data_endpoint, lost};
use super::pull::{Phase, PullEntry, PullRequest, Pulled, Puller};
use super::wait::{Overtime, Wait};
use crate::exec::Logprob;
use crate::sched::Cause;

/// A goodbye (commit, abort) that the peer does not take within this long is left to the peer's lease.
const GOODBYE: Duration = Duration::from_secs(2);
/// Renews are never sent more often, whatever prefill grants.
const MIN_RENEW: Duration = Duration::from_millis(10);

type Inbound<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// One attempt under way. Whatever ends it, its drop tells prefill.
pub(super) struct Attempt<'a, F> {
    puller: &'a Puller,
    request: PullRequest,
    entry: Arc<PullEntry>,
    phase: F,
    to_prefill: mpsc::Sender<DecodeMessage>,
    /// Fused: `None` once it ended.
    control: Option<Inbound<PrefillMessage>>,
    /// Prefill answered, so it may hold pages for us.
    heard: bool,
    data: Option<data::FrameStream>,
    data_peer: Option<(String, BootId)>,
    inbox: Inbox,
    wait: Wait,
    overtime: Overtime<Wait>,
    /// Where prefill stood: (computed tokens, chunk, layer).
    progress: (u32, u32, u32),
    cached_tokens: u32,
    frames_due: Option<Instant>,
    manifest: Option<proto::Manifest>,
    renew: Option<tokio::time::Interval>,
}

impl<'a, F: Fn(Phase) + Send> Attempt<'a, F> {
    pub(super) fn new(puller: &'a Puller, request: PullRequest, entry: Arc<PullEntry>, phase: F) -> Self {
        let (to_prefill, outbox) = mpsc::channel(16);
        let inbox = Inbox::new(
            Arc::clone(&puller.layout),
            Arc::clone(&puller.store),
            Arc::clone(&puller.metrics.decode),
            request.have_tokens,
            request.prompt.len() as u32,
        );
        let mut attempt = Self {
            puller,
            request,
            entry,
            phase,
            to_prefill,
            control: None,
            heard: false,
            data: None,
            data_peer: None,
            inbox,
            wait: Wait::Rendezvous(Instant::now()),
            overtime: Overtime::default(),
            progress: (0, 0, 0),
            cached_tokens: 0,
            frames_due: None,
            manifest: None,
            renew: None,
        };
        attempt.open(outbox);
        attempt
    }

    /// Sends Open; a failure to dial is the control stream's first item.
    fn open(&mut self, outbox: mpsc::Receiver<DecodeMessage>) {
        let request = &self.request;
        let open = proto::Open {
            key: Some(request.key.to_wire()),
            prefill_boot_id: request.boot_id.to_wire(),
            decode_boot_id: self.puller.boot_id.to_wire(),
            model_hash: bytes::Bytes::copy_from_slice(&self.puller.spec.hash),
            layout: Some(self.puller.layout.to_wire()),
            prompt_tokens: request.prompt.to_vec(),
            have_tokens: request.have_tokens,
            sampling: Some(request.sampling.clone()),
            stop_token_ids: request.stops.stop_token_ids.clone(),
            ignore_eos: request.stops.ignore_eos,
            max_new_tokens: request.stops.max_new_tokens,
            remaining_ms: request.remaining.map_or(0, |d| (d.as_millis() as u64).max(1)),
            request_id: request.request_id.clone(),
            transports: vec!["grpc".to_owned()],
        };
        self.tell(decode_message::Message::Open(open));
        let channel = self
            .puller
            .peers
            .channel(Lane::Control, &request.endpoint, request.boot_id);
        let call = self.request.trace.carried_by(ReceiverStream::new(outbox));
        self.control = Some(Box::pin(async_stream::try_stream! {
            let channel = channel.map_err(|f| f.to_status())?;
            let mut client = KvTransferClient::new(channel);
            let mut inbound = client.prefill(call).await?.into_inner();
            while let Some(message) = inbound.message().await? {
                yield message;
            }
        }));
    }

    /// The channel has room for all that an attempt ever says; if the stream is gone its error is on its way to us.
    fn tell(&self, message: decode_message::Message) {
        let _ = self.to_prefill.try_send(DecodeMessage { message: Some(message) });
    }

    pub(super) async fn run(&mut self) -> Result<Pulled, Failure> {
        match self.receive().await {
            Ok(pulled) => Ok(pulled),
            Err(failure) => {
                // somebody else (the watchdog) may have ended it first: that failure counts
                self.entry.cell.fail(failure.clone());
                let failure = self.entry.cell.failure().unwrap_or(failure);
                self.forget_silent_peer(failure.reason);
                Err(failure)
            }
        }
    }

    async fn receive(&mut self) -> Result<Pulled, Failure> {
        let begun = Instant::now();
        let mut changed = self.entry.cell.subscribe();
        let mut timers_changed = self.puller.timers.subscribe();
        loop {
            if let Some(failure) = self.entry.cell.failure() {
                return Err(failure);
            }
            if let Some(pulled) = self.try_commit()? {
                return Ok(pulled);
            }
            let timers = self.puller.timers.get();
            let over = self.request.remaining.and_then(|r| begun.checked_add(r));
            let own = self.overtime.deadline(self.wait, self.wait.deadline(&timers));
            let deadline = over.map_or(own, |over| own.min(over));
            tokio::select! {
                biased;
                _ = changed.changed() => {}
                _ = timers_changed.changed() => {}
                message = next(&mut self.control) => self.on_message(message)?,
                () = tokio::time::sleep_until(deadline.into()) => {
                    if over.is_some_and(|t| t <= Instant::now()) {
                        return Err(Failure::new(
                            Reason::Deadline,
                            Source::Decode,
                            format!("the request's time is over in the {} wait; {}", self.wait.name(), self.inbox.missing()),
                        ));
                    }
                    if self.overtime.is_over(self.wait) {
                        return Err(self.wait.expired(&timers, &self.inbox.missing()));
                    }
                }
                () = tick(&mut self.renew) => self.tell(decode_message::Message::Renew(proto::Renew {})),
                frame = next_frame(&mut self.data) => self.on_frame(frame)?,
            }
        }
    }

    fn on_message(&mut self, message: Option<Result<PrefillMessage, Status>>) -> Result<(), Failure> {
        let message = match message {
            Some(Ok(message)) => message,
            Some(Err(status)) => {
                self.control = None;
                return Err(lost(&status, Source::Decode, "control stream to prefill"));
            }
            None => {
                self.control = None;
                return Err(Failure::new(
                    Reason::Incomplete,
                    Source::Decode,
                    format!(
                        "prefill ended the control stream without a word; {}",
                        self.inbox.missing()
                    ),
                ));
            }
        };
        self.heard = true;
        let Some(message) = message.message else {
            self.puller.metrics.decode.unknown_messages.inc();
            return Ok(());
        };
        let now = Instant::now();
        match message {
            prefill_message::Message::Queued(_) => {
                if matches!(self.wait, Wait::Rendezvous(_)) {
                    self.wait = Wait::Queue(now);
                    self.entry.cell.queued();
                    (self.phase)(Phase::Queued);
                }
            }
            prefill_message::Message::Accepted(accepted) => self.on_accepted(&accepted, now)?,
            prefill_message::Message::Progress(p) => {
                let moved = (p.computed_tokens, p.chunk, p.layer);
                if moved > self.progress && self.entry.cell.state() != DecodeState::Reserved {
                    self.progress = moved;
                    self.entry.cell.progress();
                    if matches!(self.wait, Wait::Progress(_)) {
                        self.wait = Wait::Progress(now);
                    }
                    if p.computed_tokens as usize >= self.request.prompt.len() {
                        self.frames_are_due(now);
                    }
                }
            }
            prefill_message::Message::Manifest(manifest) => {
                if self.manifest.is_none() {
                    self.advance(DecodeEvent::Manifest)?;
                    self.renew_within(manifest.lease_ms);
                    self.manifest = Some(manifest);
                    self.frames_are_due(now);
                }
            }
            prefill_message::Message::Failed(failure) => return Err(Failure::from_wire(&failure)),
            prefill_message::Message::Renewed(renewed) => {
                if self.manifest.is_some() {
                    self.renew_within(renewed.lease_ms);
                }
            }
            prefill_message::Message::Released(_) => {}
        }
        Ok(())
    }

    /// Renews three times within what prefill grants, which may change.
    fn renew_within(&mut self, lease_ms: u64) {
        let period = (Duration::from_millis(lease_ms) / 3).max(MIN_RENEW);
        if self.renew.as_ref().is_none_or(|renew| renew.period() != period) {
            let mut renew = tokio::time::interval_at(tokio::time::Instant::now() + period, period);
            renew.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            self.renew = Some(renew);
        }
    }

    fn on_accepted(&mut self, accepted: &proto::Accepted, now: Instant) -> Result<(), Failure> {
        if self.entry.cell.state() != DecodeState::Reserved {
            // said twice
            return Ok(());
        }
        let refuse = |reason, detail: String| Err(Failure::new(reason, Source::Decode, detail));
        if accepted.transport != "grpc" {
            return refuse(
                Reason::LayoutMismatch,
                format!("prefill chose transport {:?}, offered was \"grpc\"", accepted.transport),
            );
        }
        let [rank] = &accepted.ranks[..] else {
            let n = accepted.ranks.len();
            return refuse(
                Reason::LayoutMismatch,
                format!("prefill has {n} ranks, decode reads from 1"),
            );
        };
        if BootId::from_wire(&rank.boot_id) != Ok(self.request.boot_id) {
            return refuse(
                Reason::StaleBoot,
                "prefill's rank is another boot than its control port".to_owned(),
            );
        }
        let endpoint = data_endpoint(&rank.endpoint, &self.request.endpoint)?;
        self.advance(DecodeEvent::Accepted)?;
        self.cached_tokens = accepted.cached_tokens;
        self.wait = Wait::Progress(now);
        (self.phase)(Phase::Prefill);
        if (self.request.have_tokens as usize) < self.request.prompt.len() {
            let channel = self.puller.peers.channel(Lane::Data, &endpoint, self.request.boot_id)?;
            let fetch = proto::FetchRequest {
                key: Some(self.request.key.to_wire()),
                boot_id: self.request.boot_id.to_wire(),
                decode_boot_id: self.puller.boot_id.to_wire(),
                rank: 0,
                lane: 0,
            };
            let span = self.request.trace.call("tandem.v1.KvTransfer/Fetch", &endpoint);
            self.data = Some(data::fetch(channel, fetch, span));
            self.data_peer = Some((endpoint, self.request.boot_id));
        }
        Ok(())
    }

    fn on_frame(&mut self, frame: Option<Result<proto::Frame, Status>>) -> Result<(), Failure> {
        match frame {
            Some(Ok(frame)) => {
                let now = Instant::now();
                if self.inbox.accept(&self.entry.cell, data::arrived(&frame))? {
                    self.frames_are_due(now);
                    self.wait = Wait::Stall(now);
                }
                Ok(())
            }
            Some(Err(status)) => {
                self.data = None;
                Err(lost(&status, Source::Decode, "data stream from prefill"))
            }
            None => {
                self.data = None;
                // none at all: the first token may have ended the request, which the manifest will say
                if self.inbox.is_complete() || self.inbox.bytes() == 0 {
                    self.frames_are_due(Instant::now());
                    return Ok(());
                }
                Err(Failure::new(
                    Reason::Incomplete,
                    Source::Transfer,
                    format!("the data stream ended early: {}", self.inbox.missing()),
                ))
            }
        }
    }

    /// From here on the stall timer owns the wait.
    fn frames_are_due(&mut self, now: Instant) {
        if self.frames_due.is_none() {
            self.frames_due = Some(now);
            self.wait = Wait::Stall(now);
            // before the manifest this is the move to Receiving, after it there is nothing to move
            self.entry.cell.on(DecodeEvent::DataOpen);
            (self.phase)(Phase::Transfer);
        }
    }

    fn advance(&self, event: DecodeEvent) -> Result<(), Failure> {
        match self.entry.cell.on(event) {
            Step::Moved(_) | Step::Same(_) => Ok(()),
            Step::Illegal(state) => Err(Failure::new(
                Reason::Internal,
                Source::Decode,
                format!("prefill broke the protocol: {event:?} in state {state:?}"),
            )),
        }
    }

    /// Commits once the manifest and all that it speaks of are here.
    fn try_commit(&mut self) -> Result<Option<Pulled>, Failure> {
        let Some(manifest) = &self.manifest else {
            return Ok(None);
        };
        if !manifest.finished && !self.inbox.is_complete() && self.data.is_some() {
            return Ok(None);
        }
        let first_token = self.inbox.verify(&self.request.prompt, manifest)?;
        let vocabulary = self.puller.spec.vocab_size;
        if first_token >= vocabulary {
            return Err(Failure::new(
                Reason::Internal,
                Source::Prefill,
                format!("prefill's first token is {first_token}, the vocabulary has {vocabulary}"),
            ));
        }
        let first_logprob = self.first_logprob(manifest)?;
        let finished = if manifest.finished {
            let cause = Cause::from_wire(manifest.finish_cause()).ok_or_else(|| {
                Failure::new(
                    Reason::Internal,
                    Source::Prefill,
                    format!(
                        "the first token ends the request by unknown cause {}",
                        manifest.finish_cause
                    ),
                )
            })?;
            Some(cause)
        } else {
            None
        };
        if !matches!(self.entry.cell.on(DecodeEvent::Verified), Step::Moved(_)) {
            // ended a moment ago; the loop finds the failure
            return Ok(None);
        }
        self.tell(decode_message::Message::Commit(proto::Commit {}));
        let moved_tokens = if manifest.finished {
            0
        } else {
            self.request.prompt.len() as u32 - self.request.have_tokens
        };
        let since = self.frames_due.unwrap_or_else(Instant::now);
        Ok(Some(Pulled {
            first_token,
            first_logprob,
            finished,
            moved_tokens,
            moved_bytes: if manifest.finished { 0 } else { self.inbox.bytes() },
            cached_tokens: manifest.cached_tokens,
            queue_us: manifest.queue_us,
            prefill_us: manifest.prefill_us,
            transfer_us: since.elapsed().as_micros() as u64,
        }))
    }

    /// The first token's log-probability, where the request asks for it.
    fn first_logprob(&self, manifest: &proto::Manifest) -> Result<Option<Logprob>, Failure> {
        let Some(top) = self.request.sampling.logprobs else {
            return Ok(None);
        };
        let broken = |why: String| Failure::new(Reason::Incomplete, Source::Prefill, format!("first_logprobs: {why}"));
        let [logprob] = &manifest.first_logprobs[..] else {
            let n = manifest.first_logprobs.len();
            return Err(broken(format!("the manifest holds {n}, expected 1")));
        };
        Logprob::from_wire(logprob, top, self.puller.spec.vocab_size)
            .map(Some)
            .map_err(broken)
    }

    /// After a loss or a silence the next attempt dials anew: a link that swallows everything would swallow it too, until
    /// its pings tell.
    fn forget_silent_peer(&self, reason: Reason) {
        match reason {
            Reason::PeerLost | Reason::Stalled | Reason::RendezvousTimeout => {}
            _ => return,
        }
        let (endpoint, boot_id) = (&self.request.endpoint, self.request.boot_id);
        self.puller.peers.forget(Lane::Control, endpoint, boot_id);
        if let Some((endpoint, boot_id)) = &self.data_peer {
            self.puller.peers.forget(Lane::Data, endpoint, *boot_id);
        }
    }
}

impl<F> Drop for Attempt<'_, F> {
    fn drop(&mut self) {
        let cell = &self.entry.cell;
        let gone = Failure::new(Reason::AbortedByClient, Source::Decode, "the request was dropped");
        cell.abort(gone);
        if let Some(failure) = cell.failure() {
            let abort = proto::Abort {
                reason: failure.reason.into(),
                detail: failure.detail,
                key: None,
            };
            let message = Some(decode_message::Message::Abort(abort));
            let _ = self.to_prefill.try_send(DecodeMessage { message });
        }
        self.puller.registry.bury(self.request.key);
        // Dropping the stream resets it, which ends all on the other side too; but a word that is already on its way would be
        // lost with it. So it is read to its end, for a while.
        if let Some(mut control) = self.control.take()
            && self.heard
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            // half-closes: this was the last word
            let (closed, _) = mpsc::channel(1);
            drop(std::mem::replace(&mut self.to_prefill, closed));
            let rest = async move { while let Some(Ok(_)) = control.next().await {} };
            // dropped after the word has come, or prefill would see a broken link instead of the reason
            let data = self.data.take();
            let goodbye = async move {
                let _ = tokio::time::timeout(GOODBYE, rest).await;
                drop(data);
            };
            self.puller.goodbyes.spawn_on(goodbye, &runtime);
        }
    }
}

async fn next<T>(stream: &mut Option<Inbound<T>>) -> Option<Result<T, Status>> {
    match stream {
        Some(stream) => stream.next().await,
        None => std::future::pending().await,
    }
}

async fn next_frame(stream: &mut Option<data::FrameStream>) -> Option<Result<proto::Frame, Status>> {
    match stream {
        Some(stream) => stream.next().await,
        None => std::future::pending().await,
    }
}

async fn tick(interval: &mut Option<tokio::time::Interval>) {
    match interval {
        Some(interval) => {
            interval.tick().await;
        }
        None => std::future::pending().await,
    }
}
