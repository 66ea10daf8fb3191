//! The reference kernels: plain loops, one output or one value at a time. Also what runs on a CPU without AVX2.

use std::slice::{from_raw_parts, from_raw_parts_mut};

use half::{bf16, f16};

use super::act::{BlockScale, Float, Int8};
use super::kernels::{Attention, KEY_BLOCK, Kernels, Out, TINY, inverse_rms};
use super::layout::{BLOCK, Form, LANES, LaneBlock, Layout};
use super::pack::Part;
use crate::model::Dtype;

/// The table.
pub const KERNELS: Kernels = Kernels {
    many_rows: MANY_ROWS,
    rms_norm,
    quantise8,
    matmul_int8,
    matmul_float,
    rope,
    write_kv,
    attend,
    silu_mul,
};

/// As in the AVX2 table, so that both forms of inputs have a reference.
const MANY_ROWS: usize = 12;

// SAFETY for all of this file: the caller passes pointers to as many values as the table's docs say, and nobody else writes
// what is read here or touches what is written here meanwhile.

unsafe fn rms_norm(x: *const f32, w: *const f32, n: usize, eps: f32, out: *mut f32) {
    // SAFETY: n values each.
    let (x, w, out) = unsafe { (from_raw_parts(x, n), from_raw_parts(w, n), from_raw_parts_mut(out, n)) };
    let mean = x.iter().map(|v| v * v).sum::<f32>() / n as f32;
    let r = inverse_rms(mean, eps);
    for i in 0..n {
        out[i] = x[i] * r * w[i];
    }
}

/// Largest magnitude; NaN and infinity stay what they are (as integers the bit patterns order like the magnitudes).
fn largest(x: &[f32]) -> f32 {
    f32::from_bits(x.iter().map(|v| v.abs().to_bits()).max().unwrap_or(0))
}

unsafe fn quantise8(x: *const f32, blocks: usize, a: &Int8, row: usize, first: usize, flip: u8) {
    for b in 0..blocks {
        let at = row * (a.k / BLOCK) + first + b;
        // SAFETY: 32 values of the input, and block `first + b` of row `row`.
        let (x, q) = unsafe {
            (
                from_raw_parts(x.add(b * BLOCK), BLOCK),
                from_raw_parts_mut(a.q.add(at * BLOCK).cast::<u8>(), BLOCK),
            )
        };
        let amax = largest(x);
        let inv = if amax > TINY { 127.0 / amax } else { 0.0 };
        let mut sums = [0; 2];
        for i in 0..BLOCK {
            let v = (x[i] * inv).round_ties_even() as i32;
            sums[i / 16] += v;
            q[i] = v as i8 as u8 ^ flip;
        }
        let d = amax * (1.0 / 127.0);
        // SAFETY: one scale a block.
        unsafe {
            *a.scales.add(at) = BlockScale {
                d,
                s: d * (sums[0] + sums[1]) as f32,
                start: -8 * (sums[0] + sums[1]),
                first: -8 * sums[0],
            }
        };
    }
}

unsafe fn put(out: &Out, panel: usize, row: usize, lane: usize, value: f32) {
    // SAFETY: the caller's `out` covers the panels and rows it asked for.
    unsafe {
        let o = out.panel(panel).add(row * out.ld + lane);
        *o = if out.add { *o + value } else { value };
    }
}

