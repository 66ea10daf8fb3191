//! The process's metrics registry.

use std::hash::Hash;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;
use tokio::runtime::Handle;

use crate::process::Process;

/// The process's registry: made once in `main`, cloned into each part.
///
/// The lock is taken when a part registers and when `/metrics` is read; counting itself never takes it.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    process: Process,
}

impl Metrics {
    /// A registry that holds `tandem_build_info` and what the process holds of the system.
    pub fn new(service: &'static str, version: &'static str) -> Self {
        let mut registry = Registry::default();
        registry.sub_registry_with_prefix("tandem").register(
            "build",
            "Which binary this is",
            Info::new(vec![("service", service), ("version", version)]),
        );
        let started = Gauge::<f64, AtomicU64>::default();
        started.set(
            SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0.0, |since| since.as_secs_f64()),
        );
        registry.register(
            "process_start_time_seconds",
            "When the process started, seconds since the epoch",
            started,
        );
        let process = Process::default();
        registry.register_collector(Box::new(process.clone()));
        Self {
            registry: Arc::new(Mutex::new(registry)),
            process,
        }
    }

    /// `tandem_runtime_tasks` counts this runtime's tasks too from now on.
    pub fn counts(&self, runtime: &Handle) {
        self.process.counts(runtime);
    }

    /// Registers one part's metrics: names given inside `register` become `tandem_<part>_<name>`.
    ///
    /// Call it once per part and process; the exposition does not merge two metrics of one name.
    pub fn part<T>(&self, part: &str, register: impl FnOnce(&mut Registry) -> T) -> T {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        register(
            registry
                .sub_registry_with_prefix("tandem")
                .sub_registry_with_prefix(part),
        )
    }

    /// The whole registry in the OpenMetrics text format, version 1.0.0.
    ///
    /// # Errors
    /// A collector that fails to write itself.
    pub fn encode(&self) -> Result<String, std::fmt::Error> {
        let registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let mut text = String::with_capacity(16 * 1024);
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

/// Makes each label set visible at zero, so that a rate over a counter's first increment is not lost.
pub fn initialise<L, M, C>(family: &Family<L, M, C>, label_sets: impl IntoIterator<Item = L>)
where
    L: Clone + Hash + Eq,
    C: MetricConstructor<M>,
{
    for labels in label_sets {
        drop(family.get_or_create(&labels));
    }
}
