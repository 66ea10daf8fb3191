//! Sees from outside of the scheduler's thread whether it lives. It needs no runtime and no new work.

use std::time::{Duration, Instant};

use tandem_telemetry::{Readiness, State};

use crate::sched::{Health, Scheduler};
use crate::ticker::{Again, Ticker, tick};
use crate::transfer::Timers;

/// The longest time between two looks.
const TICK: Duration = Duration::from_millis(250);

/// The running thread; dropping it ends it.
pub(super) struct Monitor(#[expect(dead_code, reason = "held for its drop, which ends it")] Ticker);

impl Monitor {
    /// Watches `scheduler` and moves `readiness` to failed once it is dead.
    pub(super) fn start(scheduler: Scheduler, timers: Timers, readiness: Readiness) -> std::io::Result<Self> {
        let health = scheduler.health();
        let mut last_beat = None;
        let mut silent = Duration::ZERO;
        let mut looked = Instant::now();
        let of_pause = timers.clone();
        let pause = move || tick(of_pause.get().watchdog, TICK);
        let look = move || {
            let limit = timers.get().watchdog;
            let beat = scheduler.beat();
            let now = Instant::now();
            // A process that was stopped (SIGSTOP, a paused machine) was no step that hung: a look counts for no more than
            // two ticks, however long ago the last one was.
            let passed = now.saturating_duration_since(looked).min(tick(limit, TICK) * 2);
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
            let Some(reason) = dead else { return Again::Yes };
            readiness.set(State::Failed { reason });
            Again::No
        };
        Ticker::start("step-watchdog", pause, look).map(Self)
    }
}
