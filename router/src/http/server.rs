//! Accepts connections, bounds them, and drains: a stop lets what runs finish and cuts it off, with an error, when time is over.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tandem_telemetry::State;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::socket::Socket;
use super::tls::Identity;
use super::{App, requests};
use crate::evidence::Connection;
use crate::shards::Shards;

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
                let (app, identity, stop) = (Arc::clone(&app), identity.clone(), stop.clone());
                let place = shards.place();
                let runtime = place.runtime();
                let task = async move {
                    let evidence = app.evidence.open(peer, identity.is_some());
                    connection(stream, identity.as_deref(), app, evidence, stop).await;
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
        connections = connections.len(),
        in_flight = app.flow.metrics.in_flight.get(),
        "draining"
    );
    if tokio::time::timeout(app.config.drain(), over(&mut connections))
        .await
        .is_err()
    {
        tracing::warn!(
            in_flight = app.flow.metrics.in_flight.get(),
            "requests are cut off: --drain-ms is over"
        );
        app.cut.cancel();
        let _ = tokio::time::timeout(LAST_WORDS, over(&mut connections)).await;
    }
    connections.shutdown().await;
    tracing::info!("drained");
}

async fn over(connections: &mut JoinSet<()>) {
    while connections.join_next().await.is_some() {}
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
    evidence: Arc<Connection>,
    stop: CancellationToken,
) {
    let stalled = app.flow.metrics.client_stalled.clone();
    let socket = TcpStream::from_std(stream)
        .and_then(|stream| Socket::new(stream, app.config.client_stall(), stalled, Arc::clone(&evidence)));
    let socket = match socket {
        Ok(socket) => socket,
        // the client is gone already
        Err(error) => return tracing::debug!(%error, "a connection ended before it began"),
    };
    let Some(identity) = identity else {
        return requests::answer(socket, evidence, app, stop).await;
    };
    // boxed: without TLS there is no room kept for it
    let secured = async {
        match identity.accept(socket).await {
            Ok(stream) => requests::answer(stream, evidence, app, stop).await,
            Err(error) => tracing::debug!(%error, "no TLS connection came about"),
        }
    };
    Box::pin(secured).await;
}
