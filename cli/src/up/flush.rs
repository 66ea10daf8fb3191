//! `tandem flush`: an order to the running router, with the token of this deployment.

use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use tandem_secrets::{SecretFile, Token};

use super::slots::Role;
use super::{UpError, state};
use crate::console::with_causes;

/// The router gives each engine less than this.
const TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Deserialize)]
struct Told {
    engines: Vec<Engine>,
}

#[derive(Deserialize)]
struct Engine {
    side: String,
    endpoint: String,
    freed_pages: Option<u32>,
    error: Option<String>,
}

/// Tells the router to drop all prefix caches and prints what each engine did.
pub async fn flush(dir: &Path) -> Result<(), UpError> {
    let running = state::running(dir)?;
    let Some(router) = running.processes.iter().find(|process| process.role == Role::Router) else {
        return Err(UpError::Orders("no router runs".into()));
    };
    let file = SecretFile::private("admin token", state::token_file(dir));
    let token = Token::parse(&file, &file.read()?)?;
    let url = format!("http://{}/admin/flush", router.admin);
    let told: Told = order(&url, &token)
        .await
        .map_err(|error| UpError::Orders(format!("{url}: {}", with_causes(&error))))?;
    let mut out = std::io::stdout();
    let mut failed = Vec::new();
    for engine in told.engines {
        let name = format!("{} {}", engine.side, engine.endpoint);
        match (engine.freed_pages, engine.error) {
            (Some(pages), None) => {
                let _ = writeln!(out, "{name}: {pages} pages freed");
            }
            (_, error) => failed.push(format!("{name}: {}", error.unwrap_or_else(|| "no answer".into()))),
        }
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(UpError::Orders(failed.join("\n")))
    }
}

async fn order(url: &str, token: &Token) -> reqwest::Result<Told> {
    let client = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build()?;
    let request = client.post(url).header("authorization", token.authorization());
    request.send().await?.json().await
}
