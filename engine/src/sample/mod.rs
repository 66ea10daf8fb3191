//! How a token is chosen from a row of logits.
//!
//! The choice is a pure function of the logits and of (temperature, top_p, seed, position): no state is carried from token to
//! token, so a request that moves to another engine, or is computed again, draws the same numbers. Order is total everywhere:
//! by probability, ties by the lower id.

mod rng;

use crate::exec::SampleParams;

/// The token, or `None` if any logit is NaN or infinite. `candidates` is workspace, as long as `logits`.
pub fn choose(logits: &[f32], params: &SampleParams, position: u32, candidates: &mut [(f32, u32)]) -> Option<u32> {
    let top = finite_max(logits)?;
    let inverse = 1.0 / params.temperature;
    // below 2.9e-39 the inverse is infinite, and 0 x infinity is no weight
    if params.temperature <= 0.0 || !inverse.is_finite() {
        return logits.iter().position(|&l| l >= top).map(|i| i as u32);
    }
    let draw = rng::uniform(params.seed, position);
    let weight = |l: f32| ((l - top) * inverse).exp();
    let total: f64 = logits.iter().map(|&l| f64::from(weight(l))).sum();
    if params.top_p >= 1.0 {
        return Some(pick(
            logits.iter().enumerate().map(|(i, &l)| (weight(l), i as u32)),
            draw * total,
        ));
    }
    for (i, (c, &l)) in candidates.iter_mut().zip(logits).enumerate() {
        *c = (weight(l), i as u32);
    }
    let candidates = &mut candidates[..logits.len()];
    let wanted = f64::from(params.top_p) * total;
    let (nucleus, mass) = nucleus(candidates, wanted);
    Some(pick(nucleus.iter().copied(), draw * mass))
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

/// The smallest set of the most probable candidates whose mass reaches `wanted`, in order, and its mass. At least one.
fn nucleus(candidates: &mut [(f32, u32)], wanted: f64) -> (&[(f32, u32)], f64) {
    let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
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
        }
    }

    fn draw(logits: &[f32], p: &SampleParams, position: u32) -> Option<u32> {
        choose(logits, p, position, &mut vec![(0.0, 0); logits.len()])
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
        let set = |top_p: f32| {
            let mut seen: Vec<u32> = (0..3000)
                .filter_map(|i| draw(&logits, &params(1.0, top_p, 3), i))
                .collect();
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        assert_eq!(set(0.0001), [1]);
        assert_eq!(set(0.49), [1]);
        assert_eq!(set(0.79), [1, 3]);
        assert_eq!(set(0.85), [0, 1, 3]);
        // of two equals the lower id
        assert_eq!(set(0.92), [0, 1, 2, 3]);
        assert_eq!(set(1.0), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn a_large_nucleus_is_found_like_a_small_one() {
        // flat: the nucleus has 90 % of 5000 candidates, sorted in several rounds; ids in order since all are equal
        let logits = vec![0.0; 5000];
        let mut candidates: Vec<(f32, u32)> = (0..5000).rev().map(|i| (1.0, i)).collect();
        let (set, mass) = nucleus(&mut candidates, 4500.0);
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
