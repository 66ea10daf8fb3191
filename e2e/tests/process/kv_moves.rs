//! KV really moves from prefill to decode, and only what decode lacks.

use std::time::Duration;

use tandem_e2e::stack::{MODEL, Pair, Router};
use tandem_e2e::{probe, salted_tokens};
use tandem_wire::KvLayout;

const IDLE: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn the_wire_carries_the_layouts_bytes_of_the_missing_tokens_and_decode_computes_none() {
    let (pair, relay) = Pair::start_behind_relay(&[]).await;
    let info = pair.decode.info().await;
    let layout = KvLayout::from_wire(info.layout.as_ref()).expect("decode names its layout");
    let token_bytes = layout.token_bytes() as u64;
    let page = layout.page_tokens as usize;

    // A prompt that no cache knows: all of it moves.
    let first = salted_tokens(1, 403, info.vocab_size);
    let before = relay.received_bytes();
    let outcome = pair.generate(&first, 8).await;
    let moved = relay.received_bytes() - before;
    let usage = outcome.usage();
    assert_eq!(outcome.tokens.len(), 8);
    assert_eq!((usage.prompt_tokens, usage.cached_tokens), (403, 0));
    assert_eq!(usage.computed_tokens, 0, "decode computed prompt tokens: {usage:?}");
    assert_eq!(usage.moved_tokens, 403);
    assert_eq!(usage.moved_bytes, 403 * token_bytes);
    assert_within_2_percent(moved, 403 * token_bytes);

    // The same beginning again, with another end: decode has whole pages of it and asks for the rest.
    let shared = 300;
    let mut second = first[..shared].to_vec();
    second.extend(salted_tokens(2, 200, info.vocab_size));
    let missing = (second.len() - shared / page * page) as u64;
    let before = relay.received_bytes();
    let outcome = pair.generate(&second, 8).await;
    let moved = relay.received_bytes() - before;
    let usage = outcome.usage();
    assert_eq!(usage.computed_tokens, 0, "decode computed prompt tokens: {usage:?}");
    assert_eq!(u64::from(usage.moved_tokens), missing);
    assert_within_2_percent(moved, missing * token_bytes);

    pair.idle(IDLE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_decode_has_whole_still_hands_off_and_answers_the_same() {
    let (pair, relay) = Pair::start_behind_relay(&[]).await;
    let info = pair.decode.info().await;
    let page = KvLayout::from_wire(info.layout.as_ref())
        .expect("decode names its layout")
        .page_tokens as usize;
    let prompt = salted_tokens(3, 12 * page, info.vocab_size);

    let first = pair.generate(&prompt, 12).await;
    let before = relay.received_bytes();
    let second = pair.generate(&prompt, 12).await;
    let moved = relay.received_bytes() - before;

    assert_eq!(first.tokens, second.tokens, "the answer depends on what is cached");
    let (first, second) = (first.usage(), second.usage());
    assert_eq!(first.moved_tokens as usize, prompt.len());
    // The last token's row may be computed again for its logits, so up to one page may be asked for.
    assert!(second.moved_tokens as usize <= page, "{second:?}");
    assert_eq!(second.computed_tokens, 0, "{second:?}");
    assert!(
        moved < first.moved_bytes / 8,
        "{moved} bytes moved for a prompt that decode has"
    );

    pair.idle(IDLE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn several_answers_to_one_prompt_move_it_once() {
    let (pair, relay) = Pair::start_behind_relay(&[]).await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], &[]).await;
    let info = pair.decode.info().await;
    let layout = KvLayout::from_wire(info.layout.as_ref()).expect("decode names its layout");
    let (token_bytes, page) = (layout.token_bytes() as u64, u64::from(layout.page_tokens));
    let prompt = salted_tokens(4, 600, info.vocab_size);

    let before = relay.received_bytes();
    let body = serde_json::json!({
        "model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": true, "n": 4, "seed": 9,
    });
    let answer = probe::http()
        .post(format!("{}/v1/completions", router.url()))
        .json(&body)
        .send()
        .await
        .expect("the router answers");
    let answer: serde_json::Value = answer.json().await.expect("JSON");
    let moved = relay.received_bytes() - before;

    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(4), "{answer}");
    assert_eq!(answer["usage"]["prompt_tokens"], 600);
    assert_eq!(answer["usage"]["completion_tokens"], 4 * 8);
    // Each of the others lacks at most the prompt's last page.
    let (once, most) = (600 * token_bytes, (600 + 3 * page) * token_bytes);
    println!("{moved} bytes at the data socket for 4 answers, {once} for one");
    assert!(
        moved >= once && moved < most + most / 50,
        "{moved} bytes moved, {most} are enough"
    );

    pair.idle(IDLE).await;
}

fn assert_within_2_percent(moved: u64, expected: u64) {
    let ratio = moved as f64 / expected as f64;
    println!("{moved} bytes at the data socket for {expected} of KV: {ratio:.4}");
    assert!(
        (0.98..=1.02).contains(&ratio),
        "{moved} bytes at the data socket for {expected} of KV: {ratio:.4}"
    );
}
