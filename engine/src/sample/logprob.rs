//! Log-probabilities of a row of logits, as words of a device buffer: the token's own, then the likeliest tokens, then theirs.

use crate::exec::{Logprob, MAX_LOGPROBS};

/// Words of one row.
pub const LOGPROB_WORDS: usize = 1 + 2 * MAX_LOGPROBS;

/// Writes those of `token` and of the `top` likeliest, at most [`MAX_LOGPROBS`]. Every logit must be finite.
pub fn write(logits: &[f32], token: u32, top: usize, words: &mut [u32]) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mass: f64 = logits.iter().map(|&l| f64::from((l - max).exp())).sum();
    let log_mass = mass.ln();
    // finite also where two logits are further apart than any f32
    let of = |l: f32| (f64::from(l) - f64::from(max) - log_mass).max(f64::from(f32::MIN)) as f32;
    words[0] = of(logits[token as usize]).to_bits();
    let mut best = [(0.0, 0); MAX_LOGPROBS];
    let found = likeliest(logits, &mut best[..top.min(MAX_LOGPROBS)]);
    for (i, &(l, token)) in best[..found].iter().enumerate() {
        words[1 + i] = token;
        words[1 + MAX_LOGPROBS + i] = of(l).to_bits();
    }
}

/// Reads what [`write`] wrote.
pub fn read(words: &[u32], top: usize) -> Logprob {
    let (ids, values) = (&words[1..], &words[1 + MAX_LOGPROBS..]);
    Logprob {
        logprob: f32::from_bits(words[0]),
        top: (0..top.min(MAX_LOGPROBS))
            .map(|i| (ids[i], f32::from_bits(values[i])))
            .collect(),
    }
}

/// Fills `best` with the largest logits and their tokens, the largest first, ties by the lower id. Returns how many there are.
fn likeliest(logits: &[f32], best: &mut [(f32, u32)]) -> usize {
    let mut found = 0;
    for (token, &l) in logits.iter().enumerate() {
        if found == best.len() {
            // later ones have higher ids: of equals the first stays
            if best.last().is_none_or(|last| l <= last.0) {
                continue;
            }
        } else {
            found += 1;
        }
        let at = best[..found - 1].partition_point(|b| b.0 >= l);
        best.copy_within(at..found - 1, at + 1);
        best[at] = (l, token as u32);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logprob(logits: &[f32], token: u32, top: usize) -> Logprob {
        let mut words = [0; LOGPROB_WORDS];
        write(logits, token, top, &mut words);
        read(&words, top.min(logits.len()))
    }

    #[test]
    fn they_are_the_log_of_the_softmax() {
        let p = [0.1f32, 0.5, 0.05, 0.3, 0.05];
        // any constant may be added to all logits
        for shift in [0.0, 300.0, -300.0] {
            let logits = p.map(|p| p.ln() + shift);
            let got = logprob(&logits, 3, 4);
            assert!((got.logprob - 0.3f32.ln()).abs() < 1e-4, "{got:?}");
            let ids: Vec<u32> = got.top.iter().map(|t| t.0).collect();
            assert_eq!(ids, [1, 3, 0, 2], "of two equals the lower id comes first");
            for (id, l) in &got.top {
                assert!((l - p[*id as usize].ln()).abs() < 1e-4, "{got:?}");
            }
        }
    }

    #[test]
    fn far_apart_logits_give_finite_numbers() {
        let got = logprob(&[f32::MAX, 0.0, f32::MIN], 2, 5);
        assert_eq!(got.top.len(), 3, "no more than there are");
        assert_eq!(got.top[0].1.to_bits(), 0f32.to_bits());
        assert!(got.logprob < -1e38 && got.logprob.is_finite(), "{got:?}");
    }

    #[test]
    fn the_likeliest_are_those_of_a_full_sort() {
        let mut state = 1u32;
        for n in [1, 2, 19, 20, 21, 200] {
            // few values, so that many are equal
            let logits: Vec<f32> = (0..n)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 28) as f32
                })
                .collect();
            let mut all: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
            all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            for top in [0, 1, 5, 20] {
                let mut best = vec![(0.0, 0); top];
                let found = likeliest(&logits, &mut best);
                assert_eq!(best[..found], all[..top.min(all.len())]);
            }
        }
    }
}
