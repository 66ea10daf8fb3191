//! Sampling as it comes off the wire. One value out of range would fail a whole step, and with it every sequence of the step,
//! so it is read here and refused before anything is taken for its request.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

use tandem_wire::proto;

use crate::exec::{Logprob, MAX_BIASES, MAX_LOGPROBS, SampleParams};
use crate::sample::grammar::Grammar;

/// Above it every token is as likely as any other.
const MAX_TEMPERATURE: f32 = 100.0;
/// Beyond it a repeated token is as good as forbidden, or as good as certain.
const MAX_REPETITION_PENALTY: f32 = 100.0;
/// Of presence and frequency; logits are seldom further apart.
const MAX_PENALTY: f32 = 100.0;

/// How a request's tokens are chosen, every field checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// What is the same for every token.
    pub params: SampleParams,
    /// `[token, what is added to its logit as f32 bits]`.
    pub logit_bias: Vec<[u32; 2]>,
    /// Tell each token's log-probability, and so many of the likeliest.
    pub logprobs: Option<u32>,
    /// No token ends the answer before so many.
    pub min_new_tokens: u32,
    /// What the answer must match; [`compile_grammar`](super::compile_grammar) reads it.
    pub grammar: Option<Arc<Grammar>>,
}

impl From<SampleParams> for Sampling {
    fn from(params: SampleParams) -> Self {
        Self {
            params,
            logit_bias: Vec::new(),
            logprobs: None,
            min_new_tokens: 0,
            grammar: None,
        }
    }
}

/// Reads sampling, all but its grammar; unset is greedy, and a `top_p` or `repetition_penalty` of 0 is unset, which means 1.
///
/// # Errors
/// Names the field, its value and what is allowed.
pub fn read_sampling(
    sampling: Option<&proto::Sampling>,
    vocab_size: u32,
    max_new_tokens: u32,
) -> Result<Sampling, String> {
    let unset = proto::Sampling::default();
    let s = sampling.unwrap_or(&unset);
    let within = |name: &str, value: f32, allowed: RangeInclusive<f32>| {
        // a range contains no NaN
        if allowed.contains(&value) {
            return Ok(());
        }
        let (least, most) = allowed.into_inner();
        Err(format!("sampling.{name} is {value}, allowed is {least} to {most}"))
    };
    within("temperature", s.temperature, 0.0..=MAX_TEMPERATURE)?;
    within("top_p", s.top_p, 0.0..=1.0)?;
    within("min_p", s.min_p, 0.0..=1.0)?;
    within("repetition_penalty", s.repetition_penalty, 0.0..=MAX_REPETITION_PENALTY)?;
    within("presence_penalty", s.presence_penalty, -MAX_PENALTY..=MAX_PENALTY)?;
    within("frequency_penalty", s.frequency_penalty, -MAX_PENALTY..=MAX_PENALTY)?;
    if let Some(n) = s.logprobs.filter(|n| *n as usize > MAX_LOGPROBS) {
        return Err(format!("sampling.logprobs is {n}, allowed is 0 to {MAX_LOGPROBS}"));
    }
    if s.min_new_tokens > max_new_tokens {
        return Err(format!(
            "sampling.min_new_tokens is {}, max_new_tokens allows {max_new_tokens}",
            s.min_new_tokens
        ));
    }
    let or_one = |value: f32| if value == 0.0 { 1.0 } else { value };
    Ok(Sampling {
        params: SampleParams {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: or_one(s.top_p),
            min_p: s.min_p,
            repetition_penalty: or_one(s.repetition_penalty),
            presence_penalty: s.presence_penalty,
            frequency_penalty: s.frequency_penalty,
            seed: s.seed,
        },
        logit_bias: read_bias(&s.logit_bias, vocab_size)?,
        logprobs: s.logprobs,
        min_new_tokens: s.min_new_tokens,
        grammar: None,
    })
}

fn read_bias(biases: &[proto::LogitBias], vocab_size: u32) -> Result<Vec<[u32; 2]>, String> {
    if biases.len() > MAX_BIASES {
        return Err(format!(
            "sampling.logit_bias has {} entries, allowed are {MAX_BIASES}",
            biases.len()
        ));
    }
    let mut tokens = HashSet::with_capacity(biases.len());
    let read = |(i, &proto::LogitBias { token, bias }): (usize, &proto::LogitBias)| {
        if token >= vocab_size {
            return Err(format!(
                "sampling.logit_bias[{i}] names token {token}, the vocabulary has {vocab_size}"
            ));
        }
        if !bias.is_finite() {
            return Err(format!("sampling.logit_bias[{i}] is {bias}, a number is needed"));
        }
        if !tokens.insert(token) {
            return Err(format!("sampling.logit_bias[{i}] names token {token} a second time"));
        }
        Ok([token, bias.to_bits()])
    };
    biases.iter().enumerate().map(read).collect()
}

impl Logprob {
    /// The message form.
    pub fn to_wire(&self) -> proto::Logprob {
        let (top_ids, top_logprobs) = self.top.iter().copied().unzip();
        proto::Logprob {
            logprob: self.logprob,
            top_ids,
            top_logprobs,
        }
    }

