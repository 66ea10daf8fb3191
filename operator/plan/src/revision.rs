//! A revision: a spec with everything that was resolved for it, stored once and never changed.

use serde::{Deserialize, Serialize};
use tandem_crds::{Inputs, PDDeploymentSpec, RestartRoles, RestartScope, Role};

use crate::hash;

/// The images that the operator takes where the spec names none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefaultImages {
    /// Of prefill and decode.
    pub engine: String,
    /// Of the router.
    pub router: String,
}

impl DefaultImages {
    fn of(&self, role: Role) -> &str {
        match role {
            Role::Prefill | Role::Decode => &self.engine,
            Role::Router => &self.router,
        }
    }
}

/// What a role's pods are made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RoleRevision {
    /// The role.
    pub role: Role,
    /// Names the workload: the role's first letter and a hash of all that its pods are made of.
    pub hash: String,
    /// The image, resolved.
    pub image: String,
    /// The restart token that this role was last restarted by; empty before the first.
    pub restart: String,
    /// The hash of what its processes take while they run.
    pub knobs: String,
}

/// A spec with its images resolved. The same content has the same id, so that storing one twice is storing it once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Revision {
    /// `TARGET-VARIANT`: the hash of the spec's inputs, and one of images and restarts.
    pub id: String,
    /// What prefill and decode have to agree on, as far as the spec says it.
    pub contract: String,
    /// Prefill, decode and router.
    pub roles: Vec<RoleRevision>,
    /// The spec as it was admitted.
    pub spec: PDDeploymentSpec,
}

impl Revision {
    /// The revision that a spec asks for, where `base` runs. A role whose inputs are those of `base` keeps its image and
    /// its restart, whatever the operator's default is by now; `restart` names a token and the roles that it restarts.
    pub fn admit(
        spec: &PDDeploymentSpec,
        images: &DefaultImages,
        base: Option<&Self>,
        restart: Option<(&str, &[Role])>,
    ) -> Self {
        let inputs = Inputs::of(spec);
        let before = base.map(|base| Inputs::of(&base.spec));
        let asked = |role| {
            restart
                .filter(|(_, roles)| roles.contains(&role))
                .map(|(token, _)| token)
        };
        let unchanged = |role| {
            let same = |before: &Inputs| before.role(role, "", "") == inputs.role(role, "", "");
            let image = |base: &Self| image_of(&base.spec, role) == image_of(spec, role);
            before.as_ref().is_some_and(same) && base.is_some_and(image)
        };
        // With the full scope, one role that restarts takes the others with it.
        let full = spec.rollout.restart_scope == RestartScope::Full
            && base.is_some()
            && Role::ALL
                .into_iter()
                .any(|role| asked(role).is_some() || !unchanged(role));
        let target = inputs.target();
        let roles = Role::ALL.into_iter().map(|role| {
            let old = base.and_then(|base| base.role(role));
            let keeps = unchanged(role) && asked(role).is_none();
            let image = match (image_of(spec, role), old) {
                ("", Some(old)) if keeps => &old.image,
                ("", _) => images.of(role),
                (given, _) => given,
            };
            let old_restart = old.map_or("", |old| &old.restart);
            let restart = asked(role).unwrap_or(if full && keeps { &target } else { old_restart });
            RoleRevision {
                role,
                hash: inputs.role(role, image, restart),
                image: image.to_owned(),
                restart: restart.to_owned(),
                knobs: inputs.knobs(role).hash(),
            }
        });
        let roles: Vec<RoleRevision> = roles.collect();
        let variant = hash::short(
            roles
                .iter()
                .flat_map(|role| [role.image.as_str(), role.restart.as_str()]),
        );
        Self {
            id: format!("{target}-{variant}"),
            contract: inputs.contract(),
            roles,
            spec: spec.clone(),
        }
    }

    /// One role of it.
    pub fn role(&self, role: Role) -> Option<&RoleRevision> {
        self.roles.iter().find(|revision| revision.role == role)
    }

    /// The name of a role's workload; empty for a role that a stored revision lacks.
    pub fn hash(&self, role: Role) -> &str {
        self.role(role).map_or("", |revision| &revision.hash)
    }

    /// How many pods of a role it wants.
    pub fn replicas(&self, role: Role) -> i32 {
        match role {
            Role::Prefill => self.spec.prefill.replicas,
            Role::Decode => self.spec.decode.replicas,
            Role::Router => self.spec.router.replicas,
        }
    }

    /// GPUs of one pod of a role.
    pub fn gpus(&self, role: Role) -> i32 {
        match role {
            Role::Prefill => self.spec.prefill.gpus_per_replica,
            Role::Decode => self.spec.decode.gpus_per_replica,
            Role::Router => 0,
        }
    }

    /// The hash of what a role's processes take while they run.
    pub fn knobs(&self, role: Role) -> &str {
        self.role(role).map_or("", |revision| &revision.knobs)
    }

    /// The roles whose pods differ from another revision's; all where there is none.
    pub fn restarts(&self, from: Option<&Self>) -> Vec<Role> {
        let differs = |role: &Role| from.is_none_or(|from| from.hash(*role) != self.hash(*role));
        Role::ALL.into_iter().filter(differs).collect()
    }
}

/// The part of a revision's id that is approved: the hash of the spec's inputs.
pub fn target_of(id: &str) -> &str {
    id.rsplit_once('-').map_or(id, |(target, _)| target)
}

/// The roles that a new restart token restarts.
pub fn restarted_by(spec: &PDDeploymentSpec, images: &DefaultImages, running: Option<&Revision>) -> Vec<Role> {
    let outdated = |role: &Role| {
        let old = running.and_then(|running| running.role(*role));
        image_of(spec, *role).is_empty() && old.is_some_and(|old| old.image != images.of(*role))
    };
    match spec.restart.scope {
        RestartRoles::Full => Role::ALL.to_vec(),
        RestartRoles::DecodeOnly => vec![Role::Decode],
        RestartRoles::Auto => {
            let outdated: Vec<Role> = Role::ALL.into_iter().filter(outdated).collect();
            if outdated.is_empty() {
                Role::ALL.to_vec()
            } else {
                outdated
            }
        }
    }
}

fn image_of(spec: &PDDeploymentSpec, role: Role) -> &str {
    match role {
        Role::Prefill => &spec.prefill.image,
        Role::Decode => &spec.decode.image,
        Role::Router => &spec.router.image,
    }
}
