//! What one attempt waits for on decode's side: every wait has one owner, one name, one deadline. And what both sides grant a
//! wait whose timer fires.

use std::time::{Duration, Instant};

use tandem_wire::{Failure, Reason, Source};

use super::timers::TimerValues;

/// The current wait. Each begins at an instant; a timer that is changed counts from there too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Dialling, until prefill answers.
    Rendezvous(Instant),
    /// In prefill's run queue.
    Queue(Instant),
    /// Prefill computes; since the last time that (chunk, layer) moved.
    Progress(Instant),
    /// Frames are due; since the last accepted one.
    Stall(Instant),
}

impl Wait {
    /// Its timer's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rendezvous(_) => "rendezvous",
            Self::Queue(_) => "queue",
            Self::Progress(_) => "progress",
            Self::Stall(_) => "stall",
        }
    }

    fn since(self) -> Instant {
        match self {
            Self::Rendezvous(t) | Self::Queue(t) | Self::Progress(t) | Self::Stall(t) => t,
        }
    }

    fn limit(self, timers: &TimerValues) -> Duration {
        match self {
            Self::Rendezvous(_) => timers.rendezvous,
            Self::Queue(_) => timers.queue,
            Self::Progress(_) => timers.progress,
            Self::Stall(_) => timers.stall,
        }
    }

    /// When it is over.
    pub fn deadline(self, timers: &TimerValues) -> Instant {
        self.since() + self.limit(timers)
    }

    /// What its expiry means; `state` says where things stood.
    pub fn expired(self, timers: &TimerValues, state: &str) -> Failure {
        let (reason, what) = match self {
            Self::Rendezvous(_) => (Reason::RendezvousTimeout, "prefill did not answer"),
            Self::Queue(_) => (Reason::NoCapacity, "prefill's run queue did not move on"),
            Self::Progress(_) => (Reason::Stalled, "no chunk or layer was computed"),
            Self::Stall(_) => (Reason::Stalled, "no byte was accepted"),
        };
        let limit = self.limit(timers).as_millis();
        Failure::new(
            reason,
            Source::Decode,
            format!("{} timer: {what} for {limit} ms; {state}", self.name()),
        )
    }
}

/// After a pause of the process (stopped, starved) timers fire before the sockets are read. What came meanwhile gets this long
/// to arrive.
const OVERTIME: Duration = Duration::from_millis(200);

/// A wait whose timer fires is over only when nothing comes in the overtime either; it is granted once to each wait `K`.
#[derive(Debug)]
pub struct Overtime<K>(Option<(K, Instant)>);

impl<K> Default for Overtime<K> {
    fn default() -> Self {
        Self(None)
    }
}

impl<K: Copy + PartialEq> Overtime<K> {
    /// When `wait`, whose timer fires at `timer`, is to be looked at.
    pub fn deadline(&self, wait: K, timer: Instant) -> Instant {
        match &self.0 {
            Some((granted, until)) if *granted == wait => timer.max(*until),
            _ => timer,
        }
    }

    /// The deadline of `wait` has come. False: it goes on, in overtime.
    pub fn is_over(&mut self, wait: K) -> bool {
        let now = Instant::now();
        match &self.0 {
            Some((granted, until)) if *granted == wait => *until <= now,
            _ => {
                self.0 = Some((wait, now + OVERTIME));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overtime_is_granted_once_to_each_wait() {
        let (now, mut overtime) = (Instant::now(), Overtime::default());
        assert_eq!(overtime.deadline(1, now), now);
        assert!(!overtime.is_over(1));
        let until = overtime.deadline(1, now);
        assert!(until >= now + OVERTIME);
        assert!(!overtime.is_over(1), "before its time");
        assert_eq!(
            overtime.deadline(1, until + OVERTIME),
            until + OVERTIME,
            "a longer timer counts"
        );
        assert_eq!(overtime.deadline(2, now), now, "another wait");
        overtime.0 = Some((1, now));
        assert!(overtime.is_over(1));
        assert!(!overtime.is_over(2), "another wait");
    }

    #[test]
    fn each_wait_expires_by_its_own_timer_and_names_it() {
        let values = TimerValues {
            queue: Duration::from_millis(1),
            rendezvous: Duration::from_millis(2),
            progress: Duration::from_millis(3),
            stall: Duration::from_millis(4),
            ..TimerValues::default()
        };
        let now = Instant::now();
        for (wait, millis, name, reason) in [
            (Wait::Queue(now), 1, "queue", Reason::NoCapacity),
            (Wait::Rendezvous(now), 2, "rendezvous", Reason::RendezvousTimeout),
            (Wait::Progress(now), 3, "progress", Reason::Stalled),
            (Wait::Stall(now), 4, "stall", Reason::Stalled),
        ] {
            assert_eq!(wait.deadline(&values), now + Duration::from_millis(millis));
            let failure = wait.expired(&values, "where it stood");
            assert_eq!(failure.reason, reason);
            assert!(failure.detail.starts_with(name), "{failure}");
            assert!(failure.detail.contains("where it stood"), "{failure}");
        }
    }
}
