//! Attention as in `avx2/attend.rs`, on 16 lanes: two panels of keys side by side, 16 elements of a value. Heads of other widths
//! than a multiple of 16 are left to that one.

use std::arch::x86_64::*;

use super::super::avx2;
use super::super::kernels::{Attention, KEY_BLOCK, QUERY_ROWS};
use super::super::layout::LANES;
use super::lanes::{exp, half_pair, repeat};

/// Lanes of a vector.
const WIDE: usize = 2 * LANES;
/// Tokens that are scored at once: two vectors.
const PAIR: usize = 2 * WIDE;
/// Panels of 8 tokens in a block.
const PANELS: usize = KEY_BLOCK / LANES;

/// A worker's scratch for one call; lengths as in [`Attention::scratch_len`].
#[derive(Clone, Copy)]
struct Work {
    /// `[rows][KEY_BLOCK]`.
    scores: *mut f32,
    /// `[rows]`: the maximum so far.
    top: *mut f32,
    /// `[rows][16]`: sums so far, lane by lane.
    sums: *mut f32,
    /// `[dim][32]` keys as f32.
    keys: *mut f32,
    /// `[KEY_BLOCK][dim]` values as f32.
    values: *mut f32,
}

/// See `Kernels::attend`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
pub unsafe fn attend(a: &Attention<'_>, scratch: *mut f32, out: *mut f32) {
    // SAFETY: the caller's: queries, pages that cover the positions, scratch_len floats, room for the output.
    unsafe {
        if !a.dim.is_multiple_of(WIDE) {
            return (avx2::KERNELS.attend)(a, scratch, out);
        }
        let rows = a.tokens * a.group;
        let most = QUERY_ROWS.max(a.group);
        let top = scratch.add(most * KEY_BLOCK);
        let sums = top.add(most * LANES);
        let keys = sums.add(most * WIDE);
        let work = Work {
            scores: scratch,
            top,
            sums,
            keys,
            values: keys.add(a.dim * PAIR),
        };
        for r in 0..rows {
            *work.top.add(r) = f32::NEG_INFINITY;
            _mm512_storeu_ps(work.sums.add(r * WIDE), _mm512_setzero_ps());
        }
        for i in (0..rows * a.dim).step_by(WIDE) {
            _mm512_storeu_ps(out.add(i), _mm512_setzero_ps());
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
            let sum = _mm512_reduce_add_ps(_mm512_loadu_ps(work.sums.add(r * WIDE)));
            scale(out.add(r * a.dim), a.dim, _mm512_set1_ps(1.0 / sum));
        }
    }
}

/// Multiplies `n` floats by `by`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn scale(o: *mut f32, n: usize, by: __m512) {
    for i in (0..n).step_by(WIDE) {
        // SAFETY: the caller's.
        unsafe { _mm512_storeu_ps(o.add(i), _mm512_mul_ps(_mm512_loadu_ps(o.add(i)), by)) };
    }
}

/// Turns a row's scores into weights, `live` of them; the others of `len` become exact zeros. Returns the factor for what was summed up
/// before.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn weigh(scores: *mut f32, live: usize, len: usize, top: *mut f32, sums: *mut f32) -> __m512 {
    // SAFETY: a row of KEY_BLOCK scores, its maximum and its sums.
    unsafe {
        let vectors = len.div_ceil(WIDE);
        let low = _mm512_set1_ps(f32::NEG_INFINITY);
        for t in live..vectors * WIDE {
            *scores.add(t) = f32::NEG_INFINITY;
        }
        let mut m = low;
        for v in 0..vectors {
            m = _mm512_max_ps(m, _mm512_loadu_ps(scores.add(v * WIDE)));
        }
        let before = *top;
        let now = before.max(_mm512_reduce_max_ps(m));
        *top = now;
        let now = _mm512_set1_ps(now);
        let keep = exp(_mm512_sub_ps(_mm512_set1_ps(before), now));
        let mut s = _mm512_mul_ps(_mm512_loadu_ps(sums), keep);
        for v in 0..vectors {
            let at = scores.add(v * WIDE);
            let v = _mm512_loadu_ps(at);
            // unordered counts as live: a NaN must not vanish
            let alive = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(v, low);
            let e = _mm512_maskz_mov_ps(alive, exp(_mm512_sub_ps(v, now)));
            _mm512_storeu_ps(at, e);
            s = _mm512_add_ps(s, e);
        }
        _mm512_storeu_ps(sums, s);
        keep
    }
}

