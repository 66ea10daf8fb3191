//! The llama forward pass: config and weights in, a list of ops out. No device is known here.

use std::f64::consts::PI;

use super::LoadError;
use super::config::{ModelConfig, RopeScaling};
use crate::backend::{
    Backend, BackendError, Batch, BufferId, BufferShape, Context, HeadNorms, Heads, Op, Ready, SEQ_WORDS, WeightId,
};
use crate::exec::{MAX_BIASES, mask_words};
use crate::sample::logprob::LOGPROB_WORDS;
use crate::sample::words::SAMPLING_WORDS;

/// One layer's weights.
pub(super) struct Layer {
    pub(super) attn_norm: WeightId,
    /// Query, key and value rows, in this order: `[qkv_columns, hidden_size]`.
    pub(super) qkv: WeightId,
    /// `[qkv_columns]`.
    pub(super) qkv_bias: Option<WeightId>,
    /// Over `head_dim`.
    pub(super) head_norms: Option<HeadNorms>,
    /// `[hidden_size, heads x head_dim]`.
    pub(super) attn_output: WeightId,
    pub(super) ffn_norm: WeightId,
    /// Gate and up in turn by 32 rows: `[2 intermediate_size, hidden_size]`.
    pub(super) gate_up: WeightId,
    /// `[hidden_size, intermediate_size]`.
    pub(super) ffn_down: WeightId,
}

/// A llama model on a device.
pub(super) struct Llama {
    pub(super) config: ModelConfig,
    /// `[vocab_size, hidden_size]`.
    pub(super) token_embd: WeightId,
    pub(super) layers: Vec<Layer>,
    pub(super) output_norm: WeightId,
    /// `[vocab_size, hidden_size]`; `token_embd` where the file ties them.
    pub(super) output: WeightId,
    /// cos and sin in turn, `[max_length][head_dim]`.
    pub(super) rope: WeightId,
}

/// The most that a step may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bounds {
    pub(super) rows: usize,
    pub(super) seqs: usize,
    /// Pages of one sequence.
    pub(super) seq_pages: usize,
    /// Adjustments of one sequence: its biases, and the different tokens that it holds.
    pub(super) seq_adjust: usize,
}

/// Adjustments of a sequence of `length` tokens.
pub(super) fn adjustments(vocab_size: usize, length: usize) -> usize {
    MAX_BIASES + length.min(vocab_size)
}

/// Bounds that a step's ops are built for: powers of two, so that few op lists serve all steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Bucket {
    pub(super) rows: usize,
    pub(super) outs: usize,
}

impl Bucket {
    /// The bucket of a step of `rows` tokens that samples `outs` of them.
    pub(super) fn of(rows: usize, outs: usize, bounds: Bounds) -> Self {
        let up = |n: usize, most: usize| if n == 0 { 0 } else { n.next_power_of_two().min(most) };
        Self {
            rows: up(rows, bounds.rows),
            outs: up(outs, bounds.seqs.min(bounds.rows)),
        }
    }
}

/// All buffers of a pass, made once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workspace {
    pub(super) batch: Batch,
    /// The residual `[rows][hidden_size]`.
    x: BufferId,
    /// `[rows][qkv_columns]`.
    qkv: BufferId,
    /// `[rows][heads x head_dim]`.
    attended: BufferId,
    /// Matmul inputs of `hidden_size`.
    hidden_act: BufferId,
    /// Matmul inputs of `heads x head_dim`.
    attended_act: BufferId,
    /// Matmul inputs of `intermediate_size`.
    inner_act: BufferId,
    /// `[outs][vocab_size]`, padded to 8.
    pub(super) logits: BufferId,
}

/// Every buffer's shape, in the order of [`Workspace::new`].
pub(super) fn shapes(c: &ModelConfig, bounds: Bounds) -> [BufferShape; 19] {
    let rows = bounds.rows;
    let outs = bounds.seqs.min(rows);
    let words = |len| BufferShape::U32 { len };
    let floats = |rows, cols| BufferShape::F32 { rows, cols };
    let act = |k| BufferShape::Activation { rows, k };
    let attended = c.num_attention_heads * c.head_dim;
    [
        words(4),
        words(rows),
        words(rows),
        words(rows),
        words(bounds.seqs * SEQ_WORDS),
        words(bounds.seqs * bounds.seq_pages),
        words(outs),
        words(outs * SAMPLING_WORDS),
        words(outs * bounds.seq_adjust * 2),
        words(outs * mask_words(c.vocab_size)),
        words(outs),
        words(outs * LOGPROB_WORDS),
        floats(rows, c.hidden_size),
        floats(rows, c.qkv_columns()),
        floats(rows, attended),
        // the head's inputs come in two parts
        BufferShape::Activation {
            rows: rows.max(2 * outs),
            k: c.hidden_size,
        },
        act(attended),
        act(c.intermediate_size),
        floats(outs, c.vocab_size.next_multiple_of(8)),
    ]
}

impl Workspace {
    /// Makes the buffers.
    pub(super) fn new(backend: &mut impl Backend, c: &ModelConfig, bounds: Bounds) -> Result<Self, BackendError> {
        let mut ids = [BufferId(0); 19];
        for (id, shape) in ids.iter_mut().zip(shapes(c, bounds)) {
            *id = backend.buffer(shape)?;
        }
        let [
            counts,
            tokens,
            positions,
            slots,
            seqs,
            pages,
            out_rows,
            sampling,
            adjust,
            masks,
            sampled,
            logprobs,
            rest @ ..,
        ] = ids;
        let [x, qkv, attended, hidden_act, attended_act, inner_act, logits] = rest;
        let batch = Batch {
            counts,
            tokens,
            positions,
            slots,
            seqs,
            pages,
            out_rows,
            sampling,
            adjust,
            masks,
            sampled,
            logprobs,
        };
        Ok(Self {
            batch,
            x,
            qkv,
            attended,
            hidden_act,
            attended_act,
            inner_act,
            logits,
        })
    }
}

