//! Manifests, as `tandem up -f` reads them.

use crate::manifest;

/// A YAML node of two bytes is an event with its place; snippets for errors copy lines.
pub const FACTOR: usize = 1024;

/// The manifest.
pub fn read(data: &[u8]) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.yaml");
    std::fs::write(&path, data).expect("a file");
    if let Err(error) = manifest::load(&path) {
        std::hint::black_box(error.to_string());
    }
}
