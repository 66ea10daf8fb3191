//! A file named by a flag.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

/// Larger files are the wrong ones.
pub const MAX_FILE_BYTES: u64 = 1 << 20;

/// A file, and the flag that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SecretFile {
    /// For errors: `--api-key-file`.
    pub flag: &'static str,
    /// Where it lies.
    pub path: PathBuf,
    /// Only its owner should read it.
    pub private: bool,
}

/// Why a file of secrets cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} {}: {problem}", file.flag, file.path.display())]
pub struct SecretError {
    /// Which.
    pub file: SecretFile,
    /// What is wrong and what would be right; never what the file holds.
    pub problem: String,
}

impl SecretFile {
    /// One that only its owner should read.
    pub fn private(flag: &'static str, path: impl Into<PathBuf>) -> Self {
        Self {
            flag,
            path: path.into(),
            private: true,
        }
    }

    /// One that anybody may read, such as a certificate.
    pub fn public(flag: &'static str, path: impl Into<PathBuf>) -> Self {
        Self {
            private: false,
            ..Self::private(flag, path)
        }
    }

    /// An error about this file.
    pub fn error(&self, problem: impl Into<String>) -> SecretError {
        SecretError {
            file: self.clone(),
            problem: problem.into(),
        }
    }

    /// All its bytes. Blocks.
    pub fn read(&self) -> Result<Vec<u8>, SecretError> {
        let unreadable = |error: io::Error| {
            self.error(format!(
                "it cannot be read: {error}; name a file that this process may read"
            ))
        };
        let found = std::fs::metadata(&self.path).map_err(unreadable)?;
        // a pipe would hold us until somebody writes to it
        if !found.is_file() {
            return Err(self.error("it is not a file"));
        }
        let mut bytes = Vec::new();
        let file = File::open(&self.path).map_err(unreadable)?;
        file.take(MAX_FILE_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(unreadable)?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(self.error(format!(
                "it has more than {MAX_FILE_BYTES} bytes; is it the right file?"
            )));
        }
        Ok(bytes)
    }

    /// Says so in the log if others than its owner may read or change it.
    pub fn warn_of_permissions(&self) {
        if !self.private {
            return;
        }
        let Ok(found) = std::fs::metadata(&self.path) else {
            return;
        };
        let mode = found.mode() & 0o777;
        if too_open(mode, found.uid()) {
            tracing::warn!(
                "{} {} has mode {mode:03o}: others than its owner may use it; chmod 600 it",
                self.flag,
                self.path.display()
            );
        }
    }
}

/// Whether others than its readers may use a file. What is root's is handed to its readers by their group: Kubernetes' way.
fn too_open(mode: u32, owner: u32) -> bool {
    let meant = if owner == 0 { 0o740 } else { 0o700 };
    mode & !meant != 0
}

#[cfg(test)]
mod tests {
    use super::too_open;

    #[test]
    fn a_secret_that_a_pod_mounts_is_not_called_open_and_a_users_own_is() {
        assert!(!too_open(0o440, 0), "as Kubernetes mounts it");
        assert!(!too_open(0o600, 1000));
        for (mode, owner) in [(0o640, 1000), (0o644, 0), (0o460, 0), (0o644, 1000)] {
            assert!(too_open(mode, owner), "{mode:o} of {owner}");
        }
    }
}
