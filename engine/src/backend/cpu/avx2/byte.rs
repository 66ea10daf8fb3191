//! Byte panels x int16 rows: i16 x i16 into i32 (32 x 127 x 32767 < 2^31), one scale a row, multiplied in at the end.
//!
//! Per block and lane `acc = fma(f32(i), d_w, acc)` in k order, in both kernels; then x d_a.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::act::Int16;
use super::super::kernels::{MATMUL_SCRATCH, Out, ROW_BLOCK};
use super::super::pack::{BLOCK, BYTE_BLOCK, LANES, Panels};
use super::lanes::{bytes, fetch, halves, put, repeat, repeat4};

/// From this many rows on, pairs of panels are widened to i16 first.
const WIDEN_ROWS: usize = 4;
/// Bytes of a block of a widened panel: 256 i16, 8 f32 scales.
const WIDE_BLOCK: usize = 544;
/// Panels widened together.
const WIDE_PANELS: usize = 2;
/// Blocks of k widened at a time: 2 x 20 x 544 = 22 KB, in L1.
const PIECE: usize = 20;
const _: () = assert!(PIECE * WIDE_PANELS * WIDE_BLOCK + ROW_BLOCK * WIDE_PANELS * LANES * 4 <= MATMUL_SCRATCH);

/// See `Kernels::matmul_byte`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn matmul(w: &Panels, panels: Range<usize>, a: &Int16, rows: usize, out: Out, scratch: *mut u8) {
    // SAFETY: the caller's: panels of `w`, `rows` rows of `a` and of `out`, MATMUL_SCRATCH bytes.
    unsafe {
        let mut p = panels.start;
        while p < panels.end {
            if rows >= WIDEN_ROWS && panels.end - p >= WIDE_PANELS {
                wide(w, p, a, rows, out, scratch);
                p += WIDE_PANELS;
                continue;
            }
            let o = out.ptr.add((p - out.first_panel) * LANES);
            let mut m = 0;
            while m < rows {
                let o = o.add(m * out.ld);
                match rows - m {
                    1 => tile::<1>(w.panel(p), a, m, o, out),
                    2 => tile::<2>(w.panel(p), a, m, o, out),
                    _ => tile::<3>(w.panel(p), a, m, o, out),
                }
                m += 3.min(rows - m);
            }
            p += 1;
        }
    }
}

/// One panel x MR rows, weights widened in registers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const MR: usize>(panel: *const u8, a: &Int16, m0: usize, o: *mut f32, out: Out) {
    // SAFETY: a panel of k / 32 blocks, rows m0 .. m0 + MR of `a` and at `o`.
    unsafe {
        let mut acc = [_mm256_setzero_ps(); MR];
        let mut q: [*const u8; MR] = std::array::from_fn(|m| a.q.add((m0 + m) * a.k).cast_const().cast());
        let mut p = panel;
        for _ in 0..a.k / BLOCK {
            let mut i = [_mm256_setzero_si256(); MR];
            fetch(p.wrapping_add(4096), 5);
            for g in 0..16 {
                let w = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.add(g * 16).cast()));
                for m in 0..MR {
                    let t = _mm256_madd_epi16(w, repeat4(q[m].add(4 * g)));
                    i[m] = if g == 0 { t } else { _mm256_add_epi32(i[m], t) };
                }
            }
            let dw = halves(p.add(256));
            for m in 0..MR {
                acc[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i[m]), dw, acc[m]);
                q[m] = q[m].add(2 * BLOCK);
            }
            p = p.add(BYTE_BLOCK);
        }
        for (m, v) in acc.into_iter().enumerate() {
            put(o.add(m * out.ld), _mm256_mul_ps(v, repeat(a.d.add(m0 + m))), out.add);
        }
    }
}

