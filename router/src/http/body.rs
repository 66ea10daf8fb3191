//! Bodies: of requests, bounded in size and time; of answers, whole or fed by the task that makes them.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::task::AbortOnDropHandle;

use crate::error::RouterError;
use crate::evidence::Stage;
use crate::flow::Progress;

/// From the head to the end of a request's body.
const ARRIVAL: Duration = Duration::from_mins(1);
/// A body that is refused is read on for so long, so that its sender gets to read the refusal instead of a reset.
const LINGER: Duration = Duration::from_secs(2);

/// How many bytes of all bodies together may be held.
#[derive(Debug, Clone)]
pub struct Budget {
    free: Arc<Semaphore>,
    limit_bytes: usize,
}

impl Budget {
    /// At most `limit_bytes`.
    pub fn new(limit_bytes: usize) -> Self {
        let limit_bytes = limit_bytes.min(Semaphore::MAX_PERMITS);
        Self {
            free: Arc::new(Semaphore::new(limit_bytes)),
            limit_bytes,
        }
    }

    fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, RouterError> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let taken = Arc::clone(&self.free).try_acquire_many_owned(bytes);
        taken.map_err(|_| RouterError::BodiesFull {
            limit_bytes: self.limit_bytes,
        })
    }
}

/// A body, with its share of the budget for as long as this lives.
#[derive(Debug)]
pub struct Held {
    /// The body.
    pub bytes: Bytes,
    _share: Option<OwnedSemaphorePermit>,
}

/// Reads a JSON body of at most `limit_bytes`, within the budget of all bodies.
pub async fn read(
    headers: &HeaderMap,
    mut body: Incoming,
    limit_bytes: usize,
    budget: &Budget,
) -> Result<Held, RouterError> {
    if let Some(declared) = headers.get(header::CONTENT_TYPE) {
        let text = declared.to_str().unwrap_or("?");
        let media = text.split(';').next().unwrap_or_default().trim();
        if !media.eq_ignore_ascii_case("application/json") {
            linger(&mut body).await;
            return Err(RouterError::ContentType(text.to_owned()));
        }
    }
    if body.size_hint().lower() > limit_bytes as u64 {
        linger(&mut body).await;
        return Err(RouterError::BodyTooLarge { limit_bytes });
    }
    let collect = async {
        let mut first: Option<Bytes> = None;
        let mut rest = BytesMut::new();
        let mut total = 0;
        let mut share: Option<OwnedSemaphorePermit> = None;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| RouterError::BodyIncomplete(error.to_string()))?;
            let Ok(data) = frame.into_data() else { continue };
            total += data.len();
            if total > limit_bytes {
                linger(&mut body).await;
                return Err(RouterError::BodyTooLarge { limit_bytes });
            }
            match budget.take(data.len()) {
                Ok(more) => match &mut share {
                    None => share = Some(more),
                    Some(share) => share.merge(more),
                },
                Err(error) => {
                    drop((share, first, rest));
                    linger(&mut body).await;
                    return Err(error);
                }
            }
            // most bodies come as one frame, which then needs no copy
            match &first {
                None => first = Some(data),
                Some(head) => {
                    if rest.is_empty() {
                        rest.extend_from_slice(head);
                    }
                    rest.extend_from_slice(&data);
                }
            }
        }
        let bytes = if rest.is_empty() {
            first.unwrap_or_default()
        } else {
            rest.freeze()
        };
        Ok(Held { bytes, _share: share })
    };
    tokio::time::timeout(ARRIVAL, collect)
        .await
        .map_err(|_| RouterError::BodyTimeout(ARRIVAL))?
}

/// Reads on for a while, for nothing but that.
pub async fn linger(body: &mut Incoming) {
    let _ = tokio::time::timeout(LINGER, async { while let Some(Ok(_)) = body.frame().await {} }).await;
}

/// The body of an answer.
#[derive(Debug)]
pub enum Answer {
    /// Whole.
    Whole(Option<Bytes>),
    /// Made by a task that lives as long as this body does.
    Streamed(Streamed),
}

/// The end of the channel that a body is fed through.
#[derive(Debug)]
pub struct Streamed {
    frames: mpsc::Receiver<Bytes>,
    complete: Arc<AtomicBool>,
    _task: AbortOnDropHandle<()>,
}

/// Where the task that makes a body puts it.
#[derive(Debug)]
pub struct Feed {
    frames: mpsc::Sender<Bytes>,
    complete: Arc<AtomicBool>,
    stall: Duration,
    progress: Arc<Progress>,
}

/// Why no more of an answer can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsent {
    /// The client took nothing for `--client-stall-ms`.
    Stalled,
    /// It is gone.
    Gone,
}

/// Frames that wait for a slow reader; each is one token's chunk. What the sockets hold comes on top.
const WAITING_FRAMES: usize = 32;

impl Feed {
    /// Waits until the client has room for one more frame.
    pub async fn send(&self, frame: Bytes) -> Result<(), Unsent> {
        match self.frames.try_send(frame) {
            Ok(()) => Ok(()),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(Unsent::Gone),
            Err(mpsc::error::TrySendError::Full(frame)) => {
                let _blocked = self.progress.stay(Stage::Client);
                match tokio::time::timeout(self.stall, self.frames.send(frame)).await {
                    Ok(Ok(())) => Ok(()),
                    Ok(Err(_)) => Err(Unsent::Gone),
                    Err(_) => Err(Unsent::Stalled),
                }
            }
        }
    }

    /// The body is complete; without this its end is a broken one.
    pub fn complete(self) {
        self.complete.store(true, Ordering::Release);
    }
}

impl Answer {
    /// A body fed by the task that `make` becomes. The task ends with the body.
    pub fn streamed<F>(stall: Duration, progress: Arc<Progress>, make: impl FnOnce(Feed) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, frames) = mpsc::channel(WAITING_FRAMES);
        let complete = Arc::new(AtomicBool::new(false));
        let task = make(Feed {
            frames: sender,
            complete: Arc::clone(&complete),
            stall,
            progress,
        });
        Self::Streamed(Streamed {
            frames,
            complete,
            _task: AbortOnDropHandle::new(tokio::spawn(task)),
        })
    }
}

impl From<Vec<u8>> for Answer {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Whole(Some(bytes.into()))
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().filter(|b| !b.is_empty()).map(|b| Ok(Frame::data(b)))),
            Self::Streamed(streamed) => match streamed.frames.poll_recv(cx) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(Some(bytes)) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
                Poll::Ready(None) if streamed.complete.load(Ordering::Acquire) => Poll::Ready(None),
                Poll::Ready(None) => Poll::Ready(Some(Err(std::io::Error::other("the answer was cut off")))),
            },
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64)),
            Self::Streamed(_) => SizeHint::default(),
        }
    }
}
