//! The whole: looked at, planned and carried out again and again, until its end; stopped in the opposite order.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tandem_crds::status::{Direction, Step};
use tandem_crds::{PDDeploymentSpec, PDDeploymentStatus};
use tandem_operator::cluster::events::transitions;
use tandem_plan::{DefaultImages, Input, Probe, Revision, Traffic, Trouble, plan, rehearsal};
use tandem_secrets::Token;
use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::{EngineInfo, GetInfoRequest};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::UpError;
use super::child::{End, Event, Order};
use super::edit::{self, Watched};
use super::kids::Kids;
use super::names::{Front, Names};
use super::ports::Ports;
use super::probe::Health;
use super::render::{Machine, seconds};
use super::signals::Signals;
use super::slots::{Role, Slot};
use super::state::{Phase, ProcessState, State, StateDir};
use super::supervise::Supervisor;
use crate::claims::hex;
use crate::console::{Console, with_causes};
use crate::manifest;

/// A process that has drained still needs a moment to exit.
pub const EXIT_GRACE: Duration = Duration::from_secs(5);
/// Asking a ready engine about itself.
const INFO_DEADLINE: Duration = Duration::from_secs(5);
/// During a change it is looked at again after this, if nothing happens before; what is not done yet shows nowhere else.
const SOON: Duration = Duration::from_millis(200);
/// Otherwise.
const SETTLED: Duration = Duration::from_secs(10);
/// So many passes in a row may change something, each at once after the other; more than any change has steps.
const BRISK: u32 = 200;

/// The deployment beside its processes.
#[derive(Debug)]
pub struct Setup {
    /// The deployment's name.
    pub deployment: String,
    pub spec: PDDeploymentSpec,
    /// Where the spec was read from.
    pub file: Watched,
    pub names: Names,
    pub machine: Machine,
    pub slots: Vec<Slot>,
    /// What the machine's door is made of.
    pub listener: Arc<TcpListener>,
    /// The slots' ports, held until a process takes them.
    pub ports: Ports,
    /// Of all admin ports.
    pub token: Token,
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
    pub(super) spec: PDDeploymentSpec,
    generation: i64,
    /// The planner's own memory.
    pub(super) status: PDDeploymentStatus,
    pub(super) revisions: Vec<Revision>,
    images: DefaultImages,
    pub(super) kids: Kids,
    pub(super) probes: JoinSet<Probe>,
    /// What the one that runs is about.
    pub(super) probing: Option<(String, String)>,
    began: Instant,
    pub(super) file: Watched,
    pub(super) names: Names,
    pub(super) machine: Machine,
    pub(super) slots: Vec<Slot>,
    /// Clients' connections wait in it while no router takes them; none once all is stopping.
    listener: Option<Arc<TcpListener>>,
    pub(super) ports: Ports,
    pub(super) token: String,
    pub(super) http: reqwest::Client,
    pub(super) supervisor: Supervisor,
    console: Console,
    name_width: usize,
    pub(super) state: State,
    held: StateDir,
    background: bool,
}

