//! The executor through its public face: what it refuses, and that a real model says something sensible.

use tandem_engine::exec::{Executor, Sample, SampleParams, Sampled, StepError, StepSeq};
use tandem_engine::model::{KvBudget, LoadOptions, load};

use crate::real::{CAPITAL, PARIS, real_model};
use crate::tiny::{self, Kind, Shape};

const GREEDY: SampleParams = SampleParams::GREEDY;

fn tiny_model(dir: &std::path::Path) -> Box<dyn Executor> {
    let path = tiny::llama(Shape::SMALL, Kind::Q4_1, Kind::Q8_0, 1).write(dir);
    let options = LoadOptions {
        threads: 2,
        kv: KvBudget::Pages(8),
        max_step_tokens: 16,
        max_step_seqs: 3,
        max_length_tokens: Some(100),
        ..LoadOptions::new(path)
    };
    load(&options, &mut |_| {}).unwrap()
}

fn greedy_but(change: impl FnOnce(&mut SampleParams)) -> Sample<'static> {
    let mut params = GREEDY;
    change(&mut params);
    params.into()
}

#[test]
fn a_step_that_does_not_fit_is_refused_with_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let mut m = tiny_model(dir.path());
    let seq = |tokens, pages| StepSeq {
        tokens,
        first_position: 0,
        pages,
        sample: Some(GREEDY.into()),
    };
    assert_eq!(m.step(&[], &mut |_| {}).unwrap(), []);
    match m.step(&[seq(&[1; 17], &[0, 1])], &mut |_| {}) {
        Err(StepError::TooLarge {
            tokens: 17,
            seqs: 1,
            max_tokens: 16,
            max_seqs: 3,
        }) => {}
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        m.step(&[seq(&[1], &[0]); 4], &mut |_| {}),
        Err(StepError::TooLarge { seqs: 4, .. })
    ));
    let s = seq(&[1, 2], &[0]);
    let invalid: [(StepSeq<'_>, &str); 9] = [
        (StepSeq { tokens: &[], ..s }, "no tokens"),
        (StepSeq { tokens: &[101], ..s }, "token 101"),
        (
            StepSeq {
                first_position: 99,
                pages: &[0; 7],
                ..s
            },
            "longest sequence is 100",
        ),
        (
            StepSeq {
                first_position: u32::MAX,
                ..s
            },
            "longest sequence is 100",
        ),
        (
            StepSeq {
                first_position: 15,
                ..s
            },
            "17 tokens need 2 pages, 1",
        ),
        (StepSeq { pages: &[8], ..s }, "page 8"),
        (
            StepSeq {
                sample: Some(greedy_but(|p| p.temperature = -1.0)),
                ..s
            },
            "temperature is -1",
        ),
        (
            StepSeq {
                sample: Some(greedy_but(|p| p.temperature = f32::NAN)),
                ..s
            },
            "temperature is NaN",
        ),
        (
            StepSeq {
                sample: Some(greedy_but(|p| p.top_p = 0.0)),
                ..s
            },
            "top_p is 0",
        ),
    ];
    for (bad, why) in invalid {
        // refused beside a good one too, which then was not computed
        match m.step(&[s, bad], &mut |_| panic!("a layer was computed")) {
            Err(StepError::Invalid(e)) => assert!(e.contains(why) && e.contains("sequence 1"), "{e} / {why}"),
            other => panic!("{why}: {other:?}"),
        }
    }
    assert!(matches!(m.step(&[s], &mut |_| {}).unwrap()[..], [Sampled::Token(..)]));
}

#[test]
fn sampling_depends_on_seed_and_position_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut m = tiny_model(dir.path());
    let mut draw = |seed, beside: bool| {
        let params = SampleParams {
            temperature: 1.5,
            top_p: 0.95,
            seed,
            ..GREEDY
        };
        let seq = StepSeq {
            tokens: &[4, 5, 6],
            first_position: 0,
            pages: &[1],
            sample: Some(params.into()),
        };
        let other = StepSeq {
            tokens: &[9; 11],
            pages: &[2],
            ..seq
        };
        let batch = if beside { vec![other, seq] } else { vec![seq] };
        m.step(&batch, &mut |_| {}).unwrap().pop().unwrap()
    };
    let alone: Vec<Sampled> = (0..40).map(|s| draw(s, false)).collect();
    assert_eq!(alone, (0..40).map(|s| draw(s, true)).collect::<Vec<_>>());
    assert!(alone.iter().any(|t| *t != alone[0]), "temperature has no effect");
}

/// Greedy continuation of `prompt`, the prompt in chunks of `chunk`.
fn continue_greedily(m: &mut dyn Executor, prompt: &[u32], count: usize, chunk: usize) -> Vec<u32> {
    let pages: Vec<u32> = (0..32).rev().collect();
    let mut tokens = prompt.to_vec();
    let mut done = 0;
    while tokens.len() < prompt.len() + count {
        let end = (done + chunk).min(tokens.len());
        let seq = StepSeq {
            tokens: &tokens[done..end],
            first_position: done as u32,
            pages: &pages,
            sample: (end == tokens.len()).then(|| GREEDY.into()),
        };
        let result = m.step(&[seq], &mut |_| {}).unwrap().remove(0);
        done = end;
        if let Sampled::Token(t, _) = result {
            tokens.push(t);
        }
    }
    tokens.split_off(prompt.len())
}

#[test]
fn smollm2_knows_the_capital_of_france() {
    let Some(path) = real_model() else { return };
    let mut options = LoadOptions {
        kv: KvBudget::Pages(64),
        ..LoadOptions::new(path)
    };
    for threads in [1, 2] {
        options.threads = threads;
        let mut m = load(&options, &mut |_| {}).unwrap();
        assert_eq!(m.spec().end_tokens, [2]);
        assert_eq!(m.spec().layout.token_bytes(), 30 * 2 * 3 * 64 * 2);
        for chunk in [1, 5, 64] {
            assert_eq!(
                continue_greedily(&mut *m, &CAPITAL, PARIS.len(), chunk),
                PARIS,
                "{threads} threads, chunks of {chunk}"
            );
        }
    }
}
