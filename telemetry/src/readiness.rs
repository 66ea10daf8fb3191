//! What a process says about itself.

use std::fmt::Write as _;

use tokio::sync::watch;

/// Whether the process can take work, and if not, why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// The model is being loaded.
    Loading {
        /// How much is done, 0 to 100.
        percent: u8,
    },
    /// Up, but something that can pass keeps it from serving, for example no engine is reachable.
    Waiting {
        /// What is missing, for people.
        reason: String,
    },
    /// Takes work.
    Ready,
    /// Is to be reached, but what it needs for its work is gone: it tells so to whoever asks, which a process that nobody
    /// reaches could not.
    Degraded {
        /// What is missing, for people.
        reason: String,
    },
    /// Finishes what it has and takes nothing new. Only `Failed` may follow.
    Draining,
    /// Cannot serve and will not recover by itself. Terminal.
    Failed {
        /// What failed, for people.
        reason: String,
    },
}

impl State {
    fn may_become(&self, next: &Self) -> bool {
        match self {
            Self::Loading { .. } | Self::Waiting { .. } | Self::Ready | Self::Degraded { .. } => true,
            Self::Draining => matches!(next, Self::Failed { .. }),
            Self::Failed { .. } => false,
        }
    }

    /// Is it to be reached? What `/readyz` answers.
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready | Self::Degraded { .. })
    }

    pub(crate) fn is_alive(&self) -> bool {
        !matches!(self, Self::Failed { .. })
    }

    /// The body of `/readyz` and `/livez`.
    pub fn to_json(&self) -> String {
        let (status, loading, reason) = match self {
            Self::Loading { percent } => ("loading", Some(*percent), None),
            Self::Waiting { reason } => ("waiting", None, Some(reason)),
            Self::Ready => ("ready", None, None),
            Self::Degraded { reason } => ("degraded", None, Some(reason)),
            Self::Draining => ("draining", None, None),
            Self::Failed { reason } => ("failed", None, Some(reason)),
        };
        let mut json = format!("{{\"status\":\"{status}\"");
        if let Some(percent) = loading {
            let _ = write!(json, ",\"loading\":{percent}");
        }
        if let Some(reason) = reason {
            let _ = write!(json, ",\"reason\":{}", serde_json::Value::from(reason.as_str()));
        }
        json.push('}');
        json
    }
}

/// A handle on the process's [`State`]: cheap to clone, set from any thread, watched by any task.
#[derive(Debug, Clone)]
pub struct Readiness {
    state: watch::Sender<State>,
}

impl Default for Readiness {
    /// Starts as `Loading { percent: 0 }`.
    fn default() -> Self {
        Self {
            state: watch::Sender::new(State::Loading { percent: 0 }),
        }
    }
}

impl Readiness {
    /// Moves to `next` and says whether it did: `Draining` gives way only to `Failed`, `Failed` to nothing.
    pub fn set(&self, next: State) -> bool {
        let mut moved = false;
        self.state.send_if_modified(|state| {
            moved = state.may_become(&next);
            let changed = moved && *state != next;
            if changed {
                *state = next;
            }
            changed
        });
        moved
    }

    /// The state now.
    pub fn get(&self) -> State {
        self.state.borrow().clone()
    }

    /// Sees each later change (the latest, if several happen at once).
    pub fn subscribe(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }
}
