//! Prefill against a decode that takes its frames slowly, or not at all.

use std::time::{Duration, Instant};

use tandem_wire::proto::kv_transfer_client::KvTransferClient;
use tandem_wire::{Failure, Reason, Source, TransferKey};
use tonic::Streaming;
use tonic::transport::Endpoint;

use super::caller::{Caller, fetch_request, open};
use super::pull::prompt;
use super::rig::{Prefill, Setup, new_key, soon};

/// A timer that a test means to expire.
const SHORT: Duration = Duration::from_millis(300);
/// Less than a frame, so that the sender stops soon after its reader.
const WINDOW_BYTES: u32 = 16 << 10;

async fn setup(stall: Duration, prompt_tokens: u32) -> (Prefill, TransferKey, Caller) {
    let setup = Setup::default().timers(|t| t.stall = stall).fake(|f| {
        f.max_length_tokens = prompt_tokens + 24;
        f.total_pages = f.max_length_tokens / f.page_tokens;
    });
    let prefill = Prefill::start(&setup).await;
    let key = new_key();
    let mut long = open(&prefill, key);
    long.prompt_tokens = prompt(1, prompt_tokens as usize);
    let mut caller = Caller::open(&prefill, long).await;
    caller.accepted().await;
    (prefill, key, caller)
}

async fn frames(prefill: &Prefill, key: TransferKey) -> Streaming<tandem_wire::proto::Frame> {
    let channel = Endpoint::from_shared(format!("http://{}", prefill.data))
        .unwrap()
        .initial_stream_window_size(WINDOW_BYTES)
        .connect()
        .await
        .unwrap();
    let call = KvTransferClient::new(channel).fetch(fetch_request(prefill, key)).await;
    call.unwrap().into_inner()
}

fn assert_stalled(failure: &Failure) {
    assert_eq!(
        (failure.reason, failure.source),
        (Reason::Stalled, Source::Prefill),
        "{failure}"
    );
    assert!(failure.detail.starts_with("stall timer"), "{failure}");
}

#[tokio::test]
async fn a_decode_that_never_fetches_does_not_hold_the_pages() {
    let (prefill, _, mut caller) = setup(SHORT, 1_000).await;
    let begun = Instant::now();
    assert_stalled(&caller.failed().await);
    assert!(begun.elapsed() >= SHORT, "{:?}", begun.elapsed());
    prefill.idle().await;
}

#[tokio::test]
async fn a_decode_that_stops_reading_does_not_hold_the_pages() {
    let (prefill, key, mut caller) = setup(SHORT, 1_000).await;
    let mut stream = frames(&prefill, key).await;
    assert!(soon("the first frame", stream.message()).await.unwrap().is_some());
    assert_stalled(&caller.failed().await);
    prefill.idle().await;
    // the stream hears of it too, behind what was on its way
    let end = soon("the stream's end", async {
        while stream.message().await?.is_some() {}
        Ok::<_, tonic::Status>(())
    });
    assert_stalled(&Failure::from_status(&end.await.unwrap_err(), Source::Decode));
}

#[tokio::test]
async fn a_decode_that_reads_slowly_is_left_alone() {
    // a gap may be three times as long on a loaded machine, the whole is longer than the timer all the same
    let pace = SHORT * 2;
    let stall = pace * 3;
    let (prefill, key, mut caller) = setup(stall, 16_000).await;
    let mut stream = frames(&prefill, key).await;
    let mut read = Vec::new();
    loop {
        tokio::time::sleep(pace).await;
        let Some(frame) = soon("a frame", stream.message()).await.unwrap() else {
            break;
        };
        read.push((prefill.inflight("streaming"), frame));
    }
    assert_eq!(read.len(), 12, "two frames a component and layer");
    let slow = read.iter().take_while(|(streaming, _)| *streaming == 1).count() as u32;
    assert!(
        pace * slow > stall,
        "was sent within {slow} of {} frames, so nothing was slow",
        read.len()
    );
    caller.manifest().await;
    caller.commit().await;
    caller.released().await;
    prefill.idle().await;
}
