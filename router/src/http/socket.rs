//! A client connection whose peer must go on reading: a write that waits longer than the limit breaks it.
//!
//! hyper has no deadline for writes, so a client that stops reading would hold its connection, and an answer in it, for ever.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tandem_telemetry::prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use crate::evidence::Connection;

/// A socket with a deadline for writes, which tells its connection's evidence how they go.
#[derive(Debug)]
pub struct Socket {
    stream: TcpStream,
    stall: Duration,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
    /// Counts the clients that were cut off here.
    stalled: Counter,
    connection: Arc<Connection>,
}

impl Socket {
    /// Wraps an accepted connection: no delay for small writes, since every token is one.
    pub fn new(stream: TcpStream, stall: Duration, stalled: Counter, connection: Arc<Connection>) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            stall,
            waiting: None,
            stalled,
            connection,
        })
    }

    /// What it wraps.
    pub fn tcp(&self) -> &TcpStream {
        &self.stream
    }

    /// Starts, stops or reads the clock, as the write of `bytes` went.
    fn judge<T>(&mut self, cx: &mut Context<'_>, bytes: usize, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            if self.waiting.take().is_some() {
                self.connection.flows();
            }
            return written;
        }
        let waiting = self.waiting.get_or_insert_with(|| {
            self.connection.blocks(bytes);
            Box::pin(tokio::time::sleep_until(Instant::now() + self.stall))
        });
        if waiting.as_mut().poll(cx).is_ready() {
            self.waiting = None;
            self.stalled.inc();
            self.connection.flows();
            self.connection.cut_off();
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client reads nothing")));
        }
        Poll::Pending
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            this.connection.read();
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.judge(cx, bytes.len(), written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        this.judge(cx, slices.iter().map(|slice| slice.len()).sum(), written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // who asks for a flush has handed over everything that it held
        this.connection.flushed();
        Pin::new(&mut this.stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    use super::*;
    use crate::evidence::{Registry, Standing};

    fn connection() -> Arc<Connection> {
        Registry::default().open("127.0.0.1:9".parse().unwrap(), false)
    }

    async fn pair(stall: Duration) -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let stream = listener.accept().await.unwrap().0;
        (
            Socket::new(stream, stall, Counter::default(), connection()).unwrap(),
            client,
        )
    }

    #[tokio::test]
    async fn small_writes_are_not_delayed() {
        let (socket, _client) = pair(Duration::from_secs(1)).await;
        assert!(socket.stream.nodelay().unwrap());
    }

    #[tokio::test]
    async fn a_reader_that_stops_breaks_the_connection_and_one_that_goes_on_does_not() {
        let (mut socket, client) = pair(Duration::from_millis(50)).await;
        let chunk = vec![0; 1 << 20];
        let connection = Arc::clone(&socket.connection);
        let seen = tokio::spawn(async move {
            loop {
                let view = connection.view(std::time::Instant::now());
                if view.standing == Standing::Blocked {
                    return view.unsent_bytes;
                }
                tokio::task::yield_now().await;
            }
        });
        let error = loop {
            if let Err(error) = socket.write_all(&chunk).await {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(socket.stalled.get(), 1);
        let unsent = seen.await.unwrap();
        assert!(unsent > 0 && unsent <= chunk.len(), "{unsent}");
        let view = socket.connection.view(std::time::Instant::now());
        assert!(socket.connection.is_cut_off() && view.blocked >= Duration::from_millis(50));
        drop(client);

        let (mut socket, mut client) = pair(Duration::from_secs(5)).await;
        let reading = tokio::spawn(async move { tokio::io::copy(&mut client, &mut tokio::io::sink()).await });
        for _ in 0..32 {
            socket.write_all(&chunk).await.unwrap();
        }
        assert_eq!(socket.stalled.get(), 0);
        drop(socket);
        assert_eq!(reading.await.unwrap().unwrap(), 32 << 20);
    }
}
