//! The one queue of waiting requests: first come, first served, bounded in length and time.
//!
//! Only the first in line looks for a pair; the others sleep. A request that an engine refused for lack of room keeps
//! its number and so comes back to the head of the line.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Flow;
use crate::engines::{Avoid, Lease, Look, Need, Side};
use crate::error::RouterError;
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

impl Flow {
    /// Waits for a pair with room, until `until` at the latest.
    ///
    /// Where every engine of a side was tried in vain by a probe that began after this call, it fails at once instead of
    /// waiting: no request fails on older knowledge. `again`: it was admitted before, so the bound does not apply.
    pub async fn admit(
        &self,
        ticket: Ticket,
        need: &Need,
        avoid: &Avoid,
        again: bool,
        until: Instant,
    ) -> Result<Box<Lease>, RouterError> {
        let place = {
            let mut waiting = self.queue.waiting.lock();
            // taken under the lock: two that come at once do not both get the last place
            if waiting.first_key_value().is_none_or(|(first, _)| ticket.0 < *first)
                && let Look::Pair(lease) = self.engines.look(need, avoid, self.recompute())
            {
                return Ok(lease);
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
        let asked = Instant::now();
        loop {
            let mut wake = until;
            let first = place.first();
            if first {
                // before the look: what comes up in between is then seen by the look
                let known = [Side::Decode, Side::Prefill].map(|side| self.engines.known_since(side, asked));
                match self.engines.look(need, avoid, self.recompute()) {
                    Look::Pair(lease) => return Ok(lease),
                    Look::Full(at) => wake = at.map_or(until, |at| at.min(until)),
                    Look::NoDecode if known[0] => {
                        return Err(RouterError::NoDecode(self.engines.reasons(Side::Decode)));
                    }
                    Look::NoPrefill if known[1] => {
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
                () = tokio::time::sleep_until(wake.into()) => {}
            }
        }
    }
}
