//! The executor: one step is checks, batch buffers, ops, results.

use std::sync::Arc;

use super::batch::HostBatch;
use super::forward::{Bounds, Bucket, Llama, Workspace};
use crate::backend::{Backend, Context, NONE_ALLOWED, NOT_FINITE};
use crate::exec::{Executor, KvStore, ModelSpec, Sampled, StepError, StepSeq};
use crate::sample::logprob::{self, LOGPROB_WORDS};

/// A llama model on a backend.
pub(super) struct Runner<B> {
    pub(super) backend: B,
    context: Context,
    spec: ModelSpec,
    model: Llama,
    pub(super) workspace: Workspace,
    pub(super) bounds: Bounds,
    kv: Arc<dyn KvStore>,
    batch: HostBatch,
    results: Vec<u32>,
    logprobs: Vec<u32>,
}

impl<B: Backend> Runner<B> {
    /// Everything is made; steps only use it.
    pub(super) fn new(
        backend: B,
        context: Context,
        spec: ModelSpec,
        model: Llama,
        workspace: Workspace,
        bounds: Bounds,
        kv: Arc<dyn KvStore>,
    ) -> Self {
        Self {
            backend,
            context,
            spec,
            model,
            workspace,
            bounds,
            kv,
            batch: HostBatch::default(),
            results: Vec::new(),
            logprobs: Vec::new(),
        }
    }

    /// Computes one sequence's part as a step does, and puts the logits of all its tokens into `out`: a row a token, each padded to 8.
    pub(super) fn logits(&mut self, seq: &StepSeq<'_>, out: &mut Vec<f32>) -> Result<(), StepError> {
        self.batch.fill_scored(seq, &self.spec, self.bounds)?;
        self.enqueue();
        self.backend.finish(&mut |_| {});
        let words = self.batch.outs() * (self.spec.vocab_size as usize).next_multiple_of(8);
        self.results.resize(words, 0);
        self.backend.read(self.workspace.logits, &mut self.results);
        out.clear();
        out.extend(self.results.iter().map(|bits| f32::from_bits(*bits)));
        Ok(())
    }

    /// Writes the batch and puts its forward pass onto the stream.
    fn enqueue(&mut self) {
        self.batch.write(&mut self.backend, &self.workspace);
        let bucket = Bucket::of(self.batch.rows(), self.batch.outs(), self.bounds);
        self.model
            .enqueue(&mut self.backend, &self.context, &self.workspace, bucket);
    }
}

impl<B: Backend> Executor for Runner<B> {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn step(&mut self, batch: &[StepSeq<'_>], on_layer: &mut dyn FnMut(u32)) -> Result<Vec<Sampled>, StepError> {
        self.batch.fill(batch, &self.spec, self.bounds)?;
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        self.enqueue();
        self.backend.finish(on_layer);
        self.results.resize(self.batch.outs(), 0);
        if !self.results.is_empty() {
            self.backend.read(self.workspace.batch.sampled, &mut self.results);
        }
        if self.batch.wants_logprobs() {
            self.logprobs.resize(self.batch.outs() * LOGPROB_WORDS, 0);
            self.backend.read(self.workspace.batch.logprobs, &mut self.logprobs);
        }
        let mut results = self.results.iter().enumerate();
        let sampled = |seq: &StepSeq<'_>| {
            let Some((sample, (o, &token))) = seq.sample.as_ref().and_then(|s| Some((s, results.next()?))) else {
                return Sampled::None;
            };
            match token {
                NOT_FINITE => Sampled::NotFinite,
                NONE_ALLOWED => Sampled::NoneAllowed,
                token => {
                    let told = |top| logprob::read(&self.logprobs[o * LOGPROB_WORDS..][..LOGPROB_WORDS], top as usize);
                    Sampled::Token(token, sample.logprobs.map(|top| told(top.min(self.spec.vocab_size))))
                }
            }
        };
        Ok(batch.iter().map(sampled).collect())
    }

    fn kv(&self) -> Arc<dyn KvStore> {
        Arc::clone(&self.kv)
    }
}
