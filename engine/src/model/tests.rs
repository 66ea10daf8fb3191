//! The whole forward pass: against plain f32 code, bit by bit across batchings, and as a list of ops.

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use super::forward::{Bounds, Bucket};
use super::load::{load_cpu, load_on, pool};
use super::runner::Runner;
use super::tiny::{self, Kind, Random, Shape};
use super::{Dtype, KvBudget, LoadOptions, Scorer, dequantise_row};
use crate::backend::cpu::{Cpu, Isa};
use crate::backend::record::{Event, Recorder};
use crate::backend::{BufferShape, Context, Op};
use crate::exec::{Adjust, Executor, KvRun, Sample, SampleParams, Sampled, StepSeq};

mod golden;
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

/// The shapes that bits are compared on: head widths, group sizes, unfused quantisation of attention, an untied head.
fn shapes() -> Vec<Shape> {
    let s = Shape::SMALL;
    vec![
        s,
        Shape {
            hidden: 96,
            heads: 12,
            kv_heads: 12,
            head_dim: 8,
            tied: false,
            ..s
        },
        Shape {
            hidden: 128,
            heads: 6,
            kv_heads: 1,
            head_dim: 80,
            inner: 160,
            layers: 1,
            ..s
        },
        Shape {
            hidden: 576,
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            inner: 512,
            layers: 1,
            ..s
        },
    ]
}

#[test]
fn a_sequence_has_the_same_bits_however_it_is_cut_batched_and_threaded() {
    for (i, shape) in shapes().into_iter().enumerate() {
        for kind in [Kind::Q4_1, Kind::Q4_0, Kind::Q8_0, Kind::F16, Kind::Bf16, Kind::F32] {
            // the first shape with all types, the others with two
            if i > 0 && !matches!(kind, Kind::Q4_1 | Kind::Q8_0) {
                continue;
            }
            let dir = tempfile::tempdir().unwrap();
            let path = tiny::llama(shape, kind, if i == 1 { Kind::F16 } else { Kind::Q8_0 }, 7).write(dir.path());
            let ids = prompt(140, 11, shape.vocab);
            let mut one = cpu(&path, 1, Isa::detect());
            let whole = feed(&mut one, &ids, 0, 256, &pages(0));
            assert!(whole.iter().all(|b| f32::from_bits(*b).is_finite()));
            for threads in [1, 2, 3] {
                let mut m = cpu(&path, threads, Isa::detect());
                for chunk in [1, 2, 3, 5, 7, 8, 11, 12, 13, 16, 17, 63, 64, 65, 100, 139, 256] {
                    let got = feed(&mut m, &ids, 0, chunk, &pages(1));
                    assert!(got == whole, "{shape:?} {kind:?}, chunks of {chunk}, {threads} threads");
                }
                beside_others(&mut m, &ids, &whole, shape.vocab);
            }
        }
    }
}

/// The last token of `ids` decoded, and its last 20 prefilled, beside sequences that decode and prefill.
fn beside_others(m: &mut Runner<Cpu>, ids: &[u32], whole: &[u32], vocab: usize) {
    for own in [1, 20] {
        let before = ids.len() - own;
        for others in [1, 2, 5, 10, 11, 12, 16] {
            feed(m, &ids[..before], 0, 50, &pages(0));
            let prompts: Vec<Vec<u32>> = (0..others).map(|s| prompt(9 + 2 * s, 100 + s as u64, vocab)).collect();
            // these share their pages: what they compute does not matter, only that they do
            let shared = pages(2);
            let mut batch: Vec<StepSeq<'_>> = prompts
                .iter()
                .enumerate()
                .map(|(s, p)| StepSeq {
                    tokens: if s % 2 == 0 { &p[..1] } else { p },
                    first_position: if s % 2 == 0 { 30 } else { 0 },
                    pages: &shared,
                    sample: (s % 3 != 0).then(|| GREEDY.into()),
                })
                .collect();
            let place = others / 2;
            let pages = pages(0);
            let seq = StepSeq {
                tokens: &ids[before..],
                first_position: before as u32,
                pages: &pages,
                sample: Some(GREEDY.into()),
            };
            batch.insert(place, seq);
            let result = m.step(&batch, &mut |_| {}).unwrap();
            assert_eq!(
                result.iter().map(|r| *r == Sampled::None).collect::<Vec<_>>(),
                batch.iter().map(|s| s.sample.is_none()).collect::<Vec<_>>()
            );
            let out = batch[..place].iter().filter(|s| s.sample.is_some()).count();
            assert!(logits(m, out, vocab) == whole, "{own} tokens beside {others} others");
        }
    }
}

