//! GGUF files.
//!
//! | file | holds |
//! | --- | --- |
//! | [`container`] | metadata scalars and the tensors' places, every byte of them checked |
//! | `config.rs` | the metadata as a [`ModelConfig`](super::config::ModelConfig) |
//! | `names.rs` | what each part of a model is called |

pub(super) mod config;
pub mod container;
mod names;

pub(super) use names::name;
