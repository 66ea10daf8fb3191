//! Logs go to stderr; `RUST_LOG` chooses how much is written and nothing else.

use std::fmt;
use std::io::IsTerminal;
use std::str::FromStr;

use tracing_subscriber::filter::{EnvFilter, LevelFilter};

use crate::TelemetryError;

/// How a log line is written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// One line for people, coloured on a terminal.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

impl FromStr for LogFormat {
    type Err = TelemetryError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(TelemetryError::LogFormat(other.to_owned())),
        }
    }
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

/// Sends this process's logs to stderr, panics included, and writes the first line.
///
/// `RUST_LOG` filters as `tracing_subscriber::EnvFilter` does; unset, it is `info`.
pub(crate) fn init(service: &str, format: LogFormat) -> Result<(), TelemetryError> {
    let filter = EnvFilter::builder()
        .with_default_directive(LevelFilter::INFO.into())
        .try_from_env()
        .or_else(|error| match std::env::var(EnvFilter::DEFAULT_ENV) {
            Err(std::env::VarError::NotPresent) => Ok(EnvFilter::default().add_directive(LevelFilter::INFO.into())),
            _ => Err(TelemetryError::Filter(error.to_string())),
        })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    }
    .map_err(|_| TelemetryError::LogsTwice)?;

    std::panic::set_hook(Box::new(|panic| {
        let backtrace = std::backtrace::Backtrace::capture();
        let captured = backtrace.status() == std::backtrace::BacktraceStatus::Captured;
        tracing::error!(
            backtrace = captured.then(|| tracing::field::display(&backtrace)),
            "{panic}"
        );
    }));
    tracing::info!(
        service,
        version = env!("CARGO_PKG_VERSION"),
        pid = std::process::id(),
        "starting"
    );
    Ok(())
}
