//! Kernels for AMX's int8 tiles; what is not here is the AVX-512 table's, and what is here gives the same bits.
//!
//! | file | holds |
//! | --- | --- |
//! | `tiles.rs` | the tile registers and their instructions |
//! | `matmul.rs` | quantised weights x many rows of int8 |

#![cfg_attr(
    target_arch = "x86_64",
    allow(
        clippy::wildcard_imports,
        reason = "intrinsics are a vocabulary of their own; the lint is silent in test builds"
    ),
    expect(clippy::cast_ptr_alignment, reason = "scratch and its parts are aligned to 64")
)]

#[cfg(target_arch = "x86_64")]
mod matmul;
#[cfg(target_arch = "x86_64")]
mod tiles;

use super::avx512;
use super::kernels::Kernels;

/// Has this CPU the instructions, and may this process use them?
#[cfg(target_arch = "x86_64")]
pub fn available() -> bool {
    avx512::available() && tiles::available()
}

/// Has this CPU the instructions?
#[cfg(not(target_arch = "x86_64"))]
pub fn available() -> bool {
    false
}

/// The table.
#[cfg(target_arch = "x86_64")]
pub const KERNELS: Kernels = Kernels {
    matmul_int8: matmul::matmul,
    ..avx512::KERNELS
};

/// Never reached: `available` says no.
#[cfg(not(target_arch = "x86_64"))]
pub const KERNELS: Kernels = super::scalar::KERNELS;
