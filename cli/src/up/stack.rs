//! The whole: started step by step, followed, stopped in the opposite order.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::{EngineInfo, GetInfoRequest};
use tokio::time::timeout;

use super::UpError;
use super::child::{End, Event, Limits, Order};
use super::plan::{Front, Plan, Process, Role};
use super::ports::Ports;
use super::probe::Health;
use super::signals::Signals;
use super::state::{Phase, ProcessState, State, StateDir};
use super::supervise::Supervisor;
use crate::claims::hex;
use crate::console::{Console, with_causes};

/// A process that has drained still needs a moment to exit.
const EXIT_GRACE: Duration = Duration::from_secs(5);
/// Asking a ready engine about itself.
const INFO_DEADLINE: Duration = Duration::from_secs(5);

/// The deployment beside its processes.
#[derive(Debug)]
pub struct Setup {
    /// The deployment's name.
    pub deployment: String,
    /// What requests name as `model`.
    pub model: String,
    /// What stands between clients and the router.
    pub front: Front,
    /// Where each child's lines go.
    pub log_dir: Option<PathBuf>,
    /// The console is a file that nobody rolls over: children's lines are not repeated there.
    pub background: bool,
}

/// A child that ended the whole.
#[derive(Debug)]
pub struct ChildFailure {
    name: String,
    end: End,
    last_lines: Vec<String>,
    deaths: usize,
    was_ready: bool,
}

impl ChildFailure {
    /// Before anything served, the child's own code; afterwards 1.
    pub fn code(&self) -> u8 {
        if self.was_ready { 1 } else { self.end.code() }
    }
}

impl fmt::Display for ChildFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            name,
            end,
            last_lines,
            deaths,
            was_ready,
        } = self;
        if *was_ready {
            write!(f, "{name} died {deaths} times within a minute, the last time by {end}")?;
        } else {
            write!(f, "{name} ended before it was ready: {end}")?;
        }
        f.write_str(&quote(last_lines))
    }
}

fn quote(lines: &[String]) -> String {
    if lines.is_empty() {
        return "; it wrote nothing".to_owned();
    }
    let lines: String = lines.iter().flat_map(|line| ["\n    ", line]).collect();
    format!("; its last lines:{lines}")
}

/// A deployment on this machine.
#[derive(Debug)]
pub struct Stack {
    processes: Vec<Process>,
    steps: Vec<usize>,
    ports: Ports,
    supervisor: Supervisor,
    console: Console,
    name_width: usize,
    state: State,
    held: StateDir,
    background: bool,
}

