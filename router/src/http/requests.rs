//! The requests of one connection, one after the other.
//!
//! An HTTP/1 connection is hyper's from the first byte of a request until it has been quiet for a moment, and then taken back from
//! it with its buffers, which are most of what it costs: nearly all connections of agents and pools are kept alive between two
//! requests. What is left then is the socket and its evidence.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::body::Answer;
use super::{App, routes};
use crate::evidence::Connection;

/// A connection between two requests: longer than the idle time of what usually stands before us (600 s at most), so that no
/// pool sends a request into a connection that we are just closing.
const IDLE: Duration = Duration::from_secs(620);
/// The first request of a connection.
const FIRST_REQUEST: Duration = Duration::from_secs(30);
/// From the first byte of a request to the last of its head.
const HEAD: Duration = Duration::from_secs(30);
/// Quiet for so long, a connection is taken back from hyper; what follows sooner finds everything in its place.
const QUIET: Duration = Duration::from_millis(100);
/// What an HTTP/2 connection begins with.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Answers the requests of `stream` until its client leaves or, between two of them, `stop`.
pub async fn answer<S>(stream: S, evidence: Arc<Connection>, app: Arc<App>, stop: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut stream = Begun {
        first: Bytes::new(),
        stream,
    };
    let mut wait = FIRST_REQUEST;
    loop {
        let begun = tokio::select! {
            begun = tokio::time::timeout(wait, stream.begins()) => begun,
            () = stop.cancelled() => Ok(Ok(None)),
        };
        let rests = match begun {
            Ok(Ok(Some(Version::One))) => Box::pin(one(stream, &evidence, &app, &stop)).await,
            Ok(Ok(Some(Version::Two))) => return Box::pin(two(stream, &evidence, &app, &stop)).await,
            Ok(Ok(None)) | Err(_) => {
                let _ = stream.shutdown().await;
                return;
            }
            Ok(Err(error)) => return broke(&error),
        };
        match rests {
            Some(rests) => stream = rests,
            None => return,
        }
        wait = IDLE;
    }
}

fn broke(error: &impl std::fmt::Display) {
    tracing::debug!(%error, "a connection broke");
}

/// What hyper has answered.
type Answered = Pin<Box<dyn Future<Output = Result<Response<Answer>, Infallible>> + Send>>;

/// Boxed, for hyper keeps room for the work on a request where there is none.
fn answered(app: &Arc<App>, evidence: &Arc<Connection>, request: Request<Incoming>) -> Answered {
    Box::pin(routes::answer(Arc::clone(app), request, Arc::clone(evidence)))
}

/// Serves HTTP/1 until the connection is quiet, which gives it back, or over.
async fn one<S>(
    stream: Begun<S>,
    evidence: &Arc<Connection>,
    app: &Arc<App>,
    stop: &CancellationToken,
) -> Option<Begun<S>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(|request| answered(app, evidence, request));
    let mut server = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let mut stopping = false;
    loop {
        tokio::select! {
            biased;
            ended = &mut server => {
                if let Err(error) = ended {
                    broke(&error);
                }
                return None;
            }
            () = quiet(evidence), if !stopping => {
                // all is written, or the connection would be blocked; and hyper ends it now only if it is between two requests too
                Pin::new(&mut server).graceful_shutdown();
                stopping = true;
                let ended = std::future::poll_fn(|cx| Poll::Ready(server.poll_without_shutdown(cx))).await;
                if ended.is_ready() {
                    let parts = server.into_parts();
                    let stream = parts.io.into_inner().stream;
                    if parts.read_buf.is_empty() {
                        // not that one, which holds the whole buffer
                        return Some(Begun { first: Bytes::new(), stream });
                    }
                    // of a request that was sent before the answer to the last one
                    evidence.read();
                    return Some(Begun { first: parts.read_buf, stream });
                }
            }
            () = stop.cancelled(), if !stopping => {
                Pin::new(&mut server).graceful_shutdown();
                stopping = true;
            }
        }
    }
}

