//! The tile registers: who may use them, their shapes, and the instructions, which the standard library does not offer yet.
//!
//! Nothing here tells the compiler that tile registers change: it uses none itself. What was measured of
//! the hardware (Sapphire Rapids): a product of 16 rows takes 16 cycles whatever its depth, a store 17, and the two overlap where the
//! store is of an older product. While tile instructions are about, and some 600 cycles longer, the second port for floating point
//! and VNNI sleeps, so that vectors multiply at half speed; it still adds integers.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// Rows of a tile, and its columns of 4 bytes.
pub const SIDE: usize = 16;
/// Bytes of a tile of sums, or of inputs or weights of full depth.
pub const SUMS: usize = SIDE * SIDE * 4;

/// Has this CPU tiles with int8 products, does the system keep them for us, and does it let us use them? Asks for that, once a process.
pub fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        const TILE_AND_INT8: u32 = 1 << 24 | 1 << 25;
        let leaves = __cpuid_count(0, 0).eax;
        leaves >= 7 && __cpuid_count(7, 0).edx & TILE_AND_INT8 == TILE_AND_INT8 && permitted()
    })
}

/// The system keeps the state of tiles only for processes that asked for it: 8 KiB more for each thread that uses them.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: takes two numbers. A system that does not know tiles says no.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// The shapes: sums in tiles 0 and 1; inputs and weights of a block of 32 in 4 and 5, of half a block in 6 and 7.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static SHAPES: Shapes = {
    let mut row_bytes = [0; 16];
    let mut rows = [0; 16];
    let shapes = [
        (0, 64, 16),
        (1, 64, 16),
        (4, 32, 16),
        (5, 64, 8),
        (6, 16, 16),
        (7, 64, 4),
    ];
    let mut i = 0;
    while i < shapes.len() {
        (row_bytes[shapes[i].0], rows[shapes[i].0]) = (shapes[i].1, shapes[i].2);
        i += 1;
    }
    Shapes {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes,
        rows,
    }
};

/// This thread's tile registers, set up; given back when dropped, so that the system need not save them. 200 cycles both.
pub struct Tiles(());

#[expect(clippy::unused_self, reason = "who has one has set them up")]
impl Tiles {
    /// Sets them up.
    ///
    /// # Safety
    /// [`available`] said yes.
    #[inline]
    pub unsafe fn new() -> Self {
        // SAFETY: reads 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const SHAPES, options(nostack, readonly, preserves_flags)) };
        Self(())
    }

    /// Sums number `SECOND` of the two: products of 16 rows of inputs, `inputs_stride` bytes apart, with packed weights of 16 outputs.
    /// Where `SECOND`, the inputs are those of the call before. Half a block where `HALF`.
    ///
    /// # Safety
    /// Readable inputs and weights.
    #[inline]
    pub unsafe fn multiply<const SECOND: bool, const HALF: bool>(
        &self,
        inputs: *const i8,
        inputs_stride: usize,
        weights: *const u8,
    ) {
        // SAFETY: the caller's; tiles are set up.
        unsafe {
            match (SECOND, HALF) {
                (false, false) => asm!(
                    "tilezero tmm0", "tileloadd tmm4, [{a} + {s}]", "tileloadd tmm5, [{w} + {line}]", "tdpbssd tmm0, tmm4, tmm5",
                    a = in(reg) inputs, s = in(reg) inputs_stride, w = in(reg) weights, line = in(reg) 64usize,
                    options(nostack, readonly, preserves_flags)
                ),
                (true, false) => asm!(
                    "tilezero tmm1", "tileloadd tmm5, [{w} + {line}]", "tdpbssd tmm1, tmm4, tmm5",
                    w = in(reg) weights, line = in(reg) 64usize,
                    options(nostack, readonly, preserves_flags)
                ),
                (false, true) => asm!(
                    "tilezero tmm0", "tileloadd tmm6, [{a} + {s}]", "tileloadd tmm7, [{w} + {line}]", "tdpbssd tmm0, tmm6, tmm7",
                    a = in(reg) inputs, s = in(reg) inputs_stride, w = in(reg) weights, line = in(reg) 64usize,
                    options(nostack, readonly, preserves_flags)
                ),
                (true, true) => asm!(
                    "tilezero tmm1", "tileloadd tmm7, [{w} + {line}]", "tdpbssd tmm1, tmm6, tmm7",
                    w = in(reg) weights, line = in(reg) 64usize,
                    options(nostack, readonly, preserves_flags)
                ),
            }
        }
    }

    /// Writes the sums number `SECOND` as 16 rows of 16 i32.
    ///
    /// # Safety
    /// As many bytes that nobody else uses.
    #[inline]
    pub unsafe fn store<const SECOND: bool>(&self, to: *mut i32) {
        // SAFETY: the caller's; tiles are set up.
        unsafe {
            if SECOND {
                asm!("tilestored [{o} + {line}], tmm1", o = in(reg) to, line = in(reg) 64usize, options(nostack, preserves_flags));
            } else {
                asm!("tilestored [{o} + {line}], tmm0", o = in(reg) to, line = in(reg) 64usize, options(nostack, preserves_flags));
            }
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: touches the tile registers only.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}
