//! Sums over the ranks of one model that are threads of one process.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::RwLock;

use super::pool::Barrier;
use crate::backend::Communicator;

/// Between ranks that share memory: each lays its part out, waits for the others and sums all parts in rank order, so that all ranks
/// have the same bits.
pub struct ThreadCommunicator {
    barrier: Barrier,
    limit: Duration,
    /// `[2][ranks]`: while a slow rank reads the parts of one sum, the others may write those of the next. They cannot be two ahead, for
    /// the barrier in between needs the slow one.
    parts: [Vec<RwLock<Vec<f32>>>; 2],
    /// Sums that each rank has begun.
    begun: Vec<AtomicUsize>,
    lost: OnceLock<String>,
}

impl ThreadCommunicator {
    /// For sums of up to `most` values. A rank that is waited for longer than `limit` counts as lost.
    pub fn new(ranks: usize, most: usize, limit: Duration) -> Self {
        let parts = || (0..ranks).map(|_| RwLock::new(Vec::with_capacity(most))).collect();
        Self {
            barrier: Barrier::new(ranks),
            limit,
            parts: [parts(), parts()],
            begun: (0..ranks).map(|_| AtomicUsize::new(0)).collect(),
            lost: OnceLock::new(),
        }
    }

    /// A rank will not come any more: nobody waits from now on, and sums are without meaning. The first reason stays.
    pub fn lose(&self, why: String) {
        let _ = self.lost.set(why);
        self.barrier.break_up();
    }

    /// Why the ranks are no longer together, if so.
    pub fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }
}

impl Communicator for ThreadCommunicator {
    fn ranks(&self) -> usize {
        self.begun.len()
    }

    fn all_reduce(&self, rank: usize, data: &mut [f32]) {
        let parts = &self.parts[self.begun[rank].fetch_add(1, Ordering::Relaxed) % 2];
        {
            let mut own = parts[rank].write();
            own.clear();
            own.extend_from_slice(data);
        }
        if self.barrier.wait_within(self.limit).is_err() {
            self.lose(format!(
                "rank {rank} waited {} s for another rank's part of a sum",
                self.limit.as_secs_f64()
            ));
            return;
        }
        data.copy_from_slice(&parts[0].read());
        for part in &parts[1..] {
            let part = part.read();
            assert_eq!(data.len(), part.len(), "the ranks sum different things");
            for (sum, value) in data.iter_mut().zip(part.iter()) {
                *sum += value;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread::spawn;

    use super::*;

    /// Longer than any test takes.
    const LONG: Duration = Duration::from_mins(10);

    #[test]
    fn all_ranks_get_the_same_sum_however_often_and_whoever_comes_last() {
        for ranks in [1, 2, 3] {
            let c = Arc::new(ThreadCommunicator::new(ranks, 5, LONG));
            let sum = move |c: &ThreadCommunicator, rank: usize| -> Vec<Vec<u32>> {
                let turn = |i: usize| {
                    // not associative: the order shows in the bits
                    let mut data: Vec<f32> = (0..=i % 5)
                        .map(|j| ((i * 31 + j * 7 + rank * 13) as f32).sin() * 10f32.powi((rank * 3) as i32))
                        .collect();
                    if i % ranks == rank {
                        std::thread::yield_now();
                    }
                    c.all_reduce(rank, &mut data);
                    data.iter().map(|v| v.to_bits()).collect()
                };
                (0..2000).map(turn).collect()
            };
            let others: Vec<_> = (1..ranks)
                .map(|rank| {
                    let c = Arc::clone(&c);
                    spawn(move || sum(&c, rank))
                })
                .collect();
            let first = sum(&c, 0);
            for other in others {
                assert!(other.join().unwrap() == first, "{ranks} ranks");
            }
            let expected = |i: usize, j: usize| {
                (0..ranks).map(move |rank| ((i * 31 + j * 7 + rank * 13) as f32).sin() * 10f32.powi((rank * 3) as i32))
            };
            for (i, row) in first.iter().enumerate() {
                for (j, bits) in row.iter().enumerate() {
                    let sum = expected(i, j).reduce(|a, b| a + b).unwrap();
                    assert_eq!(*bits, sum.to_bits(), "sum {i} of {ranks} ranks");
                }
            }
            assert_eq!(c.lost(), None);
        }
    }

    #[test]
    fn nobody_waits_for_a_rank_that_was_lost() {
        let c = Arc::new(ThreadCommunicator::new(3, 1, LONG));
        let waiting: Vec<_> = (0..2)
            .map(|rank| {
                let c = Arc::clone(&c);
                spawn(move || c.all_reduce(rank, &mut [1.0]))
            })
            .collect();
        c.lose("rank 2 has ended".to_owned());
        for w in waiting {
            w.join().unwrap();
        }
        // nor does who comes later, and the reason stays
        c.all_reduce(0, &mut [1.0]);
        c.lose("another reason".to_owned());
        assert_eq!(c.lost(), Some("rank 2 has ended"));
    }

    #[test]
    fn a_rank_that_never_comes_is_waited_for_no_longer_than_the_limit() {
        let c = ThreadCommunicator::new(2, 1, Duration::from_millis(20));
        c.all_reduce(0, &mut [1.0]);
        assert_eq!(c.lost(), Some("rank 0 waited 0.02 s for another rank's part of a sum"));
        // the late one finds it so
        c.all_reduce(1, &mut [1.0]);
    }
}
