//! Schemas against random logits: whatever the model wants, an answer that ends by an end token parses and fits its schema.

use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, Value, json};
use tandem_engine::exec::{Adjust, SampleParams};
use tandem_engine::sample::grammar::Vocabulary;
use tandem_engine::sample::{Work, choose};

use crate::support::fake::{END_TOKEN, logits, mix, token_bytes};

const VOCAB: u32 = 2_048;
/// More than any answer to a schema below has.
const ENOUGH: u32 = 4_000;

/// Bounded schemas: every answer to one is finite.
fn schema() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!({"type": "boolean"})),
        Just(json!({"type": "null"})),
        (-50i32..50, 0i32..40)
            .prop_map(|(low, more)| json!({"type": "integer", "minimum": low, "maximum": low + more})),
        (0u8..9, 0u8..9).prop_map(|(a, b)| json!({"type": "string", "minLength": a.min(b), "maxLength": a.max(b)})),
        select(vec!["^[a-f]{3}$", "^(yes|no)$", "^[0-9]{2}-[0-9]{2}$"])
            .prop_map(|pattern| json!({"type": "string", "pattern": pattern})),
        prop::collection::vec("[a-z\"\\\\ é]{0,6}", 1..4).prop_map(|texts| json!({"enum": texts})),
        Just(json!({"const": {"a": [1, "x"]}})),
        Just(json!({"enum": [1, "one", null, true]})),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            (inner.clone(), 0u8..3, 0u8..3).prop_map(
                |(items, a, b)| json!({"type": "array", "items": items, "minItems": a.min(b), "maxItems": a.max(b)})
            ),
            prop::collection::vec(inner.clone(), 1..3).prop_map(|any| json!({"anyOf": any})),
            prop::collection::btree_map("[a-z]{1,4}", (inner, any::<bool>()), 0..4).prop_map(|fields| {
                let required: Vec<&String> = fields.iter().filter(|f| f.1.1).map(|f| f.0).collect();
                let properties: Map<String, Value> = fields.iter().map(|f| (f.0.clone(), f.1.0.clone())).collect();
                json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
            }),
        ]
    })
}

/// Does `value` fit? For the schemas above.
fn fits(value: &Value, schema: &Value) -> bool {
    if let Some(options) = schema["enum"].as_array() {
        return options.contains(value);
    }
    if let Some(any) = schema["anyOf"].as_array() {
        return any.iter().any(|s| fits(value, s));
    }
    if let Some(expected) = schema.get("const") {
        return value == expected;
    }
    let within = |n: i64, least: &str, most: &str| {
        schema[least].as_i64().is_none_or(|l| n >= l) && schema[most].as_i64().is_none_or(|m| n <= m)
    };
    match (schema["type"].as_str().unwrap(), value) {
        ("boolean", Value::Bool(_)) | ("null", Value::Null) => true,
        ("integer", Value::Number(n)) => {
            // -0 is an integer, which serde_json reads as a float
            let zero = (n.as_f64() == Some(0.0)).then_some(0);
            n.as_i64().or(zero).is_some_and(|n| within(n, "minimum", "maximum"))
        }
        ("string", Value::String(s)) => {
            let hex = |s: &str| s.len() == 3 && s.bytes().all(|b| matches!(b, b'a'..=b'f'));
            let digits = |s: &str| s.len() == 2 && s.bytes().all(|b| b.is_ascii_digit());
            let pattern = match schema["pattern"].as_str() {
                None => true,
                Some("^[a-f]{3}$") => hex(s),
                Some("^(yes|no)$") => s == "yes" || s == "no",
                Some(_) => s.split_once('-').is_some_and(|(a, b)| digits(a) && digits(b)),
            };
            pattern && within(s.chars().count() as i64, "minLength", "maxLength")
        }
        ("array", Value::Array(items)) => {
            within(items.len() as i64, "minItems", "maxItems") && items.iter().all(|i| fits(i, &schema["items"]))
        }
        ("object", Value::Object(fields)) => {
            let known = |f: (&String, &Value)| schema["properties"].get(f.0).is_some_and(|s| fits(f.1, s));
            let required = schema["required"].as_array().unwrap();
            fields.iter().all(known) && required.iter().all(|r| fields.contains_key(r.as_str().unwrap()))
        }
        _ => false,
    }
}

/// The text of a lone answer.
fn answer(vocabulary: &Vocabulary, schema: &str, params: &SampleParams) -> String {
    let tokens = token_bytes();
    let mut state = vocabulary.compile(schema).unwrap().start();
    let (mut mask, mut text) = (Vec::new(), Vec::new());
    let (mut row, mut candidates) = (vec![0.0; VOCAB as usize], vec![(0.0, 0); VOCAB as usize]);
    for position in 0..ENOUGH {
        state.allowed(&[END_TOKEN], VOCAB, &mut mask).unwrap();
        let adjust = Adjust {
            mask: Some(&mask),
            ..Adjust::default()
        };
        let mut work = Work {
            row: &mut row,
            candidates: &mut candidates,
        };
        let logits = logits(mix(params.seed ^ u64::from(position)));
        let token = choose(&logits, params, &adjust, position, &mut work)
            .unwrap_or_else(|e| panic!("{e:?} after {}", text.escape_ascii()));
        if token == END_TOKEN {
            return String::from_utf8(text).unwrap();
        }
        text.extend_from_slice(&tokens[token as usize]);
        state.accept(token).unwrap();
    }
    panic!("no end after {ENOUGH} tokens: {}", text.escape_ascii())
}

