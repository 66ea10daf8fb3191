//! Connections to prefills. A connection belongs to an incarnation: a peer that restarts on its address gets a new one,
//! so that its first call never meets the dead socket of the boot before.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tandem_wire::endpoint::beside;
use tandem_wire::{BootId, Failure, Reason, Source};
use tonic::transport::{Channel, Endpoint};

use super::timers::KeepAlive;

/// Receive window of one data stream; 4 MiB keeps a 10 Gbit/s path of 3 ms full.
pub const STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// Receive window of a whole data connection: a few streams at full speed.
pub const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// Largest HTTP/2 frame on a data connection, either end: one KV frame with its header. The protocol's own default of 16 KiB
/// costs a third of the speed.
pub const HTTP2_FRAME_BYTES: u32 = (256 << 10) + 1024;
/// Connections kept at once; the one used longest ago gives way.
const MAX_CONNECTIONS: usize = 1024;

/// What a connection carries. Control never waits behind megabytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Small messages.
    Control,
    /// KV bytes.
    Data,
}

/// The connections of one process, made when first used.
#[derive(Debug)]
pub struct Peers {
    keep_alive: KeepAlive,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    map: HashMap<(Lane, String), Slot>,
    clock: u64,
}

#[derive(Debug)]
struct Slot {
    boot: BootId,
    channel: Channel,
    used: u64,
}

impl Peers {
    /// No connection yet.
    pub fn new(keep_alive: KeepAlive) -> Self {
        Self {
            keep_alive,
            slots: Mutex::default(),
        }
    }

    /// The connection to `boot` at `endpoint` (host:port). Nothing is dialled before the first call on it.
    pub fn channel(&self, lane: Lane, endpoint: &str, boot: BootId) -> Result<Channel, Failure> {
        let mut slots = self.slots.lock();
        slots.clock += 1;
        let used = slots.clock;
        let key = (lane, endpoint.to_owned());
        if let Some(slot) = slots.map.get_mut(&key)
            && slot.boot == boot
        {
            slot.used = used;
            return Ok(slot.channel.clone());
        }
        let channel = self.dial(lane, endpoint)?;
        if slots.map.len() >= MAX_CONNECTIONS {
            let oldest = slots.map.iter().min_by_key(|(_, s)| s.used).map(|(k, _)| k.clone());
            oldest.and_then(|k| slots.map.remove(&k));
        }
        let slot = Slot {
            boot,
            channel: channel.clone(),
            used,
        };
        slots.map.insert(key, slot);
        Ok(channel)
    }

    /// The peer is lost: the next call dials anew. Calls that run on the old connection end with it.
    pub fn forget(&self, lane: Lane, endpoint: &str, boot: BootId) {
        let mut slots = self.slots.lock();
        let key = (lane, endpoint.to_owned());
        if slots.map.get(&key).is_some_and(|slot| slot.boot == boot) {
            slots.map.remove(&key);
        }
    }

    fn dial(&self, lane: Lane, endpoint: &str) -> Result<Channel, Failure> {
        let invalid = |e: tonic::transport::Error| {
            Failure::new(
                Reason::Invalid,
                Source::Decode,
                format!("prefill endpoint {endpoint:?} is not host:port: {e}"),
            )
        };
        let mut dialled = Endpoint::from_shared(format!("http://{endpoint}"))
            .map_err(invalid)?
            .connect_timeout(self.keep_alive.timeout.max(Duration::from_millis(1)))
            .tcp_nodelay(true)
            .http2_keep_alive_interval(self.keep_alive.interval)
            .keep_alive_timeout(self.keep_alive.ping_timeout())
            .keep_alive_while_idle(true)
            .http2_adaptive_window(false);
        if lane == Lane::Data {
            dialled = dialled
                .initial_stream_window_size(STREAM_WINDOW_BYTES)
                .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
                .max_frame_size(HTTP2_FRAME_BYTES);
        }
        Ok(dialled.connect_lazy())
    }
}

/// host:port of a data port as `Accepted` names it; an empty host means the host of the control port.
pub fn data_endpoint(named: &str, control: &str) -> Result<String, Failure> {
    beside(named, control).map_err(|why| {
        Failure::new(
            Reason::Internal,
            Source::Prefill,
            format!("data endpoint {named:?} of prefill {control:?} {why}"),
        )
    })
}

/// A call's failure as decode sees it. A reset without words comes from a connection that broke.
pub fn lost(status: &tonic::Status, source: Source, what: &str) -> Failure {
    let mut failure = Failure::from_status(status, source);
    if status.metadata().get_bin(tandem_wire::reason::FAILURE_KEY).is_none() {
        failure.reason = match status.code() {
            tonic::Code::Cancelled => Reason::PeerLost,
            // a message beyond our own bound
            tonic::Code::OutOfRange | tonic::Code::ResourceExhausted => Reason::Internal,
            _ => failure.reason,
        };
        failure.detail = format!("{what}: {}{}", failure.detail, causes(status));
    }
    failure
}

/// tonic says "transport error"; the cause that helps lies below.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = String::new();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_host_means_the_control_ports_host() {
        for (named, control, expected) in [
            (":7", "10.0.0.1:5", "10.0.0.1:7"),
            ("h:7", "10.0.0.1:5", "h:7"),
            (":7", "[::1]:5", "[::1]:7"),
            ("[fd00::1]:7", "[::1]:5", "[fd00::1]:7"),
        ] {
            assert_eq!(data_endpoint(named, control).unwrap(), expected);
        }
        for (named, control) in [
            ("", "h:1"),
            ("h", "h:1"),
            ("h:x", "h:1"),
            ("h:70000", "h:1"),
            (":7", "h"),
        ] {
            let failure = data_endpoint(named, control).unwrap_err();
            assert_eq!((failure.reason, failure.source), (Reason::Internal, Source::Prefill));
        }
    }

    #[tokio::test]
    async fn a_new_boot_on_the_same_address_gets_a_new_connection() {
        let peers = Peers::new(KeepAlive::default());
        let (a, b) = (BootId::from([1; 16]), BootId::from([2; 16]));
        let boot_of = |peers: &Peers| peers.slots.lock().map.values().map(|s| s.boot).collect::<Vec<_>>();
        peers.channel(Lane::Control, "127.0.0.1:1", a).unwrap();
        peers.channel(Lane::Control, "127.0.0.1:1", b).unwrap();
        assert_eq!(boot_of(&peers), [b]);
        // a failure seen by a call that still ran on the old boot's connection leaves the new one alone
        peers.forget(Lane::Control, "127.0.0.1:1", a);
        assert_eq!(boot_of(&peers), [b]);
        peers.forget(Lane::Control, "127.0.0.1:1", b);
        assert!(boot_of(&peers).is_empty());
    }

    #[tokio::test]
    async fn connections_are_bounded_and_an_endpoint_that_is_none_is_named() {
        let peers = Peers::new(KeepAlive::default());
        for port in 0..MAX_CONNECTIONS as u32 + 5 {
            peers
                .channel(Lane::Data, &format!("127.0.0.1:{port}"), BootId::from([1; 16]))
                .unwrap();
        }
        let slots = peers.slots.lock();
        assert_eq!(slots.map.len(), MAX_CONNECTIONS);
        assert!(!slots.map.contains_key(&(Lane::Data, "127.0.0.1:0".to_owned())));
        drop(slots);
        let failure = peers
            .channel(Lane::Data, "no port here", BootId::from([1; 16]))
            .unwrap_err();
        assert!(failure.detail.contains("no port here"), "{failure}");
    }
}
