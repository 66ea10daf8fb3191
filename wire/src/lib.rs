//! What router, decode and prefill say to each other, and the few types that both ends share.
//!
//! | module | holds |
//! | --- | --- |
//! | [`proto`] | the messages and services, from `proto/tandem.proto` |
//! | [`endpoint`] | where an engine's further ports are |
//! | [`id`] | incarnations and transfer keys |
//! | [`reason`] | the one table from a reason to gRPC status, HTTP status and retryable |
//! | [`state`] | the states of a transfer and their one transition function |
//! | [`layout`] | what a token's KV consists of, as a value |
//! | [`phase`] | what a request waits for, by name |
//! | [`frame`] | how KV is cut into frames, the checksum and the digest that proves completion |
//!
//! No policy lives here, and no I/O.

pub mod endpoint;
pub mod frame;
pub mod id;
pub mod layout;
pub mod phase;
pub mod reason;
pub mod state;

/// The messages and services of `proto/tandem.proto`.
#[expect(missing_docs, reason = "generated; the .proto file holds the docs")]
#[expect(clippy::pedantic, clippy::large_enum_variant, reason = "generated")]
#[expect(clippy::allow_attributes_without_reason, reason = "generated")]
pub mod proto {
    tonic::include_proto!("tandem.v1");
}

pub use id::{BootId, TransferId, TransferKey};
pub use layout::KvLayout;
pub use reason::{Failure, Reason, Source};
