//! What was read from files, as the files are now.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use sha2::{Digest as _, Sha256};
use tokio_util::task::AbortOnDropHandle;

use crate::file::{SecretError, SecretFile};

/// How often the files are read again: a change takes effect within about twice this.
const INTERVAL: Duration = Duration::from_secs(1);

type Parse<T> = Box<dyn Fn(&[SecretFile], &[Vec<u8>]) -> Result<T, SecretError> + Send + Sync>;

/// A value made of one or more files. While the files are broken it stays what it was. Dropping it ends the watch.
pub struct Watched<T> {
    now: Arc<RwLock<Arc<T>>>,
    _task: AbortOnDropHandle<()>,
}

impl<T> fmt::Debug for Watched<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watched(..)")
    }
}

/// The files' bytes as last read, or why they were not; for telling a change.
type Seen = Result<[u8; 32], SecretError>;

struct Files<T> {
    files: Vec<SecretFile>,
    parse: Parse<T>,
}

impl<T: Send + Sync + 'static> Watched<T> {
    /// Reads the files now, and every second from then on. Needs a tokio runtime.
    pub fn start(
        files: Vec<SecretFile>,
        parse: impl Fn(&[SecretFile], &[Vec<u8>]) -> Result<T, SecretError> + Send + Sync + 'static,
    ) -> Result<Self, SecretError> {
        let files = Arc::new(Files {
            files,
            parse: Box::new(parse),
        });
        let (bytes, seen) = files.read();
        let value = files.parse(&bytes?)?;
        files.files.iter().for_each(SecretFile::warn_of_permissions);
        let now = Arc::new(RwLock::new(Arc::new(value)));
        let task = tokio::spawn(files.follow(Arc::clone(&now), seen));
        Ok(Self {
            now,
            _task: AbortOnDropHandle::new(task),
        })
    }

    /// As the files are now, or were when they were last good.
    pub fn get(&self) -> Arc<T> {
        Arc::clone(&self.now.read())
    }
}

impl<T: Send + Sync + 'static> Files<T> {
    fn read(&self) -> (Result<Vec<Vec<u8>>, SecretError>, Seen) {
        let bytes: Result<Vec<_>, _> = self.files.iter().map(SecretFile::read).collect();
        let seen = match &bytes {
            Ok(bytes) => {
                let mut hasher = Sha256::new();
                for file in bytes {
                    hasher.update((file.len() as u64).to_le_bytes());
                    hasher.update(file);
                }
                Ok(hasher.finalize().into())
            }
            Err(error) => Err(error.clone()),
        };
        (bytes, seen)
    }

    fn parse(&self, bytes: &[Vec<u8>]) -> Result<T, SecretError> {
        (self.parse)(&self.files, bytes)
    }

    async fn follow(self: Arc<Self>, now: Arc<RwLock<Arc<T>>>, mut last: Seen) {
        loop {
            tokio::time::sleep(INTERVAL).await;
            let this = Arc::clone(&self);
            // whole files are compared: times of change are too coarse to tell two writes apart
            let Ok((bytes, seen)) = tokio::task::spawn_blocking(move || this.read()).await else {
                continue;
            };
            if seen == last {
                continue;
            }
            last = seen;
            match bytes.and_then(|bytes| self.parse(&bytes)) {
                Ok(value) => {
                    *now.write() = Arc::new(value);
                    tracing::info!("{}: changed, the new content holds from now on", self.names());
                    self.files.iter().for_each(SecretFile::warn_of_permissions);
                }
                Err(error) => tracing::error!("{error}; what was read before stays in force"),
            }
        }
    }

    fn names(&self) -> String {
        let names: Vec<_> = self
            .files
            .iter()
            .map(|file| format!("{} {}", file.flag, file.path.display()))
            .collect();
        names.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Keys;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn watch(path: &Path) -> Result<Watched<Keys>, SecretError> {
        Watched::start(vec![SecretFile::private("--api-key-file", path)], |files, bytes| {
            Keys::parse(&files[0], &bytes[0])
        })
    }

    async fn until(what: &str, holds: impl Fn() -> bool) {
        let wait = async {
            while !holds() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, wait).await.is_ok(), "{what}");
    }

    #[tokio::test]
    async fn a_change_takes_effect_and_a_broken_file_or_none_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, "sk-aaaaaaaaaaaaaaaa").unwrap();
        let keys = watch(&path).unwrap();
        assert!(keys.get().open(b"sk-aaaaaaaaaaaaaaaa"));
        std::fs::write(&path, "sk-bbbbbbbbbbbbbbbb").unwrap();
        until("the new key opens", || keys.get().open(b"sk-bbbbbbbbbbbbbbbb")).await;
        assert!(!keys.get().open(b"sk-aaaaaaaaaaaaaaaa"));
        // as an editor and as a mounted secret change it; each broken content is followed by a good one that shows that
        // it was looked at and not taken
        for (broken, next) in [("", "sk-cccccccccccccccc"), ("short", "sk-dddddddddddddddd")] {
            let before = keys.get();
            std::fs::write(&path, broken).unwrap();
            tokio::time::sleep(INTERVAL * 2).await;
            assert!(Arc::ptr_eq(&before, &keys.get()), "{broken:?} was taken");
            let new = dir.path().join("new");
            std::fs::write(&new, next).unwrap();
            std::fs::rename(&new, &path).unwrap();
            until("the next key opens", || keys.get().open(next.as_bytes())).await;
        }
        let before = keys.get();
        std::fs::remove_file(&path).unwrap();
        tokio::time::sleep(INTERVAL * 2).await;
        assert!(Arc::ptr_eq(&before, &keys.get()));
    }

    #[tokio::test]
    async fn what_cannot_be_read_at_the_start_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        let error = watch(&missing).unwrap_err().to_string();
        assert!(
            error.contains("--api-key-file") && error.contains("missing: it cannot be read"),
            "{error}"
        );
        let error = watch(dir.path()).unwrap_err().to_string();
        assert!(error.contains("is not a file"), "{error}");
        let large = dir.path().join("large");
        std::fs::write(&large, vec![b'#'; (1 << 20) + 1]).unwrap();
        let error = watch(&large).unwrap_err().to_string();
        assert!(error.contains("more than 1048576 bytes"), "{error}");
    }
}
