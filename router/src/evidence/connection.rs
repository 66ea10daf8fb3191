//! One client connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::Version;
use parking_lot::Mutex;

use super::KEPT;
use super::registry::{Clock, Map};
use super::stage::{Ledger, Spent, Stage};

/// A connection that a client has opened, for as long as its socket lives.
#[derive(Debug)]
pub struct Connection {
    /// Unique in this process.
    pub id: u64,
    /// The other end: a client, or the proxy that it comes through.
    pub peer: SocketAddr,
    /// Behind TLS.
    pub tls: bool,
    /// When it was accepted.
    pub opened: Instant,
    home: Arc<Map>,
    /// When an answer was last written whole, on any connection.
    written: Arc<Clock>,
    /// This router closes it because the client takes nothing.
    cut_off: AtomicBool,
    /// Requests whose answer is not complete, for those who need no more than the number.
    unanswered: AtomicUsize,
    /// A complete answer lies in the router's own buffers.
    to_be_written: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Of the requests that began on it.
    version: Option<Version>,
    served: u64,
    open: Vec<Arc<Open>>,
    /// Times of the requests that ended on it.
    spent: Spent,
    /// Since when no request is open, and how long that was before.
    idle: (Instant, Duration),
    /// Bytes of a request's head have come.
    reading: Option<Instant>,
    /// The kernel takes no more: since when, and bytes that wait for it.
    blocked: Option<(Instant, usize)>,
    /// How long it was blocked before.
    blocked_for: Duration,
    /// All requests on it were probes, and there was one.
    probes_only: bool,
}

/// A request whose answer is not complete.
#[derive(Debug)]
pub struct Open {
    /// Its id.
    pub request_id: String,
    /// When its head had come.
    pub came: Instant,
    /// Where it is.
    pub ledger: Arc<Ledger>,
    /// A marked probe.
    pub probe: bool,
}

/// How a connection stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Bytes wait because the client takes none.
    Blocked,
    /// A request runs, and waits for this; of several the oldest.
    Waits(Stage),
    /// A request's head is coming, or the first one (and TLS) is waited for.
    Reading,
    /// Kept alive between requests.
    Idle,
}

impl Standing {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        [Self::Blocked, Self::Reading, Self::Idle]
            .into_iter()
            .chain(Stage::ALL.into_iter().map(Self::Waits))
    }

    /// As JSON and labels say it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blocked => "blocked",
            Self::Waits(stage) => stage.name(),
            Self::Reading => "reading",
            Self::Idle => "idle",
        }
    }
}

/// What is known of a connection at one moment.
#[derive(Debug)]
pub struct View {
    /// How it stands.
    pub standing: Standing,
    /// Since when.
    pub since: Instant,
    /// 1 or 2; none: no request has come.
    pub version: Option<Version>,
    /// Requests that ended on it.
    pub served: u64,
    /// Bytes that the client does not take.
    pub unsent_bytes: usize,
    /// With no request open.
    pub idle: Duration,
    /// With bytes that the client did not take; beside the other times, not one of them.
    pub blocked: Duration,
    /// Per stage, over all its requests. Those that run side by side (HTTP/2) each count.
    pub spent: Spent,
    /// Its open requests, oldest first.
    pub open: Vec<Arc<Open>>,
}

impl Connection {
    pub(super) fn new(id: u64, peer: SocketAddr, tls: bool, home: &Arc<Map>, written: &Arc<Clock>) -> Self {
        let opened = Instant::now();
        Self {
            id,
            peer,
            tls,
            opened,
            home: Arc::clone(home),
            written: Arc::clone(written),
            cut_off: AtomicBool::new(false),
            unanswered: AtomicUsize::new(0),
            to_be_written: AtomicBool::new(false),
            state: Mutex::new(State {
                version: None,
                served: 0,
                open: Vec::new(),
                spent: Spent::default(),
                idle: (opened, Duration::ZERO),
                reading: Some(opened),
                blocked: None,
                blocked_for: Duration::ZERO,
                probes_only: false,
            }),
        }
    }

    /// The client is about to be cut off because it takes nothing.
    pub fn cut_off(&self) {
        self.cut_off.store(true, Ordering::Release);
    }

    /// Was it?
    pub fn is_cut_off(&self) -> bool {
        self.cut_off.load(Ordering::Acquire)
    }

    /// A request's head has come.
    pub fn begin(&self, version: Version, open: Open) -> Arc<Open> {
        let open = Arc::new(open);
        if !KEPT {
            return open;
        }
        let came = open.came;
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        state.version = Some(version);
        state.reading = None;
        state.probes_only = open.probe && (state.probes_only || state.served == 0 && state.open.is_empty());
        if state.open.is_empty() {
            let (since, before) = state.idle;
            state.idle.1 = before + came.saturating_duration_since(since);
        }
        state.open.push(Arc::clone(&open));
        open
    }

