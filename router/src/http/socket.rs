//! A client connection whose peer must go on reading: a write that waits longer than the limit breaks it.
//!
//! hyper has no deadline for writes, so a client that stops reading would hold its connection, and an answer in it, for ever.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tandem_telemetry::prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

/// A socket with a deadline for writes.
#[derive(Debug)]
pub struct Socket {
    stream: TcpStream,
    stall: Duration,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
    /// Counts the clients that were cut off here.
    stalled: Counter,
    cut_off: Arc<AtomicBool>,
}

impl Socket {
    /// Wraps an accepted connection: no delay for small writes, since every token is one.
    pub fn new(stream: TcpStream, stall: Duration, stalled: Counter) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            stall,
            waiting: None,
            stalled,
            cut_off: Arc::default(),
        })
    }

    /// What it wraps.
    pub fn tcp(&self) -> &TcpStream {
        &self.stream
    }

    /// Becomes true before the client is cut off here.
    pub fn cut_off(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.cut_off)
    }

    /// Starts, stops or reads the clock, as the write went.
    fn judge<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let waiting = self
            .waiting
            .get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + self.stall)));
        if waiting.as_mut().poll(cx).is_ready() {
            self.waiting = None;
            self.stalled.inc();
            self.cut_off.store(true, Ordering::Release);
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client reads nothing")));
        }
        Poll::Pending
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(cx, bytes);
        this.judge(cx, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(cx, slices);
        this.judge(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
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

    async fn pair(stall: Duration) -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let stream = listener.accept().await.unwrap().0;
        (Socket::new(stream, stall, Counter::default()).unwrap(), client)
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
        let error = loop {
            if let Err(error) = socket.write_all(&chunk).await {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(socket.stalled.get(), 1);
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
