//! What people see: messages, children's log lines with their names, progress of loading.
//!
//! A terminal may be paused for an hour, or go away. Neither may hold the supervisor up, and through it the children,
//! whose log pipes it empties: lines are written by a thread of their own, and are lost and counted when that thread is
//! stuck; a failed write is ignored.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Lines that wait for the terminal.
const WAITING: usize = 4096;
/// At the end, the last lines have this long to be written.
const LAST_LINES: Duration = Duration::from_secs(1);
/// On no terminal, progress is a line at each of these steps.
const PLAIN_STEP_PERCENT: u8 = 25;

/// Writes `error: …` to stderr.
pub fn error(message: &str) {
    let _ = writeln!(std::io::stderr(), "error: {message}");
}

/// Writes `note: …` to stderr: what may surprise, and is no error.
pub fn note(message: &str) {
    let _ = writeln!(std::io::stderr(), "note: {message}");
}

/// An error with what caused it, on one line.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

/// The one writer of this process's messages.
#[derive(Debug)]
pub struct Console {
    lines: Option<SyncSender<String>>,
    written: Receiver<()>,
    lost: Arc<AtomicU64>,
    bars: MultiProgress,
    terminal: bool,
    colour: bool,
    loading: BTreeMap<String, Loading>,
}

#[derive(Debug)]
struct Loading {
    bar: ProgressBar,
    shown: u8,
}

impl Console {
    /// On stderr, with colours and bars if that is a terminal.
    pub fn stderr() -> std::io::Result<Self> {
        Self::new(std::io::stderr(), std::io::stderr().is_terminal())
    }

    fn new(mut out: impl Write + Send + 'static, terminal: bool) -> std::io::Result<Self> {
        let target = if terminal {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bars = MultiProgress::with_draw_target(target);
        let (lines, waiting) = sync_channel::<String>(WAITING);
        let (done, written) = channel();
        let lost = Arc::new(AtomicU64::new(0));
        let (thread_bars, thread_lost) = (bars.clone(), Arc::clone(&lost));
        std::thread::Builder::new().name("console".into()).spawn(move || {
            for line in waiting {
                thread_bars.suspend(|| {
                    let _ = writeln!(out, "{line}");
                    let lost = thread_lost.swap(0, Ordering::Relaxed);
                    if lost > 0 {
                        let _ = writeln!(
                            out,
                            "({lost} lines are not shown: they came faster than they could be written)"
                        );
                    }
                });
            }
            let _ = done.send(());
        })?;
        Ok(Self {
            lines: Some(lines),
            written,
            lost,
            bars,
            terminal,
            colour: terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
            loading: BTreeMap::new(),
        })
    }

    /// A message of `tandem` itself.
    pub fn say(&self, message: &str) {
        if let Some(lines) = &self.lines
            && let Err(TrySendError::Full(_)) = lines.try_send(message.to_owned())
        {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A child's log line.
    pub fn log(&self, name: &str, width: usize, line: &str) {
        let (start, end) = if self.colour {
            (colour(name), "\x1b[0m")
        } else {
            ("", "")
        };
        self.say(&format!("{start}{name:width$} |{end} {line}"));
    }

    /// How far a child has loaded its model, until [`Self::loaded`] says that it is over.
    pub fn loading(&mut self, name: &str, percent: u8) {
        let bars = &self.bars;
        let entry = self.loading.entry(name.to_owned()).or_insert_with(|| {
            let bar = bars.add(ProgressBar::new(100));
            if let Ok(style) = ProgressStyle::with_template("{prefix:12} {msg} [{bar:40}] {pos:>3} % {elapsed}") {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(name.to_owned());
            bar.set_message("loading model");
            bar.enable_steady_tick(Duration::from_millis(200));
            Loading { bar, shown: 0 }
        });
        entry.bar.set_position(u64::from(percent));
        if !self.terminal && percent >= entry.shown.saturating_add(PLAIN_STEP_PERCENT) {
            entry.shown = percent - percent % PLAIN_STEP_PERCENT;
            self.say(&format!("{name}: loading model, {percent} %"));
        }
    }

    /// Loading is over, well or not.
    pub fn loaded(&mut self, name: &str) {
        if let Some(loading) = self.loading.remove(name) {
            loading.bar.finish_and_clear();
            self.bars.remove(&loading.bar);
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        drop(self.lines.take());
        // Not joined: the thread may be stuck in a write to a terminal that is paused.
        let _ = self.written.recv_timeout(LAST_LINES);
    }
}

fn colour(name: &str) -> &'static str {
    match name.split('-').next() {
        Some("prefill") => "\x1b[36m",
        Some("decode") => "\x1b[32m",
        Some("router") => "\x1b[35m",
        _ => "\x1b[0m",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Sender;

    use super::*;

    /// Writes into a channel, and not before the gate opens.
    struct Gated {
        gate: Receiver<()>,
        out: Sender<Vec<u8>>,
    }

    impl Write for Gated {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            // Open once the other end is dropped.
            let _ = self.gate.recv();
            let _ = self.out.send(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_paused_terminal_holds_nobody_up_and_says_what_it_missed() {
        let (open, gate) = channel();
        let (out, written) = channel();
        let console = Console::new(Gated { gate, out }, false).unwrap();
        let sent = WAITING + 1000;
        for n in 0..sent {
            console.log("decode-0", 9, &n.to_string());
        }
        drop(open);
        drop(console);
        let text = String::from_utf8(written.iter().flatten().collect()).unwrap();
        assert!(text.starts_with("decode-0  | 0\n"), "{}", &text[..40]);
        let lost: usize = text
            .lines()
            .filter_map(|line| line.strip_prefix('(')?.split(' ').next()?.parse::<usize>().ok())
            .sum();
        let shown = text.lines().filter(|line| line.starts_with("decode-0")).count();
        assert!(lost >= 999 && shown >= WAITING, "{lost} lost, {shown} shown");
        assert_eq!(lost + shown, sent);
    }

    #[test]
    fn without_a_terminal_progress_is_a_few_plain_lines() {
        let (_, gate) = channel();
        let (out, written) = channel();
        let mut console = Console::new(Gated { gate, out }, false).unwrap();
        (0..=100).for_each(|percent| console.loading("prefill-0", percent));
        console.loaded("prefill-0");
        drop(console);
        let text = String::from_utf8(written.iter().flatten().collect()).unwrap();
        let expected: String = [25, 50, 75, 100]
            .map(|percent| format!("prefill-0: loading model, {percent} %\n"))
            .concat();
        assert_eq!(text, expected);
    }
}
