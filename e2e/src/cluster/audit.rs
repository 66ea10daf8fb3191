//! What the API server was asked, from its audit log.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// One request that was answered.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`.
    pub verb: String,
    /// By whom.
    pub user: Caller,
    /// What of; none for requests of no object, such as `/version`.
    #[serde(default)]
    pub object_ref: Object,
    /// How it was answered.
    #[serde(default)]
    pub response_status: Answer,
    /// When it came, in UTC with microseconds: what is later is greater as text. The answer may be much later.
    pub request_received_timestamp: String,
    stage: String,
}

/// Who asked.
#[derive(Debug, Clone, Deserialize)]
pub struct Caller {
    /// A service account's is `system:serviceaccount:NAMESPACE:NAME`; empty for one that left before it was known.
    #[serde(default)]
    pub username: String,
}

/// What was asked of.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Object {
    /// The plural, for example `deployments`.
    pub resource: String,
    /// For example `status`.
    pub subresource: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// How it was answered.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Answer {
    /// The HTTP status.
    #[serde(default)]
    pub code: u16,
}

impl Request {
    /// Would it change something? A refused write counts as well: it was asked for.
    pub fn writes(&self) -> bool {
        matches!(
            self.verb.as_str(),
            "create" | "update" | "patch" | "delete" | "deletecollection"
        )
    }

    /// For messages.
    pub fn summary(&self) -> String {
        let object = &self.object_ref;
        format!(
            "{} {}/{} {} -> {}",
            self.verb, object.resource, object.subresource, object.name, self.response_status.code
        )
    }
}

/// The audit log.
#[derive(Debug)]
pub struct Audit {
    path: PathBuf,
}

impl Audit {
    /// Of an API server's log.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    /// The requests of one user that were answered so far, oldest first. A watch is one once it has begun to answer.
    pub fn of(&self, user: &str) -> Vec<Request> {
        let log = std::fs::read_to_string(&self.path).expect("the audit log");
        let whole = log.rfind('\n').map_or("", |end| &log[..end]);
        whole
            .lines()
            .map(|line| serde_json::from_str::<Request>(line).unwrap_or_else(|error| panic!("{error}: {line}")))
            .filter(|request| request.user.username == user)
            .filter(|request| {
                request.stage == "ResponseStarted" || (request.stage == "ResponseComplete" && request.verb != "watch")
            })
            .collect()
    }

    /// Its writes among them.
    pub fn writes_of(&self, user: &str) -> Vec<Request> {
        let mut requests = self.of(user);
        requests.retain(Request::writes);
        requests
    }
}
