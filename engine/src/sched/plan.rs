//! Who gets how many tokens in the next step.
//!
//! One budget for both kinds of work. Decoding sequences come first, one token each, so that a long prompt delays them by at
//! most one step of bounded size; what is left goes to prompts in order of arrival, each a chunk at most.

/// One sequence as the planner sees it. Sequences are listed in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Prompt tokens still to compute; 0 for a sequence that decodes.
    pub prompt_left: u32,
    /// Number of the step that last had a part of it.
    pub last_step: u64,
}

/// The bounds of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Tokens, all sequences together; at least 2.
    pub step_tokens: u32,
    /// Prompt tokens of one sequence; at least 1.
    pub chunk_tokens: u32,
    /// Sequences; at least 2 where more than one may run.
    pub max_seqs: u32,
}

/// A sequence's part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Index into the list of work.
    pub seq: usize,
    /// Tokens to compute.
    pub tokens: u32,
}

/// The next step; empty only if there is no work.
pub fn plan(work: &[Work], limits: Limits) -> Vec<Part> {
    let mut decoding: Vec<usize> = (0..work.len()).filter(|&i| work[i].prompt_left == 0).collect();
    let prompts = (0..work.len()).filter(|&i| work[i].prompt_left > 0);
    let mut tokens = limits.step_tokens;
    let mut seats = limits.max_seqs.min(tokens);

    // one token stays for the oldest prompt, or decoding sequences could keep it waiting for ever
    let kept = u32::from(decoding.len() < work.len() && seats > 1);
    let turn = (seats - kept) as usize;
    if decoding.len() > turn {
        decoding.sort_by_key(|&i| (work[i].last_step, i));
        decoding.truncate(turn);
    }
    let mut parts: Vec<Part> = decoding.into_iter().map(|seq| Part { seq, tokens: 1 }).collect();
    tokens -= parts.len() as u32;
    seats -= parts.len() as u32;

    for seq in prompts {
        if tokens == 0 || seats == 0 {
            break;
        }
        let chunk = work[seq].prompt_left.min(limits.chunk_tokens).min(tokens);
        parts.push(Part { seq, tokens: chunk });
        tokens -= chunk;
        seats -= 1;
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A sequence of the simulation.
    #[derive(Debug, Clone)]
    struct Sim {
        arrives: u64,
        prompt: u32,
        new: u32,
        done_prompt: u32,
        done_new: u32,
        last_step: u64,
        waited: u64,
    }

    impl Sim {
        fn over(&self) -> bool {
            self.done_new >= self.new
        }
    }

    fn limits() -> impl Strategy<Value = Limits> {
        (2u32..64, 1u32..40, 2u32..12).prop_map(|(step_tokens, chunk_tokens, max_seqs)| Limits {
            step_tokens,
            chunk_tokens,
            max_seqs,
        })
    }

    fn sims() -> impl Strategy<Value = Vec<Sim>> {
        let one = (0u64..60, 1u32..120, 1u32..40).prop_map(|(arrives, prompt, new)| Sim {
            arrives,
            prompt,
            new,
            done_prompt: 0,
            done_new: 0,
            last_step: 0,
            waited: 0,
        });
        prop::collection::vec(one, 1..24).prop_map(|mut all| {
            all.sort_by_key(|s| s.arrives);
            all
        })
    }

    proptest! {
        #[test]
        fn every_sequence_ends_within_budget_and_nobody_starves(limits in limits(), mut all in sims()) {
            let work_tokens: u64 = all.iter().map(|s| u64::from(s.prompt + s.new)).sum();
            let last_arrival = all.last().map_or(0, |s| s.arrives);
            let mut step = 0;
            while all.iter().any(|s| !s.over()) {
                step += 1;
                // each step has work once all have arrived, and at least one token of it is done
                prop_assert!(step <= last_arrival + work_tokens + 1, "it does not end");
                let here: Vec<usize> = (0..all.len()).filter(|&i| all[i].arrives < step && !all[i].over()).collect();
                let work: Vec<Work> = here
                    .iter()
                    .map(|&i| Work { prompt_left: all[i].prompt - all[i].done_prompt, last_step: all[i].last_step })
                    .collect();
                let parts = plan(&work, limits);
                prop_assert_eq!(parts.is_empty(), work.is_empty());
                prop_assert!(parts.iter().map(|p| p.tokens).sum::<u32>() <= limits.step_tokens);
                prop_assert!(parts.len() <= limits.max_seqs as usize);

                let decoding = work.iter().filter(|w| w.prompt_left == 0).count() as u64;
                let oldest_prompt = work.iter().position(|w| w.prompt_left > 0);
                let turn = u64::from(limits.step_tokens.min(limits.max_seqs)) - 1;
                let mut named = vec![false; work.len()];
                for part in &parts {
                    prop_assert!(!std::mem::replace(&mut named[part.seq], true), "twice in a step");
                    let left = work[part.seq].prompt_left;
                    prop_assert!(part.tokens >= 1);
                    let most = if left == 0 { 1 } else { left.min(limits.chunk_tokens) };
                    prop_assert!(part.tokens <= most);
                }
                if let Some(oldest) = oldest_prompt {
                    prop_assert!(named[oldest], "the oldest prompt got nothing");
                }
                for (w, &i) in here.iter().enumerate() {
                    let sim = &mut all[i];
                    if named[w] {
                        sim.waited = 0;
                        sim.last_step = step;
                    } else if work[w].prompt_left == 0 {
                        sim.waited += 1;
                        // those that were served longer ago go first, so everybody's turn comes
                        prop_assert!(sim.waited <= all.len() as u64 / turn + 1 + decoding);
                    }
                }
                for part in &parts {
                    let sim = &mut all[here[part.seq]];
                    if work[part.seq].prompt_left == 0 {
                        sim.done_new += 1;
                    } else {
                        sim.done_prompt += part.tokens;
                        if sim.done_prompt == sim.prompt {
                            sim.done_new = 1;
                        }
                    }
                }
            }
        }
    }

    fn work(prompt_left: u32, last_step: u64) -> Work {
        Work { prompt_left, last_step }
    }

    #[test]
    fn a_long_prompt_does_not_delay_those_that_decode() {
        let limits = Limits {
            step_tokens: 20,
            chunk_tokens: 16,
            max_seqs: 8,
        };
        let parts = plan(&[work(1_000, 0), work(0, 3), work(0, 3), work(40, 0)], limits);
        let expected = [(1, 1), (2, 1), (0, 16), (3, 2)].map(|(seq, tokens)| Part { seq, tokens });
        assert_eq!(parts, expected);
    }

    #[test]
    fn more_decoding_sequences_than_budget_take_turns_and_leave_a_prompt_its_token() {
        let limits = Limits {
            step_tokens: 3,
            chunk_tokens: 16,
            max_seqs: 8,
        };
        let parts = plan(&[work(0, 9), work(0, 7), work(0, 8), work(5, 0)], limits);
        let expected = [(1, 1), (2, 1), (3, 1)].map(|(seq, tokens)| Part { seq, tokens });
        assert_eq!(parts, expected);
        // without a prompt nothing is kept back
        assert_eq!(plan(&[work(0, 9), work(0, 7), work(0, 8)], limits).len(), 3);
    }
}
