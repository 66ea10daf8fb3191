//! Engines and a router, as the CLI and the operator start them.

use std::net::SocketAddr;
use std::time::Duration;

use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::{self, EngineInfo, GenerateRequest, Load, Peer};
use tonic::transport::Channel;

use crate::process::Process;
use crate::{bin, client, eventually, free_port, model, probe};

/// From its start until an engine serves, on a busy machine.
pub const START: Duration = Duration::from_mins(1);

/// Timers that a test can wait for. Silence of 4 s means a lost peer: on two cores under full load the longest that a
/// connection's task waits for its turn is far below it.
pub const SHORT_TIMERS: &[&str] = &[
    "--keepalive-interval-ms=1000",
    "--keepalive-timeout-ms=4000",
    "--rendezvous-ms=6000",
    "--progress-ms=8000",
    "--stall-ms=3000",
    "--watchdog-ms=12000",
    "--lease-ms=8000",
];

/// The longest that anything may take to end with [`SHORT_TIMERS`]: the watchdog and two seconds.
pub const ENDS_WITHIN: Duration = Duration::from_secs(14);

/// The name under which the router serves the model.
pub const MODEL: &str = "smollm2";

/// What is planted in a process of a binary with faults.
#[derive(Debug)]
pub struct Faults(tempfile::TempDir);

impl Faults {
    /// The file's name.
    pub const FILE: &str = "faults";

    /// Nothing yet.
    pub fn none() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    /// Where the file is that the process reads; a process that runs as another user writes there too.
    pub fn folder(&self) -> &std::path::Path {
        self.0.path()
    }

    fn file(&self) -> std::path::PathBuf {
        self.folder().join(Self::FILE)
    }

    fn flag(&self) -> String {
        format!("--faults={}", self.file().display())
    }

    /// Plants these, as lines `NAME MS` or `NAME hold`, in place of what was planted; nothing clears all. Whatever reaches the
    /// process after this meets them.
    pub async fn plant(&self, lines: &[&str]) {
        let (beside, wanted) = (self.0.path().join("next"), lines.join("\n"));
        std::fs::write(&beside, &wanted).expect("a file");
        std::fs::rename(beside, self.file()).expect("a move");
        eventually(
            "the process has planted it",
            Duration::from_secs(30),
            async || match std::fs::read_to_string(self.file().with_extension("planted")) {
                Ok(planted) if planted == wanted => Ok(()),
                planted => Err(format!("{planted:?}, not {wanted:?}")),
            },
        )
        .await;
    }
}

/// An engine process.
#[derive(Debug)]
pub struct Engine {
    /// The process.
    pub process: Process,
    role: &'static str,
    program: &'static str,
    args: Vec<String>,
    control: u16,
    data: u16,
    ops: u16,
}

impl Engine {
    /// Starts an engine with short timers and waits until it is ready.
    pub async fn start(role: &'static str, flags: &[&str]) -> Self {
        let mut engine = Self::launch(role, flags);
        engine.ready().await;
        engine
    }

    /// Starts one in which `faults` can be planted.
    pub async fn start_with(faults: &Faults, role: &'static str, flags: &[&str]) -> Self {
        let flag = faults.flag();
        let mut engine = Self::launch_on(
            "tandem-engine-faults",
            role,
            free_port(),
            &[flags, &[flag.as_str()]].concat(),
        );
        engine.ready().await;
        engine
    }

    /// Starts an engine whose KV goes through a relay, and the relay.
    pub async fn start_behind_relay(role: &'static str, flags: &[&str]) -> (Self, crate::relay::Relay) {
        let data = free_port();
        let relay = crate::relay::Relay::start(SocketAddr::from(([127, 0, 0, 1], data))).await;
        let advertise = format!("--advertise-data={}", relay.addr());
        let mut engine = Self::launch_on("tandem-engine", role, data, &[flags, &[advertise.as_str()]].concat());
        engine.ready().await;
        (engine, relay)
    }

    /// Starts an engine without waiting.
    pub fn launch(role: &'static str, flags: &[&str]) -> Self {
        Self::launch_on("tandem-engine", role, free_port(), flags)
    }

