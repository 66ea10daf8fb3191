//! One child process: started, watched until ready, restarted on its port when it dies, stopped when told.

use std::collections::VecDeque;
use std::fmt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::logs::{LogFile, Tail, pump};
use super::probe::{self, Health};
use super::render::Process;

/// Deaths of one child within [`DEATH_WINDOW`] after which it is given up.
pub const MAX_DEATHS: usize = 3;
const DEATH_WINDOW: Duration = Duration::from_mins(1);
/// The wait before the first restart; it doubles with each further death in the window.
const BACKOFF: Duration = Duration::from_millis(500);
/// The kernel ends a killed process within this, unless it hangs in a device.
const KILL_BOUND: Duration = Duration::from_secs(5);
/// After a child's end its last lines may still be in the pipe. A grandchild that keeps the pipe open is not waited for.
const LAST_LINES: Duration = Duration::from_millis(500);

/// What is asked of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    Run,
    /// SIGTERM, and SIGKILL when the limit is over.
    Stop,
    /// SIGKILL.
    Kill,
}

/// How long a child may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// From its start until it is ready.
    pub startup: Duration,
    /// From SIGTERM until SIGKILL.
    pub stop: Duration,
}

/// How a child ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    Exited(ExitStatus),
    /// It was not ready in time and was killed.
    NotReady(Duration),
    /// It could not be started at all.
    NotStarted(String),
}

impl End {
    /// The exit code to hand on: the child's own where it has one that says failure.
    pub fn code(&self) -> u8 {
        match self {
            Self::Exited(status) => status
                .code()
                .and_then(|code| u8::try_from(code).ok())
                .filter(|&code| code != 0),
            _ => None,
        }
        .unwrap_or(1)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(status) => write!(f, "{status}"),
            Self::NotReady(after) => write!(f, "not ready after {} s, killed", after.as_secs()),
            Self::NotStarted(error) => write!(f, "cannot be started: {error}"),
        }
    }
}

/// What happened to a child.
#[derive(Debug)]
pub enum Event {
    Line(String),
    Started {
        pid: u32,
    },
    Health(Health),
    Ready {
        after: Duration,
    },
    /// It died; it starts again after `restart_in`.
    Died {
        end: End,
        last_lines: Vec<String>,
        restart_in: Duration,
    },
    /// It died and is not started again.
    GaveUp {
        end: End,
        last_lines: Vec<String>,
        deaths: usize,
        was_ready: bool,
    },
    /// It ended as asked. `killed`: only SIGKILL ended it.
    Stopped {
        killed: bool,
    },
}

/// Backoff, and when to give up. Pure.
#[derive(Debug, Default)]
pub struct RestartPolicy {
    deaths: VecDeque<Instant>,
}

impl RestartPolicy {
    /// A death at `now`: how long to wait before the next start, or none to give up.
    pub fn died(&mut self, now: Instant) -> Option<Duration> {
        self.deaths.push_back(now);
        while self
            .deaths
            .front()
            .is_some_and(|&death| now.duration_since(death) >= DEATH_WINDOW)
        {
            self.deaths.pop_front();
        }
        let recent = self.deaths.len();
        (recent < MAX_DEATHS).then(|| BACKOFF * 2_u32.pow(recent as u32 - 1))
    }

    pub fn recent(&self) -> usize {
        self.deaths.len()
    }
}

/// Runs a process until it is stopped or given up; each event goes to `events` with `index`. It starts as `process` says at that
/// moment.
///
/// A child that was never ready is not started again: what keeps it from starting is for people to mend.
pub async fn supervise(
    index: usize,
    process: watch::Receiver<Process>,
    limits: Limits,
    mut log: Option<LogFile>,
    events: mpsc::Sender<(usize, Event)>,
    mut order: watch::Receiver<Order>,
) {
    let client = match reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build() {
        Ok(client) => client,
        Err(error) => {
            let end = End::NotStarted(error.to_string());
            let gave_up = Event::GaveUp {
                end,
                last_lines: Vec::new(),
                deaths: 0,
                was_ready: false,
            };
            let _ = events.send((index, gave_up)).await;
            return;
        }
    };
    let mut policy = RestartPolicy::default();
    let mut was_ready = false;
    let mut tail = Tail::default();
    loop {
        let now = process.borrow().clone();
        let run = Run {
            index,
            process: &now,
            limits,
            client: &client,
            log: &mut log,
            tail: &mut tail,
            events: &events,
            was_ready: &mut was_ready,
        };
        let end = match run.until_end(&mut order).await {
            Outcome::Stopped { killed } => {
                let _ = events.send((index, Event::Stopped { killed })).await;
                return;
            }
            Outcome::Died(end) => end,
        };
        let restart_in = policy.died(Instant::now()).filter(|_| was_ready);
        let last_lines = tail.take();
        let Some(restart_in) = restart_in else {
            let deaths = policy.recent();
            let _ = events
                .send((
                    index,
                    Event::GaveUp {
                        end,
                        last_lines,
                        deaths,
                        was_ready,
                    },
                ))
                .await;
            return;
        };
        let _ = events
            .send((
                index,
                Event::Died {
                    end,
                    last_lines,
                    restart_in,
                },
            ))
            .await;
        tokio::select! {
            () = sleep(restart_in) => {}
            () = at_least(&mut order, Order::Stop) => {
                let _ = events.send((index, Event::Stopped { killed: false })).await;
                return;
            }
        }
    }
}

