//! A matmul's inputs in the form that its matrix wants, made where the values are made.

use super::layout::BLOCK;

/// Rows of inputs that the widest kernel reads at once.
const TILE_ROWS: usize = 16;

/// The forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActKind {
    /// int8 with a scale per block of 32, for quantised weights.
    Int8,
    /// f32 as it is, for floats.
    Float,
}

/// What belongs to a block of int8 inputs; together, so that a kernel follows one pointer a row.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(16))]
pub struct BlockScale {
    /// The scale.
    pub d: f32,
    /// Scale x sum of q, for the minimums.
    pub s: f32,
    /// -8 x sum of q: where a sum over unsigned q_w starts to be one over q_w - 8. Shifted left for other centres.
    pub start: i32,
    /// -8 x sum of the first 16 q, for weights that have two scales a block.
    pub first: i32,
}

/// int8 inputs. Rows follow each other.
#[derive(Debug, Clone, Copy)]
pub struct Int8 {
    /// `[rows][k]`; from `Kernels::many_rows` rows on each byte holds q + 128.
    pub q: *mut i8,
    /// `[rows][k / 32]`.
    pub scales: *mut BlockScale,
    /// Values a row.
    pub k: usize,
}

impl Int8 {
    /// Takes what row `row` stands for off `x`: what is left is what rounding lost. `flip` as the row was quantised with.
    ///
    /// # Safety
    /// The row, and as many values at `x`.
    pub unsafe fn subtract(&self, row: usize, x: *mut f32, flip: u8) {
        for i in 0..self.k {
            // SAFETY: the caller's.
            unsafe {
                let q = *self.q.add(row * self.k + i) as u8 ^ flip;
                let d = (*self.scales.add((row * self.k + i) / BLOCK)).d;
                *x.add(i) -= d * f32::from(q as i8);
            }
        }
    }
}

/// f32 inputs.
#[derive(Debug, Clone, Copy)]
pub struct Float {
    /// `[rows][k]`.
    pub x: *mut f32,
    /// Values a row.
    pub k: usize,
}

/// Memory for `rows` x `k` inputs in any of the forms.
#[derive(Debug, Clone, Copy)]
pub struct Act {
    start: *mut u8,
    rows: usize,
    k: usize,
}

impl Act {
    /// Bytes that hold `rows` x `k` inputs in any form. Kernels may read, and never use, rows up to a multiple of 16.
    pub const fn bytes(rows: usize, k: usize) -> usize {
        // f32 is the widest; int8 and its scales stay below
        rows.next_multiple_of(TILE_ROWS) * k * 4 + 64
    }

    /// A view of memory of at least [`Act::bytes`], aligned to 64.
    pub fn new(start: *mut u8, rows: usize, k: usize) -> Self {
        Self {
            start,
            rows: rows.next_multiple_of(TILE_ROWS),
            k,
        }
    }

    /// As int8.
    pub fn int8(self) -> Int8 {
        let scales = self
            .start
            .wrapping_add((self.rows * self.k).next_multiple_of(align_of::<BlockScale>()));
        Int8 {
            q: self.start.cast(),
            scales: scales.cast(),
            k: self.k,
        }
    }

    /// As f32.
    pub fn float(self) -> Float {
        Float {
            x: self.start.cast(),
            k: self.k,
        }
    }
}
