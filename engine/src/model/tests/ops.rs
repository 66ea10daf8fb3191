//! A pass as a list of ops: the same ones on the same buffers for every step of a bucket, as a graph on a device needs it.

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use super::super::LoadOptions;
use super::super::forward::{Bounds, Bucket};
use super::super::load::load_on;
use super::super::runner::Runner;
use super::super::tiny::{self, Kind, Random, Shape};
use super::{GREEDY, HALVABLE, cpu, options, pages};
use crate::backend::cpu::Isa;
use crate::backend::record::{Event, Recorder};
use crate::backend::{BufferShape, Context, Op};
use crate::exec::{Adjust, Executor, Sample, StepSeq};

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
            assert_eq!(allocated, 19);
            let logits = Event::Alloc(BufferShape::F32 { rows: 24, cols: 104 });
            assert!(events.contains(&logits), "{events:?}");
            // heads and inner columns are cut
            let inner = Event::Alloc(BufferShape::Activation {
                rows: 256,
                k: 128 / ranks,
            });
            assert!(events.contains(&inner), "{events:?}");
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
