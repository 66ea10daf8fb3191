//! Sixteen clients for half an hour, a third of which leave in the middle: nothing grows, nothing is left, nobody else notices.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::{Value, json};
use tandem_e2e::stack::{MODEL, Pair, Router};
use tandem_e2e::{eventually, probe, salted_text, salted_tokens};

use crate::DEFAULT_KEEPALIVE;

const CLIENTS: u64 = 16;
const MINUTES: u64 = 30;
/// Between two looks at the processes' memory.
const LOOK: Duration = Duration::from_secs(2);
/// KV pages and buffers are taken as they are first used: this share of the time is not judged.
const WARM: f64 = 0.2;
/// How much more memory the last third may hold than the first: allocators and page tables breathe.
const GROWTH: f64 = 1.03;
const GROWTH_MIB: f64 = 8.0;

/// What one client does next.
struct Turn {
    path: &'static str,
    body: Value,
    stream: bool,
    /// Leaves after this long.
    leaves: Option<Duration>,
}

impl Turn {
    /// Prompts of 3 to 300 words and answers of 1 to 64 tokens, half of them streamed, some sampled; every third is left
    /// after up to a second: in the queue, in prefill, in transfer or among the tokens.
    fn draw(salt: u64) -> Self {
        let dice = salted_tokens(salt, 6, 1_000_100);
        let roll = |die: usize, sides: u32| (dice[die] - 100) % sides;
        let words = [3, 15, 40, 130, 300, 300][roll(0, 6) as usize];
        let stream = roll(1, 2) == 0;
        let mut body = json!({"model": MODEL, "max_tokens": 1 + roll(2, 64), "stream": stream});
        body["temperature"] = json!(if roll(3, 2) == 0 { 0.0 } else { 0.8 });
        let text = salted_text(salt, words);
        let path = if roll(4, 2) == 0 {
            body["messages"] = json!([{"role": "user", "content": text}]);
            "/v1/chat/completions"
        } else {
            body["prompt"] = json!(text);
            "/v1/completions"
        };
        let leaves = (roll(5, 3) == 0).then(|| Duration::from_millis(u64::from(roll(5, 1_000))));
        Self {
            path,
            body,
            stream,
            leaves,
        }
    }

