//! What a hand-off promises when nothing fails.

use futures::future::join_all;
use parking_lot::Mutex;
use tandem_engine::exec::SampleParams;
use tandem_engine::sched::Cause;
use tandem_engine::transfer::Phase;

use super::rig::{Ask, Decode, GREEDY, Prefill, Setup, metric, soon};
use crate::support::fake::{mix, solo};

/// Token ids that stay clear of the end token.
pub fn prompt(seed: u64, len: usize) -> Vec<u32> {
    (0..len as u64)
        .map(|i| 10 + (mix(seed << 20 ^ i) % 2_000) as u32)
        .collect()
}

#[tokio::test]
async fn prefill_and_decode_give_the_tokens_of_one_engine() {
    let setup = Setup::default();
    let (prefill, decode) = (Prefill::start(&setup).await, Decode::start(&setup));
    let sampled = SampleParams {
        temperature: 0.8,
        top_p: 0.9,
        seed: 11,
        ..GREEDY
    };
    // around pages of 8, chunks of 64, and up to the longest
    for (seed, len) in [1, 2, 7, 8, 9, 63, 64, 65, 200, 1_000].into_iter().enumerate() {
        for sampling in [GREEDY, sampled] {
            let ask = Ask {
                sampling,
                ..Ask::new(prompt(seed as u64 * 2 + u64::from(sampling == GREEDY), len), 20)
            };
            let answer = soon("a request", decode.generate(&ask, &prefill.peer())).await.unwrap();
            assert_eq!(
                answer.tokens,
                solo(&setup.fake, &ask.prompt, 20, sampling),
                "length {len}"
            );
            assert_eq!(answer.computed_tokens, 0, "decode prefilled by itself");
            assert_eq!(answer.pulled.moved_tokens as usize, len);
            let token_bytes = decode.scheduler.spec().layout.token_bytes();
            assert_eq!(answer.pulled.moved_bytes as usize, len * token_bytes);
        }
    }
    decode.idle().await;
    prefill.idle().await;
    for (metrics, side) in [(&decode.metrics, "decode"), (&prefill.metrics, "prefill")] {
        assert_eq!(metric(metrics, "tandem_transfer_completed_total", &[side]) as u64, 20);
        assert_eq!(metric(metrics, "tandem_transfer_seconds_count", &[side]) as u64, 20);
        assert!(metric(metrics, "tandem_transfer_bytes_total", &[side]) > 0.0);
    }
}

#[tokio::test]
async fn only_what_decode_lacks_moves() {
    let setup = Setup::default();
    let (prefill, decode) = (Prefill::start(&setup).await, Decode::start(&setup));
    let base = prompt(1, 128);
    let first = Ask::new(base.clone(), 8);
    decode.generate(&first, &prefill.peer()).await.unwrap();

    // a common prefix that ends within a page: whole pages of 8 are kept
    let mut fork = base[..100].to_vec();
    fork.extend(prompt(2, 50));
    let ask = Ask::new(fork, 8);
    let answer = decode.generate(&ask, &prefill.peer()).await.unwrap();
    assert_eq!(answer.tokens, solo(&setup.fake, &ask.prompt, 8, GREEDY));
    assert_eq!(answer.pulled.moved_tokens, 150 - 96);
    assert_eq!(answer.pulled.cached_tokens, 96, "prefill's own hit");

    // all of it is here: no frame, yet a manifest and a first token
    let before = metric(&decode.metrics, "tandem_transfer_frames_total", &["decode"]);
    let ask = Ask::new(base, 8);
    let answer = decode.generate(&ask, &prefill.peer()).await.unwrap();
    assert_eq!(answer.tokens, solo(&setup.fake, &ask.prompt, 8, GREEDY));
    assert_eq!((answer.pulled.moved_tokens, answer.pulled.moved_bytes), (0, 0));
    assert_eq!(answer.computed_tokens, 0);
    assert_eq!(
        metric(&decode.metrics, "tandem_transfer_frames_total", &["decode"]).to_bits(),
        before.to_bits()
    );
    decode.idle().await;
    prefill.idle().await;
}

#[tokio::test]
async fn a_first_token_that_ends_the_request_moves_no_kv() {
    let setup = Setup::default();
    let (prefill, decode) = (Prefill::start(&setup).await, Decode::start(&setup));
    for seed in 0..20 {
        let ask = Ask::new(prompt(seed, 100), 1);
        let answer = soon("a request", decode.generate(&ask, &prefill.peer())).await.unwrap();
        assert_eq!(answer.tokens, solo(&setup.fake, &ask.prompt, 1, GREEDY));
        assert_eq!(answer.pulled.finished, Some(Cause::Length));
        assert_eq!(answer.pulled.moved_bytes, 0);
    }
    decode.idle().await;
    prefill.idle().await;
    assert_eq!(
        decode.scheduler.cache().stats().cached,
        0,
        "pages without KV were published"
    );
}

#[tokio::test]
async fn many_hand_offs_at_once_do_not_mix_their_pages() {
    let setup = Setup::default().knobs(|k| k.prefill_queue = 64);
    let (prefill, decode) = (Prefill::start(&setup).await, Decode::start(&setup));
    let asks: Vec<_> = (0..24u64)
        .map(|i| Ask::new(prompt(i % 7, 40 + 9 * (i as usize % 7)), 4 + i as u32 % 5))
        .collect();
    let peer = prefill.peer();
    let answers = soon("all", join_all(asks.iter().map(|ask| decode.generate(ask, &peer)))).await;
    for (ask, answer) in asks.iter().zip(answers) {
        let expected = solo(&setup.fake, &ask.prompt, ask.new_tokens as usize, GREEDY);
        assert_eq!(answer.unwrap().tokens, expected);
    }
    decode.idle().await;
    prefill.idle().await;
}

#[tokio::test]
async fn phases_are_told_in_order() {
    let setup = Setup::default();
    let (prefill, decode) = (Prefill::start(&setup).await, Decode::start(&setup));
    let phases = Mutex::new(Vec::new());
    let ask = Ask::new(prompt(3, 300), 4);
    decode
        .pull_with(&ask, &prefill.peer(), |phase| phases.lock().push(phase))
        .await
        .unwrap();
    let phases = phases.into_inner();
    // one that starts at once may never have been seen in the queue
    let after_queue = phases.strip_prefix(&[Phase::Queued]).unwrap_or(&phases);
    assert_eq!(after_queue, [Phase::Prefill, Phase::Transfer]);
}
