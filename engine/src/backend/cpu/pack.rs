//! Weights as panels of 8 outputs, packed once while loading.
//!
//! In a panel each vector lane is one output, so a matmul needs no horizontal sum and a row's result is one chain of f32 operations,
//! the same in every kernel. Bytes of one block of 32 inputs, 8 outputs:
//!
//! | kind | bytes | content |
//! | --- | --- | --- |
//! | Nibble | 160 | 4 lines of 32: lane r, byte i = q(8j+i) low, q(8j+4+i) high; 8 f16 scales; 8 f16 minimums |
//! | Byte | 272 | 16 lines of 16: lane r = q(2g), q(2g+1); 8 f16 scales |
//!
//! Float panels are `[k][8]` of the file's own element type. Outputs beyond the last are zeros.

use half::{bf16, f16};

use super::act::ActKind;
use super::memory::Memory;
use super::pool::{Pool, share};
use crate::backend::{BackendError, Row};
use crate::model::Dtype;

/// Outputs of a panel.
pub const LANES: usize = 8;
/// Inputs of a quantised block.
pub const BLOCK: usize = 32;
/// Bytes of a block of a nibble panel.
pub const NIBBLE_BLOCK: usize = 160;
/// Bytes of a block of a byte panel.
pub const BYTE_BLOCK: usize = 272;

/// How the weights of a panel are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PanelKind {
    /// Four bits, scale and minimum (Q4_1; Q4_0 with minimum -8 d).
    Nibble,
    /// Eight bits and scale (Q8_0).
    Byte,
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    Bf16,
}

/// A packed matrix of `n` outputs and `k` inputs.
pub struct Panels {
    kind: PanelKind,
    k: usize,
    n: usize,
    data: Memory,
}

impl PanelKind {
    /// The kind that holds rows of these types without loss.
    fn of(dtypes: &(impl Iterator<Item = Dtype> + Clone)) -> Self {
        let all = |accept: fn(Dtype) -> bool| dtypes.clone().all(accept);
        if all(|d| matches!(d, Dtype::Q4_0 | Dtype::Q4_1)) {
            Self::Nibble
        } else if all(|d| d == Dtype::Q8_0) {
            Self::Byte
        } else if all(|d| d == Dtype::F16) {
            Self::F16
        } else if all(|d| d == Dtype::Bf16) {
            Self::Bf16
        } else {
            Self::F32
        }
    }

    /// Bytes of a panel of `k` inputs.
    const fn panel_bytes(self, k: usize) -> usize {
        match self {
            Self::Nibble => k / BLOCK * NIBBLE_BLOCK,
            Self::Byte => k / BLOCK * BYTE_BLOCK,
            Self::F32 => k * LANES * 4,
            Self::F16 | Self::Bf16 => k * LANES * 2,
        }
    }

    /// The inputs that this kind is multiplied with.
    pub const fn act(self) -> ActKind {
        match self {
            Self::Nibble => ActKind::Int8,
            Self::Byte => ActKind::Int16,
            Self::F32 | Self::F16 | Self::Bf16 => ActKind::Float,
        }
    }
}

/// Lets workers write disjoint panels through a shared reference.
#[derive(Clone, Copy)]
struct Target(*mut u8);
// SAFETY: each worker writes its own panels only.
unsafe impl Sync for Target {}
impl Target {
    /// SAFETY: the range is inside the memory, and nobody else uses it meanwhile.
    unsafe fn slice<'a>(self, at: usize, len: usize) -> &'a mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), len) }
    }
}

