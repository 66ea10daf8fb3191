//! Kubernetes quantities, which the API server writes in its own way: `0.5` becomes `500m`.

use serde_json::Value;

/// Fields that hold quantities, or maps of them.
pub const FIELDS: [&str; 3] = ["limits", "requests", "sizeLimit"];

/// Are all quantities that are wanted there?
pub fn same(live: &Value, wanted: &Value) -> bool {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => wanted
            .iter()
            .all(|(key, wanted)| live.get(key).is_some_and(|live| same(live, wanted))),
        (Value::String(live), Value::String(wanted)) => {
            live == wanted || billionths(live).is_some_and(|live| billionths(wanted) == Some(live))
        }
        (live, wanted) => live == wanted,
    }
}

/// A quantity in billionths, rounded up; none where it is no quantity, or too large for a machine.
fn billionths(text: &str) -> Option<u128> {
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let unit: u128 = match suffix {
        "n" => 1,
        "u" => 1000,
        "m" => 1_000_000,
        "" => BILLION,
        _ => BILLION.checked_mul(multiple(suffix)?)?,
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    let digits = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let whole = whole.parse::<u128>().ok()?.checked_mul(unit)?;
    let part = fraction.parse::<u128>().ok()?.checked_mul(unit)?.div_ceil(digits);
    whole.checked_add(part)
}

const BILLION: u128 = 1_000_000_000;

/// `k` is 1000, `Ki` is 1024, and so on.
fn multiple(suffix: &str) -> Option<u128> {
    let (base, letters, letter) = match suffix.strip_suffix('i') {
        Some(letter) => (1024_u128, "KMGTPE", letter),
        None => (1000, "kMGTPE", suffix),
    };
    let power = letters.find(letter).filter(|_| letter.len() == 1)?;
    base.checked_pow(power as u32 + 1)
}
