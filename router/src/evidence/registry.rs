//! All open connections, and the requests that ended lately.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tandem_telemetry::prometheus_client::collector::Collector;
use tandem_telemetry::prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use tandem_telemetry::prometheus_client::metrics::gauge::ConstGauge;

use super::connection::{Connection, Standing};
use super::stage::Spent;

/// Requests that are remembered after their end.
const REMEMBERED: usize = 1024;
/// Probes that are.
const PROBES: usize = 64;

/// What the router knows of its clients.
#[derive(Debug, Default)]
pub struct Registry {
    next: AtomicU64,
    open: Arc<Map>,
    ended: Mutex<VecDeque<Ended>>,
    probed: Mutex<VecDeque<Ended>>,
    written: Arc<Clock>,
}

/// By id. The sockets own the connections, each of which takes itself out as it goes.
pub(super) type Map = Mutex<BTreeMap<u64, Weak<Connection>>>;

/// A request that has ended.
#[derive(Debug, Clone)]
pub struct Ended {
    /// Its id.
    pub request_id: String,
    /// As the `endpoint` label says it.
    pub endpoint: &'static str,
    /// How it ended, as the `code` label says it.
    pub code: &'static str,
    /// The answer was a stream.
    pub stream: bool,
    /// The connection that it came on.
    pub connection: u64,
    /// When.
    pub at: Instant,
    /// From its head to its end.
    pub total: Duration,
    /// From its head to its first token.
    pub first_token: Option<Duration>,
    /// Tokens of its prompts.
    pub prompt_tokens: u32,
    /// Tokens of its answers.
    pub completion_tokens: u32,
    /// Calls of its most unlucky choice.
    pub attempts: u32,
    /// Where its time went.
    pub spent: Spent,
}

/// A moment that many write and few read.
#[derive(Debug)]
pub(super) struct Clock {
    began: Instant,
    /// Microseconds since `began`, plus one; 0: never.
    last: AtomicU64,
}

impl Default for Clock {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            last: AtomicU64::new(0),
        }
    }
}

impl Clock {
    pub(super) fn now(&self) {
        let micros = self.began.elapsed().as_micros() as u64;
        self.last.fetch_max(micros + 1, Ordering::Relaxed);
    }

    fn last(&self) -> Option<Instant> {
        let micros = self.last.load(Ordering::Relaxed).checked_sub(1)?;
        Some(self.began + Duration::from_micros(micros))
    }
}

impl Registry {
    /// A connection was accepted.
    pub fn open(&self, peer: SocketAddr, tls: bool) -> Arc<Connection> {
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        let connection = Arc::new(Connection::new(id, peer, tls, &self.open, &self.written));
        self.open.lock().insert(id, Arc::downgrade(&connection));
        connection
    }

    /// The open ones, oldest first.
    pub fn connections(&self) -> Vec<Arc<Connection>> {
        self.open.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Remembers a request for a while; a probe apart from those of users.
    pub fn ended(&self, request: Ended, probe: bool) {
        let (ended, most) = if probe {
            (&self.probed, PROBES)
        } else {
            (&self.ended, REMEMBERED)
        };
        let mut ended = ended.lock();
        if ended.len() == most {
            ended.pop_front();
        }
        ended.push_back(request);
    }

    /// The latest probes, the last to end first.
    pub fn probed(&self) -> Vec<Ended> {
        self.probed.lock().iter().rev().cloned().collect()
    }

    /// Those that are remembered, the last to end first.
    pub fn recent(&self) -> Vec<Ended> {
        self.ended.lock().iter().rev().cloned().collect()
    }

    /// When the kernel last took the last byte of an answer.
    pub fn last_written(&self) -> Option<Instant> {
        self.written.last()
    }
}

/// `tandem_router_connections`, counted when it is read.
#[derive(Debug)]
pub struct ConnectionsByState(pub Arc<Registry>);

impl Collector for ConnectionsByState {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let now = Instant::now();
        let mut counts: Vec<(Standing, i64)> = Standing::all().map(|standing| (standing, 0)).collect();
        for connection in self.0.connections().iter().filter(|open| !open.probes_only()) {
            let standing = connection.standing(now);
            if let Some((_, count)) = counts.iter_mut().find(|(other, _)| *other == standing) {
                *count += 1;
            }
        }
        let gauge = ConstGauge::new(0_i64);
        let mut family = encoder.encode_descriptor(
            "connections",
            "Open client connections, by what each waits for",
            None,
            gauge.metric_type(),
        )?;
        for (standing, count) in counts {
            ConstGauge::new(count).encode(family.encode_family(&[("state", standing.name())])?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_ended_requests_is_bounded_and_the_newest_come_first() {
        let registry = Registry::default();
        for number in 0..REMEMBERED + 5 {
            let request = Ended {
                request_id: number.to_string(),
                endpoint: "chat",
                code: "ok",
                stream: true,
                connection: 1,
                at: Instant::now(),
                total: Duration::from_millis(1),
                first_token: None,
                prompt_tokens: 1,
                completion_tokens: 1,
                attempts: 1,
                spent: Spent::default(),
            };
            registry.ended(request.clone(), false);
            registry.ended(request, true);
        }
        assert_eq!(registry.probed().len(), PROBES);
        let recent = registry.recent();
        assert_eq!(recent.len(), REMEMBERED);
        assert_eq!(recent[0].request_id, (REMEMBERED + 4).to_string());
        assert_eq!(recent[REMEMBERED - 1].request_id, "5");
    }

    #[test]
    fn a_connection_whose_socket_is_gone_is_not_shown() {
        let registry = Registry::default();
        let one = registry.open("127.0.0.1:1".parse().unwrap(), false);
        let two = registry.open("127.0.0.1:2".parse().unwrap(), true);
        assert_eq!(registry.connections().len(), 2);
        drop(one);
        assert_eq!(registry.connections()[0].id, two.id);
        drop(two);
        assert!(registry.connections().is_empty() && registry.open.lock().is_empty());
    }
}
