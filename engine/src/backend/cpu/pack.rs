//! Weights as panels of 8 outputs, packed once while loading.
//!
//! In a panel each vector lane is one output, so a matmul needs no horizontal sum and a row's result is one chain of f32 operations,
//! the same in every kernel. What a quantised panel holds: `layout.rs`. Float panels are `[k][8]` of the file's own element type.
//! Outputs beyond the last are zeros. A matrix may be of several types (a `Q4_K_M` file has queries and keys in one, values in
//! another): its panels lie in parts of one type each.

use std::ops::Range;

use super::act::ActKind;
use super::layout::{BLOCK, LANES, LaneBlock, Layout, pack_row};
use super::memory::Memory;
use super::pool::{Pool, share};
use crate::backend::{BackendError, Row};
use crate::model::{Dtype, dequantise_row};

/// A packed matrix of `n` outputs and `k` inputs.
pub struct Panels {
    k: usize,
    n: usize,
    parts: Vec<Segment>,
    data: Memory,
}

/// Consecutive panels of one type.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Segment {
    dtype: Dtype,
    panels: Range<usize>,
    /// Of the first panel, in bytes.
    offset: usize,
}

/// Some consecutive panels of one type, as a kernel sees them.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// The type of their weights.
    pub dtype: Dtype,
    /// Where the first of them stands among the matrix's panels.
    pub first: usize,
    /// How many there are.
    pub panels: usize,
    /// Bytes from one to the next.
    pub stride: usize,
    data: *const u8,
}

impl Part {
    /// The first byte of panel `i` of these.
    pub fn panel(&self, i: usize) -> *const u8 {
        debug_assert!(i < self.panels, "panel {i} of {}", self.panels);
        self.data.wrapping_add(i * self.stride)
    }

    /// What follows the first `panels` panels.
    pub fn skip(&self, panels: usize) -> Self {
        Self {
            first: self.first + panels,
            panels: self.panels - panels,
            data: self.data.wrapping_add(panels * self.stride),
            ..*self
        }
    }
}

/// Bytes of a panel of `k` inputs.
const fn panel_bytes(dtype: Dtype, k: usize) -> usize {
    match Layout::of(dtype) {
        Some(l) => k / (l.blocks * BLOCK) * l.unit(),
        None => k * LANES * dtype.block().1,
    }
}

/// The inputs that weights of a type are multiplied with.
const fn act_of(dtype: Dtype) -> ActKind {
    match Layout::of(dtype) {
        Some(_) => ActKind::Int8,
        None => ActKind::Float,
    }
}

