//! Random numbers as a function of a counter: Philox 4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy
//! as 1, 2, 3", 2011).

const MULTIPLIER: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The cipher: four words out of a counter and a key.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = MULTIPLIER[0] * u64::from(counter[0]);
        let b = MULTIPLIER[1] * u64::from(counter[2]);
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// Uniform in [0, 1), 53 bits, for the token at `position` under `seed`.
pub fn uniform(seed: u64, position: u32) -> f64 {
    let [a, b, ..] = philox([position, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_vectors() {
        // known-answer tests of the authors' library
        assert_eq!(
            philox([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn draws_are_even_and_differ_between_seeds_and_positions() {
        let mean = (0..10_000).map(|i| uniform(7, i)).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.015, "{mean}");
        let bits = |seed, position| uniform(seed, position).to_bits();
        assert_ne!(bits(1, 5), bits(2, 5));
        assert_ne!(bits(1 << 32, 5), bits(0, 5));
        assert_ne!(bits(1, 5), bits(1, 6));
    }
}
