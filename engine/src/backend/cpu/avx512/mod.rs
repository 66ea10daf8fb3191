//! Kernels for AVX-512 with VNNI; what is not here is the AVX2 table's, and what is here gives the same bits.
//!
//! | file | holds |
//! | --- | --- |
//! | `lanes.rs` | small helpers on one vector |
//! | `load.rs` | blocks of quantised weights into registers |
//! | `matmul.rs` | quantised weights x int8 |
//! | `quantise.rs` | quantisation |
//! | `float.rs` | f32, f16, bf16 weights x f32 |
//! | `attend.rs` | attention over pages |
//!
//! One instruction multiplies and adds 64 int8 pairs into 16 outputs, so two panels lie side by side in a vector. The f32 chain per
//! output is that of the other tables, and so are the bits.

#![cfg_attr(
    target_arch = "x86_64",
    allow(
        clippy::wildcard_imports,
        reason = "intrinsics are a vocabulary of their own; the lint is silent in test builds"
    ),
    expect(
        clippy::needless_range_loop,
        reason = "a register tile's rows index several arrays at once"
    )
)]

#[cfg(target_arch = "x86_64")]
mod attend;
#[cfg(target_arch = "x86_64")]
mod float;
#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(target_arch = "x86_64")]
pub mod load;
#[cfg(target_arch = "x86_64")]
mod matmul;
#[cfg(target_arch = "x86_64")]
mod quantise;

use super::avx2;
use super::kernels::Kernels;
#[cfg(target_arch = "x86_64")]
pub use lanes::put;
#[cfg(target_arch = "x86_64")]
pub use matmul::matmul;

/// Has this CPU the instructions?
#[cfg(target_arch = "x86_64")]
pub fn available() -> bool {
    avx2::available()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vnni")
}

/// Has this CPU the instructions?
#[cfg(not(target_arch = "x86_64"))]
pub fn available() -> bool {
    false
}

/// The table. Inputs stay signed at any number of rows: nothing saturates here.
#[cfg(target_arch = "x86_64")]
pub const KERNELS: Kernels = Kernels {
    many_rows: usize::MAX,
    quantise8: quantise::quantise8,
    matmul_int8: matmul::matmul,
    matmul_float: float::matmul,
    attend: attend::attend,
    ..avx2::KERNELS
};

/// Never reached: `available` says no.
#[cfg(not(target_arch = "x86_64"))]
pub const KERNELS: Kernels = super::scalar::KERNELS;
