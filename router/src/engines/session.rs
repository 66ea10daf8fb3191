//! One incarnation of an engine as this router knows it, and the guard of a request that is at it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tandem_wire::endpoint::beside;
use tandem_wire::layout::LayoutError;
use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::{EngineInfo, Load, Role};
use tandem_wire::{BootId, KvLayout};
use tokio::sync::Notify;

use super::breaker::{self, Breaker};
use super::channel::Channel;
use super::{Changed, Side};
use crate::metrics::{Counted, EngineGauges};

/// An engine that said NO_CAPACITY is asked again after its next load report, or after this time.
const REFUSAL: Duration = Duration::from_secs(1);
/// An engine that does not say how many sequences it runs at once is taken to run this many.
const DEFAULT_MAX_RUNNING: u32 = 32;

/// One incarnation of an engine.
#[derive(Debug)]
pub struct Session {
    /// What it is used as.
    pub side: Side,
    /// Its control port as configured.
    pub endpoint: String,
    /// Which process it is.
    pub boot: BootId,
    /// Calls to it.
    pub client: EngineClient<Channel>,
    role: Role,
    model_hash: Vec<u8>,
    layout: KvLayout,
    /// host:port of its admin port, if it has one that can be dialled.
    admin_endpoint: Option<String>,
    max_length_tokens: u32,
    /// Sequences it runs at once, by its own word when it was asked who it is.
    max_running: u32,
    /// Requests that may wait at it beside those.
    queue: u32,
    standing: Arc<Standing>,
    gauges: EngineGauges,
    seen: Mutex<Seen>,
    suspect: Notify,
    doubtful: AtomicBool,
}

/// What belongs to the incarnation and outlives a connection to it.
#[derive(Debug, Default)]
struct Standing {
    in_flight: AtomicU32,
    breaker: Mutex<Breaker>,
}

/// The engine's load as last reported.
#[derive(Debug)]
struct Seen {
    load: Load,
    /// Requests of this router at the time of the report: they are part of the load.
    own: u32,
    refused: Option<Instant>,
    at: Instant,
}

/// Why an engine cannot be used although it answers.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// It plays another part.
    #[error("{endpoint} is a {role} engine, but was given as --{side}; give it by the other flag")]
    Role {
        /// Its address.
        endpoint: String,
        /// What it says it is.
        role: &'static str,
        /// What it was given as.
        side: &'static str,
    },
    /// Its identity cannot be read.
    #[error("{endpoint}: {source}")]
    Identity {
        /// Its address.
        endpoint: String,
        /// What is wrong.
        source: tandem_wire::id::IdError,
    },
    /// Its layout cannot be read.
    #[error("{endpoint}: {source}")]
    Layout {
        /// Its address.
        endpoint: String,
        /// What is wrong.
        source: LayoutError,
    },
    /// It cannot hold anything.
    #[error("{endpoint} reports max_length_tokens 0")]
    Length {
        /// Its address.
        endpoint: String,
    },
}

impl Session {
    /// Reads what the engine says about itself; `last` is what was there before on this address.
    pub fn new(
        side: Side,
        endpoint: &str,
        client: EngineClient<Channel>,
        info: &EngineInfo,
        gauges: EngineGauges,
        last: Option<&Self>,
    ) -> Result<Self, Unfit> {
        let endpoint = endpoint.to_owned();
        let role = info.role();
        let name = match (role, side) {
            (Role::Unified, _) | (Role::Prefill, Side::Prefill) | (Role::Decode, Side::Decode) => None,
            (Role::Prefill, Side::Decode) => Some("prefill"),
            (Role::Decode, Side::Prefill) => Some("decode"),
            (Role::Unspecified, _) => Some("unknown"),
        };
        if let Some(role) = name {
            return Err(Unfit::Role {
                endpoint,
                role,
                side: side.name(),
            });
        }
        let boot = BootId::from_wire(&info.boot_id).map_err(|source| Unfit::Identity {
            endpoint: endpoint.clone(),
            source,
        })?;
        let layout = KvLayout::from_wire(info.layout.as_ref()).map_err(|source| Unfit::Layout {
            endpoint: endpoint.clone(),
            source,
        })?;
        let pool = info.total_pages.saturating_mul(layout.page_tokens);
        let max_length_tokens = if pool == 0 {
            info.max_length_tokens
        } else {
            info.max_length_tokens.min(pool)
        };
        if max_length_tokens == 0 {
            return Err(Unfit::Length { endpoint });
        }
        let knobs = info.knobs.unwrap_or_default();
        let max_running = knobs.max_running.filter(|n| *n > 0).unwrap_or(DEFAULT_MAX_RUNNING);
        let queue = match side {
            Side::Decode => 0,
            Side::Prefill => knobs.prefill_queue.unwrap_or(0),
        };
        let admin_endpoint = Some(info.admin_endpoint.as_str()).filter(|named| !named.is_empty());
        Ok(Self {
            side,
            admin_endpoint: admin_endpoint.and_then(|named| beside(named, &endpoint).ok()),
            endpoint,
            boot,
            client,
            role,
            model_hash: info.model_hash.to_vec(),
            layout,
            max_length_tokens,
            max_running,
            queue,
            standing: last
                .filter(|last| last.boot == boot)
                .map(|last| Arc::clone(&last.standing))
                .unwrap_or_default(),
            gauges,
            seen: Mutex::new(Seen {
                load: Load::default(),
                own: 0,
                refused: None,
                at: Instant::now(),
            }),
            suspect: Notify::new(),
            doubtful: AtomicBool::new(false),
        })
    }

