//! `tandem_transfer_*`: what is in flight, how long it took, why it failed.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use tandem_telemetry::{Metrics, initialise};
use tandem_wire::Reason;
use tandem_wire::reason::meaning;
use tandem_wire::state::{DecodeState, PrefillState};

use super::cell::Machine;
use super::tally::Tally;
use crate::sched::Role;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    side: &'static str,
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    side: &'static str,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SideLabels {
    side: &'static str,
}

/// Both sides' metrics of one process.
#[derive(Debug, Clone)]
pub struct TransferMetrics {
    pub(super) decode: Arc<SideMetrics>,
    pub(super) prefill: Arc<SideMetrics>,
}

/// One side's metrics.
#[derive(Debug)]
pub struct SideMetrics {
    side: &'static str,
    inflight: Family<StateLabels, Gauge>,
    failures: Family<FailureLabels, Counter>,
    completed: Counter,
    seconds: Histogram,
    pub(super) oldest_seconds: Gauge<f64, AtomicU64>,
    pub(super) bytes: Counter,
    pub(super) frames: Counter,
    pub(super) late_frames: Counter,
    pub(super) unknown_messages: Counter,
    tally: Arc<Tally>,
}

impl SideMetrics {
    pub(super) fn entered(&self, state: &'static str) {
        self.inflight
            .get_or_create(&StateLabels { side: self.side, state })
            .inc();
    }

    pub(super) fn left(&self, state: &'static str) {
        self.inflight
            .get_or_create(&StateLabels { side: self.side, state })
            .dec();
    }

    pub(super) fn ended(&self, failed: Option<Reason>, after: Duration) {
        match failed {
            None => {
                self.completed.inc();
                self.seconds.observe(after.as_secs_f64());
                self.tally.ended(None, Instant::now());
            }
            Some(reason) => self.refused(reason),
        }
    }

    /// Counts a failure of a transfer that never got a cell.
    pub(super) fn refused(&self, reason: Reason) {
        let labels = FailureLabels {
            side: self.side,
            reason: meaning(reason).code,
        };
        self.failures.get_or_create(&labels).inc();
        self.tally.ended(Some(reason), Instant::now());
    }

    /// Transfers that are not terminal.
    #[cfg(test)]
    pub(super) fn inflight<M: Machine>(&self) -> i64 {
        M::LIVE
            .iter()
            .map(|state| {
                self.inflight
                    .get_or_create(&StateLabels { side: self.side, state })
                    .get()
            })
            .sum()
    }
}

fn reasons() -> impl Iterator<Item = Reason> {
    (1..).map_while(|value| Reason::try_from(value).ok())
}

impl TransferMetrics {
    /// How hand-offs ended on the side that an engine of this role is on.
    pub fn tally(&self, role: Role) -> Arc<Tally> {
        let side = match role {
            Role::Decode => &self.decode,
            Role::Prefill | Role::Unified => &self.prefill,
        };
        Arc::clone(&side.tally)
    }

    /// Registers `tandem_transfer_*`, once per process.
    pub fn register(metrics: &Metrics) -> Self {
        metrics.part("transfer", |registry| {
            let inflight = Family::<StateLabels, Gauge>::default();
            let failures = Family::<FailureLabels, Counter>::default();
            let completed = Family::<SideLabels, Counter>::default();
            let oldest = Family::<SideLabels, Gauge<f64, AtomicU64>>::default();
            let bytes = Family::<SideLabels, Counter>::default();
            let frames = Family::<SideLabels, Counter>::default();
            let late_frames = Family::<SideLabels, Counter>::default();
            let unknown = Family::<SideLabels, Counter>::default();
            // 1 ms to 33 s
            let seconds = Family::<SideLabels, Histogram>::new_with_constructor(|| {
                Histogram::new(exponential_buckets(0.001, 2.0, 16))
            });
            registry.register(
                "inflight",
                "Transfers that are not terminal, by state",
                inflight.clone(),
            );
            registry.register(
                "oldest_age_seconds",
                "Age of the oldest transfer that is not terminal, as the watchdog last saw it",
                oldest.clone(),
            );
            registry.register(
                "failures",
                "Transfers that ended without success, by reason",
                failures.clone(),
            );
            registry.register(
                "completed",
                "Transfers that were committed, or finished with their first token",
                completed.clone(),
            );
            registry.register(
                "bytes",
                "KV payload bytes sent (prefill) or accepted (decode)",
                bytes.clone(),
            );
            registry.register(
                "frames",
                "KV frames sent (prefill) or accepted (decode)",
                frames.clone(),
            );
            registry.register(
                "late_frames",
                "Frames that came after their transfer's end and touched nothing",
                late_frames.clone(),
            );
            registry.register(
                "unknown_messages",
                "Control messages of a newer peer, ignored",
                unknown.clone(),
            );
            registry.register(
                "seconds",
                "Time from the start of a transfer to its success",
                seconds.clone(),
            );
            let side = |side: &'static str, states: &[&'static str]| {
                initialise(&inflight, states.iter().map(|state| StateLabels { side, state }));
                let labels = reasons().map(|r| FailureLabels {
                    side,
                    reason: meaning(r).code,
                });
                initialise(&failures, labels);
                let labels = SideLabels { side };
                Arc::new(SideMetrics {
                    side,
                    inflight: inflight.clone(),
                    failures: failures.clone(),
                    completed: completed.get_or_create_owned(&labels),
                    seconds: seconds.get_or_create_owned(&labels),
                    oldest_seconds: oldest.get_or_create_owned(&labels),
                    bytes: bytes.get_or_create_owned(&labels),
                    frames: frames.get_or_create_owned(&labels),
                    late_frames: late_frames.get_or_create_owned(&labels),
                    unknown_messages: unknown.get_or_create_owned(&labels),
                    tally: Arc::default(),
                })
            };
            Self {
                decode: side(DecodeState::SIDE, DecodeState::LIVE),
                prefill: side(PrefillState::SIDE, PrefillState::LIVE),
            }
        })
    }
}
