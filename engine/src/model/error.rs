//! Why a model could not be loaded. Each message names the file, what is wrong, the value found and the remedy.

use std::path::PathBuf;

/// Why a model could not be loaded; nothing serves then.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be opened or mapped.
    #[error("{}: cannot be read: {source}; check the path and its permissions", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// Other bytes than those that were meant.
    #[error("{}: not the model that is meant: it has SHA-256 {found}, --model-revision (spec.model.revision) is {expected}; put the right one there or change the revision", path.display())]
    Revision {
        /// The model.
        path: PathBuf,
        /// What it is.
        found: String,
        /// What was asked for.
        expected: String,
    },
    /// A model's folder is without a file that it needs.
    #[error("{}: the folder has no {file}: {remedy}", folder.display())]
    MissingFile {
        /// The folder.
        folder: PathBuf,
        /// The file.
        file: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// Not a GGUF file at all.
    #[error("{}: not a GGUF file: it starts with {found:?} where \"GGUF\" is expected; give the path of a .gguf model or of a folder with safetensors files", path.display())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// Its first bytes.
        found: String,
    },
    /// A version of the container that the engine cannot read.
    #[error("{}: GGUF version {version} ({why}); versions 2 and 3, little endian, are read: convert the model again", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The number found.
        version: u32,
        /// What that number means.
        why: &'static str,
    },
    /// The file ends before what it announces.
    #[error("{}: cut off: {what} needs {need} bytes at byte {offset}, the file has {len}; fetch the file again", path.display())]
    CutOff {
        /// The file.
        path: PathBuf,
        /// What was being read.
        what: String,
        /// Where.
        offset: u64,
        /// How many bytes it takes.
        need: u64,
        /// The file's length.
        len: u64,
    },
    /// Something in the file contradicts the format.
    #[error("{}: damaged: {what}; fetch or convert the file again", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What, with the value.
        what: String,
    },
    /// A tensor's element type is not one that the engine computes with.
    #[error("{}: tensor {tensor} has type {dtype}, which is not supported; use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K (safetensors: F32, F16 or BF16)", path.display())]
    UnsupportedType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type's name.
        dtype: String,
    },
    /// The model's architecture is not known.
    #[error("{}: architecture {found:?} is not supported; known: {known}", path.display())]
    Architecture {
        /// The file.
        path: PathBuf,
        /// As the file names it.
        found: String,
        /// Those that are, as such files name them.
        known: &'static str,
    },
    /// A metadata key is missing, has the wrong type or an unusable value, or is one whose meaning the engine does not implement.
    #[error("{}: metadata {key}: {why}", path.display())]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong, the value, the remedy.
        why: String,
    },
    /// A tensor that the architecture needs is not there.
    #[error("{}: tensor {tensor} is missing; the file is incomplete or of another architecture: fetch or convert it again", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor that the architecture does not use: computing without it would give wrong answers.
    #[error("{}: tensor {tensor} has no place in architecture {architecture}; this model needs a newer engine", path.display())]
    UnknownTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The model's architecture.
        architecture: &'static str,
    },
    /// A tensor's shape is not what the metadata says.
    #[error("{}: tensor {tensor} has shape {found:?}, expected {expected:?} from the metadata; convert the file again", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// As stored, inputs first.
        found: Vec<u64>,
        /// As the metadata demands.
        expected: Vec<u64>,
    },
    /// An option of the caller does not go with the model or the machine.
    #[error("{option} {value}: {why}")]
    Option {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// What is wrong and what would do.
        why: String,
    },
    /// The machine has not enough free memory.
    #[error(
        "{}: needs {need_mib} MiB (weights {weights_mib}, KV cache {kv_mib}, workspaces {work_mib}), but {available_mib} MiB are \
         available; free memory, or lower --kv-memory-mib or --kv-pages",
        path.display()
    )]
    Memory {
        /// The file.
        path: PathBuf,
        /// All together.
        need_mib: u64,
        /// Packed weights.
        weights_mib: u64,
        /// KV pages.
        kv_mib: u64,
        /// Activations and scratch.
        work_mib: u64,
        /// What the machine or the memory limit of this process's group leaves.
        available_mib: u64,
    },
    /// The backend refused.
    #[error("{}: {source}", path.display())]
    Backend {
        /// The file.
        path: PathBuf,
        /// Why.
        source: crate::backend::BackendError,
    },
}
