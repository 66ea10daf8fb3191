//! The one queue of waiting requests: first come, first served, bounded in length and time.
//!
//! Only the first in line looks for a pair; the others sleep. A request that an engine refused for lack of room keeps
//! its number and so comes back to the head of the line. While an order holds requests back ([`Traffic`]), nobody looks.
//!
//! [`Traffic`]: super::Traffic

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Flow;
use super::traffic::Pass;
use crate::engines::{Avoid, Lease, Look, Need, Side};
use crate::error::RouterError;
use crate::evidence::{Stage, Stay};
use crate::knobs::Knobs;
use crate::metrics::Counted;

/// Who waits, by number.
#[derive(Debug)]
pub struct Queue {
    limit: usize,
    next: AtomicU64,
    waiting: Mutex<BTreeMap<u64, Arc<Notify>>>,
}

/// A request's number: the lower, the earlier it came.
#[derive(Debug, Clone, Copy)]
pub struct Ticket(u64);

impl Queue {
    /// An empty queue for at most `limit` waiting requests.
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            next: AtomicU64::new(0),
            waiting: Mutex::default(),
        }
    }

    /// How many wait.
    pub fn depth(&self) -> usize {
        self.waiting.lock().len()
    }

    /// The number of a request that has just come.
    pub fn ticket(&self) -> Ticket {
        Ticket(self.next.fetch_add(1, Ordering::Relaxed))
    }
}

/// A place in the line; dropping it lets the next one look.
struct Place<'a> {
    queue: &'a Queue,
    number: u64,
    told: Arc<Notify>,
    _depth: Counted,
}

impl Place<'_> {
    fn first(&self) -> bool {
        self.queue
            .waiting
            .lock()
            .first_key_value()
            .is_some_and(|(number, _)| *number == self.number)
    }

    /// Hands a call that was meant for the first in line to it, if that is another by now.
    fn pass_on(&self) {
        let waiting = self.queue.waiting.lock();
        if let Some((number, told)) = waiting.first_key_value()
            && *number != self.number
        {
            told.notify_one();
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut waiting = self.queue.waiting.lock();
        waiting.remove(&self.number);
        if let Some((_, told)) = waiting.first_key_value() {
            told.notify_one();
        }
    }
}

/// A request that wants a pair of engines.
#[derive(Debug)]
pub struct Asking<'a> {
    /// Its number.
    pub ticket: Ticket,
    /// How much it needs.
    pub need: &'a Need,
    /// Where it failed before.
    pub avoid: &'a Avoid,
    /// How engines are chosen for it.
    pub knobs: &'a Knobs,
    /// It was admitted before, so the bound of the queue does not apply.
    pub again: bool,
    /// It goes whatever the order on traffic is, past those who wait.
    pub exempt: bool,
    /// How long it waits at most, the time aside in which it is held back.
    pub until: Instant,
    /// Where it says what it waits for.
    pub stay: Option<&'a mut Stay>,
}

/// A request that goes to its engines.
#[derive(Debug)]
pub struct Admitted {
    /// Its places there.
    pub lease: Box<Lease>,
    /// Counts it; none for one that is exempt.
    pub pass: Option<Pass>,
    /// How long it was held back.
    pub held: Duration,
}

impl Flow {
    /// Waits for a pair with room, and as long as an order holds requests back.
    ///
    /// Where every engine of a side was tried in vain by a probe that began after this call, it fails at once instead of
    /// waiting: no request fails on older knowledge.
    pub async fn admit(&self, asking: Asking<'_>) -> Result<Admitted, RouterError> {
        let Asking {
            ticket,
            need,
            avoid,
            knobs,
            again,
            exempt,
            mut until,
            mut stay,
        } = asking;
        let mut held = Duration::ZERO;
        let place = {
            let mut waiting = self.queue.waiting.lock();
            // taken under the lock: two that come at once do not both get the last place
            if (exempt || self.traffic.open() && waiting.first_key_value().is_none_or(|(first, _)| ticket.0 < *first))
                && let Look::Pair(lease) = self.engines.look(need, avoid, knobs)
                && let Some(admitted) = self.pass(lease, exempt, held)
            {
                return Ok(admitted);
            }
            if !again && waiting.len() >= self.queue.limit {
                return Err(RouterError::QueueFull {
                    limit: self.queue.limit,
                });
            }
            let told = Arc::new(Notify::new());
            waiting.insert(ticket.0, Arc::clone(&told));
            let depth = Counted::new(&self.metrics.queue_depth);
            Place {
                queue: &self.queue,
                number: ticket.0,
                told,
                _depth: depth,
            }
        };
        let mut orders = self.traffic.orders();
        let goes = || exempt || self.traffic.open();
        let mut asked = Instant::now();
        loop {
            if !goes() {
                if let Some(stay) = &mut stay {
                    stay.move_to(Stage::Held);
                }
                let since = Instant::now();
                self.traffic.opens().await?;
                // what was known of the engines before is old now
                asked = Instant::now();
                held += asked - since;
                until += asked - since;
                if let Some(stay) = &mut stay {
                    stay.move_to(Stage::Queue);
                }
            }
            let mut wake = until;
            let first = exempt || place.first();
            if first {
                // before the look: what comes up in between is then seen by the look
                let known = [Side::Decode, Side::Prefill].map(|side| self.engines.known_since(side, asked));
                match self.engines.look(need, avoid, knobs) {
                    Look::Pair(lease) => match self.pass(lease, exempt, held) {
                        Some(admitted) => return Ok(admitted),
                        None => continue,
                    },
                    Look::Full(at) => wake = at.map_or(until, |at| at.min(until)),
                    Look::NoDecode if known[0] && goes() => {
                        return Err(RouterError::NoDecode(self.engines.reasons(Side::Decode)));
                    }
                    Look::NoPrefill if known[1] && goes() => {
                        return Err(RouterError::NoPrefill(self.engines.reasons(Side::Prefill)));
                    }
                    Look::NoDecode | Look::NoPrefill => self.engines.probe_now(),
                }
            }
            if Instant::now() >= until {
                return Err(RouterError::QueueTimeout {
                    waited: asked.elapsed(),
                });
            }
            tokio::select! {
                () = self.engines.changed().room.notified(), if first => place.pass_on(),
                () = place.told.notified() => {}
                _ = orders.changed() => {}
                () = tokio::time::sleep_until(wake.into()) => {}
            }
        }
    }

    /// Lets it go with these places, unless an order has come that is against it.
    fn pass(&self, lease: Box<Lease>, exempt: bool, held: Duration) -> Option<Admitted> {
        let pass = if exempt { None } else { Some(self.traffic.enter()?) };
        Some(Admitted { lease, pass, held })
    }
}
