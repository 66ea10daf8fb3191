//! Whether the bytes that were found are the ones that were meant.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::LoadError;

/// Digits of a SHA-256.
const DIGITS: usize = 64;

/// A revision as flags and manifests write it: a SHA-256 in lower-case hex.
pub fn parse(text: &str) -> Result<String, String> {
    let is_hex = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if text.len() == DIGITS && is_hex {
        Ok(text.to_owned())
    } else {
        Err(format!("{text:?} is not a SHA-256 in lower-case hex, {DIGITS} digits"))
    }
}

/// Compares a model with the revision that was asked for. A file's is its SHA-256, which is its `hash` too; a folder's is that of
/// the lines which `sha256sum *` prints in it in the C locale.
pub fn check(path: &Path, expected: &str, hash: [u8; 32]) -> Result<(), LoadError> {
    let found = if path.is_dir() {
        of_folder(path).map_err(|source| LoadError::Open {
            path: path.to_owned(),
            source,
        })?
    } else {
        hex(&hash)
    };
    if found == expected {
        return Ok(());
    }
    Err(LoadError::Revision {
        path: path.to_owned(),
        found,
        expected: expected.to_owned(),
    })
}

fn of_folder(folder: &Path) -> std::io::Result<String> {
    let mut lines = Sha256::new();
    for file in files(folder)? {
        lines.update(of_file(&file)?);
        lines.update("  ");
        lines.update(file.file_name().unwrap_or_default().as_encoded_bytes());
        lines.update("\n");
    }
    Ok(hex(&lines.finalize()))
}

/// What `*` matches, in the C locale's order.
fn files(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if !hidden && entry.path().is_file() {
            files.push(entry.path());
        }
    }
    files.sort_unstable();
    Ok(files)
}

fn of_file(file: &Path) -> std::io::Result<String> {
    let mut reader = File::open(file)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let read = reader.read(&mut buffer)?;
        if read == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(&buffer[..read]);
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::with_capacity(DIGITS), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