/// One token, its group of heads, `len` tokens of cache from `start` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
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
                3 => score_panels::<3>(q, a.dim, &keys, &values, panels, s),
                _ => score_panels::<4>(q, a.dim, &keys, &values, panels, s),
            };
        }
        for h in 0..a.group {
            let (scores, sums) = (work.scores.add(h * KEY_BLOCK), work.sums.add(h * WIDE));
            let keep = weigh(scores, len, len, work.top.add(h), sums);
            scale(out.add(h * a.dim), a.dim, keep);
        }
        let mut h = 0;
        while h < a.group {
            let (s, o) = (work.scores.add(h * KEY_BLOCK), out.add(h * a.dim));
            h += match a.group - h {
                1 => add_values::<1>(s, a.dim, &values, len, o),
                2 => add_values::<2>(s, a.dim, &values, len, o),
                3 => add_values::<3>(s, a.dim, &values, len, o),
                _ => add_values::<4>(s, a.dim, &values, len, o),
            };
        }
    }
}

/// Scores of MR heads over the block's panels, four panels at a time. Returns MR.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
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
        for p in (0..panels).step_by(4) {
            // panels beyond the last are the last again: what they give lies in scores that nobody reads
            let own: [*const u16; 4] = std::array::from_fn(|i| keys[p + i]);
            let mut acc = [[_mm512_setzero_ps(); 2]; MR];
            for d in 0..dim {
                if d % 4 == 0 {
                    // these tokens' values and the next keys, on their way while the scores are computed
                    for i in 0..4 {
                        fetch(values[p + i].wrapping_add(d * LANES));
                        fetch(keys[(p + 4 + i) % PANELS].wrapping_add(d * LANES));
                    }
                }
                let at = |i: usize| own[i].add(d * LANES);
                let k = [half_pair(at(0), at(1)), half_pair(at(2), at(3))];
                for m in 0..MR {
                    let x = repeat(q.add(m * dim + d));
                    acc[m][0] = _mm512_fmadd_ps(k[0], x, acc[m][0]);
                    acc[m][1] = _mm512_fmadd_ps(k[1], x, acc[m][1]);
                }
            }
            for m in 0..MR {
                let s = scores.add(m * KEY_BLOCK + p * LANES);
                _mm512_storeu_ps(s, acc[m][0]);
                _mm512_storeu_ps(s.add(WIDE), acc[m][1]);
            }
        }
        MR
    }
}

/// Asks for a cache line; any address will do.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
fn fetch(p: *const u16) {
    _mm_prefetch::<_MM_HINT_T0>(p.cast());
}

/// Adds weight x value for MR heads over `len` tokens, 32 elements at a time. Returns MR.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn add_values<const MR: usize>(
    weights: *const f32,
    dim: usize,
    values: &[*const u16; PANELS],
    len: usize,
    out: *mut f32,
) -> usize {
    // SAFETY: as in `attend`.
    unsafe {
        for d in (0..dim).step_by(PAIR) {
            let two = dim - d >= PAIR;
            let second = if two { WIDE } else { 0 };
            let load = |v: *const u16| _mm512_cvtph_ps(_mm256_loadu_si256(v.cast()));
            let mut acc: [[__m512; 2]; MR] = std::array::from_fn(|m| {
                let o = out.add(m * dim + d);
                [_mm512_loadu_ps(o), _mm512_loadu_ps(o.add(second))]
            });
            for (p, panel) in values.iter().enumerate().take(len.div_ceil(LANES)) {
                let mut v = panel.add(d);
                for t in p * LANES..len.min((p + 1) * LANES) {
                    let value = [load(v), load(v.add(second))];
                    for m in 0..MR {
                        let x = repeat(weights.add(m * KEY_BLOCK + t));
                        acc[m][0] = _mm512_fmadd_ps(value[0], x, acc[m][0]);
                        acc[m][1] = _mm512_fmadd_ps(value[1], x, acc[m][1]);
                    }
                    v = v.wrapping_add(dim);
                }
            }
            for m in 0..MR {
                let o = out.add(m * dim + d);
                _mm512_storeu_ps(o, acc[m][0]);
                if two {
                    _mm512_storeu_ps(o.add(WIDE), acc[m][1]);
                }
            }
        }
        MR
    }
}

