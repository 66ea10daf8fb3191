//! Aligned zeroed memory that several workers write in disjoint parts.

use memmap2::{Advice, MmapMut, MmapRaw};

use crate::backend::BackendError;

const CACHE_LINE: usize = 64;
const HUGE_PAGE: usize = 2 << 20;

/// A block of zeroed memory, aligned to a cache line or, when large, to a huge page. The machine gives its pages as they are first
/// written.
#[derive(Debug)]
pub struct Memory {
    /// Raw, since no reference may cover what several workers write.
    map: MmapRaw,
    /// Bytes before the aligned start.
    skip: usize,
    len: usize,
}

impl Memory {
    /// `bytes` zeroed bytes for `what`. `huge` asks for huge pages, for memory that is all used soon.
    pub fn zeroed(what: &'static str, bytes: usize, huge: bool) -> Result<Self, BackendError> {
        let error = || BackendError::OutOfMemory { what, bytes };
        let large = bytes >= HUGE_PAGE;
        let align = if large { HUGE_PAGE } else { CACHE_LINE };
        let len = bytes.max(1).checked_next_multiple_of(align).ok_or_else(error)?;
        // a mapping begins at any page: with room to begin at a huge one. What is never written costs addresses only
        let room = if large { HUGE_PAGE } else { 0 };
        let mapped = len.checked_add(room).ok_or_else(error)?;
        let map = MmapRaw::from(MmapMut::map_anon(mapped).map_err(|_| error())?);
        if huge && large {
            // before the first write, which settles the size of the page; a refusal costs speed only
            let _ = map.advise(Advice::HugePage);
        }
        let skip = map.as_mut_ptr().align_offset(align);
        Ok(Self { map, skip, len })
    }

    /// The first element, as `T`s. Alignment: at least a cache line.
    pub fn ptr<T>(&self) -> *mut T {
        self.map.as_mut_ptr().wrapping_add(self.skip).cast()
    }

    /// Usable bytes; at least what was asked for.
    pub fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Resident pages of this process, in bytes.
    fn resident() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    }

    #[test]
    fn memory_is_not_taken_before_it_is_written() {
        const MIB: usize = 1 << 20;
        let before = resident();
        let memory = Memory::zeroed("a test", 512 * MIB, false).unwrap();
        // tests beside this one take less
        let taken = resident().saturating_sub(before);
        assert!(
            taken < 256 * MIB,
            "{} MiB taken by a block that nobody has used",
            taken / MIB
        );
        // SAFETY: inside of the block.
        unsafe {
            assert_eq!(*memory.ptr::<u8>().add(300 * MIB), 0);
            memory.ptr::<u8>().write_bytes(1, 384 * MIB);
        }
        let taken = resident().saturating_sub(before);
        assert!(taken > 256 * MIB, "{} MiB seen: this test sees nothing", taken / MIB);
    }

    #[test]
    fn blocks_are_aligned_zeroed_and_as_long_as_asked() {
        for (bytes, align) in [
            (0, CACHE_LINE),
            (1, CACHE_LINE),
            (65, CACHE_LINE),
            (HUGE_PAGE - 1, CACHE_LINE),
            (HUGE_PAGE, HUGE_PAGE),
            (3 * HUGE_PAGE + 1, HUGE_PAGE),
        ] {
            for huge in [false, true] {
                let memory = Memory::zeroed("a test", bytes, huge).unwrap();
                assert!(memory.ptr::<u8>().addr().is_multiple_of(align), "{bytes} bytes");
                assert!(memory.len() >= bytes);
                // SAFETY: the block's length.
                let all = unsafe { std::slice::from_raw_parts_mut(memory.ptr::<u8>(), memory.len()) };
                assert!(all.iter().all(|b| *b == 0));
                all.fill(7);
            }
        }
        assert!(Memory::zeroed("a test", usize::MAX, true).is_err());
        assert!(Memory::zeroed("a test", 1 << 60, false).is_err());
    }
}
