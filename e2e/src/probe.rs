//! What a process says about itself over HTTP.

use std::time::Duration;

/// How the error event of a stream begins. The word alone proves nothing: a model may write it.
pub const ERROR_EVENT: &str = "data: {\"error\":";

/// An HTTP client that keeps no connection open between requests, so that probing leaves no trace in the counts.
pub fn http() -> reqwest::Client {
    reqwest::Client::builder()
        .no_proxy()
        .pool_max_idle_per_host(0)
        .timeout(Duration::from_mins(10))
        .build()
        .expect("an HTTP client")
}

/// The metrics of an ops listener.
#[derive(Debug, Clone)]
pub struct Metrics(String);

impl From<String> for Metrics {
    fn from(exposition: String) -> Self {
        Self(exposition)
    }
}

impl Metrics {
    /// Fetches `/metrics`.
    pub async fn of(ops: &str) -> Self {
        let url = format!("http://{ops}/metrics");
        let response = http()
            .get(&url)
            .send()
            .await
            .unwrap_or_else(|error| panic!("{url}: {error}"));
        assert_eq!(response.status(), 200, "{url}");
        Self(response.text().await.expect("the text of /metrics"))
    }

    /// The sum of a metric's samples whose labels hold each of `labels` (as `name="value"`); panics where the metric
    /// has no such sample, for then the name is wrong and the test would prove nothing.
    pub fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let samples = self.samples(name, labels);
        assert!(
            !samples.is_empty(),
            "no sample of {name} with {labels:?} in\n{}",
            self.0
        );
        samples.iter().sum()
    }

    /// A metric's samples whose labels hold each of `labels` (as `name="value"`).
    pub fn samples(&self, name: &str, labels: &[&str]) -> Vec<f64> {
        let found = self.0.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let (set, value) = match rest.strip_prefix('{') {
                Some(rest) => rest.rsplit_once("} ")?,
                None => ("", rest.strip_prefix(' ')?),
            };
            labels
                .iter()
                .all(|label| set.split(',').any(|have| have == *label))
                .then_some(value)
        });
        let value = |text: &str| text.split(' ').next().and_then(|value| value.parse().ok());
        found.map(|text| value(text).expect("a sample is a number")).collect()
    }
}
