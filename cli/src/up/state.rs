//! What runs, written where other commands find it: `state.json` beside a lock that is held while it is true.

use std::fs::{File, TryLockError};
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tandem_crds::PDDeploymentSpec;
use tandem_crds::status::{HistoryEntry, Step};
use tandem_secrets::Token;

use super::UpError;
use super::slots::{Role, Slot};

/// A command that only looks may hold the lock for a moment.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(25);

/// What runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    /// The supervisor.
    pub pid: u32,
    pub phase: Phase,
    /// The deployment's name.
    pub name: String,
    /// What requests name as `model`.
    pub model: String,
    /// Where the router listens.
    pub http: SocketAddr,
    /// Clients speak TLS with it.
    pub tls: bool,
    /// Clients need a key.
    pub api_keys: bool,
    pub log_dir: Option<PathBuf>,
    /// Stopping takes at most this long.
    pub stop_seconds: u64,
    /// The revision that serves; empty before the first.
    pub revision: String,
    /// What a change is at; `Settled` where none is under way.
    pub step: Step,
    /// The changes so far, newest first.
    pub history: Vec<HistoryEntry>,
    pub processes: Vec<ProcessState>,
}

/// How far the whole is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    Starting,
    Ready,
    Stopping,
}

/// One process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessState {
    pub name: String,
    pub role: Role,
    /// None while it does not run.
    pub pid: Option<u32>,
    pub ready: bool,
    /// Percent of the model that is loaded, while it loads.
    pub loading: Option<u8>,
    pub restarts: u32,
    pub listen: SocketAddr,
    pub admin: SocketAddr,
    pub ops: SocketAddr,
}

impl ProcessState {
    pub fn not_started(slot: &Slot) -> Self {
        Self {
            name: slot.name.clone(),
            role: slot.role,
            pid: None,
            ready: false,
            loading: None,
            restarts: 0,
            listen: slot.listen,
            admin: slot.admin,
            ops: slot.ops,
        }
    }
}

/// The folder of one running deployment, locked for as long as this value lives.
#[derive(Debug)]
pub struct StateDir {
    dir: PathBuf,
    _lock: File,
}

impl StateDir {
    /// Makes the folder and takes its lock. `Ok(None)`: another process holds it.
    pub fn take(dir: &Path) -> std::io::Result<Option<Self>> {
        std::fs::create_dir_all(dir)?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(dir.join("lock"))?;
        for _ in 0..LOCK_TRIES {
            match lock.try_lock() {
                Ok(()) => {
                    let held = Self {
                        dir: dir.to_owned(),
                        _lock: lock,
                    };
                    held.clear();
                    return Ok(Some(held));
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Where it is.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Draws the token of all admin ports of this run into a file that only its owner may read.
    pub fn make_token(&self) -> std::io::Result<PathBuf> {
        let path = token_file(&self.dir);
        Token::make(&path)?;
        Ok(path)
    }

    /// Keeps what is to run, for who looks into it later.
    pub fn keep_manifest(&self, name: &str, spec: &PDDeploymentSpec) -> std::io::Result<()> {
        let manifest = json!({"name": name, "spec": spec});
        std::fs::write(manifest_file(&self.dir), serde_json::to_vec_pretty(&manifest)?)
    }

    /// Replaces the state, whole: a reader sees the old one or the new one.
    pub fn write(&self, state: &State) -> std::io::Result<()> {
        let temporary = self.dir.join("state.json.new");
        let mut file = File::create(&temporary)?;
        file.write_all(&serde_json::to_vec_pretty(state)?)?;
        drop(file);
        std::fs::rename(temporary, self.dir.join("state.json"))
    }

    fn clear(&self) {
        let _ = std::fs::remove_file(self.dir.join("state.json"));
        let _ = std::fs::remove_file(token_file(&self.dir));
        let _ = std::fs::remove_file(manifest_file(&self.dir));
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Where the token of a deployment's admin ports lies while it runs.
pub fn token_file(dir: &Path) -> PathBuf {
    dir.join("admin-token")
}

fn manifest_file(dir: &Path) -> PathBuf {
    dir.join("manifest.json")
}

/// What is to run in `dir`: a deployment's name and its spec.
pub fn manifest(dir: &Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(manifest_file(dir)).ok()?).ok()
}

/// The state last written in `dir`, if any.
pub fn read(dir: &Path) -> Option<State> {
    serde_json::from_slice(&std::fs::read(dir.join("state.json")).ok()?).ok()
}

/// What runs from `dir`.
pub fn running(dir: &Path) -> Result<State, UpError> {
    let held = is_held(dir).map_err(|source| UpError::State {
        dir: dir.to_owned(),
        source,
    })?;
    // between taking the lock and writing its state the supervisor only checks its arguments
    held.then(|| read(dir))
        .flatten()
        .ok_or_else(|| UpError::NotRunning { dir: dir.to_owned() })
}

/// Whether a process holds `dir`'s lock. A state file alone proves nothing: its writer may have been killed.
pub fn is_held(dir: &Path) -> std::io::Result<bool> {
    let lock = match File::open(dir.join("lock")) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        opened => opened?,
    };
    match lock.try_lock_shared() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        State {
            pid: 42,
            phase: Phase::Ready,
            name: "chat".into(),
            model: "m".into(),
            http: SocketAddr::from(([127, 0, 0, 1], 8080)),
            tls: false,
            api_keys: true,
            log_dir: None,
            stop_seconds: 10,
            revision: "5f1c-00".into(),
            step: Step::Settled,
            history: Vec::new(),
            processes: vec![ProcessState {
                name: "prefill-0".into(),
                role: Role::Prefill,
                pid: Some(43),
                ready: true,
                loading: None,
                restarts: 0,
                listen: SocketAddr::from(([127, 0, 0, 1], 1)),
                admin: SocketAddr::from(([127, 0, 0, 1], 3)),
                ops: SocketAddr::from(([127, 0, 0, 1], 2)),
            }],
        }
    }

    #[test]
    fn one_folder_is_held_once_and_cleared_when_let_go() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("deep/er");
        assert!(!is_held(&dir).unwrap());
        let held = StateDir::take(&dir).unwrap().unwrap();
        held.write(&state()).unwrap();
        let token = held.make_token().unwrap();
        assert!(token.exists());
        assert_eq!(read(&dir), Some(state()));
        assert!(is_held(&dir).unwrap());
        assert!(StateDir::take(&dir).unwrap().is_none());
        drop(held);
        assert!(!is_held(&dir).unwrap());
        assert_eq!(read(&dir), None);
        assert!(!token.exists());
    }

    #[test]
    fn a_state_left_by_a_killed_process_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("state.json"), serde_json::to_vec(&state()).unwrap()).unwrap();
        assert!(!is_held(dir.path()).unwrap());
        let _held = StateDir::take(dir.path()).unwrap().unwrap();
        assert_eq!(read(dir.path()), None);
    }
}
