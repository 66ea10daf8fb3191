//! Logits against the plain formulas, in f64.

use super::super::tiny::{self, Kind, Shape};
use super::super::{Dtype, LoadOptions, Scorer, dequantise_row};
use super::{cpu, feed, options, pages, prompt};
use crate::backend::cpu::Isa;

/// A llama forward pass as in the paper: f64, one token after the other, weights dequantised, nothing shared with the engine's code
/// but the reader of rows.
fn plain_forward(file: &tiny::File, s: Shape, ids: &[u32]) -> Vec<f64> {
    let matrix = |name: &str| -> Vec<Vec<f64>> {
        let t = file.tensors.iter().find(|t| t.name == name).unwrap();
        let (k, n) = (t.dims[0] as usize, t.dims.get(1).map_or(1, |n| *n as usize));
        let rows = t.bytes.chunks_exact(t.bytes.len() / n);
        rows.map(|row| {
            let mut out = vec![0.0; k];
            dequantise_row(Dtype::from_ggml(t.kind).unwrap(), row, &mut out);
            out.into_iter().map(f64::from).collect()
        })
        .collect()
    };
    let times = |m: &[Vec<f64>], x: &[f64]| -> Vec<f64> {
        m.iter()
            .map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum())
            .collect()
    };
    let norm = |x: &[f64], w: &[f64]| -> Vec<f64> {
        let r = 1.0 / (x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64 + 1e-5).sqrt();
        x.iter().zip(w).map(|(x, w)| x * r * w).collect()
    };
    let rope_dim = file
        .metadata
        .iter()
        .find_map(|(k, v)| match v {
            tiny::Meta::U32(n) if k == "llama.rope.dimension_count" => Some(*n as usize),
            _ => None,
        })
        .unwrap();
    let factors = if file.tensors.iter().any(|t| t.name == "rope_freqs.weight") {
        matrix("rope_freqs.weight").remove(0)
    } else {
        vec![1.0; rope_dim / 2]
    };
    let rope = |x: &mut [f64], position: usize| {
        for i in 0..rope_dim / 2 {
            let angle = position as f64 * 10_000f64.powf(-2.0 * i as f64 / rope_dim as f64) / factors[i];
            let (a, b) = (x[2 * i], x[2 * i + 1]);
            x[2 * i] = a * angle.cos() - b * angle.sin();
            x[2 * i + 1] = a * angle.sin() + b * angle.cos();
        }
    };
    let embedding = matrix("token_embd.weight");
    let d = s.head_dim;
    let mut cache = vec![(Vec::<Vec<f64>>::new(), Vec::<Vec<f64>>::new()); s.layers];
    let mut x = Vec::new();
    for (position, id) in ids.iter().enumerate() {
        x.clone_from(&embedding[*id as usize]);
        for (l, (keys, values)) in cache.iter_mut().enumerate() {
            let w = |part: &str| matrix(&format!("blk.{l}.{part}.weight"));
            let h = norm(&x, &w("attn_norm")[0]);
            let (mut q, mut k) = (times(&w("attn_q"), &h), times(&w("attn_k"), &h));
            q.chunks_exact_mut(d)
                .chain(k.chunks_exact_mut(d))
                .for_each(|head| rope(head, position));
            keys.push(k);
            values.push(times(&w("attn_v"), &h));
            let mut attended = vec![0.0; s.heads * d];
            for head in 0..s.heads {
                let kv = head / (s.heads / s.kv_heads) * d;
                let dot = |k: &Vec<f64>| (0..d).map(|i| q[head * d + i] * k[kv + i]).sum::<f64>() / (d as f64).sqrt();
                let scores: Vec<f64> = keys.iter().map(|k| dot(k).exp()).collect();
                let sum: f64 = scores.iter().sum();
                for (score, v) in scores.iter().zip(values.iter()) {
                    (0..d).for_each(|i| attended[head * d + i] += score / sum * v[kv + i]);
                }
            }
            times(&w("attn_output"), &attended)
                .iter()
                .zip(&mut x)
                .for_each(|(o, x)| *x += o);
            let h = norm(&x, &w("ffn_norm")[0]);
            let up = times(&w("ffn_up"), &h);
            let inner: Vec<f64> = times(&w("ffn_gate"), &h)
                .iter()
                .zip(&up)
                .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
                .collect();
            times(&w("ffn_down"), &inner)
                .iter()
                .zip(&mut x)
                .for_each(|(o, x)| *x += o);
        }
    }
    let x = norm(&x, &matrix("output_norm.weight")[0]);
    times(&if s.tied { embedding } else { matrix("output.weight") }, &x)
}

