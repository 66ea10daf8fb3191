//! Fuzz targets, one a reader. `readers` are plain functions of bytes, which the crates' own tests run over the kept corpora too; here
//! each runs under libFuzzer and under an allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, Once, PoisonError};

/// The command is no library: its readers are taken from where they lie, under the names that they have there.
#[path = "../../cli/src/manifest.rs"]
pub mod manifest;
#[path = "../../cli/src/bench"]
pub mod bench {
    pub mod sse;
}

pub mod readers;

/// What one read may hold beside a multiple of its input.
pub const BASE_BYTES: usize = 256 * 1024;

/// The system's allocator, with a count of what is held and a limit on it.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
static HOOK: Once = Once::new();
static PANIC: Mutex<String> = Mutex::new(String::new());

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn grow(bytes: usize) {
    let held = HELD.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(held, Relaxed);
    if held > LIMIT.load(Relaxed) {
        // telling it allocates too; an allocator must not unwind
        LIMIT.store(usize::MAX, Relaxed);
        let place = Backtrace::force_capture();
        eprintln!("an allocation of {bytes} bytes makes the read hold more than it may\n{place}");
        std::process::abort();
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Reads `data`, and ends the process when it panics or holds more than [`BASE_BYTES`] and `factor` times the input at any moment. Says when one came
/// nearer to that than any before it.
pub fn guarded(factor: usize, data: &[u8], read: fn(&[u8])) {
    static NEAREST: AtomicUsize = AtomicUsize::new(0);
    let before = HELD.load(Relaxed);
    let allowed = BASE_BYTES + factor * data.len();
    PEAK.store(before, Relaxed);
    // a reader may take a library's panic as an error: only one that comes out here is a crash
    HOOK.call_once(|| {
        std::panic::set_hook(Box::new(|panic| {
            // telling it allocates too
            let limit = LIMIT.swap(usize::MAX, Relaxed);
            *PANIC.lock().unwrap_or_else(PoisonError::into_inner) = panic.to_string();
            LIMIT.store(limit, Relaxed);
        }));
    });
    LIMIT.store(before + allowed, Relaxed);
    let read = std::panic::catch_unwind(|| read(data));
    LIMIT.store(usize::MAX, Relaxed);
    if read.is_err() {
        eprintln!("{}", PANIC.lock().unwrap_or_else(PoisonError::into_inner));
        std::process::abort();
    }

    let held = PEAK.load(Relaxed) - before;
    let percent = 100 * held / allowed;
    if percent > NEAREST.fetch_max(percent, Relaxed) {
        eprintln!(
            "held at most: {held} bytes for an input of {}, {percent} % of what it may",
            data.len()
        );
    }
}

/// The entry of a target: the reader of this name, its input limited by its `FACTOR`.
#[macro_export]
macro_rules! target {
    ($reader:ident) => {
        libfuzzer_sys::fuzz_target!(|data: &[u8]| {
            $crate::guarded(
                $crate::readers::$reader::FACTOR,
                data,
                $crate::readers::$reader::read,
            )
        });
    };
}
