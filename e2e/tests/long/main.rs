//! What does not fit into the everyday suite: `make test-long`.

#![expect(clippy::expect_used, reason = "helpers of tests: a step that fails fails the test")]

mod full_load;
mod soak;

/// The product's own keep-alive.
const DEFAULT_KEEPALIVE: &[&str] = &["--keepalive-interval-ms=5000", "--keepalive-timeout-ms=15000"];
