//! From a deployment and this machine's facts to processes in their order. Pure.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tandem_crds::{Backend, EngineRole, OnPrefillFailure, PDDeploymentSpec, PrefixCacheMode, RouterPolicy, Timeouts};
use tandem_telemetry::TraceFlags;

/// Control, data, admin and health of a prefill.
const PREFILL_PORTS: usize = 4;
/// Control, admin and health of a decode.
const DECODE_PORTS: usize = 3;
/// Admin and health of the router; its main address is given.
const ROUTER_PORTS: usize = 2;

/// What a process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Prefill,
    Decode,
    Router,
}

/// The machine's side of the plan.
#[derive(Debug, Clone)]
pub struct Machine {
    pub engine: PathBuf,
    pub router: PathBuf,
    /// The model's file or folder.
    pub model: PathBuf,
    /// Where the router listens.
    pub http: SocketAddr,
    /// Threads of each engine; none: all cores.
    pub threads: Option<u32>,
    /// KV memory of each engine, in MiB.
    pub kv_memory_mib: u32,
    /// The token of all admin ports.
    pub token_file: PathBuf,
    pub front: Front,
    /// Where traces of every process go.
    pub traces: TraceFlags,
}

/// What stands between clients and the router.
#[derive(Debug, Clone, Default)]
pub struct Front {
    /// Keys of the API; none: everybody may use it.
    pub api_key_file: Option<PathBuf>,
    /// Certificate and key, where clients speak TLS.
    pub tls: Option<(PathBuf, PathBuf)>,
}

/// One process to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// For people: `prefill-0`, `decode-0`, `router`.
    pub name: String,
    pub role: Role,
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// gRPC for an engine, HTTP for the router.
    pub listen: SocketAddr,
    /// gRPC for an engine, HTTP for the router, behind the token.
    pub admin: SocketAddr,
    /// `/readyz`, `/livez`, `/metrics`.
    pub ops: SocketAddr,
}

/// Processes in the order of their start: all of one step are ready before the next step begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<Vec<Process>>,
    /// Each process is ready within this.
    pub startup: Duration,
    /// Each process stops within this.
    pub drain: Duration,
}

impl Plan {
    /// All processes, in the order of their start.
    pub fn processes(&self) -> impl Iterator<Item = &Process> {
        self.steps.iter().flatten()
    }
}

/// How many loopback ports [`plan`] needs.
pub fn ports_needed(spec: &PDDeploymentSpec) -> usize {
    count(&spec.prefill) * PREFILL_PORTS + count(&spec.decode) * DECODE_PORTS + ROUTER_PORTS
}

/// Engine processes.
pub fn engines(spec: &PDDeploymentSpec) -> usize {
    count(&spec.prefill) + count(&spec.decode)
}

fn count(role: &EngineRole) -> usize {
    usize::try_from(role.replicas).unwrap_or(0)
}

/// Prefill, then decode, then router. `ports` holds at least [`ports_needed`] free ports.
///
/// # Errors
/// Too few ports.
pub fn plan(spec: &PDDeploymentSpec, machine: &Machine, ports: &[u16]) -> Result<Plan, String> {
    if ports.len() < ports_needed(spec) {
        return Err(format!(
            "{} loopback ports are not the {} needed",
            ports.len(),
            ports_needed(spec)
        ));
    }
    let mut ports = ports.iter().map(|&port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    // The length was checked above, so no address is the unusable port 0.
    let mut next = || ports.next().unwrap_or(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));

    let mut engines = |role: Role, count: usize| -> Vec<Process> {
        let mut ports = || EnginePorts {
            listen: next(),
            data: (role == Role::Prefill).then(&mut next),
            admin: next(),
            ops: next(),
        };
        (0..count)
            .map(|index| engine(spec, machine, role, index, &ports()))
            .collect()
    };
    let prefills = engines(Role::Prefill, count(&spec.prefill));
    let decodes = engines(Role::Decode, count(&spec.decode));
    let router = router(spec, machine, &prefills, &decodes, (next(), next()));
    Ok(Plan {
        steps: vec![prefills, decodes, vec![router]],
        startup: seconds(spec.timeouts.startup_seconds),
        drain: seconds(spec.timeouts.drain_seconds),
    })
}

