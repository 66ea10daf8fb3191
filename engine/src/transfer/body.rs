//! `Fetch` as gRPC's framing without its codec's copies. On the wire it is what any gRPC peer speaks; here a message leaves as
//! two HTTP data frames, small header and payload, and arrives as slices of the network's own buffers.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, header};
use http_body_util::{BodyExt as _, Full, Limited};
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint};
use tandem_telemetry::TraceParent;
use tandem_wire::proto::{FetchRequest, Frame};
use tonic::Status;
use tonic::body::Body;
use tonic::transport::Channel;
use tower::{Service as _, ServiceExt as _};

use super::chunks::{Chunks, PREFIX};
use super::data::FrameStream;

/// The service's name in paths.
pub const SERVICE: &str = "tandem.v1.KvTransfer";
/// The method's path.
pub const FETCH: &str = "/tandem.v1.KvTransfer/Fetch";
/// The payload's field in `Frame`.
const PAYLOAD_FIELD: u32 = 6;
/// Far above a `FetchRequest`.
const REQUEST_MAX_BYTES: usize = 64 * 1024;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

/// One message with its prefix.
fn framed(message: &impl prost::Message) -> Bytes {
    let mut out = BytesMut::with_capacity(PREFIX + message.encoded_len());
    out.put_u8(0);
    out.put_u32(message.encoded_len() as u32);
    out.put(&message.encode_to_vec()[..]);
    out.freeze()
}

/// Everything of a frame's message before its payload, the prefix included.
fn head(frame: &mut Frame) -> (Bytes, Bytes) {
    let payload = std::mem::take(&mut frame.payload);
    let mut head = BytesMut::with_capacity(64);
    head.put_bytes(0, PREFIX);
    // fields are written in the order of their numbers, and the payload's is the last
    head.put(&frame.encode_to_vec()[..]);
    if !payload.is_empty() {
        encode_key(PAYLOAD_FIELD, WireType::LengthDelimited, &mut head);
        encode_varint(payload.len() as u64, &mut head);
    }
    let len = (head.len() - PREFIX + payload.len()) as u32;
    head[1..PREFIX].copy_from_slice(&len.to_be_bytes());
    (head.freeze(), payload)
}

/// Prefill's end of the stream.
struct FrameBody {
    frames: Option<FrameStream>,
    payload: Bytes,
}

impl http_body::Body for FrameBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Status>>> {
        if !self.payload.is_empty() {
            let payload = std::mem::take(&mut self.payload);
            return Poll::Ready(Some(Ok(http_body::Frame::data(payload))));
        }
        let Some(frames) = &mut self.frames else {
            return Poll::Ready(None);
        };
        let status = match ready!(frames.as_mut().poll_next(context)) {
            Some(Ok(mut frame)) => {
                let (head, payload) = head(&mut frame);
                self.payload = payload;
                return Poll::Ready(Some(Ok(http_body::Frame::data(head))));
            }
            Some(Err(status)) => status,
            None => Status::ok(""),
        };
        self.frames = None;
        let mut trailers = HeaderMap::new();
        Poll::Ready(Some(
            status
                .add_header(&mut trailers)
                .map(|()| http_body::Frame::trailers(trailers)),
        ))
    }
}

/// The answer to a `Fetch`.
pub fn respond(frames: FrameStream) -> http::Response<Body> {
    let body = FrameBody {
        frames: Some(frames),
        payload: Bytes::new(),
    };
    let mut response = http::Response::new(Body::new(body));
    response.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    response
}

/// Reads the one message of a call.
pub async fn read_request<B>(body: B) -> Result<FetchRequest, Status>
where
    B: http_body::Body,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let whole = Limited::new(body, REQUEST_MAX_BYTES)
        .collect()
        .await
        .map_err(|e| Status::invalid_argument(format!("the request of a data stream is unreadable: {e}")))?;
    let mut chunks = Chunks::default();
    chunks.push(whole.to_bytes());
    match chunks.next_message()? {
        Some(request) if chunks.is_empty() => Ok(request),
        _ => Err(Status::invalid_argument(
            "the request of a data stream is not one message",
        )),
    }
}

