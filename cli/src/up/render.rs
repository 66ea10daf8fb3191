//! From a revision and this machine's facts to processes. Pure.

use std::ffi::OsString;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::sync::Weak;
use std::time::Duration;

use tandem_crds::{Backend, EngineRole, PDDeploymentSpec};
use tandem_operator::render::knobs;
use tandem_plan::Traffic;
use tandem_telemetry::TraceFlags;

use super::names::Found;
use super::slots::{Role, Slot};

/// The machine's side.
#[derive(Debug, Clone)]
pub struct Machine {
    pub engine: PathBuf,
    pub router: PathBuf,
    /// Threads of each engine; none: all cores.
    pub threads: Option<u32>,
    /// KV memory of each engine, in MiB.
    pub kv_memory_mib: u32,
    /// The token of all admin ports.
    pub token_file: PathBuf,
    /// Where traces of every process go.
    pub traces: TraceFlags,
    /// The socket that every router accepts from.
    pub door: Door,
}

/// A listening socket that processes inherit: it outlives each of them, and connections wait in it while none serves.
#[derive(Debug, Clone)]
pub struct Door {
    /// Its number, here and there.
    pub fd: RawFd,
    /// Gone once nothing is to be started any more.
    pub socket: Weak<TcpListener>,
}

/// One process to run.
#[derive(Debug, Clone)]
pub struct Process {
    /// For people: `prefill-0`, `decode-0`, `router`.
    pub name: String,
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// `/readyz`, `/livez`, `/metrics`.
    pub ops: SocketAddr,
    /// What it inherits.
    pub door: Option<Door>,
}

/// What a process is made of, beside its slot.
#[derive(Debug, Clone, Copy)]
pub struct Made<'a> {
    /// The spec of its revision.
    pub spec: &'a PDDeploymentSpec,
    /// The spec whose knobs it starts with: those may have changed since.
    pub hot: &'a PDDeploymentSpec,
    /// What the first one names.
    pub found: &'a Found,
    /// What the routers do with new requests.
    pub traffic: Traffic,
}

/// The process in a slot, among all of them.
pub fn process(made: Made<'_>, machine: &Machine, slot: &Slot, slots: &[Slot]) -> Process {
    let (program, args) = match slot.role {
        Role::Prefill => (
            &machine.engine,
            engine(made, machine, &made.spec.prefill, "prefill", slot),
        ),
        Role::Decode => (
            &machine.engine,
            engine(made, machine, &made.spec.decode, "decode", slot),
        ),
        Role::Router => (&machine.router, router(made, machine, slot, slots)),
    };
    Process {
        name: slot.name.clone(),
        program: program.clone(),
        args: args.0,
        ops: slot.ops,
        door: (slot.role == Role::Router).then(|| machine.door.clone()),
    }
}

fn engine(made: Made<'_>, machine: &Machine, of: &EngineRole, role: &str, slot: &Slot) -> Args {
    let spec = made.spec;
    let mut args = Args::default();
    args.add("--role", role);
    args.add("--model", &made.found.model);
    args.add("--served-name", &spec.model.name);
    if !spec.model.revision.is_empty() {
        args.add("--model-revision", &spec.model.revision);
    }
    args.add("--backend", backend(of.backend));
    args.add("--listen", slot.listen.to_string());
    if let Some(data) = slot.data {
        args.add("--data-listen", data.to_string());
    }
    args.ports(machine, slot);
    if let Some(threads) = machine.threads {
        args.add("--threads", threads.to_string());
    }
    args.add("--tensor-parallel", of.parallelism.tensor.to_string());
    args.add("--kv-memory-mib", machine.kv_memory_mib.to_string());
    args.add("--page-tokens", spec.kv_cache.page_tokens.to_string());
    args.rest(made, machine, slot);
    args
}

fn router(made: Made<'_>, machine: &Machine, slot: &Slot, slots: &[Slot]) -> Args {
    let (spec, found) = (made.spec, made.found);
    let mut args = Args::default();
    args.add("--listen", slot.listen.to_string());
    args.add("--listen-fd", machine.door.fd.to_string());
    if let Some(keys) = &found.front.api_key_file {
        args.add("--api-key-file", keys);
    }
    if let Some((cert, key)) = &found.front.tls {
        args.add("--tls-cert", cert);
        args.add("--tls-key", key);
    }
    args.ports(machine, slot);
    args.add("--model-name", &spec.model.name);
    args.add("--tokenizer", &found.model);
    for engine in slots {
        match engine.role {
            Role::Prefill => args.add("--prefill", engine.listen.to_string()),
            Role::Decode => args.add("--decode", engine.listen.to_string()),
            Role::Router => {}
        }
    }
    match made.traffic {
        Traffic::Admit => {}
        Traffic::Reject => args.add("--traffic", "reject"),
        Traffic::Queue { until } => {
            args.add("--traffic", "queue");
            args.add("--traffic-until", until.to_string());
        }
    }
    args.rest(made, machine, slot);
    args
}

