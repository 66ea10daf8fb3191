//! Prefill against a decode that says the wrong thing, or the right thing twice, early or late.

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use prost::Message as _;
use tandem_wire::frame::spans;
use tandem_wire::proto::kv_transfer_client::KvTransferClient;
use tandem_wire::proto::{self, DecodeMessage, Open, decode_message, prefill_message};
use tandem_wire::{BootId, Failure, KvLayout, Reason, Source, TransferKey};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Status, Streaming};

use super::caller::{Caller, channel, fetch, fetch_request, open};
use super::rig::{Prefill, Setup, eventually, failures, new_key, soon};

fn sampling(open: &mut Open) -> &mut proto::Sampling {
    open.sampling.get_or_insert_default()
}

/// Makes one thing wrong.
type Edit<T> = fn(&mut T);

#[tokio::test]
async fn what_does_not_fit_is_refused_before_anything_is_computed() {
    let prefill = Prefill::start(&Setup::default()).await;
    let rows: &[(Edit<Open>, Reason, &str)] = &[
        (|o| o.key = None, Reason::Invalid, "transfer_id"),
        (
            |o| o.prefill_boot_id = BootId::from([9; 16]).to_wire(),
            Reason::StaleBoot,
            "0909",
        ),
        (|o| o.prefill_boot_id = Bytes::new(), Reason::StaleBoot, "boot_id"),
        (
            |o| o.decode_boot_id = Bytes::from_static(b"short"),
            Reason::Invalid,
            "boot_id",
        ),
        (
            |o| o.model_hash = Bytes::from_static(&[1; 32]),
            Reason::LayoutMismatch,
            "model hash",
        ),
        (|o| o.layout = None, Reason::LayoutMismatch, "absent"),
        (
            |o| o.layout.as_mut().unwrap().layers = 99,
            Reason::LayoutMismatch,
            "layers",
        ),
        (
            |o| o.layout.as_mut().unwrap().components[0].head_dim *= 2,
            Reason::LayoutMismatch,
            "component k",
        ),
        (
            |o| o.layout.as_mut().unwrap().components[0].dtype = 77,
            Reason::LayoutMismatch,
            "77",
        ),
        (
            |o| o.transports = vec!["carrier-pigeon".to_owned()],
            Reason::LayoutMismatch,
            "carrier-pigeon",
        ),
        (|o| o.prompt_tokens.clear(), Reason::Invalid, "prompt_tokens"),
        (|o| o.prompt_tokens[3] = 1 << 30, Reason::Invalid, "prompt_tokens[3]"),
        (|o| o.prompt_tokens = vec![7; 2_000], Reason::OverLength, "1024"),
        (|o| o.have_tokens = 101, Reason::Invalid, "have_tokens"),
        (|o| o.max_new_tokens = 0, Reason::Invalid, "max_new_tokens"),
        // each of them would fail the step of everybody in the batch
        (|o| sampling(o).temperature = f32::NAN, Reason::Invalid, "temperature"),
        (|o| sampling(o).temperature = -1.0, Reason::Invalid, "temperature"),
        (|o| sampling(o).top_p = f32::NAN, Reason::Invalid, "top_p"),
        (|o| sampling(o).top_p = 2.0, Reason::Invalid, "top_p"),
    ];
    for (edit, reason, named) in rows {
        let key = new_key();
        let mut wrong = open(&prefill, key);
        edit(&mut wrong);
        let mut caller = Caller::open(&prefill, wrong).await;
        let failure = caller.failed().await;
        assert_eq!(
            (failure.reason, failure.source),
            (*reason, Source::Prefill),
            "{failure}"
        );
        assert!(failure.detail.contains(named), "{failure} should name {named}");
        assert_eq!(
            failure.boot_id,
            (*reason == Reason::StaleBoot).then_some(prefill.boot_id)
        );
        assert!(caller.hear().await.is_none(), "the stream ends with the refusal");
    }
    prefill.idle().await;
    assert_eq!(prefill.fake.steps(), 0);
}

