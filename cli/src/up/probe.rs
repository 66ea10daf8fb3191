//! Asking a child's health listener whether it is ready.

use std::net::SocketAddr;
use std::time::Duration;

use serde::Deserialize;

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

/// Asks until the child is ready; tells `changed` what it says until then.
pub async fn until_ready(client: &reqwest::Client, ops: SocketAddr, mut changed: impl FnMut(Health)) {
    let url = format!("http://{ops}/readyz");
    let mut last = None;
    loop {
        if let Ok(response) = client.get(&url).timeout(TIMEOUT).send().await {
            if response.status().is_success() {
                return;
            }
            if let Ok(health) = response.json::<Health>().await
                && last.as_ref() != Some(&health)
            {
                last = Some(health.clone());
                changed(health);
            }
        }
        tokio::time::sleep(INTERVAL).await;
    }
}
