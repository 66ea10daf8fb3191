//! How a host and port are reached: by this machine's network, or through the API server of a cluster.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::cluster::{Forwarded, Pods};

/// The way to a place.
#[derive(Debug, Clone, Default)]
pub enum Road {
    /// A socket of this machine.
    #[default]
    Tcp,
    /// Ports of a cluster's pods, forwarded by its API server.
    Pods(Arc<Pods>),
}

impl Road {
    pub(super) async fn open(&self, host: &str, port: u16) -> std::io::Result<Wire> {
        match self {
            Self::Tcp => {
                let stream = TcpStream::connect((host, port)).await?;
                stream.set_nodelay(true)?;
                Ok(Wire::Tcp(stream))
            }
            Self::Pods(pods) => pods.open(host, port).await.map(Wire::Forwarded),
        }
    }
}

/// What bytes go over.
#[derive(Debug)]
pub enum Wire {
    Tcp(TcpStream),
    Forwarded(Forwarded),
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Forwarded(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Forwarded(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Self::Forwarded(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Forwarded(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
