//! The CPU backend.
//!
//! | file | holds |
//! | --- | --- |
//! | `memory.rs` | aligned memory |
//! | `pool.rs` | the worker threads and their barrier |
//! | `layout.rs` | how a quantised block lies in a panel |
//! | `pack.rs` | weights as panels of 8 outputs |
//! | `act.rs` | activations in the form that a matrix wants |
//! | `kv.rs` | the paged KV pool and its canonical bytes |
//! | `kernels.rs` | the table of kernels, one per instruction set: `scalar.rs`, `avx2/`, `avx512/`, `amx/` |
//! | `reduce.rs` | sums over ranks that are threads |
//! | `check.rs` | do an op's buffers, weights and bounds go together |
//! | `step.rs` | the ops, as each worker runs its share of them |
//!
//! All workers run the whole list of ops, each its fixed share, with a barrier where one reads what another wrote.

mod act;
mod amx;
mod avx2;
mod avx512;
mod check;
mod device;
mod kernels;
mod kv;
mod layout;
mod memory;
mod pack;
mod pool;
mod reduce;
mod scalar;
mod step;
#[cfg(test)]
mod tests;

pub use device::Cpu;
pub use kernels::Isa;
pub use reduce::ThreadCommunicator;
