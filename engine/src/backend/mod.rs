//! What a model asks of a device: coarse, stream-ordered ops over buffer handles.
//!
//! | file | holds |
//! | --- | --- |
//! | `mod.rs` | the trait, the handles, the ops as values |
//! | [`cpu`] | the CPU backend: packed weights, kernels, worker threads |
//! | `record.rs` (tests) | a backend that executes nothing and remembers what it was asked |
//!
//! The rules that let a step be captured once and replayed:
//! - everything an op touches is named by a handle that was made while loading; an op allocates nothing;
//! - what differs from step to step (tokens, positions, pages, counts) lies in the [`Batch`] buffers, written before the first op;
//! - the host reads nothing between the first op and [`Backend::finish`]; a sampled token goes into a device buffer;
//! - an op names upper bounds (the batch bucket), the true counts lie in [`Batch::counts`].
//!
//! Dims: `rows` tokens of a step, `k` inputs and `n` outputs of a matmul; other names as in `config.json`.

pub mod cpu;
#[cfg(test)]
pub(crate) mod record;

use std::sync::Arc;

use crate::exec::KvStore;
use crate::model::Dtype;

/// Names a device buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BufferId(pub u32);

/// Names a packed matrix or a vector of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WeightId(pub u32);

/// What a buffer is to hold; the backend chooses how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BufferShape {
    /// `[rows][cols]` f32.
    F32 {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },
    /// `rows` inputs of `k` values for a matmul, in the form that the matrix wants (see [`Op`]).
    Activation {
        /// Rows.
        rows: usize,
        /// Values a row.
        k: usize,
    },
    /// Integers, written or read by the host around a pass.
    U32 {
        /// Their number.
        len: usize,
    },
}

/// Rows of a matrix as the file holds them: one row is one output.
#[derive(Debug, Clone, Copy)]
pub struct Row<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// The row's bytes, `k` values.
    pub bytes: &'a [u8],
}

/// Head counts and head width of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Heads {
    /// Query heads.
    pub query: usize,
    /// KV heads; divides `query`.
    pub kv: usize,
    /// Elements of a head.
    pub dim: usize,
}

impl Heads {
    /// Query heads that share one KV head.
    pub const fn group(self) -> usize {
        self.query / self.kv
    }
}

/// What a row's queries, keys and values go through before attention, in this order.
///
/// Neighbouring elements of a head are rotated together. Checkpoints that pair element i with i + half get their rows (and biases and
/// norm weights) reordered while loading, so there is one kernel; a score is a sum over a head, so no answer depends on the order, but
/// the keys in the KV pool, and on the wire, are in it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ready {
    /// `[(query + 2 kv) x dim]`, added.
    pub bias: Option<WeightId>,
    /// Norms of each query head and each key head.
    pub norms: Option<HeadNorms>,
    /// cos and sin in turn, `[max_length][dim]`: queries and keys are rotated.
    pub rope: WeightId,
}

/// RMS norms over single heads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadNorms {
    /// Weights `[dim]` of all query heads.
    pub query: WeightId,
    /// Weights `[dim]` of all key heads.
    pub key: WeightId,
    /// Added to the mean square.
    pub eps: f32,
}

/// The KV pool, f16, all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvShape {
    /// Layers.
    pub layers: usize,
    /// Heads.
    pub heads: Heads,
    /// Pages.
    pub pages: usize,
    /// Tokens a page; a multiple of 8.
    pub page_tokens: usize,
}

/// The buffers that describe a step's batch; all U32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Batch {
    /// `[rows, seqs, outs, longest]`: tokens, sequences, sequences that sample, most tokens of one sequence.
    pub counts: BufferId,
    /// `[rows]` token ids.
    pub tokens: BufferId,
    /// `[rows]` positions.
    pub positions: BufferId,
    /// `[rows]` KV slots: page x page_tokens + place in the page.
    pub slots: BufferId,
    /// `[seqs][4]`: first row, rows, first position, index of the sequence's first page in `pages`.
    pub seqs: BufferId,
    /// All sequences' pages, one after the other.
    pub pages: BufferId,
    /// `[outs]` the row whose successor is sampled.
    pub out_rows: BufferId,
    /// `[outs][SAMPLING_WORDS]`: a [`Row`](crate::sample::words::Row) each.
    pub sampling: BufferId,
    /// `[entries][2]` of [`Adjust`](crate::exec::Adjust), all rows' biases and seen tokens one after the other.
    pub adjust: BufferId,
    /// `[masks][mask_words(vocab)]`, of the rows that have one.
    pub masks: BufferId,
    /// `[outs]` result: the token, [`NOT_FINITE`] or [`NONE_ALLOWED`].
    pub sampled: BufferId,
    /// `[outs][LOGPROB_WORDS]` result, where it was asked for: see [`logprob`](crate::sample::logprob).
    pub logprobs: BufferId,
}

