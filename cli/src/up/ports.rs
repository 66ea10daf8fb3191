//! Loopback ports for the children.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, TcpListener};

use rand::RngExt as _;

/// Below this live well-known services.
const LOWEST: u16 = 10_000;
/// So many free ports are usually enough to find a few by chance.
const ENOUGH: u16 = 1000;

/// Free ports, held until their process starts.
///
/// They lie outside the kernel's range for outgoing connections: a child that died must find its port free again, and
/// any client on the machine could have been given an ephemeral one meanwhile.
#[derive(Debug)]
pub struct Ports {
    held: BTreeMap<u16, TcpListener>,
}

impl Ports {
    /// Takes `count` free ports.
    pub fn reserve(count: usize) -> std::io::Result<Self> {
        let ephemeral = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
        let (low, high) = candidates(&ephemeral);
        let mut held = BTreeMap::new();
        let width = u32::from(high - low) + 1;
        let start = rand::rng().random_range(0..width);
        for step in 0..width {
            if held.len() == count {
                break;
            }
            let port = low + ((start + step) % width) as u16;
            if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
                held.insert(port, listener);
            }
        }
        if held.len() < count {
            return Err(std::io::Error::other(format!(
                "only {} of {count} ports from {low} to {high} are free on 127.0.0.1",
                held.len()
            )));
        }
        Ok(Self { held })
    }

    /// The ports, lowest first.
    pub fn list(&self) -> Vec<u16> {
        self.held.keys().copied().collect()
    }

    /// Lets go of a port, just before its process binds it. Ports that are not held are ignored.
    pub fn release(&mut self, port: u16) {
        self.held.remove(&port);
    }
}

/// The widest range of ports that the kernel does not hand to outgoing connections.
fn candidates(ip_local_port_range: &str) -> (u16, u16) {
    let mut ends = ip_local_port_range
        .split_whitespace()
        .filter_map(|end| end.parse::<u16>().ok());
    let (low, high) = (ends.next().unwrap_or(32_768), ends.next().unwrap_or(60_999));
    if low > LOWEST + ENOUGH {
        (LOWEST, low - 1)
    } else if u16::MAX - high > ENOUGH {
        (high + 1, u16::MAX)
    } else {
        (LOWEST, u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_stay_out_of_the_ephemeral_range() {
        assert_eq!(candidates("32768\t60999\n"), (10_000, 32_767));
        assert_eq!(candidates("1024\t50000\n"), (50_001, 65_535));
        assert_eq!(candidates("1024\t65535\n"), (10_000, 65_535));
        assert_eq!(candidates(""), (10_000, 32_767));
    }

    #[test]
    fn a_held_port_is_taken_and_a_released_one_free() {
        let mut ports = Ports::reserve(6).unwrap();
        let list = ports.list();
        assert_eq!(list.len(), 6);
        assert!(TcpListener::bind((Ipv4Addr::LOCALHOST, list[2])).is_err());
        ports.release(list[2]);
        TcpListener::bind((Ipv4Addr::LOCALHOST, list[2])).unwrap();
    }
}
