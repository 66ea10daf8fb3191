//! All hot knobs as one message: the scheduler's and the transfer timers.

use std::time::Duration;

use tandem_wire::proto;

use crate::exec::ModelSpec;
use crate::sched::knobs::MAX_TIMER_MS;
use crate::sched::{KnobRange, SchedKnobs};
use crate::transfer::{TimerOrder, TimerValues};

/// A change of knobs that is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KnobError {
    /// One is out of range.
    #[error(transparent)]
    Range(#[from] KnobRange),
    /// Two do not go together.
    #[error(transparent)]
    Order(#[from] TimerOrder),
}

/// Every hot knob of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllKnobs {
    /// The scheduler's.
    pub sched: SchedKnobs,
    /// The transfer's.
    pub timers: TimerValues,
}

impl AllKnobs {
    /// The message form, every field set.
    pub fn to_wire(&self) -> proto::Knobs {
        let millis = |d: Duration| Some(d.as_millis() as u64);
        proto::Knobs {
            chunked_prefill_tokens: Some(self.sched.chunked_prefill_tokens),
            max_running: Some(self.sched.max_running),
            step_tokens: Some(self.sched.step_tokens),
            prefix_cache: Some(self.sched.prefix_cache),
            rendezvous_ms: millis(self.timers.rendezvous),
            progress_ms: millis(self.timers.progress),
            stall_ms: millis(self.timers.stall),
            watchdog_ms: millis(self.timers.watchdog),
            lease_ms: millis(self.timers.lease),
            queue_ms: Some(self.sched.queue_ms),
            prefill_queue: Some(self.sched.prefill_queue),
        }
    }

    /// With the fields that `change` sets; the error names the first that is out of range, or two that do not go together.
    pub fn with(&self, change: &proto::Knobs, spec: &ModelSpec) -> Result<Self, KnobError> {
        let timer = |name, value: Option<u64>, old: Duration| match value {
            None => Ok(old),
            Some(ms) => KnobRange::check(name, ms, 1, MAX_TIMER_MS).map(|()| Duration::from_millis(ms)),
        };
        let old = self.sched;
        let sched = SchedKnobs {
            chunked_prefill_tokens: change.chunked_prefill_tokens.unwrap_or(old.chunked_prefill_tokens),
            max_running: change.max_running.unwrap_or(old.max_running),
            step_tokens: change.step_tokens.unwrap_or(old.step_tokens),
            prefix_cache: change.prefix_cache.unwrap_or(old.prefix_cache),
            prefill_queue: change.prefill_queue.unwrap_or(old.prefill_queue),
            queue_ms: change.queue_ms.unwrap_or(old.queue_ms),
        };
        sched.check(spec)?;
        let timers = TimerValues {
            // one timer to those who set it: decode waits no longer for a queued prefill than prefill queues it
            queue: Duration::from_millis(sched.queue_ms),
            rendezvous: timer("rendezvous_ms", change.rendezvous_ms, self.timers.rendezvous)?,
            progress: timer("progress_ms", change.progress_ms, self.timers.progress)?,
            stall: timer("stall_ms", change.stall_ms, self.timers.stall)?,
            watchdog: timer("watchdog_ms", change.watchdog_ms, self.timers.watchdog)?,
            lease: timer("lease_ms", change.lease_ms, self.timers.lease)?,
        };
        timers.check_order()?;
        Ok(Self { sched, timers })
    }
}
