//! Byte panels x int16 rows, two panels a vector: 16 outputs, bytes widened in registers and used for up to 8 rows.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::act::Int16;
use super::super::avx2;
use super::super::kernels::Out;
use super::super::pack::{BLOCK, BYTE_BLOCK, LANES, Panels};

/// See `Kernels::matmul_byte`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
pub unsafe fn matmul(w: &Panels, panels: Range<usize>, a: &Int16, rows: usize, out: Out, scratch: *mut u8) {
    // SAFETY: the caller's: panels of `w`, `rows` rows of `a` and of `out`.
    unsafe {
        let mut p = panels.start;
        while panels.end - p >= 2 {
            let panel = w.panel(p);
            let o = out.ptr.add((p - out.first_panel) * LANES);
            let mut m = 0;
            while m < rows {
                let o = o.add(m * out.ld);
                m += match rows - m {
                    1 => tile::<1>(panel, w.panel_bytes(), a, m, o, out),
                    2 => tile::<2>(panel, w.panel_bytes(), a, m, o, out),
                    3 => tile::<3>(panel, w.panel_bytes(), a, m, o, out),
                    4 => tile::<4>(panel, w.panel_bytes(), a, m, o, out),
                    5 => tile::<5>(panel, w.panel_bytes(), a, m, o, out),
                    6 => tile::<6>(panel, w.panel_bytes(), a, m, o, out),
                    7 => tile::<7>(panel, w.panel_bytes(), a, m, o, out),
                    _ => tile::<8>(panel, w.panel_bytes(), a, m, o, out),
                };
            }
            p += 2;
        }
        if p < panels.end {
            (avx2::KERNELS.matmul_byte)(w, p..panels.end, a, rows, out, scratch);
        }
    }
}

/// Two panels x MR rows. Returns MR.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn tile<const MR: usize>(
    panel: *const u8,
    panel_bytes: usize,
    a: &Int16,
    m0: usize,
    o: *mut f32,
    out: Out,
) -> usize {
    // SAFETY: two panels of k / 32 blocks, rows m0 .. m0 + MR of `a` and at `o`.
    unsafe {
        let mut acc = [_mm512_setzero_ps(); MR];
        let mut q: [*const i32; MR] = std::array::from_fn(|m| a.q.add((m0 + m) * a.k).cast_const().cast());
        let mut p = panel;
        for _ in 0..a.k / BLOCK {
            if m0 == 0 {
                for n in 2..4 {
                    for line in 0..5 {
                        _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(n * panel_bytes + line * 64).cast());
                    }
                }
            }
            let mut i = [_mm512_setzero_si512(); MR];
            for g in 0..BLOCK / 2 {
                // inputs 2g and 2g + 1 of both panels' outputs
                let first = _mm256_castsi128_si256(_mm_loadu_si128(p.add(g * 16).cast()));
                let both = _mm256_inserti128_si256::<1>(first, _mm_loadu_si128(p.add(panel_bytes + g * 16).cast()));
                let w = _mm512_cvtepi8_epi16(both);
                for m in 0..MR {
                    i[m] = _mm512_dpwssd_epi32(i[m], w, _mm512_set1_epi32(q[m].add(g).read_unaligned()));
                }
            }
            let first = _mm256_castsi128_si256(_mm_loadu_si128(p.add(256).cast()));
            let both = _mm256_inserti128_si256::<1>(first, _mm_loadu_si128(p.add(panel_bytes + 256).cast()));
            let dw = _mm512_cvtph_ps(both);
            for m in 0..MR {
                acc[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(i[m]), dw, acc[m]);
                q[m] = q[m].add(BLOCK / 2);
            }
            p = p.add(BYTE_BLOCK);
        }
        for (m, v) in acc.into_iter().enumerate() {
            let o = o.add(m * out.ld);
            let v = _mm512_mul_ps(v, _mm512_set1_ps(*a.d.add(m0 + m)));
            _mm512_storeu_ps(
                o,
                if out.add {
                    _mm512_add_ps(_mm512_loadu_ps(o), v)
                } else {
                    v
                },
            );
        }
        MR
    }
}
