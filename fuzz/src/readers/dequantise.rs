//! Rows of every element type as f32. The first byte chooses the type, the others are the row.

use tandem_engine::model::{Dtype, dequantise_row};

/// 18 bytes of Q4_0 are 32 values of 4 bytes.
pub const FACTOR: usize = 8;

/// As many whole blocks as there are.
pub fn read(data: &[u8]) {
    let Some((id, row)) = data.split_first() else { return };
    let Some(dtype) = Dtype::from_ggml(u32::from(id % 32)) else {
        return;
    };
    let (values, bytes) = dtype.block();
    let blocks = row.len() / bytes;
    let mut out = vec![0.0; blocks * values];
    dequantise_row(dtype, &row[..blocks * bytes], &mut out);
    std::hint::black_box(&out);
}
