//! What each request of this engine waits for now.
//!
//! Nothing is counted up and down: whoever serves a request holds a [`Stay`], and levels are read off the stays that are held.
//! So whatever ends a request ends its stay, and the levels need no scheduler that moves.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tandem_wire::phase::{PHASES, Phase};
use tandem_wire::proto;

/// All requests of one engine.
#[derive(Debug)]
pub struct Inflight {
    next: AtomicU64,
    held: Mutex<BTreeMap<u64, Arc<Mutex<At>>>>,
    born: Instant,
    /// Microseconds since `born` of the last thing done for any request.
    progress: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
struct At {
    phase: Phase,
    since: Instant,
    moved: Instant,
}

/// The requests of one phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level {
    /// What they wait for.
    pub phase: Phase,
    /// How many.
    pub count: u32,
    /// The longest that one has been in it.
    pub oldest: Duration,
    /// The longest that one has been in it without a move.
    pub still: Duration,
}

impl Default for Inflight {
    fn default() -> Self {
        Self {
            next: AtomicU64::new(0),
            held: Mutex::default(),
            born: Instant::now(),
            progress: AtomicU64::new(0),
        }
    }
}

impl Inflight {
    /// A request begins to wait for `phase`.
    pub fn enter(self: &Arc<Self>, phase: Phase) -> Arc<Stay> {
        let now = Instant::now();
        let at = Arc::new(Mutex::new(At {
            phase,
            since: now,
            moved: now,
        }));
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.held.lock().insert(id, Arc::clone(&at));
        Arc::new(Stay {
            inflight: Arc::clone(self),
            id,
            at,
        })
    }

    /// Something was done for a request.
    pub(super) fn progressed(&self) {
        let micros = self.born.elapsed().as_micros() as u64;
        self.progress.fetch_max(micros, Ordering::Relaxed);
    }

    /// Since something was last done for a request; before that, since this engine began.
    pub fn progress_age(&self) -> Duration {
        let last = Duration::from_micros(self.progress.load(Ordering::Relaxed));
        self.born.elapsed().saturating_sub(last)
    }

    /// The level of each phase.
    pub fn levels(&self) -> [Level; PHASES.len()] {
        let held: Vec<At> = self.held.lock().values().map(|at| *at.lock()).collect();
        let now = Instant::now();
        PHASES.map(|phase| {
            let here = held.iter().filter(|at| at.phase == phase);
            let longest = |since: fn(&At) -> Instant| {
                let ages = here.clone().map(|at| now.saturating_duration_since(since(at)));
                ages.max().unwrap_or_default()
            };
            Level {
                phase,
                count: here.clone().count() as u32,
                oldest: longest(|at| at.since),
                still: longest(|at| at.moved),
            }
        })
    }

    /// The message form: phases without a request are left out.
    pub fn to_wire(&self) -> Vec<proto::Inflight> {
        let levels = self.levels().into_iter().filter(|level| level.count > 0);
        levels
            .map(|level| proto::Inflight {
                phase: level.phase.into(),
                count: level.count,
                oldest_ms: level.oldest.as_millis() as u64,
                still_ms: level.still.as_millis() as u64,
            })
            .collect()
    }
}

/// One request: it waits until the last holder drops this.
#[derive(Debug)]
pub struct Stay {
    inflight: Arc<Inflight>,
    id: u64,
    at: Arc<Mutex<At>>,
}

impl Stay {
    /// It waits for something else now.
    pub fn move_to(&self, phase: Phase) {
        let mut at = self.at.lock();
        if at.phase != phase {
            let now = Instant::now();
            *at = At {
                phase,
                since: now,
                moved: now,
            };
        }
    }

    /// Something was done for it.
    pub fn touch(&self) {
        self.at.lock().moved = Instant::now();
        self.inflight.progressed();
    }

    /// It waits for its caller until the guard is dropped, and then for what it waited for before.
    pub fn held_up(&self) -> HeldUp<'_> {
        let before = self.at.lock().phase;
        self.move_to(Phase::Client);
        HeldUp { stay: self, before }
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.inflight.held.lock().remove(&self.id);
    }
}

/// A request whose caller takes nothing.
#[derive(Debug)]
pub struct HeldUp<'a> {
    stay: &'a Stay,
    before: Phase,
}

impl Drop for HeldUp<'_> {
    fn drop(&mut self) {
        self.stay.move_to(self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(inflight: &Inflight) -> Vec<(Phase, u32)> {
        let levels = inflight.levels().into_iter().filter(|level| level.count > 0);
        levels.map(|level| (level.phase, level.count)).collect()
    }

    #[test]
    fn a_request_is_in_one_phase_until_its_last_holder_is_gone() {
        let inflight = Arc::new(Inflight::default());
        let stay = inflight.enter(Phase::Accept);
        let other = inflight.enter(Phase::Accept);
        let holder = Arc::clone(&stay);
        assert_eq!(counts(&inflight), [(Phase::Accept, 2)]);
        stay.move_to(Phase::Decode);
        assert_eq!(counts(&inflight), [(Phase::Accept, 1), (Phase::Decode, 1)]);
        let held_up = stay.held_up();
        assert_eq!(counts(&inflight), [(Phase::Accept, 1), (Phase::Client, 1)]);
        drop(held_up);
        drop((stay, other));
        assert_eq!(counts(&inflight), [(Phase::Decode, 1)]);
        drop(holder);
        assert_eq!(counts(&inflight), []);
        assert!(inflight.to_wire().is_empty());
    }

    #[test]
    fn one_that_stands_still_is_not_hidden_by_those_that_move() {
        let inflight = Arc::new(Inflight::default());
        let stuck = inflight.enter(Phase::Transfer);
        let moving = inflight.enter(Phase::Transfer);
        let begun = Instant::now();
        let mut touched = begun;
        while begun.elapsed() < Duration::from_millis(20) {
            // before, or an interruption between the two makes it younger than what it is compared with
            touched = Instant::now();
            moving.touch();
        }
        let [.., transfer, _, _] = inflight.levels();
        assert_eq!((transfer.phase, transfer.count), (Phase::Transfer, 2));
        assert!(transfer.still >= Duration::from_millis(20) && transfer.oldest >= transfer.still);
        assert!(inflight.progress_age() <= touched.elapsed() + Duration::from_millis(1));
        drop(stuck);
        let [.., alone, _, _] = inflight.levels();
        assert!(alone.still < alone.oldest, "{alone:?}");
    }
}
