//! The engine's readers of bytes from outside over their kept fuzz corpora: the seeds, and what fuzzing once found.

#[macro_use]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

replay! {
    checkpoint: "../../../fuzz/src/readers/checkpoint.rs",
    dequantise: "../../../fuzz/src/readers/dequantise.rs",
    folder: "../../../fuzz/src/readers/folder.rs",
    frames: "../../../fuzz/src/readers/frames.rs",
    gguf: "../../../fuzz/src/readers/gguf.rs",
    safetensors: "../../../fuzz/src/readers/safetensors.rs",
    wire: "../../../fuzz/src/readers/wire.rs",
}
