//! The engine: model loading, CPU backend, KV cache, scheduling and KV transfer.
//!
//! | room | purpose |
//! | --- | --- |
//! | [`exec`] | where scheduling and models meet |
//! | [`kv`] | the paged pool and its prefix cache |
//! | [`sched`] | continuous batching under one token budget |
//! | [`transfer`] | the KV hand-off, both ends |

pub mod exec;
pub mod kv;
pub mod sched;
pub mod transfer;
