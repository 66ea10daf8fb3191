//! One reader a file: `read` takes any bytes and must come back; `FACTOR` says how many times its input it may hold.

pub mod chat;
pub mod checkpoint;
pub mod completions;
pub mod dequantise;
pub mod folder;
pub mod frames;
pub mod gguf;
pub mod manifest;
pub mod safetensors;
pub mod sse;
pub mod template;
pub mod tokenizer;
pub mod wire;
