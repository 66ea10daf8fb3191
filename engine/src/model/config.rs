//! The sizes and constants of a model, whichever file they come from.

use super::tensor::BLOCK;

/// A family of models: which parts a layer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2 and 3, SmolLM2, and what else has their shape.
    Llama,
    /// Qwen2, Qwen2.5: query, key and value with biases.
    Qwen2,
    /// Qwen3: queries and keys normalised head by head.
    Qwen3,
}

impl Architecture {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Llama, Self::Qwen2, Self::Qwen3];

    /// As GGUF files name it; `general.architecture` and the prefix of its keys.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// How rotary frequencies are stretched beyond the length that the model was first trained for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Llama 3.1 and later: wavelengths above `original / low` are stretched by `factor`, those below `original / high` are left
    /// alone, those between are blended.
    Llama3 {
        /// How far long wavelengths are stretched.
        factor: f64,
        /// Periods in the original length, below which a wavelength is long.
        low_freq_factor: f64,
        /// Periods in the original length, above which a wavelength is short.
        high_freq_factor: f64,
        /// The original length in tokens.
        original_max_position_embeddings: usize,
    },
}

/// Which elements of a head are rotated with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopePairs {
    /// 0 with 1, 2 with 3, ….
    Neighbours,
    /// 0 with half, 1 with half + 1, ….
    Halves,
}

/// Sizes and constants of a model. Names as in the model card's `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// As the file calls the model, or the file's stem, or the folder's name.
    pub name: String,
    /// The family.
    pub architecture: Architecture,
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
    /// How the frequencies are stretched. GGUF files hold the stretching of Llama 3 as a tensor instead
    /// ([`Part::RopeFreqs`](super::checkpoint::Part::RopeFreqs)).
    pub rope_scaling: Option<RopeScaling>,
    /// Which elements are rotated with each other, as the rows of the file's query and key tensors lie.
    pub rope_pairs: RopePairs,
    /// Query, key and value have biases.
    pub qkv_bias: bool,
    /// Queries and keys are normalised head by head before they are rotated.
    pub qk_norm: bool,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Tokens that end an answer.
    pub end_tokens: Vec<u32>,
}

/// The most that each size may be, so that products of two fit 64 bits with room to spare.
pub(super) mod most {
    pub const LAYERS: usize = 4096;
    pub const HIDDEN: usize = 1 << 20;
    pub const HEADS: usize = 1 << 16;
    pub const HEAD_DIM: usize = 1 << 16;
    pub const INNER: usize = 1 << 24;
    pub const POSITIONS: usize = 1 << 28;
    pub const VOCABULARY: usize = (1 << 28) - 1;
}

impl ModelConfig {
    /// Columns of the fused query, key and value projection.
    pub fn qkv_columns(&self) -> usize {
        (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
    }

    /// What the forward pass demands of sizes that each lie in their bounds: the field at fault and why.
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        for (field, value, of) in [
            ("hidden_size", self.hidden_size, BLOCK),
            ("intermediate_size", self.intermediate_size, BLOCK),
            ("head_dim", self.head_dim, 8),
            ("rope_dim", self.rope_dim, 2),
        ] {
            if !value.is_multiple_of(of) {
                let why = format!("is {value}, a multiple of {of} is expected: this shape is not supported");
                return Err((field, why));
            }
        }
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(kv_heads) {
            let why = format!("is {kv_heads}, which does not divide the {heads} query heads");
            return Err(("num_key_value_heads", why));
        }
        let width = heads * self.head_dim;
        if !width.is_multiple_of(BLOCK) {
            let why = format!(
                "is {heads}, which makes {width} columns with heads of {}; a multiple of {BLOCK} is expected: this shape is not \
                 supported",
                self.head_dim
            );
            return Err(("num_attention_heads", why));
        }
        Ok(())
    }
}
