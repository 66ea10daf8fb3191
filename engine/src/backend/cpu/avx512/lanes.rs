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
