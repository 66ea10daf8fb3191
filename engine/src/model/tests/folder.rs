//! A real model as a folder of safetensors files, against the GGUF file that it is made of.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use serde_json::{Map, json};

use super::super::checkpoint::{Checkpoint, LayerPart, Part};
use super::super::config::RopePairs;
use super::super::real::{CAPITAL, PARIS, real_model};
use super::super::{KvBudget, LoadOptions, Scorer, dequantise_row, safetensors};

/// Writes the sizes and the weights as f16, named and laid out as hubs have them.
fn publish(model: &Checkpoint, dir: &Path) {
    let c = model.config();
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.intermediate_size,
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": model.tensor(Part::Output).is_none(),
        "hidden_act": "silu",
        "eos_token_id": c.end_tokens,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();

    let parts: Vec<Part> = Part::all(c).filter(|part| model.tensor(*part).is_some()).collect();
    let (mut header, mut at) = (Map::new(), 0);
    for part in &parts {
        let dims = part.dims(c);
        let end = at + 2 * dims.iter().product::<usize>();
        let shape: Vec<usize> = dims.into_iter().rev().collect();
        let entry = json!({"dtype": "F16", "shape": shape, "data_offsets": [at, end]});
        header.insert(safetensors::name(*part).unwrap(), entry);
        at = end;
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut out = BufWriter::new(File::create(dir.join("model.safetensors")).unwrap());
    out.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    out.write_all(&header).unwrap();
    for part in parts {
        let (tensor, dims) = (model.tensor(part).unwrap(), part.dims(c));
        let rows = dims.get(1).copied().unwrap_or(1);
        let row_bytes = tensor.bytes.len() / rows;
        let mut row = vec![0.0; dims[0]];
        for r in 0..rows {
            let from = match part {
                Part::Layer(_, LayerPart::Q | LayerPart::K) => neighbour_of_half(r, c.head_dim),
                _ => r,
            };
            dequantise_row(tensor.dtype, &tensor.bytes[from * row_bytes..][..row_bytes], &mut row);
            for value in &row {
                out.write_all(&half::f16::from_f32(*value).to_le_bytes()).unwrap();
            }
        }
    }
    out.flush().unwrap();
}

/// Where the row of queries or keys that hubs have at `r`, for pairs of halves, lies among those for pairs of neighbours.
fn neighbour_of_half(r: usize, head_dim: usize) -> usize {
    let (head, i) = (r / head_dim, r % head_dim);
    let half = head_dim / 2;
    head * head_dim + 2 * (i % half) + i / half
}

/// The logits of what follows each token.
fn logits(options: &LoadOptions, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    let mut scorer = Scorer::load(options).unwrap();
    scorer
        .score(tokens, tokens.len(), &mut |_, row| all.push(row.to_vec()))
        .unwrap();
    all
}

#[test]
fn smollm2_says_the_same_from_a_folder_as_from_its_file() {
    let Some(file) = real_model() else { return };
    let dir = tempfile::tempdir().unwrap();
    let model = Checkpoint::open(&file).unwrap();
    assert_eq!(model.config().rope_pairs, RopePairs::Neighbours);
    publish(&model, dir.path());

    let tokens = [&CAPITAL[..], &PARIS].concat();
    let options = |path: &Path| LoadOptions {
        threads: 2,
        kv: KvBudget::Pages(16),
        max_length_tokens: Some(200),
        max_step_tokens: 64,
        max_step_seqs: 64,
        ..LoadOptions::new(path)
    };
    let as_f32 = LoadOptions {
        as_f32: true,
        ..options(&file)
    };
    let expected = logits(&as_f32, &tokens);
    let found = logits(&options(dir.path()), &tokens);
    assert_eq!((found.len(), expected.len()), (tokens.len(), tokens.len()));
    for (position, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let (mut error, mut size) = (0.0, 0.0);
        for (f, e) in found.iter().zip(expected) {
            error += f64::from(f - e).powi(2);
            size += f64::from(*e).powi(2);
        }
        // the weights were rounded to f16: 3e-3 was seen
        let relative = (error / size).sqrt();
        assert!(relative < 1e-2, "position {position}: {relative} away");
    }
    for (answer, row) in PARIS.iter().zip(&found[CAPITAL.len() - 1..]) {
        let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
        assert_eq!(best, *answer as usize);
    }
}
