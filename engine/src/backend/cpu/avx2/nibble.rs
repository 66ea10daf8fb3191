//! Nibble panels x int8 rows.
//!
//! Per block and lane, in every kernel: `i = sum (q_w - 8) q_a` exactly, then `acc = fma(f32(i) d_a, d_w, acc)` and
//! `acc = fma(min + 8 d_w, s_a, acc)`, in k order. So a row's bits do not depend on the kernel, and the integer part may be computed in
//! whatever way is fastest:
//! - few rows: nibbles unpacked in registers, unsigned weights x signed inputs; a block's 8 products are added
//!   in i16: 8 x 2 x 15 x 127 = 30480 fits;
//! - many rows: weights unpacked once to signed bytes q - 8 that lie in L1 and are the memory operand, inputs q + 128 unsigned:
//!   8 x 2 x 8 x 255 = 32640 fits; the shift is undone by -128 x sum (q_w - 8), a vector of the block.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::act::{BlockScale, Int8};
use super::super::kernels::{MATMUL_SCRATCH, Out, ROW_BLOCK};
use super::super::pack::{BLOCK, LANES, NIBBLE_BLOCK, Panels};
use super::lanes::{bytes, fetch, halves, put, repeat, repeat4};

/// From this many rows on the second way (at 4 rows the first wins, at 16 the second; 12 is between).
pub const MANY_ROWS: usize = 12;

/// The first way, for any number of rows with signed inputs.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn matmul_few(w: &Panels, panels: Range<usize>, a: &Int8, rows: usize, out: Out) {
    for p in panels {
        // SAFETY: the caller's: panels of `w`, `rows` rows of `a` and of `out`.
        unsafe { few_rows(w.panel(p), a, rows, out, p) };
    }
}

/// See `Kernels::matmul_nibble`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn matmul(w: &Panels, panels: Range<usize>, a: &Int8, rows: usize, out: Out, scratch: *mut u8) {
    // SAFETY: the caller's: panels of `w`, `rows` rows of `a` and of `out`, MATMUL_SCRATCH bytes.
    unsafe {
        if rows < MANY_ROWS {
            return matmul_few(w, panels, a, rows, out);
        }
        let mut p = panels.start;
        while p < panels.end {
            p += match panels.end - p {
                1 => many_rows::<1>(w, p, a, rows, out, scratch),
                2 | 3 => many_rows::<2>(w, p, a, rows, out, scratch),
                _ => many_rows::<4>(w, p, a, rows, out, scratch),
            };
        }
    }
}

/// One panel, tiles of up to 4 rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn few_rows(panel: *const u8, a: &Int8, rows: usize, out: Out, p: usize) {
    // SAFETY: as in `matmul`.
    unsafe {
        let o = out.ptr.add((p - out.first_panel) * LANES);
        let mut m = 0;
        while m < rows {
            let o = o.add(m * out.ld);
            match rows - m {
                1 => tile::<1>(panel, a, m, o, out),
                2 => tile::<2>(panel, a, m, o, out),
                3 => tile::<3>(panel, a, m, o, out),
                _ => tile::<4>(panel, a, m, o, out),
            }
            m += 4.min(rows - m);
        }
    }
}

