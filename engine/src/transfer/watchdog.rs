//! Ends transfers that stand still. It lives on a thread of its own and needs no runtime, no scheduler and no new work.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::metrics::SideMetrics;
use super::registry::{Registry, Tracked};
use super::timers::Timers;
use crate::ticker::{Again, Ticker, tick};

/// The longest time between two looks.
const TICK: Duration = Duration::from_secs(1);

/// The running thread; dropping it ends it.
pub struct Watchdog(#[expect(dead_code, reason = "held for its drop, which ends it")] Ticker);

/// A registry that the watchdog looks after.
pub trait Sweep: Send + Sync {
    /// One look.
    fn sweep(&self, now: Instant, limit: Duration);
}

/// One side's registry with its metrics.
pub struct Swept<T> {
    /// What is swept.
    pub registry: Arc<Registry<T>>,
    /// Where the oldest age goes.
    pub metrics: Arc<SideMetrics>,
}

impl<T: Tracked> Sweep for Swept<T> {
    fn sweep(&self, now: Instant, limit: Duration) {
        let oldest = self.registry.sweep(now, limit).unwrap_or_default();
        self.metrics.oldest_seconds.set(oldest.as_secs_f64());
    }
}

impl Watchdog {
    /// Starts the thread over the given registries.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(timers: Timers, swept: Vec<Arc<dyn Sweep>>) -> std::io::Result<Self> {
        let of_pause = timers.clone();
        let pause = move || tick(of_pause.get().watchdog, TICK);
        let look = move || {
            let (now, limit) = (Instant::now(), timers.get().watchdog);
            for registry in &swept {
                // a panic in one entry (logged by the hook) must not end the watch over all others
                let look = || registry.sweep(now, limit);
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(look));
            }
            Again::Yes
        };
        Ticker::start("transfer-watchdog", pause, look).map(Self)
    }
}
