//! Processes that stop without dying: sockets stay open and nothing answers. Each wait ends by the timer that owns it.

use std::time::{Duration, Instant};

use tandem_e2e::stack::{ENDS_WITHIN, Pair, Router};
use tandem_e2e::{client, eventually, salted_text, salted_tokens};
use tandem_wire::Reason;

const IDLE: Duration = Duration::from_secs(15);

/// Stops a process; dropping it lets the process go on.
struct Frozen<'a>(&'a tandem_e2e::process::Process);

impl<'a> Frozen<'a> {
    fn new(process: &'a tandem_e2e::process::Process) -> Self {
        process.signal(libc::SIGSTOP);
        Self(process)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.signal(libc::SIGCONT);
    }
}

async fn prefilling(pair: &Pair) {
    let mut prefill = pair.prefill.client().await;
    eventually("prefill works on the prompt", Duration::from_secs(10), async || {
        let load = client::load(&mut prefill).await.map_err(|status| status.to_string())?;
        if load.running > 0 {
            Ok(())
        } else {
            Err(format!("{load:?}"))
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_frozen_in_its_work_is_lost_by_keepalive_and_serves_again_when_it_goes_on() {
    let pair = Pair::start(&["--no-prefix-cache"]).await;
    let vocab = pair.prefill.info().await.vocab_size;
    let request = pair.request(&salted_tokens(21, 3000, vocab), 4).await;
    let mut decode = pair.decode.client().await;
    let running = tokio::spawn(async move { client::generate(&mut decode, request).await });
    prefilling(&pair).await;

    let begin = Instant::now();
    let frozen = Frozen::new(&pair.prefill.process);
    let outcome = running.await.expect("no hang");
    assert_eq!(outcome.reason(), Reason::PeerLost, "{:?}", outcome.end);
    let waited = begin.elapsed();
    println!("lost after {waited:?}");
    assert!(
        (Duration::from_secs(2)..Duration::from_secs(8)).contains(&waited),
        "not by keep-alive: {waited:?}"
    );
    pair.decode.idle(IDLE).await;
    drop(frozen);

    // What it had begun is dropped, and it serves again.
    pair.prefill.idle(IDLE).await;
    assert_eq!(pair.generate(&salted_tokens(22, 100, vocab), 4).await.tokens.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transfer_without_bytes_is_stalled_before_the_keepalive_speaks() {
    let (pair, relay) = Pair::start_behind_relay(&["--no-prefix-cache", "--keepalive-timeout-ms=30000"]).await;
    let vocab = pair.prefill.info().await.vocab_size;
    let request = pair.request(&salted_tokens(23, 600, vocab), 4).await;
    let mut decode = pair.decode.client().await;
    relay.stop_after(2_000_000);
    let running = tokio::spawn(async move { client::generate(&mut decode, request).await });
    relay.stopped().await;

    let begin = Instant::now();
    let frozen = Frozen::new(&pair.prefill.process);
    let outcome = running.await.expect("no hang");
    assert_eq!(outcome.reason(), Reason::Stalled, "{:?}", outcome.end);
    let waited = begin.elapsed();
    println!("stalled after {waited:?}");
    assert!(
        (Duration::from_secs(2)..Duration::from_secs(8)).contains(&waited),
        "not by the stall timer: {waited:?}"
    );
    pair.decode.idle(IDLE).await;
    drop(frozen);
    relay.release();

    pair.prefill.idle(IDLE).await;
    assert_eq!(pair.generate(&salted_tokens(24, 100, vocab), 4).await.tokens.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_frozen_in_a_transfer_is_lost_to_prefill_and_router_and_serves_again() {
    // The other timers that would free prefill's pages are out of reach, so that it has to be the keep-alive.
    let flags = [
        "--no-prefix-cache",
        "--stall-ms=30000",
        "--lease-ms=60000",
        "--watchdog-ms=90000",
        "--drain-ms=100000",
    ];
    let (pair, relay) = Pair::start_behind_relay(&flags).await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], &["--queue-ms=5000"]).await;
    let prompt = salted_text(25, 600);
    relay.stop_after(2_000_000);
    let begin = Instant::now();
    let (answer, ()) = tokio::join!(
        async {
            let answer = tokio::time::timeout(Duration::from_mins(1), router.complete(&prompt, 8)).await;
            answer.expect("the client of a frozen decode hangs")
        },
        async {
            relay.stopped().await;
            pair.decode.process.signal(libc::SIGSTOP);
            // Prefill gives up what it holds for the frozen decode while that is still frozen.
            pair.prefill.idle(ENDS_WITHIN).await;
            // tonic shows a server a lost connection and a closed stream as the same end.
            let metrics = pair.prefill.metrics().await;
            let of = |code: &str| metrics.sum("tandem_transfer_failures_total", &[&format!("reason=\"{code}\"")]);
            assert!(
                of("peer_lost") + of("aborted_by_peer") > 0.5,
                "prefill let its pages go for another reason"
            );
        }
    );
    println!(
        "the client has its answer after {:?}: {} {}",
        begin.elapsed(),
        answer.0,
        answer.1["error"]["code"]
    );
    assert!(matches!(answer.0, 502..=504), "{answer:?}");
    pair.decode.process.signal(libc::SIGCONT);
    relay.release();

    pair.decode.idle(IDLE).await;
    let next = router.complete(&salted_text(26, 50), 8).await;
    assert_eq!(next.0, 200, "{}", next.1);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_meet_a_frozen_prefill_end_by_a_timer_and_none_hangs() {
    let pair = Pair::start(&["--no-prefix-cache"]).await;
    let vocab = pair.prefill.info().await.vocab_size;
    let mut requests = Vec::new();
    for salt in 0..8 {
        requests.push(pair.request(&salted_tokens(30 + salt, 200, vocab), 4).await);
    }
    let frozen = Frozen::new(&pair.prefill.process);
    let mut tasks = tokio::task::JoinSet::new();
    for request in requests {
        let mut decode = pair.decode.client().await;
        tasks.spawn(async move { client::generate(&mut decode, request).await });
    }
    while let Some(outcome) = tasks.join_next().await {
        let outcome = outcome.expect("no hang");
        let reason = outcome.reason();
        assert!(
            matches!(reason, Reason::PeerLost | Reason::RendezvousTimeout),
            "{:?}",
            outcome.end
        );
        assert!(outcome.took < ENDS_WITHIN, "{reason:?} after {:?}", outcome.took);
    }
    pair.decode.idle(IDLE).await;
    drop(frozen);
    pair.prefill.idle(IDLE).await;
    assert_eq!(pair.generate(&salted_tokens(40, 100, vocab), 4).await.tokens.len(), 4);
}
