//! The router's binary.

use std::process::ExitCode;

use clap::Parser;
use tandem_router::{Config, Router};
use tandem_telemetry::{Metrics, OpsServer, Readiness, Traces, init};
use tokio::signal::unix::{Signal, SignalKind, signal};

pub(crate) fn main() -> ExitCode {
    let config = Config::parse();
    #[cfg(feature = "faults")]
    if let Some(Err(why)) = config.faults.clone().map(tandem_faults::follow) {
        eprintln!("tandem-router: --faults: {why}");
        return ExitCode::from(2);
    }
    let metrics = Metrics::new("tandem-router", env!("CARGO_PKG_VERSION"));
    let traces = match init("tandem-router", config.log_format, &config.traces, &metrics) {
        Ok(traces) => traces,
        Err(error) => {
            eprintln!("tandem-router: {error}");
            return ExitCode::FAILURE;
        }
    };
    // for what is no request: accepting, the engines' loads, the admin port; requests have threads of their own
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "cannot start the runtime");
            return ExitCode::FAILURE;
        }
    };
    metrics.counts(runtime.handle());
    let ended = runtime.block_on(run(config, metrics, traces.clone()));
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

async fn run(config: Config, metrics: Metrics, traces: Traces) -> Result<(), Box<dyn std::error::Error>> {
    // before anything that takes time, so that no signal finds the default action
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let readiness = Readiness::default();
    let _ops = OpsServer::start(config.ops_listen, metrics.clone(), readiness.clone())?;
    let router = tokio::select! {
        router = Router::start(config, metrics, readiness, traces) => router?,
        () = either(&mut terminate, &mut interrupt) => return Ok(()),
    };
    either(&mut terminate, &mut interrupt).await;
    tokio::select! {
        () = router.drain() => {}
        // asked twice, it goes at once
        () = either(&mut terminate, &mut interrupt) => tracing::warn!("stopped before the drain was over"),
    }
    Ok(())
}

async fn either(terminate: &mut Signal, interrupt: &mut Signal) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}
