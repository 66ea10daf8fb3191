//! Quantisation on 16 lanes.

use std::arch::x86_64::*;

use super::super::act::{BlockScale, Int8};
use super::super::kernels::TINY;
use super::super::layout::BLOCK;

/// See `Kernels::quantise8`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
pub unsafe fn quantise8(x: *const f32, blocks: usize, a: &Int8, row: usize, first: usize, flip: u8) {
    let at = row * (a.k / BLOCK) + first;
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    let flip = _mm_set1_epi8(flip as i8);
    for b in 0..blocks {
        // SAFETY: 32 values of the input, and block `first + b` of row `row`.
        unsafe {
            let x = x.add(b * BLOCK);
            let v = [0, 16].map(|i| _mm512_loadu_ps(x.add(i)));
            // by the bits of magnitudes: NaN beats infinity beats numbers
            let m = v.map(|v| _mm512_and_si512(_mm512_castps_si512(v), magnitude));
            let amax = f32::from_bits(_mm512_reduce_max_epi32(_mm512_max_epi32(m[0], m[1])) as u32);
            let inv = _mm512_set1_ps(if amax > TINY { 127.0 / amax } else { 0.0 });
            let i = v.map(|v| _mm512_cvtps_epi32(_mm512_mul_ps(v, inv)));
            let sums = i.map(|i| _mm512_reduce_add_epi32(i));
            let q = a.q.add((at + b) * BLOCK);
            for (half, i) in i.into_iter().enumerate() {
                let bytes = _mm_xor_si128(_mm512_cvtsepi32_epi8(i), flip);
                _mm_storeu_si128(q.add(half * 16).cast(), bytes);
            }
            let d = amax * (1.0 / 127.0);
            // a block with NaN or infinity has a sum of no meaning; its scale makes every result NaN
            let total = sums[0].wrapping_add(sums[1]);
            *a.scales.add(at + b) = BlockScale {
                d,
                s: d * total as f32,
                start: total.wrapping_mul(-8),
                first: sums[0].wrapping_mul(-8),
            };
        }
    }
}
