//! Logs, traces, metrics and the health listener: set up here, once, for every binary.
//!
//! - [`init`]: logs to stderr, as text or JSON lines, and [`Traces`] to a collector if one is given.
//! - [`Metrics`]: the process's registry; each part registers its metrics under `tandem_<part>_`.
//! - [`Readiness`]: what the process says about itself, from any thread.
//! - [`OpsServer`]: `/metrics`, `/livez` and `/readyz` on a thread of their own, so that they answer while the rest is
//!   stuck.
//!
//! ```
//! use std::net::SocketAddr;
//! use tandem_telemetry::{Metrics, OpsServer, Readiness, State};
//!
//! # fn main() -> Result<(), tandem_telemetry::TelemetryError> {
//! let metrics = Metrics::new("tandem-engine", env!("CARGO_PKG_VERSION"));
//! let readiness = Readiness::default();
//! let ops = OpsServer::start(SocketAddr::from(([127, 0, 0, 1], 0)), metrics, readiness.clone())?;
//! readiness.set(State::Ready);
//! println!("health on {}", ops.addr());
//! # Ok(())
//! # }
//! ```

mod logs;
mod metrics;
mod ops;
mod process;
mod readiness;
mod traces;

pub use logs::LogFormat;
pub use metrics::{Metrics, initialise};
pub use ops::OpsServer;
pub use readiness::{Readiness, State};
pub use traces::{Span, TraceFlags, TraceParent, Traces};

/// The metric types, from the one version that [`Metrics`] can register.
pub use prometheus_client;

use std::net::SocketAddr;

/// Sets up logs and traces for the process that calls itself `service`. Called once, from `main`, before anything else;
/// [`Traces::close`] is the last call.
pub fn init(
    service: &'static str,
    format: LogFormat,
    traces: &TraceFlags,
    metrics: &Metrics,
) -> Result<Traces, TelemetryError> {
    logs::init(service, format)?;
    Traces::start(service, traces, metrics)
}

/// Why logs, traces or the health listener could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// A log format that does not exist.
    #[error("unknown log format {0:?}: use text or json")]
    LogFormat(String),
    /// `RUST_LOG` holds no valid filter.
    #[error("RUST_LOG is not a log filter ({0}): use a level such as info, or target=level pairs")]
    Filter(String),
    /// A subscriber is already installed in this process.
    #[error("logs are already set up in this process: call init once, from main")]
    LogsTwice,
    /// The health listener's address cannot be bound.
    #[error("cannot listen on {addr} for health and metrics: {source}; choose another --ops-listen address")]
    Bind {
        /// The address asked for.
        addr: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The health listener's thread or runtime cannot be started.
    #[error("cannot start the health listener: {0}")]
    Start(std::io::Error),
    /// The collector's address is none.
    #[error("--otlp-endpoint {endpoint:?} cannot be dialled: {reason}; give http://HOST:PORT")]
    Collector {
        /// As given.
        endpoint: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The thread that sends traces, or its runtime, cannot be started.
    #[error("cannot start the export of traces: {0}")]
    StartExport(std::io::Error),
}
