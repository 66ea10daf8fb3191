//! `config.json` as a [`ModelConfig`].
//!
//! Every key is either used here, or has the one value that is implemented, or is known to be without effect on what a served model
//! computes; any other is refused by name, since a key that is overlooked gives answers that are wrong without a sign.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::model::LoadError;
use crate::model::config::{Architecture, ModelConfig, RopePairs, RopeScaling, most};
use crate::model::tensor::BLOCK;

/// What `config.json` says.
pub(super) struct FromConfig {
    pub(super) config: ModelConfig,
    /// The embedding serves as the head too.
    pub(super) tied: bool,
}

/// The classes of `architectures`.
const CLASSES: [(&str, Architecture); 3] = [
    ("LlamaForCausalLM", Architecture::Llama),
    ("Qwen2ForCausalLM", Architecture::Qwen2),
    ("Qwen3ForCausalLM", Architecture::Qwen3),
];
const KNOWN: &str = "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM";

/// Keys without effect on the numbers of a served model: training, ways of saving and of calling, notes.
const HARMLESS: [&str; 39] = [
    "_attn_implementation_autoset",
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "max_window_layers",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "pad_token_id",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "task_specific_params",
    "tf_legacy_loss",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_flash_attn",
    "_attn_implementation",
];

/// Switches that must be off, each with what it stands for.
const OFF: [(&str, &str); 8] = [
    ("add_cross_attention", "attention to an encoder"),
    ("attention_bias", "biases in all of attention's projections"),
    ("is_encoder_decoder", "an encoder"),
    ("mlp_bias", "biases in the feed-forward blocks"),
    ("rope_interleaved", "rotation of neighbouring elements"),
    ("tie_encoder_decoder", "an encoder"),
    ("use_mrope", "rotation by several positions"),
    ("use_sliding_window", "attention to a window"),
];

/// The most tokens that end an answer; known models have up to 5.
const MAX_END_TOKENS: usize = 64;

