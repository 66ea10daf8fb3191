//! Aligned zeroed memory that several workers write in disjoint parts.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::backend::BackendError;

const CACHE_LINE: usize = 64;
const HUGE_PAGE: usize = 2 << 20;

/// A block of zeroed memory, aligned to a cache line or, when large, to a huge page.
#[derive(Debug)]
pub struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory without thread affinity; who writes where is the business of those who take raw pointers from it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// `bytes` zeroed bytes for `what`. `huge` asks for huge pages, for memory that is all used soon.
    pub fn zeroed(what: &'static str, bytes: usize, huge: bool) -> Result<Self, BackendError> {
        let error = BackendError::OutOfMemory { what, bytes };
        let align = if bytes >= HUGE_PAGE { HUGE_PAGE } else { CACHE_LINE };
        let Some(size) = bytes.max(1).checked_next_multiple_of(align) else {
            return Err(error);
        };
        let Ok(layout) = Layout::from_size_align(size, align) else {
            return Err(error);
        };
        // SAFETY: the layout's size is at least one.
        let Some(start) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            return Err(error);
        };
        if huge && align == HUGE_PAGE {
            // SAFETY: the range was just allocated. The call is advice; a refusal changes nothing.
            unsafe { libc::madvise(start.as_ptr().cast(), size, libc::MADV_HUGEPAGE) };
        }
        Ok(Self { start, layout })
    }

    /// The first element, as `T`s. Alignment: at least a cache line.
    pub fn ptr<T>(&self) -> *mut T {
        self.start.as_ptr().cast()
    }

    /// Usable bytes; at least what was asked for.
    pub fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