/// The distance of logits, as bits, from the plain ones, relative to the latter.
fn distance(got: &[u32], expected: &[f64]) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (g, e) in got.iter().zip(expected) {
        error += (f64::from(f32::from_bits(*g)) - e).powi(2);
        size += e.powi(2);
    }
    (error / size).sqrt()
}

#[test]
fn logits_are_those_of_the_plain_formulas() {
    for (shape, kind, bound) in [
        (Shape::SMALL, Kind::F32, 2e-3),
        (
            Shape {
                tied: false,
                ..Shape::SMALL
            },
            Kind::F16,
            2e-3,
        ),
        (
            Shape {
                heads: 3,
                kv_heads: 1,
                head_dim: 32,
                ..Shape::SMALL
            },
            Kind::Bf16,
            2e-3,
        ),
        // quantised layers take int8 inputs: about 1 % off in a model this narrow, whatever the weights' bits
        (Shape::SMALL, Kind::Q8_0, 0.04),
        (Shape::SMALL, Kind::Q4_1, 0.06),
        (
            Shape {
                heads: 8,
                kv_heads: 2,
                head_dim: 24,
                ..Shape::SMALL
            },
            Kind::Q4_0,
            0.06,
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let file = tiny::llama(shape, kind, if kind == Kind::F32 { Kind::F32 } else { Kind::Q8_0 }, 99);
        let ids = prompt(70, 8, shape.vocab);
        let got = feed(
            &mut cpu(&file.write(dir.path()), 2, Isa::detect()),
            &ids,
            0,
            32,
            &pages(0),
        );
        let relative = distance(&got, &plain_forward(&file, shape, &ids));
        assert!(relative < bound, "{shape:?} {kind:?}: relative error {relative}");
    }
}

#[test]
fn rope_factors_and_partial_rotation_are_those_of_the_plain_formulas() {
    let dir = tempfile::tempdir().unwrap();
    let shape = Shape::SMALL;
    let ids = prompt(40, 8, shape.vocab);
    let whole = tiny::llama(shape, Kind::F32, Kind::F32, 1);
    let run = |file: &tiny::File| {
        feed(
            &mut cpu(&file.write(dir.path()), 1, Isa::detect()),
            &ids,
            0,
            64,
            &pages(0),
        )
    };
    let plain = run(&whole);
    let cases: [(u32, &[f32]); 5] = [
        (16, &[1.0; 8]),
        (16, &[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0]),
        (16, &[8.0; 8]),
        (8, &[]),
        (8, &[0.5, 1.0, 2.0, 4.0]),
    ];
    for (rope_dim, factors) in cases {
        let mut file = whole.clone();
        file.set("llama.rope.dimension_count", tiny::Meta::U32(rope_dim));
        if !factors.is_empty() {
            file.tensors.push(tiny::Tensor {
                name: "rope_freqs.weight".into(),
                kind: 0,
                dims: vec![factors.len() as u64],
                bytes: Kind::F32.encode(factors),
            });
        }
        let (got, expected) = (run(&file), plain_forward(&file, shape, &ids));
        let relative = distance(&got, &expected);
        assert!(
            relative < 2e-3,
            "{rope_dim} rotated by {factors:?}: relative error {relative}"
        );
        // far from the answer without them, or this would prove nothing
        if factors.iter().any(|f| *f > 1.0) || rope_dim < 16 {
            let away = distance(&plain, &expected);
            assert!(away > 1e-2, "{rope_dim} rotated by {factors:?}: only {away} away");
        } else {
            assert_eq!(got, plain);
        }
    }
}

#[test]
fn weights_held_as_f32_are_those_of_the_file() {
    let shape = Shape::SMALL;
    let dir = tempfile::tempdir().unwrap();
    for (kind, bound) in [(Kind::Q4_1, 2e-3), (Kind::Q8_0, 2e-3), (Kind::Bf16, 2e-3)] {
        let file = tiny::llama(shape, kind, Kind::Q8_0, 99);
        let path = file.write(dir.path());
        let ids = prompt(70, 8, shape.vocab);
        let options = LoadOptions {
            as_f32: true,
            ..options(&path, 2)
        };
        let mut last = Vec::new();
        let mut keep = |_, row: &[f32]| last = row.iter().map(|v| v.to_bits()).collect();
        Scorer::load(&options).unwrap().score(&ids, 24, &mut keep).unwrap();
        let relative = distance(&last, &plain_forward(&file, shape, &ids));
        assert!(relative < bound, "{kind:?}: relative error {relative}");
    }
}
