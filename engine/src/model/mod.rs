//! Models: from a file to steps of an [`Executor`](crate::exec::Executor). Knows ops, not devices.
//!
//! | file | holds |
//! | --- | --- |
//! | [`gguf`] | GGUF files |
//! | [`safetensors`] | folders of safetensors files |
//! | `tensor.rs` | element types |
//! | [`config`] | a model's sizes and constants |
//! | [`checkpoint`] | sizes and tensors, whichever format they come in |
//! | `load.rs` | from options and a checkpoint to an executor |
//! | `revision.rs` | are these the bytes that were meant |
//! | `weights.rs` | packs tensors: reordered, or one rank's part |
//! | `budget.rs` | is there memory for it |
//! | `forward.rs` | the forward pass as a list of ops |
//! | `batch.rs` | a step's sequences as the batch buffers' content |
//! | `ranks.rs` | a model in several parts, a thread each |
//! | `runner.rs` | the executor |
//! | `vocabulary.rs` | where the tokens' bytes lie |
//! | `score.rs` | logits of every position, for judging numerics |

mod batch;
mod budget;
pub mod checkpoint;
pub mod config;
mod error;
mod forward;
pub mod gguf;
mod load;
mod ranks;
pub mod revision;
mod runner;
pub mod safetensors;
mod score;
mod tensor;
#[cfg(test)]
mod tests;
mod vocabulary;
mod weights;

#[cfg(test)]
#[path = "../../tests/it/real.rs"]
mod real;
#[cfg(test)]
#[path = "../../tests/it/tiny.rs"]
#[allow(dead_code, reason = "tests of the whole crate use more of it")]
mod tiny;

pub use error::LoadError;
pub use load::{KvBudget, LoadOptions, MAX_PAGE_TOKENS, MAX_RANKS, MAX_STEP_SEQS, MAX_STEP_TOKENS, load};
pub use score::Scorer;
pub(crate) use tensor::scale_and_min;
pub use tensor::{Dtype, dequantise_row};
