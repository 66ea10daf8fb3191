//! Connections to a server, each of which says which one it is.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tower::Service;

use super::Trust;
use super::road::{Road, Wire};

/// To reach a server, TLS included.
const CONNECT: Duration = Duration::from_secs(5);

/// A connection of this process: the same one twice was reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionId(u64);

impl ConnectionId {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Why no connection came about.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("{0} has no host")]
    NoHost(Uri),
    #[error("{place} cannot be reached: {source}")]
    Refused { place: String, source: std::io::Error },
    #[error("{place} cannot be reached within {} s", CONNECT.as_secs())]
    Late { place: String },
    #[error("{0}")]
    Tls(String),
}

impl ConnectError {
    /// The one that an error came from, if it came from one: whoever passes it on says it once more in words of its own.
    pub fn of<'a>(error: &'a (dyn std::error::Error + 'static)) -> Option<&'a Self> {
        let mut cause = Some(error);
        while let Some(inner) = cause {
            if let Some(found) = inner.downcast_ref() {
                return Some(found);
            }
            cause = inner.source();
        }
        None
    }
}

/// Opens connections.
#[derive(Debug, Clone)]
pub struct Connector {
    trust: Trust,
    road: Road,
}

impl Connector {
    pub fn new(trust: Trust, road: Road) -> Self {
        Self { trust, road }
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Stream>;
    type Error = ConnectError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, url: Uri) -> Self::Future {
        let (trust, road) = (self.trust.clone(), self.road.clone());
        Box::pin(async move {
            let tls = url.scheme_str() == Some("https");
            let host = url.host().ok_or_else(|| ConnectError::NoHost(url.clone()))?;
            let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
            let port = url.port_u16().unwrap_or(if tls { 443 } else { 80 });
            let place = format!("{host}:{port}");
            let open = open(trust, &road, tls, &host, port);
            match tokio::time::timeout(CONNECT, open).await {
                Ok(opened) => opened.map(TokioIo::new),
                Err(_) => Err(ConnectError::Late { place }),
            }
        })
    }
}

async fn open(trust: Trust, road: &Road, tls: bool, host: &str, port: u16) -> Result<Stream, ConnectError> {
    let place = format!("{host}:{port}");
    let wire = road.open(host, port).await;
    let stream = wire.map_err(|source| ConnectError::Refused { place, source })?;
    let id = ConnectionId::next();
    if !tls {
        return Ok(Stream {
            id,
            io: Io::Plain(stream),
        });
    }
    let config = trust.config().map_err(ConnectError::Tls)?;
    let name = ServerName::try_from(host.to_owned()).map_err(|error| ConnectError::Tls(error.to_string()))?;
    let stream = TlsConnector::from(config).connect(name, stream).await;
    let stream = stream.map_err(|error| ConnectError::Tls(error.to_string()))?;
    Ok(Stream {
        id,
        io: Io::Tls(Box::new(stream)),
    })
}

/// An open connection.
#[derive(Debug)]
pub struct Stream {
    id: ConnectionId,
    io: Io,
}

#[derive(Debug)]
enum Io {
    Plain(Wire),
    Tls(Box<TlsStream<Wire>>),
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new().extra(self.id)
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Io::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        match &mut self.get_mut().io {
            Io::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Io::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Io::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Io::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
