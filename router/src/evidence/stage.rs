//! What a request waits for, and for how long.

use std::ops::{Index, IndexMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::KEPT;

/// What a request waits for. Of several choices the one that is least far counts, so the order here is the order of precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// The client, to take what is there of the answer: nothing more is made until it does.
    Client,
    /// The rest of the request's body.
    Body,
    /// Template and tokenizer.
    Text,
    /// Another order on traffic: requests are held back.
    Held,
    /// An engine with room, in the router's queue.
    Queue,
    /// The decode engine, to say that it has the request.
    Accept,
    /// The prefill's run queue.
    PrefillQueue,
    /// The prompt's computation.
    Prefill,
    /// The prompt's KV, on its way.
    Transfer,
    /// The next token.
    Decode,
    /// No engine any more: the answer is being put together.
    Answer,
}

impl Stage {
    /// All of them, in order of precedence.
    pub const ALL: [Self; 11] = [
        Self::Client,
        Self::Body,
        Self::Text,
        Self::Held,
        Self::Queue,
        Self::Accept,
        Self::PrefillQueue,
        Self::Prefill,
        Self::Transfer,
        Self::Decode,
        Self::Answer,
    ];

    /// As JSON and labels say it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Body => "body",
            Self::Text => "text",
            Self::Held => "held",
            Self::Queue => "queue",
            Self::Accept => "accept",
            Self::PrefillQueue => "prefill_queue",
            Self::Prefill => "prefill",
            Self::Transfer => "transfer",
            Self::Decode => "decode",
            Self::Answer => "answer",
        }
    }
}

/// Time per stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spent([Duration; Stage::ALL.len()]);

impl Spent {
    /// Adds another's times.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine += *theirs;
        }
    }

    /// All stages together.
    pub fn total(&self) -> Duration {
        self.0.iter().sum()
    }
}

impl Index<Stage> for Spent {
    type Output = Duration;

    fn index(&self, stage: Stage) -> &Duration {
        &self.0[stage as usize]
    }
}

impl IndexMut<Stage> for Spent {
    fn index_mut(&mut self, stage: Stage) -> &mut Duration {
        &mut self.0[stage as usize]
    }
}

/// Where one request is. From its first guard to its last it is in exactly one stage, so the times add up to its age.
#[derive(Debug, Default)]
pub struct Ledger {
    book: Mutex<Book>,
    /// Microseconds from the request's head to its latest token, plus one; 0: there was none.
    token: AtomicU64,
}

#[derive(Debug, Default)]
struct Book {
    /// Guards in each stage: a request with several choices has several.
    stays: [u16; Stage::ALL.len()],
    /// The stage in which it is, and since when.
    at: Option<(Stage, Instant)>,
    spent: Spent,
}

impl Book {
    /// The guards have moved: what do they say now?
    fn turn(&mut self) {
        let stage = Stage::ALL.into_iter().find(|&stage| self.stays[stage as usize] > 0);
        if stage == self.at.map(|(stage, _)| stage) {
            return;
        }
        let now = Instant::now();
        if let Some((left, since)) = self.at {
            self.spent[left] += now - since;
        }
        self.at = stage.map(|stage| (stage, now));
    }
}

impl Ledger {
    /// A guard went from one stage to another; none: it came, or went.
    fn moved(&self, from: Option<Stage>, to: Option<Stage>) {
        if !KEPT {
            return;
        }
        let mut book = self.book.lock();
        if let Some(from) = from {
            book.stays[from as usize] -= 1;
        }
        if let Some(to) = to {
            book.stays[to as usize] += 1;
        }
        book.turn();
    }

    /// The stage, and since when; none: it has ended.
    pub fn at(&self) -> Option<(Stage, Instant)> {
        self.book.lock().at
    }

    /// A token came, so long after the request's head.
    pub fn token(&self, after: Duration) {
        if !KEPT {
            return;
        }
        self.token.fetch_max(after.as_micros() as u64 + 1, Ordering::Relaxed);
    }