/// Opens the stream, as a part of `trace`.
pub async fn call(mut channel: Channel, request: &FetchRequest, trace: &TraceParent) -> Result<Body, Status> {
    let mut call = http::Request::new(Body::new(Full::new(framed(request))));
    *call.method_mut() = http::Method::POST;
    *call.version_mut() = http::Version::HTTP_2;
    *call.uri_mut() = http::Uri::from_static(FETCH);
    call.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    call.headers_mut()
        .insert(header::TE, HeaderValue::from_static("trailers"));
    trace.inject(call.headers_mut());
    let from_transport = |e: tonic::transport::Error| Status::from_error(Box::new(e));
    let response = channel
        .ready()
        .await
        .map_err(from_transport)?
        .call(call)
        .await
        .map_err(from_transport)?;
    // a call that is refused has its status here instead of in trailers
    if let Some(status) = Status::from_header_map(response.headers())
        && status.code() != tonic::Code::Ok
    {
        return Err(status);
    }
    if response.status() != http::StatusCode::OK {
        return Err(Status::unavailable(format!("data port answers {}", response.status())));
    }
    Ok(response.into_body())
}

/// The end of the stream, as its sender means it.
pub fn read_trailers(last: http_body::Frame<Bytes>) -> Result<(), Status> {
    let status = last
        .into_trailers()
        .ok()
        .and_then(|trailers| Status::from_header_map(&trailers))
        .unwrap_or_else(|| Status::unavailable("the data stream ended without a status"));
    if status.code() == tonic::Code::Ok {
        Ok(())
    } else {
        Err(status)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame() -> impl Strategy<Value = Frame> {
        let payload = prop::collection::vec(any::<u8>(), 0..600).prop_map(Bytes::from);
        (any::<u32>(), 0..3u32, any::<u32>(), 0..9u32, any::<u32>(), payload).prop_map(
            |(layer, component, first_token, tokens, crc32c, payload)| Frame {
                layer,
                component,
                first_token,
                tokens,
                crc32c,
                payload,
            },
        )
    }

    proptest! {
        #[test]
        fn a_frame_is_on_the_wire_what_the_codec_would_write(frame in frame()) {
            let expected = framed(&frame);
            let (head, payload) = head(&mut frame.clone());
            prop_assert_eq!([&head[..], &payload].concat(), &expected[..]);
        }

        #[test]
        fn frames_survive_any_cut_of_the_network(frames in prop::collection::vec(frame(), 1..6), cuts in prop::collection::vec(1..400usize, 1..40)) {
            let mut wire = BytesMut::new();
            for frame in &frames {
                wire.put(framed(frame));
            }
            let mut wire = wire.freeze();
            let (mut chunks, mut came) = (Chunks::default(), Vec::new());
            let mut cuts = cuts.into_iter().cycle();
            while !wire.is_empty() {
                let piece = wire.split_to(cuts.next().unwrap().min(wire.len()));
                chunks.push(piece);
                while let Some(frame) = chunks.next_frame().unwrap() {
                    came.push(frame);
                }
            }
            prop_assert!(chunks.is_empty());
            prop_assert_eq!(came, frames);
        }
    }

    #[test]
    fn a_payload_in_one_piece_is_not_copied() {
        let mut frame = Frame {
            tokens: 1,
            payload: Bytes::from(vec![7; 100_000]),
            ..Frame::default()
        };
        let (head, payload) = head(&mut frame);
        let place = payload.as_ptr();
        let mut chunks = Chunks::default();
        chunks.push(head);
        chunks.push(payload);
        assert_eq!(chunks.next_frame().unwrap().unwrap().payload.as_ptr(), place);
    }
}
