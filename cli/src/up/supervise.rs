//! All children.

use std::path::Path;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::child::{self, Event, Limits, Order};
use super::logs::LogFile;
use super::render::Process;

/// The children of this process. Dropping it kills what still runs.
#[derive(Debug)]
pub struct Supervisor {
    children: Vec<Handle>,
    sender: mpsc::Sender<(usize, Event)>,
    events: mpsc::Receiver<(usize, Event)>,
}

#[derive(Debug)]
struct Handle {
    process: watch::Sender<Process>,
    order: watch::Sender<Order>,
    task: JoinHandle<()>,
    ended: bool,
}

impl Drop for Handle {
    fn drop(&mut self) {
        // The task owns the child, which is killed when dropped.
        self.task.abort();
    }
}

impl Supervisor {
    pub fn new() -> Self {
        let (sender, events) = mpsc::channel(256);
        Self {
            children: Vec::new(),
            sender,
            events,
        }
    }

    /// Starts a child; its events carry the index returned.
    pub fn start(&mut self, process: Process, limits: Limits, log_dir: Option<&Path>) -> std::io::Result<usize> {
        let index = self.children.len();
        let log = log_dir.map(|dir| LogFile::open(dir, &process.name)).transpose()?;
        let (order, orders) = watch::channel(Order::Run);
        let (process, processes) = watch::channel(process);
        let task = tokio::spawn(child::supervise(
            index,
            processes,
            limits,
            log,
            self.sender.clone(),
            orders,
        ));
        self.children.push(Handle {
            process,
            order,
            task,
            ended: false,
        });
        Ok(index)
    }

    /// What a child is when it starts again.
    pub fn redefine(&self, index: usize, process: Process) {
        if let Some(child) = self.children.get(index) {
            child.process.send_replace(process);
        }
    }

    /// The next event of any child. Cancelling it loses nothing.
    pub async fn next(&mut self) -> (usize, Event) {
        // `self` holds a sender, so the channel never closes.
        let Some((index, event)) = self.events.recv().await else {
            std::future::pending().await
        };
        if matches!(event, Event::Stopped { .. } | Event::GaveUp { .. })
            && let Some(child) = self.children.get_mut(index)
        {
            child.ended = true;
        }
        (index, event)
    }

    /// Gives an order to a child; orders only grow.
    pub fn order(&self, index: usize, order: Order) {
        if let Some(child) = self.children.get(index) {
            child.order.send_if_modified(|current| {
                let grows = order > *current;
                *current = order.max(*current);
                grows
            });
        }
    }

    /// Whether the child runs no more and will not be started again.
    pub fn ended(&self, index: usize) -> bool {
        self.children.get(index).is_none_or(|child| child.ended)
    }

