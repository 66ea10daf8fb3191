//! What scheduling asks of a model: one step over a ragged batch, and the KV pages' bytes in the wire's order.
//!
//! The scheduler knows nothing of ops, weights or devices; a model knows nothing of requests. Both meet here.

use std::sync::Arc;

use tandem_wire::KvLayout;

/// Index of a KV page in the pool, `0..total_pages`.
pub type PageId = u32;

/// What is fixed once a model is loaded.
#[derive(Debug, Clone)]
pub struct ModelSpec {
    /// As the file calls itself (`general.name`), or the file's stem.
    pub name: String,
    /// sha256 over the file's bytes.
    pub hash: [u8; 32],
    /// What a token's KV consists of.
    pub layout: KvLayout,
    /// The longest sequence (prompt + new) in tokens.
    pub max_length_tokens: u32,
    /// Rows of the output head.
    pub vocab_size: u32,
    /// Tokens that end an answer (`eos`, `eot`).
    pub end_tokens: Vec<u32>,
    /// Backend in effect, e.g. `cpu-avx2`.
    pub backend: &'static str,
    /// Pages in the pool.
    pub total_pages: u32,
    /// Tokens per page; a multiple of 8.
    pub page_tokens: u32,
    /// The most tokens that one step may hold, all sequences together (workspaces are sized by it).
    pub max_step_tokens: u32,
    /// The most sequences that one step may hold.
    pub max_step_seqs: u32,
}

/// How a token is chosen. The random number is a function of (seed, position) alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleParams {
    /// 0: greedy (ties: the lowest id).
    pub temperature: f32,
    /// Nucleus mass in (0, 1].
    pub top_p: f32,
    /// Key of the counter RNG.
    pub seed: u64,
}

/// One sequence's part of a step: consecutive tokens whose KV is computed and written.
#[derive(Debug, Clone, Copy)]
pub struct StepSeq<'a> {
    /// Tokens to compute, at least one.
    pub tokens: &'a [u32],
    /// Position of `tokens[0]`; the KV of all positions before it lies in `pages`.
    pub first_position: u32,
    /// The sequence's pages in order, covering at least `first_position + tokens.len()` tokens.
    pub pages: &'a [PageId],
    /// Sample the token that follows the last one of `tokens`; `None` for a chunk that does not end the prompt.
    pub sample: Option<SampleParams>,
}

/// Why a step failed. The sequences of the step are not damaged beyond the positions that it was to compute.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The batch does not fit what the model was set up for.
    #[error(
        "step of {tokens} tokens in {seqs} sequences exceeds the workspace of {max_tokens} tokens and {max_seqs} sequences"
    )]
    TooLarge {
        /// Tokens asked for.
        tokens: usize,
        /// Sequences asked for.
        seqs: usize,
        /// The bound on tokens.
        max_tokens: usize,
        /// The bound on sequences.
        max_seqs: usize,
    },
    /// An argument is out of range: a token id, a page, a position.
    #[error("step refused: {0}")]
    Invalid(String),
}

/// What became of one sequence's sampling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sampled {
    /// A chunk without sampling.
    None,
    /// The token chosen.
    Token(u32),
    /// The logits held NaN or infinity: the request must fail, its neighbours need not.
    NotFinite,
}

/// A loaded model that computes steps. One thread owns it.
pub trait Executor: Send {
    /// What is fixed once loaded.
    fn spec(&self) -> &ModelSpec;
    /// Computes one step: for each sequence writes the KV of its tokens and samples where asked. A sequence's result
    /// depends on that sequence alone, never on its neighbours or on how its prompt was cut into chunks.
    /// `on_layer(l)` is called after layer `l` (counted from 1) of the whole batch is done.
    fn step(&mut self, batch: &[StepSeq<'_>], on_layer: &mut dyn FnMut(u32)) -> Result<Vec<Sampled>, StepError>;
    /// The pages' bytes, for transfer.
    fn kv(&self) -> Arc<dyn KvStore>;
}

/// A run of one sequence's tokens in one component of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvRun {
    /// Layer, from 0.
    pub layer: u32,
    /// Index into the layout's components.
    pub component: u32,
    /// First token's position in the sequence.
    pub first_token: u32,
    /// Number of tokens.
    pub tokens: u32,
}

/// Why KV bytes could not be read or written; nothing was touched then.
#[derive(Debug, thiserror::Error)]
#[error("kv run {run:?} refused: {why}")]
pub struct KvError {
    /// The run asked for.
    pub run: KvRun,
    /// What is out of range.
    pub why: String,
}

/// The KV pool as bytes in canonical order `[token][head][dim]`, little endian.
///
/// The caller holds the pages: nobody computes into a page while it is written here, and nobody writes to one while it is read.
pub trait KvStore: Send + Sync {
    /// Copies a run of a sequence whose pages are `pages` into `out`, which has exactly the run's bytes.
    fn read(&self, pages: &[PageId], run: KvRun, out: &mut [u8]) -> Result<(), KvError>;
    /// Copies `data` (exactly the run's bytes) into the sequence's pages.
    fn write(&self, pages: &[PageId], run: KvRun, data: &[u8]) -> Result<(), KvError>;
}