/// Up to 48 query rows, `len` tokens of cache from `start` on, keys and values converted to f32 once.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn tile(a: &Attention<'_>, start: usize, len: usize, work: &Work, out: *mut f32) {
    // SAFETY: as in `attend`.
    unsafe {
        let rows = a.tokens * a.group;
        let panels = len.div_ceil(LANES);
        for p in (0..panels).step_by(4) {
            for i in [0, 2] {
                // panels beyond the last are the last again: what they give lies in scores that nobody reads
                let k = [p + i, p + i + 1].map(|p| a.key_panel(start + p.min(panels - 1) * LANES));
                for d in 0..a.dim {
                    let pair = half_pair(k[0].add(d * LANES), k[1].add(d * LANES));
                    _mm512_storeu_ps(work.keys.add(d * PAIR + i * LANES), pair);
                }
            }
            let mut r = 0;
            while r < rows {
                let s = work.scores.add(r * KEY_BLOCK + p * LANES);
                r += match rows - r {
                    1 => score_rows::<1>(a, r, work.keys, s),
                    2 | 3 => score_rows::<2>(a, r, work.keys, s),
                    4..8 => score_rows::<4>(a, r, work.keys, s),
                    _ => score_rows::<8>(a, r, work.keys, s),
                };
            }
        }
        for r in 0..rows {
            let visible = (a.first_position + r / a.group + 1).saturating_sub(start).min(len);
            let (scores, sums) = (work.scores.add(r * KEY_BLOCK), work.sums.add(r * WIDE));
            let keep = weigh(scores, visible, len, work.top.add(r), sums);
            scale(out.add(r * a.dim), a.dim, keep);
        }
        for p in 0..panels {
            let v = a.value_rows(start + p * LANES);
            let tokens = LANES.min(len - p * LANES);
            for i in (0..tokens * a.dim).step_by(WIDE) {
                let values = _mm512_cvtph_ps(_mm256_loadu_si256(v.add(i).cast()));
                _mm512_storeu_ps(work.values.add(p * LANES * a.dim + i), values);
            }
        }
        let mut r = 0;
        while r < rows {
            let (s, o) = (work.scores.add(r * KEY_BLOCK), out.add(r * a.dim));
            r += match rows - r {
                1 => add_rows::<1>(s, a.dim, work.values, len, o),
                2 | 3 => add_rows::<2>(s, a.dim, work.values, len, o),
                4..8 => add_rows::<4>(s, a.dim, work.values, len, o),
                _ => add_rows::<8>(s, a.dim, work.values, len, o),
            };
        }
    }
}

/// Scores of MR query rows over 32 tokens. Returns MR.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn score_rows<const MR: usize>(a: &Attention<'_>, r: usize, keys: *const f32, scores: *mut f32) -> usize {
    // SAFETY: as in `attend`.
    unsafe {
        let q: [*const f32; MR] =
            std::array::from_fn(|m| a.q.add((r + m) / a.group * a.ldq + (r + m) % a.group * a.dim));
        let (mut left, mut right) = ([_mm512_setzero_ps(); MR], [_mm512_setzero_ps(); MR]);
        for d in 0..a.dim {
            let k = keys.add(d * PAIR);
            let (k0, k1) = (_mm512_loadu_ps(k), _mm512_loadu_ps(k.add(WIDE)));
            for m in 0..MR {
                let x = repeat(q[m].add(d));
                left[m] = _mm512_fmadd_ps(k0, x, left[m]);
                right[m] = _mm512_fmadd_ps(k1, x, right[m]);
            }
        }
        for m in 0..MR {
            let s = scores.add(m * KEY_BLOCK);
            _mm512_storeu_ps(s, left[m]);
            _mm512_storeu_ps(s.add(WIDE), right[m]);
        }
        MR
    }
}

/// Adds weight x value for MR query rows. Returns MR.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn add_rows<const MR: usize>(
    weights: *const f32,
    dim: usize,
    values: *const f32,
    len: usize,
    out: *mut f32,
) -> usize {
    // SAFETY: as in `attend`.
    unsafe {
        for d in (0..dim).step_by(PAIR) {
            let two = dim - d >= PAIR;
            let second = if two { WIDE } else { 0 };
            let (mut left, mut right) = ([_mm512_setzero_ps(); MR], [_mm512_setzero_ps(); MR]);
            for m in 0..MR {
                let o = out.add(m * dim + d);
                (left[m], right[m]) = (_mm512_loadu_ps(o), _mm512_loadu_ps(o.add(second)));
            }
            let mut v = values.add(d);
            for t in 0..len {
                let (v0, v1) = (_mm512_loadu_ps(v), _mm512_loadu_ps(v.add(second)));
                for m in 0..MR {
                    let x = repeat(weights.add(m * KEY_BLOCK + t));
                    left[m] = _mm512_fmadd_ps(v0, x, left[m]);
                    right[m] = _mm512_fmadd_ps(v1, x, right[m]);
                }
                v = v.wrapping_add(dim);
            }
            for m in 0..MR {
                let o = out.add(m * dim + d);
                _mm512_storeu_ps(o, left[m]);
                if two {
                    _mm512_storeu_ps(o.add(WIDE), right[m]);
                }
            }
        }
        MR
    }
}
