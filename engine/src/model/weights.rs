//! From a checkpoint to packed weights: whole or one rank's part, rows in the order that the kernels want.

use std::collections::BTreeSet;

use super::LoadError;
use super::checkpoint::{Checkpoint, LayerPart, Part, Tensor};
use super::config::{ModelConfig, RopePairs};
use super::forward::{self, Layer, Llama};
use super::tensor::{BLOCK, Dtype, dequantise_row};
use crate::backend::cpu::Cpu;
use crate::backend::{Backend, BackendError, HeadNorms, Row, WeightId};

/// The tensors of a layer that are packed as one matrix.
const QKV: [LayerPart; 3] = [LayerPart::Q, LayerPart::K, LayerPart::V];
const GATE_UP: [LayerPart; 2] = [LayerPart::Gate, LayerPart::Up];

/// One of how many equal parts of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) rank: usize,
    pub(super) ranks: usize,
}

/// Along which side a tensor is cut.
enum Side {
    /// Every rank has some of the outputs (for a vector: of the values).
    Outputs,
    /// Every rank has some of the inputs.
    Inputs,
    /// Every rank has all of it.
    None,
}

fn side(part: Part) -> Side {
    use LayerPart::{AttnNorm, AttnOutput, Down, FfnNorm, Gate, K, KBias, KNorm, Q, QBias, QNorm, Up, V, VBias};
    match part {
        Part::Layer(_, Q | K | V | QBias | KBias | VBias | Gate | Up) => Side::Outputs,
        Part::Layer(_, AttnOutput | Down) => Side::Inputs,
        Part::Layer(_, AttnNorm | FfnNorm | QNorm | KNorm)
        | Part::TokenEmbd
        | Part::OutputNorm
        | Part::Output
        | Part::RopeFreqs => Side::None,
    }
}

impl Cut {
    fn range(self, len: usize) -> std::ops::Range<usize> {
        let each = len / self.ranks;
        self.rank * each..(self.rank + 1) * each
    }
}

/// The sizes of one of `ranks` parts of a model.
pub(super) fn part_of(c: &ModelConfig, ranks: usize) -> ModelConfig {
    ModelConfig {
        num_attention_heads: c.num_attention_heads / ranks,
        num_key_value_heads: c.num_key_value_heads / ranks,
        intermediate_size: c.intermediate_size / ranks,
        ..c.clone()
    }
}

/// Refuses a number of ranks that the model cannot be cut into: what is wrong and what would do.
pub(super) fn check_ranks(c: &ModelConfig, ranks: usize) -> Result<(), String> {
    let (heads, kv, inner) = (c.num_attention_heads, c.num_key_value_heads, c.intermediate_size);
    if !kv.is_multiple_of(ranks) {
        return Err(format!(
            "the model has {heads} query heads and {kv} KV heads, and each rank needs as many: give a divisor of {kv}"
        ));
    }
    let width = heads / ranks * c.head_dim;
    if !width.is_multiple_of(BLOCK) {
        return Err(format!(
            "a rank would have {} query heads of {}, which make {width} columns, and a multiple of {BLOCK} is needed; give less",
            heads / ranks,
            c.head_dim
        ));
    }
    if !inner.is_multiple_of(ranks * BLOCK) {
        return Err(format!(
            "the model has {inner} inner columns, and each rank needs as many, a multiple of {BLOCK}; give another number"
        ));
    }
    Ok(())
}

/// Bytes of the weights as `ranks` backends pack them.
pub(super) fn packed_bytes(checkpoint: &Checkpoint, ranks: usize, as_f32: bool) -> u64 {
    let c = checkpoint.config();
    let matrix = |parts: &[Part]| -> u64 {
        let rows: Vec<_> = parts
            .iter()
            .filter_map(|part| {
                let dtype = checkpoint.tensor(*part)?.dtype;
                Some((if as_f32 { Dtype::F32 } else { dtype }, part.dims(c)[1]))
            })
            .collect();
        match parts[0].dims(c)[0] {
            _ if rows.is_empty() => 0,
            k => Cpu::matrix_bytes(&rows, k),
        }
    };
    let layer = |l: usize| -> u64 {
        let of = |parts: &[LayerPart]| matrix(&parts.iter().map(|p| Part::Layer(l, *p)).collect::<Vec<_>>());
        of(&QKV) + of(&[LayerPart::AttnOutput]) + of(&GATE_UP) + of(&[LayerPart::Down])
    };
    (0..c.num_hidden_layers).map(layer).sum::<u64>()
        + matrix(&[Part::TokenEmbd]) * ranks as u64
        + matrix(&[Part::Output])
}