/// Weights unpacked in registers, used for MR rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<const MR: usize>(panel: *const u8, a: &Int8, m0: usize, o: *mut f32, out: Out) {
    // SAFETY: a panel of k / 32 blocks, rows m0 .. m0 + MR of `a` and at `o`.
    unsafe {
        let nb = a.k / BLOCK;
        let ahead = (nb * NIBBLE_BLOCK).max(4096);
        let (ones, low, eight) = (_mm256_set1_epi16(1), _mm256_set1_epi8(15), _mm256_set1_ps(8.0));
        let mut acc = [_mm256_setzero_ps(); MR];
        let mut q: [*const u8; MR] = std::array::from_fn(|m| a.q.add((m0 + m) * a.k).cast_const().cast());
        let scales: [*const BlockScale; MR] = std::array::from_fn(|m| a.scales.add((m0 + m) * nb).cast_const());
        let mut p = panel;
        for b in 0..nb {
            fetch(p.wrapping_add(ahead), 3);
            let mut w = [_mm256_setzero_si256(); 8];
            for j in 0..4 {
                let x = bytes(p.add(j * 32));
                w[2 * j] = _mm256_and_si256(x, low);
                w[2 * j + 1] = _mm256_and_si256(_mm256_srli_epi16::<4>(x), low);
            }
            let dw = halves(p.add(128));
            let min = _mm256_fmadd_ps(dw, eight, halves(p.add(144)));
            for m in 0..MR {
                let mut i = [_mm256_setzero_si256(); 2];
                for g in 0..8 {
                    let x = _mm256_maddubs_epi16(w[g], repeat4(q[m].add(4 * g)));
                    i[g & 1] = if g < 2 { x } else { _mm256_add_epi16(i[g & 1], x) };
                }
                let j = _mm256_madd_epi16(_mm256_add_epi16(i[0], i[1]), ones);
                let scale = scales[m].add(b);
                let j = _mm256_add_epi32(j, _mm256_set1_epi32((*scale).start));
                let f = _mm256_mul_ps(_mm256_cvtepi32_ps(j), repeat(&raw const (*scale).d));
                acc[m] = _mm256_fmadd_ps(f, dw, acc[m]);
                acc[m] = _mm256_fmadd_ps(min, repeat(&raw const (*scale).s), acc[m]);
                q[m] = q[m].add(BLOCK);
            }
            p = p.add(NIBBLE_BLOCK);
        }
        for (m, v) in acc.into_iter().enumerate() {
            put(o.add(m * out.ld), v, out.add);
        }
    }
}

/// Bytes of a block of an unpacked panel: 256 signed weights, 8 f32 scales, 8 f32 min + 8 d, 8 i32 shifts.
const SIGNED_BLOCK: usize = 352;
/// Blocks of k whose unpacked panels stay in L1: 4 x 12 x 352 = 17 KB (all 48 blocks of a 1536-wide matrix at once cost 25 %).
const PIECE: usize = 12;
const _: () = assert!(PIECE * 4 * SIGNED_BLOCK + ROW_BLOCK * 4 * LANES * 4 <= MATMUL_SCRATCH);

/// NR panels from `p` on, all rows. Returns NR.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn many_rows<const NR: usize>(w: &Panels, p: usize, a: &Int8, rows: usize, out: Out, scratch: *mut u8) -> usize {
    // SAFETY: as in `matmul`; the scratch's size is asserted above.
    unsafe {
        let nb = a.k / BLOCK;
        let partial = scratch.add(PIECE * NR * SIGNED_BLOCK).cast::<f32>();
        let (panel, panel_bytes) = (w.panel(p), w.panel_bytes());
        for r0 in (0..rows).step_by(ROW_BLOCK) {
            let r1 = rows.min(r0 + ROW_BLOCK);
            for b0 in (0..nb).step_by(PIECE) {
                let blocks = PIECE.min(nb - b0);
                unpack::<NR>(panel.add(b0 * NIBBLE_BLOCK), panel_bytes, blocks, scratch);
                // meanwhile the same piece of the next panels comes in, a few lines per row
                let lines = (blocks * NIBBLE_BLOCK).div_ceil(64) + 1;
                let per_row = (lines * NR).div_ceil(r1 - r0);
                let mut line = 0;
                for m in r0..r1 {
                    for l in line..(line + per_row).min(lines * NR) {
                        fetch(
                            panel.wrapping_add((NR + l / lines) * panel_bytes + b0 * NIBBLE_BLOCK + l % lines * 64),
                            1,
                        );
                    }
                    line += per_row;
                    let kept = partial.add((m - r0) * NR * LANES);
                    let mut acc = [_mm256_setzero_ps(); NR];
                    if b0 > 0 {
                        acc = std::array::from_fn(|n| _mm256_loadu_ps(kept.add(n * LANES)));
                    }
                    signed_tile::<NR>(scratch, a, m, b0, blocks, &mut acc);
                    if b0 + blocks < nb {
                        (0..NR).for_each(|n| _mm256_storeu_ps(kept.add(n * LANES), acc[n]));
                    } else {
                        let o = out.ptr.add(m * out.ld + (p - out.first_panel) * LANES);
                        (0..NR).for_each(|n| put(o.add(n * LANES), acc[n], out.add));
                    }
                }
            }
        }
        NR
    }
}

