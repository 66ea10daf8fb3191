//! Blocks of two panels side by side, unpacked: a lane is one of 16 outputs. Layouts: `layout.rs`.

use std::arch::x86_64::*;

use super::super::layout::{Eight, Five, Four, One, Quants, Scales, Shared, SharedHalves, Six, Two};

/// A block of two panels.
pub struct Block {
    /// Inputs 4g .. 4g + 4 of 16 outputs, unsigned.
    pub w: [__m512i; 8],
    /// Scales; where there are two, those of inputs 0..16.
    pub a: __m512,
    /// Minimums + centre x scale, or scales of inputs 16..32, or nothing.
    pub b: __m512,
}

/// Quants into registers.
pub trait LoadQuants: Quants {
    /// A block's quants.
    ///
    /// # Safety
    /// Readable blocks at `p` and `second` bytes behind it.
    unsafe fn load(p: *const u8, second: usize) -> [__m512i; 8];
}

/// Scales into registers.
pub trait LoadScales: Scales {
    /// What the blocks of a unit share.
    type Head: Copy;
    /// A unit's head.
    ///
    /// # Safety
    /// Readable units at `p` and `second` bytes behind it.
    unsafe fn head(p: *const u8, second: usize) -> Self::Head;
    /// [`Block::a`] and [`Block::b`].
    ///
    /// # Safety
    /// Readable scales at `p` and `second` bytes behind it.
    unsafe fn load(p: *const u8, second: usize, head: Self::Head, centre: f32) -> (__m512, __m512);
}

/// 32 bytes of each panel.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn pair(p: *const u8, second: usize) -> __m512i {
    // SAFETY: the caller's: 32 readable bytes at both.
    unsafe {
        let first = _mm512_castsi256_si512(_mm256_loadu_si256(p.cast()));
        _mm512_inserti64x4::<1>(first, _mm256_loadu_si256(p.add(second).cast()))
    }
}

/// 8 f16 of each panel as f32.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn half_pair(p: *const u8, second: usize) -> __m512 {
    // SAFETY: the caller's: 16 readable bytes at both.
    unsafe {
        let first = _mm256_castsi128_si256(_mm_loadu_si128(p.cast()));
        _mm512_cvtph_ps(_mm256_inserti128_si256::<1>(
            first,
            _mm_loadu_si128(p.add(second).cast()),
        ))
    }
}

/// Two rows of 8 bytes of each panel: the first rows, the second rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn byte_pairs(p: *const u8, second: usize) -> (__m128i, __m128i) {
    // SAFETY: the caller's: 16 readable bytes at both.
    unsafe {
        let (a, b) = (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(second).cast()));
        (_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b))
    }
}

/// The low nibbles of four lines, and the high ones.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn nibbles(p: *const u8, second: usize) -> [__m512i; 8] {
    let low = _mm512_set1_epi8(15);
    // SAFETY: the caller's.
    let x = unsafe { [0, 32, 64, 96].map(|line| pair(p.add(line), second)) };
    std::array::from_fn(|g| {
        let x = x[g / 2];
        _mm512_and_si512(if g % 2 == 0 { x } else { _mm512_srli_epi16::<4>(x) }, low)
    })
}

impl LoadQuants for Four {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn load(p: *const u8, second: usize) -> [__m512i; 8] {
        // SAFETY: the caller's.
        unsafe { nibbles(p, second) }
    }
}

impl LoadQuants for Five {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn load(p: *const u8, second: usize) -> [__m512i; 8] {
        let bit = _mm512_set1_epi8(16);
        // SAFETY: the caller's.
        let (low, h) = unsafe { (nibbles(p, second), pair(p.add(128), second)) };
        // bit g of each byte to bit 4
        let upper = [
            _mm512_slli_epi16::<4>(h),
            _mm512_slli_epi16::<3>(h),
            _mm512_slli_epi16::<2>(h),
            _mm512_slli_epi16::<1>(h),
            h,
            _mm512_srli_epi16::<1>(h),
            _mm512_srli_epi16::<2>(h),
            _mm512_srli_epi16::<3>(h),
        ];
        std::array::from_fn(|g| _mm512_or_si512(low[g], _mm512_and_si512(upper[g], bit)))
    }
}

impl LoadQuants for Six {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn load(p: *const u8, second: usize) -> [__m512i; 8] {
        let bits = _mm512_set1_epi8(0x30);
        // SAFETY: the caller's.
        let (low, h) = unsafe { (nibbles(p, second), [128, 160].map(|line| pair(p.add(line), second))) };
        // bits 2g and 2g + 1 of each byte to bits 4 and 5
        let upper = h.map(|h| {
            [
                _mm512_slli_epi16::<4>(h),
                _mm512_slli_epi16::<2>(h),
                h,
                _mm512_srli_epi16::<2>(h),
            ]
        });
        std::array::from_fn(|g| _mm512_or_si512(low[g], _mm512_and_si512(upper[g / 4][g % 4], bits)))
    }
}

impl LoadQuants for Eight {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn load(p: *const u8, second: usize) -> [__m512i; 8] {
        // SAFETY: the caller's.
        unsafe { [0, 32, 64, 96, 128, 160, 192, 224].map(|line| pair(p.add(line), second)) }
    }
}

impl LoadScales for One {
    type Head = ();
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn head(_: *const u8, _: usize) {}
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn load(p: *const u8, second: usize, (): (), _: f32) -> (__m512, __m512) {
        // SAFETY: the caller's.
        (unsafe { half_pair(p, second) }, _mm512_setzero_ps())
    }
}

impl LoadScales for Two {
    type Head = ();
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn head(_: *const u8, _: usize) {}
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn load(p: *const u8, second: usize, (): (), centre: f32) -> (__m512, __m512) {
        // SAFETY: the caller's.
        let (d, min) = unsafe { (half_pair(p, second), half_pair(p.add(16), second)) };
        (d, _mm512_fmadd_ps(d, _mm512_set1_ps(centre), min))
    }
}

impl LoadScales for Shared {
    type Head = (__m512, __m512);
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn head(p: *const u8, second: usize) -> Self::Head {
        // SAFETY: the caller's.
        unsafe { (half_pair(p, second), half_pair(p.add(16), second)) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn load(p: *const u8, second: usize, (d, e): Self::Head, centre: f32) -> (__m512, __m512) {
        // SAFETY: the caller's.
        let (s, m) = unsafe { byte_pairs(p, second) };
        let d = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(s)));
        let min = _mm512_mul_ps(e, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(m)));
        (d, _mm512_fmadd_ps(d, _mm512_set1_ps(centre), min))
    }
}

impl LoadScales for SharedHalves {
    type Head = __m512;
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn head(p: *const u8, second: usize) -> Self::Head {
        // SAFETY: the caller's.
        unsafe { half_pair(p, second) }
    }
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn load(p: *const u8, second: usize, d: Self::Head, _: f32) -> (__m512, __m512) {
        // SAFETY: the caller's.
        let (a, b) = unsafe { byte_pairs(p, second) };
        (
            _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(a))),
            _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b))),
        )
    }
}
