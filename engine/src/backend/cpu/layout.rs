//! How a quantised block of 32 inputs and 8 outputs lies in a panel.
//!
//! Quants first, input i of output r, stored unsigned (a signed byte q as q + 128):
//!
//! | bits | lines of 32 bytes | byte 4r + i of line j |
//! | --- | --- | --- |
//! | 4 | 4 | input 8j + i low, input 8j + 4 + i high |
//! | 5 | as 4, and 1 | bit g: the fifth bit of input 4g + i |
//! | 6 | as 4, and 2 | bits 2g, 2g + 1: the upper bits of input 16j + 4g + i |
//! | 8 | 8 | input 4j + i |
//!
//! Behind them 8 scales and what else a block has, output by output; what 8 blocks of a K type share lies before the first of them.
//! Nothing is rounded: the scales are the file's own, and their products with the scales of blocks are exact in f32.
//!
//! | type | before 8 blocks | behind the quants |
//! | --- | --- | --- |
//! | `Q4_0`, `Q5_0`, `Q8_0` | | f16 d |
//! | `Q4_1`, `Q5_1` | | f16 d, f16 m |
//! | `Q4_K`, `Q5_K` | f16 d, f16 -e | u8 s, u8 m |
//! | `Q6_K` | f16 d | i8 s of inputs 0..16, i8 s of inputs 16..32 |

use half::f16;

use crate::model::{Dtype, scale_and_min};

/// Outputs of a panel.
pub const LANES: usize = 8;
/// Inputs of a quantised block.
pub const BLOCK: usize = 32;
/// Blocks of a K type's block of blocks.
pub const SUPER: usize = 8;

/// How quants are stored.
pub trait Quants {
    /// Bytes of a block's quants.
    const BYTES: usize;
    /// The stored quant that stands for 0, or the middle of the range where there is a minimum: kernels sum up quants less this.
    const CENTRE: u8;
}

/// How scales are stored.
pub trait Scales {
    /// Bytes of what the blocks of a unit share.
    const HEAD: usize;
    /// Blocks of a unit.
    const BLOCKS: usize;
    /// Bytes of a block's scales, behind its quants.
    const BYTES: usize;
    /// What a block adds to an output.
    const FORM: Form;
}

/// What a block adds to an output, besides the product of a scale and the sum over quants less their centre.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Nothing.
    Plain,
    /// A minimum.
    Minimum,
    /// There is a scale and a sum for each half.
    Halves,
}

/// 4 bits.
pub struct Four;
/// 5 bits.
pub struct Five;
/// 6 bits.
pub struct Six;
/// 8 bits.
pub struct Eight;
/// f16 scales.
pub struct One;
/// f16 scales and minimums.
pub struct Two;
/// Scales and minimums of 6 bits, times those that 8 blocks share.
pub struct Shared;
/// Scales of 8 bits for 16 inputs each, times that which 8 blocks share.
pub struct SharedHalves;

impl Quants for Four {
    const BYTES: usize = 128;
    const CENTRE: u8 = 8;
}
impl Quants for Five {
    const BYTES: usize = 160;
    const CENTRE: u8 = 16;
}
impl Quants for Six {
    const BYTES: usize = 192;
    const CENTRE: u8 = 32;
}
impl Quants for Eight {
    const BYTES: usize = 256;
    const CENTRE: u8 = 128;
}
impl Scales for One {
    const HEAD: usize = 0;
    const BLOCKS: usize = 1;
    const BYTES: usize = 16;
    const FORM: Form = Form::Plain;
}
impl Scales for Two {
    const HEAD: usize = 0;
    const BLOCKS: usize = 1;
    const BYTES: usize = 32;
    const FORM: Form = Form::Minimum;
}
impl Scales for Shared {
    const HEAD: usize = 32;
    const BLOCKS: usize = SUPER;
    const BYTES: usize = 16;
    const FORM: Form = Form::Minimum;
}
impl Scales for SharedHalves {
    const HEAD: usize = 16;
    const BLOCKS: usize = SUPER;
    const BYTES: usize = 16;
    const FORM: Form = Form::Halves;
}