impl Stack {
    pub fn new(setup: Setup, held: StateDir, console: Console) -> Result<Self, UpError> {
        let slots = setup.slots;
        let http = slots
            .last()
            .map_or(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), |router| router.listen);
        let state = State {
            pid: std::process::id(),
            phase: Phase::Starting,
            name: setup.deployment,
            model: setup.spec.model.name.clone(),
            http,
            tls: setup.front.tls.is_some(),
            api_keys: setup.front.api_key_file.is_some(),
            log_dir: setup.log_dir,
            stop_seconds: stop_seconds(&setup.spec),
            revision: String::new(),
            step: Step::Admit,
            history: Vec::new(),
            processes: slots.iter().map(ProcessState::not_started).collect(),
        };
        let client = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build();
        Ok(Self {
            spec: setup.spec,
            generation: 1,
            status: PDDeploymentStatus::default(),
            revisions: Vec::new(),
            // Every role runs what lies beside this program.
            images: DefaultImages {
                engine: String::new(),
                router: String::new(),
            },
            kids: Kids::default(),
            probes: JoinSet::new(),
            probing: None,
            began: Instant::now(),
            file: setup.file,
            names: setup.names,
            machine: setup.machine,
            name_width: slots.iter().map(|slot| slot.name.len()).max().unwrap_or(0),
            slots,
            listener: Some(setup.listener),
            ports: setup.ports,
            token: setup.token.text().to_owned(),
            http: client.map_err(|error| UpError::Orders(with_causes(&error)))?,
            supervisor: Supervisor::new(),
            console,
            state,
            held,
            background: setup.background,
        })
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
        match self.follow().await {
            Err(error) => error,
            Ok(never) => match never {},
        }
    }

    async fn follow(&mut self) -> Result<std::convert::Infallible, UpError> {
        self.write_state()?;
        let mut in_a_row = 0;
        loop {
            let changed = self.pass().await?;
            in_a_row = if changed { in_a_row + 1 } else { 0 };
            let rollout = self.status.rollout.as_ref();
            let moves = rollout.is_some_and(|rollout| rollout.direction != Direction::Held);
            let again = match (changed, moves) {
                (true, _) if in_a_row < BRISK => Duration::ZERO,
                (false, false) => SETTLED,
                _ => SOON,
            };
            let mut wake = std::pin::pin!(sleep(again));
            loop {
                tokio::select! {
                    (index, event) = self.supervisor.next() => {
                        // Neither of these changes what there is to do.
                        let says = matches!(event, Event::Line(_) | Event::Health(_));
                        self.on(index, event)?;
                        if !says {
                            break;
                        }
                    }
                    Some(probed) = self.probes.join_next() => {
                        if let Ok(probe) = probed {
                            self.probing = None;
                            self.kids.probe = Some(probe);
                        }
                        break;
                    }
                    () = self.file.edited() => {
                        self.edit()?;
                        break;
                    }
                    () = &mut wake => break,
                }
            }
        }
    }

    /// Looks, plans and carries out. Whether anything came of it.
    async fn pass(&mut self) -> Result<bool, UpError> {
        let age = if self.status.rollout.is_some() { SOON } else { SETTLED };
        self.kids.ask(&self.http, &self.token, age).await;
        let world = self.kids.world(&self.revisions);
        let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
        let plan = plan(Input {
            now,
            generation: self.generation,
            deleting: None,
            spec: &self.spec,
            status: &self.status,
            images: &self.images,
            revisions: &self.revisions,
            world: &world,
        });
        let changed = self.carry(&plan).await?;
        self.take(plan.status).await?;
        Ok(changed)
    }

    /// Takes a new status over, and tells what changed as the operator's events do.
    async fn take(&mut self, status: PDDeploymentStatus) -> Result<(), UpError> {
        for told in transitions(&self.status, &status) {
            self.console
                .say(&format!("{} {}: {}", told.action, told.reason, told.note));
        }
        let first = self.status.revisions.running.is_empty();
        self.status = status;
        if let Some(rollout) = &self.status.rollout
            && rollout.direction == Direction::Held
            && first
        {
            return Err(UpError::Held(rollout.failure.clone()));
        }
        let running = self.status.revisions.running.clone();
        let runs_new = running != self.state.revision;
        if let Some(revision) = self.stored(&running).filter(|_| runs_new) {
            let model = revision.spec.model.name.clone();
            self.state.api_keys = self.names.has_keys(&revision.spec);
            self.state.model = model;
        }
        if first && runs_new {
            self.say_ready().await;
            self.state.phase = Phase::Ready;
        }
        let shown = (&self.state.revision, self.state.step, &self.state.history);
        if shown != (&running, self.status.step, &self.status.history) {
            self.state.revision = running;
            self.state.step = self.status.step;
            self.state.history.clone_from(&self.status.history);
            // Last, for others act on it, even by a signal.
            self.write_state()?;
        }
        Ok(())
    }

    async fn say_ready(&self) {
        self.say_engines().await;
        let seconds = self.began.elapsed().as_secs_f64();
        self.console
            .say(&format!("{} is ready after {seconds:.1} s", self.state.name));
        self.console.say(&banner(&self.state));
        if !self.background {
            self.console.say(&format!(
                "Ctrl-C stops it, or from elsewhere: tandem down --state-dir {}\n",
                self.held.dir().display()
            ));
        }
    }

    /// The file was written: what it asks for now is made so, or refused.
    fn edit(&mut self) -> Result<(), UpError> {
        let file = self.file.path().display().to_string();
        let spec = match self.read() {
            Ok(spec) if spec == self.spec => return Ok(()),
            Ok(spec) => spec,
            Err(error) => {
                self.console
                    .say(&format!("the edit of {file} is refused, what runs goes on: {error}"));
                return Ok(());
            }
        };
        let runs = self.stored(&self.status.revisions.running).map(|runs| &runs.spec);
        let steps = rehearsal::tell(runs, &spec);
        self.console.say(&format!("{file} was edited: {steps}"));
        let kept = self.held.keep_manifest(&self.state.name, &spec);
        kept.map_err(|source| UpError::System {
            what: "keep the manifest",
            source,
        })?;
        // Processes of both may have to be stopped.
        self.state.stop_seconds = stop_seconds(&spec).max(self.state.stop_seconds);
        self.spec = spec;
        self.generation += 1;
        Ok(())
    }

    /// Reads the file, and checks all that can be checked at once.
    fn read(&self) -> Result<PDDeploymentSpec, UpError> {
        let mut object = manifest::load(self.file.path())?;
        edit::settle(&mut object.spec);
        edit::check(&self.state.name, &self.spec, &object)?;
        self.names.find(&object.spec)?;
        Ok(object.spec)
    }

    fn on(&mut self, index: usize, event: Event) -> Result<(), UpError> {
        let Some(kid) = self.kids.of_index(index) else {
            return Ok(());
        };
        let name = kid.slot.name.clone();
        let state = &mut kid.shown;
        let restarts = state.restarts;
        if matches!(
            event,
            Event::Started { .. } | Event::Died { .. } | Event::GaveUp { .. } | Event::Stopped { .. }
        ) {
            // What was said of it was said of another process.
            (kid.facts, kid.asked) = (None, None);
            *state = ProcessState {
                restarts,
                ..ProcessState::not_started(&kid.slot)
            };
            self.console.loaded(&name);
        }
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
                let again = if restarts > 0 { " again" } else { "" };
                self.console.loaded(&name);
                self.console
                    .say(&format!("{name} is ready{again} after {:.1} s", after.as_secs_f64()));
            }
            Event::Died {
                end,
                last_lines,
                restart_in,
            } => {
                state.restarts += 1;
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
                let failure = ChildFailure {
                    name,
                    end,
                    last_lines,
                    deaths,
                    was_ready,
                };
                return self.gave_up(index, failure);
            }
            Event::Stopped { killed } => {
                let uid = kid.uid;
                self.kids.remove(uid);
                self.console
                    .say(&format!("{name} {}", if killed { "was killed" } else { "stopped" }));
            }
        }
        self.write_state()
    }

    /// A child has ended for good. Of what runs, that is the end of the whole; of a change, it is the change's.
    fn gave_up(&mut self, index: usize, failure: ChildFailure) -> Result<(), UpError> {
        let running = self.stored(&self.status.revisions.running).cloned();
        let Some(kid) = self.kids.of_index(index) else {
            return Ok(());
        };
        if kid.stopping {
            let uid = kid.uid;
            self.kids.remove(uid);
        } else if running.is_some_and(|running| running.hash(kid.role()) != kid.revision) {
            kid.trouble = Some(Trouble {
                reason: Trouble::GAVE_UP.to_owned(),
                message: failure.to_string(),
            });
        } else {
            return Err(UpError::Child(failure));
        }
        self.write_state()
    }

    /// Router first: it lets its requests end while the engines still run.
    async fn stop(&mut self, signals: &mut Signals) {
        self.state.phase = Phase::Stopping;
        let _ = self.write_state();
        self.probes.abort_all();
        self.refuse().await;
        // From here on a client that comes is refused, not kept waiting.
        self.listener = None;
        for role in [Role::Router, Role::Decode, Role::Prefill] {
            let of_role = self.kids.all.iter().filter(|kid| kid.slot.role == role);
            let indices: Vec<usize> = of_role.filter_map(|kid| kid.index).collect();
            for &index in &indices {
                self.supervisor.order(index, Order::Stop);
            }
            while indices.iter().any(|&index| !self.supervisor.ended(index)) {
                tokio::select! {
                    signal = signals.next() => {
                        self.console.say(&format!("{signal} again: stopping at once"));
                        let all = self.kids.all.iter().filter_map(|kid| kid.index);
                        all.for_each(|index| self.supervisor.order(index, Order::Kill));
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

    /// Requests that wait for the end of a change are refused: it does not come any more.
    async fn refuse(&mut self) {
        if self.kids.order == Some(Traffic::Admit) {
            return;
        }
        for kid in self.kids.all.iter_mut().filter(|kid| kid.facts.is_some()) {
            kid.set_traffic(&self.http, &self.token, Traffic::Reject).await;
        }
    }

    async fn say_engines(&self) {
        for slot in self.slots.iter().filter(|slot| slot.role != Role::Router) {
            let line = match timeout(INFO_DEADLINE, info(slot.listen)).await {
                Ok(Ok(info)) => describe(&info),
                Ok(Err(error)) => format!("does not say what it runs: {error}"),
                Err(_) => format!("does not say what it runs within {} s", INFO_DEADLINE.as_secs()),
            };
            self.console.say(&format!("{}: {line}", slot.name));
        }
    }

    fn write_state(&mut self) -> Result<(), UpError> {
        self.state.processes = self.slots.iter().map(|slot| self.kids.shown(slot)).collect();
        self.held.write(&self.state).map_err(|source| UpError::System {
            what: "write the state file",
            source,
        })
    }
}

/// Three roles are stopped, one after the other.
fn stop_seconds(spec: &PDDeploymentSpec) -> u64 {
    let stop = seconds(spec.timeouts.drain_seconds) + EXIT_GRACE;
    Supervisor::stop_bound(stop).as_secs() * 3
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
