//! How hand-offs ended, for whoever judges the way between two engines.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tandem_wire::Reason;
use tandem_wire::proto::{FailedHandoffs, Handoffs};
use tandem_wire::reason::meaning;

/// Hand-offs that are remembered one by one …
const RECENT: usize = 64;
/// … for so long.
const LATELY: Duration = Duration::from_mins(5);

/// One side's hand-offs since the process started.
#[derive(Debug, Default)]
pub struct Tally(Mutex<Book>);

#[derive(Debug, Default)]
struct Book {
    finished: u64,
    failed: BTreeMap<Reason, u64>,
    failed_since: u64,
    /// When, and whether it failed; the newest last.
    recent: VecDeque<(Instant, bool)>,
}

impl Tally {
    /// One ended now; with a reason where it failed. One that failed by nobody's fault says nothing.
    pub(super) fn ended(&self, failed: Option<Reason>, now: Instant) {
        if failed.is_some_and(|reason| !meaning(reason).fault) {
            return;
        }
        let mut book = self.0.lock();
        match failed {
            None => {
                book.finished += 1;
                book.failed_since = 0;
            }
            Some(reason) => {
                *book.failed.entry(reason).or_default() += 1;
                book.failed_since += 1;
            }
        }
        if book.recent.len() == RECENT {
            book.recent.pop_front();
        }
        book.recent.push_back((now, failed.is_some()));
    }

    /// As it is told.
    pub fn to_wire(&self, now: Instant) -> Handoffs {
        let book = self.0.lock();
        let recent = || {
            let lately = |(at, _): &&(Instant, bool)| now.saturating_duration_since(*at) < LATELY;
            book.recent.iter().filter(lately)
        };
        let failed = book.failed.iter().map(|(&reason, &count)| FailedHandoffs {
            reason: reason.into(),
            count,
        });
        Handoffs {
            finished: book.finished,
            failed: failed.collect(),
            failed_since: book.failed_since,
            recent: recent().count() as u32,
            recent_failed: recent().filter(|(_, failed)| *failed).count() as u32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_finishes_ends_a_row_of_failures_and_is_not_forgotten_by_it() {
        let (tally, now) = (Tally::default(), Instant::now());
        assert_eq!(tally.to_wire(now), Handoffs::default());
        for failed in [
            None,
            Some(Reason::Stalled),
            Some(Reason::PeerLost),
            Some(Reason::Stalled),
        ] {
            tally.ended(failed, now);
        }
        let told = tally.to_wire(now);
        assert_eq!((told.finished, told.failed_since), (1, 3));
        assert_eq!((told.recent, told.recent_failed), (4, 3));
        let failed: Vec<_> = told.failed.iter().map(|one| (one.reason(), one.count)).collect();
        assert_eq!(failed, [(Reason::PeerLost, 1), (Reason::Stalled, 2)]);
        tally.ended(None, now);
        let told = tally.to_wire(now);
        assert_eq!((told.finished, told.failed_since, told.recent_failed), (2, 0, 3));
    }

    #[test]
    fn a_client_that_leaves_or_an_engine_that_was_started_again_counts_as_a_broken_way() {
        let (tally, now) = (Tally::default(), Instant::now());
        for reason in [
            Reason::AbortedByClient,
            Reason::AbortedByPeer,
            Reason::StaleBoot,
            Reason::NoCapacity,
            Reason::Draining,
            Reason::Deadline,
        ] {
            tally.ended(Some(reason), now);
        }
        assert_eq!(tally.to_wire(now), Handoffs::default());
    }

    #[test]
    fn what_was_long_ago_is_recent_and_memory_grows() {
        let (tally, now) = (Tally::default(), Instant::now());
        for _ in 0..RECENT + 5 {
            tally.ended(Some(Reason::Stalled), now);
        }
        assert_eq!(tally.to_wire(now).recent_failed, RECENT as u32);
        assert_eq!(tally.0.lock().recent.len(), RECENT);
        let later = tally.to_wire(now + LATELY);
        assert_eq!((later.recent, later.failed_since), (0, RECENT as u64 + 5));
    }
}
