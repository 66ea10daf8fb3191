//! The paged KV pool, f16, and its bytes in the wire's order.
//!
//! Keys `[layer][page][head][t/8][dim][8]`, so that a score is one lane's chain over the head; values `[layer][page][head][t][dim]`.
//! On the wire both are `[token][head][dim]`: values are copied, keys transposed 8 tokens x 8 elements at a time.

use crate::backend::{BackendError, KvShape};
use crate::exec::{KvError, KvRun, KvStore, PageId};

use super::layout::LANES;
use super::memory::Memory;

const _: () = assert!(
    cfg!(target_endian = "little"),
    "the wire's order is little endian, and so are the copies here"
);

/// All layers' keys and values.
pub struct KvPool {
    shape: KvShape,
    keys: Memory,
    values: Memory,
}

/// Index of keys in the layout's components.
const KEYS: u32 = 0;

impl KvPool {
    /// A zeroed pool.
    pub fn new(shape: KvShape) -> Result<Self, BackendError> {
        if shape.page_tokens == 0 || !shape.page_tokens.is_multiple_of(LANES) {
            return Err(BackendError::Unsupported(format!(
                "{} tokens a page; a multiple of 8 is needed",
                shape.page_tokens
            )));
        }
        let bytes = Self::bytes(shape) / 2;
        // not huge pages: memory is taken as pages are first used
        Ok(Self {
            shape,
            keys: Memory::zeroed("the KV cache", bytes, false)?,
            values: Memory::zeroed("the KV cache", bytes, false)?,
        })
    }

    /// Bytes of a pool.
    pub fn bytes(shape: KvShape) -> usize {
        2 * 2 * shape.layers * shape.pages * shape.page_tokens * shape.heads.kv * shape.heads.dim
    }

    /// Elements from page to page.
    pub fn page_stride(&self) -> usize {
        self.shape.heads.kv * self.head_stride()
    }

    fn head_stride(&self) -> usize {
        self.shape.page_tokens * self.shape.heads.dim
    }

    /// Sizes.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Keys and values of a layer's head in page 0.
    pub fn head(&self, layer: usize, head: usize) -> (*mut u16, *mut u16) {
        let at = layer * self.shape.pages * self.page_stride() + head * self.head_stride();
        (
            self.keys.ptr::<u16>().wrapping_add(at),
            self.values.ptr::<u16>().wrapping_add(at),
        )
    }

    /// Where, seen from page 0 of a head, the key (elements 8 apart) and the value (contiguous) of a slot begin.
    pub fn slot(&self, slot: usize) -> (usize, usize) {
        let (page, t) = (slot / self.shape.page_tokens, slot % self.shape.page_tokens);
        let at = page * self.page_stride();
        (
            at + t / LANES * LANES * self.shape.heads.dim + t % LANES,
            at + t * self.shape.heads.dim,
        )
    }

    fn check(&self, pages: &[PageId], run: KvRun, bytes: usize) -> Result<(), KvError> {
        let s = &self.shape;
        let end = u64::from(run.first_token) + u64::from(run.tokens);
        let expected = run.tokens as usize * s.heads.kv * s.heads.dim * 2;
        let why = if run.layer as usize >= s.layers {
            format!("the model has {} layers", s.layers)
        } else if run.component > 1 {
            "components are 0 (k) and 1 (v)".to_owned()
        } else if end > pages.len() as u64 * s.page_tokens as u64 {
            format!(
                "it ends at token {end}, {} pages of {} tokens are given",
                pages.len(),
                s.page_tokens
            )
        } else if bytes != expected {
            format!("it takes {expected} bytes, {bytes} are given")
        } else if let Some(p) = pages.iter().find(|p| **p as usize >= s.pages) {
            format!("page {p} is not among the pool's {}", s.pages)
        } else {
            return Ok(());
        };
        Err(KvError { run, why })
    }

    /// Calls `each(page element offset, place in the page, tokens, offset in the run)` for the pieces of a run that lie in one
    /// page and, if `grouped`, in one group of 8 tokens.
    fn pieces(&self, pages: &[PageId], run: KvRun, grouped: bool, mut each: impl FnMut(usize, usize, usize, usize)) {
        let unit = if grouped { LANES } else { self.shape.page_tokens };
        let (first, tokens) = (run.first_token as usize, run.tokens as usize);
        let mut done = 0;
        while done < tokens {
            let t = first + done;
            let n = (unit - t % unit).min(tokens - done);
            let page = pages[t / self.shape.page_tokens] as usize * self.page_stride();
            each(page, t % self.shape.page_tokens, n, done);
            done += n;
        }
    }
}

