//! The kernels of one instruction set as a table, chosen when the backend is made.
//!
//! The scalar kernels are the reference: plain loops over the same layouts, same argument order. Matmuls of all tables give the same
//! bits (integer sums are exact, the f32 chain per block is the same); the others agree within rounding, and each is the same
//! function of one row alone at any batch size.

use super::act::{Float, Int8};
use super::layout::LANES;
use super::pack::Part;
use super::{amx, avx2, avx512, scalar};
use crate::backend::BackendError;

/// A block or row whose largest magnitude is below this is quantised to zeros: 127 / denormal is infinite, and 0 x infinity NaN.
pub const TINY: f32 = 1e-30;
/// Rows that a matmul works on at a time, so that its partial sums stay in the second-level cache.
pub const ROW_BLOCK: usize = 512;
/// Bytes of a worker's matmul scratch.
pub const MATMUL_SCRATCH: usize = 32 * 1024 + ROW_BLOCK * 32 * 4;
/// Tokens that attention handles at a time; cut at absolute positions, so that every query sees the same order of operations.
pub const KEY_BLOCK: usize = 64;
/// Query vectors (tokens x heads of a group) of an attention tile.
pub const QUERY_ROWS: usize = 48;

/// The factor that norms a row of this mean of squares. NaN where the squares have no finite sum (values above 1.8e19): 1 / infinity
/// would turn the row into zeros, and nobody would see that its numbers broke.
pub fn inverse_rms(mean: f32, eps: f32) -> f32 {
    if mean.is_finite() {
        1.0 / (mean + eps).sqrt()
    } else {
        f32::NAN
    }
}

/// An instruction set that has its own kernels; a CPU that has one has those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Any CPU.
    Scalar,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 with VNNI for quantised matmuls.
    Avx512,
    /// AVX-512, and AMX's int8 tiles for quantised matmuls of many rows.
    Amx,
}

impl Isa {
    /// All of them, the plainest first.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Avx2, Self::Avx512, Self::Amx];

    /// The best one that this CPU has.
    pub fn detect() -> Self {
        if amx::available() {
            Self::Amx
        } else if avx512::available() {
            Self::Avx512
        } else if avx2::available() {
            Self::Avx2
        } else {
            Self::Scalar
        }
    }

    /// The name that the engine reports.
    pub const fn backend_name(self) -> &'static str {
        match self {
            Self::Scalar => "cpu-scalar",
            Self::Avx2 => "cpu-avx2",
            Self::Avx512 => "cpu-avx512",
            Self::Amx => "cpu-amx",
        }
    }

    /// The one that is reported as `name`.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|isa| isa.backend_name() == name)
    }

    /// The table, if this CPU has the instructions.
    pub(super) fn kernels(self) -> Result<Kernels, BackendError> {
        match self {
            Self::Scalar => Ok(scalar::KERNELS),
            Self::Avx2 if avx2::available() => Ok(avx2::KERNELS),
            Self::Avx512 if avx512::available() => Ok(avx512::KERNELS),
            Self::Amx if amx::available() => Ok(amx::KERNELS),
            Self::Avx2 | Self::Avx512 | Self::Amx => Err(BackendError::Unsupported(format!(
                "this CPU lacks instructions of {}; use other kernels",
                self.backend_name()
            ))),
        }
    }
}

impl Kernels {
    /// What the int8 inputs of a matmul of `rows` rows are xored with.
    pub fn flip(&self, rows: usize) -> u8 {
        if rows >= self.many_rows { 0x80 } else { 0 }
    }
}

/// Where a matmul writes: panel `p` of row `m` goes to `ptr + m * ld + (p - first_panel) * 8`.
#[derive(Debug, Clone, Copy)]
pub struct Out {
    /// Row 0 of `first_panel`.
    pub ptr: *mut f32,
    /// Floats from row to row.
    pub ld: usize,
    /// The panel at `ptr`.
    pub first_panel: usize,
    /// Add to what is there.
    pub add: bool,
}

impl Out {
    /// Where row 0 of panel `p` goes.
    ///
    /// # Safety
    /// The panel is one of those that were asked for.
    pub unsafe fn panel(&self, p: usize) -> *mut f32 {
        // SAFETY: the caller's.
        unsafe { self.ptr.add((p - self.first_panel) * LANES) }
    }
}

