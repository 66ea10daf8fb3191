//! Keeps requests from an engine that answers but fails. Pure: the caller brings the time.

use std::time::{Duration, Instant};

/// So many failures in a row open it.
const FAILURES: u32 = 5;
/// Open this long at first, twice as long after each failed trial, at most [`MAX_OPEN`].
const FIRST_OPEN: Duration = Duration::from_secs(1);
const MAX_OPEN: Duration = Duration::from_secs(15);

/// One engine's breaker. A new incarnation starts with a new one.
#[derive(Debug, Default)]
pub struct Breaker {
    failures: u32,
    open: Option<Open>,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    until: Instant,
    lasts: Duration,
    trial: bool,
}

/// How a breaker stands, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Requests go.
    Closed {
        /// Failures in a row.
        failures: u32,
    },
    /// None goes.
    Open {
        /// Failures in a row.
        failures: u32,
        /// Until a trial may go.
        rest: Duration,
    },
    /// One request is on trial, or may be.
    Trial {
        /// Failures in a row.
        failures: u32,
    },
}

impl Breaker {
    /// How it stands.
    pub fn standing(&self, now: Instant) -> Standing {
        let failures = self.failures;
        match self.open {
            None => Standing::Closed { failures },
            Some(open) if open.trial || now >= open.until => Standing::Trial { failures },
            Some(open) => Standing::Open {
                failures,
                rest: open.until - now,
            },
        }
    }

    /// May a request go? `Err`: not before that time, as far as is known.
    pub fn allows(&self, now: Instant) -> Result<(), Instant> {
        match self.open {
            // the trial's own end tells those who wait
            Some(open) if open.trial => Err(now + open.lasts),
            Some(open) if now < open.until => Err(open.until),
            Some(_) | None => Ok(()),
        }
    }

    /// A request goes; true if it is the one trial after an open time.
    pub fn enter(&mut self, now: Instant) -> bool {
        match &mut self.open {
            Some(open) if now >= open.until && !open.trial => {
                open.trial = true;
                true
            }
            _ => false,
        }
    }

    /// The engine did its work.
    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// The engine failed by its own fault.
    pub fn failed(&mut self, now: Instant) {
        self.failures += 1;
        if let Some(open) = &mut self.open {
            if open.trial {
                let lasts = (open.lasts * 2).min(MAX_OPEN);
                *open = Open {
                    until: now + lasts,
                    lasts,
                    trial: false,
                };
            }
        } else if self.failures >= FAILURES {
            self.open = Some(Open {
                until: now + FIRST_OPEN,
                lasts: FIRST_OPEN,
                trial: false,
            });
        }
    }

    /// A trial ended without a verdict (the client left): another may go.
    pub fn abandoned(&mut self) {
        if let Some(open) = &mut self.open {
            open.trial = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(now: Instant) -> Breaker {
        let mut breaker = Breaker::default();
        for _ in 0..FAILURES {
            assert_eq!(breaker.allows(now), Ok(()));
            breaker.failed(now);
        }
        breaker
    }

    #[test]
    fn failures_in_a_row_open_it_and_one_success_between_does_not() {
        let now = Instant::now();
        assert_eq!(opened(now).allows(now), Err(now + FIRST_OPEN));
        let rest = FIRST_OPEN;
        assert_eq!(
            opened(now).standing(now),
            Standing::Open {
                failures: FAILURES,
                rest
            }
        );
        assert_eq!(opened(now).standing(now + rest), Standing::Trial { failures: FAILURES });
        let mut breaker = Breaker::default();
        for _ in 0..100 {
            breaker.failed(now);
            breaker.succeeded();
        }
        assert_eq!(breaker.allows(now), Ok(()));
    }

    #[test]
    fn after_the_open_time_one_trial_goes_and_decides() {
        let start = Instant::now();
        let mut breaker = opened(start);
        let later = start + FIRST_OPEN;
        assert_eq!(breaker.allows(later), Ok(()));
        assert!(breaker.enter(later));
        assert!(
            breaker.allows(later).is_err(),
            "a second trial must not go beside the first"
        );
        breaker.failed(later);
        assert_eq!(breaker.allows(later), Err(later + FIRST_OPEN * 2));
        let again = later + FIRST_OPEN * 2;
        assert!(breaker.enter(again));
        breaker.succeeded();
        assert_eq!(breaker.allows(again), Ok(()));
    }

    #[test]
    fn a_trial_whose_client_left_does_not_close_the_engine_for_ever() {
        let start = Instant::now();
        let mut breaker = opened(start);
        let later = start + FIRST_OPEN;
        assert!(breaker.enter(later));
        breaker.abandoned();
        assert_eq!(breaker.allows(later), Ok(()));
    }

    #[test]
    fn the_open_time_is_bounded() {
        let mut now = Instant::now();
        let mut breaker = opened(now);
        for _ in 0..20 {
            now = breaker.allows(now).unwrap_err();
            assert!(breaker.enter(now));
            breaker.failed(now);
        }
        assert_eq!(breaker.allows(now), Err(now + MAX_OPEN));
    }
}
