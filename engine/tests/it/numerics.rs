//! The real model's quantised arithmetic against the same weights held as f32. `make bench BENCH=numerics` does it over more
//! text, beside llama.cpp and with a reference of its own.

use tandem_engine::model::{LoadOptions, Scorer};

use crate::real::real_model;

/// The first tokens of bench/text.txt.
const TEXT: &str = include_str!("../data/text-ids.txt");
/// llama.cpp's own mean divergence over these tokens is 0.0029, ours 0.0020.
const MEAN_KL: f64 = 0.0025;

#[test]
fn logits_of_quantised_weights_stay_near_those_of_f32() {
    let Some(path) = real_model() else { return };
    let ids: Vec<u32> = TEXT.split_whitespace().map(|id| id.parse().unwrap()).collect();
    let score = |as_f32| {
        let mut options = LoadOptions::new(&path);
        options.as_f32 = as_f32;
        options.max_step_tokens = 64;
        options.max_step_seqs = 64;
        let mut all = Vec::new();
        let mut scorer = Scorer::load(&options).unwrap();
        scorer
            .score(&ids, 64, &mut |_, logits| all.push(log_softmax(logits)))
            .unwrap();
        all
    };
    let (exact, quantised) = (score(true), score(false));
    let mean = std::iter::zip(&exact, &quantised)
        .map(|(p, q)| divergence(p, q))
        .sum::<f64>()
        / ids.len() as f64;
    assert!(
        mean <= MEAN_KL,
        "mean KL divergence {mean:.5} over {} tokens",
        ids.len()
    );
    assert!(mean > 0.0, "both passes used the same arithmetic");
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
    logits.iter().map(|x| f64::from(x - most) - sum.ln()).collect()
}

/// KL(p || q) in nats of log probabilities.
fn divergence(p: &[f64], q: &[f64]) -> f64 {
    std::iter::zip(p, q).map(|(p, q)| p.exp() * (p - q)).sum()
}
