//! How long a probe may take.

use std::time::Duration;

use serde::Deserialize;

use crate::error::RouterError;

/// A probe of more is none.
const LONGEST: Duration = Duration::from_hours(24);

/// `{"timeout_ms": N}`.
pub fn read(body: &[u8]) -> Result<Duration, RouterError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Body {
        timeout_ms: u64,
    }
    let body: Body = serde_json::from_slice(body).map_err(|error| RouterError::MalformedJson(error.to_string()))?;
    let limit = Duration::from_millis(body.timeout_ms);
    if limit.is_zero() || limit > LONGEST {
        let detail = format!("{} is out of range: give 1 to {}", body.timeout_ms, LONGEST.as_millis());
        return Err(RouterError::field("timeout_ms", detail));
    }
    Ok(limit)
}
