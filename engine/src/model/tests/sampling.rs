//! Sampling by a whole model: what a row's adjustments do, and what they leave alone.

use super::super::tiny::{self, Kind, Shape};
use super::{GREEDY, cpu, feed, pages, prompt};
use crate::backend::cpu::Isa;
use crate::exec::{Adjust, Executor, Sample, SampleParams, Sampled, StepSeq};

#[test]
fn a_row_is_adjusted_alone_and_its_log_probabilities_are_those_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let shape = Shape::SMALL;
    let path = tiny::llama(shape, Kind::Q4_1, Kind::Q8_0, 5).write(dir.path());
    for threads in [1, 2] {
        let mut m = cpu(&path, threads, Isa::detect());
        let ids = prompt(12, 3, shape.vocab);
        let row: Vec<f32> = feed(&mut m, &ids, 0, 32, &pages(0))
            .into_iter()
            .map(f32::from_bits)
            .collect();
        let mut order: Vec<u32> = (0..shape.vocab as u32).collect();
        order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]).then(a.cmp(b)));
        let mass: f64 = row.iter().map(|l| f64::from(*l).exp()).sum();
        let logprob = |t: u32| f64::from(row[t as usize]) - mass.ln();

        let only = |allowed: &[u32]| {
            let mut mask = vec![0u32; shape.vocab.div_ceil(32)];
            for t in allowed {
                mask[*t as usize / 32] |= 1 << (t % 32);
            }
            mask
        };
        let (last, few) = (only(&order[90..]), only(&order[3..5]));
        let nothing = only(&[]);
        let bias = [[order[1], 50f32.to_bits()]];
        let seen = [[order[0], 1], [order[1], 0]];
        let penalised = SampleParams {
            presence_penalty: 60.0,
            ..GREEDY
        };
        let samples = [
            (GREEDY.into(), Some(order[0])),
            (masked(&last), Some(order[90])),
            (masked(&nothing), None),
            (biased(&bias), Some(order[1])),
            (
                Sample {
                    params: penalised,
                    adjust: Adjust {
                        seen: &seen,
                        ..Adjust::default()
                    },
                    logprobs: Some(4),
                },
                Some(order[1]),
            ),
            (masked(&few), Some(order[3])),
            (GREEDY.into(), Some(order[0])),
        ];
        let all: Vec<Vec<u32>> = (0..samples.len()).map(pages).collect();
        let batch: Vec<StepSeq<'_>> = samples
            .iter()
            .zip(&all)
            .map(|((sample, _), pages)| StepSeq {
                tokens: &ids,
                first_position: 0,
                pages,
                sample: Some(*sample),
            })
            .collect();
        let result = m.step(&batch, &mut |_| {}).unwrap();
        for (i, ((sample, expected), got)) in samples.iter().zip(result).enumerate() {
            let Some(expected) = *expected else {
                assert_eq!(got, Sampled::NoneAllowed, "row {i}");
                continue;
            };
            let Sampled::Token(token, told) = got else {
                panic!("row {i}: {got:?}")
            };
            assert_eq!(token, expected, "row {i}");
            assert_eq!(told.is_some(), sample.logprobs.is_some(), "row {i}");
            let Some(told) = told else { continue };
            assert!(
                (f64::from(told.logprob) - logprob(token)).abs() < 1e-5,
                "row {i}: {told:?}"
            );
            assert_eq!(told.top.iter().map(|t| t.0).collect::<Vec<_>>(), order[..4], "row {i}");
            for (t, l) in told.top {
                assert!((f64::from(l) - logprob(t)).abs() < 1e-5, "row {i}, token {t}: {l}");
            }
        }
    }
}

fn masked(mask: &[u32]) -> Sample<'_> {
    Sample {
        adjust: Adjust {
            mask: Some(mask),
            ..Adjust::default()
        },
        logprobs: Some(4),
        ..GREEDY.into()
    }
}

fn biased(biases: &[[u32; 2]]) -> Sample<'_> {
    Sample {
        adjust: Adjust {
            biases,
            ..Adjust::default()
        },
        ..GREEDY.into()
    }
}

#[test]
fn an_adjustment_that_an_op_would_follow_blindly_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = tiny::llama(Shape::SMALL, Kind::Q4_1, Kind::Q8_0, 5).write(dir.path());
    let mut m = cpu(&path, 1, Isa::detect());
    let (far, many) = ([[101, 0]], vec![[1, 0]; 1_025]);
    let broken = [[1, f32::NAN.to_bits()]];
    let pages = pages(0);
    for (adjust, logprobs, why) in [
        (
            Adjust {
                biases: &far,
                ..Adjust::default()
            },
            None,
            "token 101",
        ),
        (
            Adjust {
                seen: &far,
                ..Adjust::default()
            },
            None,
            "token 101",
        ),
        (
            Adjust {
                biases: &many,
                ..Adjust::default()
            },
            None,
            "1025 biased",
        ),
        (
            Adjust {
                seen: &many,
                ..Adjust::default()
            },
            None,
            "1025 seen",
        ),
        (
            Adjust {
                biases: &broken,
                ..Adjust::default()
            },
            None,
            "is NaN",
        ),
        (
            Adjust {
                mask: Some(&[1; 3]),
                ..Adjust::default()
            },
            None,
            "3 words",
        ),
        (Adjust::default(), Some(21), "21 log-probabilities"),
    ] {
        let seq = StepSeq {
            tokens: &[1],
            first_position: 0,
            pages: &pages,
            sample: Some(Sample {
                params: GREEDY,
                adjust,
                logprobs,
            }),
        };
        match m.step(&[seq], &mut |_| {}) {
            Err(error) => assert!(error.to_string().contains(why), "{error} / {why}"),
            Ok(result) => panic!("{why}: {result:?}"),
        }
    }
}
