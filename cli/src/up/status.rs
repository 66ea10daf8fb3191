//! `tandem status`: what runs, by its state file and by its own word.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};
use tandem_crds::status::{HistoryEntry, Step};
use tandem_wire::proto::engine_client::EngineClient;
use tandem_wire::proto::{EngineInfo, Knobs, Load, WatchLoadRequest};
use tokio::time::timeout;

use super::slots::Role;
use super::state::{self, Phase, ProcessState, State};
use super::{UpError, probe, stack};
use crate::console::with_causes;

/// For each question to a process: it answers from memory.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What is said of the whole.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    name: String,
    phase: Phase,
    ready: bool,
    pid: u32,
    url: String,
    model: String,
    /// The revision that serves; empty before the first.
    revision: String,
    /// What a change is at; `Settled` where none is under way.
    step: Step,
    /// The changes so far, newest first.
    history: Vec<HistoryEntry>,
    processes: Vec<Process>,
}

#[derive(Debug, Serialize)]
struct Process {
    #[serde(flatten)]
    known: ProcessState,
    /// Why it is not ready, by its own word.
    reason: Option<String>,
    load: Option<Value>,
    /// In effect now.
    knobs: Option<Value>,
}

/// Prints it; true where everything is ready.
pub async fn show(dir: &Path, json: bool) -> Result<bool, UpError> {
    let status = look(state::running(dir)?).await?;
    let text = if json {
        serde_json::to_string_pretty(&status).unwrap_or_default()
    } else {
        describe(&status)
    };
    let _ = writeln!(std::io::stdout(), "{text}");
    Ok(status.ready)
}

async fn look(state: State) -> Result<Status, UpError> {
    let client = reqwest::Client::builder()
        .no_proxy()
        .timeout(TIMEOUT)
        .build()
        .map_err(|error| UpError::Orders(with_causes(&error)))?;
    let url = format!("{}/v1", stack::base_url(&state));
    let asked = state.processes.into_iter().map(|known| process(&client, known));
    let processes = futures::future::join_all(asked).await;
    Ok(Status {
        ready: state.phase == Phase::Ready && processes.iter().all(|process| process.known.ready),
        name: state.name,
        phase: state.phase,
        pid: state.pid,
        url,
        model: state.model,
        revision: state.revision,
        step: state.step,
        history: state.history,
        processes,
    })
}

/// What the supervisor saw last may be old; the process's own word counts.
async fn process(client: &reqwest::Client, mut known: ProcessState) -> Process {
    let said = if known.pid.is_some() {
        probe::once(client, known.ops).await
    } else {
        Err("it does not run".to_owned())
    };
    let reason = match said {
        Ok(None) => None,
        Ok(Some(health)) => {
            known.loading = health.loading;
            Some(health.reason.unwrap_or_else(|| "loading".to_owned()))
        }
        Err(reason) => Some(reason),
    };
    known.ready = reason.is_none();
    let engine = known.ready && known.role != Role::Router;
    let (load, info) = if engine {
        tokio::join!(
            timeout(TIMEOUT, load(known.listen)),
            timeout(TIMEOUT, stack::info(known.listen))
        )
    } else {
        (Ok(None), Ok(Err(String::new())))
    };
    Process {
        known,
        reason,
        load: load.ok().flatten().as_ref().map(load_json),
        knobs: info
            .ok()
            .and_then(Result::ok)
            .and_then(|info: EngineInfo| info.knobs)
            .as_ref()
            .map(knobs_json),
    }
}

async fn load(listen: SocketAddr) -> Option<Load> {
    let mut client = EngineClient::connect(format!("http://{listen}")).await.ok()?;
    let loads = client.watch_load(WatchLoadRequest::default()).await.ok()?;
    loads.into_inner().message().await.ok()?
}

fn load_json(load: &Load) -> Value {
    json!({
        "running": load.running,
        "waiting": load.waiting,
        "transferring": load.transferring,
        "maxRunning": load.max_running,
        "freePages": load.free_pages,
        "totalPages": load.total_pages,
        "draining": load.draining,
    })
}

/// In effect, by name.
pub fn knobs_json(knobs: &Knobs) -> Value {
    json!({
        "chunkedPrefillTokens": knobs.chunked_prefill_tokens,
        "maxRunning": knobs.max_running,
        "stepTokens": knobs.step_tokens,
        "prefixCache": knobs.prefix_cache,
        "prefillQueue": knobs.prefill_queue,
        "queueMs": knobs.queue_ms,
        "rendezvousMs": knobs.rendezvous_ms,
        "progressMs": knobs.progress_ms,
        "stallMs": knobs.stall_ms,
        "watchdogMs": knobs.watchdog_ms,
        "leaseMs": knobs.lease_ms,
    })
}

fn describe(status: &Status) -> String {
    let phase = match (status.phase, status.ready) {
        (Phase::Ready, true) => "ready",
        (Phase::Ready, false) => "not ready",
        (Phase::Starting, _) => "starting",
        (Phase::Stopping, _) => "stopping",
    };
    let mut text = format!(
        "{}: {phase}, process {}, {}, model {}\n  revision {}, step {:?}",
        status.name, status.pid, status.url, status.model, status.revision, status.step
    );
    if let Some(last) = status.history.first().filter(|last| !last.failure.is_empty()) {
        let _ = write!(
            text,
            "\n  revision {} was not kept ({:?}): {}",
            last.revision, last.outcome, last.failure
        );
    }
    for process in &status.processes {
        let known = &process.known;
        let pid = known.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let state = match (&process.reason, known.loading) {
            (None, _) => "ready".to_owned(),
            (Some(_), Some(percent)) => format!("loading {percent} %"),
            (Some(reason), None) => format!("not ready: {reason}"),
        };
        let _ = write!(
            text,
            "\n  {:<10} process {pid}, {state}, {} restarts; listens on {}, admin {}, health {}",
            known.name, known.restarts, known.listen, known.admin, known.ops
        );
        for (what, values) in [("load", &process.load), ("knobs", &process.knobs)] {
            if let Some(Value::Object(values)) = values {
                let values: Vec<_> = values.iter().map(|(name, value)| format!("{name} {value}")).collect();
                let _ = write!(text, "\n             {what}: {}", values.join(", "));
            }
        }
    }
    text
}
