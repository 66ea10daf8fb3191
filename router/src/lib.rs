//! The router: the OpenAI API in front of prefill and decode engines.
//!
//! | room | purpose |
//! | --- | --- |
//! | [`text`] | templates, tokens, stop strings |
//! | [`api`] | the OpenAI dialect |
//! | [`engines`] | connections to the engines, their load, the choice of a pair |
//! | [`flow`] | a request's way: queue, attempts, events |
//! | [`http`] | sockets, paths, bodies |
//! | [`evidence`] | where requests and connections stand, and where their time went |
//! | [`knobs`] | what can be changed while it runs |
//! | [`admin`] | the port for those who run it |
//! | [`error`] | the one error and what it means |
//! | [`metrics`] | what is counted |
//! | [`shards`] | the threads that serve |
//!
//! A request is a tree: the client's connection holds the answer's body, the body holds the choice, the choice holds the gRPC
//! call to decode. Dropping any of them drops all below.

pub mod admin;
pub mod api;
pub mod config;
pub mod engines;
pub mod error;
pub mod evidence;
pub mod flow;
pub mod http;
pub mod knobs;
pub mod metrics;
pub mod shards;
pub mod text;

use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::sync::Arc;

use arc_swap::ArcSwap;
use tandem_secrets::{Keys, SecretError, SecretFile, Token, Watched};
use tandem_telemetry::{Metrics as Exposition, Readiness, State, Traces};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

pub use config::Config;
pub use error::RouterError;

use api::prepare::TextWork;
use engines::{Cluster, ClusterError, Engines};
use evidence::Registry;
use flow::{Flow, Order, Queue, Traffic};
use http::App;
use http::body::Budget;
use http::probe::Probe;
use shards::Shards;
use text::{Text, TextError, ToolFormat};

