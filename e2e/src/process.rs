//! A child process of a test.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A running child with its output in a file. Dropping it kills it; when the test is failing, its last lines are shown.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
    _dir: tempfile::TempDir,
}

impl Process {
    /// Starts `program`; what it writes to stdout and stderr goes to one file.
    pub fn start(name: &str, program: &Path, args: &[String]) -> Self {
        let filter = std::env::var("RUST_LOG").unwrap_or_else(|_| "info".into());
        Self::start_logging(&filter, name, program, args)
    }

    /// The same with a log filter of its own.
    pub fn start_logging(filter: &str, name: &str, program: &Path, args: &[String]) -> Self {
        let dir = tempfile::tempdir().expect("a folder for the log");
        let log = dir.path().join(format!("{name}.log"));
        let out = File::create(&log).expect("a log file");
        let child = Command::new(program)
            .args(args)
            .env("RUST_LOG", filter)
            .stdin(Stdio::null())
            .stdout(out.try_clone().expect("a second handle of the log"))
            .stderr(out)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {}: {error}", program.display()));
        Self {
            name: name.into(),
            child,
            log,
            _dir: dir,
        }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything that it has written so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Its last lines.
    pub fn tail(&self, lines: usize) -> String {
        let log = self.log();
        let all: Vec<&str> = log.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    /// Sends a signal.
    pub fn signal(&self, signal: libc::c_int) {
        let pid = libc::pid_t::try_from(self.child.id()).expect("a pid");
        // SAFETY: the child is ours and not yet waited for, so the pid is still its own.
        let code = unsafe { libc::kill(pid, signal) };
        assert_eq!(
            code,
            0,
            "kill({}, {signal}): {}",
            self.name,
            std::io::Error::last_os_error()
        );
    }

    /// `kill -9`, and waits until it is gone.
    pub fn kill(&mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }

    /// The exit status, if it has ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("try_wait")
    }

    /// Waits for its end; panics with its last lines if it does not come within `limit`.
    pub async fn wait(&mut self, limit: Duration) -> ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.exited() {
                return status;
            }
            assert!(
                begin.elapsed() < limit,
                "{} still runs after {limit:?}:\n{}",
                self.name,
                self.tail(20)
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Resident memory in MiB.
    pub fn rss_mib(&self) -> f64 {
        self.memory_mib("VmRSS:")
    }

    /// The most that was ever resident, in MiB.
    pub fn peak_rss_mib(&self) -> f64 {
        self.memory_mib("VmHWM:")
    }

    fn memory_mib(&self, field: &str) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("/proc of a child");
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
        kib.unwrap_or_else(|| panic!("{field} in kB in {status}")) / 1024.0
    }

    /// Seconds that it has computed.
    pub fn cpu_seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("/proc of a child");
        // after the name, which may hold spaces: the 14th and 15th field
        let fields = stat
            .rsplit_once(')')
            .map_or("", |(_, fields)| fields)
            .split_whitespace();
        let ticks: Vec<f64> = fields.skip(11).take(2).filter_map(|field| field.parse().ok()).collect();
        // SAFETY: it only reads a constant of the system.
        let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        ticks.iter().sum::<f64>() / per_second as f64
    }

    /// Open file descriptors.
    pub fn fds(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).map_or(0, Iterator::count)
    }

    /// Threads.
    pub fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.pid())).map_or(0, Iterator::count)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let ended = self.child.try_wait().ok().flatten();
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let how = ended.map_or_else(|| "running".into(), |status| status.to_string());
            eprintln!("---- {} ({how}), its last lines\n{}", self.name, self.tail(40));
        }
    }
}
