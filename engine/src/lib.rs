//! The engine: model loading, CPU backend, KV cache, scheduling and KV transfer.
//!
//! | room | purpose |
//! | --- | --- |
//! | [`exec`] | where scheduling and models meet |

pub mod exec;
