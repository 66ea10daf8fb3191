//! Attention over pages, against its twin and against itself in other tiles.

use half::f16;

use super::super::kernels::{Attention, Isa, Kernels};
use super::super::layout::LANES;
use super::super::scalar;
use super::{Floats, Random, bits, difference, fast};

/// A paged cache of one head, filled through the table's own writes.
struct Cache {
    keys: Vec<u16>,
    values: Vec<u16>,
    pages: Vec<u32>,
    dim: usize,
    page_tokens: usize,
}

impl Cache {
    fn new(r: &mut Random, t: &Kernels, tokens: usize, dim: usize, page_tokens: usize) -> Self {
        let count = tokens.div_ceil(page_tokens) + 3;
        let mut pages: Vec<u32> = (0..count as u32).collect();
        (1..count).rev().for_each(|i| pages.swap(i, r.below(i + 1)));
        // what is not written holds NaN: reading it would show
        let fill = vec![f16::NAN.to_bits(); count * page_tokens * dim];
        let mut cache = Self {
            keys: fill.clone(),
            values: fill,
            pages,
            dim,
            page_tokens,
        };
        for i in 0..tokens {
            let (k, v) = (r.values(dim, 2.0), r.values(dim, 2.0));
            let page = cache.pages[i / page_tokens] as usize * page_tokens * dim;
            let at = i % page_tokens;
            // SAFETY: dim values each, inside the page.
            unsafe {
                let key = cache
                    .keys
                    .as_mut_ptr()
                    .add(page + at / LANES * LANES * dim + at % LANES);
                (t.write_kv)(
                    k.as_ptr(),
                    v.as_ptr(),
                    dim,
                    key,
                    cache.values.as_mut_ptr().add(page + at * dim),
                );
            }
        }
        cache
    }

    fn attend(&self, t: &Kernels, q: &[f32], tokens: usize, group: usize, first_position: usize) -> Vec<f32> {
        let scratch = Floats::new(Attention::scratch_len(self.dim, group));
        let out = Floats::new(tokens * group * self.dim);
        let a = Attention {
            q: q.as_ptr(),
            ldq: group * self.dim,
            tokens,
            group,
            dim: self.dim,
            first_position,
            keys: self.keys.as_ptr(),
            values: self.values.as_ptr(),
            page_stride: self.page_tokens * self.dim,
            page_tokens: self.page_tokens,
            pages: &self.pages,
        };
        // SAFETY: queries, pages, scratch and output of these sizes.
        unsafe { (t.attend)(&a, scratch.ptr(), out.ptr()) };
        out.get()
    }
}

#[test]
fn attention_agrees_with_its_twin_and_one_token_with_tiles_to_the_bit() {
    let mut r = Random::fresh();
    for (isa, t) in fast() {
        for (dim, group, page_tokens) in [
            (64, 3, 16),
            (128, 4, 8),
            (8, 1, 24),
            (80, 2, 16),
            (16, 7, 16),
            (64, 60, 64),
            (24, 5, 8),
        ] {
            for end in [1, 2, 7, 8, 9, 63, 64, 65, 130, 200] {
                let cache = Cache::new(&mut r, &t, end, dim, page_tokens);
                let tile = Attention::tile_tokens(group).min(end);
                for tokens in [1, 2, 3, tile] {
                    let tokens = tokens.min(tile);
                    let first = end - tokens;
                    let q = r.values(tokens * group * dim, 0.5);
                    let got = cache.attend(&t, &q, tokens, group, first);
                    let twin = cache.attend(&scalar::KERNELS, &q, tokens, group, first);
                    let what = format!(
                        "{isa:?} dim {dim} group {group} end {end} tokens {tokens}, seed {}",
                        r.seed
                    );
                    assert!(difference(&got, &twin) < 2e-6, "{what}: {}", difference(&got, &twin));
                    for i in 0..tokens {
                        let width = group * dim;
                        let alone = cache.attend(&t, &q[i * width..(i + 1) * width], 1, group, first + i);
                        assert_eq!(
                            bits(&alone),
                            bits(&got[i * width..(i + 1) * width]),
                            "{what}, token {i}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn attention_to_far_apart_scores_stays_finite() {
    let mut r = Random::fresh();
    for (isa, t) in fast() {
        let cache = Cache::new(&mut r, &t, 150, 64, 16);
        for scale in [50.0, 3000.0] {
            let q = r.values(3 * 64, scale);
            let got = cache.attend(&t, &q, 1, 3, 149);
            let twin = cache.attend(&scalar::KERNELS, &q, 1, 3, 149);
            assert!(got.iter().all(|v| v.is_finite()));
            assert!(
                difference(&got, &twin) < 1e-3,
                "{isa:?} at {scale}: {}",
                difference(&got, &twin)
            );
        }
    }
}

#[test]
fn a_nan_key_is_not_left_out_of_the_sum() {
    let mut r = Random::fresh();
    for (isa, t) in fast().into_iter().chain([(Isa::Scalar, scalar::KERNELS)]) {
        for at in [0, 5, 64, 69] {
            let mut cache = Cache::new(&mut r, &t, 70, 16, 16);
            let page = cache.pages[at / 16] as usize * 16 * 16;
            cache.keys[page + at % 16 / LANES * LANES * 16 + at % LANES] = f16::NAN.to_bits();
            let q = r.values(2 * 16, 1.0);
            for tokens in [1, 2] {
                let got = cache.attend(&t, &q, tokens, 2 / tokens, 70 - tokens);
                // the first of two tokens does not see the last key
                let seeing = if tokens == 2 && at == 69 { &got[16..] } else { &got[..] };
                assert!(seeing.iter().all(|v| v.is_nan()), "{isa:?}, key {at}: {got:?}");
                assert!(
                    got.len() == seeing.len() || got[..16].iter().all(|v| v.is_finite()),
                    "{isa:?}"
                );
            }
        }
    }
}

#[test]
fn a_nan_query_gives_nan_and_not_some_number() {
    let mut r = Random::fresh();
    for (isa, t) in fast().into_iter().chain([(Isa::Scalar, scalar::KERNELS)]) {
        let cache = Cache::new(&mut r, &t, 70, 16, 16);
        let mut q = r.values(4 * 16, 1.0);
        q[16 + 3] = f32::NAN;
        for tokens in [1, 2] {
            let got = cache.attend(&t, &q, tokens, 4 / tokens, 70 - tokens);
            assert!(got[16..32].iter().all(|v| v.is_nan()), "{isa:?}: {:?}", &got[16..32]);
            assert!(got[..16].iter().chain(&got[32..]).all(|v| v.is_finite()), "{isa:?}");
        }
    }
}
