//! Eight-bit panels x int8 rows: magnitudes of the weights x inputs with the weights' signs. 2 x 128 x 127 fits into i16 once, so
//! nothing is added up there. For many rows this is no slower than weights widened to i16 in L1 (50 against 47 GMAC/s a core).

use std::arch::x86_64::*;

use super::super::act::Int8;
use super::super::kernels::Out;
use super::super::layout::{BLOCK, Eight, One, Quants, Scales};
use super::super::pack::Part;
use super::lanes::{bytes, fetch, halves, put, repeat, repeat4};

/// Bytes of a block of a panel.
const BYTES: usize = Eight::BYTES + One::BYTES;

/// Any number of rows; with `FLIPPED` inputs are stored as q + 128.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn matmul<const FLIPPED: bool>(w: &Part, a: &Int8, rows: usize, out: Out) {
    // SAFETY: the caller's: panels of bytes, `rows` rows of `a` and of `out`.
    unsafe {
        for p in 0..w.panels {
            let (panel, o) = (w.panel(p), out.panel(w.first + p));
            let mut m = 0;
            while m < rows {
                let o = o.add(m * out.ld);
                m += match rows - m {
                    1 => tile::<1, FLIPPED>(panel, a, m, o, out),
                    2 => tile::<2, FLIPPED>(panel, a, m, o, out),
                    3 => tile::<3, FLIPPED>(panel, a, m, o, out),
                    _ => tile::<4, FLIPPED>(panel, a, m, o, out),
                };
            }
        }
    }
}

/// One panel x MR rows. Returns MR.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const MR: usize, const FLIPPED: bool>(
    panel: *const u8,
    a: &Int8,
    m0: usize,
    o: *mut f32,
    out: Out,
) -> usize {
    // SAFETY: a panel of k / 32 blocks, rows m0 .. m0 + MR of `a` and at `o`.
    unsafe {
        let nb = a.k / BLOCK;
        let (ones, sign) = (_mm256_set1_epi16(1), _mm256_set1_epi8(-128));
        let mut acc = [_mm256_setzero_ps(); MR];
        let q: [*const u8; MR] = std::array::from_fn(|m| a.q.add((m0 + m) * a.k).cast_const().cast());
        let mut p = panel;
        for b in 0..nb {
            if m0 == 0 {
                fetch(p.wrapping_add(4096), BYTES.div_ceil(64));
            }
            let mut i = [_mm256_setzero_si256(); MR];
            for g in 0..8 {
                let w = _mm256_xor_si256(bytes(p.add(g * 32)), sign);
                // -128 becomes 128, as unsigned
                let size = _mm256_abs_epi8(w);
                for m in 0..MR {
                    let x = repeat4(q[m].add(b * BLOCK + 4 * g));
                    let x = if FLIPPED { _mm256_xor_si256(x, sign) } else { x };
                    let t = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, w));
                    let t = _mm256_madd_epi16(t, ones);
                    i[m] = if g == 0 { t } else { _mm256_add_epi32(i[m], t) };
                }
            }
            let d = halves(p.add(Eight::BYTES));
            for m in 0..MR {
                let da = repeat(&raw const (*a.scales.add((m0 + m) * nb + b)).d);
                acc[m] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(i[m]), d), da, acc[m]);
            }
            p = p.add(BYTES);
        }
        for (m, v) in acc.into_iter().enumerate() {
            put(o.add(m * out.ld), v, out.add);
        }
        MR
    }
}
