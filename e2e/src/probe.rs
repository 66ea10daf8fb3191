//! What a process says about itself over HTTP.

use std::time::Duration;

/// An HTTP client that keeps no connection open between requests, so that probing leaves no trace in the counts.
pub fn http() -> reqwest::Client {
    reqwest::Client::builder()
        .pool_max_idle_per_host(0)
        .timeout(Duration::from_mins(2))
        .build()
        .expect("an HTTP client")
}

/// The metrics of an ops listener.
#[derive(Debug, Clone)]
pub struct Metrics(String);

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
        let mut samples = self
            .0
            .lines()
            .filter_map(|line| {
                let rest = line.strip_prefix(name)?;
                let (set, value) = match rest.strip_prefix('{') {
                    Some(rest) => rest.rsplit_once("} ")?,
                    None => ("", rest.strip_prefix(' ')?),
                };
                labels
                    .iter()
                    .all(|label| set.split(',').any(|have| have == *label))
                    .then_some(value)
            })
            .map(|value| {
                value
                    .split(' ')
                    .next()
                    .and_then(|v| v.parse::<f64>().ok())
                    .expect("a sample is a number")
            })
            .peekable();
        assert!(
            samples.peek().is_some(),
            "no sample of {name} with {labels:?} in\n{}",
            self.0
        );
        samples.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::Metrics;

    #[test]
    fn a_sum_takes_the_samples_with_the_labels_and_no_longer_name() {
        let metrics = Metrics("a_total{x=\"1\",y=\"2\"} 3\na_total{x=\"2\",y=\"2\"} 4\na_total_more 9\nb 5\n".into());
        assert!((metrics.sum("a_total", &[]) - 7.0).abs() < 1e-9);
        assert!((metrics.sum("a_total", &["x=\"1\""]) - 3.0).abs() < 1e-9);
        assert!((metrics.sum("b", &[]) - 5.0).abs() < 1e-9);
    }

    #[test]
    #[should_panic(expected = "no sample of c")]
    fn a_wrong_name_is_no_zero() {
        Metrics("b 5\n".into()).sum("c", &[]);
    }
}
