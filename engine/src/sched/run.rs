//! The loop: its own thread, owner of the executor. Takes in, throws out, plans, computes one step, hands out.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tandem_wire::{Failure, Reason};

use super::plan::{self, Limits, Part, Work};
use super::scheduler::Admission;
use super::seq::{Kind, Seq};
use super::shared::{Admitted, Shared, Waiting};
use super::stream::{Mailbox, PendingPrefill};
use crate::exec::{Executor, Sampled, StepError, StepSeq};

/// An idle loop looks around this often even if nobody wakes it, so that its age in the load stays small.
const IDLE: Duration = Duration::from_millis(500);

/// Runs until the last handle is gone or the executor panics; either way nobody is left waiting.
pub(super) fn run(shared: &Arc<Shared>, executor: Box<dyn Executor>) {
    let mut run = Run {
        shared: Arc::clone(shared),
        executor,
        running: Vec::new(),
        queue: VecDeque::new(),
        step: 0,
    };
    let (reason, why) = match catch_unwind(AssertUnwindSafe(|| run.run())) {
        Ok(()) => (Reason::Draining, "the engine is shutting down".to_owned()),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            tracing::error!(text, "a step panicked");
            (Reason::Internal, format!("a step panicked: {text}"))
        }
    };
    shared.idle();
    let (arrivals, prefills) = {
        let mut inbox = shared.inbox.lock();
        inbox.closed = true;
        (std::mem::take(&mut inbox.arrivals), std::mem::take(&mut inbox.prefills))
    };
    for seq in run.running.drain(..).chain(arrivals) {
        seq.fail(shared.failure(reason, why.clone()));
    }
    for waiting in run.queue.drain(..).chain(prefills) {
        shared.left_queue(&waiting);
        waiting.mailbox.fail(shared.failure(reason, why.clone()));
    }
    shared.running_prompt_tokens.store(0, Ordering::Release);
    // after all were told why: a reader that hears of the death first would make up a reason of its own
    shared.die(&why);
    shared.publish_load();
}

struct Run {
    shared: Arc<Shared>,
    executor: Box<dyn Executor>,
    /// In order of arrival.
    running: Vec<Seq>,
    /// In order of arrival.
    queue: VecDeque<Waiting>,
    step: u64,
}

/// How one sequence of a step ended, if it did.
enum Outcome {
    Runs,
    Ends(Option<super::seq::Cause>),
    Fails(Reason, String),
}

impl Run {
    fn run(&mut self) {
        while !self.shared.stop.load(Ordering::Acquire) {
            self.shared.metrics.passes.inc();
            let waiting_until = self.take_in();
            self.throw_out();
            let parts = self.plan();
            self.tell_load();
            if parts.is_empty() {
                self.shared.idle();
                let now = Instant::now();
                let until = waiting_until.map_or(IDLE, |t| t.saturating_duration_since(now).min(IDLE));
                std::thread::park_timeout(until);
                continue;
            }
            self.compute(&parts);
        }
    }

    /// Arrivals join the batch; queued prefills start in order while places and pages last. Returns when the first of those
    /// that still wait gives up.
    fn take_in(&mut self) -> Option<Instant> {
        let knobs = self.shared.knobs();
        let limit = Duration::from_millis(knobs.queue_ms);
        let now = Instant::now();
        {
            let mut inbox = self.shared.inbox.lock();
            self.running.append(&mut inbox.arrivals);
            self.queue.extend(inbox.prefills.drain(..));
        }
        let gives_up = |waiting: &Waiting| {
            let own = waiting.submitted + limit;
            waiting.deadline.map_or(own, |d| d.min(own))
        };
        for waiting in std::mem::take(&mut self.queue) {
            if waiting.mailbox.is_aborted() || gives_up(&waiting) <= now {
                self.leave_queue(&waiting, now);
                continue;
            }
            // first come, first served: nobody overtakes one that waits for pages
            let admitted = if self.queue.is_empty() {
                let admission = Admission {
                    prompt: Arc::clone(&waiting.prompt),
                    max_new_tokens: 1,
                    pulled: false,
                };
                self.shared.admit(&admission).ok()
            } else {
                None
            };
            if let Some(admitted) = admitted {
                self.start_prefill(waiting, admitted);
            } else {
                let ahead = self.queue.len() as u32;
                waiting.mailbox.update(|pending| pending.queued(ahead));
                self.queue.push_back(waiting);
            }
        }
        self.queue.iter().map(gives_up).min()
    }

