//! A GGUF file's metadata as a [`ModelConfig`].
//!
//! Every key of the architecture is either used here or known to be without effect; any other is refused by name, since a key that
//! is overlooked gives answers that are wrong without a sign.

use std::collections::BTreeMap;

use super::container::{Gguf, Value};
use crate::model::LoadError;
use crate::model::config::{Architecture, ModelConfig, RopePairs, most};
use crate::model::tensor::BLOCK;

/// Keys that are read, after the architecture's name and a full stop.
const USED: [&str; 17] = [
    "block_count",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "feed_forward_length",
    "context_length",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
    "vocab_size",
    "expert_count",
    "expert_used_count",
];

/// Keys without effect on the numbers.
const HARMLESS: [&str; 2] = ["tensor_data_layout", "rope.scaling.original_context_length"];

/// Reads and checks the metadata.
pub(in crate::model) fn read(gguf: &Gguf) -> Result<ModelConfig, LoadError> {
    let architecture = architecture(gguf)?;
    let m = Metadata {
        gguf,
        map: gguf.metadata(),
        architecture,
    };
    let num_hidden_layers = m.size("block_count", 1, most::LAYERS)?;
    let hidden_size = m.size("embedding_length", BLOCK, most::HIDDEN)?;
    let num_attention_heads = m.size("attention.head_count", 1, most::HEADS)?;
    let num_key_value_heads = m
        .optional_size("attention.head_count_kv", 1, most::HEADS)?
        .unwrap_or(num_attention_heads);
    let intermediate_size = m.size("feed_forward_length", BLOCK, most::INNER)?;
    let max_position_embeddings = m.size("context_length", 1, most::POSITIONS)?;
    let head_dim = match m.optional_size("attention.key_length", 8, most::HEAD_DIM)? {
        Some(d) => d,
        None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
        None => {
            let why = format!(
                "is {num_attention_heads}, which does not divide {} {hidden_size}",
                m.key("embedding_length")
            );
            return Err(m.error("attention.head_count", why));
        }
    };
    if let Some(v) = m.optional_size("attention.value_length", 8, most::HEAD_DIM)?
        && v != head_dim
    {
        return Err(m.error(
            "attention.value_length",
            format!("is {v}, but keys have {head_dim}: values of another width are not supported"),
        ));
    }
    let config = ModelConfig {
        name: name(gguf),
        architecture,
        num_hidden_layers,
        hidden_size,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        intermediate_size,
        max_position_embeddings,
        rms_norm_eps: m.number("attention.layer_norm_rms_epsilon", None)? as f32,
        rope_theta: m.number("rope.freq_base", Some(10_000.0))?,
        rope_dim: m
            .optional_size("rope.dimension_count", 2, head_dim)?
            .unwrap_or(head_dim),
        rope_scaling: None,
        // converters lay the rows of llama's queries and keys for pairs of neighbours, and leave those of others alone
        rope_pairs: match architecture {
            Architecture::Llama => RopePairs::Neighbours,
            Architecture::Qwen2 | Architecture::Qwen3 => RopePairs::Halves,
        },
        qkv_bias: architecture == Architecture::Qwen2,
        qk_norm: architecture == Architecture::Qwen3,
        vocab_size: m.vocabulary()?,
        end_tokens: m.end_tokens()?,
    };
    m.no_scaling()?;
    m.no_experts()?;
    config.check().map_err(|(field, why)| m.error(key_of(field), why))?;
    m.all_known()?;
    Ok(config)
}

fn architecture(gguf: &Gguf) -> Result<Architecture, LoadError> {
    let error = |why| LoadError::Metadata {
        path: gguf.path().to_owned(),
        key: "general.architecture".to_owned(),
        why,
    };
    match gguf.metadata().get("general.architecture") {
        Some(Value::Text(t)) => {
            Architecture::ALL
                .into_iter()
                .find(|a| a.name() == t)
                .ok_or_else(|| LoadError::Architecture {
                    path: gguf.path().to_owned(),
                    found: t.clone(),
                    known: "llama, qwen2, qwen3",
                })
        }
        Some(v) => Err(error(format!("is {}, a text is expected", v.describe()))),
        None => Err(error("is missing; convert the model again".to_owned())),
    }
}

/// `general.name`, or the file's stem.
fn name(gguf: &Gguf) -> String {
    match gguf.metadata().get("general.name") {
        Some(Value::Text(t)) if !t.is_empty() => t.clone(),
        _ => gguf
            .path()
            .file_stem()
            .map_or_else(String::new, |s| s.to_string_lossy().into_owned()),
    }
}

/// The key that holds a field of [`ModelConfig`] that its check may find at fault.
fn key_of(field: &str) -> &str {
    match field {
        "hidden_size" => "embedding_length",
        "intermediate_size" => "feed_forward_length",
        "head_dim" => "attention.key_length",
        "rope_dim" => "rope.dimension_count",
        "num_key_value_heads" => "attention.head_count_kv",
        "num_attention_heads" => "attention.head_count",
        other => other,
    }
}

