//! Small random models of every shape that the engine computes, against the logits that transformers gives for them
//! (`tests/golden/make.py`): as transformers saved them, and as a converter to GGUF would write them.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::super::tiny::{File, Meta, Tensor};
use super::super::{KvBudget, LoadOptions, Scorer};

/// The models, and into how many parts each can be cut.
const MODELS: [(&str, usize); 7] = [
    ("llama-gqa", 1),
    ("llama-mha-tied", 1),
    ("llama-narrow", 1),
    ("llama3-scaled", 1),
    ("qwen2", 2),
    ("qwen3", 2),
    ("qwen3-tied", 1),
];

/// The longest distance of a row of logits from the expected one, relative to the latter's length (both as vectors).
const BOUND: f64 = 1e-3;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<usize> {
    let all = value.as_array().unwrap();
    all.iter().map(|v| v.as_u64().unwrap() as usize).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let (words, rest) = bytes.as_chunks();
    assert!(rest.is_empty());
    words.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Compares a model, in so many parts, with what is expected of `name`.
fn compare(name: &str, model: &Path, ranks: usize) {
    let expected = json(&folder(name).join("expected.json"));
    let tokens: Vec<u32> = numbers(&expected["tokens"]).iter().map(|t| *t as u32).collect();
    let positions = numbers(&expected["positions"]);
    let logits = floats(&std::fs::read(folder(name).join("expected.f32")).unwrap());
    let vocab = logits.len() / positions.len();
    let options = LoadOptions {
        threads: 2,
        tensor_parallel: ranks,
        kv: KvBudget::Pages(16),
        max_length_tokens: Some(200),
        max_step_tokens: 150,
        max_step_seqs: 150,
        ..LoadOptions::new(model)
    };
    let mut scorer = Scorer::load(&options).unwrap();
    // whole, in chunks, and token by token
    for chunk in [150, 64, 16, 5, 1] {
        let mut seen = 0;
        let mut worst = 0.0f64;
        let mut check = |position: usize, got: &[f32]| {
            let Some(i) = positions.iter().position(|p| *p == position) else {
                return;
            };
            let expected = &logits[i * vocab..(i + 1) * vocab];
            assert_eq!(got.len(), vocab);
            let size: f64 = expected.iter().map(|v| f64::from(*v).powi(2)).sum();
            let error: f64 = got
                .iter()
                .zip(expected)
                .map(|(g, e)| (f64::from(*g) - f64::from(*e)).powi(2))
                .sum();
            let relative = (error / size).sqrt();
            assert!(
                relative < BOUND,
                "{name} in {ranks}, chunks of {chunk}, position {position}: {relative} away\n{got:?}\n{expected:?}"
            );
            worst = worst.max(relative);
            seen += 1;
        };
        scorer.score(&tokens, chunk, &mut check).unwrap();
        assert_eq!(seen, positions.len());
        eprintln!("{name} in {ranks}, chunks of {chunk}: at most {worst:.1e} away");
    }
}

/// The tensors of a safetensors file: name, element type, sizes (outermost first), bytes.
fn tensors(path: &Path) -> Vec<(String, String, Vec<usize>, Vec<u8>)> {
    let file = std::fs::read(path).unwrap();
    let start = 8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&file[8..start]).unwrap();
    let all = header
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| *name != "__metadata__");
    all.map(|(name, tensor)| {
        let at = numbers(&tensor["data_offsets"]);
        let bytes = file[start + at[0]..start + at[1]].to_vec();
        let dtype = tensor["dtype"].as_str().unwrap().to_owned();
        (name.clone(), dtype, numbers(&tensor["shape"]), bytes)
    })
    .collect()
}

