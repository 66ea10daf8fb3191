//! Helpers on one vector of 8 lanes. All are inlined into functions of the same target features; otherwise vectors would pass
//! through memory.

use std::arch::x86_64::*;

/// Sum of the lanes, always in this order.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub fn sum(v: __m256) -> f32 {
    let s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    let s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)))
}

/// Largest lane, by the bits of non-negative floats: NaN beats infinity beats numbers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub fn largest_bits(v: __m256i) -> f32 {
    let m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    let m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0b00_00_11_10));
    let m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0b00_00_00_01));
    f32::from_bits(_mm_cvtsi128_si32(m) as u32)
}

/// Largest lane of numbers.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub fn largest(v: __m256) -> f32 {
    let m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    let m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)))
}

/// Magnitudes, as bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub fn magnitude_bits(v: __m256) -> __m256i {
    _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fff_ffff))
}

/// `e^x` to about 1 ulp for x in -87..88, clamped outside (so no denormals); NaN stays NaN: min and max give their second operand then.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub fn exp(x: __m256) -> __m256 {
    let s = |v: f32| _mm256_set1_ps(v);
    let x = _mm256_max_ps(s(-87.0), _mm256_min_ps(s(88.0), x));
    let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
        x,
        s(std::f32::consts::LOG2_E),
    ));
    // ln 2 in two parts, so that n ln 2 is subtracted exactly
    let r = _mm256_fnmadd_ps(n, s(0.693_359_4), x);
    let r = _mm256_fnmadd_ps(n, s(-2.121_944_4e-4), r);
    let mut p = s(1.0 / 720.0);
    for c in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = _mm256_fmadd_ps(p, r, s(c));
    }
    let e = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
    _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), e))
}

/// 8 f16 as f32.
///
/// # Safety
/// 16 readable bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn halves(p: *const u8) -> __m256 {
    // SAFETY: the caller's.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(p.cast()) })
}

/// 32 bytes.
///
/// # Safety
/// 32 readable bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn bytes(p: *const u8) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

/// 4 bytes in every lane.
///
/// # Safety
/// 4 readable bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn repeat4(p: *const u8) -> __m256i {
    // SAFETY: the caller's.
    _mm256_set1_epi32(unsafe { p.cast::<i32>().read_unaligned() })
}

/// One float in every lane.
///
/// # Safety
/// A readable float.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn repeat(p: *const f32) -> __m256 {
    // SAFETY: the caller's.
    _mm256_set1_ps(unsafe { *p })
}

/// Asks for `lines` cache lines from `p` on. Any address will do: a prefetch never faults.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub fn fetch(p: *const u8, lines: usize) {
    for i in 0..lines {
        _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(i * 64).cast());
    }
}

/// Stores 8 outputs, or adds them to what is there.
///
/// # Safety
/// 8 floats that nobody else uses.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn put(o: *mut f32, v: __m256, add: bool) {
    // SAFETY: the caller's.
    unsafe { _mm256_storeu_ps(o, if add { _mm256_add_ps(_mm256_loadu_ps(o), v) } else { v }) };
}
