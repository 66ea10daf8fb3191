//! More than fits, and clients that do not read.

use std::time::Duration;

use tandem_e2e::stack::{Engine, MODEL, Pair, Router};
use tandem_e2e::{client, probe, salted_text, salted_tokens, visitor};
use tandem_wire::Reason;

const IDLE: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn decode_without_room_refuses_at_once_and_the_routers_queue_waits_instead() {
    // Room for two requests of 200 + 32 tokens (15 pages each), not for three.
    let flags = ["--kv-pages=40", "--no-prefix-cache"];
    let pair = Pair::start(&flags).await;
    let vocab = pair.decode.info().await.vocab_size;

    // More than all pages together: at once, not after a wait.
    let too_big = pair.generate(&salted_tokens(71, 700, vocab), 4).await;
    assert!(
        matches!(too_big.reason(), Reason::NoCapacity | Reason::OverLength),
        "{:?}",
        too_big.end
    );
    assert!(too_big.took < Duration::from_secs(2), "{:?}", too_big.took);

    let router = Router::start(&[&pair.prefill], &[&pair.decode], &[]).await;
    let answers = (0..10).map(|salt| {
        let router = &router;
        async move { router.complete(&salted_text(710 + salt, 180), 32).await }
    });
    for (status, body) in futures::future::join_all(answers).await {
        assert_eq!(status, 200, "{body}");
    }
    pair.idle(IDLE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_is_429_with_retry_after() {
    let engine = Engine::start("unified", &["--max-running=1", "--no-prefix-cache"]).await;
    let router = Router::start(&[], &[&engine], &["--queue-limit=1"]).await;
    let answers = (0..6).map(|salt| {
        let url = format!("{}/v1/completions", router.url());
        let body = serde_json::json!({"model": MODEL, "prompt": salted_text(720 + salt, 100), "max_tokens": 64});
        async move {
            let answer = probe::http().post(url).json(&body).send().await.expect("an answer");
            (answer.status().as_u16(), answer.headers().contains_key("retry-after"))
        }
    });
    let answers = futures::future::join_all(answers).await;
    assert!(
        answers
            .iter()
            .all(|(status, again)| *status == 200 || (*status == 429 && *again)),
        "{answers:?}"
    );
    assert!(
        answers.iter().filter(|(status, _)| *status == 200).count() >= 2,
        "{answers:?}"
    );
    assert!(answers.iter().any(|(status, _)| *status == 429), "{answers:?}");
    engine.idle(IDLE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_blocks_only_itself_and_is_cut_off() {
    let pair = Pair::start(&[]).await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], &["--client-stall-ms=2000"]).await;
    let body = serde_json::json!({
        "model": MODEL, "prompt": salted_text(73, 30), "max_tokens": 6000, "temperature": 1.0, "seed": 4, "stream": true,
    });
    let address = router.url().trim_start_matches("http://").parse().expect("an address");
    let stuck = visitor::not_reading(address, &body).await;

    // Others are served beside it.
    for salt in 0..4 {
        let (status, body) = router.complete(&salted_text(730 + salt, 30), 8).await;
        assert_eq!(status, 200, "{body}");
    }
    // And it is cut off: decode works for nobody any more, long before 6000 tokens.
    pair.idle(Duration::from_secs(30)).await;
    let cut = router.metrics().await.sum("tandem_router_client_stalled_total", &[]);
    assert!(cut > 0.5, "the answer ended for another reason");
    drop(stuck);
    let (status, body) = router.complete(&salted_text(739, 30), 8).await;
    assert_eq!(status, 200, "{body}");
    client::info(&mut pair.decode.client().await).await;
}
