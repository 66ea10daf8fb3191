//! Helpers on one vector of 16 lanes.

use std::arch::x86_64::*;

/// One float in every lane.
///
/// # Safety
/// A readable float.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
pub unsafe fn repeat(p: *const f32) -> __m512 {
    // SAFETY: the caller's.
    _mm512_set1_ps(unsafe { *p })
}

/// 8 f16 at each of two places as f32.
///
/// # Safety
/// As many readable f16.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
pub unsafe fn half_pair(a: *const u16, b: *const u16) -> __m512 {
    // SAFETY: the caller's.
    unsafe {
        let first = _mm256_castsi128_si256(_mm_loadu_si128(a.cast()));
        _mm512_cvtph_ps(_mm256_inserti128_si256::<1>(first, _mm_loadu_si128(b.cast())))
    }
}

/// Stores 16 outputs, or adds them to what is there.
///
/// # Safety
/// 16 floats that nobody else uses.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
pub unsafe fn put(o: *mut f32, v: __m512, add: bool) {
    // SAFETY: the caller's.
    unsafe { _mm512_storeu_ps(o, if add { _mm512_add_ps(_mm512_loadu_ps(o), v) } else { v }) };
}

/// `e^x`, as the AVX2 table's.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
pub fn exp(x: __m512) -> __m512 {
    let s = |v: f32| _mm512_set1_ps(v);
    let x = _mm512_max_ps(s(-87.0), _mm512_min_ps(s(88.0), x));
    let n = _mm512_roundscale_ps::<_MM_FROUND_TO_NEAREST_INT>(_mm512_mul_ps(x, s(std::f32::consts::LOG2_E)));
    // ln 2 in two parts, so that n ln 2 is subtracted exactly
    let r = _mm512_fnmadd_ps(n, s(0.693_359_4), x);
    let r = _mm512_fnmadd_ps(n, s(-2.121_944_4e-4), r);
    let mut p = s(1.0 / 720.0);
    for c in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = _mm512_fmadd_ps(p, r, s(c));
    }
    let e = _mm512_slli_epi32::<23>(_mm512_cvtps_epi32(n));
    _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), e))
}
