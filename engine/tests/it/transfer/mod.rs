//! The hand-off over real sockets: two engines, each with its scheduler, pages and deterministic executor.

mod caller;
pub mod relay;
mod rig;

mod faults;
mod open;
mod pull;
mod reader;
mod script;
mod stand_still;
