//! One side's state of one attempt. Whoever wins a transition runs its effects, once: the terminal is set first, others
//! wake second, the pages go last.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tandem_wire::phase::Phase;
use tandem_wire::state::{DecodeEvent, DecodeState, End, PrefillEvent, PrefillState, Step};
use tandem_wire::{Failure, Reason};
use tokio::sync::watch;

use super::metrics::SideMetrics;
use crate::sched::Stay;

/// A side's state table, as the cell needs it.
pub trait Machine: Copy + Eq + Debug + Send + Sync + 'static {
    /// What can happen.
    type Event: Copy + Debug + Send;
    /// Which side, for metrics and logs.
    const SIDE: &'static str;
    /// The states that are not terminal, by name.
    const LIVE: &'static [&'static str];
    /// The transition function.
    fn on(self, event: Self::Event) -> Step<Self>;
    /// Nothing can change it any more.
    fn is_terminal(self) -> bool;
    /// The event that ends it from any live state.
    fn end(end: End) -> Self::Event;
    /// Its name.
    fn name(self) -> &'static str;
    /// What its request waits for in this state; `None`: not for this attempt any more.
    fn phase(self) -> Option<Phase>;
}

impl Machine for DecodeState {
    type Event = DecodeEvent;
    const SIDE: &'static str = "decode";
    const LIVE: &'static [&'static str] = &["reserved", "attached", "receiving", "verifying"];
    fn on(self, event: DecodeEvent) -> Step<Self> {
        self.on(event)
    }
    fn is_terminal(self) -> bool {
        self.is_terminal()
    }
    fn end(end: End) -> DecodeEvent {
        DecodeEvent::End(end)
    }
    fn name(self) -> &'static str {
        match self {
            Self::Reserved => "reserved",
            Self::Attached => "attached",
            Self::Receiving => "receiving",
            Self::Verifying => "verifying",
            Self::Committed => "committed",
            Self::Ended(End::Failed(_)) => "failed",
            Self::Ended(End::Aborted(_)) => "aborted",
        }
    }
    fn phase(self) -> Option<Phase> {
        match self {
            Self::Reserved => Some(Phase::Accept),
            Self::Attached => Some(Phase::Prefill),
            Self::Receiving | Self::Verifying => Some(Phase::Transfer),
            Self::Committed | Self::Ended(_) => None,
        }
    }
}

impl Machine for PrefillState {
    type Event = PrefillEvent;
    const SIDE: &'static str = "prefill";
    const LIVE: &'static [&'static str] = &["queued", "prefilling", "streaming", "await_commit"];
    fn on(self, event: PrefillEvent) -> Step<Self> {
        self.on(event)
    }
    fn is_terminal(self) -> bool {
        self.is_terminal()
    }
    fn end(end: End) -> PrefillEvent {
        PrefillEvent::End(end)
    }
    fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Prefilling => "prefilling",
            Self::Streaming => "streaming",
            Self::AwaitCommit => "await_commit",
            Self::Released => "released",
            Self::Finished => "finished",
            Self::Expired => "expired",
            Self::Ended(End::Failed(_)) => "failed",
            Self::Ended(End::Aborted(_)) => "aborted",
        }
    }
    fn phase(self) -> Option<Phase> {
        match self {
            Self::Queued => Some(Phase::Queued),
            Self::Prefilling => Some(Phase::Prefill),
            Self::Streaming | Self::AwaitCommit => Some(Phase::Transfer),
            Self::Released | Self::Finished | Self::Expired | Self::Ended(_) => None,
        }
    }
}

/// The state of one attempt on one side, and the pages that it holds (`P` is a handle whose last clone frees them).
pub struct Cell<M: Machine, P> {
    inner: Mutex<Inner<M, P>>,
    changed: watch::Sender<()>,
    metrics: Arc<SideMetrics>,
}

struct Inner<M, P> {
    state: M,
    /// In prefill's run queue: a wait that the queue timer owns, not the watchdog.
    queued: bool,
    failure: Option<Failure>,
    pages: Option<P>,
    /// Of the request that this is an attempt of; let go at the end.
    stay: Option<Arc<Stay>>,
    born: Instant,
    moved: Instant,
}

