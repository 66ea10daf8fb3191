//! Where to look: what `tandem up` runs, a deployment on a cluster, or addresses given by flags.

use std::path::PathBuf;

use clap::Args;
use serde_json::Value;
use tandem_secrets::{SecretFile, Token};

use super::gather::{AdminPort, Origin};
use super::record::{Missing, Side};
use crate::bench::key;
use crate::cluster::{ClusterArgs, Found, Run, find};
use crate::http::Road;
use crate::up::{self, Role, State, StateArgs, UpError};

/// What to look at, as flags say it.
#[derive(Debug, Args)]
pub struct TargetArgs {
    /// A deployment on a cluster, its processes reached by ports that the API server forwards
    #[arg(
        value_name = "NAME",
        conflicts_with_all = ["router", "router_admin", "admin_token_file", "prefills", "decodes", "ops", "dir"]
    )]
    name: Option<String>,
    /// The router's pod to look at, where the deployment on a cluster has several
    #[arg(long, value_name = "POD", requires = "name")]
    router_pod: Option<String>,
    /// The router as its clients reach it, past everything else [default: what `tandem up` runs]
    #[arg(long, value_name = "URL")]
    router: Option<String>,
    /// The router's admin port
    #[arg(long, value_name = "HOST:PORT", requires = "admin_token_file")]
    router_admin: Option<String>,
    /// The token of the router's admin port
    #[arg(long, value_name = "FILE", requires = "router_admin")]
    admin_token_file: Option<PathBuf>,
    /// A prefill's control port [default: those of what `tandem up` runs, or those that the router names]
    #[arg(long = "prefill", value_name = "HOST:PORT")]
    prefills: Vec<String>,
    /// A decode's control port [default: as with --prefill]
    #[arg(long = "decode", value_name = "HOST:PORT")]
    decodes: Vec<String>,
    /// A process's health port, whose metrics go into a capture [default: those of what `tandem up` runs]
    #[arg(long = "ops", value_name = "HOST:PORT")]
    ops: Vec<String>,
    /// Come with a key: the first of a file as the router's --api-key-file
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// The model to ask [default: the one that runs, or the first that the router lists]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    #[command(flatten)]
    state: StateArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// What to look at.
#[derive(Debug, Default)]
pub struct Target {
    pub router: Option<String>,
    pub admin: Option<Admin>,
    pub engines: Vec<(Side, String)>,
    /// Sides that should be there, and are not.
    pub missing: Vec<Missing>,
    /// Where each process shows its metrics, by its name.
    pub ops: Vec<(String, String)>,
    /// How all these are reached.
    pub road: Road,
    /// What of it only this machine knows.
    pub up: Option<UpRun>,
    /// What of it only the cluster knows.
    pub cluster: Option<Run>,
    pub key: Option<Token>,
    pub model: Option<String>,
}

/// A deployment of `tandem up`.
#[derive(Debug)]
pub struct UpRun {
    dir: PathBuf,
    pub state: State,
}

/// The router's admin port.
#[derive(Debug, Clone)]
pub struct Admin {
    pub place: String,
    pub token: Token,
}

impl TargetArgs {
    /// What is meant: a deployment on a cluster, where one is named; else addresses, or what runs here.
    pub async fn find(&self, plugin: bool) -> Result<Target, String> {
        let Some(name) = &self.name else {
            let elsewhere = self.addresses() || self.state.given();
            if self.cluster.given() || (plugin && !elsewhere) {
                return Err(
                    "a deployment on a cluster is looked at by its name: give NAME; `status` lists them".to_owned(),
                );
            }
            return self.of_machine().map_err(|error| error.to_string());
        };
        let found = find(&self.cluster, name, self.router_pod.as_deref()).await;
        let mut target = of_cluster(found.map_err(|error| error.to_string())?);
        target.key = key(self.api_key_file.as_deref())?;
        target.model = self.model.clone().or(target.model);
        Ok(target)
    }