    /// Can `self` (decode) pull from `prefill`: the same model, KV that fits?
    pub fn goes_with(&self, prefill: &Self) -> bool {
        self.model_hash == prefill.model_hash && self.layout.compatible(&prefill.layout).is_ok()
    }

    /// Does it need no prefill engine?
    pub fn prefills_itself(&self) -> bool {
        self.role == Role::Unified
    }

    /// What it says it is.
    pub fn role(&self) -> Role {
        self.role
    }

    /// host:port of its admin port, if it has one that can be dialled.
    pub fn admin_endpoint(&self) -> Option<&str> {
        self.admin_endpoint.as_deref()
    }

    /// Requests of this router at it.
    pub fn in_flight(&self) -> u32 {
        self.standing.in_flight.load(Ordering::Relaxed)
    }

    /// Its load as last reported, and how long ago that was.
    pub fn load(&self) -> (Load, Duration) {
        let seen = self.seen.lock();
        (seen.load.clone(), seen.at.elapsed())
    }

    /// The longest sequence that it can hold.
    pub fn max_length_tokens(&self) -> u32 {
        self.max_length_tokens
    }

    /// Takes a load report.
    pub fn report(&self, load: Load) {
        self.gauges.occupied.set(reported(self.side, &load).into());
        let mut seen = self.seen.lock();
        *seen = Seen {
            load,
            own: self.in_flight(),
            refused: None,
            at: Instant::now(),
        };
    }

    /// May requests go to it?
    pub fn open(&self) -> bool {
        !self.doubtful() && !self.draining()
    }

    /// Does it admit nothing any more?
    pub fn draining(&self) -> bool {
        self.seen.lock().load.draining
    }

    /// It said NO_CAPACITY.
    pub fn refused(&self) {
        self.seen.lock().refused = Some(Instant::now());
    }

    /// It said DRAINING, ahead of its load report.
    pub fn drains(&self) {
        self.seen.lock().load.draining = true;
    }

    /// Has it room for a request that reserves KV for `tokens`? If not, when to look again, where that is known.
    pub fn room(&self, tokens: u32, now: Instant) -> Result<(), Option<Instant>> {
        {
            let seen = self.seen.lock();
            if let Some(until) = seen.refused.map(|at| at + REFUSAL).filter(|until| *until > now) {
                return Err(Some(until));
            }
            let occupied = self.occupied(&seen);
            if occupied >= self.slots(&seen) || occupied > 0 && self.lacks_pages(&seen, tokens) {
                return Err(None);
            }
        }
        self.closed(now).map_or(Ok(()), |until| Err(Some(until)))
    }

    /// How its breaker stands.
    pub fn breaker(&self, now: Instant) -> breaker::Standing {
        self.standing.breaker.lock().standing(now)
    }

    /// Until when its breaker keeps requests from it; none: it does not.
    pub fn closed(&self, now: Instant) -> Option<Instant> {
        self.standing.breaker.lock().allows(now).err()
    }

    /// Share of its slots that is taken.
    pub fn load_share(&self) -> f32 {
        let seen = self.seen.lock();
        self.occupied(&seen) as f32 / self.slots(&seen) as f32
    }

