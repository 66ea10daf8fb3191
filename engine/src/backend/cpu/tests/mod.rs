//! Every fast kernel against its scalar twin, on fresh random inputs and on the extremes that could saturate or overflow.
//!
//! | file | tests |
//! | --- | --- |
//! | `packing.rs` | what is packed is what the file holds |
//! | `matmul.rs` | matmuls of every type of weights |
//! | `rows.rs` | quantisation, norm, rope, silu |
//! | `attend.rs` | attention |

mod attend;
mod matmul;
mod packing;
mod rows;

use half::f16;

use super::act::{Act, ActKind};
use super::kernels::{Isa, Kernels, MATMUL_SCRATCH, Out};
use super::layout::{BLOCK, LANES};
use super::memory::Memory;
use super::pack::Panels;
use super::pool::{Pool, share};
use crate::backend::Row;
use crate::model::Dtype;

/// Fresh numbers on each run; the seed is in the failure's message.
struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    fn fresh() -> Self {
        use std::hash::{BuildHasher, RandomState};
        let seed = RandomState::new().hash_one(0);
        Self { seed, state: seed }
    }
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
    fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.unit() * scale).collect()
    }
}

/// The tables to compare with the scalar one.
fn fast() -> Vec<(Isa, Kernels)> {
    let all: Vec<_> = Isa::ALL
        .into_iter()
        .filter_map(|isa| isa.kernels().ok().map(|k| (isa, k)))
        .collect();
    assert!(all.iter().any(|(isa, _)| *isa == Isa::Scalar));
    let fast: Vec<_> = all.into_iter().filter(|(isa, _)| *isa != Isa::Scalar).collect();
    if fast.is_empty() {
        eprintln!("skipped: this CPU has no instruction set with kernels of its own");
        assert!(std::env::var("CI").is_err(), "CI needs a CPU with AVX2");
    }
    fast
}

/// Aligned floats that a kernel may write.
struct Floats(Memory, usize);

impl Floats {
    fn new(n: usize) -> Self {
        Self(Memory::zeroed("a test", n * 4, false).unwrap(), n)
    }
    fn of(values: &[f32]) -> Self {
        let f = Self::new(values.len());
        // SAFETY: as many floats.
        unsafe { f.0.ptr::<f32>().copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        f
    }
    fn get(&self) -> Vec<f32> {
        // SAFETY: as many floats, and no kernel runs now.
        unsafe { std::slice::from_raw_parts(self.0.ptr::<f32>(), self.1) }.to_vec()
    }
    fn ptr(&self) -> *mut f32 {
        self.0.ptr()
    }
}

/// Largest difference, relative to the largest magnitude.
fn difference(a: &[f32], b: &[f32]) -> f32 {
    let scale = a.iter().chain(b).fold(1e-20f32, |m, v| m.max(v.abs()));
    a.iter().zip(b).fold(0.0f32, |m, (x, y)| m.max((x - y).abs())) / scale
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

/// All types of weights.
const DTYPES: [Dtype; 11] = [
    Dtype::Q4_0,
    Dtype::Q4_1,
    Dtype::Q5_0,
    Dtype::Q5_1,
    Dtype::Q8_0,
    Dtype::Q4K,
    Dtype::Q5K,
    Dtype::Q6K,
    Dtype::F32,
    Dtype::F16,
    Dtype::Bf16,
];

/// The least multiple of a type's block that is no less than `k`.
fn inputs(dtype: Dtype, k: usize) -> usize {
    k.next_multiple_of(dtype.block().0.max(BLOCK))
}

/// Random bytes of `n` rows of `k` values. With `extreme` every quant has these bits, and the scales of K types are their largest.
fn weights(r: &mut Random, dtype: Dtype, n: usize, k: usize, extreme: Option<u8>) -> Vec<Vec<u8>> {
    let half = |v: f32| f16::from_f32(v).to_le_bytes();
    let mut row = || -> Vec<u8> {
        match dtype {
            Dtype::F32 => return r.values(k, 1.0).iter().flat_map(|v| v.to_le_bytes()).collect(),
            Dtype::F16 => return r.values(k, 1.0).iter().flat_map(|v| half(*v)).collect(),
            Dtype::Bf16 => {
                let brain = |v: &f32| half::bf16::from_f32(*v).to_le_bytes();
                return r.values(k, 1.0).iter().flat_map(brain).collect();
            }
            _ => {}
        }
        let mut out: Vec<u8> = (0..dtype.row_bytes(k).unwrap())
            .map(|_| extreme.unwrap_or(r.next() as u8))
            .collect();
        for b in out.chunks_exact_mut(dtype.block().1) {
            let mut put = |at: usize, v: f32| b[at..at + 2].copy_from_slice(&half(v));
            match dtype {
                Dtype::Q4_1 | Dtype::Q5_1 => {
                    put(0, 0.1 + 0.05 * r.unit());
                    put(2, -0.8 + 0.1 * r.unit());
                }
                Dtype::Q4K | Dtype::Q5K => {
                    put(0, 0.003 + 0.001 * r.unit());
                    put(2, 0.02 + 0.01 * r.unit());
                    if extreme.is_some() {
                        b[4..16].fill(0xff);
                    }
                }
                Dtype::Q6K => {
                    put(208, 0.001 + 0.0005 * r.unit());
                    if extreme.is_some() {
                        b[192..208].fill(0x80);
                    }
                }
                _ => put(0, 0.1 + 0.05 * r.unit()),
            }
        }
        out
    };
    (0..n).map(|_| row()).collect()
}

fn rows_of(rows: &[Vec<u8>], dtype: Dtype) -> Vec<Row<'_>> {
    rows.iter().map(|bytes| Row { dtype, bytes }).collect()
}

fn pack(rows: &[Vec<u8>], dtype: Dtype, k: usize) -> Panels {
    Panels::pack(&rows_of(rows, dtype), k, &mut Pool::new(2).unwrap()).unwrap()
}

/// `x` through quantisation and a matmul of one table, as `[rows][padded n]`, added to `start`.
fn multiply(t: &Kernels, w: &Panels, x: &[f32], rows: usize, start: Option<&[f32]>, parts: usize) -> Vec<f32> {
    let (k, ld) = (w.k(), w.panels() * LANES);
    let memory = Memory::zeroed("a test", Act::bytes(rows, k), false).unwrap();
    let scratch = Memory::zeroed("a test", MATMUL_SCRATCH, false).unwrap();
    let a = Act::new(memory.ptr(), rows, k);
    let x = Floats::of(x);
    let out = start.map_or_else(|| Floats::new(rows * ld), Floats::of);
    let to = Out {
        ptr: out.ptr(),
        ld,
        first_panel: 0,
        add: start.is_some(),
    };
    let flip = t.flip(rows);
    for p in 0..parts {
        for part in w.parts(share(w.panels(), 1, p, parts)) {
            // SAFETY: buffers of these sizes, one thread.
            unsafe {
                match w.act() {
                    ActKind::Int8 => {
                        (0..rows).for_each(|r| (t.quantise8)(x.ptr().add(r * k), k / BLOCK, &a.int8(), r, 0, flip));
                        (t.matmul_int8)(&part, &a.int8(), rows, to, scratch.ptr());
                    }
                    ActKind::Float => {
                        a.float().x.copy_from_nonoverlapping(x.ptr(), rows * k);
                        (t.matmul_float)(&part, &a.float(), rows, to);
                    }
                }
            }
        }
    }
    out.get()
}