/// In [`Batch::sampled`]: the logits held NaN or infinity.
pub const NOT_FINITE: u32 = u32::MAX;
/// In [`Batch::sampled`]: the mask allows no token.
pub const NONE_ALLOWED: u32 = u32::MAX - 1;

/// Words of one sequence in [`Batch::seqs`].
pub const SEQ_WORDS: usize = 4;

/// One op. `rows` and `outs` are the bucket's bounds.
///
/// An activation buffer holds what its consuming matrix wants (int8 blocks, int16 rows or f32), so an op that fills one for a
/// later matmul names that matrix as `next`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Op {
    /// `x[r] = table[tokens[r]]`
    Embed {
        /// `[vocab_size, hidden_size]`.
        table: WeightId,
        /// `[rows][hidden_size]` f32, the residual.
        x: BufferId,
        /// The batch.
        batch: Batch,
        /// Bound.
        rows: usize,
    },
    /// `out = W (norm(x))`: query, key and value at once.
    NormMatmul {
        /// The residual.
        x: BufferId,
        /// Norm weights `[hidden_size]`.
        norm: WeightId,
        /// Added to the mean square.
        eps: f32,
        /// `[n, hidden_size]`.
        w: WeightId,
        /// Workspace for the normed input.
        act: BufferId,
        /// `[rows][n]` f32.
        out: BufferId,
        /// The batch.
        batch: Batch,
        /// Bound.
        rows: usize,
    },
    /// Makes queries (scaled by `dim^-0.5`), keys and values ready in place, as [`Ready`] says; writes keys and values to the KV pool.
    RopeWrite {
        /// `[rows][(query + 2 kv) x dim]` f32.
        qkv: BufferId,
        /// What is done to them.
        ready: Ready,
        /// Layer, from 0.
        layer: usize,
        /// Shape.
        heads: Heads,
        /// The batch.
        batch: Batch,
        /// Bound.
        rows: usize,
    },
    /// Causal attention of every row over its sequence's pages, written as input of `next`.
    Attend {
        /// Rotated queries, as left by `RopeWrite`.
        qkv: BufferId,
        /// Layer, from 0.
        layer: usize,
        /// Shape.
        heads: Heads,
        /// `[rows][query x dim]` f32, workspace.
        work: BufferId,
        /// Activation `[rows][query x dim]`.
        out: BufferId,
        /// The matrix that reads `out`.
        next: WeightId,
        /// The batch.
        batch: Batch,
        /// Bound.
        rows: usize,
    },
    /// `x = residual x + W act`
    Project {
        /// Activation.
        act: BufferId,
        /// `[hidden_size, k]`.
        w: WeightId,
        /// The residual.
        x: BufferId,
        /// Add to `x` (rank 0), or overwrite it with this rank's part of the sum (others).
        residual: bool,
        /// The batch.
        batch: Batch,
        /// Bound.
        rows: usize,
    },
    /// Sums `x` over the ranks of the context's communicator.
    AllReduce {
        /// `[rows][hidden_size]` f32.
        x: BufferId,
        /// The batch.
        batch: Batch,
        /// Bound.
        rows: usize,
    },
    /// `out = silu(G norm(x)) * (U norm(x))` with `w` = G and U in turn by 32 rows, written as input of `next`.
    NormGateUp {
        /// The residual.
        x: BufferId,
        /// Norm weights.
        norm: WeightId,
        /// Added to the mean square.
        eps: f32,
        /// `[2 intermediate_size, hidden_size]`.
        w: WeightId,
        /// Workspace for the normed input.
        act: BufferId,
        /// Activation `[rows][intermediate_size]`.
        out: BufferId,
        /// The matrix that reads `out`.
        next: WeightId,
        /// The batch.
        batch: Batch,
        /// Bound.
        rows: usize,
    },
    /// `logits[o] = W norm(x[out_rows[o]])`
    Head {
        /// The residual.
        x: BufferId,
        /// Norm weights.
        norm: WeightId,
        /// Added to the mean square.
        eps: f32,
        /// `[vocab_size, hidden_size]`.
        w: WeightId,
        /// Workspace for the normed input: two rows for each of logits.
        act: BufferId,
        /// `[outs][vocab_size]`, padded to whole panels, f32.
        logits: BufferId,
        /// The batch.
        batch: Batch,
        /// Bound.
        outs: usize,
    },
    /// Chooses a token per row of logits into [`Batch::sampled`], and tells log-probabilities where they were asked for.
    Sample {
        /// As left by `Head`.
        logits: BufferId,
        /// Tokens; columns from here on are padding.
        vocab: usize,
        /// The batch.
        batch: Batch,
        /// Bound.
        outs: usize,
    },
    /// The host is told, in order, that the layer is done.
    LayerDone {
        /// Counted from 1.
        layer: u32,
    },
}

