//! What the machine can do with so many threads: bytes read from memory, int8 products. Bests of several rounds, since whatever else
//! runs there can only lower them.

use std::sync::Barrier;
use std::time::Instant;

/// Rounds of a measurement.
const ROUNDS: usize = 7;

/// The machine's limits.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes a second, read from a block as long as the model's weights: what a decode step cannot do without. Where the last level
    /// cache holds the weights, this is its speed.
    pub read: f64,
    /// Bytes a second, read from 1 GiB.
    pub read_memory: f64,
    /// int8 products with their additions a second, from registers, with the widest instructions that the engine uses here.
    pub int8: f64,
}

impl Limits {
    /// Measures them; takes a second or two.
    pub fn measure(threads: usize, weights: usize) -> Self {
        Self {
            read: read(threads, weights),
            read_memory: read(threads, 1 << 30),
            int8: int8(threads),
        }
    }
}

/// The shortest time that all threads took for `work`, in seconds.
fn best(threads: usize, work: &(dyn Fn(usize) + Sync)) -> f64 {
    let barrier = Barrier::new(threads);
    let run = |t: usize| {
        let mut best = f64::MAX;
        for _ in 0..ROUNDS {
            barrier.wait();
            let start = Instant::now();
            work(t);
            barrier.wait();
            best = best.min(start.elapsed().as_secs_f64());
        }
        best
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|t| scope.spawn(move || run(t))).collect();
        let own = run(0);
        others.into_iter().fold(own, |b, t| t.join().map_or(b, |o| b.max(o)))
    })
}

fn read(threads: usize, bytes: usize) -> f64 {
    // written, so that the pages are there
    let block: Vec<u64> = (0..bytes as u64 / 8).collect();
    let part = block.len().div_ceil(threads);
    let seconds = best(threads, &|t| {
        let own = &block[(t * part).min(block.len())..((t + 1) * part).min(block.len())];
        let mut sums = [0u64; 32];
        for line in own.chunks_exact(32) {
            for (s, v) in sums.iter_mut().zip(line) {
                *s ^= v;
            }
        }
        std::hint::black_box(sums);
    });
    bytes as f64 / seconds
}

#[cfg(target_arch = "x86_64")]
fn int8(threads: usize) -> f64 {
    const LOOPS: u64 = 2_000_000;
    let vnni = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni");
    if !vnni && !is_x86_feature_detected!("avx2") {
        return f64::NAN;
    }
    let seconds = best(threads, &|_| {
        // SAFETY: the CPU has the instructions.
        unsafe {
            if vnni {
                dpbusd(LOOPS);
            } else {
                maddubs(LOOPS);
            }
        }
    });
    let products = if vnni { 12.0 * 64.0 } else { 8.0 * 32.0 };
    threads as f64 * LOOPS as f64 * products / seconds
}

#[cfg(not(target_arch = "x86_64"))]
fn int8(_: usize) -> f64 {
    f64::NAN
}

/// 12 independent chains of 64 products a loop.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn dpbusd(loops: u64) {
    // SAFETY: changes nothing but the registers that it names.
    unsafe {
        std::arch::asm!(
            "2:",
            "vpdpbusd zmm0, zmm12, zmm13", "vpdpbusd zmm1, zmm12, zmm13", "vpdpbusd zmm2, zmm12, zmm13",
            "vpdpbusd zmm3, zmm12, zmm13", "vpdpbusd zmm4, zmm12, zmm13", "vpdpbusd zmm5, zmm12, zmm13",
            "vpdpbusd zmm6, zmm12, zmm13", "vpdpbusd zmm7, zmm12, zmm13", "vpdpbusd zmm8, zmm12, zmm13",
            "vpdpbusd zmm9, zmm12, zmm13", "vpdpbusd zmm10, zmm12, zmm13", "vpdpbusd zmm11, zmm12, zmm13",
            "dec {n}", "jnz 2b",
            n = inout(reg) loops => _,
            out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _,
            out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
            options(nomem, nostack),
        );
    }
}

/// 8 times 32 products and their additions a loop: the least that an AVX2 kernel does.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn maddubs(loops: u64) {
    // SAFETY: changes nothing but the registers that it names.
    unsafe {
        std::arch::asm!(
            "2:",
            "vpmaddubsw ymm8, ymm12, ymm13", "vpaddw ymm0, ymm0, ymm8",
            "vpmaddubsw ymm9, ymm12, ymm13", "vpaddw ymm1, ymm1, ymm9",
            "vpmaddubsw ymm10, ymm12, ymm13", "vpaddw ymm2, ymm2, ymm10",
            "vpmaddubsw ymm11, ymm12, ymm13", "vpaddw ymm3, ymm3, ymm11",
            "vpmaddubsw ymm8, ymm12, ymm13", "vpaddw ymm4, ymm4, ymm8",
            "vpmaddubsw ymm9, ymm12, ymm13", "vpaddw ymm5, ymm5, ymm9",
            "vpmaddubsw ymm10, ymm12, ymm13", "vpaddw ymm6, ymm6, ymm10",
            "vpmaddubsw ymm11, ymm12, ymm13", "vpaddw ymm7, ymm7, ymm11",
            "dec {n}", "jnz 2b",
            n = inout(reg) loops => _,
            out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _, out("ymm6") _,
            out("ymm7") _, out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _,
            options(nomem, nostack),
        );
    }
}
