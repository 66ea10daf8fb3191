//! Connections to a server, each of which says which one it is.

use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tower::Service;

use super::Trust;

/// To reach a server, TLS included.
const CONNECT: Duration = Duration::from_secs(5);

/// Our end of a connection.
#[derive(Debug, Clone, Copy)]
pub(super) struct Local(pub SocketAddr);

/// Why no connection came about.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("{0} has no host")]
    NoHost(Uri),
    #[error("{place} cannot be reached: {source}")]
    Tcp { place: String, source: std::io::Error },
    #[error("{place} cannot be reached within {} s", CONNECT.as_secs())]
    Late { place: String },
    #[error("{0}")]
    Tls(String),
}

/// Opens connections.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    trust: Trust,
}

impl Connector {
    pub(super) fn new(trust: Trust) -> Self {
        Self { trust }
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
        let trust = self.trust.clone();
        Box::pin(async move {
            let tls = url.scheme_str() == Some("https");
            let host = url.host().ok_or_else(|| ConnectError::NoHost(url.clone()))?;
            let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
            let port = url.port_u16().unwrap_or(if tls { 443 } else { 80 });
            let place = format!("{host}:{port}");
            let open = open(trust, tls, &host, port);
            match tokio::time::timeout(CONNECT, open).await {
                Ok(opened) => opened.map(TokioIo::new),
                Err(_) => Err(ConnectError::Late { place }),
            }
        })
    }
}

async fn open(trust: Trust, tls: bool, host: &str, port: u16) -> Result<Stream, ConnectError> {
    let place = format!("{host}:{port}");
    let refused = |source| ConnectError::Tcp { place, source };
    let stream = match TcpStream::connect((host, port)).await {
        Ok(stream) => stream.set_nodelay(true).map(|()| stream).map_err(refused)?,
        Err(error) => return Err(refused(error)),
    };
    if !tls {
        return Ok(Stream::Plain(stream));
    }
    let config = trust.config().map_err(ConnectError::Tls)?;
    let name = ServerName::try_from(host.to_owned()).map_err(|error| ConnectError::Tls(error.to_string()))?;
    let stream = TlsConnector::from(config).connect(name, stream).await;
    stream
        .map(|stream| Stream::Tls(Box::new(stream)))
        .map_err(|error| ConnectError::Tls(error.to_string()))
}

/// An open connection.
#[derive(Debug)]
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        let tcp = match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => stream.get_ref().0,
        };
        match tcp.local_addr() {
            Ok(addr) => Connected::new().extra(Local(addr)),
            Err(_) => Connected::new(),
        }
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
