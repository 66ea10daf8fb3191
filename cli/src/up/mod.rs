//! `tandem up`: the same binaries, from the same manifest, as children of this process on loopback.
//!
//! | module | holds |
//! | --- | --- |
//! | [`render`] | from a revision and the machine to processes; pure |
//! | [`slots`] | their names and addresses, which stay while revisions come and go |
//! | [`names`] | what the names in a spec are on this machine |
//! | [`ports`], [`memory`] | what the machine has |
//! | [`child`], [`probe`], [`logs`] | one child: its life, its health, its output |
//! | [`supervise`] | all children |
//! | [`kids`] | which child is of which revision; as the planner's world |
//! | [`carry`] | a plan's intents to children, knobs and orders |
//! | [`gate`] | the completion that a plan orders |
//! | [`edit`] | the manifest's file, watched |
//! | [`stack`] | look, plan, carry out, until the end; stop in the opposite order |
//! | [`state`] | what runs, for other commands |
//! | [`detach`] | `--detach` and `tandem down` |
//! | [`status`], [`flush`] | `tandem status` and `tandem flush`: what runs, asked and told |

mod carry;
mod child;
mod detach;
mod edit;
mod flush;
mod gate;
mod kids;
mod logs;
mod memory;
mod names;
mod ports;
mod probe;
mod render;
mod signals;
mod slots;
mod stack;
mod state;
mod status;
mod supervise;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use tandem_secrets::{SecretError, SecretFile, Token};
use tandem_telemetry::TraceFlags;

use crate::claims::{self, ClaimDir, ClaimError};
use crate::console;
use crate::manifest::{self, ManifestError};
use names::Names;

pub use slots::Role;
pub use stack::base_url;
pub use state::{State, manifest, running, token_file};
pub use status::knobs_json;

/// `tandem up`.
#[derive(Debug, Args)]
pub struct UpArgs {
    /// The manifest of a PDDeployment
    #[arg(short = 'f', long = "file", value_name = "FILE")]
    file: PathBuf,
    /// Where a claim's files lie on this machine [default: its folder in the user's data folder, tandem/claims/NAME]
    #[arg(long = "claim", value_name = "NAME=DIR")]
    claims: Vec<ClaimDir>,
    /// Where the router listens; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080")]
    http: SocketAddr,
    /// Keys of the API, one on each line; without it everybody may use it [overrides spec.router.apiKeysSecretName]
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Where a secret's files lie on this machine [default: its folder in the user's data folder, tandem/secrets/NAME]
    #[arg(long = "secret", value_name = "NAME=DIR")]
    secrets: Vec<ClaimDir>,
    /// Certificates for TLS on --http, the server's own first, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,
    /// The private key of the first certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// KV cache memory of each engine, in MiB
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    kv_memory_mib: u32,
    /// Threads of each engine [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
    /// Also write each process's log to a file in this folder [with --detach: logs in the state folder]
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// Return when all is ready and leave it running; `tandem down` stops it
    #[arg(long)]
    detach: bool,
    /// What `--detach` leaves running: nobody reads its output, so children's lines go to their files alone
    #[arg(long, hide = true, requires = "log_dir", conflicts_with = "detach")]
    background: bool,
    #[command(flatten)]
    traces: TraceFlags,
    #[command(flatten)]
    state: StateArgs,
}

/// `tandem down`.
#[derive(Debug, Args)]
pub struct DownArgs {
    #[command(flatten)]
    state: StateArgs,
}

/// `tandem flush`.
#[derive(Debug, Args)]
pub struct FlushArgs {
    #[command(flatten)]
    state: StateArgs,
}

#[derive(Debug, Args)]
pub struct StateArgs {
    /// Where this machine's deployment is recorded; one folder per deployment that runs at a time
    /// [default: tandem/up in the user's state folder]
    #[arg(long = "state-dir", value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl StateArgs {
    /// Somebody says where it is.
    pub fn given(&self) -> bool {
        self.dir.is_some()
    }