/// Typed look-ups, by the part of a key after the architecture, with errors that name file and key.
struct Metadata<'a> {
    gguf: &'a Gguf,
    map: &'a BTreeMap<String, Value>,
    architecture: Architecture,
}

impl Metadata<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name())
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(&self.key(key))
    }

    fn error(&self, key: &str, why: String) -> LoadError {
        self.error_at(self.key(key), why)
    }

    fn error_at(&self, key: String, why: String) -> LoadError {
        LoadError::Metadata {
            path: self.gguf.path().to_owned(),
            key,
            why,
        }
    }

    fn optional_size(&self, key: &str, least: usize, most: usize) -> Result<Option<usize>, LoadError> {
        self.optional_size_at(&self.key(key), least, most)
    }

    fn optional_size_at(&self, key: &str, least: usize, most: usize) -> Result<Option<usize>, LoadError> {
        let Some(value) = self.map.get(key) else {
            return Ok(None);
        };
        let found = match *value {
            Value::Unsigned(v) => Some(v),
            Value::Signed(v) => u64::try_from(v).ok(),
            _ => None,
        };
        match found {
            Some(v) if (least as u64..=most as u64).contains(&v) => Ok(Some(v as usize)),
            _ => {
                let why = format!(
                    "is {}, an integer in {least}..={most} is expected; convert the model again",
                    value.describe()
                );
                Err(self.error_at(key.to_owned(), why))
            }
        }
    }

    fn size(&self, key: &str, least: usize, most: usize) -> Result<usize, LoadError> {
        self.optional_size(key, least, most)?
            .ok_or_else(|| self.error(key, "is missing; convert the model again".to_owned()))
    }

    fn number(&self, key: &str, default: Option<f64>) -> Result<f64, LoadError> {
        match (self.get(key), default) {
            (Some(&Value::Float(v)), _) if v.is_finite() && v > 0.0 => Ok(v),
            (Some(v), _) => Err(self.error(key, format!("is {}, a positive number is expected", v.describe()))),
            (None, Some(d)) => Ok(d),
            (None, None) => Err(self.error(key, "is missing; convert the model again".to_owned())),
        }
    }

    /// The embedding's rows; the key for them is often missing.
    fn vocabulary(&self) -> Result<usize, LoadError> {
        let (info, _) = self.gguf.tensor("token_embd.weight")?;
        let rows = info.dims.get(1).copied().unwrap_or(0);
        if let Some(v) = self.optional_size("vocab_size", 1, most::VOCABULARY)?
            && v as u64 != rows
        {
            return Err(self.error("vocab_size", format!("is {v}, but token_embd.weight has {rows} rows")));
        }
        usize::try_from(rows)
            .ok()
            .filter(|n| (1..=most::VOCABULARY).contains(n))
            .ok_or_else(|| self.error_at("token_embd.weight".to_owned(), format!("has {rows} rows")))
    }

    fn end_tokens(&self) -> Result<Vec<u32>, LoadError> {
        let vocab_size = self.vocabulary()?;
        let mut end_tokens = Vec::new();
        for key in ["eos", "eot", "eom"] {
            let key = format!("tokenizer.ggml.{key}_token_id");
            if let Some(id) = self.optional_size_at(&key, 0, vocab_size - 1)?
                && !end_tokens.contains(&(id as u32))
            {
                end_tokens.push(id as u32);
            }
        }
        Ok(end_tokens)
    }

    /// Rotary scaling changes every answer; of its kinds only llama3's is implemented, and that comes as a tensor.
    fn no_scaling(&self) -> Result<(), LoadError> {
        let refuse = |key: &str, v: &Value| {
            let why = format!(
                "is {}: this kind of rotary scaling is not supported, use a model without it",
                v.describe()
            );
            Err(self.error(key, why))
        };
        match self.get("rope.scaling.type") {
            None => {}
            Some(Value::Text(t)) if t == "none" => {}
            Some(v) => return refuse("rope.scaling.type", v),
        }
        for key in ["rope.scaling.factor", "rope.scale_linear"] {
            match self.get(key) {
                None => {}
                Some(&Value::Float(v)) if v == 0.0 || v.to_bits() == 1.0f64.to_bits() => {}
                Some(v) => return refuse(key, v),
            }
        }
        Ok(())
    }

    fn no_experts(&self) -> Result<(), LoadError> {
        for key in ["expert_count", "expert_used_count"] {
            if let Some(v) = self.optional_size(key, 0, 1 << 16)?
                && v != 0
            {
                return Err(self.error(key, format!("is {v}: mixtures of experts are not supported")));
            }
        }
        Ok(())
    }

    fn all_known(&self) -> Result<(), LoadError> {
        let prefix = self.key("");
        let unknown = |k: &&String| {
            k.strip_prefix(&prefix)
                .is_some_and(|k| !USED.contains(&k) && !HARMLESS.contains(&k))
        };
        match self.map.keys().find(unknown) {
            None => Ok(()),
            Some(key) => {
                let why = format!(
                    "is {}, and its meaning is not known: this model needs a newer engine",
                    self.map[key].describe()
                );
                Err(self.error_at(key.clone(), why))
            }
        }
    }
}
