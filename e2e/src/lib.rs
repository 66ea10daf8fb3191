//! What the tests of the whole stand on: the shipped binaries as processes, and ways to watch, cut and kill them.
//!
//! | module | holds |
//! | --- | --- |
//! | [`process`] | a child process: its log, signals, file descriptors and threads; dies with its owner |
//! | [`stack`] | an engine and a router, started with short timers on free ports and waited for |
//! | [`client`] | `Generate` against an engine, and requests to the router |
//! | [`visitor`] | clients that keep one connection, or do not read |
//! | [`planting`] | the faults that `tandem diagnose` has to find, and how each is planted |
//! | [`proxy`] | a TLS-terminating keep-alive proxy with a fault |
//! | [`shallow`] | a model with fewer layers than it has |
//! | [`relay`] | a TCP relay that counts by the kernel's own counters, stops after so many bytes, or is cut |
//! | [`cluster`] | a Kubernetes control plane with scripted nodes |
//! | [`node`] | a Kubernetes of real nodes on this machine |
//! | [`probe`] | what `/metrics`, `WatchLoad` and `/proc` say |
//!
//! The timers are the product's own, set short by flags. Nothing here replaces a part of the product.

#![expect(clippy::expect_used, reason = "fixtures of tests: a step that fails fails the test")]
#![expect(clippy::missing_panics_doc, reason = "the same")]

pub mod client;
pub mod cluster;
pub mod node;
pub mod planting;
pub mod probe;
pub mod process;
pub mod proxy;
pub mod relay;
pub mod shallow;
pub mod stack;
pub mod visitor;

use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The folder of the shipped binaries: the one above the test executable's own.
pub fn bin_dir() -> PathBuf {
    let exe = std::env::current_exe().expect("the test executable's path");
    exe.parent()
        .and_then(|deps| deps.parent())
        .expect("target/release/deps/<test>")
        .to_path_buf()
}

/// The path of a shipped binary.
pub fn bin(name: &str) -> PathBuf {
    let path = bin_dir().join(name);
    assert!(path.exists(), "{} is not there: run `make build` first", path.display());
    path
}

/// The root of the repository.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("e2e lies in the root")
        .to_path_buf()
}

/// The model file: `TANDEM_TEST_MODEL`, else what `make model` placed.
pub fn model() -> PathBuf {
    let path = std::env::var_os("TANDEM_TEST_MODEL")
        .map_or_else(|| root().join(".demo/models/smollm2/model.gguf"), PathBuf::from);
    assert!(
        path.exists(),
        "{} is not there: run `make model` first, or set TANDEM_TEST_MODEL",
        path.display()
    );
    path
}

/// Polls `check` until it gives a value; panics with `what` and the last word after `limit`.
pub async fn eventually<T, F>(what: &str, limit: Duration, mut check: F) -> T
where
    F: AsyncFnMut() -> Result<T, String>,
{
    let begin = Instant::now();
    loop {
        match check().await {
            Ok(value) => return value,
            Err(last) => assert!(
                begin.elapsed() < limit,
                "{what}: not within {limit:?}; last seen: {last}"
            ),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A port that was free a moment ago, and is not given twice by this process.
///
/// It lies below the kernel's range for outgoing connections: a process that is killed must find its port free again,
/// and any client on the machine could have been given an ephemeral one meanwhile.
pub fn free_port() -> u16 {
    use std::sync::atomic::{AtomicU32, Ordering};
    const LOWEST: u32 = 10_000;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let ephemeral = range
        .split_whitespace()
        .next()
        .and_then(|low| low.parse().ok())
        .unwrap_or(32_768_u32);
    let width = ephemeral.saturating_sub(LOWEST).max(1000);
    // Two test binaries at once begin at places far from each other, though one's process id follows the other's.
    let start = std::process::id().wrapping_mul(997) % width;
    loop {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        assert!(step < width, "no free port between {LOWEST} and {}", LOWEST + width);
        let port = (LOWEST + (start + step) % width) as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Tokens that no other prompt begins with: a stream of random numbers from `salt`, all of them plain words of a
/// vocabulary of `vocab` tokens (the first hundred are special in many models).
pub fn salted_tokens(salt: u64, count: usize, vocab: u32) -> Vec<u32> {
    let mut state = salt.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0xD1B5_4A32_D192_ED03;
    let mut next = || {
        // splitmix64
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    (0..count)
        .map(|_| 100 + (next() % u64::from(vocab - 100)) as u32)
        .collect()
}

/// A text of `words` common words that no other text begins with: about one token a word.
pub fn salted_text(salt: u64, words: usize) -> String {
    const WORDS: [&str; 16] = [
        "river", "stone", "green", "house", "music", "paper", "light", "water", "summer", "garden", "silver",
        "morning", "story", "window", "ocean", "winter",
    ];
    let picks = salted_tokens(salt, words, 100 + WORDS.len() as u32);
    picks
        .iter()
        .map(|pick| WORDS[*pick as usize - 100])
        .collect::<Vec<_>>()
        .join(" ")
}