/// The cos and sin of each position and pair, in turn, `[length][head_dim]`; pairs beyond `rope_dim` are not rotated.
/// `factors` divides the frequencies, pair by pair.
pub(super) fn rope_table(c: &ModelConfig, factors: Option<&[f32]>, length: usize) -> Vec<f32> {
    let frequency = |pair: usize| {
        if 2 * pair >= c.rope_dim {
            return 0.0;
        }
        let f = c.rope_theta.powf(-2.0 * pair as f64 / c.rope_dim as f64);
        factors.map_or(f, |d| f / f64::from(d[pair]))
    };
    let frequencies: Vec<f64> = (0..c.head_dim / 2).map(frequency).collect();
    let mut table = Vec::with_capacity(length * c.head_dim);
    for position in 0..length {
        for f in &frequencies {
            let (sin, cos) = (position as f64 * f).sin_cos();
            table.push(cos as f32);
            table.push(sin as f32);
        }
    }
    table
}

/// What `scaling` divides the rotary frequencies by, pair by pair.
pub(super) fn rope_factors(c: &ModelConfig, scaling: RopeScaling) -> Vec<f32> {
    let RopeScaling::Llama3 {
        factor,
        low_freq_factor,
        high_freq_factor,
        original_max_position_embeddings,
    } = scaling;
    let divisor = |pair: usize| {
        let wavelength = 2.0 * PI * c.rope_theta.powf(2.0 * pair as f64 / c.rope_dim as f64);
        let periods = original_max_position_embeddings as f64 / wavelength;
        // 0: all of the factor, 1: nothing of it
        let keep = ((periods - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
        (1.0 / ((1.0 - keep) / factor + keep)) as f32
    };
    (0..c.rope_dim / 2).map(divisor).collect()
}

impl Llama {
    /// Head counts and width.
    pub(super) fn heads(&self) -> Heads {
        heads(&self.config)
    }

    /// Puts one pass over the batch onto the backend's stream.
    pub(super) fn enqueue(&self, backend: &mut impl Backend, context: &Context, ws: &Workspace, bucket: Bucket) {
        let (c, batch, rows, heads) = (&self.config, ws.batch, bucket.rows, self.heads());
        let eps = c.rms_norm_eps;
        // the other ranks add their parts of the sums to it, and do not sample
        let first = context.rank == 0;
        backend.enqueue(Op::Embed {
            table: self.token_embd,
            x: ws.x,
            batch,
            rows,
        });
        for (layer, w) in self.layers.iter().enumerate() {
            // [rows, hidden_size] -> [rows, qkv_columns]
            backend.enqueue(Op::NormMatmul {
                x: ws.x,
                norm: w.attn_norm,
                eps,
                w: w.qkv,
                act: ws.hidden_act,
                out: ws.qkv,
                batch,
                rows,
            });
            backend.enqueue(Op::RopeWrite {
                qkv: ws.qkv,
                ready: Ready {
                    bias: w.qkv_bias,
                    norms: w.head_norms,
                    rope: self.rope,
                },
                layer,
                heads,
                batch,
                rows,
            });
            // [rows, heads, head_dim], as input of the output projection
            backend.enqueue(Op::Attend {
                qkv: ws.qkv,
                layer,
                heads,
                work: ws.attended,
                out: ws.attended_act,
                next: w.attn_output,
                batch,
                rows,
            });
            backend.enqueue(Op::Project {
                act: ws.attended_act,
                w: w.attn_output,
                x: ws.x,
                residual: first,
                batch,
                rows,
            });
            backend.enqueue(Op::AllReduce { x: ws.x, batch, rows });
            // [rows, hidden_size] -> [rows, intermediate_size], as input of the down projection
            backend.enqueue(Op::NormGateUp {
                x: ws.x,
                norm: w.ffn_norm,
                eps,
                w: w.gate_up,
                act: ws.hidden_act,
                out: ws.inner_act,
                next: w.ffn_down,
                batch,
                rows,
            });
            backend.enqueue(Op::Project {
                act: ws.inner_act,
                w: w.ffn_down,
                x: ws.x,
                residual: first,
                batch,
                rows,
            });
            backend.enqueue(Op::AllReduce { x: ws.x, batch, rows });
            backend.enqueue(Op::LayerDone {
                layer: layer as u32 + 1,
            });
        }
        if first && bucket.outs > 0 {
            let outs = bucket.outs;
            backend.enqueue(Op::Head {
                x: ws.x,
                norm: self.output_norm,
                eps,
                w: self.output,
                act: ws.hidden_act,
                logits: ws.logits,
                batch,
                outs,
            });
            backend.enqueue(Op::Sample {
                logits: ws.logits,
                vocab: c.vocab_size,
                batch,
                outs,
            });
        }
    }
}

/// Head counts and width of a config.
pub(super) fn heads(c: &ModelConfig) -> Heads {
    Heads {
        query: c.num_attention_heads,
        kv: c.num_key_value_heads,
        dim: c.head_dim,
    }
}

/// The frequency factors are one a pair, positive.
pub(super) fn check_factors(path: &std::path::Path, factors: &[f32]) -> Result<(), LoadError> {
    match factors.iter().find(|f| !(f.is_finite() && **f > 0.0)) {
        None => Ok(()),
        Some(f) => Err(LoadError::Damaged {
            path: path.to_owned(),
            what: format!("rope_freqs.weight holds {f}, positive numbers are expected"),
        }),
    }
}