struct EnginePorts {
    listen: SocketAddr,
    data: Option<SocketAddr>,
    admin: SocketAddr,
    ops: SocketAddr,
}

fn engine(spec: &PDDeploymentSpec, machine: &Machine, role: Role, index: usize, ports: &EnginePorts) -> Process {
    let &EnginePorts {
        listen,
        data,
        admin,
        ops,
    } = ports;
    let (name, of) = match role {
        Role::Prefill => ("prefill", &spec.prefill),
        Role::Decode | Role::Router => ("decode", &spec.decode),
    };
    let mut args = Args::default();
    args.add("--role", name);
    args.add("--model", &machine.model);
    args.add("--served-name", &spec.model.name);
    if !spec.model.revision.is_empty() {
        args.add("--model-revision", &spec.model.revision);
    }
    args.add("--backend", backend(of.backend));
    args.add("--listen", listen.to_string());
    if let Some(data) = data {
        args.add("--data-listen", data.to_string());
    }
    args.add("--admin-listen", admin.to_string());
    args.add("--admin-token-file", &machine.token_file);
    args.add("--ops-listen", ops.to_string());
    if let Some(threads) = machine.threads {
        args.add("--threads", threads.to_string());
    }
    args.add("--tensor-parallel", of.parallelism.tensor.to_string());
    args.add("--kv-memory-mib", machine.kv_memory_mib.to_string());
    args.add("--page-tokens", spec.kv_cache.page_tokens.to_string());
    if let Some(tokens) = spec.model.max_length_tokens {
        args.add("--max-length-tokens", tokens.to_string());
    }
    args.add("--chunked-prefill-tokens", of.knobs.chunked_prefill_tokens.to_string());
    args.add("--max-running", of.knobs.max_running.to_string());
    if of.knobs.prefix_cache.mode == PrefixCacheMode::Disabled {
        args.flag("--no-prefix-cache");
    }
    let Timeouts {
        queue_seconds,
        rendezvous_seconds,
        progress_seconds,
        stall_seconds,
        inflight_watchdog_seconds,
        lease_seconds,
        drain_seconds,
        // The first is this program's own, the others are the router's.
        startup_seconds: _,
        request_seconds: _,
        restart_queue_seconds: _,
    } = spec.timeouts;
    args.millis("--queue-ms", queue_seconds);
    args.millis("--rendezvous-ms", rendezvous_seconds);
    args.millis("--progress-ms", progress_seconds);
    args.millis("--stall-ms", stall_seconds);
    args.millis("--watchdog-ms", inflight_watchdog_seconds);
    args.millis("--lease-ms", lease_seconds);
    args.millis("--drain-ms", drain_seconds);
    args.traces(&machine.traces);
    args.add("--log-format", "text");
    Process {
        name: format!("{name}-{index}"),
        role,
        program: machine.engine.clone(),
        args: args.0,
        listen,
        admin,
        ops,
    }
}

fn router(
    spec: &PDDeploymentSpec,
    machine: &Machine,
    prefills: &[Process],
    decodes: &[Process],
    (admin, ops): (SocketAddr, SocketAddr),
) -> Process {
    let mut args = Args::default();
    args.add("--listen", machine.http.to_string());
    if let Some(keys) = &machine.front.api_key_file {
        args.add("--api-key-file", keys);
    }
    if let Some((cert, key)) = &machine.front.tls {
        args.add("--tls-cert", cert);
        args.add("--tls-key", key);
    }
    args.add("--admin-listen", admin.to_string());
    args.add("--admin-token-file", &machine.token_file);
    args.add("--ops-listen", ops.to_string());
    args.add("--model-name", &spec.model.name);
    args.add("--tokenizer", &machine.model);
    for engine in prefills {
        args.add("--prefill", engine.listen.to_string());
    }
    for engine in decodes {
        args.add("--decode", engine.listen.to_string());
    }
    args.add(
        "--policy",
        match spec.router.policy {
            RouterPolicy::RoundRobin => "round-robin",
            RouterPolicy::LeastLoaded => "least-loaded",
        },
    );
    args.add(
        "--on-prefill-failure",
        match spec.transfer.on_prefill_failure {
            OnPrefillFailure::Retry => "retry",
            OnPrefillFailure::Recompute => "recompute",
            OnPrefillFailure::Fail => "fail",
        },
    );
    args.millis("--queue-ms", spec.timeouts.queue_seconds);
    args.millis("--request-ms", spec.timeouts.request_seconds);
    args.millis("--drain-ms", spec.timeouts.drain_seconds);
    args.traces(&machine.traces);
    if let Some(tokens) = spec.model.max_length_tokens {
        args.add("--max-length-tokens", tokens.to_string());
    }
    args.add("--log-format", "text");
    Process {
        name: "router".to_owned(),
        role: Role::Router,
        program: machine.router.clone(),
        args: args.0,
        listen: machine.http,
        admin,
        ops,
    }
}

