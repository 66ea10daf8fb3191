//! A step's sequences, checked, as the content of the batch buffers.

use super::forward::{Bounds, Workspace};
use crate::backend::Backend;
use crate::exec::{MAX_BIASES, MAX_LOGPROBS, ModelSpec, Sample, SampleParams, StepError, StepSeq, mask_words};
use crate::sample::words::{Row, SAMPLING_WORDS};

/// Host side of the batch buffers; reused from step to step.
#[derive(Clone, Default)]
pub(super) struct HostBatch {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    slots: Vec<u32>,
    seqs: Vec<u32>,
    pages: Vec<u32>,
    out_rows: Vec<u32>,
    sampling: Vec<[u32; SAMPLING_WORDS]>,
    adjust: Vec<[u32; 2]>,
    masks: Vec<u32>,
    /// A sequence asks for log-probabilities.
    logprobs: bool,
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

    /// Does any sequence ask for log-probabilities?
    pub(super) fn wants_logprobs(&self) -> bool {
        self.logprobs
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
            self.push(seq, spec, bounds)
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
            // nobody asks for the token
            self.push_out(row, &SampleParams::GREEDY.into(), seq.first_position + row + 1, spec);
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
            &mut self.masks,
        ] {
            v.clear();
        }
        self.sampling.clear();
        self.adjust.clear();
        self.logprobs = false;
        self.longest = 0;
    }

    fn push(&mut self, seq: &StepSeq<'_>, spec: &ModelSpec, bounds: Bounds) -> Result<(), String> {
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
        if let Some(sample) = &seq.sample {
            check_sampling(&sample.params)?;
            check_adjust(sample, spec, bounds)?;
            self.push_out(first_row + rows - 1, sample, seq.first_position + rows, spec);
        }
        Ok(())
    }

    /// The token at `position`, which follows `row`, is to be sampled.
    fn push_out(&mut self, row: u32, sample: &Sample<'_>, position: u32, spec: &ModelSpec) {
        self.out_rows.push(row);
        let adjust = &sample.adjust;
        let row = Row {
            params: sample.params,
            position,
            first: self.adjust.len() as u32,
            biases: adjust.biases.len() as u32,
            seen: adjust.seen.len() as u32,
            mask: adjust
                .mask
                .map(|_| (self.masks.len() / mask_words(spec.vocab_size as usize)) as u32),
            logprobs: sample.logprobs,
        };
        self.sampling.push(row.write());
        self.adjust.extend_from_slice(adjust.biases);
        self.adjust.extend_from_slice(adjust.seen);
        self.masks.extend_from_slice(adjust.mask.unwrap_or_default());
        self.logprobs |= sample.logprobs.is_some();
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
        backend.write(b.sampling, self.sampling.as_flattened());
        // most steps have none
        if !self.adjust.is_empty() {
            backend.write(b.adjust, self.adjust.as_flattened());
        }
        if !self.masks.is_empty() {
            backend.write(b.masks, &self.masks);
        }
    }
}

fn check_sampling(p: &SampleParams) -> Result<(), String> {
    let named = [
        (
            "temperature",
            p.temperature,
            p.temperature >= 0.0,
            "zero or a positive number",
        ),
        (
            "top_p",
            p.top_p,
            p.top_p > 0.0 && p.top_p <= 1.0,
            "a number above 0 and at most 1",
        ),
        ("min_p", p.min_p, (0.0..=1.0).contains(&p.min_p), "a number from 0 to 1"),
        (
            "repetition_penalty",
            p.repetition_penalty,
            p.repetition_penalty > 0.0,
            "a positive number",
        ),
        ("presence_penalty", p.presence_penalty, true, "a number"),
        ("frequency_penalty", p.frequency_penalty, true, "a number"),
    ];
    match named.iter().find(|(_, value, good, _)| !(*good && value.is_finite())) {
        None => Ok(()),
        Some((name, value, _, expected)) => Err(format!("{name} is {value}, {expected} is expected")),
    }
}

fn check_adjust(sample: &Sample<'_>, spec: &ModelSpec, bounds: Bounds) -> Result<(), String> {
    let (adjust, vocab) = (&sample.adjust, spec.vocab_size);
    let most = bounds.seq_adjust - MAX_BIASES;
    if adjust.biases.len() > MAX_BIASES || adjust.seen.len() > most {
        return Err(format!(
            "it has {} biased and {} seen tokens, allowed are {MAX_BIASES} and {most}",
            adjust.biases.len(),
            adjust.seen.len()
        ));
    }
    if let Some([t, _]) = adjust.biases.iter().chain(adjust.seen).find(|[t, _]| *t >= vocab) {
        return Err(format!("adjusted token {t} is not among the {vocab} of the vocabulary"));
    }
    if let Some([t, b]) = adjust.biases.iter().find(|[_, b]| !f32::from_bits(*b).is_finite()) {
        return Err(format!(
            "the bias of token {t} is {}, a number is expected",
            f32::from_bits(*b)
        ));
    }
    let words = mask_words(vocab as usize);
    if let Some(mask) = adjust.mask.filter(|m| m.len() != words) {
        return Err(format!(
            "its mask has {} words, {vocab} tokens need {words}",
            mask.len()
        ));
    }
    if let Some(n) = sample.logprobs.filter(|n| *n as usize > MAX_LOGPROBS) {
        return Err(format!(
            "{n} log-probabilities are asked for, at most {MAX_LOGPROBS} are told"
        ));
    }
    Ok(())
}