    /// The longest that stopping children takes that have so long from SIGTERM until SIGKILL.
    pub fn stop_bound(stop: Duration) -> Duration {
        stop + Duration::from_secs(7)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::path::PathBuf;

    use tandem_telemetry::{Metrics, OpsServer, Readiness, State};
    use tokio::time::{Instant, timeout};

    use super::super::child::{End, MAX_DEATHS, RestartPolicy};
    use super::*;

    const LIMITS: Limits = Limits {
        startup: Duration::from_secs(20),
        stop: Duration::from_secs(20),
    };

    /// A shell script as a child, with the health listener of a real process played by the test.
    fn child(script: &str, ops: SocketAddr) -> Process {
        Process {
            name: "decode-0".into(),
            program: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
            ops,
            door: None,
        }
    }

    fn health(state: State) -> OpsServer {
        let readiness = Readiness::default();
        readiness.set(state);
        OpsServer::start(
            SocketAddr::from(([127, 0, 0, 1], 0)),
            Metrics::new("child", "0"),
            readiness,
        )
        .unwrap()
    }

    async fn next(supervisor: &mut Supervisor) -> Event {
        timeout(Duration::from_secs(30), supervisor.next()).await.unwrap().1
    }

    /// The next event that is no log line.
    async fn next_change(supervisor: &mut Supervisor) -> Event {
        loop {
            match next(supervisor).await {
                Event::Line(_) => {}
                event => break event,
            }
        }
    }

    /// Waits until the script says that it has come so far.
    async fn said(supervisor: &mut Supervisor, expected: &str) {
        while !matches!(next(supervisor).await, Event::Line(line) if line == expected) {}
    }

    fn started(event: &Event) -> u32 {
        let Event::Started { pid } = event else {
            panic!("{event:?}")
        };
        *pid
    }

    #[tokio::test]
    async fn a_child_that_keeps_dying_is_restarted_twice_and_given_up_with_its_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let die = dir.path().join("die");
        let script = format!(
            "echo hello; echo to stderr >&2; while [ ! -e {0} ]; do sleep 0.02; done; echo last words; exit 7",
            die.display()
        );
        let ops = health(State::Ready);
        let mut supervisor = Supervisor::new();
        supervisor
            .start(child(&script, ops.addr()), LIMITS, Some(dir.path()))
            .unwrap();

        started(&next_change(&mut supervisor).await);
        assert!(matches!(next_change(&mut supervisor).await, Event::Ready { .. }));
        std::fs::write(&die, "").unwrap();
        let mut waits = Vec::new();
        let gave_up = loop {
            match next_change(&mut supervisor).await {
                Event::Died {
                    end,
                    last_lines,
                    restart_in,
                } => {
                    assert!(matches!(end, End::Exited(status) if status.code() == Some(7)), "{end}");
                    assert!(last_lines.contains(&"last words".to_owned()), "{last_lines:?}");
                    assert!(last_lines.contains(&"to stderr".to_owned()), "{last_lines:?}");
                    let died = Instant::now();
                    started(&next_change(&mut supervisor).await);
                    assert!(died.elapsed() >= restart_in, "restarted before its backoff");
                    waits.push(restart_in);
                }
                Event::Ready { .. } => {}
                event => break event,
            }
        };
        assert_eq!(waits, [Duration::from_millis(500), Duration::from_secs(1)]);
        let Event::GaveUp {
            deaths,
            was_ready,
            last_lines,
            ..
        } = gave_up
        else {
            panic!("{gave_up:?}")
        };
        assert_eq!((deaths, was_ready), (MAX_DEATHS, true));
        assert!(last_lines.contains(&"last words".to_owned()));
        assert!(supervisor.ended(0));
        let log = std::fs::read_to_string(dir.path().join("decode-0.log")).unwrap();
        assert_eq!(log.matches("last words").count(), MAX_DEATHS, "{log}");
    }

    #[tokio::test]
    async fn a_child_that_dies_starts_again_as_it_was_and_not_as_it_should_be() {
        let ops = health(State::Ready);
        let mut supervisor = Supervisor::new();
        let old = child("echo old; while :; do sleep 0.02; done", ops.addr());
        let index = supervisor.start(old, LIMITS, None).unwrap();
        let pid = started(&next_change(&mut supervisor).await);
        assert!(matches!(next_change(&mut supervisor).await, Event::Ready { .. }));
        supervisor.redefine(index, child("echo new; while :; do sleep 0.02; done", ops.addr()));
        // SAFETY: a child of this test's; a signal has no other effect.
        assert_eq!(unsafe { libc::kill(i32::try_from(pid).unwrap(), libc::SIGKILL) }, 0);
        said(&mut supervisor, "new").await;
    }

    #[tokio::test]
    async fn a_child_that_never_was_ready_is_not_restarted() {
        let ops = health(State::Loading { percent: 40 });
        let dir = tempfile::tempdir().unwrap();
        let die = dir.path().join("die");
        let script = format!(
            "while [ ! -e {0} ]; do sleep 0.02; done; echo error: no such model >&2; exit 3",
            die.display()
        );
        let mut supervisor = Supervisor::new();
        supervisor.start(child(&script, ops.addr()), LIMITS, None).unwrap();
        started(&next_change(&mut supervisor).await);
        let said = next_change(&mut supervisor).await;
        assert!(
            matches!(&said, Event::Health(health) if health.loading == Some(40)),
            "{said:?}"
        );
        std::fs::write(&die, "").unwrap();
        let event = next_change(&mut supervisor).await;
        let Event::GaveUp {
            end,
            last_lines,
            was_ready: false,
            ..
        } = event
        else {
            panic!("{event:?}")
        };
        assert_eq!((end.code(), last_lines), (3, vec!["error: no such model".to_owned()]));
    }