    /// From the request's head to its latest token.
    pub fn last_token(&self) -> Option<Duration> {
        let micros = self.token.load(Ordering::Relaxed).checked_sub(1)?;
        Some(Duration::from_micros(micros))
    }

    /// Time per stage until `now`.
    pub fn spent(&self, now: Instant) -> Spent {
        let book = self.book.lock();
        let mut spent = book.spent;
        if let Some((stage, since)) = book.at {
            spent[stage] += now.saturating_duration_since(since);
        }
        spent
    }
}

/// A guard: its holder waits in a stage until it moves on or is dropped.
#[derive(Debug)]
pub struct Stay {
    ledger: Arc<Ledger>,
    stage: Stage,
}

impl Stay {
    /// Enters a stage.
    pub fn enter(ledger: &Arc<Ledger>, stage: Stage) -> Self {
        ledger.moved(None, Some(stage));
        Self {
            ledger: Arc::clone(ledger),
            stage,
        }
    }

    /// Leaves its stage for another.
    pub fn move_to(&mut self, stage: Stage) {
        if stage == self.stage {
            return;
        }
        self.ledger.moved(Some(self.stage), Some(stage));
        self.stage = stage;
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        self.ledger.moved(Some(self.stage), None);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_least_far_of_several_choices_is_where_a_request_is() {
        let ledger = Arc::new(Ledger::default());
        assert_eq!(ledger.at(), None);
        let _own = Stay::enter(&ledger, Stage::Answer);
        let mut one = Stay::enter(&ledger, Stage::Decode);
        let two = Stay::enter(&ledger, Stage::Prefill);
        let at = || ledger.at().map(|(stage, _)| stage);
        assert_eq!(at(), Some(Stage::Prefill));
        drop(two);
        assert_eq!(at(), Some(Stage::Decode));
        let blocked = Stay::enter(&ledger, Stage::Client);
        assert_eq!(
            at(),
            Some(Stage::Client),
            "nothing is made while the client takes nothing"
        );
        drop(blocked);
        one.move_to(Stage::Queue);
        assert_eq!(at(), Some(Stage::Queue), "another attempt");
        drop(one);
        assert_eq!(at(), Some(Stage::Answer));
    }

    #[test]
    fn a_stage_that_goes_on_keeps_its_beginning() {
        let ledger = Arc::new(Ledger::default());
        let one = Stay::enter(&ledger, Stage::Decode);
        let began = ledger.at().unwrap().1;
        let mut two = Stay::enter(&ledger, Stage::Decode);
        two.move_to(Stage::Answer);
        drop(two);
        assert_eq!(ledger.at(), Some((Stage::Decode, began)));
        drop(one);
        assert_eq!(ledger.at(), None);
        let spent = ledger.spent(Instant::now());
        assert_eq!(spent.total(), spent[Stage::Decode]);
    }

    proptest! {
        /// However choices come, move and go: no time is lost, none is counted twice.
        #[test]
        fn the_times_of_all_stages_are_the_age(moves in prop::collection::vec((0..4usize, 0..Stage::ALL.len(), 0..3u8), 1..60)) {
            let ledger = Arc::new(Ledger::default());
            let began = Instant::now();
            let own = Stay::enter(&ledger, Stage::Body);
            let entered = Instant::now();
            let mut stays: [Option<Stay>; 4] = Default::default();
            for (slot, stage, what) in moves {
                let stage = Stage::ALL[stage];
                match (&mut stays[slot], what) {
                    (stay, 0) => *stay = None,
                    (Some(stay), _) => stay.move_to(stage),
                    (stay, _) => *stay = Some(Stay::enter(&ledger, stage)),
                }
                let now = Instant::now();
                let total = ledger.spent(now).total();
                prop_assert!(total >= now - entered && total <= now - began);
            }
            stays = Default::default();
            let leaving = Instant::now();
            drop(own);
            let total = ledger.spent(Instant::now()).total();
            prop_assert_eq!(ledger.at(), None);
            prop_assert!(total >= leaving - entered && total <= began.elapsed());
            drop(stays);
        }
    }
}