    fn launch_on(program: &'static str, role: &'static str, data: u16, flags: &[&str]) -> Self {
        let (control, ops) = (free_port(), free_port());
        let mut args: Vec<String> = vec![
            format!("--role={role}"),
            format!("--model={}", model().display()),
            "--backend=cpu".into(),
            format!("--served-name={MODEL}"),
            format!("--listen=127.0.0.1:{control}"),
            format!("--data-listen=127.0.0.1:{data}"),
            format!("--ops-listen=127.0.0.1:{ops}"),
        ];
        args.extend(SHORT_TIMERS.iter().map(ToString::to_string));
        // A test's own flag replaces the one of that name.
        let given = |own: &String| flags.iter().any(|flag| flag.split('=').next() == own.split('=').next());
        args.retain(|own| !given(own));
        args.extend(flags.iter().map(ToString::to_string));
        let process = Process::start(role, &bin(program), &args);
        Self {
            process,
            role,
            program,
            args,
            control,
            data,
            ops,
        }
    }

    /// Starts it again with the same arguments, so on the same ports; the old process has to be gone.
    pub async fn restart(&mut self) {
        self.relaunch();
        self.ready().await;
    }

    /// The same without waiting.
    pub fn relaunch(&mut self) {
        assert!(self.process.exited().is_some(), "{} still runs", self.role);
        self.process = Process::start(self.role, &bin(self.program), &self.args);
    }

    /// What its `/readyz` answers: status and body.
    pub async fn readiness(&self) -> Result<(u16, String), String> {
        let answer = probe::http().get(format!("http://{}/readyz", self.ops())).send().await;
        let answer = answer.map_err(|error| error.to_string())?;
        let status = answer.status().as_u16();
        Ok((status, answer.text().await.map_err(|error| error.to_string())?))
    }

    /// Waits until it is ready.
    pub async fn ready(&mut self) {
        let url = format!("http://{}/readyz", self.ops());
        let process = &mut self.process;
        wait_ready(process, self.role, &url).await;
    }

    /// host:port of the control port.
    pub fn control(&self) -> String {
        format!("127.0.0.1:{}", self.control)
    }

    /// The address of the data port.
    pub fn data(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.data))
    }

    /// host:port of the ops port.
    pub fn ops(&self) -> String {
        format!("127.0.0.1:{}", self.ops)
    }

    /// A new connection to its control port.
    pub async fn client(&self) -> EngineClient<Channel> {
        client::connect(&self.control()).await
    }

    /// What it says it is.
    pub async fn info(&self) -> EngineInfo {
        client::info(&mut self.client().await).await
    }

    /// Its load now.
    pub async fn load(&self) -> Load {
        client::load(&mut self.client().await).await.expect("WatchLoad")
    }

    /// Its metrics now.
    pub async fn metrics(&self) -> probe::Metrics {
        probe::Metrics::of(&self.ops()).await
    }

    /// Waits until nothing runs, waits or moves and every page is free or only cached.
    pub async fn idle(&self, limit: Duration) {
        let mut client = self.client().await;
        eventually(
            &format!("{} is idle with all pages free", self.role),
            limit,
            async || {
                let load = client::load(&mut client).await.map_err(|status| status.to_string())?;
                let idle = load.running == 0 && load.waiting == 0 && load.transferring == 0;
                if idle && load.free_pages == load.total_pages {
                    Ok(())
                } else {
                    Err(format!("{load:?}"))
                }
            },
        )
        .await;
    }
}

async fn wait_ready(process: &mut Process, name: &str, url: &str) {
    let http = probe::http();
    eventually(&format!("{name} is ready"), START, async || {
        if let Some(status) = process.exited() {
            panic!("{name} ended ({status}) before it was ready:\n{}", process.tail(20));
        }
        match http.get(url).send().await {
            Ok(response) if response.status().is_success() => Ok(()),
            Ok(response) => Err(format!(
                "{} {}",
                response.status(),
                response.text().await.unwrap_or_default()
            )),
            Err(error) => Err(error.to_string()),
        }
    })
    .await;
}

/// A prefill and a decode, driven through gRPC.
#[derive(Debug)]
pub struct Pair {
    /// The prefill engine.
    pub prefill: Engine,
    /// The decode engine.
    pub decode: Engine,
}

impl Pair {
    /// Starts both with the same extra flags.
    pub async fn start(flags: &[&str]) -> Self {
        let (prefill, decode) = tokio::join!(Engine::start("prefill", flags), Engine::start("decode", flags));
        Self { prefill, decode }
    }