#[tokio::test]
async fn another_page_size_is_no_other_layout() {
    let prefill = Prefill::start(&Setup::default()).await;
    let mut other = open(&prefill, new_key());
    other.layout.as_mut().unwrap().page_tokens = 64;
    Caller::open(&prefill, other).await.accepted().await;
}

#[tokio::test]
async fn frames_are_the_bytes_of_the_pages_in_wire_order() {
    let prefill = Prefill::start(&Setup::default()).await;
    let key = new_key();
    let mut request = open(&prefill, key);
    request.have_tokens = 40;
    let mut caller = Caller::open(&prefill, request).await;
    let accepted = caller.accepted().await;
    assert_eq!(accepted.ranks[0].endpoint, format!(":{}", prefill.data.port()));
    let frames = fetch(&prefill, fetch_request(&prefill, key)).await.unwrap();
    let manifest = caller.manifest().await;
    let layout: &KvLayout = &prefill.scheduler.spec().layout;
    let expected: Vec<_> = spans(layout, 40, 100).collect();
    assert_eq!(frames.len(), expected.len());
    let mut digest = tandem_wire::frame::Digest::default();
    for (frame, span) in frames.iter().zip(expected) {
        assert_eq!(
            (frame.layer, frame.component, frame.first_token, frame.tokens),
            (span.layer, span.component, span.first_token, span.tokens)
        );
        assert_eq!(frame.crc32c, tandem_wire::frame::checksum(&frame.payload));
        digest.add(span, frame.crc32c, frame.payload.len());
    }
    assert_eq!(manifest.digest, digest.value());
    assert_eq!(
        (manifest.frames, manifest.payload_bytes),
        (digest.frames(), digest.bytes())
    );
    assert_eq!((manifest.from_token, manifest.to_token), (40, 100));
    caller.commit().await;
    caller.released().await;
    prefill.idle().await;
}

#[tokio::test]
async fn everything_said_twice_counts_once() {
    let prefill = Prefill::start(&Setup::default()).await;
    let key = new_key();
    let mut caller = Caller::open(&prefill, open(&prefill, key)).await;
    caller.say(decode_message::Message::Open(open(&prefill, key))).await;
    caller.accepted().await;
    fetch(&prefill, fetch_request(&prefill, key)).await.unwrap();
    caller.manifest().await;
    for _ in 0..2 {
        caller.say(decode_message::Message::Renew(proto::Renew {})).await;
        let news = caller.news().await;
        assert!(matches!(news, Some(prefill_message::Message::Renewed(_))), "{news:?}");
    }
    for _ in 0..3 {
        caller.commit().await;
        caller.released().await;
    }
    prefill.idle().await;
    assert_eq!(prefill.fake.steps(), 2, "two chunks, once");
}

#[tokio::test]
async fn a_key_is_opened_once_whatever_became_of_it() {
    let prefill = Prefill::start(&Setup::default()).await;
    let key = new_key();
    prefill.fake.pause();
    let mut first = Caller::open(&prefill, open(&prefill, key)).await;
    first.accepted().await;
    let failure = Caller::open(&prefill, open(&prefill, key)).await.failed().await;
    assert_eq!(failure.reason, Reason::StaleAttempt, "while it lives: {failure}");
    prefill.fake.resume();
    fetch(&prefill, fetch_request(&prefill, key)).await.unwrap();
    first.manifest().await;
    first.commit().await;
    first.released().await;
    drop(first);
    prefill.idle().await;
    let failure = Caller::open(&prefill, open(&prefill, key)).await.failed().await;
    assert_eq!(failure.reason, Reason::StaleAttempt, "after its end: {failure}");
    let failure = fetch(&prefill, fetch_request(&prefill, key)).await.unwrap_err();
    assert_eq!(failure.reason, Reason::StaleAttempt, "{failure}");
    // another attempt of the same hand-off is another key
    let next = TransferKey { attempt: 1, ..key };
    Caller::open(&prefill, open(&prefill, next)).await.accepted().await;
}

