//! Logits of every position of a text: what numerics are judged by. Serving does not come this way.

use super::LoadError;
use super::load::{LoadOptions, load_cpu};
use super::runner::Runner;
use crate::backend::cpu::Cpu;
use crate::exec::{Executor, ModelSpec, PageId, StepError, StepSeq};

/// A loaded model that tells logits instead of tokens.
pub struct Scorer {
    runner: Runner<Cpu>,
    pages: Vec<PageId>,
}

impl Scorer {
    /// Loads a model onto the CPU. A text of `n` tokens needs `n` tokens of KV cache, and a step tells the logits of at most
    /// `max_step_seqs` tokens.
    ///
    /// # Errors
    /// As [`load`](super::load).
    pub fn load(options: &LoadOptions) -> Result<Self, LoadError> {
        let runner = load_cpu(options, &mut |_| {})?;
        let pages = (0..runner.spec().total_pages).collect();
        Ok(Self { runner, pages })
    }

    /// What is fixed about the model.
    pub fn spec(&self) -> &ModelSpec {
        self.runner.spec()
    }

    /// Feeds `tokens` from position 0 on, `chunk` of them a step, and calls `each` with the position and the raw logits
    /// (`vocab_size` of them) of what follows that position. Chunks of 1 take the way of decoding, longer ones that of a prefill.
    ///
    /// # Errors
    /// The text or a chunk is longer than the model was set up for, or a token is not in the vocabulary.
    pub fn score(
        &mut self,
        tokens: &[u32],
        chunk: usize,
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), StepError> {
        let mut logits = Vec::new();
        for (i, part) in tokens.chunks(chunk.max(1)).enumerate() {
            let first = i * chunk.max(1);
            let seq = StepSeq {
                tokens: part,
                first_position: first as u32,
                pages: &self.pages,
                sample: None,
            };
            self.runner.logits(&seq, &mut logits)?;
            for (j, row) in logits.chunks_exact(logits.len() / part.len()).enumerate() {
                each(first + j, &row[..self.runner.spec().vocab_size as usize]);
            }
        }
        Ok(())
    }
}
