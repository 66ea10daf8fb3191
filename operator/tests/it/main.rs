//! What the operator renders, what it reads from the cluster and from processes, and when it writes.
#![expect(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "helpers of tests: a step that fails fails the test"
)]

mod apply;
mod cache;
mod events;
mod lease;
mod observe;
mod peers;
mod queue;
mod render;
mod revision;
mod routing;
