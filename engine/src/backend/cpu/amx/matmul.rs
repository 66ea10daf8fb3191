//! Quantised panels x many int8 rows. A tile instruction gives the sums over a block of 32 inputs for 16 rows x 16 outputs; vectors scale
//! and add them up, two instructions on the one port that is left for them a row of 16 outputs, or three with a minimum.
//!
//! The work is cut into units: 32 outputs x a piece of k x 16 rows. While the vectors add up one unit's sums, the tiles make the
//! next one's. What both take from the weights is unpacked once for all rows.
//!
//! A sum becomes a float without a conversion, which would need that port too: 0x4b40_0000 is added as an integer, which makes
//! it the float 1.5 x 2^23 + sum, and `fma(that, d, -1.5 x 2^23 d)` is sum x d, rounded once: the product with d is
//! exact, since no scale of weights has more than 19 bits.

use std::arch::x86_64::*;

use super::super::act::Int8;
use super::super::avx512::{
    self,
    load::{LoadQuants, LoadScales},
};
use super::super::kernels::{MATMUL_SCRATCH, Out, ROW_BLOCK};
use super::super::layout::{BLOCK, Eight, Five, Form, Four, LANES, One, Shared, SharedHalves, Six, Two};
use super::super::pack::Part;
use super::tiles::{SIDE, SUMS, Tiles};
use crate::model::Dtype;

/// From this many rows on tiles are faster than the AVX-512 kernel: 1.15 times at 16 rows, 1.25 times at 128 (Q4_1, cores busy).
const LEAST_ROWS: usize = 16;
/// Panels of a unit: two tiles of 16 outputs.
const PANELS: usize = 4;
/// Outputs of a unit.
const OUTPUTS: usize = PANELS * LANES;
/// Sums of a unit for each output and row: one a block, or two. Twice as many no longer stay in the first-level cache, and cost 10 %.
const PIECE: usize = 4;
/// Rows of a register tile: 8 x 32 outputs are 16 accumulators.
const HALF: usize = SIDE / 2;
/// Bytes of the unpacked weights of 16 outputs that make up a sum: signed quants, d, -1.5 x 2^23 d, minimum.
const UNPACKED: usize = BLOCK * SIDE + 3 * 64;
/// Where the scales lie in them.
const SCALES: usize = BLOCK * SIDE;
/// An integer that turns a sum into a float, and that float.
const MAGIC: (i32, f32) = (0x4b40_0000, 12_582_912.0);

const SUMS_BYTES: usize = PIECE * 2 * SUMS;
const WEIGHTS_BYTES: usize = PIECE * 2 * UNPACKED;
const _: () = assert!(2 * (SUMS_BYTES + WEIGHTS_BYTES) + ROW_BLOCK * OUTPUTS * 4 <= MATMUL_SCRATCH);

/// See `Kernels::matmul_int8`.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
pub unsafe fn matmul(w: &Part, a: &Int8, rows: usize, out: Out, scratch: *mut u8) {
    // SAFETY: the caller's: panels of that type, `rows` rows of `a` and of `out`, MATMUL_SCRATCH bytes.
    unsafe {
        if rows < LEAST_ROWS || w.panels < PANELS {
            return avx512::matmul(w, a, rows, out, scratch);
        }
        match w.dtype {
            Dtype::Q4_0 => run::<Four, One>(w, a, rows, out, scratch),
            Dtype::Q4_1 => run::<Four, Two>(w, a, rows, out, scratch),
            Dtype::Q5_0 => run::<Five, One>(w, a, rows, out, scratch),
            Dtype::Q5_1 => run::<Five, Two>(w, a, rows, out, scratch),
            Dtype::Q8_0 => run::<Eight, One>(w, a, rows, out, scratch),
            Dtype::Q4K => run::<Four, Shared>(w, a, rows, out, scratch),
            Dtype::Q5K => run::<Five, Shared>(w, a, rows, out, scratch),
            Dtype::Q6K => run::<Six, SharedHalves>(w, a, rows, out, scratch),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => {}
        }
        if !w.panels.is_multiple_of(PANELS) {
            avx512::matmul(&w.skip(w.panels / PANELS * PANELS), a, rows, out, scratch);
        }
    }
}

