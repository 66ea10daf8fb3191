//! `tandem_operator_*`. No label takes a value from outside.

use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use tandem_crds::status::CONDITIONS;
use tandem_telemetry::initialise;

use crate::cluster::cache::Cache;
use crate::cluster::kinds::Kind;

/// `result`: settled, changed, waiting or failed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PassLabel {
    result: &'static str,
}

/// `kind` of the object, `verb`, and `result`: ok or failed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WriteLabel {
    kind: &'static str,
    verb: &'static str,
    result: &'static str,
}

/// `kind` of the object.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

/// `call` and `result`: ok or failed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabel {
    call: &'static str,
    result: &'static str,
}

/// The operator's metrics; clones count the same.
#[derive(Debug, Clone)]
pub struct Metrics {
    passes: Family<PassLabel, Counter>,
    pass_seconds: Histogram,
    writes: Family<WriteLabel, Counter>,
    repairs: Family<KindLabel, Counter>,
    calls: Family<CallLabel, Counter>,
    watch_errors: Counter,
    deployments: Gauge,
    unreadable: Gauge,
    queued: Gauge,
    leading: Gauge,
}

/// How a pass ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassResult {
    /// Nothing was to be done.
    Settled,
    /// Something was written or told.
    Changed,
    /// A change waits.
    Waiting,
    /// It could not be carried out.
    Failed,
}

impl PassResult {
    const ALL: [Self; 4] = [Self::Settled, Self::Changed, Self::Waiting, Self::Failed];

    /// As metrics and traces call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Settled => "settled",
            Self::Changed => "changed",
            Self::Waiting => "waiting",
            Self::Failed => "failed",
        }
    }

    fn label(self) -> PassLabel {
        PassLabel { result: self.name() }
    }
}

/// Calls of processes.
pub const CALLS: [&str; 6] = [
    "get_info",
    "set_knobs",
    "get_traffic",
    "set_traffic",
    "set_router_knobs",
    "probe",
];

/// Counts deployments by what their conditions say, when it is read.
#[derive(Debug)]
struct Conditions(Arc<Cache>);

impl Collector for Conditions {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let counts = self.0.conditions();
        let mut family = encoder.encode_descriptor(
            "conditions",
            "Deployments by what their conditions say",
            None,
            ConstGauge::new(0_i64).metric_type(),
        )?;
        for condition in CONDITIONS {
            for status in ["True", "False", "Unknown"] {
                let count = counts.get(&(condition.to_owned(), status.to_owned()));
                let labels = [("condition", condition), ("status", status)];
                ConstGauge::new(count.copied().unwrap_or(0)).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

impl Metrics {
    /// Registers all of it, once per process.
    pub fn register(metrics: &tandem_telemetry::Metrics, cache: &Arc<Cache>) -> Self {
        let all = Self {
            passes: Family::default(),
            // 1 ms to 32 s
            pass_seconds: Histogram::new(exponential_buckets(0.001, 2.0, 16)),
            writes: Family::default(),
            repairs: Family::default(),
            calls: Family::default(),
            watch_errors: Counter::default(),
            deployments: Gauge::default(),
            unreadable: Gauge::default(),
            queued: Gauge::default(),
            leading: Gauge::default(),
        };
        initialise(&all.passes, PassResult::ALL.map(PassResult::label));
        initialise(&all.repairs, Kind::ALL.map(|kind| KindLabel { kind: kind.name() }));
        let calls = CALLS
            .into_iter()
            .flat_map(|call| ["ok", "failed"].map(|result| CallLabel { call, result }));
        initialise(&all.calls, calls);
        let verbs = Kind::ALL
            .into_iter()
            .flat_map(|kind| ["apply", "create", "delete"].map(|verb| (kind.name(), verb)));
        let own = ["status", "finalizer"].map(|verb| (tandem_crds::KIND, verb));
        let others = [("Deployment", "scale"), ("Event", "create")];
        let writes = verbs.chain(own).chain(others);
        initialise(
            &all.writes,
            writes.flat_map(|(kind, verb)| ["ok", "failed"].map(|result| WriteLabel { kind, verb, result })),
        );
        metrics.part("operator", |registry| {
            registry.register("passes", "Looks at a deployment, by how they ended", all.passes.clone());
            registry.register(
                "pass_seconds",
                "Duration of a look at a deployment",
                all.pass_seconds.clone(),
            );
            registry.register(
                "writes",
                "Writes to the API server, the lease aside",
                all.writes.clone(),
            );
            registry.register(
                "repairs",
                "Children that somebody had changed and that were put back",
                all.repairs.clone(),
            );
            registry.register("calls", "Calls of engines and routers", all.calls.clone());
            registry.register_collector(Box::new(Conditions(Arc::clone(cache))));
            registry.register("watch_errors", "Watches that were cut", all.watch_errors.clone());
            registry.register("deployments", "Deployments that are there", all.deployments.clone());
            registry.register(
                "unreadable",
                "Deployments that cannot be read and are left as they are",
                all.unreadable.clone(),
            );
            registry.register(
                "queued",
                "Deployments that are looked at again later",
                all.queued.clone(),
            );
            registry.register(
                "leading",
                "1 while this operator is the one that works",
                all.leading.clone(),
            );
        });
        all
    }

    pub(crate) fn pass(&self, result: PassResult, seconds: f64, queued: usize) {
        self.passes.get_or_create(&result.label()).inc();
        self.pass_seconds.observe(seconds);
        self.queued.set(queued as i64);
    }

    pub(crate) fn wrote(&self, kind: &'static str, verb: &'static str, ok: bool) {
        let result = if ok { "ok" } else { "failed" };
        self.writes.get_or_create(&WriteLabel { kind, verb, result }).inc();
    }

    pub(crate) fn repaired(&self, kind: Kind) {
        self.repairs.get_or_create(&KindLabel { kind: kind.name() }).inc();
    }

    pub(crate) fn called(&self, call: &'static str, ok: bool) {
        let result = if ok { "ok" } else { "failed" };
        self.calls.get_or_create(&CallLabel { call, result }).inc();
    }

    pub(crate) fn watch_error(&self) {
        self.watch_errors.inc();
    }

    pub(crate) fn deployments(&self, there: usize, unreadable: usize) {
        self.deployments.set(there as i64);
        self.unreadable.set(unreadable as i64);
    }

    /// Whether this operator works.
    pub fn leading(&self, leads: bool) {
        self.leading.set(leads.into());
    }
}
