//! A child's output: cut into lines, shown, kept for the report of its death, written to its file.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::sync::mpsc;

/// A longer line is cut into lines of this length.
const MAX_LINE: usize = 16 * 1024;
/// A log file that has grown to this becomes `.1`, and the old `.1` goes.
const MAX_FILE: u64 = 32 * 1024 * 1024;
/// A dead child is reported with this many of its last lines.
const TAIL: usize = 20;

/// Sends each line of `from` until its end. A slow reader slows the child, as a pipe does.
pub async fn pump(mut from: impl AsyncRead + Unpin, lines: mpsc::Sender<String>) {
    let mut pending = Vec::with_capacity(4096);
    let mut chunk = [0; 4096];
    loop {
        let read = match from.read(&mut chunk).await {
            Ok(0) | Err(_) => break,
            Ok(read) => read,
        };
        pending.extend_from_slice(&chunk[..read]);
        let mut start = 0;
        loop {
            let rest = &pending[start..];
            let end = match rest.iter().position(|&byte| byte == b'\n') {
                Some(end) if end <= MAX_LINE => (end, end + 1),
                _ if rest.len() >= MAX_LINE => (MAX_LINE, MAX_LINE),
                _ => break,
            };
            if lines.send(text(&rest[..end.0])).await.is_err() {
                return;
            }
            start += end.1;
        }
        pending.drain(..start);
    }
    if !pending.is_empty() {
        let _ = lines.send(text(&pending)).await;
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim_end_matches('\r').to_owned()
}

/// The last lines of a child.
#[derive(Debug, Default)]
pub struct Tail(VecDeque<String>);

impl Tail {
    pub fn push(&mut self, line: &str) {
        if self.0.len() == TAIL {
            self.0.pop_front();
        }
        self.0.push_back(line.to_owned());
    }

    pub fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.0).into()
    }
}

/// A log file that does not grow without bound.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    file: File,
    written: u64,
}

impl LogFile {
    /// Appends to `dir/name.log`.
    pub fn open(dir: &Path, name: &str) -> std::io::Result<Self> {
        let path = dir.join(format!("{name}.log"));
        let file = File::options().create(true).append(true).open(&path)?;
        let written = file.metadata()?.len();
        Ok(Self { path, file, written })
    }

    /// Writes one line; a full disk loses lines, not the child.
    pub fn write(&mut self, line: &str) {
        if self.written >= MAX_FILE {
            let _ = std::fs::rename(&self.path, self.path.with_extension("log.1"));
            if let Ok(file) = File::options().create(true).append(true).open(&self.path) {
                self.file = file;
            }
            self.written = 0;
        }
        let line = format!("{line}\n");
        if self.file.write_all(line.as_bytes()).is_ok() {
            self.written += line.len() as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines(input: &[u8]) -> Vec<String> {
        let (sender, mut receiver) = mpsc::channel(1);
        let collect = async {
            let mut all = Vec::new();
            while let Some(line) = receiver.recv().await {
                all.push(line);
            }
            all
        };
        futures::join!(pump(input, sender), collect).1
    }

    #[tokio::test]
    async fn lines_survive_odd_bytes_and_a_missing_last_newline() {
        assert_eq!(lines(b"a\r\n\nb\xff\nlast").await, ["a", "", "b\u{fffd}", "last"]);
        assert_eq!(lines(b"").await, Vec::<String>::new());
    }

    #[tokio::test]
    async fn a_line_without_end_is_cut_and_not_collected() {
        let mut input = vec![b'x'; 3 * MAX_LINE + 5];
        input.extend_from_slice(b"\nnext\n");
        let lengths: Vec<usize> = lines(&input).await.iter().map(String::len).collect();
        assert_eq!(lengths, [MAX_LINE, MAX_LINE, MAX_LINE, 5, 4]);
    }

    #[test]
    fn the_tail_keeps_the_last_lines_only() {
        let mut tail = Tail::default();
        (0..100).for_each(|n| tail.push(&n.to_string()));
        let kept = tail.take();
        assert_eq!(
            (kept.len(), kept[0].as_str(), kept[TAIL - 1].as_str()),
            (TAIL, "80", "99")
        );
        assert!(tail.take().is_empty());
    }

    #[test]
    fn a_log_file_rolls_over_at_its_bound() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = LogFile::open(dir.path(), "decode-0").unwrap();
        log.write("first");
        log.written = MAX_FILE;
        log.write("second");
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!(
            (read("decode-0.log.1").as_str(), read("decode-0.log").as_str()),
            ("first\n", "second\n")
        );
        drop(log);
        LogFile::open(dir.path(), "decode-0").unwrap().write("third");
        assert_eq!(read("decode-0.log"), "second\nthird\n");
    }
}
