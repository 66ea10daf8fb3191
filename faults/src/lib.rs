//! Faults that a test plants in a running process, and clears again.
//!
//! Only the binaries of the tests are built with them (the cargo feature `faults` of engine and router). A file, that of `--faults` or of
//! the variable `TANDEM_FAULTS`, says what is planted, one fault a line, and is read again every few milliseconds:
//!
//! ```text
//! slow-prefill 20
//! stall-transfer hold
//! ```
//!
//! A number is for how many milliseconds each passer-by is held up, `hold` is for as long as the fault is planted. Write such a
//! file beside its place and move it there: half of one is an error, and an error ends the process. What is planted now lies in
//! a file of the same name with `.planted` behind it, for those who have to know before they go on.

pub mod rows;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The places that can be at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Each layer of a step that reads a prompt.
    SlowPrefill,
    /// Each frame of KV before it is sent.
    StallTransfer,
    /// Each layer of a step that reads no prompt.
    WedgeDecode,
    /// Each of the router's calls to an engine.
    BlockUpstream,
    /// Each text before it becomes tokens.
    DelayTokenization,
    /// The model before it is loaded.
    DelayModelLoad,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::SlowPrefill,
        Self::StallTransfer,
        Self::WedgeDecode,
        Self::BlockUpstream,
        Self::DelayTokenization,
        Self::DelayModelLoad,
    ];

    /// As the file names it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SlowPrefill => "slow-prefill",
            Self::StallTransfer => "stall-transfer",
            Self::WedgeDecode => "wedge-decode",
            Self::BlockUpstream => "block-upstream",
            Self::DelayTokenization => "delay-tokenization",
            Self::DelayModelLoad => "delay-model-load",
        }
    }
}

/// Planted now: milliseconds by fault.
static PLANTED: [AtomicU64; Fault::ALL.len()] = [const { AtomicU64::new(0) }; Fault::ALL.len()];
/// As long as it is planted.
const HOLD: u64 = u64::MAX;
/// How often the file is read, and whoever is held up looks whether it still is.
const LOOK: Duration = Duration::from_millis(5);

/// Plants what the file says, now and whenever it changes. A file that is not there plants nothing.
pub fn follow(path: PathBuf) -> Result<(), String> {
    let mut planted = None;
    plant(&path, &mut planted)?;
    let watch = move || {
        loop {
            std::thread::sleep(LOOK);
            if let Err(why) = plant(&path, &mut planted) {
                eprintln!("faults: {why}");
                std::process::exit(2);
            }
        }
    };
    let thread = std::thread::Builder::new().name("faults".into()).spawn(watch);
    thread.map(drop).map_err(|error| format!("no thread: {error}"))
}

fn plant(path: &Path, last: &mut Option<String>) -> Result<(), String> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(format!("{}: {error}", path.display())),
    };
    if last.as_ref() == Some(&text) {
        return Ok(());
    }
    let planted = read(&text).map_err(|why| format!("{}: {why}", path.display()))?;
    for (place, millis) in PLANTED.iter().zip(planted) {
        place.store(millis, Ordering::Relaxed);
    }
    let (beside, told) = (path.with_extension("telling"), path.with_extension("planted"));
    std::fs::write(&beside, &text)
        .and_then(|()| std::fs::rename(&beside, &told))
        .map_err(|error| format!("{}: {error}", told.display()))?;
    *last = Some(text);
    Ok(())
}

/// Milliseconds by fault; 0: not planted.
fn read(text: &str) -> Result<[u64; Fault::ALL.len()], String> {
    let mut planted = [0; Fault::ALL.len()];
    for line in text.lines() {
        let (name, how) = line
            .split_once(' ')
            .ok_or_else(|| format!("{line:?} is not NAME MS or NAME hold"))?;
        let fault = Fault::ALL.into_iter().find(|fault| fault.name() == name);
        let fault = fault.ok_or_else(|| format!("there is no fault {name:?}"))?;
        planted[fault as usize] = match how {
            "hold" => HOLD,
            millis => millis
                .parse()
                .map_err(|_| format!("{how:?} is neither milliseconds nor hold"))?,
        };
    }
    Ok(planted)
}

/// For how much longer one who has been held up since `since` is.
fn left(fault: Fault, since: Instant) -> Option<Duration> {
    let limit = Duration::from_millis(PLANTED[fault as usize].load(Ordering::Relaxed));
    limit.checked_sub(since.elapsed()).filter(|left| !left.is_zero())
}

/// Passes the place, which takes its time where the fault is planted.
pub fn pass(fault: Fault) {
    let since = Instant::now();
    while let Some(left) = left(fault, since) {
        std::thread::sleep(left.min(LOOK));
    }
}

/// The same without holding a thread up.
pub async fn pass_async(fault: Fault) {
    let since = Instant::now();
    while let Some(left) = left(fault, since) {
        tokio::time::sleep(left.min(LOOK)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_names_no_fault_or_no_time_is_an_error() {
        for wrong in ["slow-prefil 20", "slow-prefill", "slow-prefill soon", "slow-prefill -1"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert_eq!(read("").unwrap(), [0; Fault::ALL.len()]);
        let planted = read("stall-transfer hold\nslow-prefill 20\n").unwrap();
        assert_eq!((planted[0], planted[1], planted[2]), (20, HOLD, 0));
    }

    #[test]
    fn whoever_is_held_up_goes_on_when_the_fault_is_cleared() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("faults");
        std::fs::write(&path, "wedge-decode hold\n").unwrap();
        follow(path.clone()).unwrap();
        let held = std::thread::spawn(|| pass(Fault::WedgeDecode));
        pass(Fault::SlowPrefill);
        std::thread::sleep(LOOK * 4);
        assert!(!held.is_finished());
        let told = std::fs::read_to_string(path.with_extension("planted")).unwrap();
        assert_eq!(told, "wedge-decode hold\n");
        std::fs::remove_file(&path).unwrap();
        held.join().unwrap();
    }
}