    /// The whole answer, or what is wrong with it.
    async fn ask(&self, http: &reqwest::Client, router: &str) -> Result<(), String> {
        let response = http
            .post(format!("{router}{}", self.path))
            .json(&self.body)
            .send()
            .await;
        let response = response.map_err(|error| error.to_string())?;
        let status = response.status();
        let mut body = Vec::new();
        let mut pieces = response.bytes_stream();
        while let Some(piece) = pieces.next().await {
            body.extend_from_slice(&piece.map_err(|error| format!("the answer broke off: {error}"))?);
        }
        let body = String::from_utf8(body).map_err(|error| error.to_string())?;
        let whole = if self.stream {
            body.ends_with("data: [DONE]\n\n")
                && body.contains("\"finish_reason\":\"")
                && !body.contains(probe::ERROR_EVENT)
        } else {
            body.contains("\"finish_reason\":\"")
        };
        if status == 200 && whole {
            Ok(())
        } else {
            Err(format!("{status}: {body}"))
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_clients_of_whom_some_leave_make_nothing_grow_and_nothing_fail() {
    let minutes = std::env::var("TANDEM_SOAK_MINUTES").map_or(MINUTES, |text| text.parse().expect("minutes"));
    let time = Duration::from_mins(minutes);
    // So few pages that the crowd fills them again and again: a page's memory is taken when it is first written.
    let flags = [
        DEFAULT_KEEPALIVE,
        &[
            "--stall-ms=10000",
            "--progress-ms=30000",
            "--watchdog-ms=60000",
            "--kv-pages=240",
        ],
    ]
    .concat();
    let pair = Pair::start(&flags).await;
    let router = Router::start(&[&pair.prefill], &[&pair.decode], DEFAULT_KEEPALIVE).await;
    let processes = [
        ("prefill", &pair.prefill.process),
        ("decode", &pair.decode.process),
        ("router", &router.process),
    ];
    // Connections that stay are made by a first request.
    let (status, body) = router.complete(&salted_text(1, 40), 4).await;
    assert_eq!(status, 200, "{body}");
    let counts = || processes.map(|(name, process)| (name, process.fds(), process.threads()));
    let before = counts();

    let begin = Instant::now();
    let (answered, left) = (AtomicU64::new(0), AtomicU64::new(0));
    let clients = (0..CLIENTS).map(|client| {
        let (router, answered, left) = (router.url(), &answered, &left);
        async move {
            let http = probe::http();
            for turn in 0.. {
                if begin.elapsed() > time {
                    break;
                }
                let turn = Turn::draw((client << 32) + turn + 2);
                let answer = turn.ask(&http, &router);
                let answer = match turn.leaves {
                    Some(after) => tokio::time::timeout(after, answer).await.ok(),
                    None => Some(answer.await),
                };
                match answer {
                    None => left.fetch_add(1, Ordering::Relaxed),
                    Some(Ok(())) => answered.fetch_add(1, Ordering::Relaxed),
                    Some(Err(fault)) => panic!("after {:?}: {}: {fault}", begin.elapsed(), turn.body),
                };
            }
        }
    });
    let memory = async {
        let mut looks = Vec::new();
        while begin.elapsed() < time {
            tokio::time::sleep(LOOK).await;
            looks.push(processes.map(|(_, process)| process.rss_mib()));
        }
        looks
    };
    let (_, looks) = tokio::join!(futures::future::join_all(clients), memory);
    let (answered, left) = (answered.into_inner(), left.into_inner());
    println!("{answered} requests answered, {left} left by their clients in {minutes} minutes");
    assert!(answered > 0 && left > 0, "no load");

    pair.idle(Duration::from_mins(1)).await;
    for (index, (name, _)) in processes.iter().enumerate() {
        let used = |look: &[f64; 3]| look[index];
        flat(name, &looks.iter().map(used).collect::<Vec<_>>());
    }
    eventually("files and threads as before", Duration::from_mins(1), async || {
        let now = counts();
        let more = std::iter::zip(&before, &now).any(|(before, now)| now.1 > before.1 || now.2 > before.2);
        if more {
            Err(format!("{before:?} before, {now:?} now"))
        } else {
            Ok(())
        }
    })
    .await;
    judge_outcomes(&router, &pair).await;
}

/// The last third of the judged time holds hardly more memory than the first.
fn flat(name: &str, looks: &[f64]) {
    let judged = &looks[(looks.len() as f64 * WARM) as usize..];
    let third = judged.len() / 3;
    let median = |part: &[f64]| {
        let mut part = part.to_vec();
        part.sort_by(f64::total_cmp);
        part[part.len() / 2]
    };
    let (first, last) = (median(&judged[..third]), median(&judged[judged.len() - third..]));
    println!("{name}: {first:.1} MiB in the first third, {last:.1} MiB in the last");
    assert!(
        last <= first * GROWTH + GROWTH_MIB,
        "{name} grew from {first:.1} to {last:.1} MiB: {looks:.1?}"
    );
}

/// Every request was answered or left by its client, and the engines saw no other end either.
async fn judge_outcomes(router: &Router, pair: &Pair) {
    let metrics = router.metrics().await;
    let count = |labels: &[&str]| metrics.sum("tandem_router_requests_total", labels);
    let other = count(&[]) - count(&["code=\"ok\""]) - count(&["code=\"client_gone\""]);
    assert!(other.abs() < 0.5, "{other} requests ended otherwise: {metrics:?}");
    for engine in [&pair.prefill, &pair.decode] {
        let metrics = engine.metrics().await;
        let count = |labels: &[&str]| metrics.sum("tandem_transfer_failures_total", labels);
        let aborted = count(&["reason=\"aborted_by_client\""]) + count(&["reason=\"aborted_by_peer\""]);
        let other = count(&[]) - aborted;
        assert!(other.abs() < 0.5, "{other} transfers failed unasked: {metrics:?}");
    }
}

/// A leak of 2 KiB a request would be more than this in half an hour.
#[test]
#[should_panic(expected = "grew")]
fn memory_that_grows_by_a_fifth_is_not_flat() {
    let looks: Vec<f64> = (0..300).map(|look| 300.0 + 60.0 * f64::from(look) / 300.0).collect();
    flat("a process", &looks);
}