impl Panels {
    /// Packs `rows` of `k` values each; every row has exactly `k` values' bytes, and quantised rows are whole blocks.
    pub fn pack(rows: &[Row<'_>], k: usize, pool: &mut Pool) -> Result<Self, BackendError> {
        for r in rows {
            if r.dtype.row_bytes(k) != Some(r.bytes.len()) || k == 0 {
                return Err(BackendError::Unsupported(format!(
                    "a row of {k} values in {} has {} bytes",
                    r.dtype.name(),
                    r.bytes.len()
                )));
            }
        }
        let (kind, n) = (PanelKind::of(&rows.iter().map(|r| r.dtype)), rows.len());
        let (panels, bytes) = (n.div_ceil(LANES), kind.panel_bytes(k));
        let data = Memory::zeroed("weights", panels * bytes, true)?;
        let target = Target(data.ptr());
        let threads = pool.threads();
        let pack = |t: usize| {
            for p in share(panels, 1, t, threads) {
                let own = &rows[p * LANES..n.min((p + 1) * LANES)];
                // SAFETY: panel p lies inside `data` and belongs to this worker alone.
                pack_panel(kind, own, unsafe { target.slice(p * bytes, bytes) });
            }
        };
        pool.run(|| pack(0), &pack);
        Ok(Self { kind, k, n, data })
    }

    /// Bytes that rows of these types, of `k` values each, are packed into.
    pub fn bytes(rows: &[(Dtype, usize)], k: usize) -> u64 {
        let n: usize = rows.iter().map(|(_, n)| n).sum();
        let kind = PanelKind::of(&rows.iter().map(|(dtype, _)| *dtype));
        n.div_ceil(LANES) as u64 * kind.panel_bytes(k) as u64
    }

    /// How the weights are stored.
    pub fn kind(&self) -> PanelKind {
        self.kind
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Outputs, without padding.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Panels, the last one padded with zeros.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(LANES)
    }

    /// Bytes of one panel.
    pub fn panel_bytes(&self) -> usize {
        self.kind.panel_bytes(self.k)
    }

    /// The first byte of panel `p`.
    pub fn panel(&self, p: usize) -> *const u8 {
        debug_assert!(p < self.panels(), "panel {p} of {}", self.panels());
        self.data.ptr::<u8>().wrapping_add(p * self.panel_bytes())
    }

    /// Row `r` as f32: an embedding, and the oracle of the tests.
    pub fn row(&self, r: usize, out: &mut [f32]) {
        assert!(r < self.n && out.len() == self.k, "row {r} of {} x {}", self.n, self.k);
        let lane = r % LANES;
        // SAFETY: the panel lies inside `data`, and weights are never written after packing.
        let panel = unsafe { std::slice::from_raw_parts(self.panel(r / LANES), self.panel_bytes()) };
        let half = |b: &[u8], at: usize| f16::from_le_bytes([b[at], b[at + 1]]).to_f32();
        match self.kind {
            PanelKind::Nibble => {
                for (o, b) in out.chunks_exact_mut(BLOCK).zip(panel.chunks_exact(NIBBLE_BLOCK)) {
                    let (d, m) = (half(b, 128 + 2 * lane), half(b, 144 + 2 * lane));
                    for (j, o) in o.chunks_exact_mut(8).enumerate() {
                        for i in 0..4 {
                            let q = b[j * 32 + lane * 4 + i];
                            o[i] = d * f32::from(q & 15) + m;
                            o[4 + i] = d * f32::from(q >> 4) + m;
                        }
                    }
                }
            }
            PanelKind::Byte => {
                for (o, b) in out.chunks_exact_mut(BLOCK).zip(panel.chunks_exact(BYTE_BLOCK)) {
                    let d = half(b, 256 + 2 * lane);
                    for (g, o) in o.chunks_exact_mut(2).enumerate() {
                        o[0] = d * f32::from(b[g * 16 + lane * 2] as i8);
                        o[1] = d * f32::from(b[g * 16 + lane * 2 + 1] as i8);
                    }
                }
            }
            PanelKind::F32 => {
                for (o, b) in out.iter_mut().zip(panel.chunks_exact(LANES * 4)) {
                    let b = &b[lane * 4..];
                    *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            PanelKind::F16 => {
                for (o, b) in out.iter_mut().zip(panel.chunks_exact(LANES * 2)) {
                    *o = half(b, lane * 2);
                }
            }
            PanelKind::Bf16 => {
                for (o, b) in out.iter_mut().zip(panel.chunks_exact(LANES * 2)) {
                    *o = bf16::from_le_bytes([b[lane * 2], b[lane * 2 + 1]]).to_f32();
                }
            }
        }
    }
}

fn pack_panel(kind: PanelKind, rows: &[Row<'_>], out: &mut [u8]) {
    match kind {
        PanelKind::Nibble => rows.iter().enumerate().for_each(|(lane, r)| pack_nibbles(r, lane, out)),
        PanelKind::Byte => {
            for (lane, r) in rows.iter().enumerate() {
                for (o, b) in out.chunks_exact_mut(BYTE_BLOCK).zip(r.bytes.chunks_exact(34)) {
                    for g in 0..16 {
                        o[g * 16 + lane * 2..][..2].copy_from_slice(&b[2 + 2 * g..][..2]);
                    }
                    o[256 + lane * 2..][..2].copy_from_slice(&b[..2]);
                }
            }
        }
        PanelKind::F16 | PanelKind::Bf16 => {
            for (lane, r) in rows.iter().enumerate() {
                for (o, b) in out.chunks_exact_mut(LANES * 2).zip(r.bytes.chunks_exact(2)) {
                    o[lane * 2..][..2].copy_from_slice(b);
                }
            }
        }
        PanelKind::F32 => {
            let mut values = vec![0.0; out.len() / (LANES * 4)];
            for (lane, r) in rows.iter().enumerate() {
                crate::model::dequantise_row(r.dtype, r.bytes, &mut values);
                for (o, v) in out.chunks_exact_mut(LANES * 4).zip(&values) {
                    o[lane * 4..][..4].copy_from_slice(&v.to_le_bytes());
                }
            }
        }
    }
}

fn pack_nibbles(row: &Row<'_>, lane: usize, out: &mut [u8]) {
    const LOW: u32 = 0x0f0f_0f0f;
    let (_, bytes) = row.dtype.block();
    for (o, b) in out.chunks_exact_mut(NIBBLE_BLOCK).zip(row.bytes.chunks_exact(bytes)) {
        let q = &b[bytes - 16..];
        let word = |i: usize| u32::from_le_bytes([q[i], q[i + 1], q[i + 2], q[i + 3]]);
        for j in 0..2 {
            let (a, b) = (word(8 * j), word(8 * j + 4));
            // inputs 0..16 are the file's low nibbles, 16..32 its high ones
            o[j * 32 + lane * 4..][..4].copy_from_slice(&((a & LOW) | (b & LOW) << 4).to_le_bytes());
            o[(j + 2) * 32 + lane * 4..][..4].copy_from_slice(&((a >> 4 & LOW) | (b & !LOW)).to_le_bytes());
        }
        o[128 + lane * 2..][..2].copy_from_slice(&b[..2]);
        let min = if row.dtype == Dtype::Q4_1 {
            [b[2], b[3]]
        } else {
            // exact: three steps of the exponent (a scale above 8188, which no weight has, becomes infinite and is seen at the logits)
            f16::from_f32(-8.0 * f16::from_le_bytes([b[0], b[1]]).to_f32()).to_le_bytes()
        };
        o[144 + lane * 2..][..2].copy_from_slice(&min);
    }
}
