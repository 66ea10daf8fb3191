//! A request's way to its tokens: a place in the queue, a pair of engines, one gRPC stream, another try.
//!
//! | room | purpose |
//! | --- | --- |
//! | [`queue`] | the one queue: first come, first served, bounded in length and time |
//! | [`traffic`] | whether requests may go to the engines at all |
//! | [`verdict`] | what a failure means: whose fault, whether to try again |
//! | [`together`] | several choices of one prompt |
//! | [`piece`] | text with the tokens that it was made of |
//! | [`progress`] | how far a request is, for whoever writes it down |
//! | [`spec`] | what is asked for |
//! | [`choice`] | one prompt from admission to its last token, as a stream of events |
//! | [`ending`] | the end of a call, after its last message |
//!
//! A request lives in the future or the body that its client waits for, and goes with it: nothing of it is spawned, only the end of
//! its call's stream is read when it is over.

pub mod choice;
pub mod ending;
pub mod piece;
pub mod progress;
pub mod queue;
pub mod spec;
pub mod together;
pub mod traffic;
pub mod verdict;

pub use choice::{Choice, Done, Event, Finish};
pub use piece::{Piece, Scored};
pub use progress::Progress;
pub use queue::Queue;
pub use spec::{Asker, Spec};
pub use together::Part;
pub use traffic::{Order, Traffic};

use std::sync::Arc;

use arc_swap::ArcSwap;

use crate::engines::Engines;
use crate::knobs::Knobs;
use crate::metrics::Metrics;
use crate::text::Text;

/// What every request shares.
#[derive(Debug)]
pub struct Flow {
    /// The engines.
    pub engines: Engines,
    /// The queue before them.
    pub queue: Queue,
    /// Whether requests go from there to them.
    pub traffic: Traffic,
    /// The model's text side.
    pub text: Arc<Text>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// What can be changed.
    pub knobs: ArcSwap<Knobs>,
}

impl Flow {
    /// The knobs in force.
    pub fn knobs(&self) -> Knobs {
        **self.knobs.load()
    }
}
