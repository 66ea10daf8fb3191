//! Sockets. An address is taken before the model is loaded, so that a conflict is told at once. On the control port calls are told
//! that it loads; connections to the others are refused until there is something to answer them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use socket2::{Domain, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::body::Body;
use tower::Service;

use crate::transfer::{HTTP2_FRAME_BYTES, KeepAlive};

/// Connections that the kernel holds until they are accepted.
const BACKLOG: i32 = 1024;
/// After a failed accept (file descriptors used up, say) the next try waits this long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// What the kernel and hyper each hold of a data connection that its reader has not taken yet.
const SEND_BUFFER_BYTES: usize = 4 << 20;
/// Streams of one data connection: lanes and ranks of the hand-offs between two engines.
const DATA_STREAMS: u32 = 1024;

/// An address cannot be had.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {addr} for {what}: {source}; choose another {flag} address")]
pub struct ListenError {
    /// The address asked for.
    pub addr: SocketAddr,
    /// What it is for.
    pub what: &'static str,
    /// The flag that sets it.
    pub flag: &'static str,
    /// What the system said.
    pub source: std::io::Error,
}

/// An address that is taken and refuses connections until it listens.
#[derive(Debug)]
pub struct Reserved {
    socket: Socket,
    addr: SocketAddr,
    what: &'static str,
    flag: &'static str,
}

impl Reserved {
    /// Takes `addr`; port 0: a free one.
    pub fn bind(addr: SocketAddr, what: &'static str, flag: &'static str) -> Result<Self, ListenError> {
        let bind = || {
            let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None)?;
            socket.set_reuse_address(true)?;
            socket.set_nonblocking(true)?;
            socket.bind(&addr.into())?;
            let bound = socket.local_addr()?.as_socket().unwrap_or(addr);
            Ok((socket, bound))
        };
        let (socket, bound) = bind().map_err(|source| ListenError {
            addr,
            what,
            flag,
            source,
        })?;
        Ok(Self {
            socket,
            addr: bound,
            what,
            flag,
        })
    }

    /// Where it will listen.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Accepts connections from now on. Call it on the runtime that will serve them.
    pub fn open(self) -> Result<TcpListener, ListenError> {
        self.lend()
    }

    /// The same for a while: connections that come when the listener is gone wait until the address is opened.
    pub fn lend(&self) -> Result<TcpListener, ListenError> {
        let listen = || {
            self.socket.listen(BACKLOG)?;
            TcpListener::from_std(self.socket.try_clone()?.into())
        };
        listen().map_err(|source| ListenError {
            addr: self.addr,
            what: self.what,
            flag: self.flag,
            source,
        })
    }
}

/// The next connection. An accept that fails is logged and tried again: a listener does not end because one peer did.
pub(super) async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%error, "a connection was gone before it was served");
                    continue;
                }
                return stream;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves the data port until `closing`, then lets each connection finish its streams. tonic's own server cannot set the
/// send buffers, hence hyper's.
pub(super) async fn serve_data<S>(
    listener: TcpListener,
    service: S,
    keep_alive: KeepAlive,
    closing: CancellationToken,
    connections: TaskTracker,
) where
    S: Service<http::Request<hyper::body::Incoming>, Response = http::Response<Body>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
{
    let mut builder = auto::Builder::new(TokioExecutor::new()).http2_only();
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(keep_alive.interval)
        .keep_alive_timeout(keep_alive.ping_timeout())
        .adaptive_window(false)
        .max_frame_size(HTTP2_FRAME_BYTES)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_concurrent_streams(DATA_STREAMS);
    loop {
        let stream = tokio::select! {
            stream = accept(&listener) => stream,
            () = closing.cancelled() => return,
        };
        if let Err(error) = socket2::SockRef::from(&stream).set_send_buffer_size(SEND_BUFFER_BYTES) {
            tracing::debug!(%error, "the send buffer stays at the system's size");
        }
        let (builder, closing) = (builder.clone(), closing.clone());
        let service = TowerToHyperService::new(service.clone());
        connections.spawn(async move {
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            tokio::pin!(connection);
            let ended = tokio::select! {
                ended = connection.as_mut() => ended,
                () = closing.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(error) = ended {
                tracing::debug!(%error, "a data connection broke");
            }
        });
    }
}
