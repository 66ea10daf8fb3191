//! A step's sequences, checked, as the content of the batch buffers.

use super::forward::{Bounds, Workspace};
use crate::backend::Backend;
use crate::exec::{ModelSpec, SampleParams, StepError, StepSeq};

/// Where nobody asks for the token.
const GREEDY: SampleParams = SampleParams {
    temperature: 0.0,
    top_p: 1.0,
    seed: 0,
};

/// Host side of the batch buffers; reused from step to step.
#[derive(Default)]
pub(super) struct HostBatch {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    seqs: Vec<u32>,
    pages: Vec<u32>,
    out_rows: Vec<u32>,
    sampling: Vec<u32>,
    longest: u32,
}

impl HostBatch {
    /// Tokens of the step.
    pub(super) fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Sequences that sample.
    pub(super) fn outs(&self) -> usize {
        self.out_rows.len()
    }

    /// Takes a step's sequences; everything that an op will follow blindly is checked here.
    pub(super) fn fill(&mut self, batch: &[StepSeq<'_>], spec: &ModelSpec, bounds: Bounds) -> Result<(), StepError> {
        let total: usize = batch.iter().map(|s| s.tokens.len()).sum();
        if total > bounds.rows || batch.len() > bounds.seqs {
            return Err(StepError::TooLarge {
                tokens: total,
                seqs: batch.len(),
                max_tokens: bounds.rows,
                max_seqs: bounds.seqs,
            });
        }
        self.clear();
        for (i, seq) in batch.iter().enumerate() {
            self.push(seq, spec)
                .map_err(|why| StepError::Invalid(format!("sequence {i}: {why}")))?;
        }
        Ok(())
    }

    /// Takes one sequence, every token of which is followed by a row of logits.
    pub(super) fn fill_scored(&mut self, seq: &StepSeq<'_>, spec: &ModelSpec, bounds: Bounds) -> Result<(), StepError> {
        let most = bounds.seqs.min(bounds.rows);
        if seq.tokens.len() > most {
            return Err(StepError::Invalid(format!(
                "{} tokens are to be scored in one step, {most} fit; raise max_step_seqs and max_step_tokens or lower the chunk",
                seq.tokens.len()
            )));
        }
        self.fill(&[StepSeq { sample: None, ..*seq }], spec, bounds)?;
        for row in 0..seq.tokens.len() as u32 {
            self.push_out(row, &GREEDY, seq.first_position + row + 1);
        }
        Ok(())
    }

    fn clear(&mut self) {
        for v in [
            &mut self.tokens,
            &mut self.positions,
            &mut self.slots,
            &mut self.seqs,
            &mut self.pages,
            &mut self.out_rows,
            &mut self.sampling,
        ] {
            v.clear();
        }
        self.longest = 0;
    }

    fn push(&mut self, seq: &StepSeq<'_>, spec: &ModelSpec) -> Result<(), String> {
        let rows = seq.tokens.len() as u32;
        let end = u64::from(seq.first_position) + u64::from(rows);
        if rows == 0 {
            return Err("it has no tokens; at least one is computed".to_owned());
        }
        if end > u64::from(spec.max_length_tokens) {
            return Err(format!(
                "it would end at {end}, the longest sequence is {}",
                spec.max_length_tokens
            ));
        }
        if let Some(t) = seq.tokens.iter().find(|t| **t >= spec.vocab_size) {
            return Err(format!(
                "token {t} is not among the {} of the vocabulary",
                spec.vocab_size
            ));
        }
        let needed = (end as u32).div_ceil(spec.page_tokens) as usize;
        let Some(pages) = seq.pages.get(..needed) else {
            return Err(format!(
                "{end} tokens need {needed} pages, {} are given",
                seq.pages.len()
            ));
        };
        if let Some(p) = pages.iter().find(|p| **p >= spec.total_pages) {
            return Err(format!("page {p} is not among the pool's {}", spec.total_pages));
        }
        let first_row = self.tokens.len() as u32;
        self.seqs
            .extend([first_row, rows, seq.first_position, self.pages.len() as u32]);
        self.pages.extend_from_slice(pages);
        self.tokens.extend_from_slice(seq.tokens);
        for position in seq.first_position..seq.first_position + rows {
            self.positions.push(position);
            self.slots
                .push(pages[(position / spec.page_tokens) as usize] * spec.page_tokens + position % spec.page_tokens);
        }
        self.longest = self.longest.max(rows);
        if let Some(p) = seq.sample {
            check_sampling(&p)?;
            self.push_out(first_row + rows - 1, &p, seq.first_position + rows);
        }
        Ok(())
    }

    /// The token at `position`, which follows `row`, is to be sampled.
    fn push_out(&mut self, row: u32, p: &SampleParams, position: u32) {
        self.out_rows.push(row);
        self.sampling.extend([
            p.temperature.to_bits(),
            p.top_p.to_bits(),
            p.seed as u32,
            (p.seed >> 32) as u32,
            position,
            0,
        ]);
    }

    /// Writes the batch buffers.
    pub(super) fn write(&self, backend: &mut impl Backend, ws: &Workspace) {
        let (b, rows, outs) = (ws.batch, self.tokens.len() as u32, self.out_rows.len() as u32);
        let seqs = (self.seqs.len() / crate::backend::SEQ_WORDS) as u32;
        backend.write(b.counts, &[rows, seqs, outs, self.longest]);
        backend.write(b.tokens, &self.tokens);
        backend.write(b.positions, &self.positions);
        backend.write(b.slots, &self.slots);
        backend.write(b.seqs, &self.seqs);
        backend.write(b.pages, &self.pages);
        backend.write(b.out_rows, &self.out_rows);
        backend.write(b.sampling, &self.sampling);
    }
}

fn check_sampling(p: &SampleParams) -> Result<(), String> {
    if !(p.temperature.is_finite() && p.temperature >= 0.0) {
        return Err(format!(
            "temperature is {}, zero or a positive number is expected",
            p.temperature
        ));
    }
    if !(p.top_p > 0.0 && p.top_p <= 1.0) {
        return Err(format!(
            "top_p is {}, a number above 0 and at most 1 is expected",
            p.top_p
        ));
    }
    Ok(())
}
