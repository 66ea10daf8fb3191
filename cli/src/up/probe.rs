//! Asking a child's health listener whether it is ready.

use std::net::SocketAddr;
use std::time::Duration;

use serde::Deserialize;

use crate::console::with_causes;

/// Between two questions.
const INTERVAL: Duration = Duration::from_millis(100);
/// One question.
const TIMEOUT: Duration = Duration::from_secs(2);

/// What a child says about itself; the body of its `/readyz`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Health {
    /// Percent of the model that is loaded.
    pub loading: Option<u8>,
    /// Why it is not ready.
    pub reason: Option<String>,
}

/// Asks once: none where it is ready, else what it says; an error where it does not answer.
pub async fn once(client: &reqwest::Client, ops: SocketAddr) -> Result<Option<Health>, String> {
    let url = format!("http://{ops}/readyz");
    let response = client.get(&url).timeout(TIMEOUT).send().await;
    let response = response.map_err(|error| format!("its health port does not answer: {}", with_causes(&error)))?;
    if response.status().is_success() {
        return Ok(None);
    }
    let health = response.json().await;
    health
        .map(Some)
        .map_err(|error| format!("its health port answers strangely: {}", with_causes(&error)))
}

/// Asks until the child is ready; tells `changed` what it says until then.
pub async fn until_ready(client: &reqwest::Client, ops: SocketAddr, mut changed: impl FnMut(Health)) {
    let mut last = None;
    loop {
        match once(client, ops).await {
            Ok(None) => return,
            Ok(Some(health)) if last.as_ref() != Some(&health) => {
                last = Some(health.clone());
                changed(health);
            }
            Ok(Some(_)) | Err(_) => {}
        }
        tokio::time::sleep(INTERVAL).await;
    }
}