/// Reads and checks `config.json`, and the tokens that end an answer from `generation_config.json`.
pub(super) fn read(folder: &Path, text: &[u8], generation: Option<&[u8]>) -> Result<FromConfig, LoadError> {
    let mut k = Keys::parse(folder.join("config.json"), text)?;
    let architecture = architecture(&mut k)?;
    if let Some(v) = k.take("quantization_config") {
        let method = v.get("quant_method").unwrap_or(&Value::Null);
        let why = format!(
            "is there (quant_method {method}): quantised safetensors are not supported; use the model in BF16, F16 or F32, or a GGUF file"
        );
        return Err(k.error("quantization_config", why));
    }
    let sliding_off = k.map.get("use_sliding_window") == Some(&Value::Bool(false));
    for (key, what) in OFF {
        match k.take(key) {
            None | Some(Value::Null | Value::Bool(false)) => {}
            Some(v) => {
                let why = format!("is {}: {what} is not supported; use a model without it", brief(&v));
                return Err(k.error(key, why));
            }
        }
    }
    match k.take("sliding_window") {
        Some(v) if !v.is_null() && !sliding_off => {
            let why = format!(
                "is {}: attention to a window is not supported; use a model without it",
                brief(&v)
            );
            return Err(k.error("sliding_window", why));
        }
        _ => {}
    }
    let num_hidden_layers = k.size("num_hidden_layers", 1, most::LAYERS)?;
    layer_types(&mut k, num_hidden_layers)?;
    for key in ["hidden_act", "hidden_activation"] {
        match k.take(key) {
            None => {}
            Some(Value::String(s)) if s == "silu" || s == "swish" => {}
            Some(v) => {
                let why = format!("is {}: only \"silu\" is supported", brief(&v));
                return Err(k.error(key, why));
            }
        }
    }

    let hidden_size = k.size("hidden_size", BLOCK, most::HIDDEN)?;
    let num_attention_heads = k.size("num_attention_heads", 1, most::HEADS)?;
    let num_key_value_heads = k
        .optional_size("num_key_value_heads", 1, most::HEADS)?
        .unwrap_or(num_attention_heads);
    let head_dim = match k.optional_size("head_dim", 8, most::HEAD_DIM)? {
        Some(d) => d,
        // the class's own default
        None if architecture == Architecture::Qwen3 => 128,
        None if hidden_size.is_multiple_of(num_attention_heads) => hidden_size / num_attention_heads,
        None => {
            let why = format!("is {num_attention_heads}, which does not divide hidden_size {hidden_size}");
            return Err(k.error("num_attention_heads", why));
        }
    };
    let vocab_size = k.size("vocab_size", 1, most::VOCABULARY)?;
    let (rope_theta, rope_scaling) = rope(&mut k)?;
    let mut end_tokens = Vec::new();
    k.end_tokens(vocab_size, &mut end_tokens)?;
    let config = ModelConfig {
        name: name(folder),
        architecture,
        num_hidden_layers,
        hidden_size,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        intermediate_size: k.size("intermediate_size", BLOCK, most::INNER)?,
        max_position_embeddings: k.size("max_position_embeddings", 1, most::POSITIONS)?,
        rms_norm_eps: k.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        rope_theta,
        rope_dim: head_dim,
        rope_scaling,
        rope_pairs: RopePairs::Halves,
        qkv_bias: architecture == Architecture::Qwen2,
        qk_norm: architecture == Architecture::Qwen3,
        vocab_size,
        end_tokens,
    };
    let tied = match k.take("tie_word_embeddings") {
        // the default of all three classes
        None => false,
        Some(Value::Bool(tied)) => tied,
        Some(v) => {
            let why = format!("is {}, true or false is expected", brief(&v));
            return Err(k.error("tie_word_embeddings", why));
        }
    };
    config.check().map_err(|(field, why)| k.error(field, why))?;
    k.all_known()?;
    let mut config = config;
    if let Some(text) = generation {
        // its other keys are defaults for sampling, and requests name theirs
        Keys::parse(folder.join("generation_config.json"), text)?.end_tokens(vocab_size, &mut config.end_tokens)?;
    }
    Ok(FromConfig { config, tied })
}

/// The folder's name.
fn name(folder: &Path) -> String {
    let name = |path: &Path| path.file_name().map(|s| s.to_string_lossy().into_owned());
    name(folder)
        .or_else(|| name(&folder.canonicalize().ok()?))
        .unwrap_or_default()
}

/// From `architectures`, or from `model_type` where that is missing; the two agree.
fn architecture(k: &mut Keys) -> Result<Architecture, LoadError> {
    let classes = k.take("architectures");
    let model_type = k.take("model_type");
    let class = match &classes {
        None | Some(Value::Null) => None,
        Some(Value::Array(a)) if a.len() == 1 && a[0].is_string() => a[0].as_str(),
        Some(v) => {
            let why = format!("is {}, a list of one class is expected (known: {KNOWN})", brief(v));
            return Err(k.error("architectures", why));
        }
    };
    let by_type = match &model_type {
        None => None,
        Some(Value::String(t)) => Some(t.as_str()),
        Some(v) => return Err(k.error("model_type", format!("is {}, a text is expected", brief(v)))),
    };
    let found = match (class, by_type) {
        (Some(class), _) => CLASSES.iter().find(|(c, _)| *c == class),
        (None, Some(t)) => CLASSES.iter().find(|(_, a)| a.name() == t),
        (None, None) => return Err(k.error("architectures", format!("is missing; known: {KNOWN}"))),
    };
    let Some((class, architecture)) = found else {
        return Err(LoadError::Architecture {
            path: k.path.clone(),
            found: class.or(by_type).unwrap_or_default().chars().take(60).collect(),
            known: KNOWN,
        });
    };
    match by_type {
        Some(t) if t != architecture.name() => {
            let why = format!("is {t:.60?}, but the architecture is {class}; fetch the model again");
            Err(k.error("model_type", why))
        }
        _ => Ok(*architecture),
    }
}

