//! What a router is started with.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use jiff::Timestamp;
use tandem_telemetry::{LogFormat, TraceFlags};

use crate::flow::Order;
use crate::flow::traffic::LONGEST;
use crate::knobs::Knobs;
use crate::text::ToolFormat;

/// What happens to requests that are not at an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// They go.
    Admit,
    /// They wait for an order of the admin port, and are refused after --traffic-until.
    Queue,
    /// They are refused, and told to come again.
    Reject,
}

/// How tool calls are found in answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ToolParser {
    /// As the chat template tells.
    Auto,
    /// Not at all.
    None,
    /// <tool_call> around JSON: Hermes, Qwen, SmolLM.
    Hermes,
    /// JSON alone: Llama 3.
    LlamaJson,
}

impl ToolParser {
    /// The format to read, where the template tells of `detected`.
    pub fn format(self, detected: Option<ToolFormat>) -> Option<ToolFormat> {
        match self {
            Self::Auto => detected,
            Self::None => None,
            Self::Hermes => Some(ToolFormat::Hermes),
            Self::LlamaJson => Some(ToolFormat::LlamaJson),
        }
    }
}

/// Serves the OpenAI API in front of prefill and decode engines.
#[derive(Debug, Clone, Parser)]
#[command(name = "tandem-router", version)]
pub struct Config {
    /// Where clients connect (HTTP).
    #[arg(long, default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,
    /// The socket of --listen, where who starts this process has opened it: the number of its file. It outlives the process,
    /// and connections wait in it while none takes them.
    #[arg(long, value_name = "FD", value_parser = clap::value_parser!(i32).range(3..))]
    pub listen_fd: Option<i32>,
    /// Keys of the API, one on each line; without it everybody may use it. Read again when it changes.
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Certificates for TLS on --listen, the server's own first, in PEM. Read again when it changes.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// The private key of the first certificate, in PEM, not encrypted. Read again when it changes.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Where /admin/* is served, behind the token; without it nowhere.
    #[arg(long, value_name = "ADDR", requires = "admin_token_file")]
    pub admin_listen: Option<SocketAddr>,
    /// The token of /admin/* and of the engines' admin ports. Read again when it changes.
    #[arg(long, value_name = "FILE", requires = "admin_listen")]
    pub admin_token_file: Option<PathBuf>,
    /// Threads that serve, each with its own connection to each engine [default: as many as there are cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1_024))]
    pub threads: Option<u16>,
    /// Where health and metrics are served.
    #[arg(long, default_value = "127.0.0.1:8001")]
    pub ops_listen: SocketAddr,
    /// The model's name in the API.
    #[arg(long)]
    pub model_name: String,
    /// The model's .gguf, or its folder with tokenizer.json and tokenizer_config.json, or that tokenizer.json.
    #[arg(long)]
    pub tokenizer: PathBuf,
    /// How tool calls are found in answers.
    #[arg(long, value_enum, default_value = "auto")]
    pub tool_parser: ToolParser,
    /// Control port of a prefill engine, HOST:PORT; repeat for more.
    #[arg(long)]
    pub prefill: Vec<String>,
    /// Control port of a decode (or unified) engine, HOST:PORT; repeat for more.
    #[arg(long, required_unless_present = "discover_decode")]
    pub decode: Vec<String>,
    /// Instead of --prefill: the Service in a cluster whose ready endpoints are the prefill engines.
    #[arg(
        long,
        value_name = "SERVICE",
        conflicts_with_all = ["prefill", "decode"],
        requires = "discover_decode"
    )]
    pub discover_prefill: Option<String>,
    /// Instead of --decode: the Service in a cluster whose ready endpoints are the decode engines.
    #[arg(long, value_name = "SERVICE", conflicts_with = "decode")]
    pub discover_decode: Option<String>,
    /// Where those Services are [default: the namespace of the kubeconfig's context, or of this pod]
    #[arg(
        long,
        value_name = "NAMESPACE",
        requires = "discover_decode",
        conflicts_with = "decode"
    )]
    pub namespace: Option<String>,
    /// How to reach their cluster [default: as the pod that this runs in]
    #[arg(long, value_name = "FILE", requires = "discover_decode", conflicts_with = "decode")]
    pub kubeconfig: Option<PathBuf>,
    /// What can be changed while it runs.
    #[command(flatten)]
    pub knobs: Knobs,
    /// What happens to requests until an order of the admin port says otherwise.
    #[arg(long, value_enum, default_value = "admit")]
    pub traffic: Mode,
    /// When requests that wait by --traffic queue are refused, as in 2026-01-31T12:00:00Z.
    #[arg(long, value_name = "RFC3339", required_if_eq("traffic", "queue"))]
    pub traffic_until: Option<Timestamp>,
    /// How many requests may wait.
    #[arg(long, default_value_t = 1_024)]
    pub queue_limit: usize,
    /// HTTP/2 ping to each engine after this silence, also while idle.
    #[arg(long, default_value_t = 5_000)]
    pub keepalive_interval_ms: u64,
    /// Silence in all after which a connection is dead; longer than the interval.
    #[arg(long, default_value_t = 15_000)]
    pub keepalive_timeout_ms: u64,
    /// A stream that has nothing to say says so this often, from acceptance on.
    #[arg(long, default_value_t = 10_000)]
    pub sse_comment_ms: u64,
    /// A client that takes nothing of its answer for this long is cut off.
    #[arg(long, default_value_t = 30_000)]
    pub client_stall_ms: u64,
    /// Largest request body.
    #[arg(long, default_value_t = 8 << 20)]
    pub max_body_bytes: usize,
    /// Request bodies held at once, all together; more are told to come again.
    #[arg(long, default_value_t = 256 << 20)]
    pub max_bodies_bytes: usize,
    /// Longest prompt with answer; the default is what the engines can take.
    #[arg(long)]
    pub max_length_tokens: Option<u32>,
    /// On SIGTERM, how long running requests may take to finish.
    #[arg(long, default_value_t = 90_000)]
    pub drain_ms: u64,
    /// Where traces go.
    #[command(flatten)]
    pub traces: TraceFlags,
    /// Faults to plant, read again and again.
    #[cfg(feature = "faults")]
    #[arg(long, value_name = "FILE", env = "TANDEM_FAULTS")]
    pub faults: Option<PathBuf>,
    /// How logs are written: text or json.
    #[arg(long, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