    fn leave_queue(&self, waiting: &Waiting, now: Instant) {
        self.shared.left_queue(waiting);
        if waiting.mailbox.is_aborted() {
            self.shared.metrics.aborted.inc();
            return;
        }
        let waited = now.saturating_duration_since(waiting.submitted).as_millis();
        let failure = if waiting.deadline.is_some_and(|d| d <= now) {
            let detail = format!("the request's time is over after {waited} ms in the prefill queue");
            self.shared.failure(Reason::Deadline, detail)
        } else {
            let detail =
                format!("no place for this prefill within queue_ms ({waited} ms); try again later or elsewhere");
            self.shared.failure(Reason::NoCapacity, detail)
        };
        waiting.mailbox.fail(failure);
    }

    fn start_prefill(&mut self, waiting: Waiting, admitted: Admitted) {
        self.shared.left_queue(&waiting);
        let cached = admitted.pages.cached_tokens();
        self.shared.metrics.cached_tokens.inc_by(cached.into());
        self.running.push(Seq {
            kind: Kind::Prefill {
                mailbox: waiting.mailbox,
                chunks: 0,
            },
            tokens: waiting.prompt.to_vec(),
            prompt_len: waiting.prompt.len(),
            computed: cached as usize,
            emitted: 0,
            chooser: waiting.chooser,
            stops: waiting.stops,
            deadline: waiting.deadline,
            stay: waiting.stay,
            last_step: 0,
            prompt_computed: 0,
            submitted: waiting.submitted,
            started: None,
            first_token: None,
            logprob: None,
            admitted,
        });
    }

    /// Whoever left or is late goes, and with it all that it held.
    fn throw_out(&mut self) {
        let now = Instant::now();
        let source = self.shared.role.source();
        let limit = Duration::from_millis(self.shared.knobs().queue_ms);
        let over = |seq: &mut Seq| seq.is_aborted() || seq.is_late(now) || seq.gives_up(limit, now);
        for seq in self.running.extract_if(.., over) {
            if seq.is_aborted() {
                self.shared.metrics.aborted.inc();
                seq.fail(Failure::new(Reason::AbortedByPeer, source, "its owner left"));
            } else if !seq.is_late(now) {
                let detail = format!(
                    "no step had room for this prefill within queue_ms ({} ms); try again later or elsewhere",
                    limit.as_millis()
                );
                seq.fail(self.shared.failure(Reason::NoCapacity, detail));
            } else {
                let failure = seq.deadline_failure(source);
                self.shared.metrics.failure(failure.reason);
                seq.fail(failure);
            }
        }
    }

    fn plan(&self) -> Vec<Part> {
        let knobs = self.shared.knobs();
        let work: Vec<Work> = self
            .running
            .iter()
            .map(|seq| Work {
                prompt_left: seq.prompt_left(),
                last_step: seq.last_step,
            })
            .collect();
        plan::plan(
            &work,
            Limits {
                step_tokens: knobs.step_tokens,
                chunk_tokens: knobs.chunked_prefill_tokens,
                max_seqs: self.shared.spec.max_step_seqs,
            },
        )
    }

    fn tell_load(&self) {
        let tokens: u64 = self.running.iter().map(|s| u64::from(s.prompt_left())).sum();
        self.shared.running_prompt_tokens.store(tokens, Ordering::Release);
        self.shared.publish_load();
    }

    fn compute(&mut self, parts: &[Part]) {
        self.step += 1;
        let now = Instant::now();
        for part in parts {
            self.running[part.seq].start(now);
        }
        let result = self.execute(parts);
        self.shared.idle();
        let metrics = &self.shared.metrics;
        metrics.steps.inc();
        metrics.step_seconds.observe(now.elapsed().as_secs_f64());
        match result {
            Ok(sampled) if sampled.len() == parts.len() => self.hand_out(parts, sampled),
            Ok(sampled) => {
                let why = format!("step of {} sequences gave {} results", parts.len(), sampled.len());
                self.fail_step(parts, &why);
            }
            Err(error) => self.fail_step(parts, &error.to_string()),
        }
    }

