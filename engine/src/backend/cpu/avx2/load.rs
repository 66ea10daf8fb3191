//! Blocks of a panel, unpacked: a lane is one of 8 outputs. Layouts: `layout.rs`.

use std::arch::x86_64::*;

use super::super::layout::{Five, Four, One, Quants, Scales, Shared, SharedHalves, Six, Two};
use super::lanes::{bytes, halves};

/// Quants into registers.
pub trait LoadQuants: Quants {
    /// Products of one `maddubs` that may be added up in i16: twice so many unsigned quants x 127, or signed ones x 255.
    const FIT: usize;
    /// A block's quants: inputs 4g .. 4g + 4 of 8 outputs, unsigned.
    ///
    /// # Safety
    /// A readable block.
    unsafe fn load(p: *const u8) -> [__m256i; 8];
}

/// Scales into registers.
pub trait LoadScales: Scales {
    /// What the blocks of a unit share.
    type Head: Copy;
    /// A unit's head.
    ///
    /// # Safety
    /// A readable unit.
    unsafe fn head(p: *const u8) -> Self::Head;
    /// The scales, and minimums + centre x scale, or the scales of inputs 16..32, or nothing.
    ///
    /// # Safety
    /// A block's readable scales.
    unsafe fn load(p: *const u8, head: Self::Head, centre: f32) -> (__m256, __m256);
}

/// The low nibbles of four lines, and the high ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibbles(p: *const u8) -> [__m256i; 8] {
    let low = _mm256_set1_epi8(15);
    // SAFETY: the caller's.
    let x = unsafe { [0, 32, 64, 96].map(|line| bytes(p.add(line))) };
    std::array::from_fn(|g| {
        let x = x[g / 2];
        _mm256_and_si256(if g % 2 == 0 { x } else { _mm256_srli_epi16::<4>(x) }, low)
    })
}

impl LoadQuants for Four {
    // 8 x 2 x 15 x 127 = 30480, 8 x 2 x 8 x 255 = 32640
    const FIT: usize = 8;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8) -> [__m256i; 8] {
        // SAFETY: the caller's.
        unsafe { nibbles(p) }
    }
}

impl LoadQuants for Five {
    // 4 x 2 x 31 x 127 = 31496, 4 x 2 x 16 x 255 = 32640
    const FIT: usize = 4;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8) -> [__m256i; 8] {
        let bit = _mm256_set1_epi8(16);
        // SAFETY: the caller's.
        let (low, h) = unsafe { (nibbles(p), bytes(p.add(128))) };
        // bit g of each byte to bit 4
        let upper = [
            _mm256_slli_epi16::<4>(h),
            _mm256_slli_epi16::<3>(h),
            _mm256_slli_epi16::<2>(h),
            _mm256_slli_epi16::<1>(h),
            h,
            _mm256_srli_epi16::<1>(h),
            _mm256_srli_epi16::<2>(h),
            _mm256_srli_epi16::<3>(h),
        ];
        std::array::from_fn(|g| _mm256_or_si256(low[g], _mm256_and_si256(upper[g], bit)))
    }
}

impl LoadQuants for Six {
    // 2 x 2 x 63 x 127 = 32004, 2 x 2 x 32 x 255 = 32640
    const FIT: usize = 2;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8) -> [__m256i; 8] {
        let bits = _mm256_set1_epi8(0x30);
        // SAFETY: the caller's.
        let (low, h) = unsafe { (nibbles(p), [128, 160].map(|line| bytes(p.add(line)))) };
        // bits 2g and 2g + 1 of each byte to bits 4 and 5
        let upper = h.map(|h| {
            [
                _mm256_slli_epi16::<4>(h),
                _mm256_slli_epi16::<2>(h),
                h,
                _mm256_srli_epi16::<2>(h),
            ]
        });
        std::array::from_fn(|g| _mm256_or_si256(low[g], _mm256_and_si256(upper[g / 4][g % 4], bits)))
    }
}

impl LoadScales for One {
    type Head = ();
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(_: *const u8) {}
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8, (): (), _: f32) -> (__m256, __m256) {
        // SAFETY: the caller's.
        (unsafe { halves(p) }, _mm256_setzero_ps())
    }
}

impl LoadScales for Two {
    type Head = ();
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(_: *const u8) {}
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8, (): (), centre: f32) -> (__m256, __m256) {
        // SAFETY: the caller's.
        let (d, min) = unsafe { (halves(p), halves(p.add(16))) };
        (d, _mm256_fmadd_ps(d, _mm256_set1_ps(centre), min))
    }
}

impl LoadScales for Shared {
    type Head = (__m256, __m256);
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(p: *const u8) -> Self::Head {
        // SAFETY: the caller's.
        unsafe { (halves(p), halves(p.add(16))) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8, (d, e): Self::Head, centre: f32) -> (__m256, __m256) {
        // SAFETY: the caller's: 16 bytes.
        let s = unsafe { _mm_loadu_si128(p.cast()) };
        let m = _mm_unpackhi_epi64(s, s);
        let d = _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(s)));
        let min = _mm256_mul_ps(e, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(m)));
        (d, _mm256_fmadd_ps(d, _mm256_set1_ps(centre), min))
    }
}

impl LoadScales for SharedHalves {
    type Head = __m256;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn head(p: *const u8) -> Self::Head {
        // SAFETY: the caller's.
        unsafe { halves(p) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const u8, d: Self::Head, _: f32) -> (__m256, __m256) {
        // SAFETY: the caller's: 16 bytes.
        let a = unsafe { _mm_loadu_si128(p.cast()) };
        let b = _mm_unpackhi_epi64(a, a);
        (
            _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(a))),
            _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b))),
        )
    }
}