/// Sums over the ranks that share one model.
pub trait Communicator: Send + Sync {
    /// How many ranks there are.
    fn ranks(&self) -> usize;
    /// Replaces `data` by the sum of all ranks' `data`, in rank order, on every rank.
    fn all_reduce(&self, rank: usize, data: &mut [f32]);
}

/// The communicator of a model that one rank holds.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleRank;

impl Communicator for SingleRank {
    fn ranks(&self) -> usize {
        1
    }
    fn all_reduce(&self, _rank: usize, _data: &mut [f32]) {}
}

/// Who this rank is.
#[derive(Clone)]
pub struct Context {
    /// From 0.
    pub rank: usize,
    /// To the others.
    pub communicator: Arc<dyn Communicator>,
}

impl Context {
    /// The context of a model that one rank holds.
    pub fn single() -> Self {
        Self {
            rank: 0,
            communicator: Arc::new(SingleRank),
        }
    }
}

/// Why a backend could not set something up.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The allocator said no.
    #[error("{bytes} bytes for {what} could not be allocated; free memory or ask for less")]
    OutOfMemory {
        /// What for.
        what: &'static str,
        /// How much.
        bytes: usize,
    },
    /// Something is out of the range that the backend computes with.
    #[error("{0}")]
    Unsupported(String),
    /// A worker thread could not be started.
    #[error("worker thread could not be started: {0}; lower --threads or raise the process limit")]
    Thread(std::io::Error),
}

/// A device. One thread owns it.
pub trait Backend: Send {
    /// In effect, e.g. `cpu-avx2`.
    fn name(&self) -> &'static str;
    /// Makes a zeroed buffer; while loading only.
    fn buffer(&mut self, shape: BufferShape) -> Result<BufferId, BackendError>;
    /// Packs a matrix of `k` inputs; while loading only. The rows' order is the order of the outputs.
    fn matrix(&mut self, rows: &[Row<'_>], k: usize) -> Result<WeightId, BackendError>;
    /// Stores a vector of weights; while loading only.
    fn vector(&mut self, values: Vec<f32>) -> Result<WeightId, BackendError>;
    /// Makes the KV pool; once, while loading.
    fn kv_pool(&mut self, shape: KvShape) -> Result<Arc<dyn KvStore>, BackendError>;
    /// Writes to the front of a U32 buffer, before the first op of a pass.
    fn write(&mut self, buffer: BufferId, data: &[u32]);
    /// Reads words from the front of a U32 or F32 buffer, after [`Backend::finish`].
    fn read(&mut self, buffer: BufferId, out: &mut [u32]);
    /// Puts an op at the end of the stream.
    fn enqueue(&mut self, op: Op);
    /// Returns when every op is done; tells the layers as they are.
    fn finish(&mut self, on_layer: &mut dyn FnMut(u32));
}
