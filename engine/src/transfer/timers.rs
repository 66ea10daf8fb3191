//! The timers of a hand-off, each with its name; settable while transfers run.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

/// The values in effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimerValues {
    /// Waiting in prefill's run queue.
    pub queue: Duration,
    /// Dialling until `Accepted` (or the first `Queued`).
    pub rendezvous: Duration,
    /// Prefilling without (chunk, layer) moving.
    pub progress: Duration,
    /// Frames are due and none moved: decode accepted none, prefill's reader took none.
    pub stall: Duration,
    /// Any state that is neither terminal nor queued, without a transition or progress.
    pub watchdog: Duration,
    /// Prefill holds its pages this long after the manifest without a Renew.
    pub lease: Duration,
}

impl Default for TimerValues {
    fn default() -> Self {
        Self {
            queue: Duration::from_mins(1),
            rendezvous: Duration::from_secs(30),
            progress: Duration::from_secs(30),
            stall: Duration::from_secs(10),
            watchdog: Duration::from_mins(1),
            lease: Duration::from_secs(30),
        }
    }
}

/// Two timers of which the first would never end a wait: the second ends it before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "stall_ms is {stall_ms}, it must be less than watchdog_ms, which is {watchdog_ms}: else no stall is told as one"
)]
pub struct TimerOrder {
    stall_ms: u128,
    watchdog_ms: u128,
}

impl TimerValues {
    /// Each timer can end the waits that it is there for.
    ///
    /// # Errors
    /// Names the two that cannot be so.
    pub fn check_order(&self) -> Result<(), TimerOrder> {
        if self.stall < self.watchdog {
            return Ok(());
        }
        Err(TimerOrder {
            stall_ms: self.stall.as_millis(),
            watchdog_ms: self.watchdog.as_millis(),
        })
    }

    /// What decode is told of the lease: it renews three times in this, and that must also satisfy the watchdog.
    pub(super) fn renewed_within(&self) -> Duration {
        self.lease.min(self.watchdog)
    }
}

/// A handle on the values; clones share them. A change re-arms every wait that runs, counted from when the wait began.
#[derive(Debug, Clone)]
pub struct Timers(Arc<watch::Sender<TimerValues>>);

impl Timers {
    /// Timers that start with `values`.
    pub fn new(values: TimerValues) -> Self {
        Self(Arc::new(watch::Sender::new(values)))
    }

    /// The values now.
    pub fn get(&self) -> TimerValues {
        *self.0.borrow()
    }

    /// Changes values; waits that run are re-armed if anything did change.
    pub fn update(&self, change: impl FnOnce(&mut TimerValues)) {
        self.0.send_if_modified(|values| {
            let before = *values;
            change(values);
            before != *values
        });
    }

    /// Wakes when a value changed.
    pub(super) fn subscribe(&self) -> watch::Receiver<TimerValues> {
        self.0.subscribe()
    }
}

/// How connections between engines are kept honest: HTTP/2 pings also while nothing else travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepAlive {
    /// Silence after which a ping is sent.
    pub interval: Duration,
    /// Silence in all after which the peer is lost; longer than `interval`.
    pub timeout: Duration,
}

impl Default for KeepAlive {
    fn default() -> Self {
        Self {
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(15),
        }
    }
}

impl KeepAlive {
    /// How long a ping may stay unanswered. It is sent after `interval` of silence, and `timeout` counts from there too.
    pub fn ping_timeout(self) -> Duration {
        self.timeout.saturating_sub(self.interval)
    }

    /// A server that pings its clients the same way, so that a decode behind a dead link does not keep prefill's pages.
    pub fn server(self) -> tonic::transport::Server {
        tonic::transport::Server::builder()
            .tcp_nodelay(true)
            .http2_keepalive_interval(Some(self.interval))
            .http2_keepalive_timeout(Some(self.ping_timeout()))
            .http2_adaptive_window(Some(false))
    }
}
