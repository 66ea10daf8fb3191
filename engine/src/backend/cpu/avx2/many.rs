//! Quantised panels x many int8 rows: weights unpacked once for all of them (see `matmul.rs`).

use std::arch::x86_64::*;

use super::super::act::Int8;
use super::super::kernels::{MATMUL_SCRATCH, Out, ROW_BLOCK};
use super::super::layout::{BLOCK, Form, LANES};
use super::super::pack::Part;
use super::lanes::{bytes, fetch, put, repeat, repeat4};
use super::load::{LoadQuants, LoadScales};

/// Bytes of a block of an unpacked panel: 256 signed weights, 8 f32 scales, 8 f32 min + centre x d or scales of the second half,
/// 8 i32 shifts, 8 of the second half.
const SIGNED_BLOCK: usize = 384;
/// Blocks of k whose unpacked panels stay in L1: 4 x 16 x 384 = 24 KB (all 48 blocks of a 1536-wide matrix at once cost 25 %).
const PIECE: usize = 16;
const _: () = assert!(PIECE * 4 * SIGNED_BLOCK + ROW_BLOCK * 4 * LANES * 4 <= MATMUL_SCRATCH);

/// All panels of `w`, four at a time as far as there are as many.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn many_rows<Q: LoadQuants, S: LoadScales>(w: &Part, a: &Int8, rows: usize, out: Out, scratch: *mut u8) {
    let mut p = 0;
    while p < w.panels {
        // SAFETY: the caller's: panels of that type, `rows` rows of `a` and of `out`, MATMUL_SCRATCH bytes.
        p += unsafe {
            match w.panels - p {
                1 => group::<Q, S, 1>(w, p, a, rows, out, scratch),
                2 | 3 => group::<Q, S, 2>(w, p, a, rows, out, scratch),
                _ => group::<Q, S, 4>(w, p, a, rows, out, scratch),
            }
        };
    }
}

/// NR panels from `p` on, all rows. Returns NR.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn group<Q: LoadQuants, S: LoadScales, const NR: usize>(
    w: &Part,
    p: usize,
    a: &Int8,
    rows: usize,
    out: Out,
    scratch: *mut u8,
) -> usize {
    // SAFETY: as in `many_rows`; the scratch's size is asserted above.
    unsafe {
        let nb = a.k / BLOCK;
        let partial = scratch.add(PIECE * NR * SIGNED_BLOCK).cast::<f32>();
        let panel = w.panel(p);
        for r0 in (0..rows).step_by(ROW_BLOCK) {
            let r1 = rows.min(r0 + ROW_BLOCK);
            for b0 in (0..nb).step_by(PIECE) {
                let blocks = PIECE.min(nb - b0);
                unpack::<Q, S, NR>(panel, w.stride, b0, blocks, scratch);
                // meanwhile the same piece of the next panels comes in, a few lines per row
                let (at, len) = (w.stride / nb * b0, w.stride / nb * blocks);
                let lines = len.div_ceil(64) + 1;
                let per_row = (lines * NR).div_ceil(r1 - r0);
                let mut line = 0;
                for m in r0..r1 {
                    for l in line..(line + per_row).min(lines * NR) {
                        fetch(panel.wrapping_add((NR + l / lines) * w.stride + at + l % lines * 64), 1);
                    }
                    line += per_row;
                    let kept = partial.add((m - r0) * NR * LANES);
                    let mut acc = [_mm256_setzero_ps(); NR];
                    if b0 > 0 {
                        acc = std::array::from_fn(|n| _mm256_loadu_ps(kept.add(n * LANES)));
                    }
                    signed_tile::<Q, S, NR>(scratch, a, m, b0, blocks, &mut acc);
                    if b0 + blocks < nb {
                        (0..NR).for_each(|n| _mm256_storeu_ps(kept.add(n * LANES), acc[n]));
                    } else {
                        let o = out.panel(w.first + p).add(m * out.ld);
                        (0..NR).for_each(|n| put(o.add(n * LANES), acc[n], out.add));
                    }
                }
            }
        }
        NR
    }
}

