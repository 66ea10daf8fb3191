//! A whole model from a GGUF file: metadata, parts, shapes, every row as f32.

use tandem_engine::model::checkpoint::{Checkpoint, Part};
use tandem_engine::model::dequantise_row;

/// As the container's, and one row as f32: eight times its bytes in the smallest type.
pub const FACTOR: usize = 32;

/// Opens the model, reads every tensor.
pub fn read(data: &[u8]) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, data).expect("a file");
    let Ok(checkpoint) = Checkpoint::open(&path) else {
        return;
    };
    for part in Part::all(checkpoint.config()) {
        let Some(tensor) = checkpoint.tensor(part) else {
            continue;
        };
        let dims = part.dims(checkpoint.config());
        let mut row = vec![0.0; dims[0]];
        let rows = dims.get(1).copied().unwrap_or(1);
        for bytes in tensor.bytes.chunks_exact(tensor.bytes.len() / rows) {
            dequantise_row(tensor.dtype, bytes, &mut row);
        }
        std::hint::black_box(&row);
    }
}