    fn addresses(&self) -> bool {
        let router = self.router.is_some() || self.router_admin.is_some();
        router || !self.prefills.is_empty() || !self.decodes.is_empty() || !self.ops.is_empty()
    }

    /// The addresses; of a deployment that runs, where no address is given.
    fn of_machine(&self) -> Result<Target, UpError> {
        let key = key(self.api_key_file.as_deref()).map_err(UpError::Orders)?;
        let given = self.addresses();
        // who says where it is recorded means what runs there, and what else is given in its place
        let mut target = if given && !self.state.given() {
            Target::default()
        } else {
            self.of_up()?
        };
        if let Some(router) = &self.router {
            target.router = Some(router.clone());
        }
        if let (Some(place), Some(path)) = (&self.router_admin, &self.admin_token_file) {
            target.admin = Some(Admin {
                place: place.clone(),
                token: token(path.clone())?,
            });
        }
        let of = |side: Side, given: &[String]| {
            given
                .iter()
                .map(move |endpoint| (side, endpoint.clone()))
                .collect::<Vec<_>>()
        };
        let named = self.ops.iter().map(|place| (place.replace(':', "-"), place.clone()));
        target.ops.extend(named);
        target.engines.extend(of(Side::Prefill, &self.prefills));
        target.engines.extend(of(Side::Decode, &self.decodes));
        target.key = key;
        target.model = self.model.clone().or(target.model);
        Ok(target)
    }

    fn of_up(&self) -> Result<Target, UpError> {
        let dir = self.state.dir()?;
        let state = up::running(&dir)?;
        let mut target = Target {
            router: Some(up::base_url(&state)),
            model: Some(state.model.clone()),
            ..Target::default()
        };
        for process in &state.processes {
            target.ops.push((process.name.clone(), process.ops.to_string()));
            match process.role {
                Role::Prefill => target.engines.push((Side::Prefill, process.listen.to_string())),
                Role::Decode => target.engines.push((Side::Decode, process.listen.to_string())),
                Role::Router => {
                    target.admin = Some(Admin {
                        place: process.admin.to_string(),
                        token: token(up::token_file(&dir))?,
                    });
                }
            }
        }
        target.up = Some(UpRun { dir, state });
        Ok(target)
    }
}

impl Target {
    /// The router's admin port, if it is known.
    pub fn admin_port(&self) -> Option<AdminPort> {
        let origin = Origin::now();
        self.admin
            .as_ref()
            .map(|admin| AdminPort::new(admin, origin, &self.road))
    }

    /// What must be in no archive.
    pub fn secrets(&self) -> Vec<&str> {
        let admin = self.admin.as_ref().map(|admin| admin.token.text());
        admin.into_iter().chain(self.key.as_ref().map(Token::text)).collect()
    }
}

fn of_cluster(found: Found) -> Target {
    let (router, admin) = found.router.unzip();
    let of = |side: Side, places: Vec<String>| places.into_iter().map(move |place| (side, place));
    let absent = [(Side::Prefill, found.no_prefill), (Side::Decode, found.no_decode)];
    let place = found.run.place();
    let missing = absent.into_iter().filter_map(|(side, why)| {
        let place = place.clone();
        why.map(|why| Missing { side, place, why })
    });
    Target {
        router,
        admin: admin.map(|place| Admin {
            place,
            token: found.token,
        }),
        engines: of(Side::Prefill, found.prefills)
            .chain(of(Side::Decode, found.decodes))
            .collect(),
        missing: missing.collect(),
        ops: found.ops,
        model: found.model,
        road: Road::Pods(found.road),
        cluster: Some(found.run),
        ..Target::default()
    }
}

impl UpRun {
    /// What it runs.
    pub fn manifest(&self) -> Option<Value> {
        up::manifest(&self.dir)
    }
}

fn token(path: PathBuf) -> Result<Token, UpError> {
    let file = SecretFile::private("--admin-token-file", path);
    Ok(Token::parse(&file, &file.read()?)?)
}
