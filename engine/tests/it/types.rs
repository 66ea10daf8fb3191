//! Models of every element type, and of several at once as `Q4_K_M` files are: the same logits however they are computed, and near
//! those of the same weights held as f32.

use std::path::Path;

use tandem_engine::backend::cpu::Isa;
use tandem_engine::model::{KvBudget, LoadOptions, Scorer};

use crate::tiny::{self, File, Kind, Shape};

/// Inputs of every matrix are whole blocks of the K types.
const SHAPE: Shape = Shape {
    hidden: 256,
    heads: 4,
    kv_heads: 2,
    head_dim: 64,
    inner: 512,
    layers: 1,
    ..Shape::SMALL
};

/// A file of each type, and two of several.
fn files() -> Vec<(String, File)> {
    let kinds = [
        Kind::Q4_0,
        Kind::Q4_1,
        Kind::Q5_0,
        Kind::Q5_1,
        Kind::Q8_0,
        Kind::Q4K,
        Kind::Q5K,
        Kind::Q6K,
        Kind::F16,
        Kind::Bf16,
    ];
    let mut files: Vec<_> = kinds
        .map(|kind| (format!("{kind:?}"), tiny::llama(SHAPE, kind, kind, 7)))
        .into();
    // values apart from queries and keys; gate and up, which lie in turn, apart; halves of a matrix in int8 and f32
    for (what, v, up) in [
        ("quantised", Kind::Q8_0, Kind::Q6K),
        ("quantised and not", Kind::F16, Kind::F32),
    ] {
        let mut file = tiny::llama(SHAPE, Kind::Q5_0, Kind::Q6K, 8);
        file.retype("blk.0.attn_v.weight", v, 1);
        file.retype("blk.0.ffn_gate.weight", Kind::Q4K, 2);
        file.retype("blk.0.ffn_up.weight", up, 3);
        file.retype("blk.0.ffn_down.weight", Kind::Q5K, 4);
        files.push((what.to_owned(), file));
    }
    files
}

fn logits(path: &Path, threads: usize, isa: Isa, as_f32: bool, chunk: usize) -> Vec<f32> {
    let options = LoadOptions {
        threads,
        isa: Some(isa),
        as_f32,
        kv: KvBudget::Pages(8),
        max_length_tokens: Some(64),
        max_step_tokens: 32,
        ..LoadOptions::new(path)
    };
    let tokens: Vec<u32> = (0..30).map(|i| i * 37 % 101).collect();
    let mut all = Vec::new();
    let mut scorer = Scorer::load(&options).unwrap();
    scorer
        .score(&tokens, chunk, &mut |_, row| all.extend_from_slice(row))
        .unwrap();
    all
}

/// How far `a` lies from `b`, relative to the size of `b`.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

#[test]
fn models_of_every_type_agree_with_themselves_and_with_f32() {
    for (what, file) in files() {
        let dir = tempfile::tempdir().unwrap();
        let path = file.write(dir.path());
        let whole = logits(&path, 2, Isa::detect(), false, 32);
        for (threads, chunk) in [(1, 30), (2, 1), (3, 13)] {
            let again = logits(&path, threads, Isa::detect(), false, chunk);
            let same = whole.iter().zip(&again).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{what}: {threads} threads, chunks of {chunk}");
        }
        let exact = logits(&path, 2, Isa::detect(), true, 32);
        let error = distance(&whole, &exact);
        // int8 inputs cost some 0.01 a matmul; wrong scales or an order of inputs mixed up cost 0.5 and more
        assert!(error < 0.05, "{what}: {error}");
        for isa in Isa::ALL {
            // a CPU without the instructions says so
            if isa <= Isa::detect() {
                let error = distance(&logits(&path, 1, isa, false, 32), &exact);
                assert!(error < 0.05, "{what} on {isa:?}: {error}");
            }
        }
    }
}

#[test]
fn the_head_does_not_round_its_inputs_to_int8() {
    for head in [Kind::Q8_0, Kind::Q4_0, Kind::Q6K] {
        let dir = tempfile::tempdir().unwrap();
        let path = tiny::llama(SHAPE, Kind::F32, head, 9).write(dir.path());
        let exact = logits(&path, 2, Isa::detect(), true, 32);
        for chunk in [1, 32] {
            let error = distance(&logits(&path, 2, Isa::detect(), false, chunk), &exact);
            // 0.005 with int8 inputs
            assert!(error < 1e-4, "{head:?}, chunks of {chunk}: {error}");
        }
    }
}
