//! What the operator renders and when it writes.

#![expect(clippy::expect_used, reason = "helpers of tests: a step that fails fails the test")]

mod apply;
mod render;