/// Where [`pack`] puts weights, and how.
pub(super) struct Weights<'a, B> {
    checkpoint: &'a Checkpoint,
    backend: &'a mut B,
    cut: Cut,
    as_f32: bool,
    used: BTreeSet<Part>,
    /// Bytes taken, of how many.
    done: u64,
    all: u64,
    progress: &'a mut dyn FnMut(u8),
}

/// Packs one rank's part of a model, for sequences of up to `length` tokens.
pub(super) fn pack<B: Backend>(
    backend: &mut B,
    checkpoint: &Checkpoint,
    cut: Cut,
    as_f32: bool,
    length: usize,
    progress: &mut dyn FnMut(u8),
) -> Result<Llama, LoadError> {
    let c = checkpoint.config();
    let mut w = Weights {
        checkpoint,
        backend,
        cut,
        as_f32,
        used: BTreeSet::new(),
        done: 0,
        all: checkpoint.tensor_bytes().max(1),
        progress,
    };
    let token_embd = w.matrix(&[Part::TokenEmbd], false)?;
    let mut layers = Vec::with_capacity(c.num_hidden_layers);
    for l in 0..c.num_hidden_layers {
        let part = |p: LayerPart| Part::Layer(l, p);
        layers.push(Layer {
            attn_norm: w.vector(&[part(LayerPart::AttnNorm)])?,
            qkv: w.matrix(&QKV.map(part), false)?,
            qkv_bias: if c.qkv_bias {
                Some(w.vector(&LayerPart::BIASES.map(part))?)
            } else {
                None
            },
            head_norms: if c.qk_norm {
                Some(HeadNorms {
                    query: w.vector(&[part(LayerPart::QNorm)])?,
                    key: w.vector(&[part(LayerPart::KNorm)])?,
                    eps: c.rms_norm_eps,
                })
            } else {
                None
            },
            attn_output: w.matrix(&[part(LayerPart::AttnOutput)], false)?,
            ffn_norm: w.vector(&[part(LayerPart::FfnNorm)])?,
            gate_up: w.matrix(&GATE_UP.map(part), true)?,
            ffn_down: w.matrix(&[part(LayerPart::Down)], false)?,
        });
    }
    let output_norm = w.vector(&[Part::OutputNorm])?;
    let output = match checkpoint.tensor(Part::Output) {
        Some(_) if cut.rank == 0 => w.matrix(&[Part::Output], false)?,
        // the others make no logits
        Some(_) => {
            w.tensor(Part::Output)?;
            token_embd
        }
        None => token_embd,
    };
    let factors = match (checkpoint.tensor(Part::RopeFreqs), c.rope_scaling) {
        (Some(_), _) => {
            let factors = w.values(Part::RopeFreqs)?;
            forward::check_factors(checkpoint.path(), &factors)?;
            Some(factors)
        }
        (None, Some(scaling)) => Some(forward::rope_factors(c, scaling)),
        (None, None) => None,
    };
    checkpoint.all_used(&w.used)?;
    let table = forward::rope_table(c, factors.as_deref(), length);
    let rope = w.backend.vector(table).map_err(|e| w.error(e))?;
    Ok(Llama {
        config: part_of(c, cut.ranks),
        token_embd,
        layers,
        output_norm,
        output,
        rope,
    })
}