/// 8 x 8 u16: `to[j][i] = from[i][j]`, rows `from_stride` and `to_stride` bytes apart.
///
/// # Safety
/// 8 rows of 16 bytes on each side.
#[cfg(target_arch = "x86_64")]
unsafe fn transpose8(from: *const u8, from_stride: usize, to: *mut u8, to_stride: usize) {
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm_storeu_si128, _mm_unpackhi_epi16, _mm_unpackhi_epi32, _mm_unpackhi_epi64,
        _mm_unpacklo_epi16, _mm_unpacklo_epi32, _mm_unpacklo_epi64,
    };
    // SAFETY: the caller's; SSE2 is part of x86_64.
    unsafe {
        let r: [__m128i; 8] = std::array::from_fn(|i| _mm_loadu_si128(from.add(i * from_stride).cast()));
        let a: [__m128i; 8] = std::array::from_fn(|i| {
            let (x, y) = (r[i / 2 * 2], r[i / 2 * 2 + 1]);
            if i % 2 == 0 {
                _mm_unpacklo_epi16(x, y)
            } else {
                _mm_unpackhi_epi16(x, y)
            }
        });
        // a[2p] and a[2p + 1]: columns 0..4 and 4..8 of the row pair p
        let b: [__m128i; 8] = std::array::from_fn(|i| {
            let (x, y) = (a[i / 4 * 4 + i / 2 % 2], a[i / 4 * 4 + i / 2 % 2 + 2]);
            if i % 2 == 0 {
                _mm_unpacklo_epi32(x, y)
            } else {
                _mm_unpackhi_epi32(x, y)
            }
        });
        // b[c] and b[4 + c]: columns 2c, 2c + 1 of rows 0..4 and 4..8
        for c in 0..4 {
            _mm_storeu_si128(to.add(2 * c * to_stride).cast(), _mm_unpacklo_epi64(b[c], b[4 + c]));
            _mm_storeu_si128(
                to.add((2 * c + 1) * to_stride).cast(),
                _mm_unpackhi_epi64(b[c], b[4 + c]),
            );
        }
    }
}

/// As above.
///
/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn transpose8(from: *const u8, from_stride: usize, to: *mut u8, to_stride: usize) {
    for i in 0..LANES {
        for j in 0..LANES {
            // SAFETY: the caller's.
            unsafe {
                let v = from.add(i * from_stride).cast::<u16>().add(j).read_unaligned();
                to.add(j * to_stride).cast::<u16>().add(i).write_unaligned(v);
            }
        }
    }
}

impl KvStore for KvPool {
    fn read(&self, pages: &[PageId], run: KvRun, out: &mut [u8]) -> Result<(), KvError> {
        self.check(pages, run, out.len())?;
        let (heads, dim) = (self.shape.heads.kv, self.shape.heads.dim);
        let (head_bytes, token_bytes) = (dim * 2, heads * dim * 2);
        let out = out.as_mut_ptr();
        self.pieces(pages, run, run.component == KEYS, |page, t, n, done| {
            for h in 0..heads {
                let (keys, values) = self.head(run.layer as usize, h);
                let to = out.wrapping_add(done * token_bytes + h * head_bytes);
                // SAFETY: `check` has compared run, pages and `out` with the pool; the caller holds the pages.
                unsafe {
                    if run.component != KEYS {
                        let from = values.add(page + t * dim).cast::<u8>();
                        for i in 0..n {
                            from.add(i * head_bytes)
                                .copy_to_nonoverlapping(to.add(i * token_bytes), head_bytes);
                        }
                    } else if n == LANES {
                        let from = keys.add(page + t * dim).cast::<u8>();
                        for d in (0..dim).step_by(LANES) {
                            transpose8(from.add(d * 16), 16, to.add(d * 2), token_bytes);
                        }
                    } else {
                        let from = keys.add(page + t / LANES * LANES * dim + t % LANES);
                        for i in 0..n {
                            for d in 0..dim {
                                let v = (*from.add(d * LANES + i)).to_le_bytes();
                                to.add(i * token_bytes + d * 2).cast::<[u8; 2]>().write(v);
                            }
                        }
                    }
                }
            }
        });
        Ok(())
    }