/// Cuts rows of these types, so many of each, into parts of one type. Where 8 outputs are of several types, or some are quantised
/// and some are not, everything becomes f32: a panel has one type, and a matmul one kind of inputs.
fn segments(rows: &[(Dtype, usize)], k: usize) -> Vec<Segment> {
    let mut parts: Vec<Segment> = Vec::new();
    let (mut n, mut offset) = (0, 0);
    let mut whole = true;
    for &(dtype, count) in rows.iter().filter(|(_, count)| *count > 0) {
        match parts.last_mut() {
            Some(last) if last.dtype == dtype => {}
            _ => {
                whole &= n % LANES == 0;
                parts.push(Segment {
                    dtype,
                    panels: n.div_ceil(LANES)..0,
                    offset: 0,
                });
            }
        }
        n += count;
        if let Some(last) = parts.last_mut() {
            last.panels.end = n.div_ceil(LANES);
        }
    }
    if !whole || parts.iter().any(|p| act_of(p.dtype) != act_of(parts[0].dtype)) {
        parts = vec![Segment {
            dtype: Dtype::F32,
            panels: 0..n.div_ceil(LANES),
            offset: 0,
        }];
    }
    for part in &mut parts {
        part.offset = offset;
        offset += part.panels.len() * panel_bytes(part.dtype, k);
    }
    parts
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
        let types: Vec<(Dtype, usize)> = rows.iter().map(|r| (r.dtype, 1)).collect();
        let (parts, n) = (segments(&types, k), rows.len());
        let data = Memory::zeroed("weights", bytes(&parts, k), true)?;
        let target = Target(data.ptr());
        let threads = pool.threads();
        let pack = |t: usize| {
            for part in &parts {
                let stride = panel_bytes(part.dtype, k);
                for i in share(part.panels.len(), 1, t, threads) {
                    let p = part.panels.start + i;
                    let own = &rows[p * LANES..n.min((p + 1) * LANES)];
                    // SAFETY: panel p lies inside `data` and belongs to this worker alone.
                    pack_panel(part.dtype, own, unsafe {
                        target.slice(part.offset + i * stride, stride)
                    });
                }
            }
        };
        pool.run(|| pack(0), &pack);
        Ok(Self { k, n, parts, data })
    }

    /// Bytes that rows of these types, so many of each, take with `k` values a row.
    pub fn bytes(rows: &[(Dtype, usize)], k: usize) -> u64 {
        bytes(&segments(rows, k), k) as u64
    }

    /// The inputs that this matrix is multiplied with.
    pub fn act(&self) -> ActKind {
        self.parts.first().map_or(ActKind::Float, |p| act_of(p.dtype))
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

    /// The parts that make up `panels`.
    pub fn parts(&self, panels: Range<usize>) -> impl Iterator<Item = Part> {
        // gate and up may differ in type, and lie in turn: there are as many parts as groups of them then
        let from = self.parts.partition_point(|p| p.panels.end <= panels.start);
        self.parts[from..]
            .iter()
            .take_while(move |p| p.panels.start < panels.end)
            .map(move |p| {
                let first = p.panels.start.max(panels.start);
                let stride = panel_bytes(p.dtype, self.k);
                Part {
                    dtype: p.dtype,
                    first,
                    panels: p.panels.end.min(panels.end) - first,
                    stride,
                    data: self
                        .data
                        .ptr::<u8>()
                        .wrapping_add(p.offset + (first - p.panels.start) * stride),
                }
            })
    }

    /// Row `r` as f32: an embedding, and the oracle of the tests.
    pub fn row(&self, r: usize, out: &mut [f32]) {
        assert!(r < self.n && out.len() == self.k, "row {r} of {} x {}", self.n, self.k);
        let (p, lane) = (r / LANES, r % LANES);
        for part in self.parts(p..p + 1) {
            // SAFETY: the panel lies inside `data`, and weights are never written after packing.
            let panel = unsafe { std::slice::from_raw_parts(part.panel(0), part.stride) };
            panel_row(part.dtype, panel, lane, out);
        }
    }
}

fn bytes(parts: &[Segment], k: usize) -> usize {
    parts.iter().map(|p| p.panels.len() * panel_bytes(p.dtype, k)).sum()
}

/// Output `lane` of a panel.
fn panel_row(dtype: Dtype, panel: &[u8], lane: usize, out: &mut [f32]) {
    if let Some(layout) = Layout::of(dtype) {
        for (b, o) in out.chunks_exact_mut(BLOCK).enumerate() {
            let block = LaneBlock::read(dtype, &layout, panel, b, lane);
            for (i, o) in o.iter_mut().enumerate() {
                let (d, q) = (block.d[i / 16], block.q[i]);
                *o = match block.min {
                    Some(m) => d * f32::from(q) + m,
                    None => d * f32::from(i16::from(q) - i16::from(layout.centre)),
                };
            }
        }
        return;
    }
    let size = dtype.block().1;
    for (o, b) in out.iter_mut().zip(panel.chunks_exact(LANES * size)) {
        dequantise_row(dtype, &b[lane * size..][..size], std::slice::from_mut(o));
    }
}

fn pack_panel(dtype: Dtype, rows: &[Row<'_>], out: &mut [u8]) {
    if let Some(layout) = Layout::of(dtype) {
        for (lane, r) in rows.iter().enumerate() {
            pack_row(dtype, &layout, r.bytes, lane, out);
        }
        return;
    }
    let size = dtype.block().1;
    let mut values = vec![0.0; out.len() / (LANES * size)];
    for (lane, r) in rows.iter().enumerate() {
        let mut put = |i: usize, b: &[u8]| out[(i * LANES + lane) * size..][..size].copy_from_slice(b);
        if r.dtype == dtype {
            r.bytes.chunks_exact(size).enumerate().for_each(|(i, b)| put(i, b));
        } else {
            // what else stands in an f32 panel
            dequantise_row(r.dtype, r.bytes, &mut values);
            values.iter().enumerate().for_each(|(i, v)| put(i, &v.to_le_bytes()));
        }
    }
}
