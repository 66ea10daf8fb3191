//! A model in several parts: the same answers, the same KV on the wire, and an end when a part is lost.

use super::super::LoadOptions;
use super::super::load::{load_cpu, load_on};
use super::super::runner::Runner;
use super::super::tiny::{self, Kind, Shape};
use super::{GREEDY, HALVABLE, cpu, cut, feed, options, pages, prompt, relative_error};
use crate::backend::Context;
use crate::backend::cpu::{Cpu, Isa};
use crate::backend::record::Recorder;
use crate::exec::{Executor, KvRun, Sampled, StepSeq};

/// Copies the first `tokens` of a sequence from one engine's pages to another's, as a transfer does.
fn carry(from: &Runner<Cpu>, to: &Runner<Cpu>, shape: Shape, tokens: usize, pages: &[u32]) {
    for layer in 0..shape.layers as u32 {
        for component in 0..2 {
            let run = KvRun {
                layer,
                component,
                first_token: 0,
                tokens: tokens as u32,
            };
            let mut bytes = vec![0; tokens * shape.kv_heads * shape.head_dim * 2];
            from.kv().read(pages, run, &mut bytes).unwrap();
            to.kv().write(pages, run, &bytes).unwrap();
            let mut back = vec![1; bytes.len()];
            to.kv().read(pages, run, &mut back).unwrap();
            assert!(back == bytes, "layer {layer}, component {component}");
        }
    }
}

/// Continues `ids`, of which `computed` are in the KV cache, greedily to `length` tokens.
fn continue_greedily(m: &mut Runner<Cpu>, ids: &[u32], computed: usize, length: usize, pages: &[u32]) -> Vec<u32> {
    let mut ids = ids.to_vec();
    let mut at = computed;
    while ids.len() < length {
        let seq = StepSeq {
            tokens: &ids[at..],
            first_position: at as u32,
            pages,
            sample: Some(GREEDY.into()),
        };
        let sampled = m.step(&[seq], &mut |_| {}).unwrap();
        at = ids.len();
        match sampled[..] {
            [Sampled::Token(token, _)] => ids.push(token),
            ref other => panic!("{other:?}"),
        }
    }
    ids
}

#[test]
fn a_model_in_parts_says_what_the_whole_one_does() {
    let shape = Shape {
        heads: 8,
        kv_heads: 4,
        inner: 256,
        ..HALVABLE
    };
    let dir = tempfile::tempdir().unwrap();
    // a sum in another order moves a key or value to the next f16 now and then, and an int8 input to the next integer
    for (kind, bound) in [(Kind::F32, 1e-3), (Kind::Q8_0, 2e-3), (Kind::Q4_1, 0.02)] {
        let path = tiny::llama(shape, kind, Kind::F32, 13).write(dir.path());
        let ids = prompt(140, 11, shape.vocab);
        let whole = feed(&mut cpu(&path, 2, Isa::detect()), &ids, 0, 64, &pages(0));
        for (ranks, threads) in [(2, 1), (2, 2), (4, 1)] {
            let mut m = cut(&path, ranks, threads, Isa::detect());
            let first = feed(&mut m, &ids, 0, 256, &pages(0));
            let relative = relative_error(&first, &whole);
            assert!(relative < bound, "{kind:?} in {ranks}: relative error {relative}");
            assert!(first != whole, "{kind:?} in {ranks}: the same bits, was it cut at all?");
            for chunk in [1, 3, 16, 65] {
                let got = feed(&mut m, &ids, 0, chunk, &pages(1));
                assert!(
                    got == first,
                    "{kind:?} in {ranks} of {threads} threads, chunks of {chunk}"
                );
            }
        }
    }
}

#[test]
fn prefill_and_decode_may_be_cut_differently() {
    let dir = tempfile::tempdir().unwrap();
    let path = tiny::llama(HALVABLE, Kind::F32, Kind::F32, 13).write(dir.path());
    let ids = prompt(61, 11, HALVABLE.vocab);
    let (mut whole, mut halves) = (cpu(&path, 1, Isa::detect()), cut(&path, 2, 1, Isa::detect()));
    let expected = continue_greedily(&mut whole, &ids, 0, 250, &pages(0));
    assert_eq!(continue_greedily(&mut halves, &ids, 0, 250, &pages(0)), expected);
    let (mut other, at) = (cpu(&path, 1, Isa::detect()), ids.len() - 1);
    carry(&halves, &other, HALVABLE, at, &pages(0));
    assert_eq!(continue_greedily(&mut other, &ids, at, 250, &pages(0)), expected);
    let mut other = cut(&path, 2, 1, Isa::detect());
    carry(&whole, &other, HALVABLE, at, &pages(0));
    assert_eq!(continue_greedily(&mut other, &ids, at, 250, &pages(0)), expected);
}

#[test]
fn a_model_that_cannot_be_cut_so_says_its_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |shape: Shape, kind: Kind, ranks: usize| {
        let path = tiny::llama(shape, kind, Kind::F32, 13).write(dir.path());
        let options = LoadOptions {
            tensor_parallel: ranks,
            ..options(&path, 1)
        };
        load_cpu(&options, &mut |_| {}).err().unwrap().to_string()
    };
    for (shape, ranks, expected) in [
        (
            HALVABLE,
            3,
            "--tensor-parallel 3: the model has 4 query heads and 2 KV heads",
        ),
        (HALVABLE, 4, "give a divisor of 2"),
        (HALVABLE, 0, "at least 1 and at most 64"),
        (HALVABLE, 65, "at least 1 and at most 64"),
        (Shape::SMALL, 2, "the model has 96 inner columns"),
        (
            Shape {
                head_dim: 8,
                ..HALVABLE
            },
            2,
            "2 query heads of 8, which make 16 columns",
        ),
    ] {
        let error = refused(shape, Kind::F32, ranks);
        assert!(error.contains(expected), "{error} / {expected}");
    }
}

#[test]
fn the_loss_of_a_rank_ends_the_step_and_says_which() {
    let dir = tempfile::tempdir().unwrap();
    let path = tiny::llama(HALVABLE, Kind::Q4_1, Kind::Q8_0, 5).write(dir.path());
    let make = |context: Context| {
        let mut recorder = Recorder::default();
        recorder.dies = context.rank == 1;
        Ok(recorder)
    };
    let options = LoadOptions {
        tensor_parallel: 2,
        ..options(&path, 1)
    };
    let mut m = load_on(make, &options, &mut |_| {}).unwrap();
    let pages = pages(0);
    let seq = StepSeq {
        tokens: &[1, 2, 3],
        first_position: 0,
        pages: &pages,
        sample: None,
    };
    for _ in 0..2 {
        let step = std::panic::AssertUnwindSafe(|| m.step(&[seq], &mut |_| {}));
        let panic = std::panic::catch_unwind(step).unwrap_err();
        let text = panic.downcast_ref::<String>().unwrap();
        assert!(text.contains("rank 1 has ended"), "{text}");
    }
}