impl<M: Machine, P: Clone> Cell<M, P> {
    /// A cell in its first state; `queued` until its first transition. It moves `stay` along with its state.
    pub fn new(state: M, queued: bool, pages: Option<P>, stay: Option<Arc<Stay>>, metrics: Arc<SideMetrics>) -> Self {
        metrics.entered(state.name());
        let now = Instant::now();
        Self {
            inner: Mutex::new(Inner {
                state,
                queued,
                failure: None,
                pages,
                stay,
                born: now,
                moved: now,
            }),
            changed: watch::Sender::new(()),
            metrics,
        }
    }

    /// The state now.
    pub fn state(&self) -> M {
        self.inner.lock().state
    }

    /// Why it ended, if it ended without success.
    pub fn failure(&self) -> Option<Failure> {
        self.inner.lock().failure.clone()
    }

    /// Wakes after each transition.
    pub fn subscribe(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Applies an event. `Moved`: the caller won the transition and owns its effects.
    pub fn on(&self, event: M::Event) -> Step<M> {
        self.step(event, None, None)
    }

    /// Applies an event and, if that moves to a live state, takes hold of `pages`.
    pub fn on_with_pages(&self, event: M::Event, pages: P) -> Step<M> {
        self.step(event, None, Some(pages))
    }

    /// Applies an event that ends it with `failure`. True: the caller won.
    pub fn end_by(&self, event: M::Event, failure: Failure) -> bool {
        matches!(self.step(event, Some(failure), None), Step::Moved(_))
    }

    /// Ends it as failed. True: the caller won.
    pub fn fail(&self, failure: Failure) -> bool {
        self.end_by(M::end(End::Failed(failure.reason)), failure)
    }

    /// Ends it as aborted. True: the caller won.
    pub fn abort(&self, failure: Failure) -> bool {
        self.end_by(M::end(End::Aborted(failure.reason)), failure)
    }

    fn step(&self, event: M::Event, failure: Option<Failure>, pages: Option<P>) -> Step<M> {
        let mut inner = self.inner.lock();
        let before = inner.state;
        let step = before.on(event);
        let Step::Moved(after) = step else { return step };
        let reason = failure.as_ref().map(|f| f.reason);
        inner.state = after;
        inner.queued = false;
        inner.moved = Instant::now();
        let freed = if after.is_terminal() {
            inner.failure = failure;
            // also what came along too late
            (inner.pages.take(), pages)
        } else {
            (None, pages.and_then(|new| inner.pages.replace(new)))
        };
        let age = inner.moved - inner.born;
        let left = match (after.phase(), &inner.stay) {
            (Some(phase), Some(stay)) => {
                stay.move_to(phase);
                None
            }
            (Some(_), None) => None,
            (None, _) => inner.stay.take(),
        };
        drop(inner);
        drop(left);

        self.metrics.left(before.name());
        if after.is_terminal() {
            self.metrics.ended(reason, age);
        } else {
            self.metrics.entered(after.name());
        }
        self.changed.send_replace(());
        drop(freed);
        step
    }

    /// Something moved within the state. False: it is terminal.
    pub fn progress(&self) -> bool {
        let mut inner = self.inner.lock();
        let live = !inner.state.is_terminal();
        if live {
            inner.moved = Instant::now();
            if let Some(stay) = &inner.stay {
                stay.touch();
            }
        }
        live
    }

    /// Takes hold of `pages`; if it is terminal they are let go at once.
    pub fn hold(&self, pages: P) {
        let mut inner = self.inner.lock();
        let freed = if inner.state.is_terminal() {
            Some(pages)
        } else {
            inner.pages.replace(pages)
        };
        drop(inner);
        drop(freed);
    }

    /// When it last changed, or something within its state moved.
    pub fn moved(&self) -> Instant {
        self.inner.lock().moved
    }

    /// Of the request that this is an attempt of; `None`: it is terminal.
    pub fn stay(&self) -> Option<Arc<Stay>> {
        self.inner.lock().stay.clone()
    }

    /// It waits in prefill's run queue now.
    pub fn queued(&self) {
        let mut inner = self.inner.lock();
        inner.queued = true;
        inner.moved = Instant::now();
        if let Some(stay) = &inner.stay {
            stay.move_to(Phase::Queued);
        }
    }

    /// The pages, for one copy: they are not freed before the clone is dropped. `None`: it is terminal, hands off.
    pub fn copying(&self) -> Option<P> {
        let inner = self.inner.lock();
        if inner.state.is_terminal() {
            return None;
        }
        inner.pages.clone()
    }

    /// The watchdog's question: has it stood still for `limit`? Ends it with DEADLINE if so.
    pub fn end_if_overdue(&self, now: Instant, limit: Duration, source: tandem_wire::Source) -> bool {
        let (state, still) = {
            let inner = self.inner.lock();
            if inner.state.is_terminal() || inner.queued {
                return false;
            }
            (inner.state, now.saturating_duration_since(inner.moved))
        };
        still >= limit
            && self.fail(Failure::new(
                Reason::Deadline,
                source,
                format!(
                    "watchdog: transfer stood in state {} on {} for {} ms without progress, limit {} ms",
                    state.name(),
                    M::SIDE,
                    still.as_millis(),
                    limit.as_millis()
                ),
            ))
    }

    /// Time since it began, while it is live.
    pub fn age(&self, now: Instant) -> Option<Duration> {
        let inner = self.inner.lock();
        (!inner.state.is_terminal()).then(|| now.saturating_duration_since(inner.born))
    }
}

impl<M: Machine, P> Drop for Cell<M, P> {
    fn drop(&mut self) {
        let inner = self.inner.get_mut();
        if !inner.state.is_terminal() {
            // its owner always ends it; a cell lost live would leave the gauge wrong for good
            self.metrics.left(inner.state.name());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Barrier, Weak};

    use proptest::prelude::*;
    use tandem_telemetry::Metrics;
    use tandem_wire::Source;

    use super::super::metrics::TransferMetrics;
    use super::*;

    fn metrics() -> TransferMetrics {
        TransferMetrics::register(&Metrics::new("test", "0"))
    }

    fn failure(reason: Reason) -> Failure {
        Failure::new(reason, Source::Prefill, "test")
    }

    type Probed = Cell<PrefillState, Arc<Probe>>;

    /// A page that looks, while it is freed, at what its cell shows to others.
    struct Probe {
        cell: Weak<Probed>,
        woken: Mutex<watch::Receiver<()>>,
        freed: Arc<AtomicUsize>,
        out_of_order: Arc<AtomicUsize>,
    }

    impl Drop for Probe {
        fn drop(&mut self) {
            self.freed.fetch_add(1, Ordering::SeqCst);
            let terminal = self.cell.upgrade().is_some_and(|c| c.state().is_terminal());
            let woken = self.woken.lock().has_changed().unwrap_or(false);
            if !terminal || !woken {
                self.out_of_order.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    fn event() -> impl Strategy<Value = PrefillEvent> {
        use PrefillEvent as E;
        let end = (1..=19i32, any::<bool>()).prop_map(|(r, abort)| {
            let reason = Reason::try_from(r).unwrap();
            E::End(if abort {
                End::Aborted(reason)
            } else {
                End::Failed(reason)
            })
        });
        prop_oneof![
            6 => prop_oneof![
                Just(E::Started), Just(E::DataReady), Just(E::ManifestSent), Just(E::FirstTokenEnds), Just(E::Commit),
                Just(E::LeaseOver)
            ],
            1 => end,
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn effects_run_once_whatever_races(scripts in prop::collection::vec(prop::collection::vec(event(), 1..12), 2..5)) {
            let metrics = metrics();
            let cell: Arc<Probed> = Arc::new(Cell::new(PrefillState::Queued, true, None, None, Arc::clone(&metrics.prefill)));
            let (freed, out_of_order) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            cell.hold(Arc::new(Probe {
                cell: Arc::downgrade(&cell),
                woken: Mutex::new(cell.subscribe()),
                freed: Arc::clone(&freed),
                out_of_order: Arc::clone(&out_of_order),
            }));
            let start = Barrier::new(scripts.len() + 1);
            let (running, cell_ref, freed_ref, start_ref) = (AtomicUsize::new(scripts.len()), &cell, &freed, &start);
            let running = &running;
            let wins: usize = std::thread::scope(|scope| {
                // a copy that runs meanwhile never sees its page freed
                let copier = scope.spawn(move || {
                    start_ref.wait();
                    while running.load(Ordering::SeqCst) > 0 {
                        let Some(page) = cell_ref.copying() else { break };
                        assert_eq!(freed_ref.load(Ordering::SeqCst), 0, "freed under a copy");
                        drop(page);
                    }
                });
                let threads: Vec<_> = scripts.iter().map(|script| scope.spawn(move || {
                    start_ref.wait();
                    let won = script.iter().filter(|e| {
                        let step = cell_ref.step(**e, Some(failure(Reason::Internal)), None);
                        matches!(step, Step::Moved(s) if s.is_terminal())
                    }).count();
                    running.fetch_sub(1, Ordering::SeqCst);
                    won
                })).collect();
                let wins = threads.into_iter().map(|t| t.join().unwrap()).sum();
                copier.join().unwrap();
                wins
            });
            let ended = cell.state().is_terminal();
            prop_assert_eq!(wins, usize::from(ended));
            prop_assert_eq!(freed.load(Ordering::SeqCst), usize::from(ended));
            prop_assert_eq!(out_of_order.load(Ordering::SeqCst), 0);
            prop_assert_eq!(metrics.prefill.inflight::<PrefillState>(), i64::from(!ended));
            let before = cell.state();
            prop_assert_eq!(cell.fail(failure(Reason::Stalled)), !ended);
            if ended {
                prop_assert_eq!(cell.state(), before);
                prop_assert!(cell.copying().is_none());
            }
        }
    }

    #[test]
    fn pages_that_come_after_the_end_are_let_go() {
        let cell = Cell::new(PrefillState::Queued, true, None, None, metrics().prefill);
        cell.on(PrefillEvent::Started);
        assert!(cell.abort(failure(Reason::AbortedByPeer)));
        let page = Arc::new(());
        assert!(matches!(
            cell.on_with_pages(PrefillEvent::DataReady, Arc::clone(&page)),
            Step::Same(_)
        ));
        cell.hold(Arc::clone(&page));
        assert_eq!(Arc::strong_count(&page), 1);
        assert_eq!(cell.failure(), Some(failure(Reason::AbortedByPeer)));
    }

    #[test]
    fn the_watchdog_leaves_queued_and_moving_cells_alone() {
        let metrics = metrics();
        let cell: Cell<_, Arc<()>> = Cell::new(PrefillState::Queued, true, None, None, metrics.prefill);
        let limit = Duration::from_mins(1);
        let later = |by: u64| Instant::now() + Duration::from_secs(by);
        assert!(!cell.end_if_overdue(later(1_000), limit, Source::Prefill));
        cell.on(PrefillEvent::Started);
        assert!(!cell.end_if_overdue(later(59), limit, Source::Prefill));
        assert!(cell.progress());
        assert!(!cell.end_if_overdue(Instant::now() + limit / 2, limit, Source::Prefill));
        assert!(cell.end_if_overdue(later(61), limit, Source::Prefill));
        assert!(!cell.end_if_overdue(later(61), limit, Source::Prefill), "once");
        let ended = cell.failure().unwrap();
        assert_eq!(ended.reason, Reason::Deadline);
        assert!(ended.detail.contains("prefilling"), "{ended}");
        assert!(!cell.progress());

        let cell: Cell<_, Arc<()>> = Cell::new(DecodeState::Reserved, false, None, None, metrics.decode);
        cell.queued();
        assert!(!cell.end_if_overdue(later(1_000), limit, Source::Decode));
        cell.on(DecodeEvent::Accepted);
        assert!(cell.end_if_overdue(later(61), limit, Source::Decode));
    }
}
