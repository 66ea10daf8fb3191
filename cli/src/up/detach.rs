//! `--detach`: the same supervisor in a session of its own, watched until it is ready. `down`: asked to stop, awaited.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::pin::pin;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};

use super::signals::Signals;
use super::state::{self, Phase};
use super::{UpArgs, UpError, stack};
use crate::console::Console;

const POLL: Duration = Duration::from_millis(50);
/// The supervisor bounds its own start; this is for one that is stuck before it can.
const FIRST_STATE: Duration = Duration::from_mins(1);
/// The kernel ends a killed process within this, unless it hangs in a device.
const KILL_BOUND: Duration = Duration::from_secs(5);

/// Starts the supervisor in the background and returns when the deployment is ready.
pub async fn start(args: &UpArgs) -> Result<(), UpError> {
    let dir = args.state.dir()?;
    let use_dir = |source| UpError::State {
        dir: dir.clone(),
        source,
    };
    if state::is_held(&dir).map_err(use_dir)? {
        return Err(super::runs_already(&dir));
    }
    let log_dir = args.log_dir.clone().unwrap_or_else(|| dir.join("logs"));
    std::fs::create_dir_all(&log_dir).map_err(|source| UpError::Logs {
        dir: log_dir.clone(),
        source,
    })?;
    let own_log = log_dir.join("tandem.log");

    let mut signals = Signals::new().map_err(|source| UpError::System {
        what: "listen for signals",
        source,
    })?;
    let mut supervisor = spawn(&dir, &log_dir, &own_log)?;
    let mut console = Console::stderr().map_err(|source| UpError::System {
        what: "write to stderr",
        source,
    })?;
    let began = Instant::now();
    loop {
        let state = state::read(&dir).filter(|state| state.pid == supervisor.id());
        if let Some(state) = &state {
            for process in &state.processes {
                match process.loading {
                    Some(percent) if !process.ready => console.loading(&process.name, percent),
                    _ => console.loaded(&process.name),
                }
            }
            if state.phase == Phase::Ready {
                let seconds = began.elapsed().as_secs_f64();
                console.say(&format!(
                    "{} is ready after {seconds:.1} s, in the background",
                    state.name
                ));
                console.say(&stack::banner(state));
                console.say(&format!("logs in {}", log_dir.display()));
                console.say(&format!("stop it with: tandem down --state-dir {}", dir.display()));
                return Ok(());
            }
        }
        if let Some(status) = supervisor.try_wait().map_err(|source| UpError::System {
            what: "watch it",
            source,
        })? {
            let code = status
                .code()
                .and_then(|code| u8::try_from(code).ok())
                .filter(|&code| code != 0)
                .unwrap_or(1);
            return Err(UpError::Detached {
                message: failure(&own_log, status),
                code,
            });
        }
        if state.is_none() && began.elapsed() > FIRST_STATE {
            let _ = supervisor.kill();
            let message = format!(
                "the supervisor did nothing for {} s and was killed",
                FIRST_STATE.as_secs()
            );
            return Err(UpError::Detached { message, code: 1 });
        }
        tokio::select! {
            () = sleep(POLL) => {}
            signal = signals.next() => {
                console.say(&format!("{signal}: stopping; once more kills it at once"));
                let bound = state.map_or(FIRST_STATE, |state| Duration::from_secs(state.stop_seconds));
                let killed = end(&mut supervisor, bound, signals.next()).await.map_err(|source| UpError::System {
                    what: "stop the supervisor",
                    source,
                })?;
                let message = match killed {
                    None => "stopped before it was ready".to_owned(),
                    Some(why) => format!("killed before it was ready: {why}"),
                };
                return Err(UpError::Detached { message, code: 130 });
            }
        }
    }
}

/// Asks the supervisor to stop, and kills it after `bound`, or when `again` comes; its children end with it. Why it was
/// killed, if it was.
async fn end(
    supervisor: &mut Child,
    bound: Duration,
    again: impl Future<Output = &'static str>,
) -> std::io::Result<Option<String>> {
    let deadline = Instant::now() + bound;
    let mut again = pin!(again);
    terminate(supervisor.id())?;
    let why = loop {
        if supervisor.try_wait()?.is_some() {
            return Ok(None);
        }
        tokio::select! {
            signal = &mut again => break format!("{signal} again"),
            () = sleep_until(deadline) => break format!("it did not stop within {} s", bound.as_secs()),
            () = sleep(POLL) => {}
        }
    };
    supervisor.kill()?;
    let killed = Instant::now();
    while supervisor.try_wait()?.is_none() && killed.elapsed() < KILL_BOUND {
        sleep(POLL).await;
    }
    Ok(Some(why))
}

/// The same command in the background: its folders named, its output in a file, in a session of its own.
fn spawn(dir: &Path, log_dir: &Path, own_log: &Path) -> Result<Child, UpError> {
    let logs = |source| UpError::Logs {
        dir: log_dir.to_owned(),
        source,
    };
    let out = File::create(own_log).map_err(logs)?;
    let err = out.try_clone().map_err(logs)?;
    let start = |source| UpError::System {
        what: "start the supervisor",
        source,
    };
    let mut command = Command::new(std::env::current_exe().map_err(start)?);
    command.args(background_args(std::env::args_os().skip(1), dir, log_dir));
    command.stdin(Stdio::null()).stdout(out).stderr(err);
    // SAFETY: between fork and exec only setsid(2) and the construction of an error from a number run; both are
    // async-signal-safe and allocate nothing.
    unsafe {
        command.pre_exec(|| {
            if libc::setsid() == -1 {
                Err(std::io::Error::last_os_error())
            } else {
                Ok(())
            }
        });
    }
    command.spawn().map_err(start)
}

