//! Rows of every element type as the format's own reader reads them; `golden/dequantise.py` made the vectors.

use serde_json::Value;
use tandem_engine::model::{Dtype, dequantise_row};

fn bytes(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len() / 2)
        .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap())
        .collect()
}

#[test]
#[expect(clippy::float_cmp, reason = "the same numbers, not near ones")]
fn rows_are_exactly_those_of_the_formats_own_reader() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../data/dequantise.json")).unwrap();
    assert_eq!(cases.len(), 10);
    for case in &cases {
        let dtype = Dtype::from_ggml(case["id"].as_u64().unwrap() as u32).unwrap();
        assert_eq!(dtype.name(), case["type"]);
        let (row, values) = (bytes(&case["row"]), bytes(&case["values"]));
        let mut got = vec![0.0; values.len() / 4];
        assert_eq!(dtype.row_bytes(got.len()), Some(row.len()), "{}", dtype.name());
        dequantise_row(dtype, &row, &mut got);
        for (i, (got, expected)) in got.iter().zip(values.as_chunks::<4>().0).enumerate() {
            let expected = f32::from_le_bytes(*expected);
            assert!(*got == expected, "{} value {i}: {got}, not {expected}", dtype.name());
        }
    }
}
