//! The attempts that one side knows: live ones, and tombstones of those that ended, which answer whatever comes late or
//! too early. A key that is here is never opened again.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tandem_wire::{Failure, TransferKey};
use tokio::sync::Notify;

/// How long an ended attempt still answers.
const TOMBSTONE_AGE: Duration = Duration::from_mins(5);
/// More tombstones than this are not kept; the oldest goes first.
const MAX_TOMBSTONES: usize = 16_384;

/// One side's record of a live attempt.
pub trait Tracked: Send + Sync + 'static {
    /// Nothing can change it any more.
    fn is_terminal(&self) -> bool;
    /// How it ended.
    fn ending(&self) -> Ending;
    /// Ends it with DEADLINE if it stood still for `limit`; says whether it did.
    fn end_if_overdue(&self, now: Instant, limit: Duration) -> bool;
    /// Time since it began, while it is live.
    fn age(&self, now: Instant) -> Option<Duration>;
}

/// How an attempt ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The KV was handed over.
    Done,
    /// The first token ended the request, there never was KV to hand over.
    Finished,
    /// It failed or was aborted.
    Failed(Failure),
}

/// What is known of a key.
#[derive(Debug)]
pub enum Found<T> {
    /// It is live, or ended a moment ago.
    Live(Arc<T>),
    /// It ended.
    Ended(Ending),
    /// It was never seen here, or so long ago that it is forgotten.
    Unknown,
}

enum Slot<T> {
    Live(Arc<T>),
    Tombstone(Ending),
}

/// The attempts that one side knows.
pub struct Registry<T> {
    inner: Mutex<Inner<T>>,
    arrived: Notify,
}

struct Inner<T> {
    slots: HashMap<TransferKey, Slot<T>>,
    /// Tombstones, oldest first.
    graves: VecDeque<(Instant, TransferKey)>,
}

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Self {
            inner: Mutex::new(Inner {
                slots: HashMap::new(),
                graves: VecDeque::new(),
            }),
            arrived: Notify::new(),
        }
    }
}

impl<T: Tracked> Registry<T> {
    /// Enters a new attempt; `None` if its key was seen before.
    pub fn insert(&self, key: TransferKey, entry: T) -> Option<Arc<T>> {
        let entry = {
            let mut inner = self.inner.lock();
            if inner.slots.contains_key(&key) {
                return None;
            }
            let entry = Arc::new(entry);
            inner.slots.insert(key, Slot::Live(Arc::clone(&entry)));
            entry
        };
        self.arrived.notify_waiters();
        Some(entry)
    }

    /// What is known of `key`.
    pub fn find(&self, key: TransferKey) -> Found<T> {
        match self.inner.lock().slots.get(&key) {
            Some(Slot::Live(entry)) => Found::Live(Arc::clone(entry)),
            Some(Slot::Tombstone(ending)) => Found::Ended(ending.clone()),
            None => Found::Unknown,
        }
    }

    /// Waits until `key` is known; the data stream may be here before the control stream. The caller sets the deadline.
    pub async fn arrival(&self, key: TransferKey) -> Found<T> {
        loop {
            let arrived = self.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            match self.find(key) {
                Found::Unknown => arrived.await,
                found => return found,
            }
        }
    }

    /// Turns a live entry into a tombstone; its owner calls this when it is done with it.
    pub fn bury(&self, key: TransferKey) {
        let entry = {
            let mut inner = self.inner.lock();
            let Some(Slot::Live(entry)) = inner.slots.get(&key) else {
                return;
            };
            let entry = Arc::clone(entry);
            inner.bury(key, entry.ending(), Instant::now());
            entry
        };
        // its last owner may be us: dropped outside of the lock
        drop(entry);
    }

    /// Refuses a key that was never seen from now on. If it is live, that entry is returned instead.
    pub fn forbid(&self, key: TransferKey, failure: Failure) -> Option<Arc<T>> {
        let mut inner = self.inner.lock();
        match inner.slots.get(&key) {
            Some(Slot::Live(entry)) => return Some(Arc::clone(entry)),
            Some(Slot::Tombstone(_)) => return None,
            None => inner.bury(key, Ending::Failed(failure), Instant::now()),
        }
        drop(inner);
        self.arrived.notify_waiters();
        None
    }

    /// Live entries.
    pub fn live(&self) -> usize {
        let inner = self.inner.lock();
        inner.slots.len() - inner.graves.len()
    }