impl Stack {
    pub fn new(setup: Setup, plan: &Plan, ports: Ports, held: StateDir, console: Console) -> Self {
        let limits = Limits {
            startup: plan.startup,
            stop: plan.drain + EXIT_GRACE,
        };
        let processes: Vec<Process> = plan.processes().cloned().collect();
        let http = plan
            .processes()
            .last()
            .map_or(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), |router| router.listen);
        let state = State {
            pid: std::process::id(),
            phase: Phase::Starting,
            name: setup.deployment,
            model: setup.model,
            http,
            tls: setup.front.tls.is_some(),
            api_keys: setup.front.api_key_file.is_some(),
            log_dir: setup.log_dir,
            stop_seconds: Supervisor::stop_bound(limits).as_secs() * 3,
            processes: processes.iter().map(not_started).collect(),
        };
        Self {
            steps: plan.steps.iter().map(Vec::len).collect(),
            name_width: processes.iter().map(|process| process.name.len()).max().unwrap_or(0),
            processes,
            ports,
            supervisor: Supervisor::new(limits),
            console,
            state,
            held,
            background: setup.background,
        }
    }

    /// Starts everything, follows it until a signal or a child's final death, and stops it.
    pub async fn run(mut self, mut signals: Signals) -> Result<(), UpError> {
        let result = tokio::select! {
            biased;
            signal = signals.next() => Ok(signal),
            error = self.serve() => Err(error),
        };
        if let Ok(signal) = &result {
            self.console
                .say(&format!("{signal}: stopping; once more stops at once"));
        }
        self.stop(&mut signals).await;
        result.map(|_| ())
    }

    /// Returns only with the error that ends the whole.
    async fn serve(&mut self) -> UpError {
        match self.start().await {
            Ok(()) => loop {
                let (index, event) = self.supervisor.next().await;
                if let Err(error) = self.on(index, event) {
                    break error;
                }
            },
            Err(error) => error,
        }
    }

    async fn start(&mut self) -> Result<(), UpError> {
        let began = Instant::now();
        self.write_state()?;
        let mut first = 0;
        for count in self.steps.clone() {
            let step = first..first + count;
            for index in step.clone() {
                let process = self.processes[index].clone();
                self.release_ports(&process);
                let log_dir = self.state.log_dir.clone();
                self.supervisor
                    .start(process, log_dir.as_deref())
                    .map_err(|source| UpError::Logs {
                        dir: log_dir.unwrap_or_default(),
                        source,
                    })?;
            }
            while !self.state.processes[step.clone()].iter().all(|process| process.ready) {
                let (index, event) = self.supervisor.next().await;
                self.on(index, event)?;
            }
            first += count;
        }
        self.say_engines().await;
        let seconds = began.elapsed().as_secs_f64();
        self.console
            .say(&format!("{} is ready after {seconds:.1} s", self.state.name));
        self.console.say(&banner(&self.state));
        if !self.background {
            self.console.say(&format!(
                "Ctrl-C stops it, or from elsewhere: tandem down --state-dir {}\n",
                self.held.dir().display()
            ));
        }
        // Last, for others act on it, even by a signal.
        self.state.phase = Phase::Ready;
        self.write_state()
    }

    fn release_ports(&mut self, process: &Process) {
        let addresses = process
            .args
            .iter()
            .filter_map(|arg| arg.to_str()?.parse::<SocketAddr>().ok());
        for address in addresses {
            self.ports.release(address.port());
        }
    }

    fn on(&mut self, index: usize, event: Event) -> Result<(), UpError> {
        let name = self.processes[index].name.clone();
        let state = &mut self.state.processes[index];
        match event {
            Event::Line(line) => {
                if !self.background {
                    self.console.log(&name, self.name_width, &line);
                }
                return Ok(());
            }
            Event::Started { pid } => state.pid = Some(pid),
            Event::Health(Health { loading, reason }) => {
                state.loading = loading;
                if let Some(percent) = loading {
                    self.console.loading(&name, percent);
                } else if let Some(reason) = reason {
                    self.console.say(&format!("{name} is not ready yet: {reason}"));
                }
            }
            Event::Ready { after } => {
                state.ready = true;
                state.loading = None;
                let again = if state.restarts > 0 { " again" } else { "" };
                self.console.loaded(&name);
                self.console
                    .say(&format!("{name} is ready{again} after {:.1} s", after.as_secs_f64()));
            }
            Event::Died {
                end,
                last_lines,
                restart_in,
            } => {
                *state = ProcessState {
                    restarts: state.restarts + 1,
                    ..not_started(&self.processes[index])
                };
                self.console.loaded(&name);
                let last = match &self.state.log_dir {
                    Some(dir) if self.background => format!("; its log is in {}", dir.display()),
                    _ => quote(&last_lines),
                };
                self.console.say(&format!(
                    "{name} died: {end}{last}\n{name} starts again on its port in {:.1} s",
                    restart_in.as_secs_f64()
                ));
            }
            Event::GaveUp {
                end,
                last_lines,
                deaths,
                was_ready,
            } => {
                *state = ProcessState {
                    restarts: state.restarts,
                    ..not_started(&self.processes[index])
                };
                self.console.loaded(&name);
                return Err(UpError::Child(ChildFailure {
                    name,
                    end,
                    last_lines,
                    deaths,
                    was_ready,
                }));
            }
            Event::Stopped { killed } => {
                *state = ProcessState {
                    restarts: state.restarts,
                    ..not_started(&self.processes[index])
                };
                self.console.loaded(&name);
                self.console
                    .say(&format!("{name} {}", if killed { "was killed" } else { "stopped" }));
            }
        }
        self.write_state()
    }

    /// Router first: it lets its requests end while the engines still run.
    async fn stop(&mut self, signals: &mut Signals) {
        self.state.phase = Phase::Stopping;
        let _ = self.write_state();
        for role in [Role::Router, Role::Decode, Role::Prefill] {
            let of_role: Vec<usize> = (0..self.processes.len())
                .filter(|&index| self.processes[index].role == role)
                .collect();
            for &index in &of_role {
                self.supervisor.order(index, Order::Stop);
            }
            while of_role.iter().any(|&index| !self.supervisor.ended(index)) {
                tokio::select! {
                    signal = signals.next() => {
                        self.console.say(&format!("{signal} again: stopping at once"));
                        (0..self.processes.len()).for_each(|index| self.supervisor.order(index, Order::Kill));
                    }
                    (index, event) = self.supervisor.next() => {
                        if let Err(error) = self.on(index, event) {
                            self.console.say(&format!("while stopping: {error}"));
                        }
                    }
                }
            }
        }
    }

    async fn say_engines(&self) {
        for process in self.processes.iter().filter(|process| process.role != Role::Router) {
            let line = match timeout(INFO_DEADLINE, info(process.listen)).await {
                Ok(Ok(info)) => describe(&info),
                Ok(Err(error)) => format!("does not say what it runs: {error}"),
                Err(_) => format!("does not say what it runs within {} s", INFO_DEADLINE.as_secs()),
            };
            self.console.say(&format!("{}: {line}", process.name));
        }
    }

    fn write_state(&self) -> Result<(), UpError> {
        self.held.write(&self.state).map_err(|source| UpError::System {
            what: "write the state file",
            source,
        })
    }
}