    /// Starts both, with the KV through a relay.
    pub async fn start_behind_relay(flags: &[&str]) -> (Self, crate::relay::Relay) {
        let ((prefill, relay), decode) = tokio::join!(
            Engine::start_behind_relay("prefill", flags),
            Engine::start("decode", flags)
        );
        (Self { prefill, decode }, relay)
    }

    /// A greedy request to decode that pulls from this prefill.
    pub async fn request(&self, prompt: &[u32], max_new_tokens: u32) -> GenerateRequest {
        let (prefill, decode) = tokio::join!(self.prefill.info(), self.decode.info());
        GenerateRequest {
            prefill: Some(Peer {
                endpoint: self.prefill.control(),
                boot_id: prefill.boot_id,
            }),
            on_prefill_failure: proto::OnPrefillFailure::Fail.into(),
            ..client::request(&decode, prompt, max_new_tokens)
        }
    }

    /// Runs such a request to its end.
    pub async fn generate(&self, prompt: &[u32], max_new_tokens: u32) -> client::Outcome {
        let request = self.request(prompt, max_new_tokens).await;
        client::generate(&mut self.decode.client().await, request).await
    }

    /// Both engines idle, with all pages free.
    pub async fn idle(&self, limit: Duration) {
        tokio::join!(self.prefill.idle(limit), self.decode.idle(limit));
    }
}

/// A router process.
#[derive(Debug)]
pub struct Router {
    /// The process.
    pub process: Process,
    http: u16,
    ops: u16,
}

impl Router {
    /// Starts a router in front of the engines and waits until it is ready.
    pub async fn start(prefill: &[&Engine], decode: &[&Engine], flags: &[&str]) -> Self {
        Self::start_program("tandem-router", prefill, decode, flags).await
    }

    /// Starts one in which `faults` can be planted.
    pub async fn start_with(faults: &Faults, prefill: &[&Engine], decode: &[&Engine], flags: &[&str]) -> Self {
        let flag = faults.flag();
        Self::start_program(
            "tandem-router-faults",
            prefill,
            decode,
            &[flags, &[flag.as_str()]].concat(),
        )
        .await
    }

    async fn start_program(program: &str, prefill: &[&Engine], decode: &[&Engine], flags: &[&str]) -> Self {
        let (http, ops) = (free_port(), free_port());
        let mut args: Vec<String> = vec![
            format!("--listen=127.0.0.1:{http}"),
            format!("--ops-listen=127.0.0.1:{ops}"),
            format!("--model-name={MODEL}"),
            format!("--tokenizer={}", model().display()),
        ];
        args.extend(prefill.iter().map(|engine| format!("--prefill={}", engine.control())));
        args.extend(decode.iter().map(|engine| format!("--decode={}", engine.control())));
        let given = |timer: &str| {
            flags
                .iter()
                .any(|flag| flag.split('=').next() == timer.split('=').next())
        };
        args.extend(
            SHORT_TIMERS[..2]
                .iter()
                .filter(|timer| !given(timer))
                .map(ToString::to_string),
        );
        args.extend(flags.iter().map(ToString::to_string));
        let mut process = Process::start("router", &bin(program), &args);
        wait_ready(&mut process, "router", &format!("http://127.0.0.1:{ops}/readyz")).await;
        Self { process, http, ops }
    }

    /// The base of its URLs, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.http)
    }

    /// host:port of the ops port.
    pub fn ops(&self) -> String {
        format!("127.0.0.1:{}", self.ops)
    }

    /// Its metrics now.
    pub async fn metrics(&self) -> probe::Metrics {
        probe::Metrics::of(&self.ops()).await
    }

    /// Waits until it can use `engines` engines.
    pub async fn sees_all(&self, engines: u32) {
        eventually("the router sees its engines", START, async || {
            let up = self.metrics().await.sum("tandem_router_upstream_up", &[]);
            if up > f64::from(engines) - 0.5 {
                Ok(())
            } else {
                Err(format!("{up}"))
            }
        })
        .await;
    }

    /// Asks for a completion of `prompt`, greedy, `max_tokens` long; gives the status and the body.
    pub async fn complete(&self, prompt: &str, max_tokens: u32) -> (u16, serde_json::Value) {
        let body = serde_json::json!({
            "model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
        });
        let response = probe::http()
            .post(format!("{}/v1/completions", self.url()))
            .json(&body)
            .send()
            .await
            .expect("the router answers");
        (response.status().as_u16(), response.json().await.expect("a JSON body"))
    }
}
