//! What scheduling asks of a model: one step over a ragged batch, and the KV pages' bytes in the wire's order.
//!
//! The scheduler knows nothing of ops, weights or devices; a model knows nothing of requests. Both meet here.

use std::sync::Arc;

use tandem_wire::KvLayout;

use crate::sample::grammar::Vocabulary;

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
    /// The tokens' bytes for grammars, or why there are none.
    pub vocabulary: Result<Arc<Vocabulary>, String>,
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

/// How a token is chosen from a row of logits, in this order: what [`Adjust`] says, temperature, `top_k`, `top_p`, `min_p`, a
/// draw. The random number is a function of (seed, position) alone.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleParams {
    /// 0: greedy (ties: the lowest id).
    pub temperature: f32,
    /// Only the so many likeliest tokens; 0: all.
    pub top_k: u32,
    /// Nucleus mass in (0, 1], of what `top_k` left.
    pub top_p: f32,
    /// In [0, 1]: only tokens at least this share as likely as the likeliest.
    pub min_p: f32,
    /// Above 0: divides the positive and multiplies the negative logits of every token in [`Adjust::seen`].
    pub repetition_penalty: f32,
    /// Taken off the logit of every token that the answer holds.
    pub presence_penalty: f32,
    /// Taken off once for each time that the answer holds the token.
    pub frequency_penalty: f32,
    /// Key of the counter RNG.
    pub seed: u64,
}

impl SampleParams {
    /// The likeliest token, nothing adjusted.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        seed: 0,
    };
}

/// The most biased tokens of one sequence.
pub const MAX_BIASES: usize = 1024;

/// The most likeliest tokens whose log-probabilities are told.
pub const MAX_LOGPROBS: usize = 20;

/// Words of a mask over `vocab_size` tokens.
pub const fn mask_words(vocab_size: usize) -> usize {
    vocab_size.div_ceil(32)
}

/// Changes to single tokens' logits before a token is chosen, in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Adjust<'a> {
    /// `[token, what is added as f32 bits]`, each token once, at most [`MAX_BIASES`].
    pub biases: &'a [[u32; 2]],
    /// `[token, times in the answer]`, each token once: what the penalties are about.
    pub seen: &'a [[u32; 2]],
    /// A bit for each token that may be chosen, [`mask_words`] long; `None`: all.
    pub mask: Option<&'a [u32]>,
}

/// How the token after a sequence's last one is chosen, and what is told of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample<'a> {
    /// How.
    pub params: SampleParams,
    /// Changes to single tokens.
    pub adjust: Adjust<'a>,
    /// Tell the token's log-probability, and so many of the likeliest, at most [`MAX_LOGPROBS`].
    pub logprobs: Option<u32>,
}

impl From<SampleParams> for Sample<'_> {
    fn from(params: SampleParams) -> Self {
        Self {
            params,
            adjust: Adjust::default(),
            logprobs: None,
        }
    }
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
    pub sample: Option<Sample<'a>>,
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

/// A token's log-probability: log softmax of the row as the model gave it, before anything was adjusted.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprob {
    /// Of the token.
    pub logprob: f32,
    /// The likeliest tokens and theirs, the likeliest first, ties by the lower id.
    pub top: Vec<(u32, f32)>,
}

/// What became of one sequence's sampling.
#[derive(Debug, Clone, PartialEq)]
pub enum Sampled {
    /// A chunk without sampling.
    None,
    /// The token chosen, and its log-probability where it was asked for.
    Token(u32, Option<Logprob>),
    /// The logits held NaN or infinity: the request must fail, its neighbours need not.
    NotFinite,
    /// The mask allows no token: the request must fail, its neighbours need not.
    NoneAllowed,
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
