//! The process of a pod.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::{Child, Command};

use crate::cluster::peer::Peer;
use crate::cluster::servers::Reaper;

/// Of whatever kind; dropping it kills it.
#[derive(Debug)]
pub enum Process {
    /// Speaks the contracts and computes nothing.
    Peer(Peer),
    /// The shipped binary.
    Real(Child),
}

impl Process {
    /// Starts the shipped binary with its output in `log`.
    ///
    /// # Panics
    /// When the binary is not there.
    pub fn real(program: &str, args: &[String], log: &Path, reaper: &Reaper) -> Self {
        let out = File::options().create(true).append(true).open(log).expect("a log file");
        let child = Command::new(crate::bin(program))
            .args(args)
            .stdin(Stdio::null())
            .stdout(out.try_clone().expect("a second handle"))
            .stderr(out)
            .kill_on_drop(true)
            .spawn();
        let child = child.unwrap_or_else(|error| panic!("cannot start {program}: {error}"));
        if let Some(pid) = child.id() {
            reaper.ends_with_the_test(pid);
        }
        Self::Real(child)
    }

    /// Waits for an end that nobody asked for.
    pub async fn ended(&mut self) {
        match self {
            Self::Peer(peer) => peer.ended().await,
            Self::Real(child) => drop(child.wait().await),
        }
    }

    /// Asks it to end, and kills it after `grace`.
    pub async fn end(self, grace: Duration) {
        let Self::Real(mut child) = self else { return };
        if let Some(pid) = child.id().and_then(|pid| libc::pid_t::try_from(pid).ok()) {
            // SAFETY: the child is ours and was not waited for, so the pid is still its own.
            unsafe { libc::kill(pid, libc::SIGTERM) };
        }
        if tokio::time::timeout(grace, child.wait()).await.is_err() {
            let _ = child.kill().await;
        }
    }
}