impl<'a, B: Backend> Weights<'a, B> {
    fn tensor(&mut self, part: Part) -> Result<Tensor<'a>, LoadError> {
        let tensor = self.checkpoint.tensor(part).ok_or_else(|| LoadError::MissingTensor {
            path: self.checkpoint.path().to_owned(),
            tensor: self.checkpoint.name(part),
        })?;
        self.used.insert(part);
        self.done += tensor.bytes.len() as u64;
        // tensors neither overlap nor are taken twice; the rest is making tables and waiting for the hash
        (self.progress)((self.done * 98 / self.all) as u8 + 1);
        Ok(tensor)
    }

    /// A whole vector, as it lies in the file.
    fn values(&mut self, part: Part) -> Result<Vec<f32>, LoadError> {
        let tensor = self.tensor(part)?;
        let mut values = vec![0.0; part.dims(self.checkpoint.config())[0]];
        dequantise_row(tensor.dtype, tensor.bytes, &mut values);
        Ok(values)
    }

    fn error(&self, source: BackendError) -> LoadError {
        LoadError::Backend {
            path: self.checkpoint.path().to_owned(),
            source,
        }
    }

    /// This rank's part of several vectors, one after the other.
    fn vector(&mut self, parts: &[Part]) -> Result<WeightId, LoadError> {
        let mut all = Vec::new();
        for part in parts {
            let values = self.values(*part)?;
            let values = self.in_order(*part, values);
            let own = match side(*part) {
                Side::Outputs => self.cut.range(values.len()),
                Side::Inputs | Side::None => 0..values.len(),
            };
            all.extend_from_slice(&values[own]);
        }
        self.backend.vector(all).map_err(|e| self.error(e))
    }

    /// This rank's part of one matrix of the rows of several tensors of as many inputs: one after the other, or in turn by 32.
    fn matrix(&mut self, from: &[Part], in_turn: bool) -> Result<WeightId, LoadError> {
        let mut parts: Vec<Vec<Row<'a>>> = Vec::with_capacity(from.len());
        for part in from {
            parts.push(self.rows(*part)?);
        }
        let rows: Vec<Row<'a>> = if in_turn {
            (0..parts[0].len() / BLOCK)
                .flat_map(|i| parts.iter().flat_map(move |p| &p[i * BLOCK..(i + 1) * BLOCK]))
                .copied()
                .collect()
        } else {
            parts.concat()
        };
        let k = match (from[0].dims(self.checkpoint.config())[0], side(from[0])) {
            (k, Side::Inputs) => k / self.cut.ranks,
            (k, Side::Outputs | Side::None) => k,
        };
        if self.as_f32 {
            let values = dequantised(&rows, k);
            let row = |bytes| Row {
                dtype: Dtype::F32,
                bytes,
            };
            let rows: Vec<Row<'_>> = values.chunks_exact(4 * k).map(row).collect();
            return self.backend.matrix(&rows, k).map_err(|e| self.error(e));
        }
        self.backend.matrix(&rows, k).map_err(|e| self.error(e))
    }

    /// This rank's part of a matrix, row by row.
    fn rows(&mut self, part: Part) -> Result<Vec<Row<'a>>, LoadError> {
        let tensor = self.tensor(part)?;
        let dims = part.dims(self.checkpoint.config());
        let (k, n) = (dims[0], dims[1]);
        let dtype = tensor.dtype;
        let row = |bytes| Row { dtype, bytes };
        let rows: Vec<Row<'a>> = tensor.bytes.chunks_exact(tensor.bytes.len() / n).map(row).collect();
        match side(part) {
            Side::None => Ok(rows),
            Side::Outputs => Ok(self.in_order(part, rows)[self.cut.range(n)].to_vec()),
            Side::Inputs => {
                let Some(bytes) = dtype.row_bytes(k / self.cut.ranks) else {
                    return Err(LoadError::Option {
                        option: "--tensor-parallel",
                        value: self.cut.ranks.to_string(),
                        why: format!(
                            "{} has {k} inputs in {}, whose blocks of {} cannot be cut into so many equal parts; give another \
                             number or use a file in another type",
                            self.checkpoint.name(part),
                            dtype.name(),
                            dtype.block().0
                        ),
                    });
                };
                let own = bytes * self.cut.rank..bytes * (self.cut.rank + 1);
                Ok(rows.iter().map(|r| row(&r.bytes[own.clone()])).collect())
            }
        }
    }

    /// A query's or key's outputs (or biases or norm weights) so that neighbours are rotated together; everything else as it is.
    fn in_order<T: Copy>(&self, part: Part, values: Vec<T>) -> Vec<T> {
        use LayerPart::{K, KBias, KNorm, Q, QBias, QNorm};
        let c = self.checkpoint.config();
        match part {
            Part::Layer(_, Q | K | QBias | KBias | QNorm | KNorm) if c.rope_pairs == RopePairs::Halves => values
                .chunks_exact(c.head_dim)
                .flat_map(|head| neighbours(head, c.rope_dim))
                .collect(),
            _ => values,
        }
    }
}

/// A head whose element i is rotated with i + `rope_dim` / 2, reordered so that it is rotated with its neighbour; what lies beyond
/// `rope_dim` is not rotated and stays.
fn neighbours<T: Copy>(head: &[T], rope_dim: usize) -> impl Iterator<Item = T> {
    let (rotated, rest) = head.split_at(rope_dim);
    let (first, second) = rotated.split_at(rope_dim / 2);
    let pairs = first.iter().zip(second).flat_map(|(a, b)| [*a, *b]);
    pairs.chain(rest.iter().copied())
}

/// The bytes of rows of `k` values as f32.
fn dequantised(rows: &[Row<'_>], k: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(rows.len() * k * 4);
    let mut values = vec![0.0; k];
    for row in rows {
        dequantise_row(row.dtype, row.bytes, &mut values);
        bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_become_neighbours_and_what_is_not_rotated_stays() {
        let head = [0, 1, 2, 3, 4, 5, 6, 7];
        assert_eq!(neighbours(&head, 8).collect::<Vec<_>>(), [0, 4, 1, 5, 2, 6, 3, 7]);
        assert_eq!(neighbours(&head, 4).collect::<Vec<_>>(), [0, 2, 1, 3, 4, 5, 6, 7]);
    }
}
