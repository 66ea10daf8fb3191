//! A crowd changes nobody's answer, and leaves nothing behind.

use std::time::Duration;

use tandem_e2e::stack::{Engine, Pair};
use tandem_e2e::{client, eventually, salted_tokens};
use tandem_wire::proto::{GenerateRequest, Sampling};

/// One member of the crowd.
#[derive(Debug, Clone)]
struct Member {
    prompt: Vec<u32>,
    new_tokens: u32,
    /// Drop the stream when so many tokens have arrived.
    abort_after: Option<usize>,
    sampling: Sampling,
}

impl Member {
    fn of(&self, request: GenerateRequest) -> GenerateRequest {
        GenerateRequest {
            sampling: Some(self.sampling.clone()),
            ..request
        }
    }
}

/// Lengths cross pages (16) and chunks (128) on both sides; a third share a beginning, a third leave early: before the
/// first token (while queued, in prefill or in transfer) or among the later ones. Every fourth is sampled: its random
/// numbers hang on seed and position alone.
fn crowd(seed: u64, vocab: u32) -> Vec<Member> {
    let dice = salted_tokens(seed, 32 * 4, 1_000_000);
    let shared = salted_tokens(seed + 1, 512, vocab);
    (0..32)
        .map(|i| {
            let roll = &dice[i * 4..i * 4 + 4];
            let edges = [1, 15, 16, 17, 33, 127, 128, 129, 200, 255, 256, 257];
            let length = edges[roll[0] as usize % edges.len()];
            let mut prompt = if i % 3 == 0 {
                shared[..length].to_vec()
            } else {
                Vec::new()
            };
            prompt.extend(salted_tokens(seed + 100 + i as u64, length.max(4), vocab));
            let new_tokens = 4 + roll[1] % 29;
            let abort_after = (i % 3 == 1).then(|| {
                if roll[2].is_multiple_of(2) {
                    0
                } else {
                    roll[3] as usize % new_tokens as usize
                }
            });
            Member {
                prompt,
                new_tokens,
                abort_after,
                sampling: if i % 4 == 2 {
                    Sampling {
                        temperature: 0.9,
                        top_p: 0.95,
                        seed: seed + i as u64,
                        ..Sampling::default()
                    }
                } else {
                    Sampling::default()
                },
            }
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn survivors_of_a_crowd_with_aborts_answer_as_alone_and_nothing_is_left() {
    let flags = ["--max-running=12", "--kv-pages=1200"];
    let pair = Pair::start(&flags).await;
    let unified = Engine::start("unified", &["--no-prefix-cache", "--kv-pages=1200"]).await;
    let info = unified.info().await;
    let crowd = crowd(7, info.vocab_size);

    // Each alone, on an engine that never saw a prefill or a neighbour.
    let mut alone = Vec::new();
    let mut client = unified.client().await;
    for member in &crowd {
        let outcome = client::generate(
            &mut client,
            member.of(client::request(&info, &member.prompt, member.new_tokens)),
        )
        .await;
        assert_eq!(outcome.tokens.len(), member.new_tokens as usize, "{:?}", outcome.end);
        alone.push(outcome.tokens);
    }

    // Connections and buffers that stay are made by a first request.
    pair.generate(&salted_tokens(999, 40, info.vocab_size), 4).await.usage();
    pair.idle(IDLE).await;
    let baseline = Footprint::of(&pair);

    let mut tasks = tokio::task::JoinSet::new();
    for (index, member) in crowd.iter().cloned().enumerate() {
        let request = member.of(pair.request(&member.prompt, member.new_tokens).await);
        let mut client = pair.decode.client().await;
        tasks.spawn(async move {
            let enough = member.abort_after.unwrap_or(usize::MAX);
            if enough == 0 {
                // Leaves while it is queued, in prefill or in transfer.
                let early = Duration::from_millis(20 * index as u64);
                let cut = tokio::time::timeout(early, client::generate(&mut client, request)).await;
                return (index, cut.ok());
            }
            // NO_CAPACITY is an honest answer of a full engine; the one queue that waits is the router's. A retry is a
            // new attempt, as the router's would be.
            let mut request = request;
            loop {
                let outcome = client::generate_until(&mut client, request.clone(), enough).await;
                match &outcome.end {
                    client::End::Failed(failure) if failure.reason == tandem_wire::Reason::NoCapacity => {
                        request.key.as_mut().expect("every request has a key").attempt += 1;
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    _ => return (index, Some(outcome)),
                }
            }
        });
    }
    let mut survivors = 0;
    while let Some(done) = tasks.join_next().await {
        let (index, outcome) = done.expect("no request hangs");
        let member = &crowd[index];
        let Some(outcome) = outcome else { continue };
        let expected = &alone[index][..outcome.tokens.len().min(alone[index].len())];
        assert_eq!(
            outcome.tokens, expected,
            "request {index} got other tokens in a crowd: {member:?}"
        );
        if member.abort_after.is_none() {
            assert_eq!(outcome.usage().computed_tokens, 0, "decode prefilled request {index}");
            assert_eq!(outcome.tokens.len(), member.new_tokens as usize, "request {index}");
            survivors += 1;
        }
    }
    assert_eq!(
        survivors,
        crowd.iter().filter(|member| member.abort_after.is_none()).count()
    );

    pair.idle(IDLE).await;
    baseline.is_back(&pair).await;
}

const IDLE: Duration = Duration::from_secs(20);

/// File descriptors and threads of both engines.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Footprint {
    prefill_fds: usize,
    decode_fds: usize,
    prefill_threads: usize,
    decode_threads: usize,
}

impl Footprint {
    fn of(pair: &Pair) -> Self {
        Self {
            prefill_fds: pair.prefill.process.fds(),
            decode_fds: pair.decode.process.fds(),
            prefill_threads: pair.prefill.process.threads(),
            decode_threads: pair.decode.process.threads(),
        }
    }

    async fn is_back(self, pair: &Pair) {
        eventually(&format!("back at {self:?}"), Duration::from_secs(20), async || {
            let now = Self::of(pair);
            let leaked = now.prefill_fds > self.prefill_fds
                || now.decode_fds > self.decode_fds
                || now.prefill_threads > self.prefill_threads
                || now.decode_threads > self.decode_threads;
            if leaked { Err(format!("{now:?}")) } else { Ok(()) }
        })
        .await;
    }
}