/// Each layer attends to everything before it.
fn layer_types(k: &mut Keys, layers: usize) -> Result<(), LoadError> {
    let why = match k.take("layer_types") {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Array(types)) => match types.iter().find(|t| *t != "full_attention") {
            None if types.len() == layers => return Ok(()),
            None => format!("has {} entries, num_hidden_layers is {layers}", types.len()),
            Some(t) => format!("holds {}: only \"full_attention\" is supported", brief(t)),
        },
        Some(v) => format!("is {}, a list is expected", brief(&v)),
    };
    Err(k.error("layer_types", why))
}

/// Base and scaling of the rotary frequencies: `rope_theta` and `rope_scaling`, or both in the newer `rope_parameters`.
fn rope(k: &mut Keys) -> Result<(f64, Option<RopeScaling>), LoadError> {
    let outer = k.number("rope_theta")?;
    let mut tables = Vec::new();
    for key in ["rope_scaling", "rope_parameters"] {
        match k.take(key) {
            None | Some(Value::Null) => {}
            Some(Value::Object(map)) => tables.push((key, map)),
            Some(v) => return Err(k.error(key, format!("is {}, an object is expected", brief(&v)))),
        }
    }
    if let [_, (key, _)] = &tables[..] {
        return Err(k.error(
            key,
            "is there beside rope_scaling, which says the same in the older form; remove one".to_owned(),
        ));
    }
    let Some((key, map)) = tables.pop() else {
        return Ok((outer.unwrap_or(10_000.0), None));
    };
    let mut r = Keys {
        path: k.path.clone(),
        inside: format!("{key}."),
        map,
    };
    let inner = r.number("rope_theta")?;
    let theta = match (outer, inner) {
        (Some(a), Some(b)) if a.to_bits() != b.to_bits() => {
            return Err(r.error("rope_theta", format!("is {b}, but rope_theta is {a}; remove one")));
        }
        (a, b) => a.or(b).unwrap_or(10_000.0),
    };
    let scaling = r.scaling()?;
    r.all_known()?;
    Ok((theta, scaling))
}

/// The keys of an object that are not read yet; look-ups with errors that name file and key.
struct Keys {
    path: PathBuf,
    /// Before a key's name in errors.
    inside: String,
    map: Map<String, Value>,
}

impl Keys {
    fn parse(path: PathBuf, text: &[u8]) -> Result<Self, LoadError> {
        match serde_json::from_slice(text) {
            Ok(Value::Object(map)) => Ok(Self {
                path,
                inside: String::new(),
                map,
            }),
            Ok(_) => Err(LoadError::Damaged {
                path,
                what: "it is no JSON object".to_owned(),
            }),
            Err(e) => Err(LoadError::Damaged {
                path,
                what: format!("it is no JSON: {e}"),
            }),
        }
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        self.map.remove(key)
    }

    fn error(&self, key: &str, why: String) -> LoadError {
        LoadError::Metadata {
            path: self.path.clone(),
            key: format!("{}{key}", self.inside),
            why,
        }
    }

    fn optional_size(&mut self, key: &str, least: usize, most: usize) -> Result<Option<usize>, LoadError> {
        match self.take(key) {
            None | Some(Value::Null) => Ok(None),
            Some(v) => match v.as_u64() {
                Some(n) if (least as u64..=most as u64).contains(&n) => Ok(Some(n as usize)),
                _ => {
                    let why = format!("is {}, an integer in {least}..={most} is expected", brief(&v));
                    Err(self.error(key, why))
                }
            },
        }
    }

    fn size(&mut self, key: &str, least: usize, most: usize) -> Result<usize, LoadError> {
        self.optional_size(key, least, most)?
            .ok_or_else(|| self.error(key, "is missing; fetch the model again".to_owned()))
    }