fn vocabulary() -> Vocabulary {
    Vocabulary::new(token_bytes(), VOCAB, &[END_TOKEN]).unwrap()
}

#[test]
fn an_answer_to_any_schema_parses_and_fits_it() {
    let vocabulary = vocabulary();
    let config = ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(schema in schema(), seed in any::<u64>(), hot in any::<bool>())| {
        let params = SampleParams {
            temperature: if hot { 1.0 } else { 0.0 },
            seed,
            ..SampleParams::GREEDY
        };
        let text = answer(&vocabulary, &schema.to_string(), &params);
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text} for {schema}"));
        prop_assert!(fits(&value, &schema), "{text} for {schema}");
    });
}

#[test]
fn white_space_is_bounded() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}, "minItems": 3,
        "maxItems": 3}, "b": {"type": "null"}}, "required": ["a", "b"], "additionalProperties": false});
    let vocabulary = vocabulary();
    let mut texts = std::collections::BTreeSet::new();
    for seed in 0..60 {
        let params = SampleParams {
            temperature: 1.0,
            seed,
            ..SampleParams::GREEDY
        };
        texts.insert(answer(&vocabulary, &schema.to_string(), &params));
    }
    for text in &texts {
        let bare: String = text.split(' ').collect();
        assert_eq!(bare, r#"{"a":[null,null,null],"b":null}"#);
        assert!(text.len() <= bare.len() + 5 && !text.contains("  "), "{text}");
    }
    assert!(texts.len() > 1, "a space is never chosen");
}

#[test]
fn what_no_answer_can_be_held_to_is_refused_with_the_reason() {
    let vocabulary = vocabulary();
    for (schema, named) in [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[]", "an object is needed"),
        ("true", "an object is needed"),
        (r#"{"type": "nonsense"}"#, "nonsense"),
        (r#"{"type": "string", "minLength": 5, "maxLength": 2}"#, "nsatisfiable"),
        (r#"{"$ref": "http://localhost/other.json"}"#, "ref"),
        (r#"{"type": "string", "pattern": "(?=x)a"}"#, "x"),
        (r#"{"type": "integer", "multipleOf": 99999989}"#, "is 99999989"),
        (r#"{"type": "number", "multipleOf": 1234.5}"#, "is 12345 "),
        (
            r#"{"type": "number", "multipleOf": 9.9999999e-9}"#,
            "without its decimal point",
        ),
        (
            r#"{"items": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}"#,
            "is 99400891",
        ),
    ] {
        match vocabulary.compile(schema) {
            Ok(_) => panic!("{schema} was taken"),
            Err(why) => {
                assert!(why.contains(named), "{schema}: {why}");
                assert!(why.len() < 600 && !why.contains('\n'), "{schema}: {why}");
            }
        }
    }
    assert!(
        Vocabulary::new(vec![], 8, &[2])
            .unwrap_err()
            .contains("stands for text")
    );
    assert!(
        Vocabulary::new(vec![vec![1]; 9], 8, &[2])
            .unwrap_err()
            .contains("9 tokens")
    );
}

#[test]
fn multiples_that_are_taken_are_held_to() {
    let vocabulary = vocabulary();
    for multiple in ["7", "0.25", "100", "9973"] {
        let schema = format!(r#"{{"type": "number", "minimum": -20000, "maximum": 20000, "multipleOf": {multiple}}}"#);
        for seed in 0..5 {
            let params = SampleParams {
                temperature: 1.0,
                seed,
                ..SampleParams::GREEDY
            };
            let text = answer(&vocabulary, &schema, &params);
            let times = text.parse::<f64>().unwrap() / multiple.parse::<f64>().unwrap();
            assert!((times - times.round()).abs() < 1e-6, "{text} for {multiple}");
        }
    }
}

#[test]
fn special_tokens_match_no_text_and_the_end_comes_only_where_the_text_is_complete() {
    let mut tokens = token_bytes();
    // an end token whose text could be a part of a string
    tokens[END_TOKEN as usize] = b"a".to_vec();
    let vocabulary = Vocabulary::new(tokens, VOCAB, &[END_TOKEN]).unwrap();
    let mut state = vocabulary
        .compile(r#"{"type": "string", "maxLength": 4}"#)
        .unwrap()
        .start();
    let mut mask = Vec::new();
    let allowed = |mask: &[u32], token: u32| mask[token as usize / 32] >> (token % 32) & 1 == 1;
    let byte = |b: u8| 10 + u32::from(b);
    for (text, complete) in [(b'"', false), (b'a', false), (b'"', true)] {
        state.allowed(&[END_TOKEN], VOCAB, &mut mask).unwrap();
        assert!(!allowed(&mask, END_TOKEN) && allowed(&mask, byte(text)));
        // tokens without text
        assert!((0..10).chain(300..VOCAB).all(|t| !allowed(&mask, t)));
        state.accept(byte(text)).unwrap();
        state.allowed(&[END_TOKEN], VOCAB, &mut mask).unwrap();
        assert_eq!(allowed(&mask, END_TOKEN), complete);
    }
    assert_eq!(
        mask.iter().map(|w| w.count_ones()).sum::<u32>(),
        1,
        "only the end is left"
    );
    assert!(state.accept(byte(b'x')).is_err());
}
