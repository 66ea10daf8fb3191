//! Quantised panels x int8 rows.
//!
//! Per block and lane, in every kernel of every table: `i = sum (q_w - centre) q_a` exactly, then `acc = fma(f32(i) d_w, d_a, acc)`, with
//! a minimum `acc = fma(min + centre d_w, s_a, acc)`, in k order. So a row's bits do not depend on the kernel, and the
//! integer part may be computed in whatever way is fastest:
//! - few rows (here): quants unpacked in registers, unsigned weights x signed inputs; products are added in i16 as far as they fit;
//! - many rows (`many.rs`): weights unpacked once to signed bytes q - centre that lie in L1 and are the memory operand, inputs
//!   q + 128 unsigned; the shift is undone by -128 x sum (q_w - centre), a vector of the block;
//! - bytes (`byte.rs`) fit neither way.

use std::arch::x86_64::*;

use super::super::act::{BlockScale, Int8};
use super::super::kernels::Out;
use super::super::layout::{BLOCK, Five, Form, Four, One, Quants, Shared, SharedHalves, Six, Two};
use super::super::pack::Part;
use super::lanes::{fetch, put, repeat, repeat4};
use super::load::{LoadQuants, LoadScales};
use super::many::many_rows;
use super::{MANY_ROWS, byte};
use crate::model::Dtype;

/// See `Kernels::matmul_int8`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn matmul(w: &Part, a: &Int8, rows: usize, out: Out, scratch: *mut u8) {
    // SAFETY: the caller's: panels of that type, `rows` rows of `a` and of `out`, MATMUL_SCRATCH bytes.
    unsafe {
        if rows < MANY_ROWS {
            return matmul_few(w, a, rows, out);
        }
        match w.dtype {
            Dtype::Q4_0 => many_rows::<Four, One>(w, a, rows, out, scratch),
            Dtype::Q4_1 => many_rows::<Four, Two>(w, a, rows, out, scratch),
            Dtype::Q5_0 => many_rows::<Five, One>(w, a, rows, out, scratch),
            Dtype::Q5_1 => many_rows::<Five, Two>(w, a, rows, out, scratch),
            Dtype::Q4K => many_rows::<Four, Shared>(w, a, rows, out, scratch),
            Dtype::Q5K => many_rows::<Five, Shared>(w, a, rows, out, scratch),
            Dtype::Q6K => many_rows::<Six, SharedHalves>(w, a, rows, out, scratch),
            Dtype::Q8_0 => byte::matmul::<true>(w, a, rows, out),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {}
        }
    }
}

/// The way for few rows, for any number of them with signed inputs.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn matmul_few(w: &Part, a: &Int8, rows: usize, out: Out) {
    // SAFETY: as in `matmul`.
    unsafe {
        match w.dtype {
            Dtype::Q4_0 => few_rows::<Four, One>(w, a, rows, out),
            Dtype::Q4_1 => few_rows::<Four, Two>(w, a, rows, out),
            Dtype::Q5_0 => few_rows::<Five, One>(w, a, rows, out),
            Dtype::Q5_1 => few_rows::<Five, Two>(w, a, rows, out),
            Dtype::Q4K => few_rows::<Four, Shared>(w, a, rows, out),
            Dtype::Q5K => few_rows::<Five, Shared>(w, a, rows, out),
            Dtype::Q6K => few_rows::<Six, SharedHalves>(w, a, rows, out),
            Dtype::Q8_0 => byte::matmul::<false>(w, a, rows, out),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {}
        }
    }
}

/// Panel by panel, tiles of up to 4 rows.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn few_rows<Q: LoadQuants, S: LoadScales>(w: &Part, a: &Int8, rows: usize, out: Out) {
    // SAFETY: as in `matmul`.
    unsafe {
        for p in 0..w.panels {
            let (panel, o) = (w.panel(p), out.panel(w.first + p));
            let mut m = 0;
            while m < rows {
                let o = o.add(m * out.ld);
                match rows - m {
                    1 => tile::<Q, S, 1>(panel, w.stride, a, m, o, out),
                    2 => tile::<Q, S, 2>(panel, w.stride, a, m, o, out),
                    3 => tile::<Q, S, 3>(panel, w.stride, a, m, o, out),
                    _ => tile::<Q, S, 4>(panel, w.stride, a, m, o, out),
                }
                m += 4.min(rows - m);
            }
        }
    }
}