/// As the converters of llama.cpp do: parts renamed, norms and biases as f32, the query and key rows of llama laid out for pairs of
/// neighbours, its stretched frequencies as a tensor.
fn gguf(name: &str) -> File {
    let config = json(&folder(name).join("config.json"));
    let size = |key: &str| config[key].as_u64().unwrap() as u32;
    let arch = config["model_type"].as_str().unwrap();
    let rope = &config["rope_parameters"];
    let (heads, head_dim) = (size("num_attention_heads"), config["head_dim"].as_u64());
    let head_dim = head_dim.map_or(size("hidden_size") / heads, |d| d as u32);
    let metadata = [
        ("block_count", Meta::U32(size("num_hidden_layers"))),
        ("context_length", Meta::U32(size("max_position_embeddings"))),
        ("embedding_length", Meta::U32(size("hidden_size"))),
        ("feed_forward_length", Meta::U32(size("intermediate_size"))),
        ("attention.head_count", Meta::U32(heads)),
        ("attention.head_count_kv", Meta::U32(size("num_key_value_heads"))),
        ("attention.key_length", Meta::U32(head_dim)),
        ("attention.value_length", Meta::U32(head_dim)),
        (
            "attention.layer_norm_rms_epsilon",
            Meta::F32(config["rms_norm_eps"].as_f64().unwrap() as f32),
        ),
        ("rope.freq_base", Meta::F32(rope["rope_theta"].as_f64().unwrap() as f32)),
    ];
    let mut file = File {
        version: 3,
        metadata: metadata.map(|(k, v)| (format!("{arch}.{k}"), v)).to_vec(),
        tensors: Vec::new(),
    };
    file.set("general.architecture", Meta::Text(arch.to_owned()));
    for (name, dtype, shape, bytes) in tensors(&folder(name).join("model.safetensors")) {
        let part = name.replace("model.", "").replace("layers.", "blk.");
        let part = [
            ("embed_tokens", "token_embd"),
            ("lm_head", "output"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        ]
        .iter()
        .fold(part, |name, (theirs, ours)| name.replace(theirs, ours));
        let part = if part == "norm.weight" {
            "output_norm.weight".to_owned()
        } else {
            part
        };
        let (mut kind, mut bytes) = match dtype.as_str() {
            "F32" => (0, bytes),
            "F16" => (1, bytes),
            "BF16" => (30, bytes),
            other => panic!("{other}"),
        };
        if shape.len() == 1 {
            let value = |b: &[u8; 2]| match kind {
                1 => half::f16::from_le_bytes(*b).to_f32(),
                _ => half::bf16::from_le_bytes(*b).to_f32(),
            };
            if kind != 0 {
                bytes = bytes
                    .as_chunks()
                    .0
                    .iter()
                    .flat_map(|b| value(b).to_le_bytes())
                    .collect();
            }
            kind = 0;
        } else if arch == "llama" && (part.contains("attn_q.") || part.contains("attn_k.")) {
            let row = bytes.len() / shape[0];
            let of = |r: usize| {
                let (head, i) = (r / head_dim as usize, r % head_dim as usize);
                let from = head * head_dim as usize + i / 2 + i % 2 * (head_dim as usize / 2);
                &bytes[from * row..(from + 1) * row]
            };
            bytes = (0..shape[0]).flat_map(of).copied().collect();
        }
        file.tensors.push(Tensor {
            name: part,
            kind,
            dims: shape.iter().rev().map(|d| *d as u64).collect(),
            bytes,
        });
    }
    if rope["rope_type"] == "llama3" {
        let number = |key: &str| rope[key].as_f64().unwrap();
        let (factor, low, high) = (number("factor"), number("low_freq_factor"), number("high_freq_factor"));
        let original = number("original_max_position_embeddings");
        let divisor = |i: u32| {
            let frequency = number("rope_theta").powf(-2.0 * f64::from(i) / f64::from(head_dim));
            let wavelength = 2.0 * std::f64::consts::PI / frequency;
            if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                factor
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                frequency / ((1.0 - smooth) * frequency / factor + smooth * frequency)
            }
        };
        file.tensors.push(Tensor {
            name: "rope_freqs.weight".to_owned(),
            kind: 0,
            dims: vec![u64::from(head_dim / 2)],
            bytes: (0..head_dim / 2)
                .flat_map(|i| (divisor(i) as f32).to_le_bytes())
                .collect(),
        });
    }
    file
}

#[test]
fn models_as_saved_say_what_transformers_does() {
    for (name, ranks) in MODELS {
        for ranks in 1..=ranks {
            compare(name, &folder(name), ranks);
        }
    }
}

#[test]
fn converted_models_say_what_transformers_does() {
    let dir = tempfile::tempdir().unwrap();
    for (name, ranks) in MODELS {
        let path = gguf(name).write(dir.path());
        for ranks in 1..=ranks {
            compare(name, &path, ranks);
        }
    }
}
