//! How a token is chosen from a row of logits.
//!
//! The choice is a pure function of the logits, of what a sequence's [`Adjust`] says and of (parameters, seed, position): a
//! request that moves to another engine, or is computed again, draws the same numbers. Order is total everywhere: by
//! probability, ties by the lower id.
//!
//! | file | holds |
//! | --- | --- |
//! | `mod.rs` | the draw: temperature, top k, top p, min p |
//! | [`adjust`] | what is changed in the row before: biases, penalties, masks |
//! | [`logprob`] | log-probabilities of the row as the model gave it |
//! | [`words`] | all of it as words of device buffers |
//! | [`grammar`] | what a schema allows next |
//! | [`vocabulary`] | the bytes of every token, for grammars alone |
//! | `rng.rs` | the counter RNG |

pub mod adjust;
pub mod grammar;
pub mod logprob;
mod rng;
pub mod vocabulary;
pub mod words;

use crate::exec::{Adjust, SampleParams};

/// Why no token was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unchosen {
    /// A logit is NaN or infinite.
    NotFinite,
    /// The mask allows none.
    NoneAllowed,
}

/// Memory of one choice; each as long as the row, or longer.
pub struct Work<'a> {
    /// The adjusted row.
    pub row: &'a mut [f32],
    /// (probability, token).
    pub candidates: &'a mut [(f32, u32)],
}

/// Chooses the token at `position`.
pub fn choose(
    logits: &[f32],
    params: &SampleParams,
    adjust: &Adjust<'_>,
    position: u32,
    work: &mut Work<'_>,
) -> Result<u32, Unchosen> {
    let top = finite_max(logits).ok_or(Unchosen::NotFinite)?;
    if *adjust == Adjust::default() {
        return Ok(draw(logits, top, params, position, work.candidates));
    }
    let row = &mut work.row[..logits.len()];
    row.copy_from_slice(logits);
    adjust::apply(row, params, adjust);
    // what the mask forbids is minus infinity now
    let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !top.is_finite() {
        return Err(Unchosen::NoneAllowed);
    }
    Ok(draw(row, top, params, position, work.candidates))
}

/// Draws from a row whose largest logit is `top`; minus infinity is no candidate.
fn draw(logits: &[f32], top: f32, params: &SampleParams, position: u32, candidates: &mut [(f32, u32)]) -> u32 {
    let inverse = 1.0 / params.temperature;
    // below 2.9e-39 the inverse is infinite, and 0 x infinity is no weight
    if params.temperature <= 0.0 || !inverse.is_finite() {
        return logits.iter().position(|&l| l >= top).unwrap_or_default() as u32;
    }
    let draw = rng::uniform(params.seed, position);
    // the likeliest weighs 1, so min_p is a bound on weights
    let weight = |l: f32| ((l - top) * inverse).exp();
    let top_k = match params.top_k as usize {
        0 => logits.len(),
        k => k.min(logits.len()),
    };
    if params.top_p >= 1.0 && top_k == logits.len() {
        let weights = || {
            let kept = |w: f32| if w >= params.min_p { w } else { 0.0 };
            logits
                .iter()
                .enumerate()
                .map(move |(i, &l)| (kept(weight(l)), i as u32))
        };
        let total: f64 = weights().map(|(w, _)| f64::from(w)).sum();
        return pick(weights(), draw * total);
    }
    let candidates = &mut candidates[..logits.len()];
    for (i, (c, &l)) in candidates.iter_mut().zip(logits).enumerate() {
        *c = (weight(l), i as u32);
    }
    let candidates = likeliest(candidates, top_k);
    let total: f64 = candidates.iter().map(|c| f64::from(c.0)).sum();
    let (kept, mass) = nucleus(candidates, f64::from(params.top_p) * total, params.min_p);
    pick(kept.iter().copied(), draw * mass)
}

/// The largest logit, if all are finite.
fn finite_max(logits: &[f32]) -> Option<f32> {
    // by lanes, so that the compiler uses vectors; magnitudes as integers order NaN above infinity above numbers
    const LANES: usize = 16;
    let (mut top, mut magnitude) = ([f32::NEG_INFINITY; LANES], [0u32; LANES]);
    let (chunks, rest) = logits.as_chunks::<LANES>();
    for chunk in chunks {
        for i in 0..LANES {
            top[i] = if chunk[i] > top[i] { chunk[i] } else { top[i] };
            magnitude[i] = magnitude[i].max(chunk[i].to_bits() & 0x7fff_ffff);
        }
    }
    let magnitude = magnitude
        .into_iter()
        .chain(rest.iter().map(|l| l.abs().to_bits()))
        .max()?;
    let top = top
        .into_iter()
        .chain(rest.iter().copied())
        .fold(f32::NEG_INFINITY, f32::max);
    f32::from_bits(magnitude).is_finite().then_some(top)
}