/// 32 outputs x some blocks x up to 16 rows.
#[derive(Clone, Copy)]
struct Unit {
    /// The first of its panels.
    panel: usize,
    /// Its first block, and how many.
    block: usize,
    blocks: usize,
    /// Its first row, and how many.
    row: usize,
    rows: usize,
    /// Sums over the blocks before it, `[rows][32]`.
    partial: *mut f32,
    /// Its weights, unpacked, and its sums: the tiles of 16 outputs in turn, sum by sum.
    weights: *mut u8,
    sums: *mut i32,
}

/// What all units share.
struct Job<'a> {
    w: &'a Part,
    a: &'a Int8,
    out: Out,
    tiles: Tiles,
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn run<Q: LoadQuants, S: LoadScales>(w: &Part, a: &Int8, rows: usize, out: Out, scratch: *mut u8) {
    // SAFETY: as in `matmul`; the scratch's size is asserted above.
    unsafe {
        let job = Job {
            w,
            a,
            out,
            tiles: Tiles::new(),
        };
        let nb = a.k / BLOCK;
        let pieces = nb.div_ceil(PIECE / sums_of_block::<S>());
        let sums = [scratch.cast::<i32>(), scratch.add(SUMS_BYTES).cast()];
        let weights = [2 * SUMS_BYTES, 2 * SUMS_BYTES + WEIGHTS_BYTES].map(|at| scratch.add(at));
        let partial = scratch.add(2 * (SUMS_BYTES + WEIGHTS_BYTES)).cast::<f32>();
        let mut before: Option<Unit> = None;
        let (mut turn, mut unpacked) = (0, 0);
        for panel in (0..=w.panels - PANELS).step_by(PANELS) {
            for r0 in (0..rows).step_by(ROW_BLOCK) {
                for piece in 0..pieces {
                    let block = nb * piece / pieces;
                    let blocks = nb * (piece + 1) / pieces - block;
                    // the unit before still needs the other one's scales
                    unpacked ^= 1;
                    unpack::<Q, S>(w, panel, block, blocks, weights[unpacked]);
                    for row in (r0..rows.min(r0 + ROW_BLOCK)).step_by(SIDE) {
                        turn ^= 1;
                        let unit = Unit {
                            panel,
                            block,
                            blocks,
                            row,
                            rows: SIDE.min(rows - row),
                            partial: partial.add((row - r0) * OUTPUTS),
                            weights: weights[unpacked],
                            sums: sums[turn],
                        };
                        job.add_up::<S>(before.as_ref(), Some(&unit));
                        before = Some(unit);
                    }
                }
            }
        }
        job.add_up::<S>(before.as_ref(), None);
    }
}

/// Sums that a block is made of.
const fn sums_of_block<S: LoadScales>() -> usize {
    if matches!(S::FORM, Form::Halves) { 2 } else { 1 }
}