impl Config {
    /// `--threads`.
    pub fn threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.map_or_else(cores, usize::from)
    }

    /// `--traffic`, with what is left of the time until `--traffic-until`.
    pub fn traffic(&self) -> Order {
        match self.traffic {
            Mode::Admit => Order::Admit,
            Mode::Reject => Order::Reject,
            Mode::Queue => {
                let rest = self.traffic_until.map(|until| until.duration_since(Timestamp::now()));
                let rest = rest.and_then(|rest| Duration::try_from(rest).ok()).unwrap_or_default();
                Order::Queue {
                    until: Instant::now() + rest.min(LONGEST),
                }
            }
        }
    }

    /// `--sse-comment-ms`.
    pub fn sse_comment(&self) -> Duration {
        Duration::from_millis(self.sse_comment_ms)
    }

    /// `--client-stall-ms`.
    pub fn client_stall(&self) -> Duration {
        Duration::from_millis(self.client_stall_ms)
    }

    /// `--drain-ms`.
    pub fn drain(&self) -> Duration {
        Duration::from_millis(self.drain_ms)
    }

    /// Refuses what cannot work, by the flag's name.
    pub fn check(&self) -> Result<(), String> {
        let nonzero = [
            ("--keepalive-interval-ms", self.keepalive_interval_ms),
            ("--keepalive-timeout-ms", self.keepalive_timeout_ms),
            ("--sse-comment-ms", self.sse_comment_ms),
            ("--client-stall-ms", self.client_stall_ms),
            ("--max-body-bytes", self.max_body_bytes as u64),
            ("--max-length-tokens", self.max_length_tokens.map_or(1, u64::from)),
        ];
        if let Some((flag, _)) = nonzero.iter().find(|(_, value)| *value == 0) {
            return Err(format!("{flag} is 0: give at least 1"));
        }
        self.knobs
            .check()
            .map_err(|(name, detail)| format!("--{} {detail}", name.replace('_', "-")))?;
        if self.max_bodies_bytes < self.max_body_bytes {
            return Err(format!(
                "--max-bodies-bytes is {}: give at least --max-body-bytes, which is {}",
                self.max_bodies_bytes, self.max_body_bytes
            ));
        }
        let (timeout, interval) = (self.keepalive_timeout_ms, self.keepalive_interval_ms);
        if timeout <= interval {
            return Err(format!(
                "--keepalive-timeout-ms is {timeout}: give more than --keepalive-interval-ms, which is {interval}"
            ));
        }
        if self.model_name.is_empty() {
            return Err("--model-name is empty: give the name that clients ask for".into());
        }
        let names = [
            ("--discover-prefill", &self.discover_prefill),
            ("--discover-decode", &self.discover_decode),
            ("--namespace", &self.namespace),
        ];
        for (flag, name) in names {
            if let Some(name) = name.as_deref().filter(|name| !is_label(name)) {
                return Err(format!("{flag} {name:?} is not the name of a Service or namespace"));
            }
        }
        for (flag, endpoints) in [("--prefill", &self.prefill), ("--decode", &self.decode)] {
            for (at, endpoint) in endpoints.iter().enumerate() {
                let port = endpoint.rsplit_once(':').filter(|(host, _)| !host.is_empty());
                if port
                    .and_then(|(_, port)| port.parse::<u16>().ok())
                    .is_none_or(|port| port == 0)
                {
                    return Err(format!("{flag} {endpoint:?} is not HOST:PORT"));
                }
                if endpoints[..at].contains(endpoint) {
                    return Err(format!("{flag} {endpoint} is given twice"));
                }
            }
        }
        Ok(())
    }
}

