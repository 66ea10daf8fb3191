//! HTTP/2 to one engine, as the generated client wants it: one connection for each thread that serves.
//!
//! tonic's own channel would do, but it puts a queue, a dispatcher and a task for each call between the caller and the connection, and
//! writes a call's head, its message and its end one after the other: three packets to the engine where one is enough.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures::future::try_join_all;
use h2::client::{Connection, SendRequest};
use h2::{Ping, PingPong, RecvStream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::BodyExt;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::task::JoinError;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::AbortOnDropHandle;
use tonic::Status;
use tonic::body::Body;
use tonic::client::GrpcService;

use crate::config::Config;
use crate::shards::{Shards, here};

/// One stream that nobody reads (a slow client) fills its own window of 128 KiB, never the connection's.
const STREAM_WINDOW: u32 = 128 << 10;
const CONNECTION_WINDOW: u32 = 128 << 20;
/// Calls that were dropped before their trailers came, whose late frames are known for what they are.
const DROPPED_STREAMS: usize = 4096;
/// The head or the trailers of an answer: an error with its details.
const MAX_HEADERS_BYTES: u32 = 16 << 10;

/// How connections are kept alive.
#[derive(Debug, Clone, Copy)]
pub struct Keep {
    interval: Duration,
    timeout: Duration,
}

impl Keep {
    /// As the flags say.
    pub fn new(config: &Config) -> Self {
        Self {
            interval: Duration::from_millis(config.keepalive_interval_ms),
            timeout: Duration::from_millis(config.keepalive_timeout_ms),
        }
    }

    /// Asks whether the peer is still there; ends when it is not.
    async fn watch(self, mut pings: PingPong) {
        let patience = self.timeout.saturating_sub(self.interval);
        loop {
            tokio::time::sleep(self.interval).await;
            let pong = tokio::time::timeout(patience, pings.ping(Ping::opaque()));
            if !matches!(pong.await, Ok(Ok(_))) {
                return;
            }
        }
    }
}

/// Calls go through it, each over the connection of the shard that makes it. Clones share the connections, which end with the last of
/// them and its calls.
#[derive(Debug, Clone)]
pub struct Channel {
    calls: Arc<[SendRequest<Bytes>]>,
    /// Cancelled when the first of the connections ends.
    ended: CancellationToken,
}

/// What opening failed at.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// TCP.
    #[error(transparent)]
    Tcp(#[from] std::io::Error),
    /// HTTP/2.
    #[error(transparent)]
    Http2(#[from] h2::Error),
    /// A serving thread.
    #[error("a serving thread ended: {0}")]
    Thread(#[from] JoinError),
}

impl Channel {
    /// Connects each of `shards` to `endpoint`, host:port.
    pub async fn open(endpoint: &str, keep: Keep, shards: &Shards) -> Result<Self, OpenError> {
        let ended = CancellationToken::new();
        let connect = |runtime: &Handle| {
            let task = runtime.spawn(connect(endpoint.to_owned(), keep, ended.clone()));
            async { AbortOnDropHandle::new(task).await? }
        };
        let all = try_join_all(shards.runtimes().map(connect)).await?;
        Ok(Self {
            calls: all.into(),
            ended,
        })
    }

    /// Waits until one of its connections has ended: the calls of that thread would all fail from then on.
    pub async fn ended(&self) {
        self.ended.cancelled().await;
    }
}

/// One connection, on the thread that asks for it.
async fn connect(endpoint: String, keep: Keep, ended: CancellationToken) -> Result<SendRequest<Bytes>, OpenError> {
    let stream = TcpStream::connect(endpoint).await?;
    stream.set_nodelay(true)?;
    let (calls, connection) = h2::client::Builder::new()
        .enable_push(false)
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(MAX_HEADERS_BYTES)
        .max_concurrent_reset_streams(DROPPED_STREAMS)
        // a frame that comes for a call dropped long ago is no attack: by default the connection ends after 1,024 of them
        .max_local_error_reset_streams(None)
        .handshake(stream)
        .await?;
    // owned by the clones and the calls: without any it closes the connection and ends
    tokio::spawn(drive(connection, keep, ended.drop_guard()));
    Ok(calls)
}

/// Reads and writes until the connection ends or its peer is silent. What still runs on it then fails.
async fn drive(mut connection: Connection<TcpStream, Bytes>, keep: Keep, _ended: DropGuard) {
    let Some(pings) = connection.ping_pong() else { return };
    tokio::select! {
        biased;
        ended = connection => if let Err(error) = ended {
            tracing::debug!(%error, "a connection to an engine broke");
        },
        () = keep.watch(pings) => tracing::debug!("a connection to an engine is silent"),
    }
}

impl GrpcService<Body> for Channel {
    type ResponseBody = Answer;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Answer>, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        // a call beyond what the engine takes at once waits in the connection
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let mut calls = self.calls[here()].clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            // no call has more than one message, so it is whole at once
            let message = body.collect().await?.to_bytes();
            let (answer, mut stream) = calls
                .send_request(Request::from_parts(head, ()), false)
                .map_err(status)?;
            // both before the connection's task runs: one write
            stream.send_data(message, true).map_err(status)?;
            Ok(answer.await.map_err(status)?.map(Answer))
        })
    }
}

/// What a failure of HTTP/2 means for a call: what the engine said of this stream, or that the connection is no more.
fn status(error: h2::Error) -> Status {
    if error.is_reset() && error.is_remote() {
        error.into()
    } else {
        Status::unavailable(error.to_string())
    }
}

/// The body of an answer. Dropping it cancels the call.
#[derive(Debug)]
pub struct Answer(RecvStream);

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let stream = &mut self.get_mut().0;
        if let Some(data) = ready!(stream.poll_data(cx)) {
            let data = data.map_err(status)?;
            stream.flow_control().release_capacity(data.len()).map_err(status)?;
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        let trailers = ready!(stream.poll_trailers(cx)).map_err(status)?;
        Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))))
    }
}