    #[tokio::test]
    async fn a_child_that_is_not_ready_in_time_is_killed() {
        let ops = health(State::Waiting {
            reason: "no engine".into(),
        });
        let mut supervisor = Supervisor::new();
        let limits = Limits {
            startup: Duration::from_millis(300),
            ..LIMITS
        };
        supervisor
            .start(child("exec sleep 1000", ops.addr()), limits, None)
            .unwrap();
        let pid = started(&next_change(&mut supervisor).await);
        let said = next_change(&mut supervisor).await;
        assert!(
            matches!(&said, Event::Health(health) if health.reason.as_deref() == Some("no engine")),
            "{said:?}"
        );
        let event = next_change(&mut supervisor).await;
        assert!(
            matches!(
                event,
                Event::GaveUp {
                    end: End::NotReady(_),
                    ..
                }
            ),
            "{event:?}"
        );
        assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
    }

    #[tokio::test]
    async fn a_program_that_does_not_exist_is_named() {
        let mut supervisor = Supervisor::new();
        let process = Process {
            program: "/nowhere/tandem-engine".into(),
            ..child("", ([127, 0, 0, 1], 1).into())
        };
        supervisor.start(process, LIMITS, None).unwrap();
        let event = next_change(&mut supervisor).await;
        let Event::GaveUp { end, .. } = event else {
            panic!("{event:?}")
        };
        assert!(end.to_string().contains("/nowhere/tandem-engine"), "{end}");
    }

    #[tokio::test]
    async fn stopping_lets_a_child_finish_and_shows_what_it_says() {
        let ops = health(State::Ready);
        let mut supervisor = Supervisor::new();
        let script = "trap 'echo drained; exit 0' TERM; echo up; while :; do sleep 0.02; done";
        supervisor.start(child(script, ops.addr()), LIMITS, None).unwrap();
        said(&mut supervisor, "up").await;
        supervisor.order(0, Order::Stop);
        let mut lines = Vec::new();
        let stopped = loop {
            match next(&mut supervisor).await {
                Event::Line(line) => lines.push(line),
                Event::Ready { .. } => {}
                event => break event,
            }
        };
        assert!(matches!(stopped, Event::Stopped { killed: false }), "{stopped:?}");
        assert_eq!(lines, ["drained"]);
        assert!(supervisor.ended(0));
    }

    #[tokio::test]
    async fn a_child_that_ignores_the_request_is_killed_at_its_limit_and_at_once_on_demand() {
        let ops = health(State::Ready);
        let deaf = "trap '' TERM; echo up; while :; do sleep 0.02; done";
        for (limit, order) in [
            (Duration::from_millis(300), Order::Stop),
            (Duration::from_mins(5), Order::Kill),
        ] {
            let mut supervisor = Supervisor::new();
            let limits = Limits { stop: limit, ..LIMITS };
            supervisor.start(child(deaf, ops.addr()), limits, None).unwrap();
            let pid = started(&next_change(&mut supervisor).await);
            said(&mut supervisor, "up").await;
            supervisor.order(0, Order::Stop);
            supervisor.order(0, order);
            let event = loop {
                match next_change(&mut supervisor).await {
                    Event::Ready { .. } => {}
                    event => break event,
                }
            };
            assert!(matches!(event, Event::Stopped { killed: true }), "{event:?}");
            assert!(!PathBuf::from(format!("/proc/{pid}")).exists());
        }
    }

    #[test]
    fn deaths_that_lie_apart_never_add_up() {
        let mut policy = RestartPolicy::default();
        let start = Instant::now();
        for n in 0..20_u64 {
            let wait = policy.died(start + Duration::from_secs(31 * n));
            assert_eq!(
                wait,
                Some(if n == 0 {
                    Duration::from_millis(500)
                } else {
                    Duration::from_secs(1)
                }),
                "{n}"
            );
        }
        assert_eq!(policy.died(start + Duration::from_secs(31 * 19 + 1)), None);
    }
}
