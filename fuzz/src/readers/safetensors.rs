//! The engine's reader of safetensors containers.

use tandem_engine::model::safetensors::container::Safetensors;

/// A tensor's entry is at least 50 bytes of header.
pub const FACTOR: usize = 24;

/// The container, and a look at every tensor's bytes.
pub fn read(data: &[u8]) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.safetensors");
    std::fs::write(&path, data).expect("a file");
    let Ok(file) = Safetensors::open(&path) else { return };
    for name in file.names() {
        let tensor = file.find(name).expect("a tensor of the list");
        std::hint::black_box(tensor.bytes.iter().fold(0u8, |a, b| a ^ b));
    }
}