#[tokio::test]
async fn an_abort_that_overtakes_its_open_is_not_lost() {
    let prefill = Prefill::start(&Setup::default()).await;
    let key = new_key();
    let abort = proto::Abort {
        reason: Reason::RendezvousTimeout.into(),
        detail: "waited too long".to_owned(),
        key: Some(key.to_wire()),
    };
    let mut early = Caller::call(&prefill).await;
    early.say(decode_message::Message::Abort(abort.clone())).await;
    assert!(early.hear().await.is_none());
    let failure = Caller::open(&prefill, open(&prefill, key)).await.failed().await;
    assert_eq!(failure.reason, Reason::StaleAttempt, "{failure}");
    let failure = fetch(&prefill, fetch_request(&prefill, key)).await.unwrap_err();
    assert_eq!(failure.reason, Reason::AbortedByPeer, "{failure}");
    assert!(failure.detail.contains("waited too long"), "{failure}");
    assert_eq!(prefill.fake.steps(), 0);

    // the same from another stream, while it is live
    let key = new_key();
    prefill.fake.pause();
    let mut live = Caller::open(&prefill, open(&prefill, key)).await;
    live.accepted().await;
    let elsewhere = Caller::call(&prefill).await;
    let key = Some(key.to_wire());
    elsewhere
        .say(decode_message::Message::Abort(proto::Abort { key, ..abort }))
        .await;
    assert_eq!(live.failed().await.reason, Reason::AbortedByPeer);
    prefill.fake.resume();
    prefill.idle().await;
}

#[tokio::test]
async fn a_data_stream_may_come_before_its_control_stream() {
    let prefill = Prefill::start(&Setup::default()).await;
    let key = new_key();
    let early = fetch(&prefill, fetch_request(&prefill, key));
    let control = async {
        // the fetch is polled first, and waits
        let mut caller = Caller::open(&prefill, open(&prefill, key)).await;
        caller.accepted().await;
        caller.manifest().await;
        caller.commit().await;
        caller.released().await;
    };
    let (frames, ()) = tokio::join!(biased; early, control);
    assert_eq!(frames.unwrap().len(), 6);
    prefill.idle().await;
}

#[tokio::test]
async fn a_data_stream_without_a_control_stream_ends_by_the_rendezvous_timer() {
    let setup = Setup::default().timers(|t| t.rendezvous = Duration::from_millis(200));
    let prefill = Prefill::start(&setup).await;
    let failure = fetch(&prefill, fetch_request(&prefill, new_key())).await.unwrap_err();
    assert_eq!(failure.reason, Reason::RendezvousTimeout, "{failure}");
    // and so does a control stream without an Open
    let mut silent = Caller::call(&prefill).await;
    assert_eq!(silent.failed().await.reason, Reason::RendezvousTimeout);
    prefill.idle().await;
}

#[tokio::test]
async fn a_data_stream_of_somebody_else_is_refused_and_does_not_disturb() {
    let prefill = Prefill::start(&Setup::default()).await;
    let key = new_key();
    prefill.fake.pause();
    let mut caller = Caller::open(&prefill, open(&prefill, key)).await;
    caller.accepted().await;
    let good = fetch_request(&prefill, key);
    let rows: &[(Edit<proto::FetchRequest>, Reason)] = &[
        (|f| f.boot_id = BootId::from([9; 16]).to_wire(), Reason::StaleBoot),
        (
            |f| f.decode_boot_id = BootId::from([9; 16]).to_wire(),
            Reason::StaleAttempt,
        ),
        (|f| f.decode_boot_id = Bytes::new(), Reason::Invalid),
        (|f| f.rank = 1, Reason::Invalid),
        (|f| f.lane = 1, Reason::Invalid),
        (|f| f.key = None, Reason::Invalid),
    ];
    for (edit, reason) in rows {
        let mut wrong = good.clone();
        edit(&mut wrong);
        let failure = fetch(&prefill, wrong).await.unwrap_err();
        assert_eq!(failure.reason, *reason, "{failure}");
    }
    // a second reader is refused, the first one goes on
    let mut client = KvTransferClient::new(channel(prefill.data).await);
    let mut first = client.fetch(good.clone()).await.unwrap().into_inner();
    let failure = fetch(&prefill, good).await.unwrap_err();
    assert_eq!(failure.reason, Reason::StaleAttempt, "{failure}");
    prefill.fake.resume();
    let mut frames = 0;
    while soon("a frame", first.message()).await.unwrap().is_some() {
        frames += 1;
    }
    assert_eq!(frames, 6);
    caller.manifest().await;
    caller.commit().await;
    caller.released().await;
    prefill.idle().await;
}