fn half(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

unsafe fn matmul_int8(w: &Part, a: &Int8, rows: usize, out: Out, _scratch: *mut u8) {
    let Some(layout) = Layout::of(w.dtype) else { return };
    let flip = if rows >= MANY_ROWS { 0x80 } else { 0 };
    let nb = a.k / BLOCK;
    let centre = f32::from(layout.centre);
    for p in 0..w.panels {
        // SAFETY: panel p of the part.
        let panel = unsafe { from_raw_parts(w.panel(p), w.stride) };
        for lane in 0..LANES {
            let blocks = (0..nb).map(|b| LaneBlock::read(w.dtype, &layout, panel, b, lane));
            let blocks: Vec<LaneBlock> = blocks.collect();
            for m in 0..rows {
                let mut acc = 0.0f32;
                for (b, block) in blocks.iter().enumerate() {
                    let at = m * nb + b;
                    // SAFETY: block b of row m.
                    let (q, scale) = unsafe {
                        (
                            from_raw_parts(a.q.add(at * BLOCK).cast::<u8>(), BLOCK),
                            *a.scales.add(at),
                        )
                    };
                    let mut sums = [0i32; 2];
                    for i in 0..BLOCK {
                        let weight = i32::from(block.q[i]) - i32::from(layout.centre);
                        sums[i / 16] += weight * i32::from((q[i] ^ flip) as i8);
                    }
                    let mut add = |sum: i32, d: f32| acc = (sum as f32 * d).mul_add(scale.d, acc);
                    if layout.form == Form::Halves {
                        add(sums[0], block.d[0]);
                        add(sums[1], block.d[1]);
                    } else {
                        add(sums[0] + sums[1], block.d[0]);
                    }
                    if let Some(min) = block.min {
                        acc = block.d[0].mul_add(centre, min).mul_add(scale.s, acc);
                    }
                }
                // SAFETY: the caller's `out`.
                unsafe { put(&out, w.first + p, m, lane, acc) };
            }
        }
    }
}

unsafe fn matmul_float(w: &Part, a: &Float, rows: usize, out: Out) {
    for p in 0..w.panels {
        // SAFETY: panel p of the part.
        let panel = unsafe { from_raw_parts(w.panel(p), w.stride) };
        let weight = |i: usize| match w.dtype {
            Dtype::F16 => half(panel, i * 2),
            Dtype::Bf16 => bf16::from_le_bytes([panel[i * 2], panel[i * 2 + 1]]).to_f32(),
            _ => f32::from_le_bytes([panel[i * 4], panel[i * 4 + 1], panel[i * 4 + 2], panel[i * 4 + 3]]),
        };
        for m in 0..rows {
            // SAFETY: row m.
            let x = unsafe { from_raw_parts(a.x.add(m * a.k), a.k) };
            for lane in 0..LANES {
                let mut acc = 0.0f32;
                for (i, x) in x.iter().enumerate() {
                    acc = weight(i * LANES + lane).mul_add(*x, acc);
                }
                // SAFETY: the caller's `out`.
                unsafe { put(&out, w.first + p, m, lane, acc) };
            }
        }
    }
}

unsafe fn rope(x: *mut f32, dim: usize, table: *const f32, scale: f32) {
    // SAFETY: dim values each.
    let (x, table) = unsafe { (from_raw_parts_mut(x, dim), from_raw_parts(table, dim)) };
    for (x, t) in x.chunks_exact_mut(2).zip(table.chunks_exact(2)) {
        let (a, b) = (x[0], x[1]);
        x[0] = (a * t[0] - b * t[1]) * scale;
        x[1] = (b * t[0] + a * t[1]) * scale;
    }
}

unsafe fn write_kv(key: *const f32, value: *const f32, dim: usize, k: *mut u16, v: *mut u16) {
    for i in 0..dim {
        // SAFETY: dim values each; keys lie 8 elements apart.
        unsafe {
            *k.add(i * LANES) = f16::from_f32(*key.add(i)).to_bits();
            *v.add(i) = f16::from_f32(*value.add(i)).to_bits();
        }
    }
}

unsafe fn attend(a: &Attention<'_>, scratch: *mut f32, out: *mut f32) {
    // SAFETY: the table's docs give the scratch's length.
    let scores = unsafe { from_raw_parts_mut(scratch, KEY_BLOCK) };
    for row in 0..a.tokens * a.group {
        let (token, head) = (row / a.group, row % a.group);
        // SAFETY: the query of that token and head, and its place in `out`.
        let (q, out) = unsafe {
            (
                from_raw_parts(a.q.add(token * a.ldq + head * a.dim), a.dim),
                from_raw_parts_mut(out.add(row * a.dim), a.dim),
            )
        };
        out.fill(0.0);
        let (mut top, mut sum) = (f32::NEG_INFINITY, 0.0f32);
        let visible = a.first_position + token + 1;
        for start in (0..visible).step_by(KEY_BLOCK) {
            let len = KEY_BLOCK.min(visible - start);
            for (i, score) in scores[..len].iter_mut().enumerate() {
                let t = start + i;
                let panel = a.key_panel(t / LANES * LANES);
                // SAFETY: a panel holds dim x 8 keys.
                let key = |d: usize| f16::from_bits(unsafe { *panel.add(d * LANES + t % LANES) }).to_f32();
                *score = (0..a.dim).fold(0.0, |acc, d| key(d).mul_add(q[d], acc));
            }
            let before = top;
            top = scores[..len].iter().fold(top, |m, s| m.max(*s));
            let keep = (before - top).exp();
            sum *= keep;
            for o in &mut *out {
                *o *= keep;
            }
            for (i, score) in scores[..len].iter().enumerate() {
                let t = start + i;
                let weight = (score - top).exp();
                sum += weight;
                // SAFETY: 8 rows of dim values.
                let value = unsafe { a.value_rows(t / LANES * LANES).add(t % LANES * a.dim) };
                for (d, o) in out.iter_mut().enumerate() {
                    // SAFETY: as above.
                    *o = f16::from_bits(unsafe { *value.add(d) }).to_f32().mul_add(weight, *o);
                }
            }
        }
        for o in out {
            *o /= sum;
        }
    }
}

unsafe fn silu_mul(x: *const f32, out: *mut f32) {
    // SAFETY: 64 values in, 32 out.
    let (x, out) = unsafe { (from_raw_parts(x, 2 * BLOCK), from_raw_parts_mut(out, BLOCK)) };
    for i in 0..BLOCK {
        out[i] = x[i] / (1.0 + (-x[i]).exp()) * x[BLOCK + i];
    }
}
