//! Whether an object in the cluster is what was rendered: nothing is written where it is.
//!
//! Server-side apply alone would do, but a request that changes nothing is a request all the same, and a settled deployment
//! makes none. So each child carries the digest of what was last applied to it, and what is there is compared with what
//! was rendered: another digest is a change of ours, a difference below the same digest is somebody else's.

mod quantity;

use std::fmt::Write as _;

use serde_json::Value;
use sha2::{Digest, Sha256};

/// The annotation with the digest of what was last applied.
pub const APPLIED: &str = "tandem.dev/applied";

/// What has to be done for one child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// It is as it should be.
    Nothing,
    /// It is not there.
    Create,
    /// Something else was rendered than was applied last.
    Update,
    /// What was applied last is not there any more: somebody changed it.
    Repair,
    /// An object of this name is somebody else's; it is left alone.
    Foreign,
}

/// Compares an object in the cluster with what was rendered for it.
pub fn need(live: Option<&Value>, wanted: &Value) -> Need {
    let Some(live) = live else {
        return Need::Create;
    };
    if !same_owner(live, wanted) {
        Need::Foreign
    } else if live["metadata"]["annotations"][APPLIED] != digest(wanted) {
        Need::Update
    } else if covers(live, wanted) {
        Need::Nothing
    } else {
        Need::Repair
    }
}

/// What is sent: what was rendered, with its digest.
pub fn signed(wanted: &Value) -> Value {
    let mut signed = wanted.clone();
    signed["metadata"]["annotations"][APPLIED] = digest(wanted).into();
    signed
}

/// Ten bytes of SHA-256 in hex: enough to tell two renderings of one object apart.
fn digest(wanted: &Value) -> String {
    let mut wanted = wanted.clone();
    // a feature of serde_json that any crate may switch on decides whether they are sorted already
    wanted.sort_all_objects();
    let hash = Sha256::digest(wanted.to_string());
    hash.iter().take(10).fold(String::new(), |mut hex, byte| {
        // writing to a string cannot fail
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

fn same_owner(live: &Value, wanted: &Value) -> bool {
    let uid = &wanted["metadata"]["ownerReferences"][0]["uid"];
    let owners = live["metadata"]["ownerReferences"].as_array();
    owners.is_some_and(|owners| owners.iter().any(|owner| owner["uid"] == *uid))
}

/// Is all that is wanted there? Fields and items that others have added do not matter, and what is empty the API server
/// leaves out.
fn covers(live: &Value, wanted: &Value) -> bool {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => wanted.iter().all(|(key, wanted)| match live.get(key) {
            Some(live) if quantity::FIELDS.contains(&key.as_str()) => quantity::same(live, wanted),
            Some(live) => covers(live, wanted),
            None => empty(wanted),
        }),
        (Value::Array(live), Value::Array(wanted)) => {
            wanted.iter().all(|wanted| live.iter().any(|live| covers(live, wanted)))
        }
        (live, wanted) => live == wanted,
    }
}

fn empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(value) => !value,
        Value::Number(number) => number.as_i64() == Some(0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}