    /// Its answer is complete or will never be.
    pub fn end(&self, open: &Arc<Open>, answered: bool) {
        if !KEPT {
            return;
        }
        let now = Instant::now();
        let mut state = self.state.lock();
        state.open.retain(|other| !Arc::ptr_eq(other, open));
        state.served += 1;
        state.spent.add(&open.ledger.spent(now));
        if state.open.is_empty() {
            state.idle.0 = now;
        }
        drop(state);
        if answered && !open.probe {
            self.to_be_written.store(true, Ordering::Relaxed);
        }
        self.unanswered.fetch_sub(1, Ordering::Release);
    }

    /// Is there a request whose answer is not complete?
    pub fn unanswered(&self) -> bool {
        self.unanswered.load(Ordering::Acquire) > 0
    }

    /// Since when it is kept alive between two requests, if it is.
    pub fn idle_since(&self) -> Option<Instant> {
        let (standing, since) = self.state.lock().standing(self.opened, self.opened);
        (standing == Standing::Idle).then_some(since)
    }

    /// Nobody but probes has asked anything on it.
    pub fn probes_only(&self) -> bool {
        self.state.lock().probes_only
    }

    /// Bytes came.
    pub fn read(&self) {
        if !KEPT || self.unanswered.load(Ordering::Relaxed) > 0 {
            return;
        }
        let mut state = self.state.lock();
        // HTTP/2 has frames that begin no request
        if state.open.is_empty() && state.version != Some(Version::HTTP_2) {
            state.reading.get_or_insert_with(Instant::now);
        }
    }

    /// The kernel has taken none of `bytes`.
    pub fn blocks(&self, bytes: usize) {
        if !KEPT {
            return;
        }
        self.state.lock().blocked = Some((Instant::now(), bytes));
    }

    /// It takes bytes again, or the connection ends.
    pub fn flows(&self) {
        if !KEPT {
            return;
        }
        let mut state = self.state.lock();
        if let Some((since, _)) = state.blocked.take() {
            state.blocked_for += since.elapsed();
        }
    }

    /// The kernel has everything that was to be written.
    pub fn flushed(&self) {
        if KEPT && self.unanswered.load(Ordering::Acquire) == 0 && self.to_be_written.load(Ordering::Relaxed) {
            self.to_be_written.store(false, Ordering::Relaxed);
            self.written.now();
        }
    }

    /// How it stands at `now`.
    pub fn standing(&self, now: Instant) -> Standing {
        self.state.lock().standing(self.opened, now).0
    }

