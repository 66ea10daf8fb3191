//! What may be changed between two steps.

use crate::exec::ModelSpec;

/// The scheduler's knobs. A change takes effect at the next step; what already runs keeps running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedKnobs {
    /// The most prompt tokens that one sequence computes in one step.
    pub chunked_prefill_tokens: u32,
    /// The most sequences that hold a place (running, or waiting for their KV).
    pub max_running: u32,
    /// The token budget of one step, prompt chunks and decode tokens together.
    pub step_tokens: u32,
    /// Keep and match prefixes.
    pub prefix_cache: bool,
    /// The most prefills that wait for a place.
    pub prefill_queue: u32,
    /// The longest that a prefill waits for a place, in milliseconds.
    pub queue_ms: u64,
}

impl Default for SchedKnobs {
    fn default() -> Self {
        Self {
            chunked_prefill_tokens: 128,
            max_running: 32,
            step_tokens: 128 + 32,
            prefix_cache: true,
            prefill_queue: 16,
            queue_ms: 60_000,
        }
    }
}

/// A knob's value lies outside of its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} is {value}, allowed is {min} to {max}")]
pub struct KnobRange {
    /// The knob, as the field is called.
    pub name: &'static str,
    /// The value asked for.
    pub value: u64,
    /// The least allowed.
    pub min: u64,
    /// The most allowed.
    pub max: u64,
}

impl KnobRange {
    /// Checks `value` against `min..=max`.
    pub fn check(name: &'static str, value: u64, min: u64, max: u64) -> Result<(), Self> {
        if (min..=max).contains(&value) {
            Ok(())
        } else {
            Err(Self { name, value, min, max })
        }
    }
}

/// The longest timer that a knob may set: a day.
pub const MAX_TIMER_MS: u64 = 24 * 60 * 60 * 1_000;

impl SchedKnobs {
    /// Every knob within what this model was set up for.
    pub fn check(&self, spec: &ModelSpec) -> Result<(), KnobRange> {
        let (tokens, seqs) = (u64::from(spec.max_step_tokens), u64::from(spec.max_step_seqs));
        KnobRange::check("chunked_prefill_tokens", self.chunked_prefill_tokens.into(), 1, tokens)?;
        KnobRange::check("max_running", self.max_running.into(), 1, seqs)?;
        // with a budget of 1 a prompt would never get a token beside a decoding sequence
        KnobRange::check("step_tokens", self.step_tokens.into(), 2, tokens)?;
        KnobRange::check("prefill_queue", self.prefill_queue.into(), 1, 65_536)?;
        KnobRange::check("queue_ms", self.queue_ms, 1, MAX_TIMER_MS)
    }
}
