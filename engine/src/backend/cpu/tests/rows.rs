//! What happens to one row between two matmuls.

use super::super::act::Act;
use super::super::layout::BLOCK;
use super::super::memory::Memory;
use super::super::scalar;
use super::{Floats, Random, bits, difference, fast};

#[test]
fn quantisation_is_the_same_in_all_tables_and_keeps_to_127() {
    let mut r = Random::fresh();
    for (isa, t) in fast() {
        let k = 64;
        for scale in [0.0, 1e-40, 1e-31, 1e-20, 1.0, 1e20, 3e38] {
            let x = Floats::of(&r.values(k, scale));
            for flip in [0, 0x80] {
                let made: Vec<_> = [&scalar::KERNELS, &t]
                    .map(|t| {
                        let m8 = Memory::zeroed("a test", Act::bytes(1, k), false).unwrap();
                        let a = Act::new(m8.ptr(), 1, k).int8();
                        // SAFETY: buffers of these sizes, one thread.
                        unsafe {
                            (t.quantise8)(x.ptr(), k / BLOCK, &a, 0, 0, flip);
                            let q: Vec<i8> = (0..k).map(|i| (*a.q.add(i) as u8 ^ flip) as i8).collect();
                            assert!(q.iter().all(|q| *q != -128), "{scale}");
                            let (s0, s1) = (*a.scales, *a.scales.add(1));
                            if scale < 1e30 {
                                let sum = |part: &[i8]| part.iter().map(|q| -8 * i32::from(*q)).sum::<i32>();
                                assert_eq!((s1.start, s1.first), (sum(&q[32..]), sum(&q[32..48])));
                            }
                            let d = [s0.d, s1.d, s0.s, s1.s].map(f32::to_bits);
                            (q, d, [s0.start, s0.first, s1.start, s1.first])
                        }
                    })
                    .into();
                assert_eq!(made[0], made[1], "{isa:?} scale {scale}, seed {}", r.seed);
            }
        }
    }
}

#[test]
fn norm_rope_and_silu_agree_with_their_twins() {
    let mut r = Random::fresh();
    for (isa, t) in fast() {
        for n in [8, 16, 24, 32, 80, 96, 576] {
            for scale in [1e-6, 1.0, 1e4, 1e20] {
                let (x, w) = (Floats::of(&r.values(n, scale)), Floats::of(&r.values(n, 2.0)));
                let out = [&scalar::KERNELS, &t].map(|t| {
                    let out = Floats::new(n);
                    // SAFETY: n values each.
                    unsafe { (t.rms_norm)(x.ptr(), w.ptr(), n, 1e-5, out.ptr()) };
                    out.get()
                });
                if scale > 1e19 {
                    // the sum of squares is infinite: that must show, or the row is nothing but zeros
                    assert!(out.iter().flatten().all(|v| v.is_nan()), "{isa:?} norm of {n}: {out:?}");
                    continue;
                }
                assert!(
                    difference(&out[0], &out[1]) < 1e-6,
                    "{isa:?} norm of {n}, seed {}",
                    r.seed
                );
            }
        }
        for dim in [8, 16, 64, 80, 128] {
            let x = r.values(dim, 4.0);
            let table: Vec<f32> = (0..dim / 2)
                .flat_map(|i| [(i as f32 * 1.3).cos(), (i as f32 * 1.3).sin()])
                .collect();
            let table = Floats::of(&table);
            let out = [&scalar::KERNELS, &t].map(|t| {
                let x = Floats::of(&x);
                // SAFETY: dim values each.
                unsafe { (t.rope)(x.ptr(), dim, table.ptr(), 0.125) };
                x.get()
            });
            assert_eq!(bits(&out[0]), bits(&out[1]), "{isa:?} rope of {dim}, seed {}", r.seed);
            // a rotation keeps lengths
            let length = |v: &[f32]| v.iter().map(|x| x * x).sum::<f32>().sqrt();
            assert!((length(&out[0]) - 0.125 * length(&x)).abs() < 1e-5 * length(&x));
        }
        for scale in [0.01, 1.0, 30.0, 1e5] {
            let x = Floats::of(&r.values(64, scale));
            let out = [&scalar::KERNELS, &t].map(|t| {
                let out = Floats::new(32);
                // SAFETY: 64 values in, 32 out.
                unsafe { (t.silu_mul)(x.ptr(), out.ptr()) };
                out.get()
            });
            assert!(
                difference(&out[0], &out[1]) < 1e-6,
                "{isa:?} silu at {scale}: {out:?}, seed {}",
                r.seed
            );
        }
    }
}