#[test]
fn moved_and_reused_kv_gives_the_same_bits() {
    let shape = Shape::SMALL;
    let dir = tempfile::tempdir().unwrap();
    let path = tiny::llama(shape, Kind::Q4_1, Kind::Q8_0, 3).write(dir.path());
    let ids = prompt(100, 5, shape.vocab);
    let mut first = cpu(&path, 2, Isa::detect());
    let whole = feed(&mut first, &ids, 0, 64, &pages(0));
    let mut second = cpu(&path, 1, Isa::detect());
    for moved in [8, 40, 77, 99] {
        for layer in 0..shape.layers as u32 {
            for component in 0..2 {
                let run = KvRun {
                    layer,
                    component,
                    first_token: 0,
                    tokens: moved as u32,
                };
                let mut bytes = vec![0; moved * shape.kv_heads * shape.head_dim * 2];
                first.kv().read(&pages(0), run, &mut bytes).unwrap();
                second.kv().write(&pages(3), run, &bytes).unwrap();
            }
        }
        assert!(
            feed(&mut second, &ids, moved, 30, &pages(3)) == whole,
            "{moved} tokens moved"
        );
        // a prefix that is already there, on the engine that made it
        assert!(
            feed(&mut first, &ids, moved, 13, &pages(0)) == whole,
            "{moved} tokens reused"
        );
    }
}

#[test]
fn the_scalar_backend_says_the_same_as_the_fast_one() {
    for kind in [Kind::Q4_1, Kind::Q8_0, Kind::F16] {
        let shape = Shape::SMALL;
        let dir = tempfile::tempdir().unwrap();
        let path = tiny::llama(shape, kind, Kind::Q8_0, 21).write(dir.path());
        let ids = prompt(90, 4, shape.vocab);
        let fast = feed(&mut cpu(&path, 2, Isa::detect()), &ids, 0, 32, &pages(0));
        let mut plain = cpu(&path, 1, Isa::Scalar);
        let scalar = feed(&mut plain, &ids, 0, 32, &pages(0));
        let error = relative_error(&fast, &scalar);
        // int8 inputs round a value that lies on an edge either way
        assert!(error < 0.02, "{kind:?}: {error}");
        // and the scalar one does not depend on the cut either
        assert!(feed(&mut plain, &ids, 0, 7, &pages(1)) == scalar, "{kind:?}");
    }
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
fn a_sequence_whose_numbers_break_fails_alone() {
    let shape = Shape::SMALL;
    let dir = tempfile::tempdir().unwrap();
    for kind in [Kind::Q4_1, Kind::Q8_0, Kind::F16] {
        let mut file = tiny::llama(Shape { tied: false, ..shape }, kind, Kind::F16, 5);
        // the embedding of token 7
        let row = &mut file.tensor("token_embd.weight").bytes[7 * 64 * 2..];
        row[10..12].copy_from_slice(&half::f16::NAN.to_le_bytes());
        let path = file.write(dir.path());
        for isa in [Isa::Scalar, Isa::detect()] {
            let mut m = cpu(&path, 2, isa);
            let (good, bad) = (prompt(20, 1, 7), vec![1, 2, 7, 3]);
            let alone = feed(&mut m, &good, 0, 32, &pages(0));
            let (a, b) = (pages(0), pages(1));
            let seq = |tokens, pages| StepSeq {
                tokens,
                first_position: 0,
                pages,
                sample: Some(GREEDY.into()),
            };
            let result = m
                .step(&[seq(&bad[..], &b[..]), seq(&good[..], &a[..])], &mut |_| {})
                .unwrap();
            assert_eq!(result[0], Sampled::NotFinite, "{kind:?} {isa:?}");
            assert!(matches!(result[1], Sampled::Token(..)), "{kind:?} {isa:?}");
            assert!(logits(&m, 1, shape.vocab) == alone);
            // pages that held NaN serve the next sequence
            assert!(feed(&mut m, &good, 0, 5, &pages(1)) == alone, "{kind:?} {isa:?}");
        }
    }
}

#[test]
fn layers_are_told_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = tiny::llama(
        Shape {
            layers: 5,
            ..Shape::SMALL
        },
        Kind::Q4_1,
        Kind::Q8_0,
        5,
    )
    .write(dir.path());
    let mut m = cpu(&path, 2, Isa::detect());
    let mut told = Vec::new();
    let pages = pages(0);
    let seq = StepSeq {
        tokens: &[1, 2, 3],
        first_position: 0,
        pages: &pages,
        sample: None,
    };
    m.step(&[seq], &mut |l| told.push(l)).unwrap();
    assert_eq!(told, [1, 2, 3, 4, 5]);
}

