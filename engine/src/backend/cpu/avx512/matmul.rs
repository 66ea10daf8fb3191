//! Quantised panels x int8 rows, two panels a vector: 16 outputs, quants unpacked in registers and used for up to 8 rows.
//! For Q4_1 124 instructions per 4096 multiplications; AVX2's best is 103 per 1024.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::act::{BlockScale, Int8};
use super::super::avx2;
use super::super::kernels::Out;
use super::super::layout::{BLOCK, Eight, Five, Form, Four, One, Quants, Shared, SharedHalves, Six, Two};
use super::super::pack::Part;
use super::lanes::put;
use super::load::{Block, LoadQuants, LoadScales};
use crate::model::Dtype;

/// Bytes of inputs and their scales that are used for all panels before the next ones.
const L1_INPUTS: usize = 24 * 1024;

/// See `Kernels::matmul_int8`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
pub unsafe fn matmul(w: &Part, a: &Int8, rows: usize, out: Out, _scratch: *mut u8) {
    // SAFETY: the caller's: panels of that type, `rows` rows of `a` and of `out`.
    unsafe {
        match w.dtype {
            Dtype::Q4_0 => run::<Four, One>(w, a, rows, out),
            Dtype::Q4_1 => run::<Four, Two>(w, a, rows, out),
            Dtype::Q5_0 => run::<Five, One>(w, a, rows, out),
            Dtype::Q5_1 => run::<Five, Two>(w, a, rows, out),
            Dtype::Q8_0 => run::<Eight, One>(w, a, rows, out),
            Dtype::Q4K => run::<Four, Shared>(w, a, rows, out),
            Dtype::Q5K => run::<Five, Shared>(w, a, rows, out),
            Dtype::Q6K => run::<Six, SharedHalves>(w, a, rows, out),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {}
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn run<Q: LoadQuants, S: LoadScales>(w: &Part, a: &Int8, rows: usize, out: Out) {
    // SAFETY: as in `matmul`.
    unsafe {
        let pairs = w.panels / 2;
        // inputs that stay in the first-level cache while all panels pass by
        let most = (L1_INPUTS / (a.k + a.k / 2)).next_multiple_of(8).max(16);
        for r0 in (0..rows).step_by(most) {
            let r1 = rows.min(r0 + most);
            for p in 0..pairs {
                let (panel, o) = (w.panel(2 * p), out.panel(w.first + 2 * p));
                let mut m = r0;
                while m < r1 {
                    let o = o.add(m * out.ld);
                    m += match r1 - m {
                        1 => tile::<Q, S, 1, 0>(panel, w.stride, a, m, o, out),
                        2 => tile::<Q, S, 2, 0>(panel, w.stride, a, m, o, out),
                        3 => tile::<Q, S, 3, 0>(panel, w.stride, a, m, o, out),
                        4..8 => tile::<Q, S, 4, 0>(panel, w.stride, a, m, o, out),
                        _ => tile::<Q, S, 4, 4>(panel, w.stride, a, m, o, out),
                    };
                }
            }
        }
        if w.panels % 2 == 1 {
            avx2::matmul_few(&w.skip(2 * pairs), a, rows, out);
        }
    }
}

/// Two panels x (MR + MORE) rows. Returns their number. In two parts, since the compiler keeps an array of 8 sums in memory.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn tile<Q: LoadQuants, S: LoadScales, const MR: usize, const MORE: usize>(
    panel: *const u8,
    second: usize,
    a: &Int8,
    m0: usize,
    o: *mut f32,
    out: Out,
) -> usize {
    // SAFETY: two panels of k / 32 blocks, rows m0 .. m0 + MR + MORE of `a` and at `o`.
    unsafe {
        let (nb, bytes) = (a.k / BLOCK, Q::BYTES + S::BYTES);
        let (mut acc, mut more) = ([_mm512_setzero_ps(); MR], [_mm512_setzero_ps(); MORE]);
        let mut q = a.q.add(m0 * a.k).cast_const();
        let mut scales = a.scales.add(m0 * nb).cast_const();
        let mut p = panel;
        for _ in 0..nb / S::BLOCKS {
            let head = S::head(p, second);
            p = p.wrapping_add(S::HEAD);
            for _ in 0..S::BLOCKS {
                if m0 == 0 {
                    // the panels after these two, block by block
                    for n in 2..4 {
                        for line in 0..bytes.div_ceil(64) {
                            _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(n * second + line * 64).cast());
                        }
                    }
                }
                let w = Q::load(p, second);
                let (d, b) = S::load(p.add(Q::BYTES), second, head, f32::from(Q::CENTRE));
                let block = Block { w, a: d, b };
                let (q4, scales4) = (q.wrapping_add(MR * a.k), scales.wrapping_add(MR * nb));
                let rows = Rows { q, k: a.k, scales, nb };
                let more_rows = Rows {
                    q: q4,
                    k: a.k,
                    scales: scales4,
                    nb,
                };
                if S::FORM == Form::Halves {
                    let starts = |rows: &Rows, m| centred::<Q>((*rows.scales.add(m * nb)).first);
                    let (mut i, mut j) = (rows.each(starts), more_rows.each(starts));
                    dots(&block.w, 0..4, &rows, &mut i, &more_rows, &mut j);
                    rows.add(&i, block.a, &mut acc);
                    more_rows.add(&j, block.a, &mut more);
                    let starts = |rows: &Rows, m| {
                        let scale = rows.scales.add(m * nb);
                        _mm512_sub_epi32(centred::<Q>((*scale).start), centred::<Q>((*scale).first))
                    };
                    let (mut i, mut j) = (rows.each(starts), more_rows.each(starts));
                    dots(&block.w, 4..8, &rows, &mut i, &more_rows, &mut j);
                    rows.add(&i, block.b, &mut acc);
                    more_rows.add(&j, block.b, &mut more);
                } else {
                    let starts = |rows: &Rows, m| centred::<Q>((*rows.scales.add(m * nb)).start);
                    let (mut i, mut j) = (rows.each(starts), more_rows.each(starts));
                    dots(&block.w, 0..8, &rows, &mut i, &more_rows, &mut j);
                    rows.add(&i, block.a, &mut acc);
                    more_rows.add(&j, block.a, &mut more);
                    if S::FORM == Form::Minimum {
                        rows.add_minimum(block.b, &mut acc);
                        more_rows.add_minimum(block.b, &mut more);
                    }
                }
                q = q.wrapping_add(BLOCK);
                scales = scales.wrapping_add(1);
                p = p.wrapping_add(bytes);
            }
        }
        store(acc, o, out);
        store(more, o.wrapping_add(MR * out.ld), out);
        MR + MORE
    }
}

/// -centre x a sum that was stored x -8.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
fn centred<Q: Quants>(start: i32) -> __m512i {
    let start = _mm512_set1_epi32(start);
    match Q::CENTRE {
        8 => start,
        16 => _mm512_slli_epi32::<1>(start),
        32 => _mm512_slli_epi32::<2>(start),
        _ => _mm512_slli_epi32::<4>(start),
    }
}

/// Where a block's inputs of several rows lie.
#[derive(Clone, Copy)]
struct Rows {
    q: *const i8,
    /// From row to row.
    k: usize,
    scales: *const BlockScale,
    /// From row to row.
    nb: usize,
}

impl Rows {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn each<const N: usize>(&self, start: impl Fn(&Self, usize) -> __m512i) -> [__m512i; N] {
        std::array::from_fn(|m| start(self, m))
    }

    /// Adds N sums times their scales.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn add<const N: usize>(&self, i: &[__m512i; N], d: __m512, acc: &mut [__m512; N]) {
        for m in 0..N {
            // SAFETY: as in `tile`.
            let da = _mm512_set1_ps(unsafe { (*self.scales.add(m * self.nb)).d });
            acc[m] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(i[m]), d), da, acc[m]);
        }
    }

    /// Adds minimums.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn add_minimum<const N: usize>(&self, min: __m512, acc: &mut [__m512; N]) {
        for m in 0..N {
            // SAFETY: as in `tile`.
            let s = _mm512_set1_ps(unsafe { (*self.scales.add(m * self.nb)).s });
            acc[m] = _mm512_fmadd_ps(min, s, acc[m]);
        }
    }
}

/// Products of weights and inputs of all rows, input by input: neighbouring instructions are independent, since the scheduler sees only
/// some 100 of them and each has a latency of 5.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn dots<const N: usize, const M: usize>(
    w: &[__m512i; 8],
    groups: Range<usize>,
    rows: &Rows,
    i: &mut [__m512i; N],
    more_rows: &Rows,
    j: &mut [__m512i; M],
) {
    // SAFETY: as in `tile`.
    unsafe {
        for g in groups {
            let input = |r: &Rows, m: usize| _mm512_set1_epi32(r.q.add(m * r.k + 4 * g).cast::<i32>().read_unaligned());
            for m in 0..N {
                i[m] = _mm512_dpbusd_epi32(i[m], w[g], input(rows, m));
            }
            for m in 0..M {
                j[m] = _mm512_dpbusd_epi32(j[m], w[g], input(more_rows, m));
            }
        }
    }
}

/// Writes the sums of N rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn store<const N: usize>(acc: [__m512; N], o: *mut f32, out: Out) {
    for (m, v) in acc.into_iter().enumerate() {
        // SAFETY: as in `tile`.
        unsafe { put(o.add(m * out.ld), v, out.add) };
    }
}
