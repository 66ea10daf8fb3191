//! A TCP relay: the wire between two processes, in the test's hands.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Relays every connection to `upstream`. Dropping it cuts all of them.
#[derive(Debug)]
pub struct Relay {
    addr: SocketAddr,
    shared: Arc<Shared>,
    accept: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    upstream: SocketAddr,
    /// Bytes from upstream that may pass, over all connections since the relay began.
    limit: watch::Sender<u64>,
    /// Bytes from upstream that have passed.
    passed: watch::Sender<u64>,
    connections: Mutex<Connections>,
}

#[derive(Debug, Default)]
struct Connections {
    next: u64,
    /// The upstream socket of each open connection, for `TCP_INFO`.
    open: BTreeMap<u64, OwnedFd>,
    /// What closed connections had received from upstream.
    closed_bytes: u64,
    opened: u64,
}

impl Relay {
    /// Listens on a free port of the loopback.
    pub async fn start(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let addr = listener.local_addr().expect("a bound socket has an address");
        let shared = Arc::new(Shared {
            upstream,
            limit: watch::channel(u64::MAX).0,
            passed: watch::channel(0).0,
            connections: Mutex::default(),
        });
        let accept = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self { addr, shared, accept }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Bytes that upstream has sent, headers of all protocols above TCP included, as the kernel counted them
    /// (`tcpi_bytes_received` of the relay's sockets towards upstream).
    pub fn received_bytes(&self) -> u64 {
        let connections = self.shared.connections.lock().expect("no holder panics");
        connections.closed_bytes + connections.open.values().map(bytes_received).sum::<u64>()
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> u64 {
        self.shared.connections.lock().expect("no holder panics").opened
    }

    /// Lets `bytes` more pass from upstream, then nothing until [`Relay::release`]. Exact for one connection; where
    /// several send at once, up to one buffer (64 KiB) more of each may pass.
    pub fn stop_after(&self, bytes: u64) {
        let passed = *self.shared.passed.borrow();
        self.shared.limit.send_replace(passed + bytes);
    }

    /// Waits until the stop has been reached: the peer behind the relay has got exactly that many bytes.
    pub async fn stopped(&self) {
        let limit = *self.shared.limit.borrow();
        let mut passed = self.shared.passed.subscribe();
        passed
            .wait_for(|&passed| passed >= limit)
            .await
            .expect("the relay lives");
    }

    /// Lets everything pass again.
    pub fn release(&self) {
        self.shared.limit.send_replace(u64::MAX);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accept.abort();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    // The connections are this task's own: aborting it drops them all.
    let mut tasks = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((downstream, _)) = accepted else { return };
                tasks.spawn(relay(downstream, Arc::clone(&shared)));
            }
            Some(_) = tasks.join_next() => {}
        }
    }
}

async fn relay(downstream: TcpStream, shared: Arc<Shared>) {
    // No upstream: closing at once is what a dead peer looks like.
    let Ok(upstream) = TcpStream::connect(shared.upstream).await else {
        return;
    };
    let _ = upstream.set_nodelay(true);
    let _ = downstream.set_nodelay(true);
    let counted = Counted::open(&shared, &upstream);
    let (up_read, up_write) = upstream.into_split();
    let (down_read, down_write) = downstream.into_split();
    // Either direction's end ends both: a half-closed peer is not what the product's connections have.
    tokio::select! {
        () = copy_limited(up_read, down_write, &shared) => {}
        () = copy(down_read, up_write) => {}
    }
    drop(counted);
}

/// Keeps a connection's counter readable while it is open, and adds it up when it closes.
struct Counted {
    id: u64,
    shared: Arc<Shared>,
}

impl Counted {
    fn open(shared: &Arc<Shared>, upstream: &TcpStream) -> Self {
        let fd = upstream
            .as_fd()
            .try_clone_to_owned()
            .expect("a second descriptor of the socket");
        let mut connections = shared.connections.lock().expect("no holder panics");
        let id = connections.next;
        connections.next += 1;
        connections.opened += 1;
        connections.open.insert(id, fd);
        Self {
            id,
            shared: Arc::clone(shared),
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut connections = self.shared.connections.lock().expect("no holder panics");
        if let Some(fd) = connections.open.remove(&self.id) {
            connections.closed_bytes += bytes_received(&fd);
        }
    }
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    let _ = tokio::io::copy(&mut from, &mut to).await;
}

async fn copy_limited(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, shared: &Shared) {
    let mut buffer = vec![0; 64 << 10];
    let mut limit = shared.limit.subscribe();
    loop {
        let room = {
            let passed = shared.passed.subscribe();
            let Ok(limit) = limit.wait_for(|limit| *limit > *passed.borrow()).await else {
                return;
            };
            (*limit - *passed.borrow()).min(buffer.len() as u64)
        };
        let Ok(count @ 1..) = from.read(&mut buffer[..room as usize]).await else {
            return;
        };
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
        shared.passed.send_modify(|passed| *passed += count as u64);
    }
}

/// `tcpi_bytes_received` of a TCP socket.
fn bytes_received(fd: &OwnedFd) -> u64 {
    // SAFETY: all-zero is a value of this plain C struct.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` and `length` live through the call, and `length` is the size of what `info` points at.
    let code = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    assert_eq!(code, 0, "TCP_INFO: {}", std::io::Error::last_os_error());
    info.tcpi_bytes_received
}
