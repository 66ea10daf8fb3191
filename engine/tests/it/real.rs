//! A real model, and a question that it answers without doubt.

use std::path::PathBuf;

/// The real model, or `None` with a word of why; in CI it must be there.
pub fn real_model() -> Option<PathBuf> {
    let path = std::env::var_os("TANDEM_TEST_MODEL").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../.demo/models/smollm2/model.gguf"),
        PathBuf::from,
    );
    if path.is_file() {
        return Some(path);
    }
    assert!(
        std::env::var("CI").is_err(),
        "{} is missing: run `make model`",
        path.display()
    );
    eprintln!(
        "skipped: {} is missing; run `make model` or set TANDEM_TEST_MODEL",
        path.display()
    );
    None
}

/// system: You are a helpful assistant. user: Name the capital of France.
pub const CAPITAL: [u32; 26] = [
    1, 9690, 198, 2683, 359, 253, 5356, 11173, 30, 2, 198, 1, 4093, 198, 5820, 260, 3575, 282, 4649, 30, 2, 198, 1,
    520, 9531, 198,
];

/// The capital of France is Paris. <|im_end|>
///
/// Each token's logit is 1.5 above the next best one's, with int8 inputs as with f32 weights: no rounding makes another answer of it.
pub const PARIS: [u32; 8] = [504, 3575, 282, 4649, 314, 7042, 30, 2];
