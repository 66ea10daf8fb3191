//! What people see: messages, children's log lines with their names, progress of loading.
//!
//! A terminal that goes away must not take the supervisor with it, so a failed write is ignored.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// On no terminal, progress is a line at each of these steps.
const PLAIN_STEP_PERCENT: u8 = 25;

/// Writes `error: …` to stderr.
pub fn error(message: &str) {
    let _ = writeln!(std::io::stderr(), "error: {message}");
}

/// The one writer of this process's output.
#[derive(Debug)]
pub struct Console {
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

impl Default for Console {
    fn default() -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target = if terminal {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        Self {
            bars: MultiProgress::with_draw_target(target),
            terminal,
            colour: terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
            loading: BTreeMap::new(),
        }
    }
}

impl Console {
    /// A message of `tandem` itself.
    pub fn say(&self, message: &str) {
        self.line(message);
    }

    /// A child's log line.
    pub fn log(&self, name: &str, width: usize, line: &str) {
        let (start, end) = if self.colour {
            (colour(name), "\x1b[0m")
        } else {
            ("", "")
        };
        self.line(&format!("{start}{name:width$} |{end} {line}"));
    }

    /// How far a child has loaded its model.
    pub fn loading(&mut self, name: &str, percent: u8) {
        let terminal = self.terminal;
        let bars = &self.bars;
        let entry = self.loading.entry(name.to_owned()).or_insert_with(|| {
            let bar = bars.add(ProgressBar::new(100));
            if let Ok(style) = ProgressStyle::with_template("{prefix:12} loading model [{bar:40}] {pos:>3} % {elapsed}")
            {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.set_prefix(name.to_owned());
            bar.enable_steady_tick(Duration::from_millis(200));
            Loading { bar, shown: 0 }
        });
        entry.bar.set_position(u64::from(percent));
        if !terminal && percent >= entry.shown.saturating_add(PLAIN_STEP_PERCENT) {
            entry.shown = percent - percent % PLAIN_STEP_PERCENT;
            let message = format!("{name}: loading model, {percent} %");
            self.line(&message);
        }
    }

    /// Loading is over, well or not.
    pub fn loaded(&mut self, name: &str) {
        if let Some(loading) = self.loading.remove(name) {
            loading.bar.finish_and_clear();
            self.bars.remove(&loading.bar);
        }
    }

    fn line(&self, line: &str) {
        self.bars.suspend(|| {
            let mut out = std::io::stderr().lock();
            let _ = writeln!(out, "{line}");
        });
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