/// Two panels x all rows, weights widened to i16 in L1 and used as memory operands.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn wide(w: &Panels, p: usize, a: &Int16, rows: usize, out: Out, scratch: *mut u8) {
    // SAFETY: as in `matmul`; the scratch's size is asserted above.
    unsafe {
        let nb = a.k / BLOCK;
        let partial = scratch.add(PIECE * WIDE_PANELS * WIDE_BLOCK).cast::<f32>();
        let (panel, panel_bytes) = (w.panel(p), w.panel_bytes());
        for r0 in (0..rows).step_by(ROW_BLOCK) {
            let r1 = rows.min(r0 + ROW_BLOCK);
            for b0 in (0..nb).step_by(PIECE) {
                let blocks = PIECE.min(nb - b0);
                widen(panel.add(b0 * BYTE_BLOCK), panel_bytes, blocks, scratch);
                let lines = (blocks * BYTE_BLOCK).div_ceil(64) + 1;
                let per_row = (lines * WIDE_PANELS).div_ceil(r1 - r0);
                let mut line = 0;
                for m in r0..r1 {
                    for l in line..(line + per_row).min(lines * WIDE_PANELS) {
                        let next = (WIDE_PANELS + l / lines) * panel_bytes + b0 * BYTE_BLOCK + l % lines * 64;
                        fetch(panel.wrapping_add(next), 1);
                    }
                    line += per_row;
                    let kept = partial.add((m - r0) * WIDE_PANELS * LANES);
                    let mut acc = [_mm256_setzero_ps(); WIDE_PANELS];
                    if b0 > 0 {
                        acc = std::array::from_fn(|n| _mm256_loadu_ps(kept.add(n * LANES)));
                    }
                    wide_tile(
                        scratch,
                        a.q.add(m * a.k + b0 * BLOCK).cast_const().cast(),
                        blocks,
                        &mut acc,
                    );
                    if b0 + blocks < nb {
                        (0..WIDE_PANELS).for_each(|n| _mm256_storeu_ps(kept.add(n * LANES), acc[n]));
                    } else {
                        let d = repeat(a.d.add(m));
                        let o = out.ptr.add(m * out.ld + (p - out.first_panel) * LANES);
                        (0..WIDE_PANELS).for_each(|n| put(o.add(n * LANES), _mm256_mul_ps(acc[n], d), out.add));
                    }
                }
            }
        }
    }
}

/// `blocks` blocks of two panels, interleaved block by block.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen(panel: *const u8, panel_bytes: usize, blocks: usize, out: *mut u8) {
    // SAFETY: as in `matmul`; `out` is aligned to 32.
    unsafe {
        for n in 0..WIDE_PANELS {
            let mut p = panel.add(n * panel_bytes);
            let mut o = out.add(n * WIDE_BLOCK);
            for _ in 0..blocks {
                for g in 0..16 {
                    let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(p.add(g * 16).cast()));
                    _mm256_store_si256(o.add(g * 32).cast(), wide);
                }
                _mm256_store_ps(o.add(512).cast(), halves(p.add(256)));
                p = p.add(BYTE_BLOCK);
                o = o.add(WIDE_PANELS * WIDE_BLOCK);
            }
        }
    }
}

/// One row x two widened panels, continuing `acc`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn wide_tile(panels: *const u8, row: *const u8, blocks: usize, acc: &mut [__m256; WIDE_PANELS]) {
    // SAFETY: as in `matmul`.
    unsafe {
        let (mut p, mut q) = (panels, row);
        for _ in 0..blocks {
            let mut i = [_mm256_setzero_si256(); WIDE_PANELS];
            for g in 0..16 {
                let x = repeat4(q.add(4 * g));
                for n in 0..WIDE_PANELS {
                    let t = _mm256_madd_epi16(x, bytes(p.add(n * WIDE_BLOCK + g * 32)));
                    i[n] = if g == 0 { t } else { _mm256_add_epi32(i[n], t) };
                }
            }
            for n in 0..WIDE_PANELS {
                let dw = _mm256_loadu_ps(p.add(n * WIDE_BLOCK + 512).cast());
                acc[n] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(i[n]), dw, acc[n]);
            }
            q = q.add(2 * BLOCK);
            p = p.add(WIDE_PANELS * WIDE_BLOCK);
        }
    }
}
