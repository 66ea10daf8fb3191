//! Causal attention over an f16 cache in pages, softmax in blocks of 64 tokens at absolute positions.
//!
//! Per query and block: scores (a chain over the head's elements, a lane is a token), the new maximum, the old sums scaled down,
//! exponentials, then p x V over the tokens in order. One token and tiles of tokens do the same operations in the same order
//! per query, so prefill and decode agree to the bit. A block that a query does not see at all changes nothing:
//! its maximum stays, the scale is exactly 1, the addends are exact zeros.

use std::arch::x86_64::*;

use super::super::kernels::{Attention, KEY_BLOCK, QUERY_ROWS};
use super::super::layout::LANES;
use super::lanes::{exp, fetch, halves, largest, repeat, sum};

/// Panels of 8 tokens in a block.
const PANELS: usize = KEY_BLOCK / LANES;

/// A worker's scratch for one call; lengths as in [`Attention::scratch_len`].
#[derive(Clone, Copy)]
struct Work {
    /// `[rows][KEY_BLOCK]`.
    scores: *mut f32,
    /// `[rows][8]`: the maximum so far, in the first lane.
    top: *mut f32,
    /// `[rows][8]`: sums so far, lane by lane.
    sums: *mut f32,
    /// `[dim][16]` keys as f32.
    keys: *mut f32,
    /// `[KEY_BLOCK][dim]` values as f32.
    values: *mut f32,
}

/// See `Kernels::attend`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn attend(a: &Attention<'_>, scratch: *mut f32, out: *mut f32) {
    // SAFETY: the caller's: queries, pages that cover the positions, scratch_len floats, room for the output.
    unsafe {
        let rows = a.tokens * a.group;
        let most = QUERY_ROWS.max(a.group);
        let top = scratch.add(most * KEY_BLOCK);
        let sums = top.add(most * LANES);
        let keys = sums.add(most * LANES);
        let work = Work {
            scores: scratch,
            top,
            sums,
            keys,
            values: keys.add(a.dim * 16),
        };
        for r in 0..rows {
            *work.top.add(r * LANES) = f32::NEG_INFINITY;
            _mm256_storeu_ps(work.sums.add(r * LANES), _mm256_setzero_ps());
        }
        for i in (0..rows * a.dim).step_by(LANES) {
            _mm256_storeu_ps(out.add(i), _mm256_setzero_ps());
        }
        let end = a.first_position + a.tokens;
        for start in (0..end).step_by(KEY_BLOCK) {
            let len = KEY_BLOCK.min(end - start);
            if a.tokens == 1 {
                one_token(a, start, len, &work, out);
            } else {
                tile(a, start, len, &work, out);
            }
        }
        for r in 0..rows {
            let inverse = _mm256_set1_ps(1.0 / sum(_mm256_loadu_ps(work.sums.add(r * LANES))));
            for d in (0..a.dim).step_by(LANES) {
                let o = out.add(r * a.dim + d);
                _mm256_storeu_ps(o, _mm256_mul_ps(_mm256_loadu_ps(o), inverse));
            }
        }
    }
}

/// Turns a row's scores into weights, `live` of them; the others of `panels` panels become exact zeros. Returns the factor for what was
/// summed up before.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn weigh(scores: *mut f32, live: usize, panels: usize, top: *mut f32, sums: *mut f32) -> __m256 {
    // SAFETY: a row of KEY_BLOCK scores, its maximum and its sums.
    unsafe {
        let low = _mm256_set1_ps(f32::NEG_INFINITY);
        for t in live..panels * LANES {
            *scores.add(t) = f32::NEG_INFINITY;
        }
        let mut m = low;
        for p in 0..panels {
            m = _mm256_max_ps(m, _mm256_loadu_ps(scores.add(p * LANES)));
        }
        let before = *top;
        let now = before.max(largest(m));
        *top = now;
        let now = _mm256_set1_ps(now);
        let keep = exp(_mm256_sub_ps(_mm256_set1_ps(before), now));
        let mut s = _mm256_mul_ps(_mm256_loadu_ps(sums), keep);
        for p in 0..panels {
            let at = scores.add(p * LANES);
            let v = _mm256_loadu_ps(at);
            // unordered counts as live: a NaN must not vanish
            let alive = _mm256_cmp_ps::<_CMP_NEQ_UQ>(v, low);
            let e = _mm256_and_ps(alive, exp(_mm256_sub_ps(v, now)));
            _mm256_storeu_ps(at, e);
            s = _mm256_add_ps(s, e);
        }
        _mm256_storeu_ps(sums, s);
        keep
    }
}