    fn execute(&mut self, parts: &[Part]) -> Result<Vec<Sampled>, StepError> {
        let shared = Arc::clone(&self.shared);
        let running = &self.running;
        let batch: Vec<StepSeq<'_>> = parts
            .iter()
            .map(|part| {
                let seq = &running[part.seq];
                let end = seq.computed + part.tokens as usize;
                StepSeq {
                    tokens: &seq.tokens[seq.computed..end],
                    first_position: seq.computed as u32,
                    pages: seq.admitted.pages.pages(),
                    sample: (end == seq.tokens.len()).then(|| seq.chooser.sample()),
                }
            })
            .collect();
        let watched: Vec<(&Mailbox<PendingPrefill>, u32, u32)> = parts
            .iter()
            .filter_map(|part| {
                let seq = &running[part.seq];
                match &seq.kind {
                    Kind::Prefill { mailbox, chunks } => Some((&**mailbox, seq.computed as u32, *chunks)),
                    Kind::Generate { .. } => None,
                }
            })
            .collect();
        #[cfg(feature = "faults")]
        let fault = if parts.iter().any(|part| running[part.seq].prompt_left() > 0) {
            tandem_faults::Fault::SlowPrefill
        } else {
            tandem_faults::Fault::WedgeDecode
        };
        shared.beat();
        self.executor.step(&batch, &mut |layer| {
            #[cfg(feature = "faults")]
            tandem_faults::pass(fault);
            shared.beat();
            for &(mailbox, computed, chunk) in &watched {
                mailbox.update(|pending| pending.progress(computed, layer, chunk));
            }
        })
    }

    fn hand_out(&mut self, parts: &[Part], sampled: Vec<Sampled>) {
        let now = Instant::now();
        let (mut prompt, mut decode) = (0, 0);
        let mut over: Vec<(usize, Outcome)> = Vec::new();
        for (part, sampled) in parts.iter().zip(sampled) {
            let seq = &mut self.running[part.seq];
            let of_prompt = seq.prompt_left().min(part.tokens);
            prompt += u64::from(of_prompt);
            decode += u64::from(part.tokens - of_prompt);
            seq.advance(part.tokens, self.step);
            let asked = seq.computed == seq.tokens.len();
            let outcome = match (sampled, asked) {
                (Sampled::NotFinite, _) => Outcome::Fails(Reason::Internal, "hold NaN or infinity".to_owned()),
                (Sampled::NoneAllowed, _) => Outcome::Fails(
                    Reason::Invalid,
                    "allow no token: every one is forbidden by what the request asks for".to_owned(),
                ),
                (Sampled::None, true) => Outcome::Fails(Reason::Internal, "were not sampled".to_owned()),
                (Sampled::None | Sampled::Token(..), false) => Outcome::Runs,
                (Sampled::Token(token, logprob), true) => {
                    if of_prompt > 0 {
                        // only now is the prompt's KV known to be finite
                        self.shared
                            .cache
                            .publish(&seq.tokens[..seq.computed], &seq.admitted.pages);
                    }
                    let ends = seq.accept(token, logprob, &self.shared.spec.end_tokens, now);
                    match (&seq.kind, ends) {
                        (_, Err(why)) => Outcome::Fails(Reason::Invalid, format!("do not go on by the schema: {why}")),
                        (Kind::Generate { .. }, Ok(None)) => Outcome::Runs,
                        (Kind::Generate { .. } | Kind::Prefill { .. }, Ok(ends)) => Outcome::Ends(ends),
                    }
                }
            };
            if !matches!(outcome, Outcome::Runs) {
                over.push((part.seq, outcome));
            }
        }
        self.shared.metrics.tokens(prompt, decode);
        over.sort_unstable_by_key(|(seq, _)| *seq);
        for (index, outcome) in over.into_iter().rev() {
            let seq = self.running.remove(index);
            match outcome {
                Outcome::Runs => {}
                Outcome::Ends(cause) => {
                    self.shared
                        .cache
                        .publish(&seq.tokens[..seq.computed], &seq.admitted.pages);
                    self.shared.metrics.finished.inc();
                    seq.finish(cause, now);
                }
                Outcome::Fails(reason, why) => {
                    let detail = format!("the logits after token {} {why}", seq.computed);
                    seq.fail(self.shared.failure(reason, detail));
                }
            }
        }
    }

    /// The sequences of a failed step fail; all others go on.
    fn fail_step(&mut self, parts: &[Part], why: &str) {
        tracing::error!(why, sequences = parts.len(), "a step failed");
        self.shared.metrics.step_errors.inc();
        let mut of_step: Vec<usize> = parts.iter().map(|part| part.seq).collect();
        of_step.sort_unstable();
        for index in of_step.into_iter().rev() {
            let seq = self.running.remove(index);
            seq.fail(self.shared.failure(Reason::Internal, why));
        }
    }
}
