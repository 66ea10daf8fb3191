//! Evidence: where each request and each client connection stands now, and where their time went.
//!
//! | room | purpose |
//! | --- | --- |
//! | [`stage`] | what a request waits for, moved by guards, and the time spent in each |
//! | [`connection`] | a client connection: its requests, its bytes that the client does not take |
//! | [`badge`] | requests of those who look for a fault: marked, and told apart from those of users |
//! | [`registry`] | all open connections, and the requests that ended lately |
//!
//! Nothing here is sampled or guessed: a stage is entered and left by the guard that the waiting code holds, so whatever ends a
//! request (an answer, an error, a client that leaves) ends its stage too. What is shown is computed when somebody looks.

pub mod badge;
pub mod connection;
pub mod registry;
pub mod stage;

pub use badge::Badges;
pub use connection::{Connection, Open, Standing};
pub use registry::{ConnectionsByState, Ended, Registry};
pub use stage::{Ledger, Spent, Stage, Stay};

/// False only in a build that measures what the accounting costs (`bench/accounting.py`): it writes nothing down.
pub(crate) const KEPT: bool = !cfg!(feature = "unaccounted");
