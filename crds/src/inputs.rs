//! A spec as its inputs, and the hashes of them.
//!
//! Hashed are the fields that are not at their default, by path, as canonical JSON: a later version that has more fields,
//! or that writes them in another order, comes to the same hashes. Rendered pods are never hashed.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::LazyLock;

use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::class::{Class, class};
use crate::spec::{KvCache, Model, ModelSource, PDDeploymentSpec, PvcSource};
use crate::status::{Change, Role};

/// The bound of a value in [`Change`], in characters.
const MAX_SHOWN: usize = 256;

/// Every field of a spec by its path, as canonical JSON, defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inputs(BTreeMap<String, String>);

/// The values of a role's hot fields, by path below `spec`, as canonical JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Knobs(pub BTreeMap<String, String>);

impl Knobs {
    /// `h-` and ten hex digits.
    pub fn hash(&self) -> String {
        format!("h-{}", hash("knobs", self.0.iter(), &[]))
    }
}

static DEFAULTS: LazyLock<Inputs> = LazyLock::new(|| {
    Inputs::of(&PDDeploymentSpec {
        model: Model {
            name: String::new(),
            source: ModelSource {
                pvc: PvcSource {
                    claim_name: String::new(),
                    path: String::new(),
                },
            },
            revision: String::new(),
            max_length_tokens: None,
        },
        kv_cache: KvCache::default(),
        gpus: crate::spec::Gpus::default(),
        prefill: crate::role::EngineRole::default(),
        decode: crate::role::EngineRole::default(),
        router: crate::spec::Router::default(),
        transfer: crate::spec::Transfer::default(),
        timeouts: crate::spec::Timeouts::default(),
        rollout: crate::rollout::Rollout::default(),
        restart: crate::rollout::Restart::default(),
        history_limit: crate::defaults::history_limit(),
    })
});

impl Inputs {
    /// The inputs of a spec.
    pub fn of(spec: &PDDeploymentSpec) -> Self {
        #[expect(
            clippy::expect_used,
            reason = "the types have string keys only and no float, so that nothing can fail"
        )]
        let value = serde_json::to_value(spec).expect("a spec is JSON");
        let mut fields = BTreeMap::new();
        flatten("", &value, &mut fields);
        Self(fields)
    }

    /// What the spec says of what the handshake has to agree on: `k-` and ten hex digits.
    pub fn contract(&self) -> String {
        format!("k-{}", self.hash("contract", |class| class == Class::Contract, &[]))
    }

    /// All that a process sees, and the number of processes: ten hex digits. Another one is another target.
    pub fn target(&self) -> String {
        self.hash("target", |class| class != Class::Operator, &[])
    }

    /// What a role's pods are made of: the role's first letter, `-` and ten hex digits.
    ///
    /// `image` is the one resolved for it, and stands in the place of the spec's; `restart` is the token by which the role
    /// was last restarted, or empty.
    pub fn role(&self, role: Role, image: &str, restart: &str) -> String {
        let of_role = |class| match class {
            Class::Contract => true,
            Class::Restart(roles) => roles.contains(&role),
            _ => false,
        };
        let spec_image = format!("{}.image", role.field());
        let inputs: BTreeMap<_, _> = self.0.iter().filter(|(path, _)| **path != spec_image).collect();
        let hash = hash_of(
            role.field(),
            inputs.into_iter(),
            of_role,
            &[("image", image), ("restart", restart)],
        );
        format!("{}-{hash}", &role.field()[..1])
    }

    /// What a role's processes take while they run.
    pub fn knobs(&self, role: Role) -> Knobs {
        let hot = |path: &str| matches!(class(path), Some(Class::Hot(roles)) if roles.contains(&role));
        let fields = self.0.iter().filter(|(path, _)| hot(path));
        Knobs(fields.map(|(path, value)| (path.clone(), value.clone())).collect())
    }

    /// The fields that differ and that a process sees, in the order of their paths.
    pub fn changes(&self, from: &Self) -> Vec<Change> {
        let mut paths: Vec<&String> = self.0.keys().chain(from.0.keys()).collect();
        paths.sort_unstable();
        paths.dedup();
        let seen = |path: &str| class(path).is_some_and(|class| class != Class::Operator);
        let differs = |path: &&String| seen(path) && self.0.get(*path) != from.0.get(*path);
        let change = |path: &String| Change {
            path: path.clone(),
            from: shown(from.0.get(path)),
            to: shown(self.0.get(path)),
        };
        paths.into_iter().filter(differs).map(change).collect()
    }

    fn hash(&self, of: &str, include: impl Fn(Class) -> bool, more: &[(&str, &str)]) -> String {
        hash_of(of, self.0.iter(), include, more)
    }
}

fn hash_of<'a>(
    of: &str,
    inputs: impl Iterator<Item = (&'a String, &'a String)>,
    include: impl Fn(Class) -> bool,
    more: &[(&str, &str)],
) -> String {
    let included = inputs.filter(|(path, value)| {
        let at_default = DEFAULTS.0.get(*path) == Some(*value);
        !at_default && class(path).is_some_and(&include)
    });
    hash(of, included, more)
}

/// Ten hex digits of SHA-256 over what is hashed and each path and value, all with their length.
fn hash<'a>(of: &str, fields: impl Iterator<Item = (&'a String, &'a String)>, more: &[(&str, &str)]) -> String {
    let mut hasher = Sha256::new();
    let mut add = |text: &str| {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text);
    };
    add(of);
    for (path, value) in fields {
        add(path);
        add(value);
    }
    for (name, value) in more {
        add(name);
        add(value);
    }
    hasher.finalize()[..5].iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Objects into paths; what is null or an empty object or list is not there.
fn flatten(path: &str, value: &Value, into: &mut BTreeMap<String, String>) {
    match value {
        Value::Null => {}
        Value::Array(items) if items.is_empty() => {}
        Value::Object(fields) => {
            for (name, value) in fields {
                let below = if path.is_empty() {
                    name.clone()
                } else {
                    format!("{path}.{name}")
                };
                flatten(&below, value, into);
            }
        }
        other => {
            into.insert(path.to_owned(), canonical(other));
        }
    }
}

/// JSON with sorted keys and without nulls.
fn canonical(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(canonical).collect::<Vec<_>>().join(",")),
        Value::Object(fields) => {
            let sorted: BTreeMap<_, _> = fields.iter().filter(|(_, value)| !value.is_null()).collect();
            let fields = sorted.into_iter();
            let fields = fields.map(|(name, value)| format!("{}:{}", Value::from(name.as_str()), canonical(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
        }
        scalar => scalar.to_string(),
    }
}

/// A value for people: without quotes, cut off where it is long.
fn shown(value: Option<&String>) -> String {
    let text = match value.map(|json| serde_json::from_str(json)) {
        None => String::new(),
        Some(Ok(Value::String(text))) => text,
        Some(_) => value.cloned().unwrap_or_default(),
    };
    if text.chars().count() <= MAX_SHOWN {
        return text;
    }
    text.chars().take(MAX_SHOWN).chain("…".chars()).collect()
}
