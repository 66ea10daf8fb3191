//! A model's folder: `config.json`, `generation_config.json`, the index, each ended by a zero byte; the weights are two fixed files.

use tandem_engine::model::checkpoint::Checkpoint;

/// JSON values take 16 times their text (`0,` becomes 32 bytes), and growing vectors twice that.
pub const FACTOR: usize = 96;

/// A tensor of one f32 in each file.
fn shard(name: &str) -> Vec<u8> {
    let header = format!(r#"{{"{name}":{{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}}}"#);
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend([0; 4]);
    out
}

/// Opens the folder.
pub fn read(data: &[u8]) {
    let dir = tempfile::tempdir().expect("a folder");
    let names = ["config.json", "generation_config.json", "model.safetensors.index.json"];
    for (name, text) in names.iter().zip(data.split(|byte| *byte == 0)) {
        std::fs::write(dir.path().join(name), text).expect("a file");
    }
    std::fs::write(dir.path().join("a.safetensors"), shard("a")).expect("a file");
    std::fs::write(dir.path().join("b.safetensors"), shard("model.norm.weight")).expect("a file");
    std::hint::black_box(Checkpoint::open(dir.path()).is_ok());
}
