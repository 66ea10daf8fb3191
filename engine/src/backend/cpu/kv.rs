//! The paged KV pool, f16, and its bytes in the wire's order.
//!
//! Keys `[layer][page][head][t/8][dim][8]`, so that a score is one lane's chain over the head; values `[layer][page][head][t][dim]`.
//! On the wire both are `[token][head][dim]`: values are copied, keys transposed 8 tokens x 8 elements at a time.

use crate::backend::{BackendError, KvShape};
use crate::exec::{KvError, KvRun, KvStore, PageId};

use super::memory::Memory;
use super::pack::LANES;

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
    use std::arch::x86_64::*;
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
                                let v = *from.add(d * LANES + i);
                                to.add(i * token_bytes).cast::<u16>().add(d).write_unaligned(v);
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
                                *to.add(d * LANES + i) =
                                    from.add(i * token_bytes).cast::<u16>().add(d).read_unaligned();
                            }
                        }
                    }
                }
            }
        });
        Ok(())
    }
}