fn backend(backend: Backend) -> &'static str {
    match backend {
        Backend::Auto => "auto",
        Backend::Cpu => "cpu",
    }
}

/// The API's times are seconds, and none is negative.
pub fn seconds(seconds: i32) -> Duration {
    Duration::from_secs(seconds.max(0).unsigned_abs().into())
}

#[derive(Default)]
struct Args(Vec<OsString>);

impl Args {
    fn add(&mut self, name: &str, value: impl Into<OsString>) {
        self.0.push(name.into());
        self.0.push(value.into());
    }

    fn ports(&mut self, machine: &Machine, slot: &Slot) {
        self.add("--admin-listen", slot.admin.to_string());
        self.add("--admin-token-file", &machine.token_file);
        self.add("--ops-listen", slot.ops.to_string());
    }

    /// What all have, knobs among it.
    fn rest(&mut self, made: Made<'_>, machine: &Machine, slot: &Slot) {
        if let Some(tokens) = made.spec.model.max_length_tokens {
            self.add("--max-length-tokens", tokens.to_string());
        }
        for knob in knobs::of(made.hot, slot.role.into()) {
            match knob.value.as_str() {
                // flags that take none
                "true" => self.0.push(format!("--{}", knob.flag).into()),
                "false" => {}
                value => self.add(&format!("--{}", knob.flag), value),
            }
        }
        let drain = seconds(made.spec.timeouts.drain_seconds);
        self.add("--drain-ms", drain.as_millis().to_string());
        if let Some(endpoint) = &machine.traces.otlp_endpoint {
            self.add("--otlp-endpoint", endpoint);
            self.add("--trace-sample", machine.traces.trace_sample.to_string());
        }
        self.add("--log-format", "text");
    }
}

#[cfg(test)]
mod tests {
    use tandem_crds::{
        EngineKnobs, Model, ModelSource, OnPrefillFailure, PrefixCache, PrefixCacheMode, PvcSource, RouterPolicy,
        Timeouts,
    };

