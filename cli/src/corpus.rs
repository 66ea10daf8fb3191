//! The command's readers of bytes from outside over their kept fuzz corpora: the seeds, and what fuzzing once found.

#[macro_use]
#[path = "../../fuzz/src/replay.rs"]
mod replay;

replay! {
    manifest: "../../fuzz/src/readers/manifest.rs",
    sse: "../../fuzz/src/readers/sse.rs",
}
