//! The element types of a GGUF file: their sizes, and one row of each as f32.

use half::{bf16, f16};

/// Values in a quantised block; rows of quantised tensors are whole blocks.
pub const BLOCK: usize = 32;

/// An element type that the engine computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Blocks of 32: f16 scale d, 16 bytes of nibbles q (low: 0..16, high: 16..32); value d (q - 8).
    Q4_0,
    /// Blocks of 32: f16 scale d and minimum m, nibbles as in Q4_0; value d q + m.
    Q4_1,
    /// Blocks of 32: f16 scale d, 32 signed bytes q; value d q.
    Q8_0,
}

impl Dtype {
    /// The type with this number in a GGUF file, if the engine computes with it.
    pub const fn from_ggml(id: u32) -> Option<Self> {
        match id {
            0 => Some(Self::F32),
            1 => Some(Self::F16),
            2 => Some(Self::Q4_0),
            3 => Some(Self::Q4_1),
            8 => Some(Self::Q8_0),
            30 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// As the format calls it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q8_0 => "Q8_0",
        }
    }

    /// (values, bytes) of the smallest unit.
    pub const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (BLOCK, 18),
            Self::Q4_1 => (BLOCK, 20),
            Self::Q8_0 => (BLOCK, 34),
        }
    }

    /// Bytes of a row of `k` values; `None` if `k` is not a whole number of blocks or the product overflows.
    pub const fn row_bytes(self, k: usize) -> Option<usize> {
        let (values, bytes) = self.block();
        if !k.is_multiple_of(values) {
            return None;
        }
        (k / values).checked_mul(bytes)
    }
}

/// The format's name for a type number, for errors about types that the engine does not compute with.
pub fn ggml_type_name(id: u32) -> String {
    let name = match id {
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return Dtype::from_ggml(id).map_or_else(|| format!("number {id}"), |d| d.name().to_owned()),
    };
    name.to_owned()
}

/// Two little-endian bytes at `i` as IEEE half.
fn half_at(bytes: &[u8], i: usize) -> f32 {
    f16::from_le_bytes([bytes[i], bytes[i + 1]]).to_f32()
}

/// One row as f32. `row` holds exactly the bytes of `out.len()` values.
pub fn dequantise_row(dtype: Dtype, row: &[u8], out: &mut [f32]) {
    assert_eq!(
        dtype.row_bytes(out.len()),
        Some(row.len()),
        "row of {} values",
        out.len()
    );
    match dtype {
        Dtype::F32 => {
            for (o, b) in out.iter_mut().zip(row.chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        Dtype::F16 => {
            for (o, b) in out.iter_mut().zip(row.chunks_exact(2)) {
                *o = half_at(b, 0);
            }
        }
        Dtype::Bf16 => {
            for (o, b) in out.iter_mut().zip(row.chunks_exact(2)) {
                *o = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        Dtype::Q4_0 | Dtype::Q4_1 => {
            let (_, bytes) = dtype.block();
            for (o, b) in out.chunks_exact_mut(BLOCK).zip(row.chunks_exact(bytes)) {
                let d = half_at(b, 0);
                let m = if dtype == Dtype::Q4_1 { half_at(b, 2) } else { -8.0 * d };
                for (i, &q) in b[bytes - 16..].iter().enumerate() {
                    o[i] = d * f32::from(q & 15) + m;
                    o[i + 16] = d * f32::from(q >> 4) + m;
                }
            }
        }
        Dtype::Q8_0 => {
            for (o, b) in out.chunks_exact_mut(BLOCK).zip(row.chunks_exact(34)) {
                let d = half_at(b, 0);
                for (o, &q) in o.iter_mut().zip(&b[2..]) {
                    *o = d * f32::from(q as i8);
                }
            }
        }
    }
}
