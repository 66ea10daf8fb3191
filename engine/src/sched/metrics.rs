//! Counters and gauges of scheduling, `tandem_engine_*`.

use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use tandem_telemetry::initialise;
use tandem_wire::Reason;
use tandem_wire::phase;
use tandem_wire::reason::meaning;

use super::inflight::Level;
use super::shared::Shared;

/// `kind`: generate or prefill for requests, prompt or decode for tokens.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct KindLabel {
    kind: &'static str,
}

/// `reason`: its stable code.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReasonLabel {
    reason: &'static str,
}

/// The scheduler's metrics; clones count the same.
#[derive(Debug, Clone)]
pub struct SchedMetrics {
    pub(super) passes: Counter,
    pub(super) steps: Counter,
    pub(super) step_seconds: Histogram,
    pub(super) step_errors: Counter,
    tokens: Family<KindLabel, Counter>,
    pub(super) cached_tokens: Counter,
    requests: Family<KindLabel, Counter>,
    pub(super) finished: Counter,
    pub(super) aborted: Counter,
    recomputed: Counter,
    failures: Family<ReasonLabel, Counter>,
}

impl Default for SchedMetrics {
    fn default() -> Self {
        let metrics = Self {
            passes: Counter::default(),
            steps: Counter::default(),
            // 1 ms to 32 s
            step_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 16)),
            step_errors: Counter::default(),
            tokens: Family::default(),
            cached_tokens: Counter::default(),
            requests: Family::default(),
            finished: Counter::default(),
            aborted: Counter::default(),
            recomputed: Counter::default(),
            failures: Family::default(),
        };
        initialise(&metrics.tokens, ["prompt", "decode"].map(|kind| KindLabel { kind }));
        initialise(
            &metrics.requests,
            ["generate", "prefill"].map(|kind| KindLabel { kind }),
        );
        // the reasons are numbered from 1 without a gap
        let reasons = (1..).map_while(|v| Reason::try_from(v).ok());
        initialise(
            &metrics.failures,
            reasons.map(|r| ReasonLabel {
                reason: meaning(r).code,
            }),
        );
        metrics
    }
}

impl SchedMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "scheduler_passes",
            "Looks of the scheduler at its work, those that found a step included",
            self.passes.clone(),
        );
        registry.register("steps", "Steps computed", self.steps.clone());
        registry.register("step_seconds", "Duration of a step", self.step_seconds.clone());
        registry.register("step_errors", "Steps that failed", self.step_errors.clone());
        registry.register("tokens", "Tokens computed", self.tokens.clone());
        registry.register(
            "prefix_cached_tokens",
            "Prompt tokens found in the prefix cache",
            self.cached_tokens.clone(),
        );
        registry.register("requests", "Requests that came", self.requests.clone());
        registry.register("finished", "Requests that ended well", self.finished.clone());
        registry.register("aborted", "Requests whose owner left", self.aborted.clone());
        registry.register(
            "recomputed",
            "Requests whose prefill failed and was done here",
            self.recomputed.clone(),
        );
        registry.register("failures", "Requests refused or failed", self.failures.clone());
    }

    pub(super) fn tokens(&self, prompt: u64, decode: u64) {
        self.tokens.get_or_create(&KindLabel { kind: "prompt" }).inc_by(prompt);
        self.tokens.get_or_create(&KindLabel { kind: "decode" }).inc_by(decode);
    }

    pub(super) fn request(&self, kind: &'static str) {
        self.requests.get_or_create(&KindLabel { kind }).inc();
    }

    /// Looks of the loop at its work so far: far more of them than steps is a loop that spins.
    pub fn passes(&self) -> u64 {
        self.passes.get()
    }

    /// Counts a request that ended well without the loop: its first token came from a prefill and ended it.
    pub fn finished(&self) {
        self.finished.inc();
    }

    /// Counts a request whose prefill failed and is done here.
    pub fn recomputed(&self) {
        self.recomputed.inc();
    }

    /// Counts a refusal or failure.
    pub fn failure(&self, reason: Reason) {
        let reason = meaning(reason).code;
        self.failures.get_or_create(&ReasonLabel { reason }).inc();
    }
}

/// The levels, and how old the last step and the last progress are, as of when it is read: no thread has to move for it.
#[derive(Debug)]
pub(super) struct Standing(pub(super) Arc<Shared>);

impl Collector for Standing {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (load, pages) = self.0.levels();
        for (name, help, level) in [
            ("running", "Sequences that hold a place", u64::from(load.running)),
            ("max_running", "Places", load.max_running.into()),
            ("waiting", "Prefills that wait for a place", load.waiting.into()),
            ("transferring", "KV hand-offs under way", load.transferring.into()),
            ("waiting_tokens", "Prompt tokens not yet computed", load.waiting_tokens),
        ] {
            let gauge = ConstGauge::new(level as i64);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        let kind = ConstGauge::new(0_i64).metric_type();
        let mut family = encoder.encode_descriptor("pages", "KV pages by state", None, kind)?;
        for (state, count) in [("free", pages.free), ("cached", pages.cached), ("held", pages.held)] {
            ConstGauge::new(i64::from(count)).encode(family.encode_family(&[("state", state)])?)?;
        }
        let levels = self.0.inflight.levels();
        let mut by_state = |name: &str, help: &str, unit: Option<&Unit>, value: fn(&Level) -> f64| {
            let kind = ConstGauge::new(0.0).metric_type();
            let mut family = encoder.encode_descriptor(name, help, unit, kind)?;
            for level in &levels {
                let labels = [("state", phase::name(level.phase))];
                ConstGauge::new(value(level)).encode(family.encode_family(&labels)?)?;
            }
            Ok::<_, std::fmt::Error>(())
        };
        by_state("inflight", "Requests, by what each waits for", None, |level| {
            level.count.into()
        })?;
        by_state(
            "inflight_oldest",
            "The longest that a request has waited for it",
            Some(&Unit::Seconds),
            |level| level.oldest.as_secs_f64(),
        )?;
        by_state(
            "inflight_still",
            "The longest that a request has waited for it without a layer, KV or a token",
            Some(&Unit::Seconds),
            |level| level.still.as_secs_f64(),
        )?;
        for (name, help, age) in [
            (
                "last_step_age",
                "Since the scheduler's last step, or its last look at an empty batch",
                self.0.step_age(),
            ),
            (
                "last_progress_age",
                "Since a layer was computed, KV moved or a token was chosen",
                self.0.inflight.progress_age(),
            ),
        ] {
            let gauge = ConstGauge::new(age.as_secs_f64());
            gauge.encode(encoder.encode_descriptor(name, help, Some(&Unit::Seconds), gauge.metric_type())?)?;
        }
        Ok(())
    }
}
