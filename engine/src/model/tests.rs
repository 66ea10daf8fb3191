//! The whole forward pass.
//!
//! | module | holds |
//! | --- | --- |
//! | `plain` | logits against plain f64 code |
//! | `folder` | a real model's folder against its GGUF file |
//! | `golden` | logits against those of transformers |
//! | `bits` | equal bits however a sequence is cut, batched, threaded, moved |
//! | `ops` | a pass as a list of ops on fixed buffers |
//! | `ranks` | a model in several parts |
//! | `sampling` | what a row's adjustments do |

use std::path::Path;

use super::load::load_cpu;
use super::runner::Runner;
use super::tiny::{Random, Shape};
use super::{KvBudget, LoadOptions};
use crate::backend::cpu::{Cpu, Isa};
use crate::exec::{Executor, SampleParams, StepSeq};

mod bits;
mod folder;
mod golden;
mod ops;
mod plain;
mod ranks;
mod sampling;

const GREEDY: SampleParams = SampleParams::GREEDY;
const PAGE: usize = 8;

/// 4 heads in 2 groups, as two ranks can share them.
const HALVABLE: Shape = Shape {
    inner: 128,
    ..Shape::SMALL
};

fn options(path: &Path, threads: usize) -> LoadOptions {
    LoadOptions {
        threads,
        kv: KvBudget::Pages(160),
        page_tokens: PAGE as u32,
        max_step_tokens: 256,
        max_step_seqs: 24,
        ..LoadOptions::new(path)
    }
}

fn cpu(path: &Path, threads: usize, isa: Isa) -> Runner<Cpu> {
    cut(path, 1, threads, isa)
}

/// A model in `ranks` parts, each with `threads`.
fn cut(path: &Path, ranks: usize, threads: usize, isa: Isa) -> Runner<Cpu> {
    let options = LoadOptions {
        tensor_parallel: ranks,
        isa: Some(isa),
        ..options(path, ranks * threads)
    };
    load_cpu(&options, &mut |_| {}).unwrap()
}

/// Pages of sequence `s`, in an order of their own.
fn pages(s: usize) -> Vec<u32> {
    let mut pages: Vec<u32> = (s * 32..(s + 1) * 32).map(|p| (p % 160) as u32).collect();
    pages.rotate_left(5 + s);
    pages.swap(0, 17);
    pages
}

fn prompt(n: usize, seed: u64, vocab: usize) -> Vec<u32> {
    let mut r = Random(seed);
    (0..n).map(|_| r.below(vocab) as u32).collect()
}

/// The logits of the step's `o`-th sampled row, as bits.
fn logits(m: &Runner<Cpu>, o: usize, vocab: usize) -> Vec<u32> {
    let all = m.rank.backend.floats(m.rank.workspace.logits);
    let ld = vocab.next_multiple_of(8);
    all[o * ld..o * ld + vocab].iter().map(|v| v.to_bits()).collect()
}

/// Feeds `ids` in chunks; the last logits.
fn feed(m: &mut Runner<Cpu>, ids: &[u32], from: usize, chunk: usize, pages: &[u32]) -> Vec<u32> {
    let mut at = from;
    while at < ids.len() {
        let end = (at + chunk).min(ids.len());
        let seq = StepSeq {
            tokens: &ids[at..end],
            first_position: at as u32,
            pages,
            sample: (end == ids.len()).then(|| GREEDY.into()),
        };
        m.step(&[seq], &mut |_| {}).unwrap();
        at = end;
    }
    let vocab = m.spec().vocab_size as usize;
    logits(m, 0, vocab)
}

fn relative_error(a: &[u32], b: &[u32]) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        let (a, b) = (f64::from(f32::from_bits(*a)), f64::from(f32::from_bits(*b)));
        error += (a - b).powi(2);
        size += b.powi(2);
    }
    (error / size).sqrt()
}
