//! The whole, as processes: what no part can show alone. One binary, so that the machine links once.

#![expect(clippy::expect_used, reason = "helpers of tests: a step that fails fails the test")]

mod bench;
mod capture;
mod connections;
mod differential;
mod docs;
mod edits;
mod fixtures;
mod forward;
mod freeze;
mod http;
mod kill;
mod kv_moves;
mod lifecycle;
mod pressure;
mod security;
mod traces;
mod up;
