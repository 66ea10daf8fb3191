//! The router's side towards clients that leave, as processes.

use std::time::{Duration, Instant};

use tandem_e2e::stack::{Engine, MODEL, Pair, Router};
use tandem_e2e::{client, eventually, probe, salted_text};

/// From the moment a client is gone until nothing works for it.
const CANCELLED_WITHIN: Duration = Duration::from_secs(1);

async fn running(engine: &Engine) {
    let mut client = engine.client().await;
    eventually("the engine works", Duration::from_secs(10), async || {
        let load = client::load(&mut client).await.map_err(|status| status.to_string())?;
        if load.running > 0 {
            Ok(())
        } else {
            Err(format!("{load:?}"))
        }
    })
    .await;
}

fn body(prompt: &str, stream: bool) -> serde_json::Value {
    // Sampled: a greedy run of random words soon repeats itself, and may end.
    serde_json::json!({
        "model": MODEL, "prompt": prompt, "max_tokens": 4000, "temperature": 1.0, "seed": 3, "stream": stream,
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_in_the_middle_of_its_answer_is_cancelled_within_a_second() {
    let pair = Pair::start(&[]).await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], &[]).await;
    for stream in [true, false] {
        let answer = tokio::spawn({
            let (url, body) = (router.url(), body(&salted_text(51, 40), stream));
            async move {
                let answer = probe::http()
                    .post(format!("{url}/v1/completions"))
                    .json(&body)
                    .send()
                    .await;
                answer.expect("an answer").bytes().await
            }
        });
        running(&pair.decode).await;
        let begin = Instant::now();
        answer.abort();
        pair.idle(CANCELLED_WITHIN).await;
        println!(
            "stream {stream}: all pages free {:?} after the client left",
            begin.elapsed()
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_while_its_prompt_is_read_is_cancelled_within_a_second() {
    let pair = Pair::start(&[]).await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], &[]).await;
    let answer = tokio::spawn({
        let (url, body) = (router.url(), body(&salted_text(52, 4000), true));
        async move {
            let answer = probe::http()
                .post(format!("{url}/v1/completions"))
                .json(&body)
                .send()
                .await;
            answer.expect("an answer").bytes().await
        }
    });
    running(&pair.prefill).await;
    let begin = Instant::now();
    answer.abort();
    pair.idle(CANCELLED_WITHIN).await;
    println!("all pages free {:?} after the client left", begin.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unified_engine_behind_the_router_serves_without_a_prefill() {
    let unified = Engine::start("unified", &[]).await;
    let router = Router::start(&[], &[&unified], &[]).await;
    let (status, body) = router.complete("The capital of France is", 8).await;
    assert_eq!(status, 200, "{body}");
    assert!(
        body["choices"][0]["text"]
            .as_str()
            .is_some_and(|text| text.contains("Paris")),
        "{body}"
    );
}
