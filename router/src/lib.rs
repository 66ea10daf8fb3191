//! The router: the OpenAI API in front of prefill and decode engines.
//!
//! | room | purpose |
//! | --- | --- |
//! | [`text`] | templates, tokens, stop strings |
//! | [`api`] | the OpenAI dialect |
//! | [`engines`] | connections to the engines, their load, the choice of a pair |
//! | [`flow`] | a request's way: queue, attempts, events |
//! | [`http`] | sockets, paths, bodies |
//! | [`error`] | the one error and what it means |
//! | [`metrics`] | what is counted |
//!
//! A request is a tree: the client's connection holds the answer's body, the body holds the choice, the choice holds the gRPC
//! call to decode. Dropping any of them drops all below.

pub mod api;
pub mod config;
pub mod engines;
pub mod error;
pub mod flow;
pub mod http;
pub mod metrics;
pub mod text;

use std::net::SocketAddr;
use std::sync::Arc;

use tandem_telemetry::{Metrics as Exposition, Readiness, State};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

pub use config::Config;
pub use error::RouterError;

use api::prepare::TextWork;
use engines::Engines;
use flow::{Flow, Queue};
use http::App;
use text::{Text, TextError, ToolFormat};

/// Why a router did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A flag that cannot work.
    #[error("{0}")]
    Config(String),
    /// The address cannot be bound.
    #[error("cannot listen on {addr}: {source}; choose another --listen address")]
    Bind {
        /// Asked for.
        addr: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The tokenizer cannot be loaded.
    #[error("--tokenizer: {0}")]
    Text(#[from] TextError),
    /// A thread failed.
    #[error("loading the tokenizer failed: {0}")]
    Thread(String),
}

/// A router that serves. Dropping it ends everything at once; [`Router::drain`] lets what runs finish.
#[derive(Debug)]
pub struct Router {
    addr: SocketAddr,
    app: Arc<App>,
    stop: CancellationToken,
    server: AbortOnDropHandle<()>,
    _readiness: AbortOnDropHandle<()>,
}

impl Router {
    /// Binds, loads the tokenizer off the serving threads, and serves from then on.
    pub async fn start(config: Config, exposition: Exposition, readiness: Readiness) -> Result<Self, StartError> {
        config.check().map_err(StartError::Config)?;
        let bind = |source| StartError::Bind {
            addr: config.listen,
            source,
        };
        let listener = TcpListener::bind(config.listen).await.map_err(bind)?;
        let addr = listener.local_addr().map_err(bind)?;
        let tokenizer = config.tokenizer.clone();
        let text = tokio::task::spawn_blocking(move || Text::load(&tokenizer))
            .await
            .map_err(|error| StartError::Thread(error.to_string()))??;
        let format = config.tool_parser.format(text.tool_format());
        let text = Arc::new(text.with_tool_format(format));
        let metrics = metrics::Metrics::register(&exposition);
        let flow = Arc::new(Flow {
            engines: Engines::start(&config, &metrics),
            queue: Queue::new(config.queue_limit),
            text: Arc::clone(&text),
            metrics: Arc::clone(&metrics),
            on_prefill_failure: config.on_prefill_failure,
            queue_time: config.queue(),
        });
        let watcher = tokio::spawn(follow(Arc::clone(&flow), readiness.clone()));
        let app = Arc::new(App {
            text: TextWork::new(text, metrics),
            config,
            flow,
            exposition,
            readiness,
            cut: CancellationToken::new(),
            started: api::epoch_seconds(),
        });
        let stop = CancellationToken::new();
        let server = tokio::spawn(http::server::serve(listener, Arc::clone(&app), stop.clone()));
        tracing::info!(
            %addr,
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
        })
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

/// Keeps the readiness what the engines make it.
async fn follow(flow: Arc<Flow>, readiness: Readiness) {
    let mut links = flow.engines.changed().links.subscribe();
    loop {
        readiness.set(match flow.engines.usable(flow.recompute()) {
            Ok(()) => State::Ready,
            Err(reason) => State::Waiting { reason },
        });
        if links.changed().await.is_err() {
            return;
        }
    }
}