/// One token, its group of heads, `len` tokens of cache from `start` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn one_token(a: &Attention<'_>, start: usize, len: usize, work: &Work, out: *mut f32) {
    // SAFETY: as in `attend`.
    unsafe {
        let panels = len.div_ceil(LANES);
        let keys: [*const u16; PANELS] = std::array::from_fn(|p| a.key_panel(start + p.min(panels - 1) * LANES));
        let values: [*const u16; PANELS] = std::array::from_fn(|p| a.value_rows(start + p.min(panels - 1) * LANES));
        let mut h = 0;
        while h < a.group {
            let (q, s) = (a.q.add(h * a.dim), work.scores.add(h * KEY_BLOCK));
            h += match a.group - h {
                1 => score_panels::<1>(q, a.dim, &keys, &values, panels, s),
                2 => score_panels::<2>(q, a.dim, &keys, &values, panels, s),
                _ => score_panels::<3>(q, a.dim, &keys, &values, panels, s),
            };
        }
        for h in 0..a.group {
            let keep = weigh(
                work.scores.add(h * KEY_BLOCK),
                len,
                panels,
                work.top.add(h * LANES),
                work.sums.add(h * LANES),
            );
            for d in (0..a.dim).step_by(LANES) {
                let o = out.add(h * a.dim + d);
                _mm256_storeu_ps(o, _mm256_mul_ps(_mm256_loadu_ps(o), keep));
            }
        }
        let mut h = 0;
        while h < a.group {
            let (s, o) = (work.scores.add(h * KEY_BLOCK), out.add(h * a.dim));
            h += match a.group - h {
                1 => add_values::<1>(s, a.dim, &values, len, o),
                2 => add_values::<2>(s, a.dim, &values, len, o),
                _ => add_values::<3>(s, a.dim, &values, len, o),
            };
        }
    }
}

/// Scores of MR heads over the block's panels, two panels at a time. Returns MR. 6 accumulators + 2 keys: 12 + 4 spilled.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score_panels<const MR: usize>(
    q: *const f32,
    dim: usize,
    keys: &[*const u16; PANELS],
    values: &[*const u16; PANELS],
    panels: usize,
    scores: *mut f32,
) -> usize {
    // SAFETY: as in `attend`.
    unsafe {
        for p in (0..panels).step_by(2) {
            // an odd last panel is scored twice, the second result lies in scores that nobody reads
            let (k0, k1) = (keys[p], keys[p + 1]);
            let (v0, v1) = (values[p], values[p + 1]);
            let mut acc = [[_mm256_setzero_ps(); 2]; MR];
            for d in 0..dim {
                if d % 4 == 0 {
                    // these tokens' values, on their way while the scores are computed
                    fetch(v0.wrapping_add(d * LANES).cast(), 1);
                    fetch(v1.wrapping_add(d * LANES).cast(), 1);
                    fetch(keys[(p + 2) % PANELS].wrapping_add(d * LANES).cast(), 1);
                    fetch(keys[(p + 3) % PANELS].wrapping_add(d * LANES).cast(), 1);
                }
                let k = [halves(k0.add(d * LANES).cast()), halves(k1.add(d * LANES).cast())];
                for m in 0..MR {
                    let x = repeat(q.add(m * dim + d));
                    acc[m][0] = _mm256_fmadd_ps(k[0], x, acc[m][0]);
                    acc[m][1] = _mm256_fmadd_ps(k[1], x, acc[m][1]);
                }
            }
            for m in 0..MR {
                let s = scores.add(m * KEY_BLOCK + p * LANES);
                _mm256_storeu_ps(s, acc[m][0]);
                _mm256_storeu_ps(s.add(LANES), acc[m][1]);
            }
        }
        MR
    }
}

/// Adds weight x value for MR heads over `len` tokens, 16 elements at a time. Returns MR.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_values<const MR: usize>(
    weights: *const f32,
    dim: usize,
    values: &[*const u16; PANELS],
    len: usize,
    out: *mut f32,
) -> usize {
    // SAFETY: as in `attend`.
    unsafe {
        for d in (0..dim).step_by(2 * LANES) {
            let two = dim - d >= 2 * LANES;
            let second = if two { LANES } else { 0 };
            let mut acc: [[__m256; 2]; MR] = std::array::from_fn(|m| {
                let o = out.add(m * dim + d);
                [_mm256_loadu_ps(o), _mm256_loadu_ps(o.add(second))]
            });
            for (p, panel) in values.iter().enumerate().take(len.div_ceil(LANES)) {
                let mut v = panel.add(d);
                for t in p * LANES..len.min((p + 1) * LANES) {
                    let value = [halves(v.cast()), halves(v.add(second).cast())];
                    for m in 0..MR {
                        let x = repeat(weights.add(m * KEY_BLOCK + t));
                        acc[m][0] = _mm256_fmadd_ps(value[0], x, acc[m][0]);
                        acc[m][1] = _mm256_fmadd_ps(value[1], x, acc[m][1]);
                    }
                    v = v.wrapping_add(dim);
                }
            }
            for m in 0..MR {
                let o = out.add(m * dim + d);
                _mm256_storeu_ps(o, acc[m][0]);
                if two {
                    _mm256_storeu_ps(o.add(LANES), acc[m][1]);
                }
            }
        }
        MR
    }
}

