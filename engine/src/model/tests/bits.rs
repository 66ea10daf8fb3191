//! A sequence has the same bits whatever is done beside it, and whichever way its tokens and KV came.

use super::super::Scorer;
use super::super::runner::Runner;
use super::super::tiny::{self, Kind, Shape};
use super::{GREEDY, cpu, feed, logits, options, pages, prompt, relative_error};
use crate::backend::cpu::{Cpu, Isa};
use crate::exec::{Executor, KvRun, Sampled, StepSeq};

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
