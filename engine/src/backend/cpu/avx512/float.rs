//! Float panels x f32 rows, two panels a vector: per lane `acc = fma(w, x, acc)` in k order, as in the other tables.

use std::arch::x86_64::*;

use super::super::act::Float;
use super::super::avx2;
use super::super::kernels::Out;
use super::super::layout::LANES;
use super::super::pack::Part;
use super::lanes::{half_pair, put, repeat};
use crate::model::Dtype;

/// An element type of a float panel.
trait Element {
    /// Bytes.
    const BYTES: usize;
    /// 8 of each of two panels as f32.
    ///
    /// # Safety
    /// 8 readable elements at both, AVX-512.
    unsafe fn load(a: *const u8, b: *const u8) -> __m512;
}

struct Single;
struct Half;
struct Brain;

impl Element for Single {
    const BYTES: usize = 4;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn load(a: *const u8, b: *const u8) -> __m512 {
        // SAFETY: the caller's.
        unsafe {
            let first = _mm512_castsi256_si512(_mm256_loadu_si256(a.cast()));
            _mm512_castsi512_ps(_mm512_inserti64x4::<1>(first, _mm256_loadu_si256(b.cast())))
        }
    }
}

impl Element for Half {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn load(a: *const u8, b: *const u8) -> __m512 {
        // SAFETY: the caller's.
        unsafe { half_pair(a.cast(), b.cast()) }
    }
}

impl Element for Brain {
    const BYTES: usize = 2;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn load(a: *const u8, b: *const u8) -> __m512 {
        // SAFETY: the caller's.
        let both = unsafe {
            let first = _mm256_castsi128_si256(_mm_loadu_si128(a.cast()));
            _mm256_inserti128_si256::<1>(first, _mm_loadu_si128(b.cast()))
        };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(both)))
    }
}

/// See `Kernels::matmul_float`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
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
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn run<E: Element>(w: &Part, a: &Float, rows: usize, out: Out) {
    // SAFETY: the caller's: panels of `w`, `rows` rows of `a` and of `out`.
    unsafe {
        let mut p = 0;
        while w.panels - p >= 2 {
            // one row needs chains side by side to hide the FMA's latency; more rows bring their own
            let step = match w.panels - p {
                8.. if rows == 1 => 8,
                4.. => 4,
                _ => 2,
            };
            let mut m = 0;
            while m < rows {
                m += match (rows - m, step) {
                    (_, 8) => tile::<E, 1, 4>(w, p, a, m, out),
                    (6.., 4) => tile::<E, 6, 2>(w, p, a, m, out),
                    (4.., 4) => tile::<E, 4, 2>(w, p, a, m, out),
                    (2.., 4) => tile::<E, 2, 2>(w, p, a, m, out),
                    (_, 4) => tile::<E, 1, 2>(w, p, a, m, out),
                    (6.., _) => tile::<E, 6, 1>(w, p, a, m, out),
                    _ => tile::<E, 1, 1>(w, p, a, m, out),
                };
            }
            p += step;
        }
        if p < w.panels {
            (avx2::KERNELS.matmul_float)(&w.skip(p), a, rows, out);
        }
    }
}

/// MR rows x NP pairs of panels. Returns MR.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn tile<E: Element, const MR: usize, const NP: usize>(
    w: &Part,
    p: usize,
    a: &Float,
    m0: usize,
    out: Out,
) -> usize {
    // SAFETY: panels p .. p + 2 NP, rows m0 .. m0 + MR of `a` and of `out`.
    unsafe {
        let panels: [[*const u8; 2]; NP] = std::array::from_fn(|n| [w.panel(p + 2 * n), w.panel(p + 2 * n + 1)]);
        let x: [*const f32; MR] = std::array::from_fn(|m| a.x.add((m0 + m) * a.k).cast_const());
        let mut acc = [[_mm512_setzero_ps(); NP]; MR];
        for i in 0..a.k {
            let at = i * LANES * E::BYTES;
            let weights = panels.map(|[a, b]| E::load(a.add(at), b.add(at)));
            for (acc, x) in acc.iter_mut().zip(x) {
                let x = repeat(x.add(i));
                for (acc, weights) in acc.iter_mut().zip(weights) {
                    *acc = _mm512_fmadd_ps(weights, x, *acc);
                }
            }
        }
        for (m, acc) in acc.into_iter().enumerate() {
            for (n, v) in acc.into_iter().enumerate() {
                let o = out.panel(w.first + p + 2 * n).add((m0 + m) * out.ld);
                put(o, v, out.add);
            }
        }
        MR
    }
}
