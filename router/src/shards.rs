//! The threads that serve. Each has a runtime of its own, and all that a connection needs is on the thread where it is:
//! its requests, and a connection to each engine.
//!
//! On one runtime whose threads share their tasks, a request that is alone wakes a second thread each time the first has something to
//! do: half again the CPU time of a short request.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::{CancellationToken, DropGuard};

thread_local! {
    static HERE: Cell<usize> = const { Cell::new(0) };
}

/// Which shard this thread is; the first on a thread that is none.
pub fn here() -> usize {
    HERE.get()
}

/// The threads. Dropping the last clone ends them, with what still runs there.
#[derive(Debug, Clone)]
pub struct Shards {
    shards: Arc<[Shard]>,
    _stop: Option<Arc<DropGuard>>,
}

#[derive(Debug)]
struct Shard {
    runtime: Handle,
    connections: AtomicUsize,
}

impl Shards {
    /// Starts so many.
    pub fn start(threads: usize) -> io::Result<Self> {
        let stop = CancellationToken::new();
        let shard = |index| {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let handle = runtime.handle().clone();
            let stopped = stop.clone();
            std::thread::Builder::new()
                .name(format!("serve-{index}"))
                .spawn(move || {
                    HERE.set(index);
                    runtime.block_on(stopped.cancelled());
                })?;
            Ok(Shard {
                runtime: handle,
                connections: AtomicUsize::new(0),
            })
        };
        Ok(Self {
            shards: (0..threads).map(shard).collect::<io::Result<_>>()?,
            _stop: Some(Arc::new(stop.clone().drop_guard())),
        })
    }

    /// The runtime of this call alone, which then has to run on one thread.
    pub fn current() -> Self {
        let shard = Shard {
            runtime: Handle::current(),
            connections: AtomicUsize::new(0),
        };
        Self {
            shards: Arc::new([shard]),
            _stop: None,
        }
    }

    /// Their runtimes, in the order of [`here`].
    pub fn runtimes(&self) -> impl Iterator<Item = &Handle> {
        self.shards.iter().map(|shard| &shard.runtime)
    }

    /// A place for one more connection, where there are fewest.
    pub fn place(&self) -> Place {
        let fewest = (0..self.shards.len()).min_by_key(|&at| self.shards[at].connections.load(Ordering::Relaxed));
        let place = Place {
            shards: Arc::clone(&self.shards),
            at: fewest.unwrap_or(0),
        };
        place.shard().connections.fetch_add(1, Ordering::Relaxed);
        place
    }
}

/// A connection's place, for as long as this lives.
#[derive(Debug)]
pub struct Place {
    shards: Arc<[Shard]>,
    at: usize,
}

impl Place {
    fn shard(&self) -> &Shard {
        &self.shards[self.at]
    }

    /// Where it runs.
    pub fn runtime(&self) -> Handle {
        self.shard().runtime.clone()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shard().connections.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_gets_all_connections() {
        let shards = Shards::start(3).unwrap();
        let mut places: Vec<_> = (0..7).map(|_| shards.place()).collect();
        let counts = |places: &[Place]| [0, 1, 2].map(|at| places.iter().filter(|place| place.at == at).count());
        assert_eq!(counts(&places), [3, 2, 2]);
        // those that have left leave room
        places.retain(|place| place.at != 1);
        places.extend((0..2).map(|_| shards.place()));
        assert_eq!(counts(&places), [3, 2, 2]);
    }

    #[tokio::test]
    async fn a_thread_is_another_than_its_number_says_or_outlives_its_shards() {
        let shards = Shards::start(2).unwrap();
        assert_eq!(here(), 0);
        let mut left = Vec::new();
        for (at, runtime) in shards.runtimes().enumerate() {
            assert_eq!(runtime.spawn(async { here() }).await.unwrap(), at);
            left.push(runtime.spawn(std::future::pending::<()>()));
        }
        drop(shards);
        for task in left {
            let ended = tokio::time::timeout(std::time::Duration::from_mins(1), task).await;
            assert!(ended.expect("the thread goes on").unwrap_err().is_cancelled());
        }
    }
}