#[tokio::test]
async fn a_data_stream_that_is_dropped_ends_the_hand_off_and_control_is_told() {
    let prefill = Prefill::start(&Setup::default()).await;
    let key = new_key();
    prefill.fake.pause();
    let mut caller = Caller::open(&prefill, open(&prefill, key)).await;
    caller.accepted().await;
    let mut client = KvTransferClient::new(channel(prefill.data).await);
    let stream = client.fetch(fetch_request(&prefill, key)).await.unwrap();
    drop(stream);
    let failure = caller.failed().await;
    assert_eq!(failure.reason, Reason::PeerLost, "{failure}");
    prefill.fake.resume();
    prefill.idle().await;
}

#[tokio::test]
async fn an_abort_ends_it_and_the_reason_is_kept() {
    let prefill = Prefill::start(&Setup::default()).await;
    let mut caller = Caller::open(&prefill, open(&prefill, new_key())).await;
    caller.accepted().await;
    let abort = proto::Abort {
        reason: Reason::Checksum.into(),
        detail: "frame 7".to_owned(),
        key: None,
    };
    caller.say(decode_message::Message::Abort(abort)).await;
    let failure = caller.failed().await;
    assert_eq!(
        (failure.reason, failure.source),
        (Reason::AbortedByPeer, Source::Decode)
    );
    assert!(
        failure.detail.contains("checksum") && failure.detail.contains("frame 7"),
        "{failure}"
    );
    prefill.idle().await;
}

#[tokio::test]
async fn the_requests_own_time_ends_it_though_the_scheduler_is_stuck() {
    let prefill = Prefill::start(&Setup::default()).await;
    prefill.fake.pause();
    let mut hasty = open(&prefill, new_key());
    hasty.remaining_ms = 200;
    let mut caller = Caller::open(&prefill, hasty).await;
    caller.accepted().await;
    assert_eq!(caller.failed().await.reason, Reason::Deadline);
    prefill.fake.resume();
    prefill.idle().await;
}

#[tokio::test]
async fn a_data_stream_that_comes_after_a_first_token_has_ended_all_is_empty() {
    let prefill = Prefill::start(&Setup::default()).await;
    for committed in [false, true] {
        let key = new_key();
        let mut short = open(&prefill, key);
        short.max_new_tokens = 1;
        let mut caller = Caller::open(&prefill, short).await;
        caller.accepted().await;
        assert!(caller.manifest().await.finished);
        if committed {
            caller.commit().await;
            caller.released().await;
            drop(caller);
            prefill.idle().await;
        }
        assert_eq!(fetch(&prefill, fetch_request(&prefill, key)).await, Ok(vec![]));
    }
    prefill.idle().await;
}

#[tokio::test]
async fn a_commit_or_a_silence_out_of_turn_ends_it() {
    let prefill = Prefill::start(&Setup::default()).await;
    // nobody reads its frames, so there is no manifest that could be committed
    let mut hasty = Caller::open(&prefill, open(&prefill, new_key())).await;
    hasty.accepted().await;
    hasty.commit().await;
    assert_eq!(hasty.failed().await.reason, Reason::Internal);

    // closing without a commit is an abort
    let mut quiet = Caller::open(&prefill, open(&prefill, new_key())).await;
    quiet.accepted().await;
    let Caller { say, mut hear } = quiet;
    drop(say);
    let last = soon("the end", async {
        let mut last = None;
        while let Ok(Some(message)) = hear.message().await {
            last = message.message;
        }
        last
    })
    .await;
    let Some(prefill_message::Message::Failed(failure)) = last else {
        panic!("{last:?} instead of a failure")
    };
    assert_eq!(Failure::from_wire(&failure).reason, Reason::AbortedByPeer);

    // a first word that is no Open
    let mut odd = Caller::call(&prefill).await;
    odd.commit().await;
    assert_eq!(odd.failed().await.reason, Reason::Invalid);
    prefill.idle().await;
}

