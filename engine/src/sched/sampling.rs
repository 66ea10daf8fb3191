//! Sampling as it comes off the wire. One value out of range would fail a whole step, and with it every sequence of the step,
//! so it is read here and refused before anything is taken for its request.

use tandem_wire::proto;

use crate::exec::SampleParams;

/// Above it every token is as likely as any other.
const MAX_TEMPERATURE: f32 = 100.0;

/// Reads sampling; unset is greedy, and a `top_p` of 0 is unset, which means 1.
///
/// # Errors
/// Names the field, its value and what is allowed.
pub fn read_sampling(sampling: Option<&proto::Sampling>) -> Result<SampleParams, String> {
    let unset = proto::Sampling::default();
    let &proto::Sampling {
        temperature,
        top_p,
        seed,
        ..
    } = sampling.unwrap_or(&unset);
    // a range contains no NaN
    if !(0.0..=MAX_TEMPERATURE).contains(&temperature) {
        return Err(format!(
            "sampling.temperature is {temperature}, allowed is 0 to {MAX_TEMPERATURE}"
        ));
    }
    if !(0.0..=1.0).contains(&top_p) {
        return Err(format!("sampling.top_p is {top_p}, allowed is 0 (unset) to 1"));
    }
    Ok(SampleParams {
        temperature,
        top_p: if top_p == 0.0 { 1.0 } else { top_p },
        seed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(temperature: f32, top_p: f32) -> Result<SampleParams, String> {
        read_sampling(Some(&proto::Sampling {
            temperature,
            top_p,
            seed: 7,
            ..proto::Sampling::default()
        }))
    }

    #[test]
    fn an_unset_top_p_means_all_tokens() {
        for sampling in [read(0.0, 0.0), read(0.0, -0.0), read(0.0, 1.0)] {
            let sampling = sampling.unwrap();
            assert_eq!((sampling.top_p.to_bits(), sampling.seed), (1f32.to_bits(), 7));
        }
        assert_eq!(read(100.0, 0.5).unwrap().top_p.to_bits(), 0.5f32.to_bits());
        let unset = read_sampling(None).unwrap();
        assert_eq!(
            (unset.temperature.to_bits(), unset.top_p.to_bits()),
            (0, 1f32.to_bits())
        );
    }

    #[test]
    fn what_would_fail_a_step_is_refused_by_the_fields_name() {
        for temperature in [-0.1, 100.5, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = read(temperature, 1.0).unwrap_err();
            assert!(error.contains("sampling.temperature"), "{error}");
        }
        for top_p in [-0.1, 1.1, 2.0, f32::NAN, f32::INFINITY] {
            let error = read(1.0, top_p).unwrap_err();
            assert!(error.contains("sampling.top_p"), "{error}");
        }
    }
}
