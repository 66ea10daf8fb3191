//! Matmuls of every type of weights: the same bits in all tables, tiles, batch sizes and parts, nothing saturated, as precise as
//! their inputs.

use super::super::kernels::Isa;
use super::super::layout::LANES;
use super::super::pack::Panels;
use super::super::pool::Pool;
use super::super::scalar;
use super::{DTYPES, Random, bits, fast, inputs, multiply, pack, rows_of, weights};
use crate::backend::Row;
use crate::model::{Dtype, dequantise_row};

#[test]
fn a_matrix_of_several_types_has_the_bits_of_its_parts() {
    let mut r = Random::fresh();
    let (k, rows) = (256, 17);
    let types = [(Dtype::Q5_0, 24), (Dtype::Q8_0, 8), (Dtype::Q4K, 16), (Dtype::Q6K, 19)];
    let bytes = types.map(|(dtype, n)| (dtype, weights(&mut r, dtype, n, k, None)));
    let all: Vec<Row<'_>> = bytes.iter().flat_map(|(dtype, rows)| rows_of(rows, *dtype)).collect();
    let whole = Panels::pack(&all, k, &mut Pool::new(1).unwrap()).unwrap();
    let x = r.values(rows * k, 2.0);
    for (isa, t) in fast().into_iter().chain([(Isa::Scalar, scalar::KERNELS)]) {
        for parts in [1, 3] {
            let got = multiply(&t, &whole, &x, rows, None, parts);
            let mut first = 0;
            for (dtype, rows_of_part) in &bytes {
                let own = pack(rows_of_part, *dtype, k);
                let width = own.panels() * LANES;
                let alone = multiply(&scalar::KERNELS, &own, &x, rows, None, 1);
                for m in 0..rows {
                    assert_eq!(
                        bits(&got[m * whole.panels() * LANES + first..][..width]),
                        bits(&alone[m * width..(m + 1) * width]),
                        "{isa:?} {dtype:?}, row {m}, {parts} parts, seed {}",
                        r.seed
                    );
                }
                first += width;
            }
        }
    }
}

#[test]
fn matmuls_of_all_tables_have_the_same_bits_at_any_batch_size() {
    let mut r = Random::fresh();
    for (isa, t) in fast() {
        for dtype in DTYPES {
            for (n, k) in [(8, 32), (29, 96), (72, 576), (40, 1536)] {
                let k = inputs(dtype, k);
                let w = pack(&weights(&mut r, dtype, n, k, None), dtype, k);
                let most = 40;
                let x = r.values(most * k, 3.0);
                let start = r.values(most * w.panels() * LANES, 1.0);
                let ld = w.panels() * LANES;
                let reference = multiply(&scalar::KERNELS, &w, &x, most, Some(&start), 1);
                for rows in [1, 2, 3, 4, 5, 11, 12, 13, 16, 17, 31, 40] {
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
        for dtype in DTYPES {
            // more blocks of k than one piece
            let (n, k, rows) = (16, inputs(dtype, 832), 600);
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
            (Dtype::Q5_0, [0x00, 0xff]),
            (Dtype::Q5_1, [0x00, 0xff]),
            (Dtype::Q8_0, [0x80, 0x7f]),
            (Dtype::Q4K, [0x00, 0xff]),
            (Dtype::Q5K, [0x00, 0xff]),
            (Dtype::Q6K, [0x00, 0xff]),
        ] {
            for end in ends {
                let (n, k) = (24, inputs(dtype, 64));
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
    let (n, rows) = (64, 3);
    for dtype in DTYPES {
        let k = inputs(dtype, 576);
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
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => 2e-6,
            _ => 0.02,
        };
        assert!(relative < bound, "{dtype:?}: {relative}, seed {}", r.seed);
    }
}

#[test]
fn a_nan_or_infinity_reaches_every_output_of_its_row_and_no_other() {
    let mut r = Random::fresh();
    let tables = fast().into_iter().chain([(Isa::Scalar, scalar::KERNELS)]);
    for (isa, t) in tables {
        for dtype in [
            Dtype::Q4_1,
            Dtype::Q5_0,
            Dtype::Q8_0,
            Dtype::Q4K,
            Dtype::Q6K,
            Dtype::F32,
        ] {
            let (n, k) = (16, inputs(dtype, 64));
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