    use super::super::names::Front;
    use super::super::slots::{self, ports_needed};
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
            threads: None,
            kv_memory_mib: 512,
            token_file: "/state/admin-token".into(),
            traces: TraceFlags {
                otlp_endpoint: None,
                trace_sample: 1.0,
            },
            door: Door {
                fd: 9,
                socket: Weak::new(),
            },
        }
    }

    fn slots_of(spec: &PDDeploymentSpec) -> Vec<Slot> {
        let ports: Vec<u16> = (20_000..).take(ports_needed(spec)).collect();
        slots::slots(spec, SocketAddr::from(([127, 0, 0, 1], 8080)), &ports).unwrap()
    }

    /// All processes, prefills first and the router last.
    fn processes(spec: &PDDeploymentSpec, machine: &Machine) -> Vec<Process> {
        made(spec, spec, machine, &Front::default(), Traffic::Admit)
    }

    fn made(
        spec: &PDDeploymentSpec,
        hot: &PDDeploymentSpec,
        machine: &Machine,
        front: &Front,
        traffic: Traffic,
    ) -> Vec<Process> {
        let found = Found {
            model: "/models/m.gguf".into(),
            front: front.clone(),
        };
        let made = Made {
            spec,
            hot,
            found: &found,
            traffic,
        };
        let slots = slots_of(spec);
        slots.iter().map(|slot| process(made, machine, slot, &slots)).collect()
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
        for process in processes(&spec(), &machine) {
            assert_eq!(values(&process, "--otlp-endpoint"), [""; 0]);
        }
        machine.traces.otlp_endpoint = Some("http://127.0.0.1:4317".into());
        machine.traces.trace_sample = 0.25;
        for process in processes(&spec(), &machine) {
            assert_eq!(value(&process, "--otlp-endpoint"), "http://127.0.0.1:4317");
            assert_eq!(value(&process, "--trace-sample"), "0.25");
        }
    }

    #[test]
    fn a_slot_is_missing_or_the_router_does_not_know_an_engine() {
        let mut spec = spec();
        spec.prefill.replicas = 2;
        spec.decode.replicas = 3;
        let slots = slots_of(&spec);
        let names: Vec<&str> = slots.iter().map(|slot| slot.name.as_str()).collect();
        assert_eq!(
            names,
            ["prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2", "router"]
        );
        let all = processes(&spec, &machine());
        let router = &all[5];
        let listens = |slots: &[Slot]| slots.iter().map(|slot| slot.listen.to_string()).collect::<Vec<_>>();
        assert_eq!(values(router, "--prefill"), listens(&slots[..2]));
        assert_eq!(values(router, "--decode"), listens(&slots[2..5]));
        assert_eq!(value(router, "--listen"), "127.0.0.1:8080");
        assert_eq!(value(router, "--listen-fd"), "9");
        assert!(all.iter().take(5).all(|engine| engine.door.is_none()) && router.door.is_some());
        assert_eq!(value(router, "--tokenizer"), "/models/m.gguf");
    }

    #[test]
    fn a_port_is_given_twice() {
        let mut spec = spec();
        spec.prefill.replicas = 3;
        spec.decode.replicas = 2;
        let slots = slots_of(&spec);
        let mut ports: Vec<u16> = slots.iter().flat_map(Slot::ports).collect();
        for (process, slot) in processes(&spec, &machine()).iter().zip(&slots) {
            assert_eq!(value(process, "--ops-listen"), slot.ops.to_string());
            assert_eq!(value(process, "--listen"), slot.listen.to_string());
            assert_eq!(value(process, "--admin-listen"), slot.admin.to_string());
            let data: Vec<String> = slot.data.iter().map(ToString::to_string).collect();
            assert_eq!(values(process, "--data-listen"), data);
        }
        let given = ports.len();
        ports.sort_unstable();
        ports.dedup();
        assert_eq!((given, ports.len()), (ports_needed(&spec) + 1, given));
        assert!(!ports.contains(&0));
        slots::slots(&spec, slots[5].listen, &[1, 2]).unwrap_err();
        let moved = slots[5].moved(&[1, 2]);
        assert_eq!(moved.ports().collect::<Vec<_>>(), [8080, 1, 2]);
    }

    #[test]
    fn every_process_gets_the_token_and_the_router_alone_keys_and_certificate() {
        let spec = spec();
        let bare = processes(&spec, &machine());
        let front = Front {
            api_key_file: Some("keys".into()),
            tls: Some(("cert.pem".into(), "key.pem".into())),
        };
        let locked = made(&spec, &spec, &machine(), &front, Traffic::Admit);
        for process in bare.iter().chain(&locked) {
            assert_eq!(value(process, "--admin-token-file"), "/state/admin-token");
        }
        for (flag, given) in [
            ("--api-key-file", "keys"),
            ("--tls-cert", "cert.pem"),
            ("--tls-key", "key.pem"),
        ] {
            assert!(bare.iter().all(|process| values(process, flag).is_empty()));
            let with: Vec<_> = locked.iter().map(|process| values(process, flag)).collect();
            assert_eq!(with, [vec![], vec![], vec![given.to_owned()]], "{flag}");
        }
    }

    #[test]
    fn a_router_that_starts_during_a_change_lets_requests_through() {
        let spec = spec();
        let until = "2026-01-31T12:00:00Z".parse().unwrap();
        for (traffic, expected) in [
            (Traffic::Admit, [vec![], vec![]]),
            (Traffic::Reject, [vec!["reject"], vec![]]),
            (Traffic::Queue { until }, [vec!["queue"], vec!["2026-01-31T12:00:00Z"]]),
        ] {
            let all = made(&spec, &spec, &machine(), &Front::default(), traffic);
            assert_eq!(
                ["--traffic", "--traffic-until"].map(|flag| values(&all[2], flag)),
                expected
            );
        }
    }

    #[test]
    fn a_process_starts_with_knobs_that_have_changed_since() {
        let spec = spec();
        let mut hot = spec.clone();
        hot.decode.knobs.max_running = 7;
        hot.router.policy = RouterPolicy::RoundRobin;
        hot.timeouts.drain_seconds = 1;
        let all = made(&spec, &hot, &machine(), &Front::default(), Traffic::Admit);
        assert_eq!(value(&all[1], "--max-running"), "7");
        assert_eq!(value(&all[2], "--policy"), "round-robin");
        assert_eq!(value(&all[1], "--drain-ms"), "90000", "no knob");
    }

    #[test]
    fn only_prefill_serves_pages() {
        let all = processes(&spec(), &machine());
        assert_eq!(values(&all[0], "--data-listen").len(), 1);
        assert_eq!(values(&all[1], "--data-listen").len(), 0);
        assert_eq!(
            (value(&all[0], "--role"), value(&all[1], "--role")),
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
        let all = processes(&spec, &machine());
        for engine in &all[..2] {
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
        let router = &all[2];
        for (flag, expected) in [("--queue-ms", "1000"), ("--drain-ms", "7000"), ("--request-ms", "9000")] {
            assert_eq!(value(router, flag), expected, "{flag}");
        }
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
        let all = processes(&spec, &machine);
        let (prefill, decode, router) = (&all[0], &all[1], &all[2]);
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
            assert_eq!(value(&processes(&spec, &machine())[2], "--policy"), expected);
        }
        for (policy, expected) in [
            (OnPrefillFailure::Retry, "retry"),
            (OnPrefillFailure::Recompute, "recompute"),
            (OnPrefillFailure::Fail, "fail"),
        ] {
            let mut spec = spec();
            spec.transfer.on_prefill_failure = policy;
            assert_eq!(
                value(&processes(&spec, &machine())[2], "--on-prefill-failure"),
                expected
            );
        }
    }
}
