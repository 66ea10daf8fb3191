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
