//! The operator's binary.

use std::process::ExitCode;

use clap::Parser as _;
use tandem_operator::config::Config;
use tandem_operator::operator::Operator;
use tandem_telemetry::{Metrics, OpsServer, Readiness, Traces, init};
use tokio::signal::unix::{Signal, SignalKind, signal};

fn main() -> ExitCode {
    let config = Config::parse();
    let metrics = Metrics::new("tandem-operator", env!("CARGO_PKG_VERSION"));
    let traces = match init("tandem-operator", config.log_format, &config.traces, &metrics) {
        Ok(traces) => traces,
        Err(error) => {
            eprintln!("tandem-operator: {error}");
            return ExitCode::FAILURE;
        }
    };
    // One thread: passes are short, and what waits, waits for the network.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "cannot start the runtime");
            return ExitCode::FAILURE;
        }
    };
    metrics.counts(runtime.handle());
    let ended = runtime.block_on(run(&config, &metrics, traces.clone()));
    drop(runtime);
    traces.close();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(config: &Config, metrics: &Metrics, traces: Traces) -> Result<(), Box<dyn std::error::Error>> {
    // before anything that takes time, so that no signal finds the default action
    let (terminate, interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let readiness = Readiness::default();
    let _ops = OpsServer::start(config.ops_listen, metrics.clone(), readiness.clone())?;
    let operator = Operator::start(config, metrics, readiness, traces).await?;
    operator.run(either(terminate, interrupt)).await?;
    Ok(())
}

async fn either(mut terminate: Signal, mut interrupt: Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
