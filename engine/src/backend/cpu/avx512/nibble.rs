//! Nibble panels x int8 rows, two panels a vector: 16 outputs, nibbles unpacked in registers and used for up to 8 rows.
//! 124 instructions per 4096 multiplications; AVX2's best is 103 per 1024.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::act::Int8;
use super::super::avx2;
use super::super::kernels::Out;
use super::super::pack::{BLOCK, LANES, NIBBLE_BLOCK, Panels};

/// See `Kernels::matmul_nibble`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
pub unsafe fn matmul(w: &Panels, panels: Range<usize>, a: &Int8, rows: usize, out: Out, _scratch: *mut u8) {
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
            avx2::matmul_nibble_few(w, p..panels.end, a, rows, out);
        }
    }
}

/// 32 bytes of each panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn pair(p: *const u8, second: usize) -> __m512i {
    // SAFETY: the caller's: 32 readable bytes at both.
    unsafe {
        let first = _mm512_castsi256_si512(_mm256_loadu_si256(p.cast()));
        _mm512_inserti64x4::<1>(first, _mm256_loadu_si256(p.add(second).cast()))
    }
}

/// 8 f16 of each panel as f32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn half_pair(p: *const u8, second: usize) -> __m512 {
    // SAFETY: the caller's: 16 readable bytes at both.
    unsafe {
        let first = _mm256_castsi128_si256(_mm_loadu_si128(p.cast()));
        _mm512_cvtph_ps(_mm256_inserti128_si256::<1>(first, _mm_loadu_si128(p.add(second).cast())))
    }
}

/// Two panels x MR rows. Returns MR.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn tile<const MR: usize>(
    panel: *const u8,
    panel_bytes: usize,
    a: &Int8,
    m0: usize,
    o: *mut f32,
    out: Out,
) -> usize {
    // SAFETY: two panels of k / 32 blocks, rows m0 .. m0 + MR of `a` and at `o`.
    unsafe {
        let nb = a.k / BLOCK;
        let (low, eight) = (_mm512_set1_epi8(15), _mm512_set1_ps(8.0));
        let mut acc = [_mm512_setzero_ps(); MR];
        let mut q: [*const i32; MR] = std::array::from_fn(|m| a.q.add((m0 + m) * a.k).cast_const().cast());
        let d: [*const f32; MR] = std::array::from_fn(|m| a.d.add((m0 + m) * nb).cast_const());
        let s: [*const f32; MR] = std::array::from_fn(|m| a.s.add((m0 + m) * nb).cast_const());
        let t: [*const i32; MR] = std::array::from_fn(|m| a.t.add((m0 + m) * nb).cast_const());
        let mut p = panel;
        for b in 0..nb {
            if m0 == 0 {
                // the panels after these two, block by block
                for n in 2..4 {
                    for line in 0..3 {
                        _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(n * panel_bytes + line * 64).cast());
                    }
                }
            }
            let mut w = [_mm512_setzero_si512(); 8];
            for j in 0..4 {
                let x = pair(p.add(j * 32), panel_bytes);
                w[2 * j] = _mm512_and_si512(x, low);
                w[2 * j + 1] = _mm512_and_si512(_mm512_srli_epi16::<4>(x), low);
            }
            let dw = half_pair(p.add(128), panel_bytes);
            let min = _mm512_fmadd_ps(dw, eight, half_pair(p.add(144), panel_bytes));
            for m in 0..MR {
                let mut i = _mm512_setzero_si512();
                for (g, w) in w.iter().enumerate() {
                    i = _mm512_dpbusd_epi32(i, *w, _mm512_set1_epi32(q[m].add(g).read_unaligned()));
                }
                let i = _mm512_sub_epi32(i, _mm512_set1_epi32(*t[m].add(b)));
                let f = _mm512_mul_ps(_mm512_cvtepi32_ps(i), _mm512_set1_ps(*d[m].add(b)));
                acc[m] = _mm512_fmadd_ps(f, dw, acc[m]);
                acc[m] = _mm512_fmadd_ps(min, _mm512_set1_ps(*s[m].add(b)), acc[m]);
                q[m] = q[m].add(BLOCK / 4);
            }
            p = p.add(NIBBLE_BLOCK);
        }
        for (m, v) in acc.into_iter().enumerate() {
            let o = o.add(m * out.ld);
            _mm512_storeu_ps(o, if out.add { _mm512_add_ps(_mm512_loadu_ps(o), v) } else { v });
        }
        MR
    }
}
