//! Accepts connections, bounds them, and drains: a stop lets what runs finish and cuts it off, with an error, when time is over.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tandem_telemetry::State;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::socket::Socket;
use super::tls::Identity;
use super::{App, routes};
use crate::evidence::Connection;
use crate::shards::Shards;

/// A connection between two requests: longer than the idle time of what usually stands before us (600 s at most), so that no
/// pool sends a request into a connection that we are just closing.
const IDLE: Duration = Duration::from_secs(620);
/// The first request of a connection.
const FIRST_REQUEST: Duration = Duration::from_secs(30);
/// More connections than this wait in the kernel.
const MAX_CONNECTIONS: usize = 16_384;
/// After a failed accept (file descriptors used up, say) the next try waits this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// After the cut, until the errors are written.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Serves until `stop`, then drains. Without an identity, plain HTTP.
pub async fn serve(
    listener: TcpListener,
    identity: Option<Identity>,
    app: Arc<App>,
    shards: Shards,
    stop: CancellationToken,
) {
    let identity = identity.map(Arc::new);
    let graceful = GracefulShutdown::new();
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = accept(&listener, &slots) => accepted,
        };
        match accepted {
            Ok((stream, peer, slot)) => {
                let (app, watcher, identity) = (Arc::clone(&app), graceful.watcher(), identity.clone());
                let place = shards.place();
                let runtime = place.runtime();
                let task = async move {
                    let evidence = app.evidence.open(peer, identity.is_some());
                    connection(stream, identity.as_deref(), app, watcher, evidence).await;
                    drop((slot, place));
                };
                connections.spawn_on(task, &runtime);
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    app.readiness.set(State::Draining);
    tracing::info!(
        connections = graceful.count(),
        in_flight = app.flow.metrics.in_flight.get(),
        "draining"
    );
    let mut drained = std::pin::pin!(graceful.shutdown());
    if tokio::time::timeout(app.config.drain(), &mut drained).await.is_err() {
        tracing::warn!(
            in_flight = app.flow.metrics.in_flight.get(),
            "requests are cut off: --drain-ms is over"
        );
        app.cut.cancel();
        let _ = tokio::time::timeout(LAST_WORDS, &mut drained).await;
    }
    connections.shutdown().await;
    tracing::info!("drained");
}

async fn accept(
    listener: &TcpListener,
    slots: &Arc<Semaphore>,
) -> io::Result<(std::net::TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    let slot = Arc::clone(slots).acquire_owned().await.map_err(io::Error::other)?;
    let (stream, peer) = listener.accept().await?;
    // another thread will wait for it
    Ok((stream.into_std()?, peer, slot))
}

async fn connection(
    stream: std::net::TcpStream,
    identity: Option<&Identity>,
    app: Arc<App>,
    watcher: Watcher,
    evidence: Arc<Connection>,
) {
    let stalled = app.flow.metrics.client_stalled.clone();
    let socket = TcpStream::from_std(stream)
        .and_then(|stream| Socket::new(stream, app.config.client_stall(), stalled, Arc::clone(&evidence)));
    let socket = match socket {
        Ok(socket) => socket,
        // the client is gone already
        Err(error) => return tracing::debug!(%error, "a connection ended before it began"),
    };
    match identity {
        None => requests(socket, evidence, app, watcher).await,
        Some(identity) => match identity.accept(socket).await {
            Ok(stream) => requests(stream, evidence, app, watcher).await,
            Err(error) => tracing::debug!(%error, "no TLS connection came about"),
        },
    }
}

/// Answers the requests of one connection.
async fn requests<S>(stream: S, evidence: Arc<Connection>, app: Arc<App>, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let asked = Arc::new(AtomicBool::new(false));
    let service = service_fn({
        let asked = Arc::clone(&asked);
        move |request| {
            asked.store(true, Ordering::Relaxed);
            // boxed: a connection keeps room for the work on a request, also while it has none
            let answer = Box::pin(routes::answer(Arc::clone(&app), request, Arc::clone(&evidence)));
            async { Ok::<_, Infallible>(answer.await) }
        }
    });
    let mut server = auto::Builder::new(TokioExecutor::new());
    server.http1().timer(TokioTimer::new()).header_read_timeout(IDLE);
    server
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_secs(30))
        .max_concurrent_streams(256);
    let mut connection =
        std::pin::pin!(watcher.watch(server.serve_connection(TokioIo::new(stream), service).into_owned()));
    let first = tokio::select! {
        ended = &mut connection => Some(ended),
        () = tokio::time::sleep(FIRST_REQUEST) => None,
    };
    let ended = match first {
        Some(ended) => ended,
        None if !asked.load(Ordering::Relaxed) => return tracing::debug!("a connection sent no request"),
        None => connection.await,
    };
    if let Err(error) = ended {
        tracing::debug!(error = %error, "a connection broke");
    }
}
