//! A llama file's metadata as the sizes that the forward pass needs.
//!
//! Every `llama.*` key is either used here or known to be without effect; any other is refused by name, since a key that
//! is overlooked gives answers that are wrong without a sign.

use std::collections::BTreeMap;

use super::LoadError;
use super::gguf::{Gguf, Value};
use super::tensor::BLOCK;

/// Sizes and constants of a llama model. Names as in the model card's `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// `general.name`, or the file's stem.
    pub name: String,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Width of the residual.
    pub hidden_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// KV heads.
    pub num_key_value_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Inner width of the feed-forward block.
    pub intermediate_size: usize,
    /// The longest sequence that the model was trained for, in tokens.
    pub max_position_embeddings: usize,
    /// Added to the mean square in RMS norms.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Leading elements of each head that are rotated.
    pub rope_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Tokens that end an answer.
    pub end_tokens: Vec<u32>,
}

/// Keys without effect on the numbers.
const HARMLESS: [&str; 2] = ["llama.tensor_data_layout", "llama.rope.scaling.original_context_length"];

impl LlamaConfig {
    /// Reads and checks the metadata of a llama file.
    pub fn read(gguf: &Gguf) -> Result<Self, LoadError> {
        let m = Metadata {
            gguf,
            map: gguf.metadata(),
        };
        let architecture = match m.map.get("general.architecture") {
            Some(Value::Text(t)) => t.as_str(),
            Some(v) => {
                return Err(m.error(
                    "general.architecture",
                    format!("is {}, a text is expected", v.describe()),
                ));
            }
            None => return Err(m.error("general.architecture", "is missing; convert the model again".to_owned())),
        };
        if architecture != "llama" {
            return Err(LoadError::Architecture {
                path: gguf.path().to_owned(),
                found: architecture.to_owned(),
            });
        }

        let num_hidden_layers = m.size("llama.block_count", 1, 4096)?;
        let hidden_size = m.size("llama.embedding_length", BLOCK, 1 << 20)?;
        let num_attention_heads = m.size("llama.attention.head_count", 1, 1 << 16)?;
        let num_key_value_heads = m
            .optional_size("llama.attention.head_count_kv", 1, 1 << 16)?
            .unwrap_or(num_attention_heads);
        let intermediate_size = m.size("llama.feed_forward_length", BLOCK, 1 << 24)?;
        let max_position_embeddings = m.size("llama.context_length", 1, 1 << 28)?;
        let head_dim = match m.optional_size("llama.attention.key_length", 8, 1 << 16)? {
            Some(d) => d,
            None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
            None => {
                let why =
                    format!("is {num_attention_heads}, which does not divide llama.embedding_length {hidden_size}");
                return Err(m.error("llama.attention.head_count", why));
            }
        };
        if let Some(v) = m.optional_size("llama.attention.value_length", 8, 1 << 16)?
            && v != head_dim
        {
            return Err(m.error(
                "llama.attention.value_length",
                format!("is {v}, but keys have {head_dim}: values of another width are not supported"),
            ));
        }
        let rope_dim = m
            .optional_size("llama.rope.dimension_count", 2, head_dim)?
            .unwrap_or(head_dim);
        let rms_norm_eps = m.number("llama.attention.layer_norm_rms_epsilon", None)? as f32;
        let rope_theta = m.number("llama.rope.freq_base", Some(10_000.0))?;
        m.multiple("llama.embedding_length", hidden_size, BLOCK)?;
        m.multiple("llama.feed_forward_length", intermediate_size, BLOCK)?;
        m.multiple("llama.attention.key_length (head size)", head_dim, 8)?;
        m.multiple("llama.rope.dimension_count", rope_dim, 2)?;
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            let why = format!(
                "is {num_key_value_heads}, which does not divide llama.attention.head_count {num_attention_heads}"
            );
            return Err(m.error("llama.attention.head_count_kv", why));
        }
        m.multiple(
            "llama.attention.head_count x head size",
            num_attention_heads * head_dim,
            BLOCK,
        )?;
        m.no_scaling()?;

        let (info, _) = gguf.tensor("token_embd.weight")?;
        let vocab_size = info.dims.get(1).copied().unwrap_or(0);
        if let Some(v) = m.optional_size("llama.vocab_size", 1, 1 << 28)?
            && v as u64 != vocab_size
        {
            return Err(m.error(
                "llama.vocab_size",
                format!("is {v}, but token_embd.weight has {vocab_size} rows"),
            ));
        }
        let vocab_size = usize::try_from(vocab_size)
            .ok()
            .filter(|n| (1..1 << 28).contains(n))
            .ok_or_else(|| m.error("token_embd.weight", format!("has {vocab_size} rows")))?;
        if let Some(v) = m.optional_size("llama.expert_count", 0, 1 << 16)?
            && v != 0
        {
            return Err(m.error(
                "llama.expert_count",
                format!("is {v}: mixtures of experts are not supported"),
            ));
        }
        if let Some(v) = m.optional_size("llama.expert_used_count", 0, 1 << 16)?
            && v != 0
        {
            return Err(m.error(
                "llama.expert_used_count",
                format!("is {v}: mixtures of experts are not supported"),
            ));
        }
        m.all_known()?;

