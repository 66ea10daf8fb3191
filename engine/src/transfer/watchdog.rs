//! Ends transfers that stand still. It lives on a thread of its own and needs no runtime, no scheduler and no new work.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::metrics::SideMetrics;
use super::registry::{Registry, Tracked};
use super::timers::Timers;

/// The limit is looked at this often within its own length, so that it is overstepped by an eighth at most …
const TICKS_PER_LIMIT: u32 = 8;
/// … and within these bounds.
const TICK: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// The running thread; dropping it ends it.
pub struct Watchdog {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

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
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let seen = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("transfer-watchdog".to_owned())
            .spawn(move || {
                let (stopped, bell) = &*seen;
                let mut stopped = stopped.lock();
                while !*stopped {
                    let limit = timers.get().watchdog;
                    let tick = (limit / TICKS_PER_LIMIT).clamp(TICK.0, TICK.1);
                    bell.wait_for(&mut stopped, tick);
                    parking_lot::MutexGuard::unlocked(&mut stopped, || {
                        let now = Instant::now();
                        for registry in &swept {
                            // a panic in one entry (logged by the hook) must not end the watch over all others
                            let look = || registry.sweep(now, limit);
                            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(look));
                        }
                    });
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.stop.0.lock() = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // a watchdog that panicked has logged it; there is nothing left to do here
            let _ = thread.join();
        }
    }
}
