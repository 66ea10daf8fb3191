//! Integration tests of the engine, one binary.

mod sched;
mod support;
mod transfer;
