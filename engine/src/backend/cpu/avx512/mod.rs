//! Quantised matmuls for AVX-512 with VNNI; everything else is the AVX2 table's.
//!
//! One instruction multiplies and adds 64 int8 (or 32 int16) pairs into 16 outputs, so two panels lie side by side in a vector. The f32
//! chain per output is that of the other tables, and so are the bits.

#![cfg_attr(
    target_arch = "x86_64",
    allow(
        clippy::wildcard_imports,
        reason = "intrinsics are a vocabulary of their own; the lint is silent in test builds"
    ),
    expect(
        clippy::cast_ptr_alignment,
        reason = "vectors are loaded by instructions that take any address, or from aligned scratch"
    )
)]

#[cfg(target_arch = "x86_64")]
mod byte;
#[cfg(target_arch = "x86_64")]
mod nibble;

use super::avx2;
use super::kernels::Kernels;

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
    matmul_nibble: nibble::matmul,
    matmul_byte: byte::matmul,
    ..avx2::KERNELS
};

/// Never reached: `available` says no.
#[cfg(not(target_arch = "x86_64"))]
pub const KERNELS: Kernels = super::scalar::KERNELS;