fn backend(backend: Backend) -> &'static str {
    match backend {
        Backend::Auto => "auto",
        Backend::Cpu => "cpu",
    }
}

fn seconds(seconds: i32) -> Duration {
    Duration::from_secs(seconds.max(0).unsigned_abs().into())
}

#[derive(Default)]
struct Args(Vec<OsString>);

impl Args {
    fn add(&mut self, name: &str, value: impl Into<OsString>) {
        self.0.push(name.into());
        self.0.push(value.into());
    }

    fn flag(&mut self, name: &str) {
        self.0.push(name.into());
    }

    fn millis(&mut self, name: &str, value: i32) {
        self.add(name, seconds(value).as_millis().to_string());
    }

    fn traces(&mut self, flags: &TraceFlags) {
        if let Some(endpoint) = &flags.otlp_endpoint {
            self.add("--otlp-endpoint", endpoint);
            self.add("--trace-sample", flags.trace_sample.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use tandem_crds::{EngineKnobs, Model, ModelSource, PrefixCache, PvcSource};

    use super::*;

    fn spec() -> PDDeploymentSpec {
        PDDeploymentSpec {
            model: Model {
                name: "m".into(),
                source: ModelSource {
                    pvc: PvcSource {
                        claim_name: "models".into(),
                        path: "m.gguf".into(),
                    },
                },
                revision: String::new(),
                max_length_tokens: None,
            },
            kv_cache: tandem_crds::KvCache::default(),
            prefill: EngineRole::default(),
            decode: EngineRole::default(),
            router: tandem_crds::Router::default(),
            transfer: tandem_crds::Transfer::default(),
            timeouts: Timeouts::default(),
            gpus: tandem_crds::Gpus::default(),
            rollout: tandem_crds::Rollout::default(),
            restart: tandem_crds::Restart::default(),
            history_limit: 20,
        }
    }

    fn machine() -> Machine {
        Machine {
            engine: "/bin/tandem-engine".into(),
            router: "/bin/tandem-router".into(),
            model: "/models/m.gguf".into(),
            http: SocketAddr::from(([127, 0, 0, 1], 8080)),
            threads: None,
            kv_memory_mib: 512,
            token_file: "/state/admin-token".into(),
            front: Front::default(),
            traces: TraceFlags {
                otlp_endpoint: None,
                trace_sample: 1.0,
            },
        }
    }

    fn plan_of(spec: &PDDeploymentSpec, machine: &Machine) -> Plan {
        let ports: Vec<u16> = (20_000..).take(ports_needed(spec)).collect();
        plan(spec, machine, &ports).unwrap()
    }

    /// The value after a flag; fails where the flag is missing or doubled.
    fn value(process: &Process, flag: &str) -> String {
        let at: Vec<usize> = (0..process.args.len())
            .filter(|&index| process.args[index] == flag)
            .collect();
        assert_eq!(at.len(), 1, "{flag} in {:?}", process.args);
        process.args[at[0] + 1].to_str().unwrap().to_owned()
    }

    fn values(process: &Process, flag: &str) -> Vec<String> {
        let pairs = process.args.windows(2);
        pairs
            .filter(|pair| pair[0] == flag)
            .map(|pair| pair[1].to_str().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn a_process_is_left_out_of_the_traces() {
        let mut machine = machine();
        for process in plan_of(&spec(), &machine).processes() {
            assert_eq!(values(process, "--otlp-endpoint"), [""; 0]);
        }
        machine.traces.otlp_endpoint = Some("http://127.0.0.1:4317".into());
        machine.traces.trace_sample = 0.25;
        for process in plan_of(&spec(), &machine).processes() {
            assert_eq!(value(process, "--otlp-endpoint"), "http://127.0.0.1:4317");
            assert_eq!(value(process, "--trace-sample"), "0.25");
        }
    }

    #[test]
    fn the_router_starts_last_and_knows_every_engine() {
        let mut spec = spec();
        spec.prefill.replicas = 2;
        spec.decode.replicas = 3;
        let plan = plan_of(&spec, &machine());
        let names: Vec<Vec<&str>> = plan
            .steps
            .iter()
            .map(|step| step.iter().map(|process| process.name.as_str()).collect())
            .collect();
        assert_eq!(
            names,
            [
                vec!["prefill-0", "prefill-1"],
                vec!["decode-0", "decode-1", "decode-2"],
                vec!["router"]
            ]
        );
        let router = &plan.steps[2][0];
        let listens = |step: usize| {
            plan.steps[step]
                .iter()
                .map(|process| process.listen.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(values(router, "--prefill"), listens(0));
        assert_eq!(values(router, "--decode"), listens(1));
        assert_eq!(router.listen.port(), 8080);
        assert_eq!(value(router, "--tokenizer"), "/models/m.gguf");
    }

    #[test]
    fn no_port_is_given_twice() {
        let mut spec = spec();
        spec.prefill.replicas = 3;
        spec.decode.replicas = 2;
        let plan = plan_of(&spec, &machine());
        let mut ports = Vec::new();
        for process in plan.processes() {
            assert_eq!(value(process, "--ops-listen"), process.ops.to_string());
            assert_eq!(value(process, "--listen"), process.listen.to_string());
            assert_eq!(value(process, "--admin-listen"), process.admin.to_string());
            ports.extend([process.listen.port(), process.admin.port(), process.ops.port()]);
            ports.extend(
                values(process, "--data-listen")
                    .iter()
                    .map(|addr| addr.parse::<SocketAddr>().unwrap().port()),
            );
        }
        let given = ports.len();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!((given, ports.len()), (ports_needed(&spec) + 1, given));
        assert!(!ports.contains(&0));
        assert!(super::plan(&spec, &machine(), &[1, 2]).is_err());
    }

    #[test]
    fn every_process_gets_the_token_and_the_router_alone_keys_and_certificate() {
        let bare = plan_of(&spec(), &machine());
        let locked = Machine {
            front: Front {
                api_key_file: Some("keys".into()),
                tls: Some(("cert.pem".into(), "key.pem".into())),
            },
            ..machine()
        };
        let locked = plan_of(&spec(), &locked);
        for process in bare.processes().chain(locked.processes()) {
            assert_eq!(value(process, "--admin-token-file"), "/state/admin-token");
        }
        for (flag, given) in [
            ("--api-key-file", "keys"),
            ("--tls-cert", "cert.pem"),
            ("--tls-key", "key.pem"),
        ] {
            assert!(bare.processes().all(|process| values(process, flag).is_empty()));
            let with: Vec<_> = locked.processes().map(|process| values(process, flag)).collect();
            assert_eq!(with, [vec![], vec![], vec![given.to_owned()]], "{flag}");
        }
    }

    #[test]
    fn only_prefill_serves_pages() {
        let plan = plan_of(&spec(), &machine());
        assert_eq!(values(&plan.steps[0][0], "--data-listen").len(), 1);
        assert_eq!(values(&plan.steps[1][0], "--data-listen").len(), 0);
        assert_eq!(
            (value(&plan.steps[0][0], "--role"), value(&plan.steps[1][0], "--role")),
            ("prefill".into(), "decode".into())
        );
    }

    #[test]
    fn every_timeout_reaches_its_flag_in_milliseconds() {
        let mut spec = spec();
        spec.timeouts = Timeouts {
            queue_seconds: 1,
            rendezvous_seconds: 2,
            progress_seconds: 3,
            stall_seconds: 4,
            inflight_watchdog_seconds: 5,
            lease_seconds: 6,
            drain_seconds: 7,
            startup_seconds: 8,
            request_seconds: 9,
            restart_queue_seconds: 10,
        };
        let plan = plan_of(&spec, &machine());
        for engine in plan.steps[..2].iter().flatten() {
            for (flag, expected) in [
                ("--queue-ms", "1000"),
                ("--rendezvous-ms", "2000"),
                ("--progress-ms", "3000"),
                ("--stall-ms", "4000"),
                ("--watchdog-ms", "5000"),
                ("--lease-ms", "6000"),
                ("--drain-ms", "7000"),
            ] {
                assert_eq!(value(engine, flag), expected, "{flag}");
            }
        }
        let router = &plan.steps[2][0];
        for (flag, expected) in [("--queue-ms", "1000"), ("--drain-ms", "7000"), ("--request-ms", "9000")] {
            assert_eq!(value(router, flag), expected, "{flag}");
        }
        assert_eq!(
            (plan.startup, plan.drain),
            (Duration::from_secs(8), Duration::from_secs(7))
        );
    }

    #[test]
    fn each_role_gets_its_own_knobs() {
        let mut spec = spec();
        spec.model.max_length_tokens = Some(4096);
        spec.model.revision = "00ff".into();
        spec.kv_cache.page_tokens = 32;
        spec.prefill.backend = Backend::Cpu;
        spec.prefill.parallelism.tensor = 2;
        spec.prefill.knobs = EngineKnobs {
            chunked_prefill_tokens: 64,
            max_running: 3,
            prefix_cache: PrefixCache {
                mode: PrefixCacheMode::Disabled,
            },
        };
        let machine = Machine {
            threads: Some(2),
            kv_memory_mib: 64,
            ..machine()
        };
        let plan = plan_of(&spec, &machine);
        let (prefill, decode, router) = (&plan.steps[0][0], &plan.steps[1][0], &plan.steps[2][0]);
        for (process, flag, expected) in [
            (prefill, "--model-revision", "00ff"),
            (decode, "--model-revision", "00ff"),
            (prefill, "--backend", "cpu"),
            (decode, "--backend", "auto"),
            (prefill, "--tensor-parallel", "2"),
            (decode, "--tensor-parallel", "1"),
            (prefill, "--chunked-prefill-tokens", "64"),
            (decode, "--chunked-prefill-tokens", "128"),
            (prefill, "--max-running", "3"),
            (decode, "--max-running", "32"),
            (prefill, "--page-tokens", "32"),
            (decode, "--page-tokens", "32"),
            (prefill, "--threads", "2"),
            (decode, "--kv-memory-mib", "64"),
            (prefill, "--served-name", "m"),
            (prefill, "--max-length-tokens", "4096"),
            (router, "--max-length-tokens", "4096"),
            (router, "--model-name", "m"),
        ] {
            assert_eq!(value(process, flag), expected, "{flag}");
        }
        let off = |process: &Process| process.args.iter().any(|arg| arg == "--no-prefix-cache");
        assert_eq!((off(prefill), off(decode)), (true, false));
    }

    #[test]
    fn policies_are_spelled_as_the_router_reads_them() {
        for (policy, expected) in [
            (RouterPolicy::RoundRobin, "round-robin"),
            (RouterPolicy::LeastLoaded, "least-loaded"),
        ] {
            let mut spec = spec();
            spec.router.policy = policy;
            assert_eq!(value(&plan_of(&spec, &machine()).steps[2][0], "--policy"), expected);
        }
        for (policy, expected) in [
            (OnPrefillFailure::Retry, "retry"),
            (OnPrefillFailure::Recompute, "recompute"),
            (OnPrefillFailure::Fail, "fail"),
        ] {
            let mut spec = spec();
            spec.transfer.on_prefill_failure = policy;
            assert_eq!(
                value(&plan_of(&spec, &machine()).steps[2][0], "--on-prefill-failure"),
                expected
            );
        }
    }
}
