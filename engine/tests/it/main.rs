//! Integration tests of the engine, one binary.
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests, outside of a #[test]"
)]

mod compute;
mod corpus;
mod dequantise;
mod gguf;
mod numerics;
mod real;
mod safetensors;
mod sched;
mod sched_places;
mod schema;
mod serve;
mod support;
mod tiny;
mod tiny_hf;
mod transfer;
mod types;