/// What the kernels know about a type, for code that learns the type while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// [`Scales::BLOCKS`].
    pub blocks: usize,
    /// [`Scales::HEAD`].
    pub head: usize,
    /// [`Quants::BYTES`].
    pub quants: usize,
    /// [`Scales::BYTES`].
    pub scales: usize,
    /// [`Quants::CENTRE`].
    pub centre: u8,
    /// [`Scales::FORM`].
    pub form: Form,
}

impl Layout {
    /// The layout of a quantised type; `None` for floats.
    pub const fn of(dtype: Dtype) -> Option<Self> {
        Some(match dtype {
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => return None,
            Dtype::Q4_0 => Self::from::<Four, One>(),
            Dtype::Q4_1 => Self::from::<Four, Two>(),
            Dtype::Q5_0 => Self::from::<Five, One>(),
            Dtype::Q5_1 => Self::from::<Five, Two>(),
            Dtype::Q8_0 => Self::from::<Eight, One>(),
            Dtype::Q4K => Self::from::<Four, Shared>(),
            Dtype::Q5K => Self::from::<Five, Shared>(),
            Dtype::Q6K => Self::from::<Six, SharedHalves>(),
        })
    }

    const fn from<Q: Quants, S: Scales>() -> Self {
        Self {
            blocks: S::BLOCKS,
            head: S::HEAD,
            quants: Q::BYTES,
            scales: S::BYTES,
            centre: Q::CENTRE,
            form: S::FORM,
        }
    }

    /// Bytes of a block.
    pub const fn block(&self) -> usize {
        self.quants + self.scales
    }

    /// Bytes of `blocks` blocks with their head.
    pub const fn unit(&self) -> usize {
        self.head + self.blocks * self.block()
    }
}

/// One output's share of a block.
#[derive(Debug, Clone, Copy)]
pub struct LaneBlock {
    /// Quants as stored.
    pub q: [u8; BLOCK],
    /// The scales of inputs 0..16 and 16..32.
    pub d: [f32; 2],
    /// What is added to d q; without one the value is d (q - centre).
    pub min: Option<f32>,
}

