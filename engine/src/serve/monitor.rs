//! Sees from outside of the scheduler's thread whether it lives. It needs no runtime and no new work.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use tandem_telemetry::{Readiness, State};

use crate::sched::{Health, Scheduler};
use crate::transfer::Timers;

/// The limit is looked at this often within its own length …
const TICKS_PER_LIMIT: u32 = 8;
/// … and within these bounds.
const TICK: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));

/// The running thread; dropping it ends it.
pub(super) struct Monitor {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Monitor {
    /// Watches `scheduler` and moves `readiness` to failed once it is dead.
    pub(super) fn start(scheduler: Scheduler, timers: Timers, readiness: Readiness) -> std::io::Result<Self> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let seen = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("step-watchdog".to_owned())
            .spawn(move || watch(&scheduler, &timers, &readiness, &seen))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

fn watch(scheduler: &Scheduler, timers: &Timers, readiness: &Readiness, stop: &(Mutex<bool>, Condvar)) {
    let health = scheduler.health();
    let mut last_beat = None;
    let mut silent = Duration::ZERO;
    let mut looked = Instant::now();
    let mut stopped = stop.0.lock();
    while !*stopped {
        let limit = timers.get().watchdog;
        let tick = (limit / TICKS_PER_LIMIT).clamp(TICK.0, TICK.1);
        stop.1.wait_for(&mut stopped, tick);
        let beat = scheduler.beat();
        let now = Instant::now();
        // A process that was stopped (SIGSTOP, a paused machine) was no step that hung: a look counts for no more than
        // two ticks, however long ago the last one was.
        let passed = now.saturating_duration_since(looked).min(tick * 2);
        silent = if beat.is_some() && beat == last_beat {
            silent + passed
        } else {
            Duration::ZERO
        };
        (last_beat, looked) = (beat, now);
        if silent > limit {
            let why = format!("a step has done no layer for {} ms (watchdog_ms)", silent.as_millis());
            scheduler.give_up(&why);
        }
        let dead = match &*health.borrow() {
            Health::Alive => None,
            Health::Dead(why) => Some(why.to_string()),
        };
        if let Some(reason) = dead {
            readiness.set(State::Failed { reason });
            return;
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        *self.stop.0.lock() = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // one that panicked has logged it
            let _ = thread.join();
        }
    }
}
