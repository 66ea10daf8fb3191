//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Parser, ValueEnum};
use tandem_telemetry::{LogFormat, TraceFlags};

use crate::model::{KvBudget, LoadOptions, MAX_PAGE_TOKENS, MAX_RANKS, MAX_STEP_SEQS, MAX_STEP_TOKENS, revision};
use crate::sched::knobs::MAX_TIMER_MS;
use crate::sched::{Role, SchedKnobs};
use crate::transfer::{KeepAlive, TimerValues};

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendFlag {
    /// The best that this machine has.
    Auto,
    /// The CPU.
    Cpu,
}

/// Serves one model as prefill, decode or both.
#[derive(Debug, Clone, Parser)]
#[command(name = "tandem-engine", version, about, max_term_width = 120)]
pub struct Flags {
    /// What this engine is for: prefill, decode or unified
    #[arg(long)]
    pub role: Role,
    /// The model: a .gguf file, or a folder with config.json and safetensors files
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// SHA-256 that the model has to have: a file's, or of what `LC_ALL=C sha256sum *` prints in a folder [default: not compared]
    #[arg(long, value_name = "SHA256", value_parser = revision::parse)]
    pub model_revision: Option<String>,
    /// What computes
    #[arg(long, value_enum, default_value = "auto")]
    pub backend: BackendFlag,
    /// The model's name in GetInfo [default: as the file calls itself, or the folder's name]
    #[arg(long, value_name = "NAME")]
    pub served_name: Option<String>,
    /// gRPC: Engine, KvTransfer.Prefill, grpc.health.v1
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7101")]
    pub listen: SocketAddr,
    /// gRPC: KvTransfer.Fetch, KV bytes on connections of their own (prefill and unified)
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0")]
    pub data_listen: SocketAddr,
    /// Where decode engines reach the data port [default: its port, on the host that they dialled]
    #[arg(long, value_name = "HOST:PORT", value_parser = endpoint)]
    pub advertise_data: Option<String>,
    /// gRPC: Admin (knobs, drain, flush), behind the token [default: no such port]
    #[arg(long, value_name = "ADDR", requires = "admin_token_file")]
    pub admin_listen: Option<SocketAddr>,
    /// The token of the admin port; read again when it changes
    #[arg(long, value_name = "FILE", requires = "admin_listen")]
    pub admin_token_file: Option<PathBuf>,
    /// Where the router reaches the admin port [default: its port, on the host of --listen]
    #[arg(long, value_name = "HOST:PORT", value_parser = endpoint, requires = "admin_listen")]
    pub advertise_admin: Option<String>,
    /// HTTP: /metrics, /livez, /readyz
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7102")]
    pub ops_listen: SocketAddr,
    /// Compute threads [default: the cores that this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Parts of every layer that are computed together, each with its share of the threads; divides the model's KV heads
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = count(1, MAX_RANKS))]
    pub tensor_parallel: u32,
    /// KV cache, in pages
    #[arg(long, value_name = "N", conflicts_with = "kv_memory_mib", value_parser = clap::value_parser!(u32).range(1..))]
    pub kv_pages: Option<u32>,
    /// KV cache, in MiB
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub kv_memory_mib: u64,
    /// Tokens of a KV page, a multiple of 8
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = page_tokens)]
    pub page_tokens: u32,
    /// The longest sequence, prompt and answer [default: the model's, or what the KV cache holds]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_length_tokens: Option<u32>,
    /// The most prompt tokens of one sequence in one step
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = count(1, MAX_STEP_TOKENS))]
    pub chunked_prefill_tokens: u32,
    /// The most sequences at once
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = count(1, MAX_STEP_SEQS))]
    pub max_running: u32,
    /// The token budget of one step [default: a chunk and a token for each sequence]
    #[arg(long, value_name = "N", value_parser = count(2, MAX_STEP_TOKENS))]
    pub step_tokens: Option<u32>,
    /// Neither keep nor match prefixes [without a value: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, action = ArgAction::Set)]
    pub no_prefix_cache: bool,
    /// The most prefills that wait for a place
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub prefill_queue: u32,
    /// The longest wait in the prefill queue
    #[arg(long, value_name = "MS", default_value_t = 60_000, value_parser = millis())]
    pub queue_ms: u64,
    /// From dialling a prefill until it accepts
    #[arg(long, value_name = "MS", default_value_t = 30_000, value_parser = millis())]
    pub rendezvous_ms: u64,
    /// A prefill without progress of chunk or layer
    #[arg(long, value_name = "MS", default_value_t = 30_000, value_parser = millis())]
    pub progress_ms: u64,
    /// KV bytes are due and none comes
    #[arg(long, value_name = "MS", default_value_t = 10_000, value_parser = millis())]
    pub stall_ms: u64,
    /// A transfer that has neither ended nor moved; a step without a layer done
    #[arg(long, value_name = "MS", default_value_t = 60_000, value_parser = millis())]
    pub watchdog_ms: u64,
    /// Finished KV is held this long without a renewal
    #[arg(long, value_name = "MS", default_value_t = 30_000, value_parser = millis())]
    pub lease_ms: u64,
    /// HTTP/2 ping to each peer after this silence
    #[arg(long, value_name = "MS", default_value_t = 5_000, value_parser = millis())]
    pub keepalive_interval_ms: u64,
    /// Silence in all after which the peer is lost; longer than the interval
    #[arg(long, value_name = "MS", default_value_t = 15_000, value_parser = millis())]
    pub keepalive_timeout_ms: u64,
    /// After SIGTERM: the longest wait for requests to end
    #[arg(long, value_name = "MS", default_value_t = 90_000, value_parser = clap::value_parser!(u64).range(0..=MAX_TIMER_MS))]
    pub drain_ms: u64,
    /// Where traces go
    #[command(flatten)]
    pub traces: TraceFlags,
    /// Faults to plant, read again and again
    #[cfg(feature = "faults")]
    #[arg(long, value_name = "FILE", env = "TANDEM_FAULTS")]
    pub faults: Option<PathBuf>,
    /// text or json
    #[arg(long, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

