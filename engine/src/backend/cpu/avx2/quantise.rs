//! What happens to one row between two matmuls.

use std::arch::x86_64::*;

use super::super::act::{BlockScale, Int8};
use super::super::kernels::{TINY, inverse_rms};
use super::super::layout::BLOCK;
use super::lanes::{exp, largest_bits, magnitude_bits, repeat, sum};

/// See `Kernels::rms_norm`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn rms_norm(x: *const f32, w: *const f32, n: usize, eps: f32, out: *mut f32) {
    // SAFETY: n values each, n a multiple of 8.
    unsafe {
        let mut s = [_mm256_setzero_ps(); 4];
        for i in (0..n).step_by(32) {
            // the last part of a narrow head is shorter
            for (j, s) in s.iter_mut().enumerate().take((n - i) / 8) {
                let v = _mm256_loadu_ps(x.add(i + j * 8));
                *s = _mm256_fmadd_ps(v, v, *s);
            }
        }
        let total = sum(_mm256_add_ps(_mm256_add_ps(s[0], s[1]), _mm256_add_ps(s[2], s[3])));
        let r = _mm256_set1_ps(inverse_rms(total / n as f32, eps));
        for i in (0..n).step_by(8) {
            let v = _mm256_mul_ps(_mm256_loadu_ps(x.add(i)), r);
            _mm256_storeu_ps(out.add(i), _mm256_mul_ps(v, _mm256_loadu_ps(w.add(i))));
        }
    }
}

/// See `Kernels::quantise8`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn quantise8(x: *const f32, blocks: usize, a: &Int8, row: usize, first: usize, flip: u8) {
    let at = row * (a.k / BLOCK) + first;
    for b in 0..blocks {
        // SAFETY: 32 values of the input, and block `first + b` of row `row`.
        unsafe {
            let x = x.add(b * BLOCK);
            let v = [0, 8, 16, 24].map(|i| _mm256_loadu_ps(x.add(i)));
            let m = v.map(|v| magnitude_bits(v));
            let amax = largest_bits(_mm256_max_epi32(
                _mm256_max_epi32(m[0], m[1]),
                _mm256_max_epi32(m[2], m[3]),
            ));
            let inv = _mm256_set1_ps(if amax > TINY { 127.0 / amax } else { 0.0 });
            let i = v.map(|v| _mm256_cvtps_epi32(_mm256_mul_ps(v, inv)));
            // exact: at most 32 x 127
            let first = sum(_mm256_cvtepi32_ps(_mm256_add_epi32(i[0], i[1])));
            let total = first + sum(_mm256_cvtepi32_ps(_mm256_add_epi32(i[2], i[3])));
            let w = _mm256_packs_epi16(_mm256_packs_epi32(i[0], i[1]), _mm256_packs_epi32(i[2], i[3]));
            let w = _mm256_permutevar8x32_epi32(w, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            let q = a.q.add((at + b) * BLOCK);
            _mm256_storeu_si256(q.cast(), _mm256_xor_si256(w, _mm256_set1_epi8(flip as i8)));
            let d = amax * (1.0 / 127.0);
            // a block with NaN or infinity has a sum of no meaning; its scale makes every result NaN
            *a.scales.add(at + b) = BlockScale {
                d,
                s: d * total,
                start: (total as i32).wrapping_mul(-8),
                first: (first as i32).wrapping_mul(-8),
            };
        }
    }
}

/// See `Kernels::rope`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn rope(x: *mut f32, dim: usize, table: *const f32, scale: f32) {
    // SAFETY: dim values each, dim a multiple of 8.
    unsafe {
        let scale = _mm256_set1_ps(scale);
        for i in (0..dim).step_by(8) {
            let v = _mm256_loadu_ps(x.add(i));
            let t = _mm256_loadu_ps(table.add(i));
            let swapped = _mm256_permute_ps::<0b10_11_00_01>(v);
            // even lanes a c - b s, odd ones b c + a s
            let r = _mm256_addsub_ps(
                _mm256_mul_ps(v, _mm256_moveldup_ps(t)),
                _mm256_mul_ps(swapped, _mm256_movehdup_ps(t)),
            );
            _mm256_storeu_ps(x.add(i), _mm256_mul_ps(r, scale));
        }
    }
}

/// See `Kernels::write_kv`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn write_kv(key: *const f32, value: *const f32, dim: usize, k: *mut u16, v: *mut u16) {
    // SAFETY: dim values each, dim a multiple of 8; keys lie 8 elements apart.
    unsafe {
        for i in (0..dim).step_by(8) {
            let mut h = [0u16; 8];
            let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(key.add(i)));
            _mm_storeu_si128(h.as_mut_ptr().cast(), rounded);
            for (j, h) in h.iter().enumerate() {
                *k.add((i + j) * 8) = *h;
            }
            let rounded = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(value.add(i)));
            _mm_storeu_si128(v.add(i).cast(), rounded);
        }
    }
}

/// See `Kernels::silu_mul`.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn silu_mul(x: *const f32, out: *mut f32) {
    // SAFETY: 64 values in, 32 out.
    unsafe {
        let one = repeat(&1.0);
        for i in (0..BLOCK).step_by(8) {
            let g = _mm256_loadu_ps(x.add(i));
            let y = _mm256_div_ps(g, _mm256_add_ps(one, exp(_mm256_sub_ps(_mm256_setzero_ps(), g))));
            _mm256_storeu_ps(out.add(i), _mm256_mul_ps(y, _mm256_loadu_ps(x.add(BLOCK + i))));
        }
    }
}
