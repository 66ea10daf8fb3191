//! The HTTP side against scripted engines over real gRPC, used by a real HTTP client.

mod account;
mod admin;
mod apiserver;
mod calls;
mod cancel;
mod choosing;
mod client;
mod discovery;
mod drain;
mod engine;
mod evidence;
mod failures;
mod keys;
mod knobs;
mod logprobs;
mod parameters;
mod queueing;
mod several;
mod silence;
mod slow;
mod stack;
mod streams;
mod surface;
mod tls;
mod tokens;
mod traffic;

use std::time::Duration;

/// A wait that ends a test which would otherwise hang; never what a test measures.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the product promises: a client that left is noticed by the engine within this.
const CANCELLED_WITHIN: Duration = Duration::from_secs(1);
