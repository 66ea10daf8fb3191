//! What one sequence brings to each choice of a token: its biases, the tokens that it holds, what it may not choose.

use std::collections::HashMap;
use std::sync::Arc;

use super::sampling::Sampling;
use super::seq::Stops;
use crate::exec::{Adjust, ModelSpec, Sample, mask_words};
use crate::sample::grammar::{Grammar, GrammarState};

/// The state of one sequence's sampling. A plain one holds nothing and costs nothing.
#[derive(Debug)]
pub(super) struct Chooser {
    sampling: Sampling,
    /// `[token, times in the answer]`, in order of appearance; kept from token to token.
    seen: Vec<[u32; 2]>,
    /// Where a token stands in `seen`.
    places: HashMap<u32, usize>,
    /// Every token but those that end the answer; empty where none is forbidden.
    no_end: Vec<u32>,
    /// Tokens of the answer.
    accepted: u32,
    grammar: Option<Held>,
}

/// A grammar, and what it allows next.
#[derive(Debug)]
struct Held {
    state: GrammarState,
    ends: Vec<u32>,
    vocab_size: u32,
    mask: Vec<u32>,
}

impl Chooser {
    /// At the end of `prompt`, before the answer's first token.
    ///
    /// # Errors
    /// The grammar is too complex to begin with.
    pub(super) fn new(sampling: Sampling, prompt: &[u32], stops: &Stops, spec: &ModelSpec) -> Result<Self, String> {
        let held = |grammar: &Arc<Grammar>| Held {
            state: grammar.start(),
            ends: stops.ending(&spec.end_tokens).collect(),
            vocab_size: spec.vocab_size,
            mask: Vec::new(),
        };
        let mut chooser = Self {
            grammar: sampling.grammar.as_ref().map(held),
            seen: Vec::new(),
            places: HashMap::new(),
            no_end: Vec::new(),
            accepted: 0,
            sampling,
        };
        if chooser.repeats() {
            for &token in prompt {
                chooser.see(token, 0);
            }
        }
        if chooser.sampling.min_new_tokens > 0 {
            chooser.no_end = vec![u32::MAX; mask_words(spec.vocab_size as usize)];
            for token in stops.ending(&spec.end_tokens) {
                // a stop token may be none of the vocabulary
                if let Some(word) = chooser.no_end.get_mut(token as usize / 32) {
                    *word &= !(1 << (token % 32));
                }
            }
        }
        chooser.look_ahead()?;
        Ok(chooser)
    }

    /// Makes ready what the grammar allows next. Done where nobody waits for it: a mask takes up to a few milliseconds.
    ///
    /// # Errors
    /// The grammar is too complex to go on here.
    pub(super) fn look_ahead(&mut self) -> Result<(), String> {
        let early = self.early();
        let Some(held) = &mut self.grammar else { return Ok(()) };
        held.state.allowed(&held.ends, held.vocab_size, &mut held.mask)?;
        if early {
            held.mask
                .iter_mut()
                .zip(&self.no_end)
                .for_each(|(mask, no_end)| *mask &= no_end);
        }
        Ok(())
    }

    /// Too early to end.
    fn early(&self) -> bool {
        self.accepted < self.sampling.min_new_tokens
    }

    /// Do the prompt's tokens count?
    fn repeats(&self) -> bool {
        self.sampling.params.repetition_penalty.to_bits() != 1f32.to_bits()
    }

    fn penalises(&self) -> bool {
        let p = &self.sampling.params;
        self.repeats() || p.presence_penalty != 0.0 || p.frequency_penalty != 0.0
    }

    fn see(&mut self, token: u32, times: u32) {
        let place = *self.places.entry(token).or_insert(self.seen.len());
        match self.seen.get_mut(place) {
            Some(entry) => entry[1] += times,
            None => self.seen.push([token, times]),
        }
    }

