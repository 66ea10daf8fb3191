//! Integration tests of the engine, one binary.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests, outside of a #[test]"
)]

mod compute;
mod dequantise;
mod gguf;
mod numerics;
mod sched;
mod sched_places;
mod serve;
mod support;
mod tiny;
mod transfer;
mod types;