        let mut end_tokens = Vec::new();
        for key in ["eos", "eot", "eom"] {
            let key = format!("tokenizer.ggml.{key}_token_id");
            if let Some(id) = m.optional_size(&key, 0, vocab_size - 1)?
                && !end_tokens.contains(&(id as u32))
            {
                end_tokens.push(id as u32);
            }
        }
        let stem = || {
            gguf.path()
                .file_stem()
                .map_or_else(String::new, |s| s.to_string_lossy().into_owned())
        };
        let name = match m.map.get("general.name") {
            Some(Value::Text(t)) if !t.is_empty() => t.clone(),
            _ => stem(),
        };
        Ok(Self {
            name,
            num_hidden_layers,
            hidden_size,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            intermediate_size,
            max_position_embeddings,
            rms_norm_eps,
            rope_theta,
            rope_dim,
            vocab_size,
            end_tokens,
        })
    }

    /// Columns of the fused query, key and value projection.
    pub fn qkv_columns(&self) -> usize {
        (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
    }
}

/// Typed look-ups with errors that name file and key.
struct Metadata<'a> {
    gguf: &'a Gguf,
    map: &'a BTreeMap<String, Value>,
}

impl Metadata<'_> {
    fn error(&self, key: &str, why: String) -> LoadError {
        LoadError::Metadata {
            path: self.gguf.path().to_owned(),
            key: key.to_owned(),
            why,
        }
    }

    fn optional_size(&self, key: &str, least: usize, most: usize) -> Result<Option<usize>, LoadError> {
        let found = match self.map.get(key) {
            None => return Ok(None),
            Some(&Value::Unsigned(v)) => Some(v),
            Some(&Value::Signed(v)) => u64::try_from(v).ok(),
            Some(_) => None,
        };
        match found {
            Some(v) if (least as u64..=most as u64).contains(&v) => Ok(Some(v as usize)),
            _ => {
                let value = self.map[key].describe();
                Err(self.error(
                    key,
                    format!("is {value}, an integer in {least}..={most} is expected; convert the model again"),
                ))
            }
        }
    }

    fn size(&self, key: &str, least: usize, most: usize) -> Result<usize, LoadError> {
        self.optional_size(key, least, most)?
            .ok_or_else(|| self.error(key, "is missing; convert the model again".to_owned()))
    }

    fn number(&self, key: &str, default: Option<f64>) -> Result<f64, LoadError> {
        match (self.map.get(key), default) {
            (Some(&Value::Float(v)), _) if v.is_finite() && v > 0.0 => Ok(v),
            (Some(v), _) => Err(self.error(key, format!("is {}, a positive number is expected", v.describe()))),
            (None, Some(d)) => Ok(d),
            (None, None) => Err(self.error(key, "is missing; convert the model again".to_owned())),
        }
    }

    fn multiple(&self, key: &str, value: usize, of: usize) -> Result<(), LoadError> {
        if value.is_multiple_of(of) {
            return Ok(());
        }
        Err(self.error(
            key,
            format!("is {value}, a multiple of {of} is expected: this shape is not supported"),
        ))
    }

    /// Rotary scaling changes every answer; none of its kinds is implemented.
    fn no_scaling(&self) -> Result<(), LoadError> {
        match self.map.get("llama.rope.scaling.type") {
            None => {}
            Some(Value::Text(t)) if t == "none" => {}
            Some(v) => {
                return Err(self.error(
                    "llama.rope.scaling.type",
                    format!(
                        "is {}: rotary scaling is not supported, use a model without it",
                        v.describe()
                    ),
                ));
            }
        }
        for key in ["llama.rope.scaling.factor", "llama.rope.scale_linear"] {
            match self.map.get(key) {
                None => {}
                Some(&Value::Float(v)) if v == 0.0 || v.to_bits() == 1.0f64.to_bits() => {}
                Some(v) => {
                    let why = format!(
                        "is {}: rotary scaling is not supported, use a model without it",
                        v.describe()
                    );
                    return Err(self.error(key, why));
                }
            }
        }
        Ok(())
    }

    fn all_known(&self) -> Result<(), LoadError> {
        const USED: [&str; 17] = [
            "llama.block_count",
            "llama.embedding_length",
            "llama.attention.head_count",
            "llama.attention.head_count_kv",
            "llama.feed_forward_length",
            "llama.context_length",
            "llama.attention.key_length",
            "llama.attention.value_length",
            "llama.attention.layer_norm_rms_epsilon",
            "llama.rope.dimension_count",
            "llama.rope.freq_base",
            "llama.rope.scaling.type",
            "llama.rope.scaling.factor",
            "llama.rope.scale_linear",
            "llama.vocab_size",
            "llama.expert_count",
            "llama.expert_used_count",
        ];
        let unknown =
            |k: &&String| k.starts_with("llama.") && !USED.contains(&k.as_str()) && !HARMLESS.contains(&k.as_str());
        match self.map.keys().find(unknown) {
            None => Ok(()),
            Some(key) => Err(self.error(
                key,
                format!(
                    "is {}, and its meaning is not known: this model needs a newer engine",
                    self.map[key].describe()
                ),
            )),
        }
    }
}
