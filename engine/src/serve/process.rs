//! From the command line to the exit code.
//!
//! Order matters: logs first; signals are caught before anything can take long; health answers before the model loads; an
//! address that is taken is told before the model loads; requests that come while it loads are told so.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use tandem_secrets::{SecretFile, Token, Watched};
use tandem_telemetry::{Metrics, OpsServer, Readiness, State, Traces, init};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use super::admin::AdminPort;
use super::flags::Flags;
use super::listen::Reserved;
use super::loading;
use super::node::{Node, NodeConfig, Ports, READER_STALL};
use crate::exec::Executor;
use crate::model::{LoadError, LoadOptions, load};
use crate::sched::Role;

type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// Threads for gRPC. The model's own threads compute; these only move small messages and copy KV.
const SERVING_THREADS: usize = 2;

/// Runs an engine: 0 after a clean end, 1 after an error (told on stderr), 2 for a wrong command line.
pub fn run(flags: Flags) -> ExitCode {
    if let Err(why) = flags.check() {
        let _ = writeln!(std::io::stderr(), "tandem-engine: {why}");
        return ExitCode::from(2);
    }
    #[cfg(feature = "faults")]
    if let Some(Err(why)) = flags.faults.clone().map(tandem_faults::follow) {
        let _ = writeln!(std::io::stderr(), "tandem-engine: --faults: {why}");
        return ExitCode::from(2);
    }
    let metrics = Metrics::new("tandem-engine", env!("CARGO_PKG_VERSION"));
    let service = match flags.role {
        Role::Prefill => "tandem-prefill",
        Role::Decode => "tandem-decode",
        Role::Unified => "tandem-unified",
    };
    let traces = match init(service, flags.log_format, &flags.traces, &metrics) {
        Ok(traces) => traces,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "tandem-engine: {error}");
            return ExitCode::FAILURE;
        }
    };
    let outcome = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(SERVING_THREADS)
        .enable_all()
        .build()
        .map_err(AnyError::from)
        .and_then(|runtime| {
            metrics.counts(runtime.handle());
            let outcome = runtime.block_on(serve(flags, metrics, traces.clone()));
            // a load that was given up goes on in its thread; it must not keep the process
            runtime.shutdown_background();
            outcome
        });
    traces.close();
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "tandem-engine: {error}");
            ExitCode::FAILURE
        }
    }
}

/// SIGTERM or SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn install() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

async fn serve(flags: Flags, metrics: Metrics, traces: Traces) -> Result<(), AnyError> {
    let mut signals = Signals::install()?;
    let readiness = Readiness::default();
    let ops = OpsServer::start(flags.ops_listen, metrics.clone(), readiness.clone())?;
    let control = Reserved::bind(flags.listen, "gRPC", "--listen")?;
    let data = if flags.role.hands_out() {
        Some(Reserved::bind(flags.data_listen, "KV data", "--data-listen")?)
    } else {
        None
    };

    let admin = admin_port(&flags)?;

    tracing::info!(
        listen = %control.addr(),
        data_listen = data.as_ref().map(Reserved::addr).map(tracing::field::display),
        ops_listen = %ops.addr(),
        "loading the model"
    );
    let load = load_beside(flags.load_options(), readiness.clone())?;
    let executor = tokio::select! {
        loaded = load => loaded.map_err(|_| "the model's loader panicked; its log says where")??,
        signal = signals.next() => {
            tracing::info!(signal, "told to end while the model loads");
            return Ok(());
        }
        never = loading::answer(control.lend()?, flags.role.source(), readiness.clone()) => match never {},
    };

    let config = NodeConfig {
        role: flags.role,
        served_name: flags.served_name.clone(),
        knobs: flags.knobs(),
        timers: flags.timers(),
        keep_alive: flags.keep_alive(),
        reader_stall: READER_STALL,
        advertise: flags.advertise_data.clone(),
        traces,
    };
    let ports = Ports { control, data, admin };
    let node = Node::start(executor, config, ports, &metrics, &readiness)?;
    let spec = node.scheduler().spec();
    tracing::info!(
        role = flags.role.name(),
        model = spec.name,
        backend = spec.backend,
        tensor_parallel = flags.tensor_parallel,
        boot_id = %node.boot_id(),
        listen = %node.control_addr(),
        data_listen = node.data_addr().map(tracing::field::display),
        admin_listen = node.admin_addr().map(tracing::field::display),
        ops_listen = %ops.addr(),
        pages = spec.total_pages,
        page_tokens = spec.page_tokens,
        max_length_tokens = spec.max_length_tokens,
        "serving"
    );
    let handle = node.handle();
    let running = tokio::spawn(node.run());
    tokio::pin!(running);
    let signal = tokio::select! {
        ended = &mut running => return Ok(ended??),
        signal = signals.next() => signal,
    };
    tracing::info!(signal, limit_ms = flags.drain_ms, "draining");
    tokio::select! {
        left = handle.drain(std::time::Duration::from_millis(flags.drain_ms)) => match left {
            0 => tracing::info!("drained"),
            left => tracing::warn!(left, "the drain's time is over, the requests left fail"),
        },
        signal = signals.next() => tracing::warn!(signal, "told to end at once, the requests left fail"),
        ended = &mut running => return Ok(ended??),
    }
    handle.close();
    Ok(running.await??)
}

/// The admin port, where one is asked for: a token that cannot be used is told before the model loads.
fn admin_port(flags: &Flags) -> Result<Option<AdminPort>, AnyError> {
    let (Some(addr), Some(path)) = (flags.admin_listen, &flags.admin_token_file) else {
        tracing::info!("no admin port: knobs, drain and flush need --admin-listen and --admin-token-file");
        return Ok(None);
    };
    let file = SecretFile::private("--admin-token-file", path);
    let token = Watched::start(vec![file], |files, bytes| Token::parse(&files[0], &bytes[0]))?;
    Ok(Some(AdminPort {
        reserved: Reserved::bind(addr, "admin", "--admin-listen")?,
        token: Arc::new(token),
        advertise: flags.advertise_admin.clone(),
    }))
}

/// Loads in a thread of its own, so that signals and health are served meanwhile.
fn load_beside(
    options: LoadOptions,
    readiness: Readiness,
) -> std::io::Result<oneshot::Receiver<Result<Box<dyn Executor>, LoadError>>> {
    let (done, loading) = oneshot::channel();
    std::thread::Builder::new().name("loader".into()).spawn(move || {
        #[cfg(feature = "faults")]
        tandem_faults::pass(tandem_faults::Fault::DelayModelLoad);
        let loaded = load(&options, &mut |percent| {
            readiness.set(State::Loading { percent });
        });
        // nobody waits any more if a signal came first
        let _ = done.send(loaded);
    })?;
    Ok(loading)
}
