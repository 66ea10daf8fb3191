//! Places for processes on this machine: names and addresses that stay while revisions come and go.

use std::net::{Ipv4Addr, SocketAddr};

use serde::{Deserialize, Serialize};
use tandem_crds::{EngineRole, PDDeploymentSpec};

/// Control, data, admin and health of a prefill.
const PREFILL_PORTS: usize = 4;
/// Control, admin and health of a decode.
const DECODE_PORTS: usize = 3;
/// Admin and health of the router; its main address is given.
pub const ROUTER_PORTS: usize = 2;

/// What a process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Prefill,
    Decode,
    Router,
}

impl From<tandem_crds::Role> for Role {
    fn from(role: tandem_crds::Role) -> Self {
        match role {
            tandem_crds::Role::Prefill => Self::Prefill,
            tandem_crds::Role::Decode => Self::Decode,
            tandem_crds::Role::Router => Self::Router,
        }
    }
}

impl From<Role> for tandem_crds::Role {
    fn from(role: Role) -> Self {
        match role {
            Role::Prefill => Self::Prefill,
            Role::Decode => Self::Decode,
            Role::Router => Self::Router,
        }
    }
}

/// A place for one process, whichever revision it is of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// For people: `prefill-0`, `decode-0`, `router`.
    pub name: String,
    pub role: Role,
    /// gRPC for an engine, HTTP for the router.
    pub listen: SocketAddr,
    /// KV bytes of a prefill.
    pub data: Option<SocketAddr>,
    /// gRPC for an engine, HTTP for the router, behind the token.
    pub admin: SocketAddr,
    /// `/readyz`, `/livez`, `/metrics`.
    pub ops: SocketAddr,
}

impl Slot {
    /// All of its ports.
    pub fn ports(&self) -> impl Iterator<Item = u16> {
        let all = [Some(self.listen), self.data, Some(self.admin), Some(self.ops)];
        all.into_iter().flatten().map(|address| address.port())
    }

    /// The router's place with other ports beside its main address.
    pub fn moved(&self, ports: &[u16]) -> Self {
        let other = |at: usize, old: SocketAddr| {
            let port = ports.get(at).copied().unwrap_or(old.port());
            SocketAddr::new(old.ip(), port)
        };
        Self {
            admin: other(0, self.admin),
            ops: other(1, self.ops),
            ..self.clone()
        }
    }
}

/// How many loopback ports [`slots`] needs.
pub fn ports_needed(spec: &PDDeploymentSpec) -> usize {
    count(&spec.prefill) * PREFILL_PORTS + count(&spec.decode) * DECODE_PORTS + ROUTER_PORTS
}

/// Engine processes.
pub fn engines(spec: &PDDeploymentSpec) -> usize {
    count(&spec.prefill) + count(&spec.decode)
}

fn count(role: &EngineRole) -> usize {
    usize::try_from(role.replicas).unwrap_or(0)
}

/// Places for prefills, then decodes, then the router at `http`. `ports` holds at least [`ports_needed`] free ports.
///
/// # Errors
/// Too few ports.
pub fn slots(spec: &PDDeploymentSpec, http: SocketAddr, ports: &[u16]) -> Result<Vec<Slot>, String> {
    if ports.len() < ports_needed(spec) {
        return Err(format!(
            "{} loopback ports are not the {} needed",
            ports.len(),
            ports_needed(spec)
        ));
    }
    let mut ports = ports.iter().map(|&port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    // The length was checked above, so no address is the unusable port 0.
    let mut next = || ports.next().unwrap_or(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let mut all = Vec::new();
    for (role, name, count) in [
        (Role::Prefill, "prefill", count(&spec.prefill)),
        (Role::Decode, "decode", count(&spec.decode)),
    ] {
        for index in 0..count {
            all.push(Slot {
                name: format!("{name}-{index}"),
                role,
                listen: next(),
                data: (role == Role::Prefill).then(&mut next),
                admin: next(),
                ops: next(),
            });
        }
    }
    all.push(Slot {
        name: "router".to_owned(),
        role: Role::Router,
        listen: http,
        data: None,
        admin: next(),
        ops: next(),
    });
    Ok(all)
}
