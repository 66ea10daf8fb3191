//! Stored revisions: a spec with all that was resolved for it, and the pod templates that were rendered from it, in a
//! `ControllerRevision`.
//!
//! A template is stored as text, so that whatever lies between writes the same bytes back.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tandem_crds::Role;
use tandem_plan::Revision;

use crate::render::meta::Owner;
use crate::render::{engine, router};

/// A revision with the templates of its roles.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Stored {
    /// What the planner knows.
    pub revision: Revision,
    /// The pod template of each role, as JSON.
    pub templates: BTreeMap<Role, String>,
}

/// The name of a stored revision.
pub fn name(owner: &Owner<'_>, id: &str) -> String {
    owner.child(id)
}

impl Stored {
    /// Renders a new revision. A role that an earlier one has as well keeps the template that was stored then: another
    /// operator may render it otherwise.
    pub fn render(owner: &Owner<'_>, revision: &Revision, earlier: &[Self]) -> Self {
        let template = |role: Role| {
            let same = |stored: &&Self| stored.revision.hash(role) == revision.hash(role);
            let kept = earlier
                .iter()
                .rev()
                .find(same)
                .and_then(|stored| stored.templates.get(&role));
            let text = kept.cloned().unwrap_or_else(|| rendered(owner, revision, role));
            (role, text)
        };
        Self {
            revision: revision.clone(),
            templates: Role::ALL.into_iter().map(template).collect(),
        }
    }

    /// The template of a role, as it was stored.
    pub fn template(&self, role: Role) -> Result<Value, serde_json::Error> {
        serde_json::from_str(self.templates.get(&role).map_or("", String::as_str))
    }

    /// The object that it is stored as; `number` counts up.
    pub fn object(&self, owner: &Owner<'_>, number: i64) -> ControllerRevision {
        ControllerRevision {
            metadata: owner.meta(name(owner, &self.revision.id), None),
            revision: number,
            data: Some(RawExtension(crate::render::json(self))),
        }
    }

    /// Reads an object back, with its number.
    pub fn read(object: &Value) -> Result<(i64, Self), serde_json::Error> {
        let number = object["revision"].as_i64().unwrap_or(0);
        Ok((number, Self::deserialize(&object["data"])?))
    }
}

fn rendered(owner: &Owner<'_>, revision: &Revision, role: Role) -> String {
    let image = revision.role(role).map_or("", |role| role.image.as_str());
    let (hash, contract) = (revision.hash(role), revision.contract.as_str());
    let template = match role {
        Role::Prefill | Role::Decode => {
            let of = engine::Revision {
                role,
                hash,
                contract,
                image,
            };
            engine::template(owner, &revision.spec, of)
        }
        Role::Router => router::template(owner, &revision.spec, router::Revision { hash, contract, image }),
    };
    crate::render::json(template).to_string()
}