/// What each rank's backend is asked.
type Logs = Vec<Arc<Mutex<Vec<Event>>>>;

fn recorder(path: &Path, ranks: usize) -> (Runner<Recorder>, Logs) {
    let logs: Logs = (0..ranks).map(|_| Arc::default()).collect();
    let make = |context: Context| {
        let mut recorder = Recorder::default();
        recorder.events = Arc::clone(&logs[context.rank]);
        Ok(recorder)
    };
    let options = LoadOptions {
        tensor_parallel: ranks,
        ..options(path, 1)
    };
    let runner = load_on(make, &options, &mut |_| {}).unwrap();
    (runner, logs)
}

/// The events of one step, each rank's.
fn record(m: &mut Runner<Recorder>, logs: &Logs, batch: &[StepSeq<'_>]) -> Vec<Vec<Event>> {
    for log in logs {
        log.lock().clear();
    }
    m.step(batch, &mut |_| {}).unwrap();
    logs.iter().map(|log| std::mem::take(&mut *log.lock())).collect()
}

#[test]
fn a_decode_step_of_a_bucket_is_the_same_ops_on_the_same_buffers_at_any_lengths() {
    for ranks in [1, 2] {
        let dir = tempfile::tempdir().unwrap();
        let path = tiny::llama(HALVABLE, Kind::Q4_1, Kind::Q8_0, 5).write(dir.path());
        let (mut m, logs) = recorder(&path, ranks);
        let mut r = Random(9);
        let all: Vec<Vec<u32>> = (0..24).map(pages).collect();
        let mut lists = std::collections::HashMap::<(usize, Bucket), Vec<Op>>::new();
        for _ in 0..300 {
            let seqs = 1 + r.below(24);
            let positions: Vec<u32> = (0..seqs).map(|_| r.below(250) as u32).collect();
            let (biases, mask) = ([[5, 0], [6, 1f32.to_bits()]], vec![u32::MAX; 4]);
            let seen: Vec<[u32; 2]> = (0..r.below(90) as u32).map(|t| [t, t % 3]).collect();
            let batch: Vec<StepSeq<'_>> = positions
                .iter()
                .enumerate()
                .map(|(s, p)| StepSeq {
                    tokens: &[3],
                    first_position: *p,
                    pages: &all[s],
                    sample: Some(Sample {
                        adjust: Adjust {
                            biases: &biases[..s % 3],
                            seen: if s % 2 == 0 { &seen } else { &[] },
                            mask: (p % 2 == 0).then_some(&mask[..]),
                        },
                        logprobs: (p % 5 == 0).then_some(3),
                        ..GREEDY.into()
                    }),
                })
                .collect();
            let bucket = Bucket::of(seqs, seqs, m.rank.bounds);
            for (rank, events) in record(&mut m, &logs, &batch).into_iter().enumerate() {
                let ops = ops_of_a_pass(&events, rank);
                let key = (rank, bucket);
                assert_eq!(*lists.entry(key).or_insert_with(|| ops.clone()), ops, "{key:?}");
            }
        }
        // 1, 2, 4, 8, 16 and the bound itself, 24
        assert_eq!(lists.len(), 6 * ranks, "{:?}", lists.keys());
        for rank in 0..ranks {
            // and the lists do differ between buckets, or the test would compare nothing
            let one = &lists[&(rank, Bucket { rows: 1, outs: 1 })];
            assert_ne!(one, &lists[&(rank, Bucket { rows: 2, outs: 2 })]);
            let count = |f: fn(&Op) -> bool| one.iter().filter(|op| f(op)).count();
            assert_eq!(count(|op| matches!(op, Op::Attend { .. })), 2);
            assert_eq!(count(|op| matches!(op, Op::AllReduce { .. })), 4);
            // the residual is added once, and one rank samples
            let adds = count(|op| matches!(op, Op::Project { residual: true, .. }));
            let samples = count(|op| matches!(op, Op::Head { .. } | Op::Sample { .. }));
            assert_eq!((adds, samples), if rank == 0 { (4, 2) } else { (0, 0) }, "rank {rank}");
        }
    }
}

/// The ops of one pass: everything is written before the first, read after the last (by the first rank), and nothing allocated.
fn ops_of_a_pass(events: &[Event], rank: usize) -> Vec<Op> {
    let first = events.iter().position(|e| matches!(e, Event::Op(_))).unwrap();
    let finish = events.iter().position(|e| *e == Event::Finish).unwrap();
    assert!(!events.iter().any(|e| matches!(e, Event::Alloc(_))), "a step allocates");
    assert!(
        events[..first].iter().all(|e| matches!(e, Event::Write(..))),
        "{events:?}"
    );
    assert!(
        events[finish + 1..].iter().all(|e| matches!(e, Event::Read(..))),
        "{events:?}"
    );
    assert!(rank == 0 || events.len() == finish + 1, "rank {rank} is read");
    events[first..finish]
        .iter()
        .map(|e| match e {
            Event::Op(op) => *op,
            other => panic!("{other:?} in the middle of a pass"),
        })
        .collect()
}

#[test]
fn every_buffer_is_made_while_loading() {
    let dir = tempfile::tempdir().unwrap();
    let path = tiny::llama(HALVABLE, Kind::Q4_1, Kind::Q8_0, 5).write(dir.path());
    for ranks in [1, 2] {
        let (_m, logs) = recorder(&path, ranks);
        for events in logs {
            let events = events.lock();
            let allocated = events.iter().filter(|e| matches!(e, Event::Alloc(_))).count();
            assert_eq!(allocated, 20);
            let logits = Event::Alloc(BufferShape::F32 { rows: 24, cols: 104 });
            assert!(events.contains(&logits), "{events:?}");
            // heads and inner columns are cut
            let inner = Event::Alloc(BufferShape::F32 {
                rows: 256,
                cols: 128 / ranks,
            });
            assert!(events.contains(&inner), "{events:?}");
        }
    }
}

#[test]
fn buckets_are_powers_of_two_up_to_the_bounds() {
    let bounds = Bounds {
        rows: 100,
        seqs: 24,
        seq_pages: 1,
        seq_adjust: 0,
    };
    let of = |rows, outs| {
        let b = Bucket::of(rows, outs, bounds);
        (b.rows, b.outs)
    };
    assert_eq!(of(1, 0), (1, 0));
    assert_eq!(of(3, 3), (4, 4));
    assert_eq!(of(17, 17), (32, 24));
    assert_eq!(of(65, 1), (100, 1));
    assert_eq!(
        Bucket::of(
            4,
            4,
            Bounds {
                rows: 5,
                seqs: 24,
                seq_pages: 1,
                seq_adjust: 0
            }
        ),
        Bucket { rows: 4, outs: 4 }
    );
    assert_eq!(
        Bucket::of(
            5,
            5,
            Bounds {
                rows: 5,
                seqs: 24,
                seq_pages: 1,
                seq_adjust: 0
            }
        ),
        Bucket { rows: 5, outs: 5 }
    );
}

#[test]
fn scored_logits_are_those_that_steps_sample_from() {
    let shape = Shape::SMALL;
    let dir = tempfile::tempdir().unwrap();
    let path = tiny::llama(shape, Kind::Q4_1, Kind::Q8_0, 3).write(dir.path());
    let ids = prompt(50, 5, shape.vocab);
    let mut m = cpu(&path, 2, Isa::detect());
    let mut scorer = Scorer::load(&options(&path, 2)).unwrap();
    let score = |scorer: &mut Scorer, chunk: usize| {
        let mut all = Vec::new();
        scorer
            .score(&ids, chunk, &mut |position, row| {
                assert_eq!(position, all.len());
                all.push(row.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
            })
            .unwrap();
        all
    };
    let all = score(&mut scorer, 24);
    assert_eq!(all.len(), ids.len());
    for n in [1, 8, 23, 24, 25, 50] {
        assert!(
            all[n - 1] == feed(&mut m, &ids[..n], 0, 64, &pages(0)),
            "after {n} tokens"
        );
    }
    assert!(all == score(&mut scorer, 1), "the way of decoding");
    // a chunk beyond what the logits have room for
    let error = scorer.score(&ids, 25, &mut |_, _| {}).unwrap_err();
    assert!(
        error.to_string().contains("25 tokens") && error.to_string().contains("24 fit"),
        "{error}"
    );
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

#[test]
fn more_kv_bytes_than_64_bits_count_are_refused_by_flag() {
    let budget = KvBudget::Pages(4_000_000);
    let e = pool(budget, 1024, 1 << 43).unwrap_err().to_string();
    assert!(e.contains("--kv-pages 4000000") && e.contains("64 bits"), "{e}");
    assert_eq!(pool(budget, 1024, 1 << 42).unwrap(), (4_000_000, 4_000_000 << 42));
}