    /// A positive number.
    fn number(&mut self, key: &str) -> Result<Option<f64>, LoadError> {
        match self.take(key) {
            None => Ok(None),
            Some(v) => match v.as_f64() {
                Some(n) if n.is_finite() && n > 0.0 => Ok(Some(n)),
                _ => Err(self.error(key, format!("is {}, a positive number is expected", brief(&v)))),
            },
        }
    }

    fn required(&mut self, key: &str) -> Result<f64, LoadError> {
        self.number(key)?
            .ok_or_else(|| self.error(key, "is missing; fetch the model again".to_owned()))
    }

    /// Adds `eos_token_id`, a number or a list of them, to `tokens`.
    fn end_tokens(&mut self, vocab_size: usize, tokens: &mut Vec<u32>) -> Result<(), LoadError> {
        let key = "eos_token_id";
        let ids = match self.take(key) {
            None | Some(Value::Null) => return Ok(()),
            Some(Value::Array(ids)) => ids,
            Some(id) => vec![id],
        };
        if ids.len() > MAX_END_TOKENS {
            let why = format!("holds {} tokens, at most {MAX_END_TOKENS} are expected", ids.len());
            return Err(self.error(key, why));
        }
        for id in ids {
            match id.as_u64() {
                Some(id) if id < vocab_size as u64 => {
                    if !tokens.contains(&(id as u32)) {
                        tokens.push(id as u32);
                    }
                }
                _ => {
                    let why = format!(
                        "holds {}, tokens below vocab_size {vocab_size} are expected",
                        brief(&id)
                    );
                    return Err(self.error(key, why));
                }
            }
        }
        Ok(())
    }

    /// Of the kinds of rotary scaling llama3's is implemented.
    fn scaling(&mut self) -> Result<Option<RopeScaling>, LoadError> {
        if let Some(share) = self.number("partial_rotary_factor")?
            && share.to_bits() != 1.0f64.to_bits()
        {
            let why = format!("is {share}: rotation of a part of each head is not supported; use a model without it");
            return Err(self.error("partial_rotary_factor", why));
        }
        let mut kind = None;
        // "type" is the older name
        for key in ["rope_type", "type"] {
            match (self.take(key), &kind) {
                (None, _) => {}
                (Some(v), Some(other)) if v != *other => {
                    return Err(self.error(key, format!("is {}, but rope_type is {}", brief(&v), brief(other))));
                }
                (Some(v), _) => kind = Some(v),
            }
        }
        match kind.as_ref().map(|v| v.as_str().unwrap_or_default()) {
            None | Some("default") => Ok(None),
            Some("llama3") => {
                let (factor, low, high) = (
                    self.required("factor")?,
                    self.required("low_freq_factor")?,
                    self.required("high_freq_factor")?,
                );
                let original = self.size("original_max_position_embeddings", 1, most::POSITIONS)?;
                if high <= low {
                    return Err(self.error(
                        "high_freq_factor",
                        format!("is {high}, more than low_freq_factor {low} is expected"),
                    ));
                }
                Ok(Some(RopeScaling::Llama3 {
                    factor,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_max_position_embeddings: original,
                }))
            }
            Some(_) => {
                let why = format!(
                    "is {}: this kind of rotary scaling is not supported (\"llama3\" is); remove it to serve the model at its \
                     original length",
                    brief(&kind.unwrap_or_default())
                );
                Err(self.error("rope_type", why))
            }
        }
    }

    /// What is left is known to be without effect.
    fn all_known(&self) -> Result<(), LoadError> {
        let harmless = |key: &str| self.inside.is_empty() && HARMLESS.contains(&key);
        match self.map.iter().find(|(key, _)| !harmless(key)) {
            None => Ok(()),
            Some((key, value)) => {
                let why = format!(
                    "is {}, and its meaning is not known: this model needs a newer engine, or, if the key is a note, remove it",
                    brief(value)
                );
                Err(self.error(&brief_key(key), why))
            }
        }
    }
}

/// A value in an error's text, cut where it is long.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        None => text,
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}

fn brief_key(key: &str) -> String {
    key.chars().take(60).collect()
}