/// Weights unpacked in registers, used for MR rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<Q: LoadQuants, S: LoadScales, const MR: usize>(
    panel: *const u8,
    stride: usize,
    a: &Int8,
    m0: usize,
    o: *mut f32,
    out: Out,
) {
    // SAFETY: a panel of k / 32 blocks, rows m0 .. m0 + MR of `a` and at `o`.
    unsafe {
        let (nb, bytes) = (a.k / BLOCK, Q::BYTES + S::BYTES);
        let ahead = stride.max(4096);
        let mut acc = [_mm256_setzero_ps(); MR];
        let mut q: [*const u8; MR] = std::array::from_fn(|m| a.q.add((m0 + m) * a.k).cast_const().cast());
        let mut scales: [*const BlockScale; MR] = std::array::from_fn(|m| a.scales.add((m0 + m) * nb).cast_const());
        let mut p = panel;
        for _ in 0..nb / S::BLOCKS {
            let head = S::head(p);
            p = p.wrapping_add(S::HEAD);
            for _ in 0..S::BLOCKS {
                fetch(p.wrapping_add(ahead), bytes.div_ceil(64));
                let w = Q::load(p);
                let (d, b) = S::load(p.add(Q::BYTES), head, f32::from(Q::CENTRE));
                for m in 0..MR {
                    let scale = scales[m];
                    let da = repeat(&raw const (*scale).d);
                    let add = |i: __m256i, start: __m256i, d: __m256, acc: __m256| {
                        let i = _mm256_add_epi32(i, start);
                        _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(i), d), da, acc)
                    };
                    let start = centred::<Q>((*scale).start);
                    if S::FORM == Form::Halves {
                        let first = centred::<Q>((*scale).first);
                        acc[m] = add(dot::<Q>(&w[..4], q[m]), first, d, acc[m]);
                        let rest = _mm256_sub_epi32(start, first);
                        acc[m] = add(dot::<Q>(&w[4..], q[m].add(16)), rest, b, acc[m]);
                    } else {
                        acc[m] = add(dot::<Q>(&w, q[m]), start, d, acc[m]);
                    }
                    if S::FORM == Form::Minimum {
                        acc[m] = _mm256_fmadd_ps(b, repeat(&raw const (*scale).s), acc[m]);
                    }
                    q[m] = q[m].add(BLOCK);
                    scales[m] = scale.add(1);
                }
                p = p.wrapping_add(bytes);
            }
        }
        for (m, v) in acc.into_iter().enumerate() {
            put(o.add(m * out.ld), v, out.add);
        }
    }
}

/// Sums of unsigned weights x signed inputs, as i32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot<Q: LoadQuants>(w: &[__m256i], q: *const u8) -> __m256i {
    let ones = _mm256_set1_epi16(1);
    let mut all = _mm256_setzero_si256();
    for (c, w) in w.chunks(Q::FIT).enumerate() {
        // two chains side by side
        let mut i = [_mm256_setzero_si256(); 2];
        for (g, w) in w.iter().enumerate() {
            // SAFETY: the caller's: 4 inputs for each vector of weights.
            let x = _mm256_maddubs_epi16(*w, unsafe { repeat4(q.add(4 * (c * Q::FIT + g))) });
            i[g & 1] = if g < 2 { x } else { _mm256_add_epi16(i[g & 1], x) };
        }
        let sum = _mm256_madd_epi16(_mm256_add_epi16(i[0], i[1]), ones);
        all = if c == 0 { sum } else { _mm256_add_epi32(all, sum) };
    }
    all
}

/// -centre x a sum that was stored x -8.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn centred<Q: Quants>(start: i32) -> __m256i {
    _mm256_set1_epi32(start * (i32::from(Q::CENTRE) / 8))
}
