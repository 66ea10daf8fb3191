//! Processes that die without a word, and what their peers and clients see.

use std::time::{Duration, Instant};

use serde_json::Value;
use tandem_e2e::stack::{ENDS_WITHIN, Engine, Pair, Router};
use tandem_e2e::{client, eventually, probe, salted_text, salted_tokens};
use tandem_wire::Reason;

const IDLE: Duration = Duration::from_secs(10);
/// Far less than the KV of the prompts here (about 14 MB), and more than any handshake.
const MID_TRANSFER_BYTES: u64 = 2_000_000;

/// The text of a completion and its usage; panics for anything but a good answer.
fn text_of((status, body): &(u16, Value)) -> &str {
    assert_eq!(*status, 200, "{body}");
    body["choices"][0]["text"]
        .as_str()
        .unwrap_or_else(|| panic!("no text in {body}"))
}

fn code_of((status, body): &(u16, Value)) -> (u16, &str) {
    (
        *status,
        body["error"]["code"]
            .as_str()
            .unwrap_or_else(|| panic!("no error code in {body}")),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_killed_mid_transfer_costs_one_prefill_and_no_token_when_the_policy_is_recompute() {
    let (mut pair, relay) = Pair::start_behind_relay(&["--no-prefix-cache"]).await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], &["--on-prefill-failure=recompute"]).await;
    let prompt = salted_text(11, 600);

    // The tokens must be right each time; the time, on a machine that others may use too, once in five. Each try is held
    // against its own undisturbed run, made just before it.
    let mut tries = Vec::new();
    while tries.len() < 5 {
        let begin = Instant::now();
        let undisturbed = router.complete(&prompt, 24).await;
        let undisturbed_took = begin.elapsed();
        let tokens = undisturbed.1["usage"]["prompt_tokens"].as_u64().expect("usage") as usize;
        let vocab = pair.prefill.info().await.vocab_size;
        let measured = pair.generate(&salted_tokens(12, tokens, vocab), 1).await;
        let prefill_time = Duration::from_micros(measured.usage().prefill_us);
        assert!(
            prefill_time > Duration::from_millis(50),
            "{prefill_time:?} for {tokens} tokens is no prefill"
        );

        relay.stop_after(MID_TRANSFER_BYTES);
        let begin = Instant::now();
        let (disturbed, ()) = tokio::join!(router.complete(&prompt, 24), async {
            relay.stopped().await;
            pair.prefill.process.kill();
        });
        let disturbed_took = begin.elapsed();
        assert_eq!(text_of(&disturbed), text_of(&undisturbed));
        assert_eq!(
            disturbed.1["usage"]["completion_tokens"],
            undisturbed.1["usage"]["completion_tokens"]
        );
        tries.push((undisturbed_took, prefill_time, disturbed_took));
        if disturbed_took <= undisturbed_took + prefill_time.mul_f64(1.2) {
            break;
        }
        relay.release();
        pair.prefill.restart().await;
        router.sees_all(2).await;
    }
    println!("(undisturbed, prefill, disturbed): {tries:?}");
    assert!(
        tries
            .iter()
            .any(|(undisturbed, prefill, disturbed)| *disturbed <= *undisturbed + prefill.mul_f64(1.2)),
        "(undisturbed, prefill, disturbed): {tries:?}, allowed are undisturbed and 1.2 × prefill"
    );

    pair.decode.idle(IDLE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_killed_mid_transfer_is_a_clear_error_when_the_policy_is_fail() {
    let (mut pair, relay) = Pair::start_behind_relay(&["--no-prefix-cache"]).await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], &["--on-prefill-failure=fail"]).await;

    relay.stop_after(MID_TRANSFER_BYTES);
    let prompt = salted_text(13, 600);
    let (answer, ()) = tokio::join!(router.complete(&prompt, 8), async {
        relay.stopped().await;
        pair.prefill.process.kill();
    });
    assert_eq!(code_of(&answer), (502, "peer_lost"), "{}", answer.1);
    pair.decode.idle(IDLE).await;
    let told = pair.decode.info().await.handoffs.expect("how they ended");
    let failed: Vec<_> = told.failed.iter().map(|one| (one.reason(), one.count)).collect();
    assert_eq!((told.failed_since, failed), (1, vec![(Reason::PeerLost, 1)]));
    assert_eq!((told.recent, told.recent_failed), (1, 1));

    // A prefill that comes back on its port is used again, though it is another boot.
    relay.release();
    pair.prefill.restart().await;
    assert!(!text_of(&router.complete(&prompt, 8).await).is_empty());
    let told = pair.decode.info().await.handoffs.expect("how they ended");
    assert_eq!((told.finished, told.failed_since, told.recent_failed), (1, 0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_killed_mid_transfer_is_replaced_by_another_when_the_policy_is_retry() {
    let (mut pair, relay) = Pair::start_behind_relay(&["--no-prefix-cache"]).await;
    let spare = Engine::start("prefill", &["--no-prefix-cache"]).await;
    let router = Router::start(
        &[&pair.prefill, &spare],
        &[&pair.decode],
        &["--on-prefill-failure=retry", "--policy=round-robin"],
    )
    .await;
    let prompt = salted_text(14, 600);
    let undisturbed = router.complete(&prompt, 8).await;
    let undisturbed = text_of(&undisturbed);

    // Round robin: one of the next two goes through the relay.
    relay.stop_after(MID_TRANSFER_BYTES);
    let (first, second, ()) = tokio::join!(router.complete(&prompt, 8), router.complete(&prompt, 8), async {
        relay.stopped().await;
        pair.prefill.process.kill();
    });
    assert_eq!(text_of(&first), undisturbed);
    assert_eq!(text_of(&second), undisturbed);
    pair.decode.idle(IDLE).await;
    spare.idle(IDLE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_killed_and_restarted_under_a_long_prefill_serves_the_next_request_at_first_try() {
    let mut pair = Pair::start(&["--no-prefix-cache"]).await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], &[]).await;
    let prefill_pid = pair.prefill.process.pid();

    let long = tokio::spawn({
        let (url, prompt) = (router.url(), salted_text(15, 4000));
        async move {
            let body = serde_json::json!({"model": tandem_e2e::stack::MODEL, "prompt": prompt, "max_tokens": 4});
            let answer = tandem_e2e::probe::http()
                .post(format!("{url}/v1/completions"))
                .json(&body)
                .send()
                .await;
            answer.expect("the router answers").status().as_u16()
        }
    });
    let mut prefill = pair.prefill.client().await;
    eventually(
        "prefill works on the long prompt",
        Duration::from_secs(10),
        async || {
            let load = client::load(&mut prefill).await.map_err(|status| status.to_string())?;
            if load.running > 0 {
                Ok(())
            } else {
                Err(format!("{load:?}"))
            }
        },
    )
    .await;

    pair.decode.process.kill();
    // Nobody is left to send the long prompt's KV to: prefill stops working on it.
    pair.prefill.idle(Duration::from_secs(5)).await;
    pair.decode.restart().await;

    let next = router.complete(&salted_text(16, 40), 8).await;
    assert!(!text_of(&next).is_empty());
    assert_eq!(pair.prefill.process.pid(), prefill_pid);
    assert!(pair.prefill.process.exited().is_none(), "prefill died with decode");

    // The long one may be answered by the new decode or be an error; it does not hang.
    let status = tokio::time::timeout(client::HANG, long)
        .await
        .expect("the long request hangs")
        .expect("no panic");
    assert!(matches!(status, 200 | 502 | 503 | 504), "{status}");
    pair.idle(IDLE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_killed_while_it_streams_ends_the_stream_with_an_error_and_without_done() {
    let mut pair = Pair::start(&[]).await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], &[]).await;
    let body = serde_json::json!({
        "model": tandem_e2e::stack::MODEL, "prompt": salted_text(17, 30), "max_tokens": 2000, "stream": true,
        "ignore_eos": true, "temperature": 1.0, "seed": 5,
    });
    let mut answer = tandem_e2e::probe::http()
        .post(format!("{}/v1/completions", router.url()))
        .json(&body)
        .send()
        .await
        .expect("the router answers");
    assert_eq!(answer.status(), 200);
    let mut text = String::new();
    while text.matches("data: ").count() < 4 {
        let chunk = answer.chunk().await.expect("a chunk").expect("the stream goes on");
        text.push_str(&String::from_utf8_lossy(&chunk));
    }
    pair.decode.process.kill();
    let rest = tokio::time::timeout(ENDS_WITHIN, async {
        while let Some(chunk) = answer.chunk().await.expect("a whole chunked body") {
            text.push_str(&String::from_utf8_lossy(&chunk));
        }
    });
    rest.await.expect("the stream of a dead decode hangs");
    assert!(
        text.contains(probe::ERROR_EVENT)
            && text.contains(
                Reason::PeerLost
                    .as_str_name()
                    .trim_start_matches("REASON_")
                    .to_lowercase()
                    .as_str()
            ),
        "{text}"
    );
    assert!(!text.contains("[DONE]"), "a cut stream says it is whole: {text}");
}