/// By probability, ties by the lower id.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "what a sort calls it with")]
fn order(a: &(f32, u32), b: &(f32, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// The `n` most probable candidates, in no order.
fn likeliest(candidates: &mut [(f32, u32)], n: usize) -> &mut [(f32, u32)] {
    if n < candidates.len() {
        candidates.select_nth_unstable_by(n, order);
    }
    &mut candidates[..n]
}

/// The smallest set of the most probable candidates whose mass reaches `wanted`, without those less probable than `least`; in
/// order, and its mass. At least one.
fn nucleus(candidates: &mut [(f32, u32)], wanted: f64, least: f32) -> (&[(f32, u32)], f64) {
    let n = candidates.len();
    let mut sorted = 0;
    let mut mass = 0.0;
    // the nucleus is small as a rule: sort the best 256 first, then four times as many
    let mut want = 256.min(n);
    loop {
        if want < n {
            candidates[sorted..].select_nth_unstable_by(want - sorted, order);
        }
        candidates[sorted..want].sort_unstable_by(order);
        for i in sorted..want {
            if i > 0 && candidates[i].0 < least {
                return (&candidates[..i], mass);
            }
            mass += f64::from(candidates[i].0);
            if mass >= wanted {
                return (&candidates[..=i], mass);
            }
        }
        if want == n {
            return (candidates, mass);
        }
        sorted = want;
        want = (want * 4).min(n);
    }
}

/// The first candidate at which the running mass exceeds `target`; the last one with any mass if rounding leaves none.
fn pick(candidates: impl Iterator<Item = (f32, u32)>, target: f64) -> u32 {
    let (mut mass, mut last) = (0.0, 0);
    for (weight, token) in candidates {
        if weight > 0.0 {
            mass += f64::from(weight);
            last = token;
            if mass > target {
                return token;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(temperature: f32, top_p: f32, seed: u64) -> SampleParams {
        SampleParams {
            temperature,
            top_p,
            seed,
            ..SampleParams::GREEDY
        }
    }

    fn draw(logits: &[f32], p: &SampleParams, position: u32) -> Option<u32> {
        adjusted(logits, p, &Adjust::default(), position).ok()
    }

    fn adjusted(logits: &[f32], p: &SampleParams, adjust: &Adjust<'_>, position: u32) -> Result<u32, Unchosen> {
        let mut work = Work {
            row: &mut vec![0.0; logits.len()],
            candidates: &mut vec![(0.0, 0); logits.len()],
        };
        choose(logits, p, adjust, position, &mut work)
    }

    /// The tokens that are ever drawn.
    fn set(logits: &[f32], p: &SampleParams, adjust: &Adjust<'_>) -> Vec<u32> {
        let mut seen: Vec<u32> = (0..3000).filter_map(|i| adjusted(logits, p, adjust, i).ok()).collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_equals() {
        for n in [3, 16, 17, 40] {
            let mut logits = vec![-1.0; n];
            logits[n - 1] = 2.0;
            logits[1] = 2.0;
            assert_eq!(draw(&logits, &params(0.0, 1.0, 0), 0), Some(1), "{n} logits");
        }
        assert_eq!(draw(&[-5.0, -3.0, -3.0], &params(0.0, 1.0, 0), 0), Some(1));
    }

    #[test]
    fn a_nan_or_infinity_anywhere_is_seen_under_every_rule() {
        for n in [5, 16, 50] {
            for at in [0, 3, n - 1] {
                for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut logits = vec![0.5; n];
                    logits[at] = bad;
                    for p in [params(0.0, 1.0, 0), params(1.0, 1.0, 1), params(0.7, 0.9, 2)] {
                        assert_eq!(draw(&logits, &p, 7), None, "{bad} at {at} of {n}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_draw_follows_the_probabilities() {
        // p = 0.6, 0.3, 0.1 at temperature 1
        let logits = [0.6f32.ln(), 0.3f32.ln(), 0.1f32.ln()];
        let mut seen = [0u32; 3];
        let draws = 30_000;
        for position in 0..draws {
            seen[draw(&logits, &params(1.0, 1.0, 99), position).unwrap() as usize] += 1;
        }
        for (n, p) in seen.iter().zip([0.6, 0.3, 0.1]) {
            let share = f64::from(*n) / f64::from(draws);
            // five standard deviations
            assert!(
                (share - p).abs() < 5.0 * (p * (1.0 - p) / f64::from(draws)).sqrt(),
                "{seen:?}"
            );
        }
    }

    #[test]
    fn temperature_sharpens_and_flattens() {
        let logits = [1.0, 0.0];
        let share = |t: f32| {
            (0..4000)
                .filter(|i| draw(&logits, &params(t, 1.0, 5), *i) == Some(0))
                .count() as f64
                / 4000.0
        };
        // 1 / (1 + e^(-1/t))
        for t in [0.25f32, 1.0, 4.0] {
            let p = 1.0 / (1.0 + f64::from(-1.0 / t).exp());
            assert!((share(t) - p).abs() < 0.04, "temperature {t}: {} for {p}", share(t));
        }
    }

    #[test]
    fn a_temperature_too_small_to_divide_by_takes_the_top() {
        let mut logits = vec![-1.0; 40];
        logits[7] = 3.0;
        for temperature in [1e-45, 1e-40, 2.9e-39, 3e-39, f32::MIN_POSITIVE, 1e-20] {
            for top_p in [1.0, 0.9, 1e-3] {
                for position in 0..20 {
                    let token = draw(&logits, &params(temperature, top_p, 4), position);
                    assert_eq!(token, Some(7), "temperature {temperature}, top_p {top_p}");
                }
            }
        }
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_it() {
        let logits: Vec<f32> = [0.1f32, 0.5, 0.05, 0.3, 0.05].iter().map(|p| p.ln()).collect();
        let set = |top_p: f32| set(&logits, &params(1.0, top_p, 3), &Adjust::default());
        assert_eq!(set(0.0001), [1]);
        assert_eq!(set(0.49), [1]);
        assert_eq!(set(0.79), [1, 3]);
        assert_eq!(set(0.85), [0, 1, 3]);
        // of two equals the lower id
        assert_eq!(set(0.92), [0, 1, 2, 3]);
        assert_eq!(set(1.0), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn top_k_top_p_and_min_p_each_narrow_what_the_one_before_left() {
        // p = 0.05, 0.4, 0.05, 0.3, 0.2
        let logits: Vec<f32> = [0.05f32, 0.4, 0.05, 0.3, 0.2].iter().map(|p| p.ln()).collect();
        let set = |top_k, top_p, min_p| {
            let params = SampleParams {
                top_k,
                min_p,
                ..params(1.0, top_p, 3)
            };
            set(&logits, &params, &Adjust::default())
        };
        assert_eq!(set(1, 1.0, 0.0), [1]);
        assert_eq!(set(3, 1.0, 0.0), [1, 3, 4]);
        // of two equals the lower id
        assert_eq!(set(4, 1.0, 0.0), [0, 1, 3, 4]);
        assert_eq!(set(5, 1.0, 0.0), [0, 1, 2, 3, 4]);
        assert_eq!(set(u32::MAX, 1.0, 0.0), [0, 1, 2, 3, 4]);
        // of 0.4 and 0.3, which make 1 again: 0.57 is not enough for 0.6, though 0.4 + 0.3 of all would be
        assert_eq!(set(2, 0.57, 0.0), [1]);
        assert_eq!(set(2, 0.6, 0.0), [1, 3]);
        assert_eq!(set(0, 0.6, 0.0), [1, 3]);
        assert_eq!(set(3, 0.6, 0.0), [1, 3]);
        // relative to the likeliest: 0.2 is half of 0.4
        assert_eq!(set(0, 1.0, 0.45), [1, 3, 4]);
        assert_eq!(set(0, 1.0, 0.6), [1, 3]);
        assert_eq!(set(0, 1.0, 1.0), [1]);
        assert_eq!(set(4, 0.99, 0.45), [1, 3, 4]);
        assert_eq!(set(4, 0.5, 0.45), [1, 3]);
    }

    #[test]
    fn a_narrowed_draw_keeps_the_proportions() {
        let logits: Vec<f32> = [0.1f32, 0.4, 0.3, 0.2].iter().map(|p| p.ln()).collect();
        for (top_k, min_p) in [(2, 0.0), (0, 0.7), (3, 0.7)] {
            let params = SampleParams {
                top_k,
                min_p,
                ..params(1.0, 1.0, 8)
            };
            let n = 20_000;
            let first = (0..n).filter(|i| draw(&logits, &params, *i) == Some(1)).count();
            let share = first as f64 / f64::from(n);
            assert!(
                (share - 4.0 / 7.0).abs() < 0.02,
                "top_k {top_k}, min_p {min_p}: {share}"
            );
        }
    }

    #[test]
    fn greedy_follows_biases_penalties_and_masks() {
        let logits = [1.0, 3.0, 2.0, 0.0];
        let bias = [[3, 5f32.to_bits()]];
        let biased = Adjust {
            biases: &bias,
            ..Adjust::default()
        };
        let seen = Adjust {
            seen: &[[1, 2]],
            ..Adjust::default()
        };
        let masked = Adjust {
            mask: Some(&[0b1001]),
            ..Adjust::default()
        };
        let frequent = SampleParams {
            frequency_penalty: 0.6,
            ..SampleParams::GREEDY
        };
        assert_eq!(adjusted(&logits, &SampleParams::GREEDY, &biased, 0), Ok(3));
        assert_eq!(adjusted(&logits, &frequent, &seen, 0), Ok(2));
        assert_eq!(adjusted(&logits, &SampleParams::GREEDY, &seen, 0), Ok(1));
        assert_eq!(adjusted(&logits, &SampleParams::GREEDY, &masked, 0), Ok(0));
        assert_eq!(set(&logits, &params(2.0, 1.0, 1), &masked), [0, 3]);
        assert_eq!(set(&logits, &params(2.0, 0.999, 1), &masked), [0, 3]);
    }

    #[test]
    fn a_mask_that_allows_nothing_is_told_apart_from_broken_logits() {
        let nothing = Adjust {
            mask: Some(&[0]),
            ..Adjust::default()
        };
        for p in [params(0.0, 1.0, 0), params(1.0, 1.0, 1), params(0.7, 0.9, 2)] {
            assert_eq!(adjusted(&[1.0, 2.0], &p, &nothing, 0), Err(Unchosen::NoneAllowed));
            // also where the broken one is forbidden
            assert_eq!(adjusted(&[1.0, f32::NAN], &p, &nothing, 0), Err(Unchosen::NotFinite));
        }
    }

    #[test]
    fn extreme_biases_still_leave_a_draw() {
        let bias = [[0, f32::MIN.to_bits()], [1, f32::MAX.to_bits()]];
        let adjust = Adjust {
            biases: &bias,
            ..Adjust::default()
        };
        for p in [params(0.0, 1.0, 0), params(100.0, 1.0, 1), params(0.7, 0.9, 2)] {
            assert_eq!(adjusted(&[1.0, 2.0, 3.0], &p, &adjust, 0), Ok(1));
        }
    }

    #[test]
    fn a_large_nucleus_is_found_like_a_small_one() {
        // flat: the nucleus has 90 % of 5000 candidates, sorted in several rounds; ids in order since all are equal
        let logits = vec![0.0; 5000];
        let mut candidates: Vec<(f32, u32)> = (0..5000).rev().map(|i| (1.0, i)).collect();
        let (set, mass) = nucleus(&mut candidates, 4500.0, 0.0);
        assert_eq!((set.len(), mass), (4500, 4500.0));
        assert!(set.iter().enumerate().all(|(i, c)| c.1 == i as u32));
        assert!(draw(&logits, &params(1.0, 0.9, 1), 0).unwrap() < 4500);
    }

    #[test]
    fn the_choice_is_a_function_of_seed_and_position() {
        let logits: Vec<f32> = (0..300).map(|i| (i as f32 * 0.37).sin()).collect();
        for top_p in [1.0, 0.8] {
            let run = |seed| {
                (0..200)
                    .map(|i| draw(&logits, &params(1.0, top_p, seed), i))
                    .collect::<Vec<_>>()
            };
            assert_eq!(run(1), run(1));
            assert_ne!(run(1), run(2));
        }
    }
}
