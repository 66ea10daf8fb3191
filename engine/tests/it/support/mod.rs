//! What several test modules use.

pub mod fake;
pub mod node;
pub mod sched;
