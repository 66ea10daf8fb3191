//! Worker threads that run one function together, and the barrier between its parts.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// How long a waiter spins: an uncontended stage of one token takes some 20 us, and its workers differ by a few.
const SPIN: Duration = Duration::from_micros(10);
/// After that it yields, for other engines on the same cores; after this much in all it sleeps.
const YIELD: Duration = Duration::from_micros(60);

/// Lets `n` threads wait for each other, again and again.
pub struct Barrier {
    n: usize,
    arrived: AtomicUsize,
    phase: AtomicUsize,
    broken: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

/// Somebody will not come: from then on nobody waits here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Broken;

impl Barrier {
    /// For `n` threads.
    pub fn new(n: usize) -> Self {
        Self {
            n,
            arrived: AtomicUsize::new(0),
            phase: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// Returns when all have called it; what they wrote before is visible after.
    pub fn wait(&self) {
        // a pool's barrier is never broken: a worker that cannot come ends the process
        let _ = self.wait_until(None);
    }

    /// The same, but breaks the barrier if it takes longer than `limit`.
    pub fn wait_within(&self, limit: Duration) -> Result<(), Broken> {
        self.wait_until(Some(Instant::now() + limit))
    }

    /// Whoever waits here now or will returns at once.
    pub fn break_up(&self) {
        // in this order: who reads the phase after its change sees that the barrier is broken
        self.broken.store(true, Ordering::SeqCst);
        self.phase.fetch_add(1, Ordering::SeqCst);
        let _guard = self.lock.lock();
        self.wake.notify_all();
    }

    fn whole(&self) -> Result<(), Broken> {
        if self.broken.load(Ordering::SeqCst) {
            return Err(Broken);
        }
        Ok(())
    }

    fn wait_until(&self, deadline: Option<Instant>) -> Result<(), Broken> {
        if self.n == 1 {
            return Ok(());
        }
        let phase = self.phase.load(Ordering::Acquire);
        self.whole()?;
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.n {
            self.arrived.store(0, Ordering::Relaxed);
            // a sleeper counts itself before it looks at the phase, the last one changes the phase before it looks at the count:
            // in one total order one of the two sees the other
            self.phase.store(phase.wrapping_add(1), Ordering::SeqCst);
            if self.sleepers.load(Ordering::SeqCst) > 0 {
                let _guard = self.lock.lock();
                self.wake.notify_all();
            }
            return Ok(());
        }
        let start = Instant::now();
        loop {
            for _ in 0..8 {
                if self.phase.load(Ordering::Acquire) != phase {
                    return self.whole();
                }
                spin_loop();
            }
            let waited = start.elapsed();
            if waited > YIELD {
                break;
            }
            if waited > SPIN {
                std::thread::yield_now();
            }
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.lock.lock();
        let mut late = false;
        while self.phase.load(Ordering::SeqCst) == phase && !late {
            match deadline {
                None => self.wake.wait(&mut guard),
                Some(deadline) => late = self.wake.wait_until(&mut guard, deadline).timed_out(),
            }
        }
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        if late && self.phase.load(Ordering::SeqCst) == phase {
            self.break_up();
        }
        self.whole()
    }
}

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    barrier: Arc<Barrier>,
    /// Written by the owner while the workers wait at the barrier, read by them after it.
    job: UnsafeCell<Option<Job>>,
    stop: AtomicBool,
}

// SAFETY: `job` is written only between two barriers at which all workers wait, and read only after the second.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is only followed while `Pool::run` keeps what it points to alive.
unsafe impl Send for Shared {}

/// `threads - 1` workers; the caller of [`Pool::run`] is worker 0.
pub struct Pool {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
}

/// A worker that unwinds would leave the others at a barrier for ever: the process ends instead, with the panic's message.
struct AbortOnUnwind;

impl Drop for AbortOnUnwind {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

impl Pool {
    /// Starts the workers.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            barrier: Arc::new(Barrier::new(threads)),
            job: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
        });
        let mut handles = Vec::new();
        for t in 1..threads {
            let own = Arc::clone(&shared);
            let worker = std::thread::Builder::new()
                .name(format!("compute-{t}"))
                .spawn(move || work(&own, t));
            match worker {
                Ok(h) => handles.push(h),
                Err(e) => {
                    // those already there wait at a barrier that will never fill; they end with the process, which does not serve
                    return Err(e);
                }
            }
        }
        Ok(Self { shared, handles })
    }

