//! The engine: model loading, CPU backend, KV cache, scheduling and KV transfer.
//!
//! | room | purpose |
//! | --- | --- |
//! | [`model`] | from files to steps |
//! | [`backend`] | ops over device buffers; the CPU's kernels |
//! | [`sample`] | how a token is chosen |
//! | [`exec`] | where scheduling and models meet |
//! | [`kv`] | the paged pool and its prefix cache |
//! | [`sched`] | continuous batching under one token budget |
//! | [`serve`] | gRPC, flags, start and end of the process |
//! | [`transfer`] | the KV hand-off, both ends |

pub mod backend;
pub mod exec;
pub mod kv;
pub mod model;
pub mod sample;
pub mod sched;
pub mod serve;
mod ticker;
mod trace;
pub mod transfer;