/// Blocks of 4 panels as signed bytes and f32 scales.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn unpack<Q: LoadQuants, S: LoadScales>(w: &Part, panel: usize, block: usize, blocks: usize, out: *mut u8) {
    // SAFETY: as in `matmul`; `out` has room for PIECE sums and is aligned to 64.
    unsafe {
        let centre = _mm512_set1_epi8(Q::CENTRE as i8);
        let minus_magic = _mm512_set1_ps(-MAGIC.1);
        let bytes = Q::BYTES + S::BYTES;
        let second = w.stride;
        let mut o = out;
        for b in block..block + blocks {
            let unit = b / S::BLOCKS * (S::HEAD + S::BLOCKS * bytes);
            let at = unit + S::HEAD + b % S::BLOCKS * bytes;
            for pair in [panel, panel + 2] {
                let first = w.panel(pair);
                let p = first.add(at);
                for panels_on in PANELS..PANELS + 2 {
                    // the same blocks of the next outputs, on their way meanwhile
                    for line in 0..bytes.div_ceil(64) {
                        _mm_prefetch::<_MM_HINT_T1>(p.wrapping_add(panels_on * second + line * 64).cast());
                    }
                }
                let quants = Q::load(p, second);
                let (d, b) = S::load(
                    p.add(Q::BYTES),
                    second,
                    S::head(first.add(unit), second),
                    f32::from(Q::CENTRE),
                );
                let scales = |o: *mut u8, d: __m512, min: __m512| {
                    let s = o.add(SCALES).cast::<f32>();
                    _mm512_store_ps(s, d);
                    _mm512_store_ps(s.add(16), _mm512_mul_ps(d, minus_magic));
                    _mm512_store_ps(s.add(32), min);
                };
                for (g, q) in quants.into_iter().enumerate() {
                    // half a block is a sum of its own
                    let (sum, line) = if S::FORM == Form::Halves {
                        (g / 4, g % 4)
                    } else {
                        (0, g)
                    };
                    let o = o.add(2 * sum * UNPACKED + line * 64);
                    _mm512_store_si512(o.cast(), _mm512_sub_epi8(q, centre));
                }
                scales(o, d, b);
                if S::FORM == Form::Halves {
                    scales(o.add(2 * UNPACKED), b, b);
                }
                o = o.add(UNPACKED);
            }
            o = o.add(2 * (sums_of_block::<S>() - 1) * UNPACKED);
        }
    }
}

/// The tiles' part of a unit, product by product.
struct Products<'a, S> {
    job: &'a Job<'a>,
    unit: Option<&'a Unit>,
    /// Of them, how many are made and how many there are.
    made: usize,
    all: usize,
    form: std::marker::PhantomData<S>,
}

impl<S: LoadScales> Products<'_, S> {
    /// Makes the next product, and stores the one before, which is done by now.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn next(&mut self) {
        let Some(unit) = self.unit.filter(|_| self.made < self.all) else {
            return;
        };
        let (i, tiles, a) = (self.made, &self.job.tiles, self.job.a);
        // SAFETY: as in `matmul`: inputs lie in whole tiles of rows.
        unsafe {
            let weights = unit.weights.add(i * UNPACKED);
            if i % 2 == 1 {
                if S::FORM == Form::Halves {
                    tiles.multiply::<true, true>(a.q, a.k, weights);
                } else {
                    tiles.multiply::<true, false>(a.q, a.k, weights);
                }
                tiles.store::<false>(unit.sums.add((i - 1) * SIDE * SIDE));
            } else {
                let row = a.q.add(unit.row * a.k + unit.block * BLOCK);
                if S::FORM == Form::Halves {
                    tiles.multiply::<false, true>(row.add(i / 2 * BLOCK / 2), a.k, weights);
                } else {
                    tiles.multiply::<false, false>(row.add(i / 2 * BLOCK), a.k, weights);
                }
                if i > 0 {
                    tiles.store::<true>(unit.sums.add((i - 1) * SIDE * SIDE));
                }
            }
        }
        self.made += 1;
    }

    /// Makes those that are left, and stores the last one.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn finish(mut self) {
        // SAFETY: as in `next`.
        unsafe {
            while self.made < self.all {
                self.next();
            }
            if let Some(unit) = self.unit {
                self.job
                    .tiles
                    .store::<true>(unit.sums.add((self.all - 1) * SIDE * SIDE));
            }
        }
    }
}

