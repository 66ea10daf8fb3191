//! The router's readers of bytes from outside over their kept fuzz corpora: the seeds, and what fuzzing once found.

#[macro_use]
#[path = "../../../fuzz/src/replay.rs"]
mod replay;

replay! {
    chat: "../../../fuzz/src/readers/chat.rs",
    completions: "../../../fuzz/src/readers/completions.rs",
    template: "../../../fuzz/src/readers/template.rs",
    tokenizer: "../../../fuzz/src/readers/tokenizer.rs",
}
