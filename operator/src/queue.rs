//! Which deployment is looked at next. One that is due twice is looked at once, and never by two at a time.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::cluster::cache::Key;

/// Deployments and when each is due.
#[derive(Debug, Default)]
pub struct Queue {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    order: BTreeSet<(Instant, Key)>,
    entries: HashMap<Key, Entry>,
}

#[derive(Debug, Default)]
struct Entry {
    due: Option<Instant>,
    running: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is due now.
    pub fn touch(&self, key: &Key) {
        self.at(key, Instant::now());
    }

    /// It is due then, if not sooner.
    pub fn at(&self, key: &Key, due: Instant) {
        let mut state = self.lock();
        let entry = state.entries.entry(key.clone()).or_default();
        let old = entry.due;
        if old.is_some_and(|old| old <= due) {
            return;
        }
        entry.due = Some(due);
        if !entry.running {
            if let Some(old) = old {
                state.order.remove(&(old, key.clone()));
            }
            state.order.insert((due, key.clone()));
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Waits for the next that is due; it is nobody else's until [`Self::done`].
    pub async fn next(&self) -> Key {
        loop {
            let first = self.lock().order.first().map(|(due, _)| *due);
            match first {
                Some(due) if due <= Instant::now() => {
                    if let Some(key) = self.take() {
                        return key;
                    }
                }
                Some(due) => tokio::select! {
                    () = sleep_until(due) => {}
                    () = self.changed.notified() => {}
                },
                None => self.changed.notified().await,
            }
        }
    }

    fn take(&self) -> Option<Key> {
        let mut state = self.lock();
        let (_, key) = state.order.pop_first()?;
        let entry = state.entries.get_mut(&key)?;
        entry.due = None;
        entry.running = true;
        Some(key)
    }

    /// It was looked at. What came meanwhile is not lost.
    pub fn done(&self, key: &Key) {
        let mut state = self.lock();
        let Some(entry) = state.entries.get_mut(key) else {
            return;
        };
        entry.running = false;
        match entry.due {
            Some(due) => {
                state.order.insert((due, key.clone()));
            }
            None => {
                state.entries.remove(key);
            }
        }
        drop(state);
        self.changed.notify_one();
    }

    /// How many wait for a later time or are due.
    pub fn len(&self) -> usize {
        self.lock().order.len()
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