    /// Absolute, so that what names it holds from everywhere.
    pub fn dir(&self) -> Result<PathBuf, UpError> {
        let dir = match &self.dir {
            Some(dir) => dir.clone(),
            None => claims::xdg_dir("XDG_STATE_HOME", ".local/state")
                .ok_or(UpError::NoState)?
                .join("tandem/up"),
        };
        std::path::absolute(&dir).map_err(|source| UpError::State { dir, source })
    }
}

/// Why a deployment does not run.
#[derive(Debug, thiserror::Error)]
pub enum UpError {
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error(transparent)]
    Secret(#[from] SecretError),
    #[error("neither XDG_STATE_HOME nor HOME is set: say where the deployment is recorded with --state-dir DIR")]
    NoState,
    #[error("cannot use state folder {}: {source}; choose another with --state-dir", dir.display())]
    State { dir: PathBuf, source: std::io::Error },
    #[error("a deployment is running already, recorded in {}{what}; stop it with `tandem down --state-dir {}`, or \
             give this one another --state-dir and --http", dir.display(), dir.display())]
    Running { dir: PathBuf, what: String },
    #[error("nothing runs from {}; `tandem up` starts it, --state-dir names another folder", dir.display())]
    NotRunning { dir: PathBuf },
    #[error("{0}")]
    Orders(String),
    #[error("spec.prefill.replicas and spec.decode.replicas are 0: nothing to run; write 1 or more")]
    NoReplicas,
    #[error("the router cannot listen on {addr}: {source}; stop what holds it, or choose another address with --http")]
    Http { addr: SocketAddr, source: std::io::Error },
    #[error("no {name} beside this program: looked for {}; install both together, or build it with \
             `cargo build --release`", path.display())]
    NoBinary { name: &'static str, path: PathBuf },
    #[error("{0}")]
    Memory(String),
    #[error("no ports for the processes: {0}")]
    Ports(String),
    #[error("cannot write logs into {}: {source}; choose another --log-dir", dir.display())]
    Logs { dir: PathBuf, source: std::io::Error },
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: std::io::Error },
    #[error("{0}")]
    Child(stack::ChildFailure),
    #[error("{0}")]
    Held(String),
    #[error("{0}")]
    Edit(String),
    #[error("{message}")]
    Detached { message: String, code: u8 },
    #[error("process {pid} did not stop within {seconds} s and was killed with its children")]
    Stuck { pid: u32, seconds: u64 },
}

impl UpError {
    fn code(&self) -> u8 {
        match self {
            Self::Child(failure) => failure.code(),
            Self::Detached { code, .. } => *code,
            _ => 1,
        }
    }
}

fn finish(result: Result<(), UpError>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console::error(&error.to_string());
            ExitCode::from(error.code())
        }
    }
}

/// Runs the deployment until it is stopped, or until it is ready with `--detach`.
pub async fn up(args: UpArgs) -> ExitCode {
    finish(if args.detach {
        detach::start(&args).await
    } else {
        Box::pin(run(&args)).await
    })
}

/// Stops a deployment.
pub async fn down(args: DownArgs) -> ExitCode {
    finish(match args.state.dir() {
        Ok(dir) => detach::down(&dir).await,
        Err(error) => Err(error),
    })
}

/// Says what runs; an error where something is not ready.
pub async fn status(state: &StateArgs, json: bool) -> ExitCode {
    match state.dir() {
        Ok(dir) => match status::show(&dir, json).await {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => finish(Err(error)),
        },
        Err(error) => finish(Err(error)),
    }
}

/// Drops the prefix caches of all engines.
pub async fn flush(args: FlushArgs) -> ExitCode {
    finish(match args.state.dir() {
        Ok(dir) => flush::flush(&dir).await,
        Err(error) => Err(error),
    })
}

