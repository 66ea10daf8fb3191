//! Serving: gRPC for the work, HTTP for its health, flags, start and end of the process.
//!
//! | module | holds |
//! | --- | --- |
//! | [`flags`] | the command line, with ranges |
//! | [`process`] | from the command line to the exit code: what is bound, loaded, served and drained, in which order |
//! | [`node`] | one engine: scheduler, both ends of transfer, watchdogs, identity |
//! | `engine` | the `Engine` service but for Generate |
//! | [`admin`] | the `Admin` service on its own port, behind a token |
//! | `generate` | one request, from admission to its last event |
//! | [`knobs`] | all hot knobs as one message |
//! | `loading` | what is answered while the model loads |
//! | [`listen`] | sockets: bound early, opened late; the data port's server |
//! | `monitor` | sees from outside of the scheduler's thread whether it lives |

pub mod admin;
mod engine;
pub mod flags;
mod generate;
pub mod knobs;
pub mod listen;
mod loading;
mod monitor;
pub mod node;
pub mod process;

pub use node::{Node, NodeConfig, NodeError, Ports};