/// `blocks` blocks of NR panels, from block `b0` on, as signed bytes, interleaved block by block.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<Q: LoadQuants, S: LoadScales, const NR: usize>(
    panel: *const u8,
    stride: usize,
    b0: usize,
    blocks: usize,
    out: *mut u8,
) {
    // SAFETY: as in `many_rows`; `out` is aligned to 32.
    unsafe {
        let (one, shift) = (_mm256_set1_epi8(1), _mm256_set1_epi16(-128));
        let centre = _mm256_set1_epi8(Q::CENTRE as i8);
        let block_bytes = Q::BYTES + S::BYTES;
        for n in 0..NR {
            for b in 0..blocks {
                let unit = panel.add(n * stride + (b0 + b) / S::BLOCKS * (S::HEAD + S::BLOCKS * block_bytes));
                let p = unit.add(S::HEAD + (b0 + b) % S::BLOCKS * block_bytes);
                let o = out.add((b * NR + n) * SIGNED_BLOCK);
                let mut sums = [_mm256_setzero_si256(); 2];
                for (g, w) in Q::load(p).into_iter().enumerate() {
                    let w = _mm256_sub_epi8(w, centre);
                    _mm256_store_si256(o.add(g * 32).cast(), w);
                    sums[g / 4] = _mm256_add_epi16(sums[g / 4], _mm256_maddubs_epi16(one, w));
                }
                let (d, b) = S::load(p.add(Q::BYTES), S::head(unit), f32::from(Q::CENTRE));
                _mm256_store_ps(o.add(256).cast(), d);
                _mm256_store_ps(o.add(288).cast(), b);
                if S::FORM == Form::Halves {
                    _mm256_store_si256(o.add(320).cast(), _mm256_madd_epi16(sums[0], shift));
                    _mm256_store_si256(o.add(352).cast(), _mm256_madd_epi16(sums[1], shift));
                } else {
                    let sum = _mm256_add_epi16(sums[0], sums[1]);
                    _mm256_store_si256(o.add(320).cast(), _mm256_madd_epi16(sum, shift));
                }
            }
        }
    }
}

/// One row x NR unpacked panels, blocks b0 .. b0 + blocks, continuing `acc`. For Q4_1 103 instructions per 1024 multiplications, no
/// spills; 4 x 16 and 2 x 32 tiles spill and lose 20..30 %.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn signed_tile<Q: LoadQuants, S: LoadScales, const NR: usize>(
    panels: *const u8,
    a: &Int8,
    m: usize,
    b0: usize,
    blocks: usize,
    acc: &mut [__m256; NR],
) {
    // SAFETY: as in `many_rows`.
    unsafe {
        let at = m * (a.k / BLOCK) + b0;
        let mut q = a.q.add(at * BLOCK).cast_const().cast::<u8>();
        let mut scale = a.scales.add(at).cast_const();
        let mut p = panels;
        for _ in 0..blocks {
            let da = repeat(&raw const (*scale).d);
            if S::FORM == Form::Halves {
                half_block::<Q, NR>(p, q, 0, 4, p.add(320), p.add(256), da, acc);
                half_block::<Q, NR>(p, q, 4, 8, p.add(352), p.add(288), da, acc);
            } else {
                half_block::<Q, NR>(p, q, 0, 8, p.add(320), p.add(256), da, acc);
            }
            if S::FORM == Form::Minimum {
                let sa = repeat(&raw const (*scale).s);
                for n in 0..NR {
                    let min = _mm256_loadu_ps(p.add(n * SIGNED_BLOCK + 288).cast());
                    acc[n] = _mm256_fmadd_ps(min, sa, acc[n]);
                }
            }
            q = q.add(BLOCK);
            scale = scale.add(1);
            p = p.add(NR * SIGNED_BLOCK);
        }
    }
}

/// Inputs 4 `from` .. 4 `to` of a block, with the first panel's shift and scale.
#[inline]
#[expect(clippy::too_many_arguments, reason = "inlined into its two callers")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn half_block<Q: LoadQuants, const NR: usize>(
    p: *const u8,
    q: *const u8,
    from: usize,
    to: usize,
    shift: *const u8,
    d: *const u8,
    da: __m256,
    acc: &mut [__m256; NR],
) {
    // SAFETY: as in `signed_tile`.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut all: [__m256i; NR] = std::array::from_fn(|n| bytes(shift.add(n * SIGNED_BLOCK)));
        for c in (from..to).step_by(Q::FIT) {
            let mut i = [_mm256_setzero_si256(); NR];
            for g in c..to.min(c + Q::FIT) {
                let x = repeat4(q.add(4 * g));
                for n in 0..NR {
                    let t = _mm256_maddubs_epi16(x, bytes(p.add(n * SIGNED_BLOCK + g * 32)));
                    i[n] = if g == c { t } else { _mm256_add_epi16(i[n], t) };
                }
            }
            for n in 0..NR {
                all[n] = _mm256_add_epi32(_mm256_madd_epi16(i[n], ones), all[n]);
            }
        }
        for n in 0..NR {
            let d = _mm256_loadu_ps(d.add(n * SIGNED_BLOCK).cast());
            acc[n] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(all[n]), d), da, acc[n]);
        }
    }
}
