//! The manifest's file, watched: an edit of it is a change like any other.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tandem_crds::{Manifest, PDDeploymentSpec};
use tokio::time::{Interval, MissedTickBehavior, interval};

use super::UpError;

/// Between two looks at the file. It counts as edited once two looks in a row see the same new file: an editor may write it
/// in pieces.
const INTERVAL: Duration = Duration::from_millis(500);

/// One file, and how it was when it was last read.
#[derive(Debug)]
pub struct Watched {
    path: PathBuf,
    ticks: Option<Interval>,
    read: Option<Stamp>,
    /// Seen once.
    new: Option<Stamp>,
}

/// What differs where a file was written or replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    seconds: i64,
    nanos: i64,
    bytes: u64,
    inode: u64,
}

impl Watched {
    /// From before the file is read.
    pub fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            ticks: None,
            read: stamp(path),
            new: None,
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits for another edit. Cancelling it loses nothing. A file that is gone is not one that was edited.
    pub async fn edited(&mut self) {
        loop {
            let ticks = self.ticks.get_or_insert_with(|| {
                let mut ticks = interval(INTERVAL);
                ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
                ticks
            });
            ticks.tick().await;
            let now = stamp(&self.path);
            if now.is_none() || now == self.read {
                self.new = None;
            } else if now == self.new {
                self.read = self.new.take();
                return;
            } else {
                self.new = now;
            }
        }
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let found = std::fs::metadata(path).ok()?;
    Some(Stamp {
        seconds: found.mtime(),
        nanos: found.mtime_nsec(),
        bytes: found.len(),
        inode: found.ino(),
    })
}

/// What a spec comes to on one machine: one router, for there is one address that it listens on.
pub fn settle(spec: &mut PDDeploymentSpec) {
    spec.router.replicas = 1;
}

/// Whether an edit can be made while the deployment `name` of `old` runs.
pub fn check(name: &str, old: &PDDeploymentSpec, new: &Manifest) -> Result<(), UpError> {
    if new.metadata.name != name {
        return Err(UpError::Edit(format!(
            "metadata.name: {:?}: {name:?} runs here; give another deployment a --state-dir of its own",
            new.metadata.name
        )));
    }
    // The router is told of its engines when it starts.
    for (field, old, new) in [
        ("prefill", old.prefill.replicas, new.spec.prefill.replicas),
        ("decode", old.decode.replicas, new.spec.decode.replicas),
    ] {
        if old != new {
            return Err(UpError::Edit(format!(
                "spec.{field}.replicas: {new}: {old} run, and no process is added or taken away while others serve; stop the \
                 deployment and start it again"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_edit_is_missed_or_seen_twice_or_half_of_one_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("chat.yaml");
        std::fs::write(&path, "a").unwrap();
        let mut file = Watched::new(&path);
        let waits = async |file: &mut Watched| tokio::time::timeout(INTERVAL * 4, file.edited()).await.is_err();
        assert!(waits(&mut file).await);
        std::fs::write(&path, "ab").unwrap();
        file.edited().await;
        assert!(waits(&mut file).await);
        // replaced, as most editors do; with nothing in between
        std::fs::remove_file(&path).unwrap();
        assert!(waits(&mut file).await);
        std::fs::write(dir.path().join("new"), "ac").unwrap();
        std::fs::rename(dir.path().join("new"), &path).unwrap();
        file.edited().await;
        // what is still being written
        file.new = Some(Stamp {
            bytes: 1,
            ..file.read.unwrap()
        });
        std::fs::write(&path, "abcd").unwrap();
        let seen = stamp(&path);
        file.edited().await;
        assert_eq!(file.read, seen);
    }
}