/// Why a router did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A flag that cannot work.
    #[error("{0}")]
    Config(String),
    /// The address cannot be bound.
    #[error("cannot listen on {addr}: {source}; choose another {flag} address")]
    Bind {
        /// Whose address it is.
        flag: &'static str,
        /// Asked for.
        addr: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The socket that was to be inherited is none.
    #[error("--listen-fd {fd} is no listening socket: {source}; leave it out to open --listen")]
    Inherit {
        /// The number of its file.
        fd: i32,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file of keys, certificates or a token cannot be used.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The tokenizer cannot be loaded.
    #[error("--tokenizer: {0}")]
    Text(#[from] TextError),
    /// The thread that loads it failed.
    #[error("loading the tokenizer failed: {0}")]
    Loading(String),
    /// The cluster of the engines cannot be asked.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// A serving thread cannot be started.
    #[error("cannot start the threads that serve: {0}; give fewer by --threads")]
    Threads(std::io::Error),
}

/// A router that serves. Dropping it ends everything at once; [`Router::drain`] lets what runs finish.
#[derive(Debug)]
pub struct Router {
    addr: SocketAddr,
    app: Arc<App>,
    stop: CancellationToken,
    server: AbortOnDropHandle<()>,
    _readiness: AbortOnDropHandle<()>,
    admin: Option<admin::Port>,
}

impl Router {
    /// Binds, loads the tokenizer off the serving threads, and serves from then on, on `--threads` threads.
    pub async fn start(
        config: Config,
        exposition: Exposition,
        readiness: Readiness,
        traces: Traces,
    ) -> Result<Self, StartError> {
        let shards = Shards::start(config.threads()).map_err(StartError::Threads)?;
        shards.runtimes().for_each(|runtime| exposition.counts(runtime));
        Self::start_on(shards, config, exposition, readiness, traces).await
    }

    /// The same on these threads.
    pub async fn start_on(
        shards: Shards,
        config: Config,
        exposition: Exposition,
        readiness: Readiness,
        traces: Traces,
    ) -> Result<Self, StartError> {
        config.check().map_err(StartError::Config)?;
        let locks = Locks::start(&config)?;
        let cluster = match config.discover_decode {
            Some(_) => Some(Cluster::new(config.kubeconfig.as_deref(), config.namespace.as_deref()).await?),
            None => None,
        };
        let (listener, addr) = match config.listen_fd {
            Some(fd) => inherited(fd).map_err(|source| StartError::Inherit { fd, source })?,
            None => bind("--listen", config.listen).await?,
        };
        let admin = match config.admin_listen {
            Some(listen) => Some(bind("--admin-listen", listen).await?),
            None => None,
        };
        let tokenizer = config.tokenizer.clone();
        let text = tokio::task::spawn_blocking(move || Text::load(&tokenizer))
            .await
            .map_err(|error| StartError::Loading(error.to_string()))??;
        let format = config.tool_parser.format(text.tool_format());
        let text = Arc::new(text.with_tool_format(format));
        let evidence = Arc::new(Registry::default());
        let metrics = metrics::Metrics::register(&exposition, &evidence);
        let flow = Arc::new(Flow {
            engines: Engines::start(&config, cluster.as_ref(), &metrics, &shards),
            queue: Queue::new(config.queue_limit),
            traffic: Traffic::new(config.traffic(), &metrics),
            text: Arc::clone(&text),
            metrics: Arc::clone(&metrics),
            knobs: ArcSwap::from_pointee(config.knobs),
        });
        let watcher = tokio::spawn(follow(Arc::clone(&flow), readiness.clone()));
        let app = Arc::new(App {
            bodies: Budget::new(config.max_bodies_bytes),
            probe: Probe::new(Arc::clone(&text))?,
            text: TextWork::new(text, metrics),
            config,
            keys: locks.keys,
            flow,
            exposition,
            evidence,
            badges: evidence::Badges::default(),
            readiness,
            traces,
            cut: CancellationToken::new(),
            started: api::epoch_seconds(),
        });
        let stop = CancellationToken::new();
        let tls = locks.tls.is_some();
        let server = http::server::serve(listener, locks.tls, Arc::clone(&app), shards, stop.clone());
        let server = tokio::spawn(server);
        let admin = admin
            .zip(locks.token)
            .map(|((listener, addr), token)| admin::Port::open(listener, addr, token, Arc::clone(&app)));
        if admin.is_none() {
            tracing::info!("no admin port: /admin/* needs --admin-listen and --admin-token-file");
        }
        let (keys, admin_addr) = (
            app.keys.is_some(),
            admin.as_ref().map(|port| tracing::field::display(port.addr())),
        );
        tracing::info!(
            %addr,
            tls,
            keys,
            admin_addr,
            model = app.config.model_name,
            tool_parser = format.map_or("none", ToolFormat::name),
            "serving"
        );
        Ok(Self {
            addr,
            app,
            stop,
            server: AbortOnDropHandle::new(server),
            _readiness: AbortOnDropHandle::new(watcher),
            admin,
        })
    }

    /// Where `/admin/*` is served, if anywhere.
    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(admin::Port::addr)
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// What is counted.
    pub fn metrics(&self) -> &Arc<metrics::Metrics> {
        &self.app.flow.metrics
    }

    /// Takes no new connection, says so on `/readyz`, and returns when what runs has finished or `--drain-ms` is over.
    pub async fn drain(self) {
        self.app.readiness.set(State::Draining);
        self.stop.cancel();
        if let Err(error) = self.server.await {
            tracing::error!(%error, "the server failed");
        }
    }
}

async fn bind(flag: &'static str, addr: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |source| StartError::Bind { flag, addr, source };
    let listener = TcpListener::bind(addr).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

/// Takes over a listening socket that this process was started with.
fn inherited(fd: RawFd) -> std::io::Result<(TcpListener, SocketAddr)> {
    // SAFETY: the file is only copied here, which fails where it is not open.
    unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
    // SAFETY: it is open, and whoever names it by the flag gives it away: nothing else here closes it.
    let listener = std::net::TcpListener::from(unsafe { OwnedFd::from_raw_fd(fd) });
    listener.set_nonblocking(true)?;
    let addr = listener.local_addr()?;
    Ok((TcpListener::from_std(listener)?, addr))
}

/// What opens the router's ports, as far as they are locked.
struct Locks {
    keys: Option<Watched<Keys>>,
    token: Option<Watched<Token>>,
    tls: Option<http::tls::Identity>,
}

impl Locks {
    fn start(config: &Config) -> Result<Self, SecretError> {
        let keys = config.api_key_file.as_ref().map(|path| {
            let file = SecretFile::private("--api-key-file", path);
            Watched::start(vec![file], |files, bytes| Keys::parse(&files[0], &bytes[0]))
        });
        let token = config.admin_token_file.as_ref().map(|path| {
            let file = SecretFile::private("--admin-token-file", path);
            Watched::start(vec![file], |files, bytes| Token::parse(&files[0], &bytes[0]))
        });
        let tls = config.tls_cert.as_ref().zip(config.tls_key.as_ref());
        Ok(Self {
            keys: keys.transpose()?,
            token: token.transpose()?,
            tls: tls
                .map(|(cert, key)| http::tls::Identity::start(cert, key))
                .transpose()?,
        })
    }
}

/// Keeps the readiness what the engines make it. A router that was ready once stays so without engines, and is ready without any
/// while an order keeps requests from them: whoever holds requests back, or says when to come back, must be reached, where a
/// Service without a ready pod refuses connections.
async fn follow(flow: Arc<Flow>, readiness: Readiness) {
    let (mut links, mut orders) = (flow.engines.changed().links.subscribe(), flow.traffic.orders());
    let mut was_ready = false;
    loop {
        let kept = *orders.borrow_and_update() != Order::Admit;
        let state = match flow.engines.usable(flow.knobs().recompute()) {
            Err(reason) if !kept && was_ready => State::Degraded { reason },
            Err(reason) if !kept => State::Waiting { reason },
            _ => State::Ready,
        };
        was_ready |= state == State::Ready;
        readiness.set(state);
        let told = tokio::select! {
            told = links.changed() => told,
            told = orders.changed() => told,
        };
        if told.is_err() {
            return;
        }
    }
}
