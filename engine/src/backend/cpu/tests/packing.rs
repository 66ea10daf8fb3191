//! What is packed is what the file holds.

use super::super::act::ActKind;
use super::super::layout::LANES;
use super::super::pack::Panels;
use super::super::pool::Pool;
use super::{DTYPES, Random, bits, inputs, pack, rows_of, weights};
use crate::backend::Row;
use crate::model::{Dtype, dequantise_row};

/// Every row of `packed` as the file's bytes give it.
fn assert_same(packed: &Panels, rows: &[Row<'_>], what: &str) {
    let (mut got, mut expected) = (vec![0.0; packed.k()], vec![0.0; packed.k()]);
    for (i, row) in rows.iter().enumerate() {
        packed.row(i, &mut got);
        dequantise_row(row.dtype, row.bytes, &mut expected);
        assert_eq!(bits(&got), bits(&expected), "{what}, row {i}, {:?}", row.dtype);
    }
}

#[test]
fn packing_loses_nothing() {
    let mut r = Random::fresh();
    for dtype in DTYPES {
        for (n, k) in [(1, 32), (8, 64), (13, 96), (40, 608)] {
            let k = inputs(dtype, k);
            let rows = weights(&mut r, dtype, n, k, None);
            let packed = pack(&rows, dtype, k);
            assert_same(&packed, &rows_of(&rows, dtype), &format!("{n} x {k}, seed {}", r.seed));
            assert!(packed.parts(0..packed.panels()).all(|p| p.dtype == dtype));
        }
    }
}

#[test]
fn rows_of_different_types_keep_them_panel_by_panel() {
    let mut r = Random::fresh();
    let k = 256;
    // as queries, keys and values lie in a matrix, and as gate and up do
    let cases: [&[(Dtype, usize)]; 4] = [
        &[(Dtype::Q5_0, 24), (Dtype::Q5_0, 8), (Dtype::Q8_0, 8)],
        &[(Dtype::Q4K, 32), (Dtype::Q6K, 32), (Dtype::Q4K, 32), (Dtype::Q6K, 32)],
        &[(Dtype::Q4_1, 16), (Dtype::Q4_0, 13)],
        &[(Dtype::F16, 8), (Dtype::Bf16, 8), (Dtype::F32, 3)],
    ];
    for types in cases {
        let bytes: Vec<(Dtype, Vec<Vec<u8>>)> = types
            .iter()
            .map(|&(dtype, n)| (dtype, weights(&mut r, dtype, n, k, None)))
            .collect();
        let rows: Vec<Row<'_>> = bytes.iter().flat_map(|(dtype, rows)| rows_of(rows, *dtype)).collect();
        let packed = Panels::pack(&rows, k, &mut Pool::new(2).unwrap()).unwrap();
        assert_same(&packed, &rows, &format!("{types:?}, seed {}", r.seed));
        for panels in [0..packed.panels(), 1..packed.panels(), 2..3] {
            let mut next = panels.start;
            for part in packed.parts(panels.clone()) {
                assert_eq!(part.first, next, "{types:?}, {panels:?}");
                next += part.panels;
                for p in part.first..next {
                    assert_eq!(part.dtype, rows[p * LANES].dtype, "{types:?}, panel {p}");
                }
            }
            assert_eq!(next, panels.end, "{types:?}");
        }
        let each = types.iter().map(|&(dtype, n)| Panels::bytes(&[(dtype, n)], k));
        assert_eq!(Panels::bytes(types, k), each.sum::<u64>(), "{types:?}");
    }
}

#[test]
fn what_has_no_type_in_common_becomes_f32() {
    let mut r = Random::fresh();
    let cases = [
        // 8 outputs of two types
        [(Dtype::Q4_1, 5), (Dtype::Q8_0, 6)],
        // two kinds of inputs
        [(Dtype::Q4_1, 8), (Dtype::F16, 8)],
    ];
    for types in cases {
        let bytes = types.map(|(dtype, n)| (dtype, weights(&mut r, dtype, n, 64, None)));
        let rows: Vec<Row<'_>> = bytes.iter().flat_map(|(dtype, rows)| rows_of(rows, *dtype)).collect();
        let packed = Panels::pack(&rows, 64, &mut Pool::new(1).unwrap()).unwrap();
        assert_same(&packed, &rows, &format!("{types:?}, seed {}", r.seed));
        assert_eq!(packed.act(), ActKind::Float);
        let padded = rows.len().next_multiple_of(LANES);
        assert_eq!(Panels::bytes(&types, 64), padded as u64 * 64 * 4);
    }
}

#[test]
fn rows_of_the_wrong_length_are_refused() {
    for (dtype, k, len) in [
        (Dtype::Q8_0, 0, 33),
        (Dtype::Q8_0, 31, 33),
        (Dtype::Q8_0, 32, 33),
        (Dtype::Q8_0, 64, 33),
        (Dtype::Q4K, 32, 18),
        (Dtype::Q6K, 288, 210),
    ] {
        let bytes = &vec![0; len];
        assert!(Panels::pack(&[Row { dtype, bytes }], k, &mut Pool::new(1).unwrap()).is_err());
    }
}
