//! The executor: one step is checks, batch buffers, ops, results.

use std::sync::Arc;

use super::batch::HostBatch;
use super::ranks::{Peers, Rank};
use crate::backend::{Backend, NONE_ALLOWED, NOT_FINITE};
use crate::exec::{Executor, KvStore, ModelSpec, Sampled, StepError, StepSeq};
use crate::sample::logprob::{self, LOGPROB_WORDS};

/// A llama model on a backend, or on one for each of its ranks.
pub(super) struct Runner<B> {
    pub(super) rank: Rank<B>,
    peers: Peers,
    spec: ModelSpec,
    kv: Arc<dyn KvStore>,
    batch: Arc<HostBatch>,
    results: Vec<u32>,
    logprobs: Vec<u32>,
}

impl<B: Backend> Runner<B> {
    /// Everything is made; steps only use it.
    pub(super) fn new(rank: Rank<B>, peers: Peers, spec: ModelSpec, kv: Arc<dyn KvStore>) -> Self {
        Self {
            rank,
            peers,
            spec,
            kv,
            batch: Arc::default(),
            results: Vec::new(),
            logprobs: Vec::new(),
        }
    }

    /// Computes one sequence's part as a step does, and puts the logits of all its tokens into `out`: a row a token, each padded to 8.
    pub(super) fn logits(&mut self, seq: &StepSeq<'_>, out: &mut Vec<f32>) -> Result<(), StepError> {
        Arc::make_mut(&mut self.batch).fill_scored(seq, &self.spec, self.rank.bounds)?;
        self.pass(&mut |_| {});
        let words = self.batch.outs() * (self.spec.vocab_size as usize).next_multiple_of(8);
        self.results.resize(words, 0);
        self.rank.backend.read(self.rank.workspace.logits, &mut self.results);
        out.clear();
        out.extend(self.results.iter().map(|bits| f32::from_bits(*bits)));
        Ok(())
    }

    /// All ranks compute the batch.
    fn pass(&mut self, on_layer: &mut dyn FnMut(u32)) {
        self.peers.begin(&self.batch);
        self.rank.pass(&self.batch, on_layer);
        self.peers.end();
    }
}

impl<B: Backend> Executor for Runner<B> {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn step(&mut self, batch: &[StepSeq<'_>], on_layer: &mut dyn FnMut(u32)) -> Result<Vec<Sampled>, StepError> {
        Arc::make_mut(&mut self.batch).fill(batch, &self.spec, self.rank.bounds)?;
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        self.pass(on_layer);
        self.results.resize(self.batch.outs(), 0);
        if !self.results.is_empty() {
            let sampled = self.rank.workspace.batch.sampled;
            self.rank.backend.read(sampled, &mut self.results);
        }
        if self.batch.wants_logprobs() {
            self.logprobs.resize(self.batch.outs() * LOGPROB_WORDS, 0);
            let logprobs = self.rank.workspace.batch.logprobs;
            self.rank.backend.read(logprobs, &mut self.logprobs);
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
