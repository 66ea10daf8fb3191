//! Every fast kernel against its scalar twin, on fresh random inputs and on the extremes that could saturate or overflow.

use half::f16;

use super::act::{Act, ActKind};
use super::kernels::{Attention, Isa, Kernels, MATMUL_SCRATCH, Out};
use super::memory::Memory;
use super::pack::{BLOCK, LANES, Panels};
use super::pool::Pool;
use super::scalar;
use crate::backend::Row;
use crate::model::{Dtype, dequantise_row};

/// Fresh numbers on each run; the seed is in the failure's message.
struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    fn fresh() -> Self {
        use std::hash::{BuildHasher, RandomState};
        let seed = RandomState::new().hash_one(0);
        Self { seed, state: seed }
    }
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
    fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }
}

/// The tables to compare with the scalar one.
fn fast() -> Vec<(Isa, Kernels)> {
    let all: Vec<_> = Isa::ALL
        .into_iter()
        .filter_map(|isa| isa.kernels().ok().map(|k| (isa, k)))
        .collect();
    assert!(all.iter().any(|(isa, _)| *isa == Isa::Scalar));
    let fast: Vec<_> = all.into_iter().filter(|(isa, _)| *isa != Isa::Scalar).collect();
    if fast.is_empty() {
        eprintln!("skipped: this CPU has no instruction set with kernels of its own");
        assert!(std::env::var("CI").is_err(), "CI needs a CPU with AVX2");
    }
    fast
}

/// Aligned floats that a kernel may write.
struct Floats(Memory, usize);