fn not_started(process: &Process) -> ProcessState {
    ProcessState {
        name: process.name.clone(),
        role: process.role,
        pid: None,
        ready: false,
        loading: None,
        restarts: 0,
        listen: process.listen,
        admin: process.admin,
        ops: process.ops,
    }
}

/// What an engine says it is.
pub async fn info(listen: SocketAddr) -> Result<EngineInfo, String> {
    let connected = EngineClient::connect(format!("http://{listen}")).await;
    let mut client = connected.map_err(|error| with_causes(&error))?;
    let info = client.get_info(GetInfoRequest {}).await;
    Ok(info.map_err(|status| status.to_string())?.into_inner())
}

fn describe(info: &EngineInfo) -> String {
    format!(
        "{} on {}, at most {} tokens, {} KV pages, file sha256 {}",
        info.model_name,
        info.backend,
        info.max_length_tokens,
        info.total_pages,
        hex(&info.model_hash)
    )
}

/// Where to send requests, and a line that does.
pub fn banner(state: &State) -> String {
    let base = base_url(state);
    let key = if state.api_keys {
        " -H \"authorization: Bearer $OPENAI_API_KEY\""
    } else {
        ""
    };
    let model = serde_json::Value::from(state.model.as_str());
    let messages = r#"[{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "What is the capital of France?"}]"#;
    let body = format!(r#"{{"model": {model}, "messages": {messages}, "max_tokens": 32, "temperature": 0}}"#);
    // Inside single quotes of a shell only the single quote itself is special.
    let body = body.replace('\'', r"'\''");
    format!(
        "\nOpenAI clients: base URL {base}/v1, model {}\n\n    curl -sS {base}/v1/chat/completions{key} -H 'content-type: application/json' -d '{body}'\n",
        state.model
    )
}

/// The URL for clients on this machine: a wildcard address is reached by loopback.
pub fn base_url(state: &State) -> String {
    let ip = match state.http.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    let scheme = if state.tls { "https" } else { "http" };
    format!("{scheme}://{}", SocketAddr::new(ip, state.http.port()))
}