/// A DNS label, as Services and namespaces are named.
fn is_label(name: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    (1..=63).contains(&name.len())
        && name.chars().all(|c| inner(c) || c == '-')
        && name.starts_with(inner)
        && name.ends_with(inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::knobs::{OnPrefillFailure, Policy};

    fn parse(extra: &[&str]) -> Config {
        let base = [
            "tandem-router",
            "--model-name",
            "m",
            "--tokenizer",
            "t",
            "--decode",
            "127.0.0.1:7",
        ];
        Config::try_parse_from(base.iter().chain(extra)).unwrap()
    }

    #[test]
    fn the_defaults_are_those_of_the_timer_table() {
        let config = parse(&[]);
        assert_eq!(config.check(), Ok(()));
        assert_eq!(config.knobs.policy, Policy::LeastLoaded);
        assert_eq!(config.knobs.on_prefill_failure, OnPrefillFailure::Retry);
        let times = (
            config.knobs.queue_ms,
            config.knobs.request_ms,
            config.sse_comment_ms,
            config.drain_ms,
        );
        assert_eq!(times, (60_000, 1_800_000, 10_000, 90_000));
        assert_eq!(
            (config.keepalive_interval_ms, config.keepalive_timeout_ms),
            (5_000, 15_000)
        );
    }

    #[test]
    fn a_wrong_flag_is_refused_by_its_name() {
        let cases: [(&[&str], &str); 9] = [
            (&["--max-bodies-bytes", "8388607"], "--max-bodies-bytes"),
            (&["--queue-ms", "0"], "--queue-ms"),
            (&["--request-ms", "604800001"], "--request-ms"),
            (&["--sse-comment-ms", "0"], "--sse-comment-ms"),
            (&["--keepalive-timeout-ms", "5000"], "--keepalive-timeout-ms"),
            (&["--prefill", "nowhere"], "--prefill \"nowhere\""),
            (&["--prefill", ":80"], "--prefill \":80\""),
            (&["--decode", "127.0.0.1:7"], "--decode 127.0.0.1:7 is given twice"),
            (&["--max-length-tokens", "0"], "--max-length-tokens"),
        ];
        for (flags, named) in cases {
            let error = parse(flags).check().unwrap_err();
            assert!(error.contains(named), "{error} should name {named}");
        }
    }

    #[test]
    fn the_tool_parser_asked_for_gives_way_to_the_template() {
        use ToolFormat::{Hermes, LlamaJson};
        for (flag, detected, expected) in [
            (None, Some(Hermes), Some(Hermes)),
            (None, None, None),
            (Some("auto"), Some(LlamaJson), Some(LlamaJson)),
            (Some("none"), Some(Hermes), None),
            (Some("hermes"), None, Some(Hermes)),
            (Some("llama-json"), Some(Hermes), Some(LlamaJson)),
        ] {
            let flags: Vec<&str> = flag.into_iter().flat_map(|flag| ["--tool-parser", flag]).collect();
            assert_eq!(
                parse(&flags).tool_parser.format(detected),
                expected,
                "{flag:?} {detected:?}"
            );
        }
        // the format's own name chooses it
        for format in ToolFormat::ALL {
            let parser = parse(&["--tool-parser", format.name()]).tool_parser;
            assert_eq!(parser.format(None), Some(format));
        }
    }

    #[test]
    fn half_of_what_goes_together_is_refused_and_the_other_half_named() {
        for (given, missing) in [
            ("--tls-cert=c", "--tls-key"),
            ("--tls-key=k", "--tls-cert"),
            ("--admin-listen=127.0.0.1:1", "--admin-token-file"),
            ("--admin-token-file=t", "--admin-listen"),
            ("--traffic=queue", "--traffic-until"),
        ] {
            let base = ["r", "--model-name=m", "--tokenizer=t", "--decode=h:1", given];
            let error = Config::try_parse_from(base).unwrap_err().to_string();
            assert!(error.contains(missing), "{given}: {error}");
        }
    }

    #[test]
    fn engines_are_named_and_looked_for_or_neither() {
        let parsed =
            |flags: &[&str]| Config::try_parse_from([&["r", "--model-name=m", "--tokenizer=t"], flags].concat());
        for (flags, named) in [
            (&[][..], "--decode"),
            (&["--discover-prefill=p"], "--decode"),
            (&["--decode=h:1", "--discover-decode=d"], "--discover-decode"),
            (
                &["--prefill=h:1", "--discover-prefill=p", "--discover-decode=d"],
                "--discover-prefill",
            ),
            (&["--decode=h:1", "--discover-prefill=p"], "--discover-prefill"),
            (&["--decode=h:1", "--kubeconfig=f"], "--kubeconfig"),
            (&["--decode=h:1", "--namespace=n"], "--namespace"),
        ] {
            let error = parsed(flags).unwrap_err().to_string();
            assert!(error.contains(named), "{flags:?}: {error}");
        }
        for name in ["d", "chat-d0123456789"] {
            let flag = format!("--discover-decode={name}");
            assert_eq!(parsed(&[&flag]).unwrap().check(), Ok(()));
        }
        for name in ["", "D", "a,b", "-a", "a=b", &"a".repeat(64)] {
            let flag = format!("--discover-decode={name}");
            let error = parsed(&[&flag]).unwrap().check().unwrap_err();
            assert!(error.contains("--discover-decode"), "{name}: {error}");
        }
    }

    #[test]
    fn an_ipv6_endpoint_is_taken() {
        assert_eq!(parse(&["--prefill", "[::1]:80"]).check(), Ok(()));
    }
}