    /// Threads, the caller's included.
    pub fn threads(&self) -> usize {
        self.handles.len() + 1
    }

    /// Between the parts of a running job; every worker must call it equally often.
    pub fn barrier(&self) -> &Arc<Barrier> {
        &self.shared.barrier
    }

    /// Runs `others(1..threads)` on the workers and `own` here, and returns when all are done.
    pub fn run(&mut self, own: impl FnOnce(), others: &(dyn Fn(usize) + Sync)) {
        let guard = AbortOnUnwind;
        if self.handles.is_empty() {
            own();
            drop(guard);
            return;
        }
        // SAFETY: the workers wait at the barrier (nobody else runs: `&mut self`), so nobody reads `job` now. The lifetime is
        // erased, but `others` outlives this call, and the second barrier below is passed only when every worker is done with it.
        unsafe {
            *self.shared.job.get() = Some(std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(others));
        }
        self.shared.barrier.wait();
        own();
        self.shared.barrier.wait();
        drop(guard);
    }
}

fn work(shared: &Shared, t: usize) {
    let guard = AbortOnUnwind;
    loop {
        shared.barrier.wait();
        if shared.stop.load(Ordering::Acquire) {
            break;
        }
        // SAFETY: written before the barrier just passed, and alive until the next one (see `Pool::run`).
        if let Some(job) = unsafe { *shared.job.get() } {
            // SAFETY: as above.
            (unsafe { &*job })(t);
        }
        shared.barrier.wait();
    }
    drop(guard);
}

impl Drop for Pool {
    fn drop(&mut self) {
        if self.handles.is_empty() {
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.shared.barrier.wait();
        for h in self.handles.drain(..) {
            if h.join().is_err() {
                tracing::error!("a compute worker panicked");
            }
        }
    }
}

/// The `t`-th of `n` even parts of `0..len`, in multiples of `unit`.
pub fn share(len: usize, unit: usize, t: usize, n: usize) -> Range<usize> {
    let units = len.div_ceil(unit);
    (units * t / n * unit).min(len)..(units * (t + 1) / n * unit).min(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stage_sees_what_the_stage_before_wrote() {
        // more threads than cores: some park
        for threads in [1, 2, 5] {
            let mut pool = Pool::new(threads).unwrap();
            let barrier = Arc::clone(pool.barrier());
            let cells: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for run in 0..50 {
                let stages = |t: usize| {
                    for stage in 0..20 {
                        let stamp = run * 20 + stage + 1;
                        cells[t].store(stamp, Ordering::Relaxed);
                        barrier.wait();
                        assert!(
                            cells.iter().all(|c| c.load(Ordering::Relaxed) == stamp),
                            "{threads} threads, stage {stage}"
                        );
                        barrier.wait();
                    }
                };
                pool.run(|| stages(0), &stages);
            }
        }
    }

    #[test]
    fn a_worker_that_comes_late_is_waited_for() {
        // long enough that the other one parks
        let mut pool = Pool::new(2).unwrap();
        let barrier = Arc::clone(pool.barrier());
        let done = AtomicBool::new(false);
        for late in [0, 1] {
            done.store(false, Ordering::Relaxed);
            let stage = |t: usize| {
                if t == late {
                    let start = Instant::now();
                    while start.elapsed() < 20 * YIELD {
                        std::thread::yield_now();
                    }
                    done.store(true, Ordering::Relaxed);
                }
                barrier.wait();
                assert!(done.load(Ordering::Relaxed));
            };
            pool.run(|| stage(0), &stage);
        }
    }

    #[test]
    fn shares_cover_everything_once() {
        for len in [0, 1, 5, 24, 72, 6144] {
            for unit in [1, 2, 4] {
                for n in [1, 2, 3, 7] {
                    let all: Vec<usize> = (0..n).flat_map(|t| share(len, unit, t, n)).collect();
                    assert_eq!(all, (0..len).collect::<Vec<_>>(), "{len} in {n}");
                    assert!((0..n).all(
                        |t| share(len, unit, t, n).start.is_multiple_of(unit) || share(len, unit, t, n).is_empty()
                    ));
                }
            }
        }
    }
}