    /// Requests that may be at it: sequences it runs at once, which may change while it runs, for a prefill with its run queue.
    fn slots(&self, seen: &Seen) -> u32 {
        let running = Some(seen.load.max_running)
            .filter(|n| *n > 0)
            .unwrap_or(self.max_running);
        running.saturating_add(self.queue)
    }

    /// Were too few pages free at the last report? One that says nothing of pages is asked.
    fn lacks_pages(&self, seen: &Seen, tokens: u32) -> bool {
        let free = u64::from(seen.load.free_pages) * u64::from(self.layout.page_tokens);
        seen.load.total_pages > 0 && free < u64::from(tokens)
    }

    /// What was there at the last report, less what was ours then, with what is ours now.
    fn occupied(&self, seen: &Seen) -> u32 {
        reported(self.side, &seen.load)
            .saturating_sub(seen.own)
            .saturating_add(self.in_flight())
    }

    /// Doubts that this incarnation is still there: nothing goes to it until its worker has asked, which it does at once.
    pub fn doubt(&self) {
        self.doubtful.store(true, Ordering::Relaxed);
        self.suspect.notify_one();
    }

    /// Is its worker asking whether it is still there?
    pub fn doubtful(&self) -> bool {
        self.doubtful.load(Ordering::Relaxed)
    }

    pub(super) async fn doubted(&self) {
        self.suspect.notified().await;
    }
}

/// Requests at the engine in every state. A decode counts a sequence that it pulls among the running ones already; a prefill
/// counts one that it hands out no longer among them.
fn reported(side: Side, load: &Load) -> u32 {
    let computed = load.running.saturating_add(load.waiting);
    match side {
        Side::Decode => computed,
        Side::Prefill => computed.saturating_add(load.transferring),
    }
}

/// A request's place at an engine, and the verdict on the engine that is due. Dropping it gives the place back, whatever happened.
#[derive(Debug)]
pub struct Leg {
    // first, so that whoever is told of the place finds the breaker as the verdict left it
    verdict: Verdict,
    _place: Place,
}

impl Leg {
    pub(super) fn take(session: Arc<Session>, changed: &Arc<Changed>) -> Self {
        session.standing.in_flight.fetch_add(1, Ordering::Relaxed);
        let trial = session.standing.breaker.lock().enter(Instant::now());
        let place = Place {
            _gauge: Counted::new(&session.gauges.in_flight),
            session: Arc::clone(&session),
            changed: Arc::clone(changed),
        };
        let verdict = Verdict {
            session,
            changed: Arc::clone(changed),
            trial,
        };
        Self { verdict, _place: place }
    }

    /// Whose place it is.
    pub fn session(&self) -> &Arc<Session> {
        &self.verdict.session
    }

    /// The engine did its part.
    pub fn succeeded(&mut self) {
        self.verdict.succeeded();
    }

    /// The engine failed by its own fault.
    pub fn failed(&mut self) {
        self.verdict.failed();
    }

    /// Gives the place back and keeps the verdict.
    pub fn leave(self) -> Verdict {
        self.verdict
    }
}

/// Gives a place at an engine back.
#[derive(Debug)]
struct Place {
    session: Arc<Session>,
    changed: Arc<Changed>,
    _gauge: Counted,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.session.standing.in_flight.fetch_sub(1, Ordering::Relaxed);
        self.changed.room.notify_one();
    }
}

/// What a request will tell of an engine. Dropped without a word, it leaves a trial to the next request.
#[derive(Debug)]
pub struct Verdict {
    session: Arc<Session>,
    changed: Arc<Changed>,
    /// The one trial after the breaker was open, until there is a verdict.
    trial: bool,
}

impl Verdict {
    /// The engine did its part.
    pub fn succeeded(&mut self) {
        self.session.standing.breaker.lock().succeeded();
        self.tell();
    }

    /// The engine failed by its own fault.
    pub fn failed(&mut self) {
        self.session.standing.breaker.lock().failed(Instant::now());
        self.tell();
    }

    /// Those who wait for the trial's end look again.
    fn tell(&mut self) {
        if std::mem::take(&mut self.trial) {
            self.changed.room.notify_one();
        }
    }
}

impl Drop for Verdict {
    fn drop(&mut self) {
        if self.trial {
            self.session.standing.breaker.lock().abandoned();
            self.tell();
        }
    }
}
