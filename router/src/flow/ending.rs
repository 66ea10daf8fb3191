//! The end of a call to an engine, after its last message.

use std::time::Duration;

use futures::FutureExt;
use tonic::Streaming;

/// From an engine's last message to the end of its stream, which most often comes with it.
pub const LAST_WORDS: Duration = Duration::from_secs(5);

/// Reads a stream that has had its last message on to its end, for which nobody waits: one that is dropped before its trailers have
/// come is reset (2 of 16 were), and to the engine that is a caller who leaves.
pub fn read_to_end<T: Send + 'static>(mut events: Streaming<T>, limit: Duration) {
    if events.message().now_or_never().is_none() {
        tokio::spawn(async move { tokio::time::timeout(limit, events.message()).await.is_ok() });
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{HeaderMap, HeaderValue, StatusCode};
    use http_body::Frame;
    use http_body_util::StreamBody;
    use tandem_wire::proto::GenerateEvent;
    use tokio::sync::mpsc;
    use tonic::Status;
    use tonic::codec::Codec as _;

    use super::*;

    const PATIENCE: Duration = Duration::from_mins(1);

    type End = mpsc::Sender<Result<Frame<Bytes>, Status>>;

    /// The stream of a call, and what its engine says on it; it is closed once nobody reads it any more.
    fn call() -> (End, Streaming<GenerateEvent>) {
        let (engine, mut said) = mpsc::channel(1);
        let body = StreamBody::new(futures::stream::poll_fn(move |context| said.poll_recv(context)));
        let decoder = tonic_prost::ProstCodec::<GenerateEvent, GenerateEvent>::default().decoder();
        let events = Streaming::new_response(decoder, body, StatusCode::OK, None, None);
        (engine, events)
    }

    fn trailers() -> Frame<Bytes> {
        let status = [(Status::GRPC_STATUS, HeaderValue::from_static("0"))];
        Frame::trailers(HeaderMap::from_iter(status))
    }

    #[tokio::test]
    async fn a_call_is_reset_before_its_trailers_have_come() {
        let (engine, events) = call();
        read_to_end(events, PATIENCE);
        engine.send(Ok(trailers())).await.expect("it was dropped");
        let left = tokio::time::timeout(PATIENCE / 2, engine.closed()).await;
        left.expect("it is kept after its end");
    }

    #[tokio::test]
    async fn an_end_that_is_there_is_waited_for() {
        let (engine, events) = call();
        engine.try_send(Ok(trailers())).unwrap();
        read_to_end(events, PATIENCE);
        assert!(engine.is_closed());
    }

    #[tokio::test]
    async fn an_engine_that_does_not_end_is_listened_to_for_ever() {
        let (engine, events) = call();
        read_to_end(events, Duration::from_millis(20));
        let left = tokio::time::timeout(PATIENCE, engine.closed()).await;
        left.expect("it is still read");
    }
}