#[tokio::test]
async fn words_of_a_newer_decode_are_ignored_and_counted() {
    let prefill = Prefill::start(&Setup::default()).await;
    let key = new_key();
    let mut caller = Caller::call(&prefill).await;
    let unknown = DecodeMessage { message: None };
    caller.say.send(unknown.clone()).await.unwrap();
    caller.say(decode_message::Message::Open(open(&prefill, key))).await;
    caller.say.send(unknown.clone()).await.unwrap();
    caller.accepted().await;
    fetch(&prefill, fetch_request(&prefill, key)).await.unwrap();
    caller.manifest().await;
    caller.say.send(unknown).await.unwrap();
    caller.commit().await;
    caller.released().await;
    let counted = super::rig::metric(&prefill.metrics, "tandem_transfer_unknown_messages_total", &["prefill"]);
    assert_eq!(counted as u64, 3);
    prefill.idle().await;
}

/// Sends bytes as they are.
struct AsTheyAre;

impl Codec for AsTheyAre {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;
    fn encoder(&mut self) -> Self {
        Self
    }
    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for AsTheyAre {
    type Item = Bytes;
    type Error = Status;
    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for AsTheyAre {
    type Item = Bytes;
    type Error = Status;
    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}

#[tokio::test]
async fn malformed_bytes_close_their_own_stream_and_no_other() {
    let prefill = Prefill::start(&Setup::default()).await;
    let channel = channel(prefill.control).await;
    let key = new_key();
    prefill.fake.pause();

    // a good one and a bad one on the same connection
    let (say, said) = mpsc::channel(16);
    let mut client = KvTransferClient::new(channel.clone());
    let hear = client.prefill(ReceiverStream::new(said)).await.unwrap().into_inner();
    let mut good = Caller { say, hear };
    good.say(decode_message::Message::Open(open(&prefill, key))).await;
    good.accepted().await;

    let message = Some(decode_message::Message::Open(open(&prefill, new_key())));
    let opened = Bytes::from(DecodeMessage { message }.encode_to_vec());
    for garbage in [
        Bytes::from_static(&[0xFF; 64]),
        opened.slice(..opened.len() / 2),
        Bytes::from_static(&[0x0A, 0xFF]),
    ] {
        for after_open in [false, true] {
            // the second one needs a key of its own
            let message = Some(decode_message::Message::Open(open(&prefill, new_key())));
            let fresh = Bytes::from(DecodeMessage { message }.encode_to_vec());
            let (say, said) = mpsc::channel(16);
            let mut raw = tonic::client::Grpc::new(channel.clone());
            soon("readiness", raw.ready()).await.unwrap();
            let path = http::uri::PathAndQuery::from_static("/tandem.v1.KvTransfer/Prefill");
            let request = tonic::Request::new(ReceiverStream::new(said));
            let mut hear: Streaming<Bytes> = raw.streaming(request, path, AsTheyAre).await.unwrap().into_inner();
            if after_open {
                say.send(fresh).await.unwrap();
            }
            say.send(garbage.clone()).await.unwrap();
            soon("its own stream ends", async {
                while let Ok(Some(_)) = hear.message().await {}
            })
            .await;
        }
    }
    eventually("only the good one is left", || prefill.source.live() == 1).await;

    prefill.fake.resume();
    fetch(&prefill, fetch_request(&prefill, key)).await.unwrap();
    good.manifest().await;
    good.commit().await;
    good.released().await;
    prefill.idle().await;
    assert_eq!(failures(&prefill.metrics, "prefill", Reason::StaleAttempt), 0);
}