fn millis() -> clap::builder::RangedU64ValueParser<u64> {
    clap::value_parser!(u64).range(1..=MAX_TIMER_MS)
}

fn count(least: u32, most: u32) -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(i64::from(least)..=i64::from(most))
}

fn page_tokens(text: &str) -> Result<u32, String> {
    let tokens: u32 = text.parse().map_err(|e| format!("{e}"))?;
    if tokens == 0 || tokens > MAX_PAGE_TOKENS || !tokens.is_multiple_of(8) {
        return Err(format!("{tokens} is not a multiple of 8 in 8..={MAX_PAGE_TOKENS}"));
    }
    Ok(tokens)
}

/// host:port, where the host may be empty.
fn endpoint(text: &str) -> Result<String, String> {
    let port = text.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
    match port {
        Some(port) if port > 0 => Ok(text.to_owned()),
        _ => Err(format!("{text:?} is not HOST:PORT")),
    }
}

/// Room for knobs that grow while the engine runs: buffers are made once, when the model is loaded.
const STEP_TOKENS_ROOM: u32 = 512;
const SEQUENCES_ROOM: u32 = 32;

impl Flags {
    /// Refuses what single flags cannot tell, by the flag's name.
    pub fn check(&self) -> Result<(), String> {
        let (timeout, interval) = (self.keepalive_timeout_ms, self.keepalive_interval_ms);
        if timeout <= interval {
            return Err(format!(
                "--keepalive-timeout-ms is {timeout}: give more than --keepalive-interval-ms, which is {interval}"
            ));
        }
        if let Err(order) = self.timers().check_order() {
            return Err(format!("--stall-ms and --watchdog-ms: {order}"));
        }
        // a drain of 0 waits for nothing
        let (drain, watchdog) = (self.drain_ms, self.watchdog_ms);
        if drain > 0 && drain <= watchdog {
            return Err(format!(
                "--drain-ms is {drain}: give more than --watchdog-ms, which is {watchdog}, or a drain ends before what hangs is \
                 found; or give 0 to wait for nothing"
            ));
        }
        Ok(())
    }

