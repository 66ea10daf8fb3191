//! Nibble panels x int8 rows, two panels a vector: 16 outputs, nibbles unpacked in registers and used for up to 8 rows.
//! 124 instructions per 4096 multiplications; AVX2's best is 103 per 1024.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::act::{BlockScale, Int8};
use super::super::avx2;
use super::super::kernels::Out;
use super::super::pack::{BLOCK, LANES, NIBBLE_BLOCK, Panels};

/// See `Kernels::matmul_nibble`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
pub unsafe fn matmul(w: &Panels, panels: Range<usize>, a: &Int8, rows: usize, out: Out, _scratch: *mut u8) {
    // SAFETY: the caller's: panels of `w`, `rows` rows of `a` and of `out`.
    unsafe {
        let mut p = panels.start;
        while panels.end - p >= 2 {
            let panel = w.panel(p);
            let o = out.ptr.add((p - out.first_panel) * LANES);
            let mut m = 0;
            while m < rows {
                let o = o.add(m * out.ld);
                m += match rows - m {
                    1 => tile::<1, 0>(panel, w.panel_bytes(), a, m, o, out),
                    2 => tile::<2, 0>(panel, w.panel_bytes(), a, m, o, out),
                    3 => tile::<3, 0>(panel, w.panel_bytes(), a, m, o, out),
                    4 => tile::<4, 0>(panel, w.panel_bytes(), a, m, o, out),
                    5 => tile::<4, 1>(panel, w.panel_bytes(), a, m, o, out),
                    6 => tile::<4, 2>(panel, w.panel_bytes(), a, m, o, out),
                    7 => tile::<4, 3>(panel, w.panel_bytes(), a, m, o, out),
                    _ => tile::<4, 4>(panel, w.panel_bytes(), a, m, o, out),
                };
            }
            p += 2;
        }
        if p < panels.end {
            avx2::matmul_nibble_few(w, p..panels.end, a, rows, out);
        }
    }
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

/// One block of two panels, unpacked.
struct Block {
    /// Inputs 4g .. 4g + 4 of 16 outputs, unsigned.
    w: [__m512i; 8],
    /// Scales.
    d: __m512,
    /// Minimums + 8 x scale.
    min: __m512,
}

/// Two panels x (MR + MORE) rows. Returns their number. In two parts, since the compiler keeps an array of 8 sums in memory.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn tile<const MR: usize, const MORE: usize>(
    panel: *const u8,
    panel_bytes: usize,
    a: &Int8,
    m0: usize,
    o: *mut f32,
    out: Out,
) -> usize {
    // SAFETY: two panels of k / 32 blocks, rows m0 .. m0 + MR + MORE of `a` and at `o`.
    unsafe {
        let nb = a.k / BLOCK;
        let (low, eight) = (_mm512_set1_epi8(15), _mm512_set1_ps(8.0));
        let (mut acc, mut more) = ([_mm512_setzero_ps(); MR], [_mm512_setzero_ps(); MORE]);
        let mut q = a.q.add(m0 * a.k).cast_const();
        let mut scales = a.scales.add(m0 * nb).cast_const();
        let mut p = panel;
        for _ in 0..nb {
            if m0 == 0 {
                // the panels after these two, block by block
                for n in 2..4 {
                    for line in 0..3 {
                        _mm_prefetch::<_MM_HINT_T0>(p.wrapping_add(n * panel_bytes + line * 64).cast());
                    }
                }
            }
            let x = [0, 32, 64, 96].map(|line| pair(p.add(line), panel_bytes));
            let d = half_pair(p.add(128), panel_bytes);
            let block = Block {
                w: std::array::from_fn(|g| {
                    let x = x[g / 2];
                    _mm512_and_si512(if g % 2 == 0 { x } else { _mm512_srli_epi16::<4>(x) }, low)
                }),
                d,
                min: _mm512_fmadd_ps(d, eight, half_pair(p.add(144), panel_bytes)),
            };
            add_block(&block, q, a.k, scales, nb, &mut acc);
            add_block(
                &block,
                q.wrapping_add(MR * a.k),
                a.k,
                scales.wrapping_add(MR * nb),
                nb,
                &mut more,
            );
            q = q.wrapping_add(BLOCK);
            scales = scales.wrapping_add(1);
            p = p.wrapping_add(NIBBLE_BLOCK);
        }
        store(acc, o, out);
        store(more, o.wrapping_add(MR * out.ld), out);
        MR + MORE
    }
}

/// One block into the sums of N rows, `k` inputs and `nb` scales apart.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn add_block<const N: usize>(
    block: &Block,
    q: *const i8,
    k: usize,
    scales: *const BlockScale,
    nb: usize,
    acc: &mut [__m512; N],
) {
    for (m, acc) in acc.iter_mut().enumerate() {
        // SAFETY: as in `tile`.
        unsafe {
            let (q, scale) = (q.wrapping_add(m * k).cast::<i32>(), scales.wrapping_add(m * nb));
            let mut i = _mm512_set1_epi32((*scale).start);
            for (g, w) in block.w.iter().enumerate() {
                i = _mm512_dpbusd_epi32(i, *w, _mm512_set1_epi32(q.add(g).read_unaligned()));
            }
            let f = _mm512_mul_ps(_mm512_cvtepi32_ps(i), _mm512_set1_ps((*scale).d));
            *acc = _mm512_fmadd_ps(f, block.d, *acc);
            *acc = _mm512_fmadd_ps(block.min, _mm512_set1_ps((*scale).s), *acc);
        }
    }
}

/// Writes the sums of N rows.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn store<const N: usize>(acc: [__m512; N], o: *mut f32, out: Out) {
    for (m, v) in acc.into_iter().enumerate() {
        // SAFETY: as in `tile`.
        unsafe {
            let o = o.add(m * out.ld);
            _mm512_storeu_ps(
                o,
                if out.add {
                    _mm512_add_ps(_mm512_loadu_ps(o), v)
                } else {
                    v
                },
            );
        }
    }
}