impl Floats {
    fn new(n: usize) -> Self {
        Self(Memory::zeroed("a test", n * 4, false).unwrap(), n)
    }
    fn of(values: &[f32]) -> Self {
        let f = Self::new(values.len());
        // SAFETY: as many floats.
        unsafe { f.0.ptr::<f32>().copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        f
    }
    fn get(&self) -> Vec<f32> {
        // SAFETY: as many floats, and no kernel runs now.
        unsafe { std::slice::from_raw_parts(self.0.ptr::<f32>(), self.1) }.to_vec()
    }
    fn ptr(&self) -> *mut f32 {
        self.0.ptr()
    }
}

/// Largest difference, relative to the largest magnitude.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    let scale = a.iter().chain(b).fold(1e-20f32, |m, v| m.max(v.abs()));
    a.iter().zip(b).fold(0.0f32, |m, (x, y)| m.max((x - y).abs())) / scale
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

/// Random bytes of `n` rows of `k` values; with `extreme`, every quant at its end of the range and scales of one size.
fn weights(r: &mut Random, dtype: Dtype, n: usize, k: usize, extreme: Option<u8>) -> Vec<Vec<u8>> {
    let half = |v: f32| f16::from_f32(v).to_le_bytes();
    let mut row = || -> Vec<u8> {
        let mut out = Vec::new();
        match dtype {
            Dtype::F32 => r.values(k, 1.0).iter().for_each(|v| out.extend(v.to_le_bytes())),
            Dtype::F16 => r.values(k, 1.0).iter().for_each(|v| out.extend(half(*v))),
            Dtype::Bf16 => r
                .values(k, 1.0)
                .iter()
                .for_each(|v| out.extend(half::bf16::from_f32(*v).to_le_bytes())),
            Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q8_0 => {
                for _ in 0..k / BLOCK {
                    out.extend(half(0.1 + 0.05 * r.unit()));
                    if dtype == Dtype::Q4_1 {
                        out.extend(half(-0.8 + 0.1 * r.unit()));
                    }
                    let bytes = if dtype == Dtype::Q8_0 { 32 } else { 16 };
                    out.extend((0..bytes).map(|_| {
                        let any = r.next() as u8;
                        // the format's writers never make -128
                        extreme.unwrap_or(if dtype == Dtype::Q8_0 && any == 0x80 { 0x81 } else { any })
                    }));
                }
            }
            other => panic!("no rows are made in {}", other.name()),
        }
        out
    };
    (0..n).map(|_| row()).collect()
}

fn pack(rows: &[Vec<u8>], dtype: Dtype, k: usize) -> Panels {
    let rows: Vec<Row<'_>> = rows.iter().map(|bytes| Row { dtype, bytes }).collect();
    Panels::pack(&rows, k, &mut Pool::new(2).unwrap()).unwrap()
}

/// `x` through quantisation and a matmul of one table, as `[rows][padded n]`, added to `start`.
fn multiply(t: &Kernels, w: &Panels, x: &[f32], rows: usize, start: Option<&[f32]>, parts: usize) -> Vec<f32> {
    let (k, ld) = (w.k(), w.panels() * LANES);
    let memory = Memory::zeroed("a test", Act::bytes(rows, k), false).unwrap();
    let scratch = Memory::zeroed("a test", MATMUL_SCRATCH, false).unwrap();
    let a = Act::new(memory.ptr(), rows, k);
    let x = Floats::of(x);
    let out = start.map_or_else(|| Floats::new(rows * ld), Floats::of);
    let to = Out {
        ptr: out.ptr(),
        ld,
        first_panel: 0,
        add: start.is_some(),
    };
    let flip = t.flip(rows);
    for p in 0..parts {
        let panels = super::pool::share(w.panels(), 1, p, parts);
        // SAFETY: buffers of these sizes, one thread.
        unsafe {
            match w.kind().act() {
                ActKind::Int8 => {
                    (0..rows).for_each(|r| (t.quantise8)(x.ptr().add(r * k), k / BLOCK, &a.int8(), r, 0, flip));
                    (t.matmul_nibble)(w, panels, &a.int8(), rows, to, scratch.ptr());
                }
                ActKind::Int16 => {
                    (0..rows).for_each(|r| (t.quantise16)(x.ptr().add(r * k), &a.int16(), r));
                    (t.matmul_byte)(w, panels, &a.int16(), rows, to, scratch.ptr());
                }
                ActKind::Float => {
                    a.float().x.copy_from_nonoverlapping(x.ptr(), rows * k);
                    (t.matmul_float)(w, panels, &a.float(), rows, to);
                }
            }
        }
    }
    out.get()
}

const DTYPES: [Dtype; 6] = [
    Dtype::Q4_0,
    Dtype::Q4_1,
    Dtype::Q8_0,
    Dtype::F32,
    Dtype::F16,
    Dtype::Bf16,
];

#[test]
fn packing_loses_nothing() {
    let mut r = Random::fresh();
    for dtype in DTYPES {
        for (n, k) in [(1, 32), (8, 64), (13, 96), (40, 608)] {
            let rows = weights(&mut r, dtype, n, k, None);
            let packed = pack(&rows, dtype, k);
            let (mut got, mut expected) = (vec![0.0; k], vec![0.0; k]);
            for (i, row) in rows.iter().enumerate() {
                packed.row(i, &mut got);
                dequantise_row(dtype, row, &mut expected);
                assert_eq!(
                    bits(&got),
                    bits(&expected),
                    "{dtype:?} row {i} of {n} x {k}, seed {}",
                    r.seed
                );
            }
        }
    }
}

#[test]
fn rows_of_different_types_are_packed_as_they_are() {
    let mut r = Random::fresh();
    let (a, b) = (
        weights(&mut r, Dtype::Q4_1, 5, 64, None),
        weights(&mut r, Dtype::Q8_0, 6, 64, None),
    );
    let row = |dtype| move |bytes| Row { dtype, bytes };
    let rows: Vec<Row<'_>> = a
        .iter()
        .map(Vec::as_slice)
        .map(row(Dtype::Q4_1))
        .chain(b.iter().map(Vec::as_slice).map(row(Dtype::Q8_0)))
        .collect();
    let packed = Panels::pack(&rows, 64, &mut Pool::new(1).unwrap()).unwrap();
    let (mut got, mut expected) = (vec![0.0; 64], vec![0.0; 64]);
    for (i, row) in rows.iter().enumerate() {
        packed.row(i, &mut got);
        dequantise_row(row.dtype, row.bytes, &mut expected);
        assert_eq!(got, expected, "row {i}");
    }
}

#[test]
fn rows_of_the_wrong_length_are_refused() {
    let bytes = vec![0; 33];
    for k in [0, 31, 32, 64] {
        assert!(
            Panels::pack(
                &[Row {
                    dtype: Dtype::Q8_0,
                    bytes: &bytes
                }],
                k,
                &mut Pool::new(1).unwrap()
            )
            .is_err()
        );
    }
}

#[test]
fn matmuls_of_all_tables_have_the_same_bits_at_any_batch_size() {
    let mut r = Random::fresh();
    for (isa, t) in fast() {
        for dtype in DTYPES {
            for (n, k) in [(8, 32), (29, 96), (72, 576), (40, 1536)] {
                let w = pack(&weights(&mut r, dtype, n, k, None), dtype, k);
                let most = 40;
                let x = r.values(most * k, 3.0);
                let start = r.values(most * w.panels() * LANES, 1.0);
                let ld = w.panels() * LANES;
                let reference = multiply(&scalar::KERNELS, &w, &x, most, Some(&start), 1);
                for rows in [1, 2, 3, 4, 5, 11, 12, 13, 16, 40] {
                    for parts in [1, 3] {
                        let got = multiply(&t, &w, &x[..rows * k], rows, Some(&start[..rows * ld]), parts);
                        assert_eq!(
                            bits(&got),
                            bits(&reference[..rows * ld]),
                            "{isa:?} {dtype:?} {n} x {k}, {rows} rows in {parts} parts, seed {}",
                            r.seed
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn more_rows_than_a_block_of_rows_have_the_same_bits() {
    let mut r = Random::fresh();
    for (isa, t) in fast() {
        for dtype in [Dtype::Q4_1, Dtype::Q8_0, Dtype::F16] {
            // more blocks of k than one piece
            let (n, k, rows) = (16, 832, 600);
            let w = pack(&weights(&mut r, dtype, n, k, None), dtype, k);
            let x = r.values(rows * k, 1.0);
            let all = multiply(&t, &w, &x, rows, None, 1);
            for row in [0, 1, 511, 512, 599] {
                let alone = multiply(&t, &w, &x[row * k..(row + 1) * k], 1, None, 1);
                assert_eq!(
                    bits(&alone),
                    bits(&all[row * n..(row + 1) * n]),
                    "{isa:?} {dtype:?} row {row}, seed {}",
                    r.seed
                );
            }
        }
    }
}

#[test]
fn extreme_weights_and_inputs_saturate_nothing() {
    let mut r = Random::fresh();
    for (isa, t) in fast() {
        for (dtype, ends) in [
            (Dtype::Q4_1, [0x00, 0xff]),
            (Dtype::Q4_0, [0x00, 0xff]),
            (Dtype::Q8_0, [0x81, 0x7f]),
        ] {
            for end in ends {
                let (n, k) = (16, 64);
                let rows = weights(&mut r, dtype, n, k, Some(end));
                let w = pack(&rows, dtype, k);
                for sign in [1.0f32, -1.0] {
                    for count in [1, 4, 16] {
                        // every input at the end of its range
                        let x = vec![sign * 5.0; count * k];
                        let got = multiply(&t, &w, &x, count, None, 1);
                        assert_eq!(bits(&got), bits(&multiply(&scalar::KERNELS, &w, &x, count, None, 1)));
                        let mut row = vec![0.0; k];
                        for i in 0..n {
                            dequantise_row(dtype, &rows[i], &mut row);
                            let exact: f64 = row.iter().map(|v| f64::from(*v) * f64::from(sign) * 5.0).sum();
                            let size: f64 = row.iter().map(|v| f64::from(v.abs()) * 5.0).sum();
                            assert!(
                                (f64::from(got[i]) - exact).abs() < 1e-5 * size + 1e-6,
                                "{isa:?} {dtype:?} {end:#x} x {sign}: {} for {exact}",
                                got[i]
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn matmuls_are_as_precise_as_their_inputs() {
    let mut r = Random::fresh();
    let (n, k, rows) = (64, 576, 3);
    for dtype in DTYPES {
        let raw = weights(&mut r, dtype, n, k, None);
        let w = pack(&raw, dtype, k);
        let x = r.values(rows * k, 2.0);
        let got = multiply(&scalar::KERNELS, &w, &x, rows, None, 1);
        let (mut error, mut size) = (0.0f64, 0.0f64);
        let mut row = vec![0.0; k];
        for (i, raw) in raw.iter().enumerate() {
            dequantise_row(dtype, raw, &mut row);
            for m in 0..rows {
                let exact: f64 = row
                    .iter()
                    .zip(&x[m * k..])
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum();
                error += (f64::from(got[m * n + i]) - exact).powi(2);
                size += exact.powi(2);
            }
        }
        let relative = (error / size).sqrt();
        let bound = match dtype {
            Dtype::Q4_0 | Dtype::Q4_1 => 0.02,
            Dtype::Q8_0 => 2e-4,
            _ => 2e-6,
        };
        assert!(relative < bound, "{dtype:?}: {relative}, seed {}", r.seed);
    }
}

#[test]
fn quantisation_is_the_same_in_all_tables_and_keeps_to_127() {
    let mut r = Random::fresh();
    for (isa, t) in fast() {
        let k = 64;
        for scale in [0.0, 1e-40, 1e-31, 1e-20, 1.0, 1e20, 3e38] {
            let x = Floats::of(&r.values(k, scale));
            for flip in [0, 0x80] {
                let made: Vec<_> = [&scalar::KERNELS, &t]
                    .map(|t| {
                        let m8 = Memory::zeroed("a test", Act::bytes(1, k), false).unwrap();
                        let m16 = Memory::zeroed("a test", Act::bytes(1, k), false).unwrap();
                        let (a, b) = (Act::new(m8.ptr(), 1, k).int8(), Act::new(m16.ptr(), 1, k).int16());
                        // SAFETY: buffers of these sizes, one thread.
                        unsafe {
                            (t.quantise8)(x.ptr(), k / BLOCK, &a, 0, 0, flip);
                            (t.quantise16)(x.ptr(), &b, 0);
                            let q: Vec<i8> = (0..k).map(|i| (*a.q.add(i) as u8 ^ flip) as i8).collect();
                            assert!(q.iter().all(|q| *q != -128), "{scale}");
                            let (s0, s1) = (*a.scales, *a.scales.add(1));
                            let d = [s0.d, s1.d, s0.s, s1.s, *b.d].map(f32::to_bits);
                            (
                                q,
                                d,
                                [s0.start, s1.start],
                                (0..k).map(|i| *b.q.add(i)).collect::<Vec<i16>>(),
                            )
                        }
                    })
                    .into();
                assert_eq!(made[0], made[1], "{isa:?} scale {scale}, seed {}", r.seed);
            }
        }
    }
}

#[test]
fn a_nan_or_infinity_reaches_every_output_of_its_row_and_no_other() {
    let mut r = Random::fresh();
    let tables = fast().into_iter().chain([(Isa::Scalar, scalar::KERNELS)]);
    for (isa, t) in tables {
        for dtype in [Dtype::Q4_1, Dtype::Q8_0, Dtype::F32] {
            let (n, k) = (16, 64);
            let w = pack(&weights(&mut r, dtype, n, k, None), dtype, k);
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for rows in [2, 16] {
                    for at in [0, 31, 37, 63] {
                        let mut x = r.values(rows * k, 1.0);
                        x[k + at] = bad;
                        let got = multiply(&t, &w, &x, rows, None, 1);
                        for (m, row) in got.chunks_exact(n).enumerate() {
                            assert!(
                                row.iter().all(|v| v.is_finite() != (m == 1)),
                                "{isa:?} {dtype:?}, {bad} at {at}, row {m} of {rows}: {row:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn norm_rope_and_silu_agree_with_their_twins() {
    let mut r = Random::fresh();
    for (isa, t) in fast() {
        for n in [8, 16, 24, 32, 80, 96, 576] {
            for scale in [1e-6, 1.0, 1e4, 1e20] {
                let (x, w) = (Floats::of(&r.values(n, scale)), Floats::of(&r.values(n, 2.0)));
                let out = [&scalar::KERNELS, &t].map(|t| {
                    let out = Floats::new(n);
                    // SAFETY: n values each.
                    unsafe { (t.rms_norm)(x.ptr(), w.ptr(), n, 1e-5, out.ptr()) };
                    out.get()
                });
                if scale > 1e19 {
                    // the sum of squares is infinite: that must show, or the row is nothing but zeros
                    assert!(out.iter().flatten().all(|v| v.is_nan()), "{isa:?} norm of {n}: {out:?}");
                    continue;
                }
                assert!(
                    difference(&out[0], &out[1]) < 1e-6,
                    "{isa:?} norm of {n}, seed {}",
                    r.seed
                );
            }
        }
        for dim in [8, 16, 64, 80, 128] {
            let x = r.values(dim, 4.0);
            let table: Vec<f32> = (0..dim / 2)
                .flat_map(|i| [(i as f32 * 1.3).cos(), (i as f32 * 1.3).sin()])
                .collect();
            let table = Floats::of(&table);
            let out = [&scalar::KERNELS, &t].map(|t| {
                let x = Floats::of(&x);
                // SAFETY: dim values each.
                unsafe { (t.rope)(x.ptr(), dim, table.ptr(), 0.125) };
                x.get()
            });
            assert_eq!(bits(&out[0]), bits(&out[1]), "{isa:?} rope of {dim}, seed {}", r.seed);
            // a rotation keeps lengths
            let length = |v: &[f32]| v.iter().map(|x| x * x).sum::<f32>().sqrt();
            assert!((length(&out[0]) - 0.125 * length(&x)).abs() < 1e-5 * length(&x));
        }
        for scale in [0.01, 1.0, 30.0, 1e5] {
            let x = Floats::of(&r.values(64, scale));
            let out = [&scalar::KERNELS, &t].map(|t| {
                let out = Floats::new(32);
                // SAFETY: 64 values in, 32 out.
                unsafe { (t.silu_mul)(x.ptr(), out.ptr()) };
                out.get()
            });
            assert!(
                difference(&out[0], &out[1]) < 1e-6,
                "{isa:?} silu at {scale}: {out:?}, seed {}",
                r.seed
            );
        }
    }
}

/// A paged cache of one head, filled through the table's own writes.
struct Cache {
    keys: Vec<u16>,
    values: Vec<u16>,
    pages: Vec<u32>,
    dim: usize,
    page_tokens: usize,
}

impl Cache {
    fn new(r: &mut Random, t: &Kernels, tokens: usize, dim: usize, page_tokens: usize) -> Self {
        let count = tokens.div_ceil(page_tokens) + 3;
        let mut pages: Vec<u32> = (0..count as u32).collect();
        (1..count).rev().for_each(|i| pages.swap(i, r.below(i + 1)));
        // what is not written holds NaN: reading it would show
        let fill = vec![f16::NAN.to_bits(); count * page_tokens * dim];
        let mut cache = Self {
            keys: fill.clone(),
            values: fill,
            pages,
            dim,
            page_tokens,
        };
        for i in 0..tokens {
            let (k, v) = (r.values(dim, 2.0), r.values(dim, 2.0));
            let page = cache.pages[i / page_tokens] as usize * page_tokens * dim;
            let at = i % page_tokens;
            // SAFETY: dim values each, inside the page.
            unsafe {
                let key = cache
                    .keys
                    .as_mut_ptr()
                    .add(page + at / LANES * LANES * dim + at % LANES);
                (t.write_kv)(
                    k.as_ptr(),
                    v.as_ptr(),
                    dim,
                    key,
                    cache.values.as_mut_ptr().add(page + at * dim),
                );
            }
        }
        cache
    }

    fn attend(&self, t: &Kernels, q: &[f32], tokens: usize, group: usize, first_position: usize) -> Vec<f32> {
        let scratch = Floats::new(Attention::scratch_len(self.dim, group));
        let out = Floats::new(tokens * group * self.dim);
        let a = Attention {
            q: q.as_ptr(),
            ldq: group * self.dim,
            tokens,
            group,
            dim: self.dim,
            first_position,
            keys: self.keys.as_ptr(),
            values: self.values.as_ptr(),
            page_stride: self.page_tokens * self.dim,
            page_tokens: self.page_tokens,
            pages: &self.pages,
        };
        // SAFETY: queries, pages, scratch and output of these sizes.
        unsafe { (t.attend)(&a, scratch.ptr(), out.ptr()) };
        out.get()
    }
}

#[test]
fn attention_agrees_with_its_twin_and_one_token_with_tiles_to_the_bit() {
    let mut r = Random::fresh();
    for (isa, t) in fast() {
        for (dim, group, page_tokens) in [
            (64, 3, 16),
            (128, 4, 8),
            (8, 1, 24),
            (80, 2, 16),
            (16, 7, 16),
            (64, 60, 64),
            (24, 5, 8),
        ] {
            for end in [1, 2, 7, 8, 9, 63, 64, 65, 130, 200] {
                let cache = Cache::new(&mut r, &t, end, dim, page_tokens);
                let tile = Attention::tile_tokens(group).min(end);
                for tokens in [1, 2, 3, tile] {
                    let tokens = tokens.min(tile);
                    let first = end - tokens;
                    let q = r.values(tokens * group * dim, 0.5);
                    let got = cache.attend(&t, &q, tokens, group, first);
                    let twin = cache.attend(&scalar::KERNELS, &q, tokens, group, first);
                    let what = format!(
                        "{isa:?} dim {dim} group {group} end {end} tokens {tokens}, seed {}",
                        r.seed
                    );
                    assert!(difference(&got, &twin) < 2e-6, "{what}: {}", difference(&got, &twin));
                    for i in 0..tokens {
                        let width = group * dim;
                        let alone = cache.attend(&t, &q[i * width..(i + 1) * width], 1, group, first + i);
                        assert_eq!(
                            bits(&alone),
                            bits(&got[i * width..(i + 1) * width]),
                            "{what}, token {i}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn attention_to_far_apart_scores_stays_finite() {
    let mut r = Random::fresh();
    for (isa, t) in fast() {
        let cache = Cache::new(&mut r, &t, 150, 64, 16);
        for scale in [50.0, 3000.0] {
            let q = r.values(3 * 64, scale);
            let got = cache.attend(&t, &q, 1, 3, 149);
            let twin = cache.attend(&scalar::KERNELS, &q, 1, 3, 149);
            assert!(got.iter().all(|v| v.is_finite()));
            assert!(
                difference(&got, &twin) < 1e-3,
                "{isa:?} at {scale}: {}",
                difference(&got, &twin)
            );
        }
    }
}

#[test]
fn a_nan_key_is_not_left_out_of_the_sum() {
    let mut r = Random::fresh();
    for (isa, t) in fast().into_iter().chain([(Isa::Scalar, scalar::KERNELS)]) {
        for at in [0, 5, 64, 69] {
            let mut cache = Cache::new(&mut r, &t, 70, 16, 16);
            let page = cache.pages[at / 16] as usize * 16 * 16;
            cache.keys[page + at % 16 / LANES * LANES * 16 + at % LANES] = f16::NAN.to_bits();
            let q = r.values(2 * 16, 1.0);
            for tokens in [1, 2] {
                let got = cache.attend(&t, &q, tokens, 2 / tokens, 70 - tokens);
                // the first of two tokens does not see the last key
                let seeing = if tokens == 2 && at == 69 { &got[16..] } else { &got[..] };
                assert!(seeing.iter().all(|v| v.is_nan()), "{isa:?}, key {at}: {got:?}");
                assert!(
                    got.len() == seeing.len() || got[..16].iter().all(|v| v.is_finite()),
                    "{isa:?}"
                );
            }
        }
    }
}

#[test]
fn a_nan_query_gives_nan_and_not_some_number() {
    let mut r = Random::fresh();
    for (isa, t) in fast().into_iter().chain([(Isa::Scalar, scalar::KERNELS)]) {
        let cache = Cache::new(&mut r, &t, 70, 16, 16);
        let mut q = r.values(4 * 16, 1.0);
        q[16 + 3] = f32::NAN;
        for tokens in [1, 2] {
            let got = cache.attend(&t, &q, tokens, 4 / tokens, 70 - tokens);
            assert!(got[16..32].iter().all(|v| v.is_nan()), "{isa:?}: {:?}", &got[16..32]);
            assert!(got[..16].iter().chain(&got[32..]).all(|v| v.is_finite()), "{isa:?}");
        }
    }
}
