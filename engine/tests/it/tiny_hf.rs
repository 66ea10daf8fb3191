//! Makes small model folders with safetensors files: the same weights as [`tiny`]'s GGUF files, named and laid out as hubs have them.

use std::path::Path;

use serde_json::{Value, json};

use crate::tiny::{self, Kind, Shape};

/// A tensor to write.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: &'static str,
    /// Inputs last, as these files have it.
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// A folder to write.
#[derive(Clone)]
pub struct Folder {
    pub config: Value,
    pub generation: Option<Value>,
    pub tensors: Vec<Tensor>,
    /// Files that the tensors are dealt out to; 1: `model.safetensors`.
    pub shards: usize,
}

impl Folder {
    /// Writes it into `dir`.
    pub fn write(&self, dir: &Path) {
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        if let Some(generation) = &self.generation {
            std::fs::write(dir.join("generation_config.json"), generation.to_string()).unwrap();
        }
        if self.shards == 1 {
            let all: Vec<&Tensor> = self.tensors.iter().collect();
            std::fs::write(dir.join("model.safetensors"), file(&all)).unwrap();
            return;
        }
        let mut map = serde_json::Map::new();
        for shard in 0..self.shards {
            let name = format!("model-{:05}-of-{:05}.safetensors", shard + 1, self.shards);
            let own: Vec<&Tensor> = self.tensors.iter().skip(shard).step_by(self.shards).collect();
            std::fs::write(dir.join(&name), file(&own)).unwrap();
            map.extend(own.iter().map(|t| (t.name.clone(), json!(name))));
        }
        let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
        std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    /// The tensor of this name.
    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap()
    }

    /// Adds an f32 tensor of random values.
    pub fn add(&mut self, name: &str, shape: &[u64], seed: u64) {
        let mut random = tiny::Random(seed);
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| random.unit()).collect();
        self.tensors.push(Tensor {
            name: name.to_owned(),
            dtype: "F32",
            shape: shape.to_vec(),
            bytes: Kind::F32.encode(&values),
        });
    }
}

/// The bytes of a file that holds these tensors.
pub fn file(tensors: &[&Tensor]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut at = 0;
    for t in tensors {
        let end = at + t.bytes.len();
        let entry = json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, end]});
        header.insert(t.name.clone(), entry);
        at = end;
    }
    let mut header = Value::Object(header).to_string();
    // writers pad it, so that the tensors are aligned
    header.push_str(&" ".repeat(header.len().next_multiple_of(8) - header.len()));
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    for t in tensors {
        out.extend(&t.bytes);
    }
    out
}

/// The folder of [`tiny::llama`]'s file: element types F32, F16 or BF16.
pub fn llama(s: Shape, kind: Kind, seed: u64) -> Folder {
    let name = |name: &str| {
        let Some((layer, part)) = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
            return match name {
                "token_embd.weight" => "model.embed_tokens.weight".to_owned(),
                "output_norm.weight" => "model.norm.weight".to_owned(),
                "output.weight" => "lm_head.weight".to_owned(),
                other => panic!("{other}"),
            };
        };
        let part = match part {
            "attn_norm.weight" => "input_layernorm.weight",
            "attn_q.weight" => "self_attn.q_proj.weight",
            "attn_k.weight" => "self_attn.k_proj.weight",
            "attn_v.weight" => "self_attn.v_proj.weight",
            "attn_output.weight" => "self_attn.o_proj.weight",
            "ffn_norm.weight" => "post_attention_layernorm.weight",
            "ffn_gate.weight" => "mlp.gate_proj.weight",
            "ffn_up.weight" => "mlp.up_proj.weight",
            "ffn_down.weight" => "mlp.down_proj.weight",
            other => panic!("{other}"),
        };
        format!("model.layers.{layer}.{part}")
    };
    let dtype = |kind: u32| match kind {
        0 => "F32",
        1 => "F16",
        30 => "BF16",
        other => panic!("type {other}"),
    };
    let tensors = tiny::llama(s, kind, kind, seed).tensors.into_iter().map(|t| Tensor {
        bytes: if t.name.contains("attn_q.") || t.name.contains("attn_k.") {
            halves(&t, s.head_dim)
        } else {
            t.bytes.clone()
        },
        name: name(&t.name),
        dtype: dtype(t.kind),
        shape: t.dims.iter().rev().copied().collect(),
    });
    Folder {
        config: json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": s.layers,
            "hidden_size": s.hidden,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "intermediate_size": s.inner,
            "max_position_embeddings": s.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "vocab_size": s.vocab,
            "tie_word_embeddings": s.tied,
            "hidden_act": "silu",
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0",
        }),
        generation: None,
        tensors: tensors.collect(),
        shards: 1,
    }
}

/// The rows of queries or keys, laid for pairs of neighbours, laid for pairs of halves instead.
fn halves(t: &tiny::Tensor, head_dim: usize) -> Vec<u8> {
    let rows: Vec<&[u8]> = t.bytes.chunks_exact(t.bytes.len() / t.dims[1] as usize).collect();
    let of = |head: usize, i: usize| rows[head * head_dim + i];
    (0..rows.len() / head_dim)
        .flat_map(|head| {
            let (evens, odds) = ((0..head_dim).step_by(2), (1..head_dim).step_by(2));
            evens.chain(odds).map(move |i| (head, i))
        })
        .flat_map(|(head, i)| of(head, i))
        .copied()
        .collect()
}
