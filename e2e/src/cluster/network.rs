//! A network namespace: pods have addresses, ports are free, and nothing is reachable from outside.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;
use std::thread;

/// Where pods live; every address of it is this machine's own inside of the namespace.
pub const PODS: &str = "10.244.0.0/16";

/// A network namespace; it exists while a thread, a process or this value is in it.
#[derive(Debug)]
pub struct Network(File);

impl Network {
    /// A namespace of its own with a loopback device.
    pub fn create() -> Self {
        let made = || {
            // SAFETY: a call without memory; it changes the namespace of this thread alone, which ends below.
            let code = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            assert_eq!(
                code,
                0,
                "no network namespace of its own: {}; it needs root",
                std::io::Error::last_os_error()
            );
            ip(&["link", "set", "lo", "up"]);
            ip(&["route", "add", "local", PODS, "dev", "lo"]);
            Self(File::open("/proc/thread-self/ns/net").expect("the namespace's file"))
        };
        thread::scope(|scope| join(scope.spawn(made)))
    }

    /// Runs `work` on a thread inside; threads and processes that it starts are inside too.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        // What a test prints is captured by its thread's name.
        let name = thread::current().name().unwrap_or("in the namespace").to_owned();
        let inside = || {
            // SAFETY: the descriptor is open, and the call changes the namespace of this thread alone.
            let code = unsafe { libc::setns(self.0.as_raw_fd(), libc::CLONE_NEWNET) };
            assert_eq!(code, 0, "setns: {}", std::io::Error::last_os_error());
            work()
        };
        thread::scope(|scope| {
            let thread = thread::Builder::new().name(name).spawn_scoped(scope, inside);
            join(thread.expect("a thread"))
        })
    }
}

fn join<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn ip(args: &[&str]) {
    let output = Command::new("ip").args(args).output().expect("`ip` of iproute2 starts");
    assert!(
        output.status.success(),
        "ip {}: {}",
        args.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
}