/// Consecutive tokens of one sequence against one KV head and the query heads that share it.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// `[tokens][..ldq]`: rotated and scaled queries, the group's heads side by side.
    pub q: *const f32,
    /// Floats from token to token.
    pub ldq: usize,
    /// Tokens; `tokens * group <= QUERY_ROWS` unless there is one token.
    pub tokens: usize,
    /// Query heads.
    pub group: usize,
    /// Elements of a head; a multiple of 8.
    pub dim: usize,
    /// Position of the first token.
    pub first_position: usize,
    /// This layer's and head's keys in page 0: panels of 8 tokens `[t/8][dim][8]`.
    pub keys: *const u16,
    /// Likewise values, `[t][dim]`.
    pub values: *const u16,
    /// Elements from page to page.
    pub page_stride: usize,
    /// Tokens a page; a multiple of 8.
    pub page_tokens: usize,
    /// The sequence's pages.
    pub pages: &'a [u32],
}

impl Attention<'_> {
    /// Keys of the 8 tokens from `t` (a multiple of 8) on.
    pub fn key_panel(&self, t: usize) -> *const u16 {
        self.keys.wrapping_add(self.place(t))
    }

    /// Values of the 8 tokens from `t` (a multiple of 8) on.
    pub fn value_rows(&self, t: usize) -> *const u16 {
        self.values.wrapping_add(self.place(t))
    }

    fn place(&self, t: usize) -> usize {
        self.pages[t / self.page_tokens] as usize * self.page_stride + t % self.page_tokens * self.dim
    }

    /// Floats of scratch for any call with this head width and group: scores, keys and values as f32, maximums, sums.
    pub const fn scratch_len(dim: usize, group: usize) -> usize {
        let rows = if group > QUERY_ROWS { group } else { QUERY_ROWS };
        rows * (KEY_BLOCK + 8 + 16) + dim * 32 + KEY_BLOCK * dim
    }

    /// Tokens that one tile takes.
    pub const fn tile_tokens(group: usize) -> usize {
        if group >= QUERY_ROWS { 1 } else { QUERY_ROWS / group }
    }
}

/// One instruction set's kernels.
///
/// All are unsafe: they follow raw pointers, whose extents are the callers' business, and the AVX2 ones need the CPU's support.
/// Rows of `k` or `n` floats are multiples of 32 unless it says otherwise.
#[derive(Clone, Copy)]
pub struct Kernels {
    /// From this many rows on int8 inputs are stored as q + 128.
    pub many_rows: usize,
    /// `out = x / rms(x) * w`, `n` values, a multiple of 8.
    pub rms_norm: unsafe fn(x: *const f32, w: *const f32, n: usize, eps: f32, out: *mut f32),
    /// Quantises `blocks` blocks of 32 into `a`, row `row`, from block `first` on; `flip` 0x80 stores q + 128, 0 q.
    /// A block with NaN or infinity gets that as its scale, so that it is seen in every result.
    pub quantise8: unsafe fn(x: *const f32, blocks: usize, a: &Int8, row: usize, first: usize, flip: u8),
    /// Quantised panels times int8 rows. `scratch`: [`MATMUL_SCRATCH`] bytes, aligned to 64.
    pub matmul_int8: unsafe fn(w: &Part, a: &Int8, rows: usize, out: Out, scratch: *mut u8),
    /// Float panels times f32 rows; any `k`.
    pub matmul_float: unsafe fn(w: &Part, a: &Float, rows: usize, out: Out),
    /// Rotates neighbouring pairs of `dim` values in place and scales them; `table`: cos and sin in turn.
    pub rope: unsafe fn(x: *mut f32, dim: usize, table: *const f32, scale: f32),
    /// Stores one token's key (lane `k` of a panel, elements 8 apart) and value (contiguous) as f16.
    pub write_kv: unsafe fn(key: *const f32, value: *const f32, dim: usize, k: *mut u16, v: *mut u16),
    /// Causal attention; writes `[tokens][group][dim]` to `out`. `scratch`: [`Attention::scratch_len`] floats.
    pub attend: unsafe fn(a: &Attention<'_>, scratch: *mut f32, out: *mut f32),
    /// `out = silu(gate) * up` for 32 values each: gate at `x`, up behind it.
    pub silu_mul: unsafe fn(x: *const f32, out: *mut f32),
}
