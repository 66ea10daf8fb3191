//! The router's tests that use it from outside, in one binary so that it links once.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "clippy.toml allows them in tests, which leaves out the helpers of integration tests"
)]

mod corpus;
mod serve;
mod text;