    /// From the message form, where `top` of the likeliest were asked for.
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub fn from_wire(wire: &proto::Logprob, top: u32, vocab_size: u32) -> Result<Self, String> {
        let (ids, values) = (&wire.top_ids, &wire.top_logprobs);
        let asked = top.min(vocab_size) as usize;
        if ids.len() != asked || values.len() != asked {
            return Err(format!(
                "{} tokens and {} values came, {asked} were asked for",
                ids.len(),
                values.len()
            ));
        }
        if let Some(id) = ids.iter().find(|id| **id >= vocab_size) {
            return Err(format!("token {id} is not among the {vocab_size} of the vocabulary"));
        }
        if let Some(value) = values.iter().chain([&wire.logprob]).find(|v| !v.is_finite()) {
            return Err(format!("a log-probability is {value}, a number is needed"));
        }
        Ok(Self {
            logprob: wire.logprob,
            top: ids.iter().copied().zip(values.iter().copied()).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VOCAB: u32 = 100;

    type Change = fn(&mut proto::Logprob);

    fn read(change: impl FnOnce(&mut proto::Sampling)) -> Result<Sampling, String> {
        let mut sampling = proto::Sampling {
            seed: 7,
            ..proto::Sampling::default()
        };
        change(&mut sampling);
        read_sampling(Some(&sampling), VOCAB, 16)
    }

    #[test]
    fn what_is_unset_means_all_tokens_as_they_are() {
        for top_p in [0.0, -0.0, 1.0] {
            for penalty in [0.0, -0.0, 1.0] {
                let sampling = read(|s| {
                    s.top_p = top_p;
                    s.repetition_penalty = penalty;
                });
                let plain = SampleParams {
                    seed: 7,
                    ..SampleParams::GREEDY
                };
                assert_eq!(sampling.unwrap(), plain.into());
            }
        }
        assert_eq!(
            read_sampling(None, VOCAB, 1).unwrap(),
            Sampling::from(SampleParams::GREEDY)
        );
    }

    #[test]
    fn every_field_is_read() {
        let sampling = read(|s| {
            s.temperature = 100.0;
            s.top_k = 9;
            s.top_p = 0.5;
            s.min_p = 0.25;
            s.repetition_penalty = 1.5;
            s.presence_penalty = -100.0;
            s.frequency_penalty = 100.0;
            s.logit_bias = vec![proto::LogitBias { token: 99, bias: -1e30 }];
            s.logprobs = Some(20);
            s.min_new_tokens = 16;
        });
        let expected = Sampling {
            params: SampleParams {
                temperature: 100.0,
                top_k: 9,
                top_p: 0.5,
                min_p: 0.25,
                repetition_penalty: 1.5,
                presence_penalty: -100.0,
                frequency_penalty: 100.0,
                seed: 7,
            },
            logit_bias: vec![[99, (-1e30f32).to_bits()]],
            logprobs: Some(20),
            min_new_tokens: 16,
            grammar: None,
        };
        assert_eq!(sampling.unwrap(), expected);
    }

    #[test]
    fn what_would_fail_a_step_is_refused_by_the_fields_name() {
        type Field = fn(&mut proto::Sampling) -> &mut f32;
        let fields: [(&str, Field, f32, f32); 6] = [
            ("temperature", |s| &mut s.temperature, -0.1, 100.5),
            ("top_p", |s| &mut s.top_p, -0.1, 1.1),
            ("min_p", |s| &mut s.min_p, -0.1, 1.1),
            ("repetition_penalty", |s| &mut s.repetition_penalty, -0.1, 100.5),
            ("presence_penalty", |s| &mut s.presence_penalty, -100.5, 100.5),
            ("frequency_penalty", |s| &mut s.frequency_penalty, -100.5, 100.5),
        ];
        for (name, field, low, high) in fields {
            for value in [low, high, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let error = read(|s| *field(s) = value).unwrap_err();
                assert!(error.contains(&format!("sampling.{name} is {value}")), "{error}");
            }
        }
        let bias = |token, bias| proto::LogitBias { token, bias };
        for (biases, named) in [
            (vec![bias(100, 1.0)], "logit_bias[0] names token 100"),
            (vec![bias(1, 1.0), bias(2, f32::NAN)], "logit_bias[1] is NaN"),
            (vec![bias(1, f32::INFINITY)], "logit_bias[0] is inf"),
            (vec![bias(1, 1.0), bias(1, 1.0)], "logit_bias[1] names token 1 a second"),
            (vec![bias(1, 1.0); 1025], "logit_bias has 1025 entries"),
        ] {
            let error = read(|s| s.logit_bias = biases).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
        let error = read(|s| s.logprobs = Some(21)).unwrap_err();
        assert!(error.contains("sampling.logprobs is 21"), "{error}");
        let error = read(|s| s.min_new_tokens = 17).unwrap_err();
        assert!(error.contains("sampling.min_new_tokens is 17"), "{error}");
    }

    #[test]
    fn log_probabilities_survive_the_wire_and_broken_ones_are_seen() {
        let told = Logprob {
            logprob: -3.5,
            top: vec![(4, -0.25), (99, -2.0)],
        };
        let wire = told.to_wire();
        assert_eq!(Logprob::from_wire(&wire, 2, VOCAB).unwrap(), told);
        let broken: [(Change, &str); 5] = [
            (|l| l.top_ids.truncate(1), "1 tokens and 2 values"),
            (|l| l.top_logprobs.push(0.0), "2 tokens and 3 values"),
            (|l| l.top_ids[1] = 100, "token 100"),
            (|l| l.top_logprobs[0] = f32::NAN, "is NaN"),
            (|l| l.logprob = f32::NEG_INFINITY, "is -inf"),
        ];
        for (change, named) in broken {
            let mut wire = wire.clone();
            change(&mut wire);
            let error = Logprob::from_wire(&wire, 2, VOCAB).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }
}
