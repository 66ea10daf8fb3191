//! Scheduling: continuous batching of prefill chunks and decode tokens under one token budget.
//!
//! | module | holds |
//! | --- | --- |
//! | [`plan`] | who gets how many tokens in the next step; pure |
//! | [`knobs`] | what may be changed between two steps, with ranges |
//! | [`load`] | what an engine says about its load and its health |
//! | [`inflight`] | what each request waits for now |
//! | [`stream`] | what a request's owner sees: events, bounded, dropped to abort |
//! | [`scheduler`] | the handle: admission, generate, prefill, drain |
//! | [`metrics`] | counters and gauges of all of this |
//! | `sampling` | reads sampling off the wire, for both ends of a hand-off |
//! | `grammar` | compiles a request's grammar, off the loop's thread |
//! | `chooser` | what one sequence brings to each choice of a token |
//! | `shared` | what handle and loop share; places |
//! | `seq` | one sequence, `(computed, total)` tokens |
//! | `run` | the loop: its own thread, owner of the executor |
//!
//! Roles are budgets, not other code: a prefill engine runs sequences that end at their first token, a decode engine runs
//! sequences whose prompt is complete, a unified engine runs both.

mod chooser;
mod grammar;
pub mod inflight;
pub mod knobs;
pub mod load;
pub mod metrics;
pub mod plan;
mod run;
mod sampling;
pub mod scheduler;
mod seq;
mod shared;
pub mod stream;

pub use grammar::compile_grammar;
pub use inflight::{Inflight, Stay};
pub use knobs::{KnobRange, SchedKnobs};
pub use load::{Health, LoadSnapshot};
pub use sampling::{Sampling, read_sampling};
pub use scheduler::{Admission, First, GenParams, PrefillParams, Scheduler, StartError};
pub use seq::{Cause, Stops};
pub use shared::{Admitted, TransferGuard};
pub use stream::{Finish, PrefillAbort, PrefillEvent, PrefillStream, SeqEvent, SeqStream};

use tandem_wire::{Source, proto};

/// What an engine is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Computes prompts and hands their KV out.
    Prefill,
    /// Pulls prompts' KV and generates.
    Decode,
    /// Both in one process.
    Unified,
}

impl Role {
    /// Its name in flags and labels.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Unified => "unified",
        }
    }

    /// Serves `KvTransfer`.
    pub fn hands_out(self) -> bool {
        matches!(self, Self::Prefill | Self::Unified)
    }

    /// Serves `Generate`.
    pub fn generates(self) -> bool {
        matches!(self, Self::Decode | Self::Unified)
    }

    /// As the first witness of a failure.
    pub fn source(self) -> Source {
        match self {
            Self::Prefill => Source::Prefill,
            Self::Decode | Self::Unified => Source::Decode,
        }
    }

    /// The message form.
    pub fn to_wire(self) -> proto::Role {
        match self {
            Self::Prefill => proto::Role::Prefill,
            Self::Decode => proto::Role::Decode,
            Self::Unified => proto::Role::Unified,
        }
    }
}

impl std::str::FromStr for Role {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        [Self::Prefill, Self::Decode, Self::Unified]
            .into_iter()
            .find(|role| role.name() == name)
            .ok_or_else(|| format!("unknown role {name:?}: use prefill, decode or unified"))
    }
}
