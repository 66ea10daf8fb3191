//! A machine without an idle core.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tandem_e2e::salted_text;
use tandem_e2e::stack::{Pair, Router};

use crate::DEFAULT_KEEPALIVE;

#[tokio::test(flavor = "multi_thread")]
async fn two_cores_at_full_load_for_ten_minutes_lose_no_peer() {
    let minutes = Duration::from_mins(10);
    let pair = Pair::start(
        &[
            DEFAULT_KEEPALIVE,
            &["--stall-ms=10000", "--progress-ms=30000", "--watchdog-ms=60000"],
        ]
        .concat(),
    )
    .await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], DEFAULT_KEEPALIVE).await;

    // Beside the engines' own threads, one spinning thread per core: nobody ever finds an idle core.
    let stop = Arc::new(AtomicBool::new(false));
    let spinners: Vec<_> = (0..std::thread::available_parallelism().map_or(2, usize::from))
        .map(|_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            })
        })
        .collect();

    let begin = Instant::now();
    let answered = AtomicU64::new(0);
    let clients = (0..16_u64).map(|client| {
        let (router, answered) = (&router, &answered);
        async move {
            for turn in 0.. {
                if begin.elapsed() > minutes {
                    break;
                }
                let words = [30, 200, 900][(client + turn) as usize % 3];
                let (status, body) = router
                    .complete(&salted_text(client * 1_000_000 + turn, words), 24)
                    .await;
                assert_eq!(status, 200, "after {:?}: {body}", begin.elapsed());
                answered.fetch_add(1, Ordering::Relaxed);
            }
        }
    });
    futures::future::join_all(clients).await;
    stop.store(true, Ordering::Relaxed);
    for spinner in spinners {
        spinner.join().expect("a spinner");
    }

    for engine in [&pair.prefill, &pair.decode] {
        let lost = engine
            .metrics()
            .await
            .sum("tandem_transfer_failures_total", &["reason=\"peer_lost\""]);
        assert!(lost < 0.5, "{lost} peers lost that were alive");
    }
    println!("{} requests answered under full load", answered.load(Ordering::Relaxed));
    pair.idle(Duration::from_secs(30)).await;
}
