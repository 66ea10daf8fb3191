//! The engine's reader of GGUF containers.

use tandem_engine::model::gguf::container::Gguf;

/// A metadata entry of 13 bytes is held as a key, a value and their place in a tree.
pub const FACTOR: usize = 24;

/// The container, and a look at every tensor's bytes.
pub fn read(data: &[u8]) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, data).expect("a file");
    let Ok(gguf) = Gguf::open(&path) else { return };
    for name in gguf.tensors().keys() {
        let (_, bytes) = gguf.tensor(name).expect("a tensor of the list");
        std::hint::black_box(bytes.iter().fold(0u8, |a, b| a ^ b));
    }
}
