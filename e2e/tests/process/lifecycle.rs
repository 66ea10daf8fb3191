//! Processes that come, go, and are not who the caller thinks.

use std::time::Duration;

use tandem_e2e::stack::{Engine, MODEL, Pair, Router};
use tandem_e2e::{client, eventually, probe, salted_text, salted_tokens};
use tandem_wire::proto::GenerateRequest;
use tandem_wire::{BootId, Reason};

/// For what comes by itself, on a busy machine.
const PATIENCE: Duration = Duration::from_mins(1);

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_means_another_boot_is_refused_by_both_engines() {
    let pair = Pair::start(&[]).await;
    let vocab = pair.decode.info().await.vocab_size;
    let good = pair.request(&salted_tokens(61, 40, vocab), 4).await;

    let mut to_old_decode = good.clone();
    to_old_decode.boot_id = BootId::random().to_wire();
    let mut from_old_prefill = good.clone();
    from_old_prefill.key.as_mut().expect("a key").attempt = 2;
    from_old_prefill.prefill.as_mut().expect("a prefill").boot_id = BootId::random().to_wire();

    let mut decode = pair.decode.client().await;
    for request in [to_old_decode, from_old_prefill] {
        let outcome = client::generate(&mut decode, request).await;
        assert_eq!(outcome.reason(), Reason::StaleBoot, "{:?}", outcome.end);
    }
    pair.idle(Duration::from_secs(5)).await;
    let mut again = good;
    again.key.as_mut().expect("a key").attempt = 3;
    let again = client::generate(&mut decode, again).await;
    assert_eq!(again.tokens.len(), 4, "{:?}", again.end);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_is_served_once_and_a_late_copy_of_it_is_refused() {
    let pair = Pair::start(&[]).await;
    let vocab = pair.decode.info().await.vocab_size;
    let first = pair.request(&salted_tokens(62, 40, vocab), 4).await;
    let mut decode = pair.decode.client().await;
    client::generate(&mut decode, first.clone()).await.usage();
    let late = client::generate(&mut decode, first.clone()).await;
    assert_eq!(late.reason(), Reason::StaleAttempt, "{:?}", late.end);

    let mut next = first;
    next.key.as_mut().expect("a key").attempt += 1;
    assert_eq!(client::generate(&mut decode, next).await.tokens.len(), 4);
    pair.idle(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_does_not_fit_is_refused_before_it_takes_a_page() {
    let engine = Engine::start("unified", &["--max-length-tokens=256"]).await;
    let info = engine.info().await;
    assert_eq!(info.max_length_tokens, 256);
    let mut client = engine.client().await;
    let long = client::request(&info, &salted_tokens(63, 250, info.vocab_size), 7);
    assert_eq!(client::generate(&mut client, long).await.reason(), Reason::OverLength);
    let empty = client::request(&info, &[], 7);
    assert_eq!(client::generate(&mut client, empty).await.reason(), Reason::Invalid);
    let unknown_token = client::request(&info, &[info.vocab_size], 7);
    assert_eq!(
        client::generate(&mut client, unknown_token).await.reason(),
        Reason::Invalid
    );
    let sampling = GenerateRequest {
        sampling: Some(tandem_wire::proto::Sampling {
            temperature: f32::NAN,
            ..Default::default()
        }),
        ..client::request(&info, &[100], 7)
    };
    assert_eq!(client::generate(&mut client, sampling).await.reason(), Reason::Invalid);
    engine.idle(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_stack_finishes_what_runs_admits_nothing_new_and_exits_with_0() {
    let mut pair = Pair::start(&[]).await;
    let mut router = Router::start(&[&pair.prefill], &[&pair.decode], &[]).await;
    let answer = tokio::spawn({
        let url = router.url();
        let body = serde_json::json!({
            "model": MODEL, "prompt": salted_text(64, 40), "max_tokens": 200, "temperature": 1.0, "seed": 9, "stream": true,
        });
        async move {
            let answer = probe::http()
                .post(format!("{url}/v1/completions"))
                .json(&body)
                .send()
                .await;
            answer.expect("an answer").text().await.expect("a whole body")
        }
    });
    eventually("the request runs", PATIENCE, async || {
        let load = pair.decode.load().await;
        if load.running > 0 {
            Ok(())
        } else {
            Err(format!("{load:?}"))
        }
    })
    .await;

    router.process.signal(libc::SIGTERM);
    let answer = answer.await.expect("no panic");
    assert!(
        answer.contains("[DONE]") && !answer.contains(probe::ERROR_EVENT),
        "{answer}"
    );
    assert_eq!(router.process.wait(PATIENCE).await.code(), Some(0));
    for engine in [&mut pair.decode, &mut pair.prefill] {
        engine.process.signal(libc::SIGTERM);
        assert_eq!(engine.process.wait(PATIENCE).await.code(), Some(0));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_engine_finishes_its_request_and_refuses_the_next_as_draining() {
    let mut engine = Engine::start("unified", &[]).await;
    let info = engine.info().await;
    let mut running = engine.client().await;
    let mut late = engine.client().await;
    let request = client::request(&info, &salted_tokens(65, 40, info.vocab_size), 300);
    let first = tokio::spawn(async move { client::generate(&mut running, request).await });
    eventually("the request runs", PATIENCE, async || {
        let load = engine.load().await;
        if load.running > 0 {
            Ok(())
        } else {
            Err(format!("{load:?}"))
        }
    })
    .await;
    engine.process.signal(libc::SIGTERM);
    eventually("the engine says that it drains", PATIENCE, async || {
        let load = client::load(&mut late).await.map_err(|status| status.to_string())?;
        if load.draining {
            Ok(())
        } else {
            Err(format!("{load:?}"))
        }
    })
    .await;
    let refused = client::generate(&mut late, client::request(&info, &[100, 101], 4)).await;
    assert_eq!(refused.reason(), Reason::Draining, "{:?}", refused.end);
    assert_eq!(first.await.expect("no panic").tokens.len(), 300);
    drop(late);
    assert_eq!(engine.process.wait(PATIENCE).await.code(), Some(0));
}