impl Job<'_> {
    /// Adds up one unit's sums while the tiles make those of the next.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn add_up<S: LoadScales>(&self, unit: Option<&Unit>, next: Option<&Unit>) {
        // SAFETY: as in `matmul`.
        unsafe {
            let mut products = Products::<S> {
                job: self,
                unit: next,
                made: 0,
                all: next.map_or(0, |u| 2 * u.blocks * sums_of_block::<S>()),
                form: std::marker::PhantomData,
            };
            if let Some(unit) = unit {
                let twice = unit.rows <= HALF;
                for first in (0..unit.rows).step_by(HALF) {
                    self.add_up_half::<S>(unit, first, twice, &mut products);
                }
            }
            products.finish();
        }
    }

    /// 8 rows of a unit, from its row `first` on.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
    unsafe fn add_up_half<S: LoadScales>(
        &self,
        unit: &Unit,
        first: usize,
        twice: bool,
        products: &mut Products<'_, S>,
    ) {
        // SAFETY: as in `matmul`: inputs and partial sums lie in whole tiles of rows.
        unsafe {
            let nb = self.a.k / BLOCK;
            let partial = unit.partial.add(first * OUTPUTS);
            let (mut left, mut right) = ([_mm512_setzero_ps(); HALF], [_mm512_setzero_ps(); HALF]);
            if unit.block > 0 {
                for m in 0..HALF {
                    left[m] = _mm512_load_ps(partial.add(m * OUTPUTS));
                    right[m] = _mm512_load_ps(partial.add(m * OUTPUTS + SIDE));
                }
            }
            let scales = self.a.scales.add((unit.row + first) * nb + unit.block).cast_const();
            let mut sums = unit.sums.add(first * SIDE).cast_const();
            let mut weights = unit.weights.add(SCALES).cast_const().cast::<f32>();
            let magic = _mm512_set1_epi32(MAGIC.0);
            for i in 0..unit.blocks * sums_of_block::<S>() {
                products.next();
                if twice {
                    products.next();
                }
                let of_right = weights.add(UNPACKED / 4);
                let (d, e) = (_mm512_load_ps(weights), _mm512_load_ps(of_right));
                let (back, back_e) = (_mm512_load_ps(weights.add(16)), _mm512_load_ps(of_right.add(16)));
                for m in 0..HALF {
                    let scale = scales.add(m * nb + i / sums_of_block::<S>());
                    let da = _mm512_set1_ps((*scale).d);
                    let product = |at: *const i32, d: __m512, back: __m512| {
                        let sum = _mm512_add_epi32(_mm512_load_si512(at.cast()), magic);
                        _mm512_fmadd_ps(_mm512_castsi512_ps(sum), d, back)
                    };
                    left[m] = _mm512_fmadd_ps(product(sums.add(m * SIDE), d, back), da, left[m]);
                    right[m] = _mm512_fmadd_ps(product(sums.add(SIDE * SIDE + m * SIDE), e, back_e), da, right[m]);
                    if S::FORM == Form::Minimum {
                        let s = _mm512_set1_ps((*scale).s);
                        left[m] = _mm512_fmadd_ps(_mm512_load_ps(weights.add(32)), s, left[m]);
                        right[m] = _mm512_fmadd_ps(_mm512_load_ps(of_right.add(32)), s, right[m]);
                    }
                }
                sums = sums.add(2 * SIDE * SIDE);
                weights = weights.add(2 * UNPACKED / 4);
            }
            if unit.block + unit.blocks < nb {
                for m in 0..HALF {
                    _mm512_store_ps(partial.add(m * OUTPUTS), left[m]);
                    _mm512_store_ps(partial.add(m * OUTPUTS + SIDE), right[m]);
                }
            } else {
                let o = self
                    .out
                    .panel(self.w.first + unit.panel)
                    .add((unit.row + first) * self.out.ld);
                for m in 0..HALF.min(unit.rows - first) {
                    avx512::put(o.add(m * self.out.ld), left[m], self.out.add);
                    avx512::put(o.add(m * self.out.ld + SIDE), right[m], self.out.add);
                }
            }
        }
    }
}