    /// Everything that is known.
    pub fn view(&self, now: Instant) -> View {
        let state = self.state.lock();
        let (standing, since) = state.standing(self.opened, now);
        let mut idle = state.idle.1;
        if state.open.is_empty() {
            idle += now.saturating_duration_since(state.idle.0);
        }
        let mut spent = state.spent;
        for open in &state.open {
            spent.add(&open.ledger.spent(now));
        }
        View {
            standing,
            since,
            version: state.version,
            served: state.served,
            unsent_bytes: state.blocked.map_or(0, |(_, bytes)| bytes),
            idle,
            blocked: state.blocked_for
                + state
                    .blocked
                    .map_or(Duration::ZERO, |(since, _)| now.saturating_duration_since(since)),
            spent,
            open: state.open.clone(),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.home.lock().remove(&self.id);
    }
}

impl State {
    fn standing(&self, opened: Instant, now: Instant) -> (Standing, Instant) {
        if let Some((since, _)) = self.blocked {
            return (Standing::Blocked, since);
        }
        if let Some(open) = self.open.first() {
            // between its last guard and its end
            let (stage, since) = open.ledger.at().unwrap_or((Stage::Answer, now));
            return (Standing::Waits(stage), since);
        }
        match self.reading {
            Some(since) => (Standing::Reading, since),
            None => (Standing::Idle, self.idle.0.max(opened)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::registry::Registry;
    use super::super::stage::Stay;
    use super::*;

    fn connection() -> (Arc<Registry>, Arc<Connection>) {
        let registry = Arc::new(Registry::default());
        let connection = registry.open("127.0.0.1:9".parse().unwrap(), false);
        (registry, connection)
    }

    fn begin(connection: &Connection, version: Version) -> (Arc<Open>, Stay) {
        begin_as(connection, version, false)
    }

    fn begin_as(connection: &Connection, version: Version, probe: bool) -> (Arc<Open>, Stay) {
        let came = Instant::now();
        let ledger = Arc::new(Ledger::default());
        let stay = Stay::enter(&ledger, Stage::Body);
        let open = Open {
            request_id: "r".into(),
            came,
            ledger,
            probe,
        };
        (connection.begin(version, open), stay)
    }

    #[test]
    fn a_connection_stands_where_its_oldest_request_does() {
        let (_registry, connection) = connection();
        let standing = || connection.standing(Instant::now());
        assert_eq!(standing(), Standing::Reading, "no request has come");
        let (first, mut stay) = begin(&connection, Version::HTTP_2);
        let (second, _other) = begin(&connection, Version::HTTP_2);
        stay.move_to(Stage::Decode);
        assert_eq!(standing(), Standing::Waits(Stage::Decode));
        connection.end(&first, true);
        assert_eq!(standing(), Standing::Waits(Stage::Body));
        connection.blocks(7);
        assert_eq!(standing(), Standing::Blocked);
        assert_eq!(connection.view(Instant::now()).unsent_bytes, 7);
        connection.end(&second, true);
        assert_eq!(standing(), Standing::Blocked, "its bytes still wait");
        connection.flows();
        assert_eq!(standing(), Standing::Idle);
        connection.read();
        assert_eq!(standing(), Standing::Idle, "a ping is no request");
        assert_eq!(connection.view(Instant::now()).served, 2);
    }

    #[test]
    fn an_answer_to_a_probe_is_told_as_one_to_a_client() {
        let (registry, connection) = connection();
        assert!(!connection.probes_only(), "nothing was asked");
        let (probe, _stay) = begin_as(&connection, Version::HTTP_11, true);
        connection.end(&probe, true);
        connection.flushed();
        assert_eq!(registry.last_written(), None);
        assert!(connection.probes_only());
        let (own, _stay) = begin(&connection, Version::HTTP_11);
        connection.end(&own, true);
        connection.flushed();
        assert!(registry.last_written().is_some());
        let (_probe, _stay) = begin_as(&connection, Version::HTTP_11, true);
        assert!(!connection.probes_only(), "a client's connection stays one");
    }

    #[test]
    fn the_documented_states_are_not_the_real_ones() {
        let text = include_str!("../../../docs/evidence.md");
        let (_, table) = text.split_once("\n## States\n").unwrap();
        let documented: Vec<_> = table
            .lines()
            .take_while(|line| !line.starts_with("## "))
            .filter_map(|line| line.strip_prefix("| `")?.split('`').next())
            .collect();
        let known: Vec<_> = Standing::all().map(Standing::name).collect();
        assert_eq!(documented, known);
    }

    #[test]
    fn half_a_head_is_not_idle() {
        let (_registry, connection) = connection();
        let (open, _stay) = begin(&connection, Version::HTTP_11);
        connection.end(&open, true);
        assert_eq!(connection.standing(Instant::now()), Standing::Idle);
        connection.read();
        assert_eq!(connection.standing(Instant::now()), Standing::Reading);
    }

    /// Age, and what all times together lack of it, after some requests and in the middle of one.
    fn unaccounted() -> (Duration, Duration) {
        let (_registry, connection) = connection();
        for _ in 0..20 {
            let (open, mut stay) = begin(&connection, Version::HTTP_11);
            for stage in Stage::ALL {
                stay.move_to(stage);
            }
            connection.end(&open, true);
        }
        let (_open, _stay) = begin(&connection, Version::HTTP_11);
        let now = Instant::now();
        let view = connection.view(now);
        let age = now - connection.opened;
        let lacks = age.checked_sub(view.idle + view.spent.total());
        (age, lacks.expect("no time is counted twice"))
    }

    #[test]
    fn of_one_request_at_a_time_some_time_is_nowhere() {
        // between a guard and the note of it lie a few instructions, and rarely another thread's turn
        let tries: Vec<_> = (0..20).map(|_| unaccounted()).collect();
        assert!(tries.iter().any(|(age, lacks)| *lacks < *age / 2), "{tries:?}");
    }

    #[test]
    fn an_answer_is_written_when_the_kernel_has_its_last_byte_and_not_before() {
        let (registry, connection) = connection();
        let (open, _stay) = begin(&connection, Version::HTTP_11);
        connection.flushed();
        assert_eq!(registry.last_written(), None, "the head of an answer is no answer");
        connection.end(&open, true);
        assert_eq!(registry.last_written(), None);
        connection.flushed();
        let written = registry.last_written().unwrap();
        connection.flushed();
        assert_eq!(registry.last_written(), Some(written), "once");
        let (open, _stay) = begin(&connection, Version::HTTP_11);
        connection.end(&open, false);
        connection.flushed();
        assert_eq!(registry.last_written(), Some(written), "an answer that broke is none");
    }
}
