//! Float panels x f32 rows: per lane `acc = fma(w, x, acc)` in k order.

use std::arch::x86_64::*;

use super::super::act::Float;
use super::super::kernels::Out;
use super::super::layout::LANES;
use super::super::pack::Part;
use super::lanes::{halves, put, repeat};
use crate::model::Dtype;

/// An element type of a float panel.
trait Element {
    /// Bytes.
    const BYTES: usize;
    /// 8 of them as f32.
    ///
    /// # Safety
    /// 8 readable elements, AVX2 and F16C.
    unsafe fn load(p: *const u8) -> __m256;
}

struct Single;
struct Half;
struct Brain;

impl Element for Single {
    const BYTES: usize = 4;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: the caller's.
        unsafe { _mm256_loadu_ps(p.cast()) }
    }
}

impl Element for Half {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: the caller's.
        unsafe { halves(p) }
    }
}

impl Element for Brain {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8) -> __m256 {
        // SAFETY: the caller's.
        let wide = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(p.cast()) });
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    }
}

/// See `Kernels::matmul_float`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn matmul(w: &Part, a: &Float, rows: usize, out: Out) {
    // SAFETY: the caller's.
    unsafe {
        match w.dtype {
            Dtype::F16 => run::<Half>(w, a, rows, out),
            Dtype::Bf16 => run::<Brain>(w, a, rows, out),
            _ => run::<Single>(w, a, rows, out),
        }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run<E: Element>(w: &Part, a: &Float, rows: usize, out: Out) {
    // SAFETY: the caller's: panels of `w`, `rows` rows of `a` and of `out`.
    unsafe {
        let mut p = 0;
        while p < w.panels {
            // one row needs four chains side by side to hide the FMA's latency; four rows bring their own
            let wide = w.panels - p >= 4 && rows < 4;
            let step = if wide { 4 } else { 2.min(w.panels - p) };
            let o = out.panel(w.first + p);
            let mut m = 0;
            while m < rows {
                let o = o.add(m * out.ld);
                m += match (rows - m >= 4, step) {
                    (true, 1) => tile::<E, 4, 1>(w, p, a, m, o, out),
                    (true, _) => tile::<E, 4, 2>(w, p, a, m, o, out),
                    (false, 1) => tile::<E, 1, 1>(w, p, a, m, o, out),
                    (false, 2) => tile::<E, 1, 2>(w, p, a, m, o, out),
                    (false, _) => tile::<E, 1, 4>(w, p, a, m, o, out),
                };
            }
            p += step;
        }
    }
}

/// MR rows x NR panels. Returns MR.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<E: Element, const MR: usize, const NR: usize>(
    w: &Part,
    p: usize,
    a: &Float,
    m0: usize,
    o: *mut f32,
    out: Out,
) -> usize {
    // SAFETY: panels p .. p + NR, rows m0 .. m0 + MR of `a` and at `o`.
    unsafe {
        let mut panel: [*const u8; NR] = std::array::from_fn(|n| w.panel(p + n));
        let x: [*const f32; MR] = std::array::from_fn(|m| a.x.add((m0 + m) * a.k).cast_const());
        let mut acc = [[_mm256_setzero_ps(); NR]; MR];
        for i in 0..a.k {
            let weights: [__m256; NR] = std::array::from_fn(|n| E::load(panel[n]));
            for m in 0..MR {
                let x = repeat(x[m].add(i));
                for n in 0..NR {
                    acc[m][n] = _mm256_fmadd_ps(weights[n], x, acc[m][n]);
                }
            }
            for panel in &mut panel {
                *panel = panel.add(LANES * E::BYTES);
            }
        }
        for (m, row) in acc.into_iter().enumerate() {
            for (n, v) in row.into_iter().enumerate() {
                put(o.add(m * out.ld + n * LANES), v, out.add);
            }
        }
        MR
    }
}
