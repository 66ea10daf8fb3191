//! A request's way to its tokens: a place in the queue, a pair of engines, one gRPC stream, another try.
//!
//! | room | purpose |
//! | --- | --- |
//! | [`queue`] | the one queue: first come, first served, bounded in length and time |
//! | [`verdict`] | what a failure means: whose fault, whether to try again |
//! | [`together`] | several choices of one prompt |
//! | [`piece`] | text with the tokens that it was made of |
//! | [`progress`] | how far a request is, for whoever writes it down |
//! | [`spec`] | what is asked for |
//! | [`choice`] | one prompt from admission to its last token, as a stream of events |
//!
//! Nothing here is spawned: a request lives in the future or the body that its client waits for, and goes with it.

pub mod choice;
pub mod piece;
pub mod progress;
pub mod queue;
pub mod spec;
pub mod together;
pub mod verdict;

pub use choice::{Choice, Done, Event, Finish};
pub use piece::{Piece, Scored};
pub use progress::Progress;
pub use queue::Queue;
pub use spec::Spec;
pub use together::Part;

use std::sync::Arc;
use std::time::Duration;

use crate::config::OnPrefillFailure;
use crate::engines::Engines;
use crate::metrics::Metrics;
use crate::text::Text;

/// What every request shares.
#[derive(Debug)]
pub struct Flow {
    /// The engines.
    pub engines: Engines,
    /// The queue before them.
    pub queue: Queue,
    /// The model's text side.
    pub text: Arc<Text>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// `--on-prefill-failure`.
    pub on_prefill_failure: OnPrefillFailure,
    /// `--queue-ms`.
    pub queue_time: Duration,
}

impl Flow {
    /// May decode prefill by itself where prefill fails or is missing?
    pub fn recompute(&self) -> bool {
        self.on_prefill_failure == OnPrefillFailure::Recompute
    }
}
