//! What is changed in a row of logits before a token is chosen: biases, then penalties, then the mask.

use crate::exec::{Adjust, SampleParams};

/// Changes `row` in place. What the mask forbids becomes minus infinity; everything else stays finite.
pub fn apply(row: &mut [f32], params: &SampleParams, adjust: &Adjust<'_>) {
    for &[token, bias] in adjust.biases {
        let l = &mut row[token as usize];
        *l = finite(*l + f32::from_bits(bias));
    }
    for &[token, times] in adjust.seen {
        let l = &mut row[token as usize];
        *l = finite(penalised(*l, times, params));
    }
    if let Some(mask) = adjust.mask {
        forbid(row, mask);
    }
}

/// Infinity would be taken for a forbidden token, or be all that is left.
fn finite(l: f32) -> f32 {
    l.clamp(f32::MIN, f32::MAX)
}

fn penalised(l: f32, times: u32, params: &SampleParams) -> f32 {
    let l = if l > 0.0 {
        l / params.repetition_penalty
    } else {
        l * params.repetition_penalty
    };
    if times == 0 {
        return l;
    }
    // a division by a tiny penalty may have overflowed: infinity less infinity is no number
    finite(l) - params.presence_penalty - times as f32 * params.frequency_penalty
}

fn forbid(row: &mut [f32], mask: &[u32]) {
    for (tokens, &allowed) in row.chunks_mut(32).zip(mask) {
        if allowed == u32::MAX {
            continue;
        }
        for (i, l) in tokens.iter_mut().enumerate() {
            if allowed & 1 << i == 0 {
                *l = f32::NEG_INFINITY;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(row: &[f32], params: &SampleParams, adjust: &Adjust<'_>) -> Vec<f32> {
        let mut row = row.to_vec();
        apply(&mut row, params, adjust);
        row
    }

    #[test]
    fn biases_come_before_penalties_and_the_mask_last() {
        let params = SampleParams {
            repetition_penalty: 2.0,
            presence_penalty: 0.25,
            frequency_penalty: 0.5,
            ..SampleParams::GREEDY
        };
        let adjust = Adjust {
            biases: &[[0, 4f32.to_bits()], [2, (-3f32).to_bits()], [4, 9f32.to_bits()]],
            seen: &[[0, 0], [1, 1], [2, 3]],
            mask: Some(&[0b0_1111]),
        };
        // (-1 + 4) / 2; 1 / 2 - 0.75; (1 - 3) x 2 - 0.25 - 1.5; untouched; forbidden
        assert_eq!(
            applied(&[-1.0, 1.0, 1.0, 1.0, 1.0], &params, &adjust),
            [1.5, -0.25, -5.75, 1.0, f32::NEG_INFINITY]
        );
    }

    #[test]
    fn what_is_unset_changes_nothing() {
        let row = [-3.5, 0.0, 2.25];
        let adjust = Adjust {
            seen: &[[0, 7], [1, 0], [2, 1]],
            mask: Some(&[0b111]),
            ..Adjust::default()
        };
        assert_eq!(applied(&row, &SampleParams::GREEDY, &adjust), row);
    }

    #[test]
    fn no_penalty_or_bias_makes_a_number_infinite() {
        let params = SampleParams {
            repetition_penalty: 1e-30,
            presence_penalty: f32::MAX,
            frequency_penalty: f32::MAX,
            ..SampleParams::GREEDY
        };
        let adjust = Adjust {
            biases: &[[0, f32::MAX.to_bits()], [1, f32::MIN.to_bits()]],
            seen: &[[0, 9], [1, 9], [2, 0], [3, 1]],
            mask: None,
        };
        let row = applied(&[f32::MAX, f32::MIN, 1e20, 1e20], &params, &adjust);
        assert!(row.iter().all(|l| l.is_finite()), "{row:?}");
    }

    #[test]
    fn the_mask_is_read_bit_by_bit_across_words() {
        let n = 32 * 3 + 5;
        let mask: Vec<u32> = vec![u32::MAX, 0, 0x8000_0001, 0b10010];
        let row = applied(
            &vec![1.0; n],
            &SampleParams::GREEDY,
            &Adjust {
                mask: Some(&mask),
                ..Adjust::default()
            },
        );
        for (i, l) in row.iter().enumerate() {
            let allowed = mask[i / 32] >> (i % 32) & 1 == 1;
            assert_eq!(l.is_finite(), allowed, "token {i}");
        }
    }
}
