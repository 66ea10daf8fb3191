//! How tokens are drawn: the parameters of both APIs, checked, as the engines take them.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use tandem_wire::proto::{Grammar, LogitBias, Sampling, grammar};

use super::fields::ResponseFormat;
use super::request::Common;
use crate::error::RouterError;

/// Most tokens with a bias, as at OpenAI's.
const MAX_BIASES: usize = 300;
/// Largest JSON schema: an engine compiles it before the first token.
pub const MAX_SCHEMA_BYTES: usize = 64 << 10;
/// Most of the likeliest tokens that are reported with each one.
pub const MAX_LOGPROBS: u32 = 20;

/// Checks and maps them. `vocabulary` is the number of token ids.
pub fn sampling(common: &Common<'_>, vocabulary: usize) -> Result<Sampling, RouterError> {
    let top_p = common.top_p.unwrap_or(1.0);
    if !(top_p > 0.0 && top_p <= 1.0) {
        let detail = format!("{top_p} is not above 0 and at most 1");
        return Err(RouterError::field("top_p", detail));
    }
    let top_k = match common.top_k.unwrap_or(0) {
        -1 | 0 => 0,
        // more than there are is all of them
        k if k > 0 => u32::try_from(k).unwrap_or(0),
        k => {
            let detail = format!("{k} is neither at least 1 nor 0 or -1, which mean all tokens");
            return Err(RouterError::field("top_k", detail));
        }
    };
    let min_new_tokens = common.min_tokens.unwrap_or(0);
    if let Some(max) = common.max_tokens
        && min_new_tokens > max
    {
        let detail = format!(
            "{min_new_tokens} is more than {}, which is {max}",
            common.max_tokens_field
        );
        return Err(RouterError::field("min_tokens", detail));
    }
    Ok(Sampling {
        temperature: within("temperature", common.temperature, 1.0, 0.0..=2.0)?,
        top_p,
        seed: common.seed.map_or_else(rand::random, |seed| seed as u64),
        top_k,
        min_p: within("min_p", common.min_p, 0.0, 0.0..=1.0)?,
        // beyond these a logit would leave what an f32 holds
        repetition_penalty: within("repetition_penalty", common.repetition_penalty, 1.0, 0.01..=100.0)?,
        presence_penalty: within("presence_penalty", common.presence_penalty, 0.0, -2.0..=2.0)?,
        frequency_penalty: within("frequency_penalty", common.frequency_penalty, 0.0, -2.0..=2.0)?,
        logit_bias: biases(common.logit_bias, vocabulary)?,
        logprobs: common.logprobs,
        grammar: common.response_format.map(schema).transpose()?.flatten(),
        min_new_tokens,
    })
}

fn within(param: &str, value: Option<f32>, default: f32, range: RangeInclusive<f32>) -> Result<f32, RouterError> {
    let value = value.unwrap_or(default);
    if range.contains(&value) {
        return Ok(value);
    }
    let detail = format!("{value} is not in {} to {}", range.start(), range.end());
    Err(RouterError::field(param, detail))
}

fn biases(biases: &[(u32, f32)], vocabulary: usize) -> Result<Vec<LogitBias>, RouterError> {
    if biases.len() > MAX_BIASES {
        let detail = format!("{} tokens, but at most {MAX_BIASES} are allowed", biases.len());
        return Err(RouterError::field("logit_bias", detail));
    }
    let mut seen = BTreeMap::new();
    for &(token, bias) in biases {
        let field = || format!("logit_bias.{token}");
        if token as usize >= vocabulary {
            let detail = format!("the id is not below {vocabulary}, the vocabulary's size");
            return Err(RouterError::field(field(), detail));
        }
        if !(-100.0..=100.0).contains(&bias) {
            return Err(RouterError::field(field(), format!("{bias} is not in -100 to 100")));
        }
        if seen.insert(token, bias).is_some() {
            return Err(RouterError::field(field(), "given twice"));
        }
    }
    Ok(seen
        .into_iter()
        .map(|(token, bias)| LogitBias { token, bias })
        .collect())
}

/// The grammar of a format; none: any text.
fn schema(format: &ResponseFormat) -> Result<Option<Grammar>, RouterError> {
    let text = match (format.kind.as_str(), &format.json_schema) {
        ("text", _) => return Ok(None),
        ("json_object", _) => r#"{"type":"object"}"#.to_owned(),
        ("json_schema", Some(given)) => {
            let field = "response_format.json_schema.schema";
            let schema = given
                .schema
                .as_ref()
                .ok_or_else(|| RouterError::field(field, "missing"))?;
            if schema.kind() != minijinja::value::ValueKind::Map {
                return Err(RouterError::field(field, "must be an object"));
            }
            let text = serde_json::to_string(schema)
                .map_err(|error| RouterError::field(field, format!("cannot be written as JSON: {error}")))?;
            if text.len() > MAX_SCHEMA_BYTES {
                let detail = format!("{} bytes, but at most {MAX_SCHEMA_BYTES} are allowed", text.len());
                return Err(RouterError::field(field, detail));
            }
            text
        }
        ("json_schema", None) => return Err(RouterError::field("response_format.json_schema", "missing")),
        (kind, _) => {
            return Err(RouterError::Unsupported {
                param: "response_format.type".into(),
                detail: format!("{kind:?} is not one of \"text\", \"json_object\" and \"json_schema\""),
            });
        }
    };
    Ok(Some(Grammar {
        kind: Some(grammar::Kind::JsonSchema(text)),
    }))
}
