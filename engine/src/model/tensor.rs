//! The element types of tensors: their sizes, and one row of each as f32.

use half::{bf16, f16};

/// Values in a quantised block; rows of quantised tensors are whole blocks.
pub const BLOCK: usize = 32;

/// Values in a block of blocks of the K types, 8 of 32 or 16 of 16.
pub const SUPER_BLOCK: usize = 256;

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
    /// Blocks of 32: f16 scale d, 4 bytes with the fifth bits, nibbles as in Q4_0; value d (q - 16).
    Q5_0,
    /// Blocks of 32: f16 scale d and minimum m, 4 bytes with the fifth bits, nibbles as in Q4_0; value d q + m.
    Q5_1,
    /// Blocks of 256: f16 scales d and e, 12 bytes with 8 scales s and minimums m of 6 bits (see [`scale_and_min`]), 128 bytes of
    /// nibbles q, in each 32 bytes 32 values low and the next 32 high; value d s q - e m, with one s and m for 32 values.
    Q4K,
    /// As Q4_K with 32 bytes of fifth bits before the nibbles: bit b of byte i belongs to value 32 b + i.
    Q5K,
    /// Blocks of 256: 128 bytes of nibbles, 64 of upper pairs of bits, 16 signed scales s, f16 scale d; value d s (q - 32), with one
    /// s for 16 values.
    Q6K,
}

impl Dtype {
    /// The type with this number in a GGUF file, if the engine computes with it.
    pub const fn from_ggml(id: u32) -> Option<Self> {
        match id {
            0 => Some(Self::F32),
            1 => Some(Self::F16),
            2 => Some(Self::Q4_0),
            3 => Some(Self::Q4_1),
            6 => Some(Self::Q5_0),
            7 => Some(Self::Q5_1),
            8 => Some(Self::Q8_0),
            12 => Some(Self::Q4K),
            13 => Some(Self::Q5K),
            14 => Some(Self::Q6K),
            30 => Some(Self::Bf16),
            _ => None,
        }
    }

    /// The type of this name in a safetensors file, if the engine computes with it.
    pub fn from_safetensors(name: &str) -> Option<Self> {
        match name {
            "F32" => Some(Self::F32),
            "F16" => Some(Self::F16),
            "BF16" => Some(Self::Bf16),
            _ => None,
        }
    }

    /// As the formats call it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q8_0 => "Q8_0",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
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
            Self::Q5_0 => (BLOCK, 22),
            Self::Q5_1 => (BLOCK, 24),
            Self::Q4K => (SUPER_BLOCK, 144),
            Self::Q5K => (SUPER_BLOCK, 176),
            Self::Q6K => (SUPER_BLOCK, 210),
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
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
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
        Dtype::Q5_0 | Dtype::Q5_1 => {
            let (_, bytes) = dtype.block();
            for (o, b) in out.chunks_exact_mut(BLOCK).zip(row.chunks_exact(bytes)) {
                let d = half_at(b, 0);
                let (m, fifths) = if dtype == Dtype::Q5_1 {
                    (half_at(b, 2), &b[4..8])
                } else {
                    (-16.0 * d, &b[2..6])
                };
                let fifth = |i: usize| (fifths[i / 8] >> (i % 8) & 1) << 4;
                for (i, &q) in b[bytes - 16..].iter().enumerate() {
                    o[i] = d * f32::from(q & 15 | fifth(i)) + m;
                    o[i + 16] = d * f32::from(q >> 4 | fifth(i + 16)) + m;
                }
            }
        }
        Dtype::Q4K | Dtype::Q5K => {
            let (_, bytes) = dtype.block();
            for (o, b) in out.chunks_exact_mut(SUPER_BLOCK).zip(row.chunks_exact(bytes)) {
                let (d, e) = (half_at(b, 0), half_at(b, 2));
                let (scales, fifths, nibbles) = (&b[4..16], &b[16..bytes - 128], &b[bytes - 128..]);
                for (j, o) in o.chunks_exact_mut(BLOCK).enumerate() {
                    let (s, m) = scale_and_min(scales, j);
                    let (s, m) = (d * f32::from(s), e * f32::from(m));
                    for (i, o) in o.iter_mut().enumerate() {
                        let q = nibbles[j / 2 * 32 + i] >> (j % 2 * 4) & 15;
                        let fifth = fifths.get(i).map_or(0, |f| (f >> j & 1) << 4);
                        *o = s * f32::from(q | fifth) - m;
                    }
                }
            }
        }
        Dtype::Q6K => {
            for (o, b) in out.chunks_exact_mut(SUPER_BLOCK).zip(row.chunks_exact(210)) {
                let (nibbles, pairs, scales, d) = (&b[..128], &b[128..192], &b[192..208], half_at(b, 208));
                for (i, o) in o.iter_mut().enumerate() {
                    // halves of 128 values, each four times 32
                    let (half, quarter, l) = (i / 128, i / 32 % 4, i % 32);
                    let low = nibbles[half * 64 + quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 15;
                    let high = pairs[half * 32 + l] >> (quarter * 2) & 3;
                    let s = d * f32::from(scales[i / 16] as i8);
                    *o = s * f32::from((low | high << 4) as i8 - 32);
                }
            }
        }
    }
}

/// Scale and minimum `j` of 8, of 6 bits each, in the 12 bytes of a Q4_K or Q5_K block: the first four of each in the lower bits of
/// 8 bytes, the others with their lower nibbles in 4 more and the upper pairs of bits on top of the first 8.
pub const fn scale_and_min(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (
            packed[j + 4] & 15 | packed[j - 4] >> 6 << 4,
            packed[j + 4] >> 4 | packed[j] >> 6 << 4,
        )
    }
}
