//! A deployment on a cluster: what `kubectl tandem` shows and asks for, with kubectl's own flags.
//!
//! | module | holds |
//! | --- | --- |
//! | [`connect`] | the flags, the API server, and what is said where it refuses |
//! | [`deployment`] | a `PDDeployment` as the API server has it |
//! | [`status`], [`list`] | how one stands, how all of a namespace stand |
//! | [`history`] | the changes that ended |
//! | [`plan`], [`merge`] | what a file would change, checked by the API server |
//! | [`restart`], [`approve`] | what asks the operator for something |
//! | [`follow`] | a change, until it has ended |
//! | [`pods`], [`forward`] | the processes, reached by ports that the API server forwards |
//! | [`table`] | columns and ages |

mod approve;
mod connect;
mod deployment;
mod follow;
mod forward;
mod history;
pub mod list;
mod merge;
pub mod plan;
mod pods;
mod restart;
mod status;
mod table;

use std::process::ExitCode;

pub use approve::{ApproveArgs, approve};
pub use connect::{ClusterArgs, ClusterError};
pub use forward::{Forwarded, Pods};
pub use history::{HistoryArgs, history};
pub use list::list;
pub use pods::{Found, Run, find};
pub use restart::{RestartArgs, restart};
pub use status::{show, watch};

use crate::console;
use crate::up::StateArgs;

/// A change goes on, or pods come back.
pub const MOVING: u8 = 3;
/// Nothing moves until somebody acts.
pub const STUCK: u8 = 4;
/// Another change took the place of the one that was waited for.
pub const OVERTAKEN: u8 = 5;
/// The arguments are wrong.
pub const USAGE: u8 = 2;

/// What a command is about that can be about either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// What `tandem up` runs here.
    Machine,
    /// A deployment of a cluster.
    Cluster,
}

impl Place {
    /// By what is given: a name or a flag of kubectl's means a cluster, `--state-dir` this machine. Where nothing says it,
    /// `kubectl tandem` means a cluster and `tandem` this machine.
    ///
    /// # Errors
    /// Both are given.
    pub fn of(named: bool, cluster: &ClusterArgs, state: &StateArgs, plugin: bool) -> Result<Self, String> {
        match (named || cluster.given(), state.given()) {
            (true, true) => Err(
                "--state-dir is about this machine, NAME and the flags of kubectl are about a cluster: give one of them"
                    .to_owned(),
            ),
            (cluster, machine) if cluster || (plugin && !machine) => Ok(Self::Cluster),
            _ => Ok(Self::Machine),
        }
    }
}

/// Says what went wrong, if anything did.
pub fn finish(result: Result<ExitCode, ClusterError>) -> ExitCode {
    result.unwrap_or_else(|error| {
        console::error(&error.to_string());
        ExitCode::FAILURE
    })
}