/// Up to 48 query rows, `len` tokens of cache from `start` on, keys and values converted to f32 once.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile(a: &Attention<'_>, start: usize, len: usize, work: &Work, out: *mut f32) {
    // SAFETY: as in `attend`.
    unsafe {
        let rows = a.tokens * a.group;
        let panels = len.div_ceil(LANES);
        for p in (0..panels).step_by(2) {
            for j in 0..2 {
                // an odd last panel is scored twice, the second result lies in scores that nobody reads
                let k = a.key_panel(start + (p + j).min(panels - 1) * LANES);
                for d in 0..a.dim {
                    _mm256_storeu_ps(work.keys.add(d * 16 + j * LANES), halves(k.add(d * LANES).cast()));
                }
            }
            let mut r = 0;
            while r < rows {
                let s = work.scores.add(r * KEY_BLOCK + p * LANES);
                r += match rows - r {
                    1 => score_rows::<1>(a, r, work.keys, s),
                    2 => score_rows::<2>(a, r, work.keys, s),
                    3 => score_rows::<3>(a, r, work.keys, s),
                    4 => score_rows::<4>(a, r, work.keys, s),
                    5 => score_rows::<5>(a, r, work.keys, s),
                    _ => score_rows::<6>(a, r, work.keys, s),
                };
            }
        }
        for r in 0..rows {
            let visible = a.first_position + r / a.group + 1;
            let keep = weigh(
                work.scores.add(r * KEY_BLOCK),
                visible.saturating_sub(start).min(len),
                panels,
                work.top.add(r * LANES),
                work.sums.add(r * LANES),
            );
            for d in (0..a.dim).step_by(LANES) {
                let o = out.add(r * a.dim + d);
                _mm256_storeu_ps(o, _mm256_mul_ps(_mm256_loadu_ps(o), keep));
            }
        }
        for p in 0..panels {
            let v = a.value_rows(start + p * LANES);
            let tokens = LANES.min(len - p * LANES);
            for i in (0..tokens * a.dim).step_by(LANES) {
                _mm256_storeu_ps(work.values.add(p * LANES * a.dim + i), halves(v.add(i).cast()));
            }
        }
        let mut r = 0;
        while r < rows {
            let (s, o) = (work.scores.add(r * KEY_BLOCK), out.add(r * a.dim));
            r += match rows - r {
                1 => add_rows::<1>(s, a.dim, work.values, len, o),
                2 => add_rows::<2>(s, a.dim, work.values, len, o),
                3 => add_rows::<3>(s, a.dim, work.values, len, o),
                4 => add_rows::<4>(s, a.dim, work.values, len, o),
                5 => add_rows::<5>(s, a.dim, work.values, len, o),
                _ => add_rows::<6>(s, a.dim, work.values, len, o),
            };
        }
    }
}

/// Scores of MR query rows over 16 tokens. Returns MR.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn score_rows<const MR: usize>(a: &Attention<'_>, r: usize, keys: *const f32, scores: *mut f32) -> usize {
    // SAFETY: as in `attend`.
    unsafe {
        let q: [*const f32; MR] =
            std::array::from_fn(|m| a.q.add((r + m) / a.group * a.ldq + (r + m) % a.group * a.dim));
        let mut acc = [[_mm256_setzero_ps(); 2]; MR];
        let mut k = keys;
        for d in 0..a.dim {
            let key = [_mm256_loadu_ps(k), _mm256_loadu_ps(k.add(LANES))];
            for m in 0..MR {
                let x = repeat(q[m].add(d));
                acc[m][0] = _mm256_fmadd_ps(key[0], x, acc[m][0]);
                acc[m][1] = _mm256_fmadd_ps(key[1], x, acc[m][1]);
            }
            k = k.add(2 * LANES);
        }
        for m in 0..MR {
            let s = scores.add(m * KEY_BLOCK);
            _mm256_storeu_ps(s, acc[m][0]);
            _mm256_storeu_ps(s.add(LANES), acc[m][1]);
        }
        MR
    }
}

/// Adds weight x value for MR query rows. Returns MR.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_rows<const MR: usize>(
    weights: *const f32,
    dim: usize,
    values: *const f32,
    len: usize,
    out: *mut f32,
) -> usize {
    // SAFETY: as in `attend`.
    unsafe {
        for d in (0..dim).step_by(2 * LANES) {
            let two = dim - d >= 2 * LANES;
            let second = if two { LANES } else { 0 };
            let mut acc: [[__m256; 2]; MR] = std::array::from_fn(|m| {
                let o = out.add(m * dim + d);
                [_mm256_loadu_ps(o), _mm256_loadu_ps(o.add(second))]
            });
            let mut v = values.add(d);
            for t in 0..len {
                let value = [_mm256_loadu_ps(v), _mm256_loadu_ps(v.add(second))];
                for m in 0..MR {
                    let x = repeat(weights.add(m * KEY_BLOCK + t));
                    acc[m][0] = _mm256_fmadd_ps(value[0], x, acc[m][0]);
                    acc[m][1] = _mm256_fmadd_ps(value[1], x, acc[m][1]);
                }
                v = v.wrapping_add(dim);
            }
            for m in 0..MR {
                let o = out.add(m * dim + d);
                _mm256_storeu_ps(o, acc[m][0]);
                if two {
                    _mm256_storeu_ps(o.add(LANES), acc[m][1]);
                }
            }
        }
        MR
    }
}
