//! A TCP relay between decode and prefill that can freeze, cut or damage what passes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What happens to one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Everything passes.
    Pass,
    /// Nothing passes, the sockets stay open, nothing is lost: a stopped process, a full queue.
    Freeze,
    /// The sockets close.
    Cut,
    /// Freezes once so many bytes have passed.
    FreezeAfter(u64),
    /// Cuts once so many bytes have passed.
    CutAfter(u64),
    /// 16 KiB pass in each of these.
    Slow(Duration),
    /// Flips the lowest bit of the byte at this offset.
    FlipAt(u64),
}

/// One direction of all connections.
struct Lane {
    rule: watch::Sender<Rule>,
    passed: AtomicU64,
}

/// What one connection and the relay share beside the lanes.
#[derive(Default)]
struct Established {
    /// Connections accepted before this many stay frozen for good.
    frozen: watch::Sender<u64>,
    accepted: AtomicU64,
    open: AtomicU64,
}

/// A running relay; dropping it closes everything.
pub struct Relay {
    pub addr: SocketAddr,
    to_server: Arc<Lane>,
    to_client: Arc<Lane>,
    target: watch::Sender<Option<SocketAddr>>,
    established: Arc<Established>,
    accept: JoinHandle<()>,
}

impl Relay {
    /// Listens; where to is said by [`Relay::forward_to`], once that is known.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let lane = || {
            Arc::new(Lane {
                rule: watch::Sender::new(Rule::Pass),
                passed: AtomicU64::new(0),
            })
        };
        let (to_server, to_client) = (lane(), lane());
        let lanes = (Arc::clone(&to_server), Arc::clone(&to_client));
        let target = watch::Sender::new(None::<SocketAddr>);
        let mut server = target.subscribe();
        let established = Arc::new(Established::default());
        let shared = Arc::clone(&established);
        let accept = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((mut client, _)) = listener.accept().await {
                let Ok(server) = server.wait_for(Option::is_some).await.map(|addr| addr.unwrap()) else {
                    return;
                };
                let Ok(mut server) = TcpStream::connect(server).await else {
                    continue;
                };
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                let (up, down) = (Arc::clone(&lanes.0), Arc::clone(&lanes.1));
                let shared = Arc::clone(&shared);
                let number = shared.accepted.fetch_add(1, Ordering::SeqCst);
                shared.open.fetch_add(1, Ordering::SeqCst);
                connections.spawn(async move {
                    let mut frozen = shared.frozen.subscribe();
                    {
                        let (client_read, client_write) = client.split();
                        let (server_read, server_write) = server.split();
                        tokio::select! {
                            () = pump(client_read, server_write, &up) => {}
                            () = pump(server_read, client_write, &down) => {}
                            frozen = frozen.wait_for(|n| number < *n) => drop(frozen),
                        }
                    }
                    if number < *shared.frozen.borrow() {
                        // silent, but open until either end gives up
                        tokio::select! {
                            () = closed(&client) => {}
                            () = closed(&server) => {}
                        }
                    }
                    shared.open.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self {
            addr,
            to_server,
            to_client,
            target,
            established,
            accept,
        }
    }

    pub fn forward_to(&self, server: SocketAddr) {
        self.target.send_replace(Some(server));
    }

    pub fn to_server(&self, rule: Rule) {
        self.to_server.rule.send_replace(rule);
    }

    pub fn to_client(&self, rule: Rule) {
        self.to_client.rule.send_replace(rule);
    }

    pub fn both(&self, rule: Rule) {
        self.to_server(rule);
        self.to_client(rule);
    }

    /// Connections of now never pass a byte again; later ones do.
    pub fn freeze_established(&self) {
        let number = self.established.accepted.load(Ordering::SeqCst);
        self.established.frozen.send_replace(number);
    }

    /// Connections that neither end has closed.
    pub fn connections(&self) -> u64 {
        self.established.open.load(Ordering::SeqCst)
    }

    /// Bytes that passed towards the client.
    pub fn passed_to_client(&self) -> u64 {
        self.to_client.passed.load(Ordering::SeqCst)
    }

    /// The rule towards the client now: a limit that was reached shows as `Freeze` or `Cut`.
    pub fn rule_to_client(&self) -> Rule {
        *self.to_client.rule.borrow()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

/// Returns once the other end of `socket` has closed it; what it said before is swallowed.
async fn closed(socket: &TcpStream) {
    let mut swallowed = [0; 4096];
    loop {
        if socket.readable().await.is_err() {
            return;
        }
        match socket.try_read(&mut swallowed) {
            Ok(0) => return,
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

async fn pump(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, lane: &Lane) {
    let mut rule = lane.rule.subscribe();
    let mut buffer = vec![0; 16 * 1024];
    loop {
        let now = *rule.borrow_and_update();
        let passed = lane.passed.load(Ordering::SeqCst);
        let room = match now {
            Rule::Cut => return,
            Rule::Freeze => {
                if rule.changed().await.is_err() {
                    return;
                }
                continue;
            }
            Rule::FreezeAfter(limit) | Rule::CutAfter(limit) if passed >= limit => {
                let then = if matches!(now, Rule::CutAfter(_)) {
                    Rule::Cut
                } else {
                    Rule::Freeze
                };
                lane.rule.send_replace(then);
                continue;
            }
            Rule::FreezeAfter(limit) | Rule::CutAfter(limit) => (limit - passed) as usize,
            Rule::Pass | Rule::FlipAt(_) | Rule::Slow(_) => buffer.len(),
        };
        let room = room.min(buffer.len());
        let n = tokio::select! {
            biased;
            changed = rule.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
            read = from.read(&mut buffer[..room]) => match read {
                Ok(0) | Err(_) => return,
                Ok(n) => n,
            },
        };
        let first = lane.passed.fetch_add(n as u64, Ordering::SeqCst);
        if let Rule::FlipAt(at) = now
            && let Some(i) = at.checked_sub(first)
            && i < n as u64
        {
            buffer[i as usize] ^= 1;
        }
        if let Rule::Slow(each) = now {
            tokio::time::sleep(each).await;
        }
        if to.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}