    fn write(&self, pages: &[PageId], run: KvRun, data: &[u8]) -> Result<(), KvError> {
        self.check(pages, run, data.len())?;
        let (heads, dim) = (self.shape.heads.kv, self.shape.heads.dim);
        let (head_bytes, token_bytes) = (dim * 2, heads * dim * 2);
        let data = data.as_ptr();
        self.pieces(pages, run, run.component == KEYS, |page, t, n, done| {
            for h in 0..heads {
                let (keys, values) = self.head(run.layer as usize, h);
                let from = data.wrapping_add(done * token_bytes + h * head_bytes);
                // SAFETY: `check` has compared run, pages and `data` with the pool; the caller holds the pages.
                unsafe {
                    if run.component != KEYS {
                        let to = values.add(page + t * dim).cast::<u8>();
                        for i in 0..n {
                            from.add(i * token_bytes)
                                .copy_to_nonoverlapping(to.add(i * head_bytes), head_bytes);
                        }
                    } else if n == LANES {
                        let to = keys.add(page + t * dim).cast::<u8>();
                        for d in (0..dim).step_by(LANES) {
                            transpose8(from.add(d * 2), token_bytes, to.add(d * 16), 16);
                        }
                    } else {
                        let to = keys.add(page + t / LANES * LANES * dim + t % LANES);
                        for i in 0..n {
                            for d in 0..dim {
                                let v = from.add(i * token_bytes + d * 2).cast::<[u8; 2]>().read();
                                *to.add(d * LANES + i) = u16::from_le_bytes(v);
                            }
                        }
                    }
                }
            }
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Heads;

    const SHAPE: KvShape = KvShape {
        layers: 2,
        heads: Heads {
            query: 4,
            kv: 2,
            dim: 24,
        },
        pages: 6,
        page_tokens: 16,
    };
    const TOKEN: usize = 2 * 24 * 2;

    fn run(layer: u32, component: u32, first_token: u32, tokens: u32) -> KvRun {
        KvRun {
            layer,
            component,
            first_token,
            tokens,
        }
    }

    fn pattern(n: usize, salt: usize) -> Vec<u8> {
        (0..n).map(|i| ((i * 31 + salt * 17) % 251) as u8).collect()
    }

    #[test]
    fn what_is_written_in_any_cut_is_read_in_any_other() {
        let pages = [4, 1, 3];
        let cuts: [&[u32]; 5] = [&[48], &[16, 16, 16], &[5, 3, 8, 13, 19], &[1; 48], &[7, 40, 1]];
        for component in 0..2 {
            for write in cuts {
                let pool = KvPool::new(SHAPE).unwrap();
                let data = pattern(48 * TOKEN, component);
                let mut at = 0;
                for n in write {
                    let bytes = &data[at as usize * TOKEN..(at + n) as usize * TOKEN];
                    pool.write(&pages, run(1, component as u32, at, *n), bytes).unwrap();
                    at += n;
                }
                for read in cuts {
                    let mut at = 0;
                    for n in read {
                        let mut got = vec![0; *n as usize * TOKEN];
                        pool.read(&pages, run(1, component as u32, at, *n), &mut got).unwrap();
                        assert_eq!(
                            got,
                            data[at as usize * TOKEN..(at + n) as usize * TOKEN],
                            "{write:?} {read:?} at {at}"
                        );
                        at += n;
                    }
                }
                // nothing else was touched: other pages, the other layer, the other component
                let zero = vec![0; 48 * TOKEN];
                for (other, r) in [
                    ([0, 2, 5], run(1, component as u32, 0, 48)),
                    (pages, run(0, component as u32, 0, 48)),
                    (pages, run(1, 1 - component as u32, 0, 48)),
                ] {
                    let mut got = pattern(48 * TOKEN, 9);
                    pool.read(&other, r, &mut got).unwrap();
                    assert_eq!(got, zero);
                }
            }
        }
    }

    #[test]
    fn a_key_lies_where_attention_looks_for_it() {
        let pool = KvPool::new(SHAPE).unwrap();
        let data = pattern(20 * TOKEN, 3);
        pool.write(&[2, 5], run(1, 0, 0, 20), &data).unwrap();
        pool.write(&[2, 5], run(1, 1, 0, 20), &data).unwrap();
        for t in 0..20 {
            for h in 0..2 {
                let (keys, values) = pool.head(1, h);
                let slot = [2, 5][t / 16] * 16 + t % 16;
                let (key, value) = pool.slot(slot);
                for d in 0..24 {
                    let at = t * TOKEN + h * 48 + d * 2;
                    let expected = u16::from_le_bytes([data[at], data[at + 1]]);
                    // SAFETY: inside the pool.
                    unsafe {
                        assert_eq!(*keys.add(key + d * 8), expected, "key {t} {h} {d}");
                        assert_eq!(*values.add(value + d), expected, "value {t} {h} {d}");
                    }
                }
            }
        }
    }

    #[test]
    fn runs_out_of_range_are_refused_with_their_reason() {
        let pool = KvPool::new(SHAPE).unwrap();
        let cases: [(&[PageId], KvRun, usize, &str); 6] = [
            (&[0], run(2, 0, 0, 1), TOKEN, "2 layers"),
            (&[0], run(0, 2, 0, 1), TOKEN, "components are 0 (k) and 1 (v)"),
            (&[0], run(0, 0, 0, 17), 17 * TOKEN, "ends at token 17"),
            (&[0], run(0, 0, u32::MAX, u32::MAX), TOKEN, "ends at token"),
            (&[0], run(0, 0, 0, 1), TOKEN - 1, "takes 96 bytes, 95"),
            (&[6], run(0, 0, 0, 1), TOKEN, "page 6"),
        ];
        for (pages, r, bytes, why) in cases {
            let error = pool.read(pages, r, &mut vec![0; bytes]).unwrap_err();
            assert!(error.to_string().contains(why), "{error} / {why}");
            assert!(pool.write(pages, r, &vec![0; bytes]).is_err());
        }
        assert!(pool.read(&[], run(0, 0, 0, 0), &mut []).is_ok());
        assert!(
            KvPool::new(KvShape {
                page_tokens: 12,
                ..SHAPE
            })
            .is_err()
        );
    }
}
