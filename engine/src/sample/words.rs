//! A sampled row's parameters as words of the batch buffers: written by the host, read by the device.

use crate::exec::{Adjust, SampleParams};

/// Words of one sampled row.
pub const SAMPLING_WORDS: usize = 15;

/// What the device needs beside the logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// How the token is chosen.
    pub params: SampleParams,
    /// Of the token that is chosen.
    pub position: u32,
    /// First entry of the row's adjustments.
    pub first: u32,
    /// Entries that are biases, from there on.
    pub biases: u32,
    /// Entries that are seen tokens, after the biases.
    pub seen: u32,
    /// Which of the masks is the row's.
    pub mask: Option<u32>,
    /// How many log-probabilities beside the token's own.
    pub logprobs: Option<u32>,
}

/// `None` is 0, `Some(n)` is n + 1.
fn pack(n: Option<u32>) -> u32 {
    n.map_or(0, |n| n + 1)
}

fn unpack(word: u32) -> Option<u32> {
    word.checked_sub(1)
}

impl Row {
    /// As words.
    pub fn write(&self) -> [u32; SAMPLING_WORDS] {
        let p = &self.params;
        [
            p.temperature.to_bits(),
            p.top_k,
            p.top_p.to_bits(),
            p.min_p.to_bits(),
            p.repetition_penalty.to_bits(),
            p.presence_penalty.to_bits(),
            p.frequency_penalty.to_bits(),
            p.seed as u32,
            (p.seed >> 32) as u32,
            self.position,
            self.first,
            self.biases,
            self.seen,
            pack(self.mask),
            pack(self.logprobs),
        ]
    }

    /// Reads what [`Row::write`] wrote.
    pub fn read(w: &[u32; SAMPLING_WORDS]) -> Self {
        Self {
            params: SampleParams {
                temperature: f32::from_bits(w[0]),
                top_k: w[1],
                top_p: f32::from_bits(w[2]),
                min_p: f32::from_bits(w[3]),
                repetition_penalty: f32::from_bits(w[4]),
                presence_penalty: f32::from_bits(w[5]),
                frequency_penalty: f32::from_bits(w[6]),
                seed: u64::from(w[7]) | u64::from(w[8]) << 32,
            },
            position: w[9],
            first: w[10],
            biases: w[11],
            seen: w[12],
            mask: unpack(w[13]),
            logprobs: unpack(w[14]),
        }
    }

    /// The row's adjustments out of those of all rows, and its mask out of all masks of `mask_words` words.
    pub fn adjust<'a>(&self, entries: &'a [[u32; 2]], masks: &'a [u32], mask_words: usize) -> Adjust<'a> {
        let (biases, seen) = entries[self.first as usize..].split_at(self.biases as usize);
        Adjust {
            biases,
            seen: &seen[..self.seen as usize],
            mask: self.mask.map(|m| &masks[m as usize * mask_words..][..mask_words]),
        }
    }
}
