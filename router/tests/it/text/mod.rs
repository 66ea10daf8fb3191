//! Text: templates and ids against references, streaming against the whole decode.

mod renderings;

use std::path::PathBuf;

/// A file of `tests/data`.
fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}