fn background_args(given: impl Iterator<Item = OsString>, dir: &Path, log_dir: &Path) -> Vec<OsString> {
    let mut args = Vec::new();
    let mut given = given;
    while let Some(arg) = given.next() {
        let text = arg.to_string_lossy();
        if text == "--state-dir" || text == "--log-dir" {
            given.next();
        } else if text != "--detach" && !text.starts_with("--state-dir=") && !text.starts_with("--log-dir=") {
            args.push(arg);
        }
    }
    args.push("--background".into());
    for (flag, value) in [("--state-dir", dir), ("--log-dir", log_dir)] {
        args.push(flag.into());
        args.push(value.into());
    }
    args
}

/// The supervisor's own error, as it would have shown in the foreground.
fn failure(own_log: &Path, status: std::process::ExitStatus) -> String {
    let log = std::fs::read_to_string(own_log).unwrap_or_default();
    // A child's lines stand behind its name or indented; only `tandem`'s own error begins a line.
    let at = if log.starts_with("error: ") {
        Some(0)
    } else {
        log.rfind("\nerror: ").map(|at| at + 1)
    };
    match at {
        Some(at) => log[at + "error: ".len()..].trim_end().to_owned(),
        None if status.success() => "it was stopped before it was ready".to_owned(),
        None => format!("the supervisor ended with {status}; its log is {}", own_log.display()),
    }
}

/// Asks the supervisor to stop and waits until it has.
pub async fn down(dir: &Path) -> Result<(), UpError> {
    let mut out = std::io::stderr();
    let use_dir = |source| UpError::State {
        dir: dir.to_owned(),
        source,
    };
    if !state::is_held(dir).map_err(use_dir)? {
        let _ = writeln!(
            out,
            "nothing runs from {}; what was started with another --state-dir is stopped with that",
            dir.display()
        );
        return Ok(());
    }
    // Between taking the lock and writing its state the supervisor only checks its arguments.
    let began = Instant::now();
    let state = loop {
        match state::read(dir) {
            Some(state) => break state,
            None if !state::is_held(dir).map_err(use_dir)? => return Ok(()),
            None if began.elapsed() > FIRST_STATE => {
                return Err(UpError::Running {
                    dir: dir.to_owned(),
                    what: ", but does not say as which process".into(),
                });
            }
            None => sleep(POLL).await,
        }
    };
    let _ = writeln!(out, "stopping {} (process {})", state.name, state.pid);
    terminate(state.pid).map_err(|source| UpError::System {
        what: "signal the supervisor",
        source,
    })?;
    let bound = Duration::from_secs(state.stop_seconds);
    let began = Instant::now();
    while state::is_held(dir).map_err(use_dir)? {
        if began.elapsed() > bound {
            signal(state.pid, libc::SIGKILL).map_err(|source| UpError::System {
                what: "kill the supervisor",
                source,
            })?;
            return Err(UpError::Stuck {
                pid: state.pid,
                seconds: state.stop_seconds,
            });
        }
        sleep(POLL).await;
    }
    let _ = writeln!(out, "stopped after {:.1} s", began.elapsed().as_secs_f64());
    Ok(())
}

fn terminate(pid: u32) -> std::io::Result<()> {
    signal(pid, libc::SIGTERM)
}

fn signal(pid: u32, signal: i32) -> std::io::Result<()> {
    let pid = i32::try_from(pid)
        .ok()
        .filter(|&pid| pid > 1)
        .ok_or(std::io::ErrorKind::InvalidInput)?;
    // SAFETY: kill(2) takes no pointers. The pid is that of the holder of the lock, so it is still `tandem`.
    if unsafe { libc::kill(pid, signal) } == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_background_run_gets_the_same_arguments_and_named_folders() {
        let given = [
            "up",
            "-f",
            "x.yaml",
            "--detach",
            "--state-dir",
            "rel",
            "--claim",
            "a=b",
            "--log-dir=l",
        ];
        let args = background_args(
            given.map(OsString::from).into_iter(),
            Path::new("/s"),
            Path::new("/s/logs"),
        );
        let expected = [
            "up",
            "-f",
            "x.yaml",
            "--claim",
            "a=b",
            "--background",
            "--state-dir",
            "/s",
            "--log-dir",
            "/s/logs",
        ];
        assert_eq!(args, expected.map(OsString::from));
    }

    /// A process that ignores SIGTERM, once it has said so.
    fn deaf() -> Child {
        let mut child = Command::new("/bin/sh")
            .args(["-c", "trap '' TERM; echo deaf; while :; do sleep 0.02; done"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = [0; 5];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
        child
    }

    #[tokio::test]
    async fn a_supervisor_that_does_not_stop_is_killed_at_its_limit_or_on_a_second_signal() {
        let patience = Duration::from_secs(30);
        let killed = async |bound, again: bool| {
            let mut child = deaf();
            let again = async { if again { "SIGINT" } else { std::future::pending().await } };
            let ended = tokio::time::timeout(patience, end(&mut child, bound, again)).await;
            let gone = child.try_wait().unwrap().is_some();
            let _ = child.kill();
            assert!(gone, "it still runs");
            ended.unwrap().unwrap().unwrap()
        };
        assert_eq!(
            killed(Duration::from_secs(1), false).await,
            "it did not stop within 1 s"
        );
        assert_eq!(killed(Duration::from_hours(1), true).await, "SIGINT again");
    }

    #[test]
    fn a_process_id_that_would_reach_a_group_is_never_signalled() {
        assert!(signal(0, 0).is_err());
        assert!(signal(1, 0).is_err());
        assert!(signal(u32::MAX, 0).is_err());
        signal(std::process::id(), 0).unwrap();
    }
}