/// Checks everything that can be checked at once, then runs.
async fn run(args: &UpArgs) -> Result<(), UpError> {
    let file = edit::Watched::new(&args.file);
    let mut object = manifest::load(&args.file)?;
    edit::settle(&mut object.spec);
    let spec = &object.spec;
    if slots::engines(spec) == 0 {
        return Err(UpError::NoReplicas);
    }
    let dir = args.state.dir()?;
    let held = state::StateDir::take(&dir)
        .map_err(|source| UpError::State {
            dir: dir.clone(),
            source,
        })?
        .ok_or_else(|| runs_already(&dir))?;

    let names = Names::of(args);
    let engine = binary("tandem-engine")?;
    let router = binary("tandem-router")?;
    let found = names.find(spec)?;
    memory::Need::new(
        slots::engines(spec),
        args.kv_memory_mib,
        claims::model_bytes(&found.model),
    )
    .check(memory::available_mib())
    .map_err(UpError::Memory)?;

    let (listener, http) = listen(args.http).await.map_err(|source| UpError::Http {
        addr: args.http,
        source,
    })?;
    let ports = ports::Ports::reserve(slots::ports_needed(spec)).map_err(|error| UpError::Ports(error.to_string()))?;
    if let Some(dir) = &args.log_dir {
        std::fs::create_dir_all(dir).map_err(|source| UpError::Logs {
            dir: dir.clone(),
            source,
        })?;
    }

    let use_dir = |source| UpError::State {
        dir: dir.clone(),
        source,
    };
    held.keep_manifest(&object.metadata.name, spec).map_err(use_dir)?;
    let token_file = held.make_token().map_err(use_dir)?;
    let secret = SecretFile::private("admin token", &token_file);
    let token = Token::parse(&secret, &secret.read()?)?;
    let machine = render::Machine {
        engine,
        router,
        threads: args.threads,
        kv_memory_mib: args.kv_memory_mib,
        token_file,
        traces: args.traces.clone(),
        door: render::Door {
            fd: listener.as_raw_fd(),
            socket: Arc::downgrade(&listener),
        },
    };
    let slots = slots::slots(spec, http, &ports.list()).map_err(UpError::Ports)?;
    let signals = signals::Signals::new().map_err(|source| UpError::System {
        what: "listen for signals",
        source,
    })?;
    let console = console::Console::stderr().map_err(|source| UpError::System {
        what: "write to stderr",
        source,
    })?;
    let setup = stack::Setup {
        deployment: object.metadata.name,
        spec: object.spec,
        file,
        names,
        machine,
        slots,
        listener,
        ports,
        token,
        front: found.front,
        log_dir: args.log_dir.clone(),
        background: args.background,
    };
    // Boxed: it is large, and there is one.
    Box::pin(stack::Stack::new(setup, held, console)?.run(signals)).await
}

/// The socket that clients connect to, and its address. It stays while routers come and go.
async fn listen(addr: SocketAddr) -> std::io::Result<(Arc<TcpListener>, SocketAddr)> {
    let listener = tokio::net::TcpListener::bind(addr).await?.into_std()?;
    let addr = listener.local_addr()?;
    Ok((Arc::new(listener), addr))
}

fn runs_already(dir: &Path) -> UpError {
    let what = state::read(dir)
        .map(|state| {
            format!(
                " ({:?} as process {}, {})",
                state.name,
                state.pid,
                stack::base_url(&state)
            )
        })
        .unwrap_or_default();
    UpError::Running {
        dir: dir.to_owned(),
        what,
    }
}

fn binary(name: &'static str) -> Result<PathBuf, UpError> {
    let me = std::env::current_exe().map_err(|source| UpError::System {
        what: "find this program's folder",
        source,
    })?;
    let path = me.with_file_name(name);
    if path.is_file() {
        Ok(path)
    } else {
        Err(UpError::NoBinary { name, path })
    }
}
