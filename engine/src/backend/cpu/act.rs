//! A matmul's inputs in the form that its matrix wants, made where the values are made.

/// The forms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActKind {
    /// int8 with a scale per block of 32, for nibble panels.
    Int8,
    /// int16 with a scale per row, for byte panels: 100 times the precision of int8 at the same speed on AVX2.
    Int16,
    /// f32 as it is, for float panels.
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
    /// -8 x sum of q: where a sum over unsigned q_w starts to be one over q_w - 8.
    pub start: i32,
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

/// int16 inputs with one scale a row.
#[derive(Debug, Clone, Copy)]
pub struct Int16 {
    /// `[rows][k]`.
    pub q: *mut i16,
    /// `[rows]` scales.
    pub d: *mut f32,
    /// Values a row.
    pub k: usize,
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
    /// Bytes that hold `rows` x `k` inputs in any form.
    pub const fn bytes(rows: usize, k: usize) -> usize {
        // f32 is the widest; int16 adds a scale a row, int8 stays below
        rows * k * 4 + rows * 4 + 64
    }

    /// A view of memory of at least [`Act::bytes`], aligned to 64.
    pub fn new(start: *mut u8, rows: usize, k: usize) -> Self {
        Self { start, rows, k }
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

    /// As int16.
    pub fn int16(self) -> Int16 {
        let d = self
            .start
            .wrapping_add((self.rows * self.k * 2).next_multiple_of(4))
            .cast();
        Int16 {
            q: self.start.cast(),
            d,
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
