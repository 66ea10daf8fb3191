//! What the process holds of the system, and the tasks of its runtimes, as of when it is read.

use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;
use tokio::runtime::Handle;

/// Clones are the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Process {
    /// Those that serve: the health listener's own would count who asks.
    runtimes: Arc<Mutex<Vec<Handle>>>,
}

impl Process {
    pub(crate) fn counts(&self, runtime: &Handle) {
        self.runtimes.lock().push(runtime.clone());
    }

    fn tasks(&self) -> usize {
        let runtimes = self.runtimes.lock();
        runtimes.iter().map(|runtime| runtime.metrics().num_alive_tasks()).sum()
    }
}

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut level = |name: &str, help: &str, value: usize| {
            let gauge = ConstGauge::new(value as i64);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)
        };
        level(
            "tandem_runtime_tasks",
            "Tasks that have not ended, of the runtimes that serve",
            self.tasks(),
        )?;
        if let Some(threads) = entries("/proc/self/task") {
            level("process_threads", "Threads", threads)?;
        }
        if let Some(open) = entries("/proc/self/fd") {
            // that of the folder itself aside
            level("process_open_fds", "Open file descriptors", open.saturating_sub(1))?;
        }
        Ok(())
    }
}

/// Of a folder; none where the system has no such one.
fn entries(folder: &str) -> Option<usize> {
    std::fs::read_dir(folder).ok().map(Iterator::count)
}