fn half(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

impl LaneBlock {
    /// Output `lane` of block `b` of a panel.
    pub fn read(dtype: Dtype, layout: &Layout, panel: &[u8], b: usize, lane: usize) -> Self {
        let unit = &panel[b / layout.blocks * layout.unit()..][..layout.unit()];
        let block = &unit[layout.head + b % layout.blocks * layout.block()..][..layout.block()];
        let (quants, scales) = block.split_at(layout.quants);
        let q = std::array::from_fn(|i| {
            let (g, at) = (i / 4, lane * 4 + i % 4);
            if layout.quants == Eight::BYTES {
                return quants[g * 32 + at];
            }
            let low = quants[g / 2 * 32 + at] >> (g % 2 * 4) & 15;
            match layout.quants {
                Five::BYTES => low | (quants[128 + at] >> g & 1) << 4,
                Six::BYTES => low | (quants[128 + g / 4 * 32 + at] >> (g % 4 * 2) & 3) << 4,
                _ => low,
            }
        });
        let (d, min) = match dtype {
            Dtype::Q4_1 | Dtype::Q5_1 => ([half(scales, 2 * lane); 2], Some(half(scales, 16 + 2 * lane))),
            Dtype::Q4K | Dtype::Q5K => (
                [half(unit, 2 * lane) * f32::from(scales[lane]); 2],
                Some(half(unit, 16 + 2 * lane) * f32::from(scales[8 + lane])),
            ),
            Dtype::Q6K => (
                [lane, 8 + lane].map(|i| half(unit, 2 * lane) * f32::from(scales[i] as i8)),
                None,
            ),
            _ => ([half(scales, 2 * lane); 2], None),
        };
        Self { q, d, min }
    }
}

/// Writes one row of the file as output `lane` of a panel.
pub fn pack_row(dtype: Dtype, layout: &Layout, row: &[u8], lane: usize, panel: &mut [u8]) {
    let (values, bytes) = dtype.block();
    debug_assert_eq!(values, layout.blocks * BLOCK);
    for (out, b) in panel.chunks_exact_mut(layout.unit()).zip(row.chunks_exact(bytes)) {
        let (head, blocks) = out.split_at_mut(layout.head);
        match dtype {
            Dtype::Q4K | Dtype::Q5K => {
                head[2 * lane..][..2].copy_from_slice(&b[..2]);
                // the sign bit: the minimum is subtracted in the file, added here
                head[16 + 2 * lane..][..2].copy_from_slice(&[b[2], b[3] ^ 0x80]);
            }
            Dtype::Q6K => head[2 * lane..][..2].copy_from_slice(&b[208..]),
            _ => {}
        }
        for (j, out) in blocks.chunks_exact_mut(layout.block()).enumerate() {
            let (quants, scales) = out.split_at_mut(layout.quants);
            pack_quants(&file_quants(dtype, b, j), lane, quants);
            match dtype {
                Dtype::Q4K | Dtype::Q5K => (scales[lane], scales[8 + lane]) = scale_and_min(&b[4..16], j),
                Dtype::Q6K => (scales[lane], scales[8 + lane]) = (b[192 + 2 * j], b[193 + 2 * j]),
                _ => {
                    scales[2 * lane..][..2].copy_from_slice(&b[..2]);
                    if layout.form == Form::Minimum {
                        scales[16 + 2 * lane..][..2].copy_from_slice(&b[2..4]);
                    }
                }
            }
        }
    }
}

/// The unsigned quants of 32 values, the `j`-th of a file's block.
fn file_quants(dtype: Dtype, b: &[u8], j: usize) -> [u8; BLOCK] {
    let mut q = [0; BLOCK];
    match dtype {
        Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q5_0 | Dtype::Q5_1 => {
            let (before, nibbles) = b.split_at(b.len() - 16);
            for (i, n) in nibbles.iter().enumerate() {
                (q[i], q[16 + i]) = (n & 15, n >> 4);
            }
            if matches!(dtype, Dtype::Q5_0 | Dtype::Q5_1) {
                let fifths = &before[before.len() - 4..];
                let fifths = u32::from_le_bytes([fifths[0], fifths[1], fifths[2], fifths[3]]);
                for (i, q) in q.iter_mut().enumerate() {
                    *q |= ((fifths >> i & 1) << 4) as u8;
                }
            }
        }
        Dtype::Q4K | Dtype::Q5K => {
            let nibbles = &b[b.len() - 128 + j / 2 * 32..][..32];
            for (q, n) in q.iter_mut().zip(nibbles) {
                *q = n >> (j % 2 * 4) & 15;
            }
            if dtype == Dtype::Q5K {
                for (q, f) in q.iter_mut().zip(&b[16..48]) {
                    *q |= (f >> j & 1) << 4;
                }
            }
        }
        Dtype::Q6K => {
            // halves of 128 values: 64 bytes of nibbles, 32 of upper bits, each for 4 x 32
            let (half, quarter) = (j / 4, j % 4);
            let nibbles = &b[half * 64 + quarter % 2 * 32..][..32];
            let upper = &b[128 + half * 32..][..32];
            for (q, (n, u)) in q.iter_mut().zip(nibbles.iter().zip(upper)) {
                *q = n >> (quarter / 2 * 4) & 15 | (u >> (quarter * 2) & 3) << 4;
            }
        }
        _ => {
            for (q, b) in q.iter_mut().zip(&b[b.len() - 32..]) {
                *q = b ^ 0x80;
            }
        }
    }
    q
}

fn pack_quants(q: &[u8; BLOCK], lane: usize, out: &mut [u8]) {
    let word = |g: usize| u32::from_le_bytes([q[4 * g], q[4 * g + 1], q[4 * g + 2], q[4 * g + 3]]);
    let lines = out.len() / 32;
    let mut put = |j: usize, word: u32| out[j * 32 + lane * 4..][..4].copy_from_slice(&word.to_le_bytes());
    if lines == 8 {
        return (0..8).for_each(|g| put(g, word(g)));
    }
    let low = |g: usize| word(g) & 0x0f0f_0f0f;
    (0..4).for_each(|j| put(j, low(2 * j) | low(2 * j + 1) << 4));
    // the bits above the nibbles
    let upper = |g: usize| word(g) >> 4 & 0x0f0f_0f0f;
    match lines {
        5 => put(4, (0..8).fold(0, |all, g| all | upper(g) << g)),
        6 => (0..2).for_each(|j| put(4 + j, (0..4).fold(0, |all, g| all | upper(4 * j + g) << (2 * g)))),
        _ => {}
    }
}
