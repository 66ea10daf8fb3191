//! What marks requests as probes: how long it is asked for.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::RouterError;
use crate::evidence::badge::{BADGE, LONGEST};

/// `POST /admin/badge`.
#[derive(Debug, Serialize)]
pub struct Drawn<'a> {
    /// For the header of probes.
    pub badge: &'a str,
}

/// `{"seconds": N}`.
pub fn read(body: &[u8]) -> Result<Duration, RouterError> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Body {
        seconds: u64,
    }
    let body: Body = serde_json::from_slice(body).map_err(|error| RouterError::MalformedJson(error.to_string()))?;
    let time = Duration::from_secs(body.seconds);
    if time.is_zero() || time > LONGEST {
        let detail = format!(
            "{} is not 1 to {}: for so long {BADGE} marks a probe",
            body.seconds,
            LONGEST.as_secs()
        );
        return Err(RouterError::field("seconds", detail));
    }
    Ok(time)
}
