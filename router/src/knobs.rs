//! What can be changed while the router runs, without a lock where requests go: each takes what is in force when it comes, and
//! keeps it.

use std::time::Duration;

use clap::{Args, ValueEnum};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use crate::error::RouterError;

/// A week.
const LONGEST_MS: u64 = 7 * 24 * 3_600_000;

/// How one of several engines is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// In turn.
    RoundRobin,
    /// The less loaded of two drawn at random.
    LeastLoaded,
}

/// What happens when a prefill fails before the first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnPrefillFailure {
    /// The router tries another prefill, or the same again if there is one only.
    Retry,
    /// Decode prefills the prompt itself.
    Recompute,
    /// The request fails.
    Fail,
}

/// The knobs, as flags and as JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Args, Serialize)]
pub struct Knobs {
    /// How one of several engines is chosen.
    #[arg(long, value_enum, default_value = "least-loaded")]
    #[serde(serialize_with = "word")]
    pub policy: Policy,
    /// What happens when a prefill fails before the first token.
    #[arg(long, value_enum, default_value = "retry")]
    #[serde(serialize_with = "word")]
    pub on_prefill_failure: OnPrefillFailure,
    /// How long a request may wait for an engine with room.
    #[arg(long, default_value_t = 60_000)]
    pub queue_ms: u64,
    /// How long a request may take in all.
    #[arg(long, default_value_t = 1_800_000)]
    pub request_ms: u64,
}

impl Knobs {
    /// `queue_ms`.
    pub fn queue(&self) -> Duration {
        Duration::from_millis(self.queue_ms)
    }

    /// `request_ms`.
    pub fn request(&self) -> Duration {
        Duration::from_millis(self.request_ms)
    }

    /// May decode prefill by itself where prefill fails or is missing?
    pub fn recompute(&self) -> bool {
        self.on_prefill_failure == OnPrefillFailure::Recompute
    }

    /// Refuses what cannot work: the field's name and what is wrong.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        for (name, ms) in [("queue_ms", self.queue_ms), ("request_ms", self.request_ms)] {
            if ms == 0 {
                return Err((name, "is 0: give at least 1".to_owned()));
            }
            if ms > LONGEST_MS {
                return Err((name, format!("is {ms}: give at most {LONGEST_MS}")));
            }
        }
        Ok(())
    }

    /// Reads an order to change some of them; gives all as they are to be.
    pub fn changed(mut self, body: &[u8]) -> Result<Self, RouterError> {
        let order: Map<String, Value> =
            serde_json::from_slice(body).map_err(|error| RouterError::MalformedJson(error.to_string()))?;
        for (name, value) in &order {
            match name.as_str() {
                "policy" => self.policy = one_of(name, value)?,
                "on_prefill_failure" => self.on_prefill_failure = one_of(name, value)?,
                "queue_ms" => self.queue_ms = whole(name, value)?,
                "request_ms" => self.request_ms = whole(name, value)?,
                other => return Err(RouterError::field(other, "is no knob of the router")),
            }
        }
        self.check()
            .map_err(|(name, detail)| RouterError::field(name, detail))?;
        Ok(self)
    }
}

fn word<S: Serializer>(value: &impl ValueEnum, serializer: S) -> Result<S::Ok, S::Error> {
    let word = value.to_possible_value();
    serializer.serialize_str(word.as_ref().map_or("", |word| word.get_name()))
}

fn one_of<T: ValueEnum>(name: &str, value: &Value) -> Result<T, RouterError> {
    let named = value.as_str().and_then(|word| T::from_str(word, false).ok());
    named.ok_or_else(|| {
        let words: Vec<_> = T::value_variants()
            .iter()
            .filter_map(|variant| Some(variant.to_possible_value()?.get_name().to_owned()))
            .collect();
        RouterError::field(name, format!("{value} is none of {}", words.join(", ")))
    })
}

fn whole(name: &str, value: &Value) -> Result<u64, RouterError> {
    let whole = value.as_u64();
    whole.ok_or_else(|| RouterError::field(name, format!("{value} is no whole number of milliseconds")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOBS: Knobs = Knobs {
        policy: Policy::LeastLoaded,
        on_prefill_failure: OnPrefillFailure::Retry,
        queue_ms: 60_000,
        request_ms: 1_800_000,
    };

    #[test]
    fn an_order_changes_what_it_does_not_name() {
        let changed = KNOBS.changed(br#"{"policy": "round-robin", "queue_ms": 5}"#).unwrap();
        let expected = Knobs {
            policy: Policy::RoundRobin,
            queue_ms: 5,
            ..KNOBS
        };
        assert_eq!(changed, expected);
        assert_eq!(KNOBS.changed(b"{}").unwrap(), KNOBS);
    }

    #[test]
    fn what_is_shown_cannot_be_ordered() {
        let changed = Knobs {
            policy: Policy::RoundRobin,
            on_prefill_failure: OnPrefillFailure::Recompute,
            queue_ms: 7,
            request_ms: 8,
        };
        let shown = serde_json::to_vec(&changed).unwrap();
        assert_eq!(KNOBS.changed(&shown).unwrap(), changed);
    }

    #[test]
    fn a_bad_value_is_taken_or_not_refused_by_its_name() {
        for (order, named) in [
            (r#"{"policy": "LeastLoaded"}"#, "policy"),
            (r#"{"policy": 1}"#, "policy"),
            (r#"{"on_prefill_failure": "never"}"#, "on_prefill_failure"),
            (r#"{"queue_ms": 0}"#, "queue_ms"),
            (r#"{"queue_ms": -1}"#, "queue_ms"),
            (r#"{"queue_ms": 604800001}"#, "queue_ms"),
            (r#"{"request_ms": 1.5}"#, "request_ms"),
            (r#"{"request_ms": "1"}"#, "request_ms"),
            (r#"{"drain_ms": 1}"#, "drain_ms"),
        ] {
            let error = KNOBS.changed(order.as_bytes()).unwrap_err();
            assert_eq!(error.param(), Some(named), "{order}: {error}");
        }
        assert!(matches!(KNOBS.changed(b"[]"), Err(RouterError::MalformedJson(_))));
    }
}
