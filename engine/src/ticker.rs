//! A thread that looks at something again and again until it is dropped: it needs no runtime.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// A limit is looked at this often within its own length, so that it is overstepped by an eighth at most …
const TICKS_PER_LIMIT: u32 = 8;
/// … but no more often than this.
const SHORTEST: Duration = Duration::from_millis(5);

/// How long to wait between two looks at something that has `limit`.
pub fn tick(limit: Duration, longest: Duration) -> Duration {
    (limit / TICKS_PER_LIMIT).clamp(SHORTEST, longest)
}

/// The running thread; dropping it ends it.
pub struct Ticker {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// Waits as long as `pause` says, looks, and so on until `look` says that it is done.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn start(
        name: &str,
        pause: impl Fn() -> Duration + Send + 'static,
        mut look: impl FnMut() -> Again + Send + 'static,
    ) -> std::io::Result<Self> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let seen = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let (stopped, bell) = &*seen;
            let mut stopped = stopped.lock();
            while !*stopped {
                bell.wait_for(&mut stopped, pause());
                if let Again::No = MutexGuard::unlocked(&mut stopped, &mut look) {
                    return;
                }
            }
        })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

/// Whether to look again.
pub enum Again {
    /// After the next pause.
    Yes,
    /// The thread ends.
    No,
}

impl Drop for Ticker {
    fn drop(&mut self) {
        *self.stop.0.lock() = true;
        self.stop.1.notify_all();
        if let Some(thread) = self.thread.take() {
            // one that panicked has logged it; there is nothing left to do here
            let _ = thread.join();
        }
    }
}