    /// What the scheduler starts with.
    pub fn knobs(&self) -> SchedKnobs {
        SchedKnobs {
            chunked_prefill_tokens: self.chunked_prefill_tokens,
            max_running: self.max_running,
            step_tokens: self
                .step_tokens
                .unwrap_or(MAX_STEP_TOKENS.min(self.chunked_prefill_tokens + self.max_running)),
            prefix_cache: !self.no_prefix_cache,
            prefill_queue: self.prefill_queue,
            queue_ms: self.queue_ms,
        }
    }

    /// What transfers start with.
    pub fn timers(&self) -> TimerValues {
        TimerValues {
            queue: Duration::from_millis(self.queue_ms),
            rendezvous: Duration::from_millis(self.rendezvous_ms),
            progress: Duration::from_millis(self.progress_ms),
            stall: Duration::from_millis(self.stall_ms),
            watchdog: Duration::from_millis(self.watchdog_ms),
            lease: Duration::from_millis(self.lease_ms),
        }
    }

    /// Pings.
    pub fn keep_alive(&self) -> KeepAlive {
        KeepAlive {
            interval: Duration::from_millis(self.keepalive_interval_ms),
            timeout: Duration::from_millis(self.keepalive_timeout_ms),
        }
    }

    /// What to load, and how large.
    pub fn load_options(&self) -> LoadOptions {
        let knobs = self.knobs();
        let defaults = LoadOptions::new(&self.model);
        LoadOptions {
            revision: self.model_revision.clone(),
            threads: self.threads.map_or(defaults.threads, |n| n as usize),
            tensor_parallel: self.tensor_parallel as usize,
            kv: self.kv_pages.map_or(KvBudget::Mib(self.kv_memory_mib), KvBudget::Pages),
            page_tokens: self.page_tokens,
            max_length_tokens: self.max_length_tokens,
            max_step_tokens: STEP_TOKENS_ROOM
                .max(knobs.step_tokens)
                .max(knobs.chunked_prefill_tokens),
            max_step_seqs: SEQUENCES_ROOM.max(knobs.max_running),
            ..defaults
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(more: &[&str]) -> Result<Flags, clap::Error> {
        let base = ["tandem-engine", "--role", "decode", "--model", "m.gguf"];
        Flags::try_parse_from(base.iter().chain(more))
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        let flags = parse(&[]).unwrap();
        assert_eq!(flags.knobs(), SchedKnobs::default());
        assert_eq!(flags.timers(), TimerValues::default());
        assert_eq!(flags.keep_alive(), KeepAlive::default());
        let options = flags.load_options();
        assert_eq!((options.kv, options.page_tokens), (KvBudget::Mib(512), 16));
        assert_eq!((options.max_step_tokens, options.max_step_seqs), (512, 32));
    }

    #[test]
    fn the_prefix_cache_can_be_switched_by_a_value_too() {
        for (given, off) in [
            (vec![], false),
            (vec!["--no-prefix-cache"], true),
            (vec!["--no-prefix-cache=true"], true),
            (vec!["--no-prefix-cache=false"], false),
        ] {
            assert_eq!(parse(&given).unwrap().no_prefix_cache, off, "{given:?}");
        }
        // the next argument is not its value
        assert!(parse(&["--no-prefix-cache", "false"]).is_err());
    }

    #[test]
    fn a_silence_that_ends_before_its_ping_is_refused() {
        assert_eq!(parse(&[]).unwrap().check(), Ok(()));
        for timeout in ["--keepalive-timeout-ms=5000", "--keepalive-timeout-ms=1"] {
            let error = parse(&[timeout]).unwrap().check().unwrap_err();
            assert!(error.contains("--keepalive-timeout-ms"), "{error}");
        }
    }

    #[test]
    fn timers_that_hide_one_another_are_refused_by_name() {
        for (flags, named) in [
            (&["--stall-ms=60000"][..], ["--stall-ms", "--watchdog-ms"]),
            (&["--watchdog-ms=10000"], ["--stall-ms", "--watchdog-ms"]),
            (&["--watchdog-ms=90000"], ["--drain-ms", "--watchdog-ms"]),
            (&["--drain-ms=60000"], ["--drain-ms", "--watchdog-ms"]),
        ] {
            let error = parse(flags).unwrap().check().unwrap_err();
            for name in named {
                assert!(error.contains(name), "{flags:?}: {error}");
            }
        }
        for good in [&["--drain-ms=0"][..], &["--drain-ms=60001"], &["--watchdog-ms=10001"]] {
            assert_eq!(parse(good).unwrap().check(), Ok(()), "{good:?}");
        }
    }

    #[test]
    fn buffers_grow_with_the_knobs_that_need_them() {
        let flags = parse(&[
            "--chunked-prefill-tokens",
            "1000",
            "--max-running",
            "64",
            "--kv-pages",
            "9",
            "--tensor-parallel",
            "3",
        ])
        .unwrap();
        let options = flags.load_options();
        assert_eq!(flags.knobs().step_tokens, 1_064);
        assert_eq!((options.max_step_tokens, options.max_step_seqs), (1_064, 64));
        assert_eq!(options.kv, KvBudget::Pages(9));
        assert_eq!(options.tensor_parallel, 3);
    }

    #[test]
    fn the_largest_values_allowed_are_loaded_with() {
        let flags = parse(&[
            "--chunked-prefill-tokens=65536",
            "--max-running=4096",
            "--page-tokens=1024",
        ])
        .unwrap();
        assert_eq!(flags.knobs().step_tokens, 65_536);
        let options = flags.load_options();
        assert_eq!((options.max_step_tokens, options.max_step_seqs), (65_536, 4_096));
        assert_eq!(parse(&["--step-tokens=65536"]).unwrap().knobs().step_tokens, 65_536);
    }

    #[test]
    fn an_admin_port_without_a_token_or_a_token_without_a_port_is_refused() {
        for (given, missing) in [
            ("--admin-listen=127.0.0.1:1", "--admin-token-file"),
            ("--admin-token-file=token", "--admin-listen"),
            ("--advertise-admin=host:1", "--admin-listen"),
        ] {
            let error = parse(&[given]).unwrap_err().to_string();
            assert!(error.contains(missing), "{given}: {error}");
        }
        assert!(parse(&["--admin-listen=127.0.0.1:1", "--admin-token-file=token"]).is_ok());
        assert_eq!(parse(&[]).unwrap().admin_listen, None);
    }

    #[test]
    fn a_value_out_of_range_is_refused_and_its_flag_named() {
        for (flag, value) in [
            ("--role", "both"),
            ("--backend", "cuda"),
            ("--model-revision", "00ff"),
            ("--page-tokens", "12"),
            ("--page-tokens", "0"),
            ("--page-tokens", "1032"),
            ("--threads", "0"),
            ("--tensor-parallel", "0"),
            ("--tensor-parallel", "65"),
            ("--kv-pages", "0"),
            ("--kv-memory-mib", "0"),
            ("--max-length-tokens", "1"),
            ("--chunked-prefill-tokens", "0"),
            ("--max-running", "0"),
            ("--step-tokens", "1"),
            ("--step-tokens", "65537"),
            ("--prefill-queue", "0"),
            ("--queue-ms", "0"),
            ("--stall-ms", "0"),
            ("--watchdog-ms", "86400001"),
            ("--keepalive-timeout-ms", "0"),
            ("--advertise-data", "host"),
            ("--advertise-admin", "host"),
            ("--admin-listen", "localhost"),
            ("--listen", "localhost"),
            ("--log-format", "xml"),
        ] {
            let args = ["tandem-engine", "--model", "m.gguf", flag, value];
            let role = if flag == "--role" {
                &[][..]
            } else {
                &["--role", "decode"][..]
            };
            let error = Flags::try_parse_from(args.iter().chain(role)).unwrap_err();
            assert!(error.to_string().contains(flag), "{flag} {value}: {error}");
            assert_eq!(error.exit_code(), 2);
        }
    }
}