    /// How the next token is chosen.
    pub(super) fn sample(&self) -> Sample<'_> {
        let mask = match &self.grammar {
            Some(held) => Some(&held.mask[..]),
            None => self.early().then_some(&self.no_end[..]),
        };
        Sample {
            params: self.sampling.params,
            adjust: Adjust {
                biases: &self.sampling.logit_bias,
                seen: &self.seen,
                mask,
            },
            logprobs: self.sampling.logprobs,
        }
    }

    /// The answer has one token more, which does not end it. Before the next one is chosen it must
    /// [look ahead](Self::look_ahead).
    ///
    /// # Errors
    /// The grammar does not allow it.
    pub(super) fn accept(&mut self, token: u32) -> Result<(), String> {
        if let Some(held) = &mut self.grammar {
            held.state.accept(token)?;
        }
        self.accepted += 1;
        if self.penalises() {
            self.see(token, 1);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tandem_wire::KvLayout;
    use tandem_wire::layout::KvDtype;

    use super::*;
    use crate::exec::SampleParams;

    fn spec() -> ModelSpec {
        ModelSpec {
            name: "test".to_owned(),
            hash: [0; 32],
            layout: KvLayout::heads(1, 1, 8, KvDtype::F16, 8),
            max_length_tokens: 64,
            vocab_size: 70,
            end_tokens: vec![2, 69],
            vocabulary: Err("none".to_owned()),
            backend: "test",
            total_pages: 8,
            page_tokens: 8,
            max_step_tokens: 64,
            max_step_seqs: 8,
        }
    }

    fn stops(ignore_eos: bool) -> Stops {
        Stops {
            stop_token_ids: vec![33, 4_000],
            ignore_eos,
            max_new_tokens: 10,
        }
    }

    fn chooser(sampling: Sampling) -> Chooser {
        Chooser::new(sampling, &[5, 9, 5, 5], &stops(false), &spec()).unwrap()
    }

    #[test]
    fn a_plain_sequence_brings_nothing() {
        let mut chooser = chooser(SampleParams::GREEDY.into());
        for token in [5, 6, 5] {
            chooser.accept(token).unwrap();
        }
        assert_eq!(chooser.sample(), SampleParams::GREEDY.into());
    }

    #[test]
    fn the_prompt_counts_for_repetition_and_for_nothing_else() {
        let mut presence = chooser(
            SampleParams {
                presence_penalty: 0.5,
                ..SampleParams::GREEDY
            }
            .into(),
        );
        let mut repetition = chooser(
            SampleParams {
                repetition_penalty: 1.1,
                ..SampleParams::GREEDY
            }
            .into(),
        );
        assert_eq!(presence.sample().adjust.seen, [[0; 2]; 0]);
        assert_eq!(repetition.sample().adjust.seen, [[5, 0], [9, 0]]);
        for token in [7, 9, 7, 7] {
            presence.accept(token).unwrap();
            repetition.accept(token).unwrap();
        }
        assert_eq!(presence.sample().adjust.seen, [[7, 3], [9, 1]]);
        assert_eq!(repetition.sample().adjust.seen, [[5, 0], [9, 1], [7, 3]]);
    }

    #[test]
    fn nothing_that_ends_the_answer_is_chosen_too_early() {
        let asked = Sampling {
            min_new_tokens: 2,
            ..SampleParams::GREEDY.into()
        };
        for (ignore_eos, forbidden) in [(false, vec![2, 33, 69]), (true, vec![33])] {
            let mut chooser = Chooser::new(asked.clone(), &[1], &stops(ignore_eos), &spec()).unwrap();
            for _ in 0..2 {
                let mask = chooser.sample().adjust.mask.unwrap().to_vec();
                let off: Vec<u32> = (0..70)
                    .filter(|t| mask[t / 32] >> (t % 32) & 1 == 0)
                    .map(|t| t as u32)
                    .collect();
                assert_eq!(off, forbidden, "ignore_eos {ignore_eos}");
                chooser.accept(7).unwrap();
            }
            assert_eq!(chooser.sample().adjust.mask, None);
        }
    }
}