enum Outcome {
    Died(End),
    Stopped { killed: bool },
}

/// One life of a child.
struct Run<'a> {
    index: usize,
    process: &'a Process,
    limits: Limits,
    client: &'a reqwest::Client,
    log: &'a mut Option<LogFile>,
    tail: &'a mut Tail,
    events: &'a mpsc::Sender<(usize, Event)>,
    was_ready: &'a mut bool,
}

impl Run<'_> {
    async fn until_end(mut self, order: &mut watch::Receiver<Order>) -> Outcome {
        let mut child = match spawn(self.process) {
            Ok(child) => child,
            Err(error) => {
                let program = self.process.program.display();
                return Outcome::Died(End::NotStarted(format!("{program}: {error}")));
            }
        };
        let began = Instant::now();
        self.send(Event::Started {
            pid: child.id().unwrap_or(0),
        })
        .await;

        let (sender, mut lines) = mpsc::channel(64);
        // Owned here: ended with the pipe, or with this function.
        let mut pumps = JoinSet::new();
        if let Some(stdout) = child.stdout.take() {
            pumps.spawn(pump(stdout, sender.clone()));
        }
        if let Some(stderr) = child.stderr.take() {
            pumps.spawn(pump(stderr, sender));
        }

        let (health_sender, mut health) = mpsc::unbounded_channel();
        let mut probe = std::pin::pin!(probe::until_ready(self.client, self.process.ops, move |said| {
            let _ = health_sender.send(said);
        }));
        let mut overdue = std::pin::pin!(sleep(self.limits.startup));
        let mut ready = false;
        let mut killed_as_not_ready = false;

        let end = loop {
            tokio::select! {
                status = child.wait() => break Some(match status {
                    _ if killed_as_not_ready => End::NotReady(self.limits.startup),
                    Ok(status) => End::Exited(status),
                    Err(error) => End::NotStarted(error.to_string()),
                }),
                Some(line) = lines.recv() => self.line(line).await,
                () = &mut probe, if !ready => {
                    ready = true;
                    *self.was_ready = true;
                    self.send(Event::Ready { after: began.elapsed() }).await;
                }
                Some(said) = health.recv(), if !ready => self.send(Event::Health(said)).await,
                () = &mut overdue, if !ready && !killed_as_not_ready => {
                    killed_as_not_ready = true;
                    let _ = child.start_kill();
                }
                () = at_least(order, Order::Stop) => break None,
            }
        };
        let outcome = if let Some(end) = end {
            Outcome::Died(end)
        } else {
            let mut stop = std::pin::pin!(stop(&mut child, self.limits.stop, order));
            loop {
                tokio::select! {
                    killed = &mut stop => break Outcome::Stopped { killed },
                    Some(line) = lines.recv() => self.line(line).await,
                }
            }
        };
        let rest = async {
            while let Some(line) = lines.recv().await {
                self.line(line).await;
            }
        };
        let _ = timeout(LAST_LINES, rest).await;
        outcome
    }

    async fn line(&mut self, line: String) {
        self.tail.push(&line);
        if let Some(log) = self.log.as_mut() {
            log.write(&line);
        }
        self.send(Event::Line(line)).await;
    }

    async fn send(&self, event: Event) {
        let _ = self.events.send((self.index, event)).await;
    }
}

/// Waits for an order; an owner that is gone asks for the end.
async fn at_least(order: &mut watch::Receiver<Order>, least: Order) {
    let _ = order.wait_for(|&order| order >= least).await;
}

/// Asks the child to end, and makes it end when patience is over or on [`Order::Kill`]. True: it had to be killed.
async fn stop(child: &mut Child, patience: Duration, order: &mut watch::Receiver<Order>) -> bool {
    if *order.borrow() == Order::Stop
        && let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok())
    {
        // SAFETY: kill(2) takes no pointers. The child is not yet waited for, so the pid is still its own.
        unsafe { libc::kill(pid, libc::SIGTERM) };
        let drained = async {
            tokio::select! {
                _ = child.wait() => true,
                () = at_least(order, Order::Kill) => false,
            }
        };
        if timeout(patience, drained).await == Ok(true) {
            return false;
        }
    }
    let _ = child.start_kill();
    let _ = timeout(KILL_BOUND, child.wait()).await;
    true
}

/// Starts the program in a process group of its own (Ctrl-C on the terminal is for `tandem`, which stops its children in
/// order) and bound to this process's life.
fn spawn(process: &Process) -> std::io::Result<Child> {
    let parent = std::process::id();
    let door = process.door.as_ref();
    // Held until the child has its own.
    let held = door.map(|door| {
        door.socket
            .upgrade()
            .ok_or_else(|| std::io::Error::other("its socket is closed"))
    });
    let held = held.transpose()?;
    let inherits = door.map(|door| door.fd);
    let mut command = Command::new(&process.program);
    command
        .args(&process.args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    // SAFETY: between fork and exec only prctl(2), fcntl(2), getppid(2) and the construction of an error from a number run; all
    // are async-signal-safe and allocate nothing.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            if let Some(fd) = inherits
                && libc::fcntl(fd, libc::F_SETFD, 0) != 0
            {
                return Err(std::io::Error::last_os_error());
            }
            // The parent may have ended before the line above took effect.
            if u32::try_from(libc::getppid()) != Ok(parent) {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
    let child = command.spawn();
    drop(held);
    child
}
