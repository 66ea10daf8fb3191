//! Kernels for AVX2 with FMA and F16C.
//!
//! | file | holds |
//! | --- | --- |
//! | `lanes.rs` | small helpers on one vector |
//! | `quantise.rs` | norm, quantisation, silu, rope, KV write: a row at a time |
//! | `load.rs` | blocks of quantised weights into registers |
//! | `matmul.rs` | quantised weights x few rows of int8, and which way is taken when |
//! | `many.rs` | weights of 4 to 6 bits x many rows of int8 |
//! | `byte.rs` | eight-bit weights x int8 |
//! | `float.rs` | f32, f16, bf16 weights x f32 |
//! | `attend.rs` | attention over pages |
//!
//! On another architecture only `available` remains, and says no.

#![cfg_attr(
    target_arch = "x86_64",
    expect(
        clippy::needless_range_loop,
        reason = "a register tile's rows index several arrays at once"
    ),
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
mod attend;
#[cfg(target_arch = "x86_64")]
mod byte;
#[cfg(target_arch = "x86_64")]
mod float;
#[cfg(target_arch = "x86_64")]
mod lanes;
#[cfg(target_arch = "x86_64")]
mod load;
#[cfg(target_arch = "x86_64")]
mod many;
#[cfg(target_arch = "x86_64")]
mod matmul;
#[cfg(target_arch = "x86_64")]
mod quantise;

use super::kernels::Kernels;
#[cfg(target_arch = "x86_64")]
pub use matmul::matmul_few;

/// Has this CPU the instructions?
#[cfg(target_arch = "x86_64")]
pub fn available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

/// Has this CPU the instructions?
#[cfg(not(target_arch = "x86_64"))]
pub fn available() -> bool {
    false
}

/// From this many rows on weights are unpacked once for all rows (at 4 rows the other way wins, at 16 this one; 12 is between).
#[cfg(target_arch = "x86_64")]
const MANY_ROWS: usize = 12;

/// The table.
#[cfg(target_arch = "x86_64")]
pub const KERNELS: Kernels = Kernels {
    many_rows: MANY_ROWS,
    rms_norm: quantise::rms_norm,
    quantise8: quantise::quantise8,
    matmul_int8: matmul::matmul,
    matmul_float: float::matmul,
    rope: quantise::rope,
    write_kv: quantise::write_kv,
    attend: attend::attend,
    silu_mul: quantise::silu_mul,
};

/// Never reached: `available` says no.
#[cfg(not(target_arch = "x86_64"))]
pub const KERNELS: Kernels = super::scalar::KERNELS;