/// `blocks` blocks of NR panels as signed bytes, interleaved block by block.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<const NR: usize>(panel: *const u8, panel_bytes: usize, blocks: usize, out: *mut u8) {
    // SAFETY: as in `matmul`; `out` is aligned to 32.
    unsafe {
        let (low, eight, shift) = (_mm256_set1_epi8(15), _mm256_set1_epi8(8), _mm256_set1_epi16(-128));
        let one = _mm256_set1_epi8(1);
        for n in 0..NR {
            let mut p = panel.add(n * panel_bytes);
            let mut o = out.add(n * SIGNED_BLOCK);
            for _ in 0..blocks {
                let mut sum = _mm256_setzero_si256();
                for j in 0..4 {
                    let x = bytes(p.add(j * 32));
                    let lo = _mm256_sub_epi8(_mm256_and_si256(x, low), eight);
                    let hi = _mm256_sub_epi8(_mm256_and_si256(_mm256_srli_epi16::<4>(x), low), eight);
                    _mm256_store_si256(o.add(j * 64).cast(), lo);
                    _mm256_store_si256(o.add(j * 64 + 32).cast(), hi);
                    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(one, _mm256_add_epi8(lo, hi)));
                }
                let dw = halves(p.add(128));
                _mm256_store_ps(o.add(256).cast(), dw);
                _mm256_store_ps(
                    o.add(288).cast(),
                    _mm256_fmadd_ps(dw, _mm256_set1_ps(8.0), halves(p.add(144))),
                );
                _mm256_store_si256(o.add(320).cast(), _mm256_madd_epi16(sum, shift));
                p = p.add(NIBBLE_BLOCK);
                o = o.add(NR * SIGNED_BLOCK);
            }
        }
    }
}

/// One row x NR unpacked panels, blocks b0 .. b0 + blocks, continuing `acc`. 103 instructions per 1024 multiplications, no spills;
/// 4 x 16 and 2 x 32 tiles spill and lose 20..30 %.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn signed_tile<const NR: usize>(
    panels: *const u8,
    a: &Int8,
    m: usize,
    b0: usize,
    blocks: usize,
    acc: &mut [__m256; NR],
) {
    // SAFETY: as in `matmul`.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let at = m * (a.k / BLOCK) + b0;
        let mut q = a.q.add(at * BLOCK).cast_const().cast::<u8>();
        let mut scale = a.scales.add(at).cast_const();
        let mut p = panels;
        for _ in 0..blocks {
            let mut i = [_mm256_setzero_si256(); NR];
            for g in 0..8 {
                let x = repeat4(q.add(4 * g));
                for n in 0..NR {
                    let t = _mm256_maddubs_epi16(x, bytes(p.add(n * SIGNED_BLOCK + g * 32)));
                    i[n] = if g == 0 { t } else { _mm256_add_epi16(i[n], t) };
                }
            }
            let (da, sa) = (repeat(&raw const (*scale).d), repeat(&raw const (*scale).s));
            for n in 0..NR {
                let scales = p.add(n * SIGNED_BLOCK + 256);
                let j = _mm256_add_epi32(_mm256_madd_epi16(i[n], ones), bytes(scales.add(64)));
                let f = _mm256_mul_ps(_mm256_cvtepi32_ps(j), da);
                acc[n] = _mm256_fmadd_ps(f, _mm256_loadu_ps(scales.cast()), acc[n]);
                acc[n] = _mm256_fmadd_ps(_mm256_loadu_ps(scales.add(32).cast()), sa, acc[n]);
            }
            q = q.add(BLOCK);
            scale = scale.add(1);
            p = p.add(NR * SIGNED_BLOCK);
        }
    }
}
