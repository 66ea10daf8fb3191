//! Folders of safetensors files with a `config.json`, as published on model hubs.
//!
//! | file | holds |
//! | --- | --- |
//! | [`container`] | one file: the tensors' places, every byte of the header checked |
//! | [`folder`] | the files of a model, found and checked against each other |
//! | `config.rs` | `config.json` as a [`ModelConfig`](super::config::ModelConfig) |
//! | `names.rs` | what each part of a model is called |

mod config;
pub mod container;
pub mod folder;
mod names;
mod unique;

pub(super) use names::name;