/// Ends when nothing was asked for so long. Looked at again whenever its connection is.
async fn quiet(evidence: &Connection) {
    let mut sleep = std::pin::pin!(tokio::time::sleep(QUIET));
    let mut armed = true;
    std::future::poll_fn(|cx| {
        loop {
            if !armed {
                // a timer for each request would cost more than one that now and then ends for nothing
                if evidence.unanswered() {
                    return Poll::Pending;
                }
                sleep.as_mut().reset(Instant::now() + QUIET);
                armed = true;
            }
            ready!(sleep.as_mut().poll(cx));
            armed = false;
            let Some(since) = evidence.idle_since() else { continue };
            let until = Instant::from_std(since) + QUIET;
            if until <= Instant::now() {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(until);
            armed = true;
        }
    })
    .await;
}

/// Serves HTTP/2 to its end.
async fn two<S>(stream: Begun<S>, evidence: &Arc<Connection>, app: &Arc<App>, stop: &CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let asked = AtomicBool::new(false);
    let service = service_fn(|request| {
        asked.store(true, Ordering::Relaxed);
        answered(app, evidence, request)
    });
    let server = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_secs(30))
        .max_concurrent_streams(256)
        .serve_connection(TokioIo::new(stream), service);
    let mut server = std::pin::pin!(server);
    let mut first = std::pin::pin!(tokio::time::sleep(FIRST_REQUEST));
    let (mut stopping, mut waited) = (false, false);
    let ended = loop {
        tokio::select! {
            biased;
            ended = &mut server => break ended,
            () = &mut first, if !waited => {
                waited = true;
                if !asked.load(Ordering::Relaxed) {
                    return tracing::debug!("a connection sent no request");
                }
            }
            () = stop.cancelled(), if !stopping => {
                server.as_mut().graceful_shutdown();
                stopping = true;
            }
        }
    };
    if let Err(error) = ended {
        broke(&error);
    }
}

/// What a client speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A stream of which some bytes have been read already.
#[derive(Debug)]
struct Begun<S> {
    first: Bytes,
    stream: S,
}

impl<S: AsyncRead + Unpin> Begun<S> {
    /// Waits for the first bytes of a request, as many as say what is spoken; none: the client has left.
    async fn begins(&mut self) -> io::Result<Option<Version>> {
        if !self.first.is_empty() {
            return Ok(Some(Version::One));
        }
        let mut first = [0; PREFACE.len()];
        let mut count = 0;
        let version = loop {
            match self.stream.read(&mut first[count..]).await? {
                0 => return Ok(None),
                more => count += more,
            }
            if !PREFACE.starts_with(&first[..count]) {
                break Version::One;
            }
            if count == PREFACE.len() {
                break Version::Two;
            }
        };
        self.first = Bytes::copy_from_slice(&first[..count]);
        Ok(Some(version))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Begun<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.first.is_empty() {
            return Pin::new(&mut this.stream).poll_read(cx, buffer);
        }
        let count = this.first.len().min(buffer.remaining());
        buffer.put_slice(&this.first.split_to(count));
        if !this.first.is_empty() {
            return Poll::Ready(Ok(()));
        }
        this.first = Bytes::new();
        // with what follows: after a short read hyper would double its buffer to have as much room as before
        match Pin::new(&mut this.stream).poll_read(cx, buffer) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Ready(Ok(())),
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Begun<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, slices)
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
    use super::*;

    async fn begun(cuts: &[&[u8]]) -> (Option<Version>, Vec<u8>) {
        let mut stream = cut(cuts);
        let version = stream.begins().await.unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        (version, all)
    }

    fn cut(
        cuts: &[&[u8]],
    ) -> Begun<tokio_util::io::StreamReader<impl futures::Stream<Item = io::Result<Bytes>> + Unpin, Bytes>> {
        let cuts: Vec<_> = cuts.iter().map(|cut| Ok(Bytes::copy_from_slice(cut))).collect();
        Begun {
            first: Bytes::new(),
            stream: tokio_util::io::StreamReader::new(futures::stream::iter(cuts)),
        }
    }

    #[tokio::test]
    async fn a_version_is_told_by_how_its_bytes_are_cut_or_a_byte_is_lost() {
        let get = b"GET / HTTP/1.1\r\n\r\n".as_slice();
        let purge = b"PRI /".as_slice();
        let two = [PREFACE.as_slice(), b"\0\0\0\x04\0"].concat();
        for (sent, version) in [(get, Version::One), (purge, Version::One), (&two, Version::Two)] {
            for cut in 1..sent.len() {
                let (told, read) = begun(&[&sent[..cut], &sent[cut..]]).await;
                assert_eq!((told, read.as_slice()), (Some(version), sent), "cut at {cut}");
            }
        }
        assert_eq!(begun(&[]).await.0, None);
        assert_eq!(begun(&[&PREFACE[..5]]).await.0, None);
    }
}
