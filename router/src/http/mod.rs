//! The HTTP side: sockets, paths, bodies.
//!
//! | room | purpose |
//! | --- | --- |
//! | [`server`] | accepts connections, bounds them, drains |
//! | [`requests`] | the requests of one connection, which costs little between them |
//! | [`socket`] | a connection whose peer must go on reading |
//! | [`tls`] | certificates, and the handshake |
//! | [`routes`] | paths and methods |
//! | [`generate`] | the two generating endpoints, whole and streamed |
//! | [`probe`] | a token through both legs |
//! | [`body`] | bodies of requests and answers |
//! | [`account`] | what is written down about a request, also when its client leaves |

pub mod account;
pub mod body;
pub mod generate;
pub mod probe;
pub mod requests;
pub mod routes;
pub mod server;
pub mod socket;
pub mod tls;

use std::sync::Arc;

use tandem_secrets::{Keys, Watched};
use tandem_telemetry::{Metrics as Exposition, Readiness, Traces};
use tokio_util::sync::CancellationToken;

use crate::api::prepare::{Limits, TextWork};
use crate::config::Config;
use crate::engines::Side;
use crate::evidence::{Badges, Registry};
use crate::flow::Flow;
use body::Budget;
use probe::Probe;

/// What every connection shares.
#[derive(Debug)]
pub struct App {
    /// As started.
    pub config: Config,
    /// What a request to the API must have one of; none: nothing.
    pub keys: Option<Watched<Keys>>,
    /// The way to tokens.
    pub flow: Arc<Flow>,
    /// Template and tokenizer.
    pub text: TextWork,
    /// What all bodies may hold together.
    pub bodies: Budget,
    /// `/health_generate`.
    pub probe: Probe,
    /// `/metrics`.
    pub exposition: Exposition,
    /// `/readyz`.
    pub readiness: Readiness,
    /// The connections, and where requests stand.
    pub evidence: Arc<Registry>,
    /// What marks a probe.
    pub badges: Badges,
    /// Where spans begin.
    pub traces: Traces,
    /// Cancelled when a drain has run out of time: whatever still runs ends with an error.
    pub cut: CancellationToken,
    /// When this process began to serve, seconds since the epoch.
    pub started: u64,
}

impl App {
    /// What requests are checked against now.
    pub fn limits(&self) -> Limits {
        let engines = self.flow.engines.longest(Side::Decode);
        let own = self.config.max_length_tokens;
        Limits {
            model: self.config.model_name.clone(),
            max_length_tokens: engines.zip(own).map(|(a, b)| a.min(b)).or(engines).or(own),
            knobs: self.flow.knobs(),
        }
    }
}