    /// Ends what stood still for `limit`, buries what ended, forgets old tombstones. The age of the oldest live entry.
    pub(super) fn sweep(&self, now: Instant, limit: Duration) -> Option<Duration> {
        let live: Vec<_> = {
            let mut inner = self.inner.lock();
            inner.forget(now);
            let live = inner.slots.iter().filter_map(|(key, slot)| match slot {
                Slot::Live(entry) => Some((*key, Arc::clone(entry))),
                Slot::Tombstone(_) => None,
            });
            live.collect()
        };
        let mut oldest = None;
        for (key, entry) in live {
            if entry.end_if_overdue(now, limit) {
                tracing::warn!(%key, ending = ?entry.ending(), "the watchdog ended a transfer");
            }
            if entry.is_terminal() {
                self.bury(key);
            }
            oldest = oldest.max(entry.age(now));
        }
        oldest
    }
}

impl<T> Inner<T> {
    fn bury(&mut self, key: TransferKey, ending: Ending, now: Instant) {
        self.slots.insert(key, Slot::Tombstone(ending));
        self.graves.push_back((now, key));
        self.forget(now);
    }

    fn forget(&mut self, now: Instant) {
        while let Some((since, key)) = self.graves.front().copied() {
            let old = now.saturating_duration_since(since) >= TOMBSTONE_AGE;
            if !old && self.graves.len() <= MAX_TOMBSTONES {
                break;
            }
            self.graves.pop_front();
            self.slots.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use tandem_wire::{Reason, Source, TransferId};

    use super::*;

    struct Entry(AtomicBool);

    impl Tracked for Entry {
        fn is_terminal(&self) -> bool {
            self.0.load(Ordering::SeqCst)
        }
        fn ending(&self) -> Ending {
            Ending::Done
        }
        fn end_if_overdue(&self, _: Instant, _: Duration) -> bool {
            false
        }
        fn age(&self, _: Instant) -> Option<Duration> {
            None
        }
    }

    fn key(attempt: u32) -> TransferKey {
        TransferKey {
            id: TransferId::from([7; 16]),
            attempt,
        }
    }

    fn entry() -> Entry {
        Entry(AtomicBool::new(false))
    }

    #[test]
    fn a_key_that_ended_is_not_opened_again() {
        let registry = Registry::default();
        let first = registry.insert(key(0), entry()).unwrap();
        assert!(registry.insert(key(0), entry()).is_none());
        first.0.store(true, Ordering::SeqCst);
        registry.bury(key(0));
        registry.bury(key(0));
        assert!(registry.insert(key(0), entry()).is_none());
        assert!(matches!(registry.find(key(0)), Found::Ended(Ending::Done)));
        assert!(
            registry.insert(key(1), entry()).is_some(),
            "another attempt is another key"
        );
        assert_eq!(registry.live(), 1);
    }

    #[test]
    fn an_abort_that_overtakes_its_open_wins() {
        let registry = Registry::<Entry>::default();
        let failure = Failure::new(Reason::AbortedByPeer, Source::Decode, "client went away");
        assert!(registry.forbid(key(0), failure.clone()).is_none());
        assert!(registry.insert(key(0), entry()).is_none());
        assert!(matches!(registry.find(key(0)), Found::Ended(Ending::Failed(f)) if f == failure));
    }

    #[test]
    fn tombstones_are_bounded_in_number_and_age() {
        let registry = Registry::default();
        let start = Instant::now();
        for attempt in 0..(MAX_TOMBSTONES as u32 + 10) {
            registry.insert(key(attempt), entry()).unwrap();
            registry.bury(key(attempt));
        }
        assert!(matches!(registry.find(key(9)), Found::Unknown));
        assert!(matches!(registry.find(key(10)), Found::Ended(_)));
        assert_eq!(registry.inner.lock().slots.len(), MAX_TOMBSTONES);
        registry.sweep(start + TOMBSTONE_AGE * 2, Duration::MAX);
        assert_eq!(registry.inner.lock().slots.len(), 0);
        assert_eq!(registry.live(), 0);
    }

    #[test]
    fn a_sweep_buries_what_its_owner_forgot() {
        let registry = Registry::default();
        registry
            .insert(key(0), entry())
            .unwrap()
            .0
            .store(true, Ordering::SeqCst);
        registry.insert(key(1), entry()).unwrap();
        registry.sweep(Instant::now(), Duration::MAX);
        assert!(matches!(registry.find(key(0)), Found::Ended(_)));
        assert!(matches!(registry.find(key(1)), Found::Live(_)));
    }
}
