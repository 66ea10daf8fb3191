//! What was measured, as a table and as JSON.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;

use super::client::Sample;

/// The figures of one run.
#[derive(Debug, Serialize)]
pub struct Report {
    pub url: String,
    pub model: String,
    pub concurrency: usize,
    pub requests: u64,
    pub completed: u64,
    pub failed: u64,
    /// Reasons with their counts.
    pub failures: BTreeMap<String, u64>,
    /// Completed with fewer tokens than asked for: the server does not know `ignore_eos`.
    pub short_answers: u64,
    /// By the server's own count, per completed request.
    pub prompt_tokens: Option<Range>,
    pub output_tokens: Option<Range>,
    /// From the first request's start to the last one's end.
    pub wall_seconds: f64,
    pub requests_per_second: f64,
    pub prompt_tokens_per_second: f64,
    pub output_tokens_per_second: f64,
    /// From a request's start to its first piece of text.
    pub ttft_ms: Option<Percentiles>,
    /// Between two pieces of text; a piece may hold more than one token.
    pub inter_token_ms: Option<Percentiles>,
    /// From a request's start to the end of its stream.
    pub total_ms: Option<Percentiles>,
}

/// Least and greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Range {
    pub min: u64,
    pub max: u64,
}

/// Nearest-rank percentiles: each is a value that was measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Percentiles {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

/// What a run was.
#[derive(Debug)]
pub struct Run {
    pub url: String,
    pub model: String,
    pub concurrency: usize,
    pub output_tokens: u64,
    pub wall: Duration,
}

impl Report {
    pub fn new(run: Run, results: Vec<Result<Sample, String>>) -> Self {
        let requests = results.len() as u64;
        let mut failures = BTreeMap::new();
        let mut samples = Vec::new();
        for result in results {
            match result {
                Ok(sample) => samples.push(sample),
                Err(reason) => *failures.entry(reason).or_insert(0) += 1,
            }
        }
        let seconds = run.wall.as_secs_f64().max(f64::MIN_POSITIVE);
        let sum = |of: fn(&Sample) -> u64| samples.iter().map(of).sum::<u64>() as f64 / seconds;
        let range = |of: fn(&Sample) -> u64| {
            let values = samples.iter().map(of);
            Some(Range {
                min: values.clone().min()?,
                max: values.max()?,
            })
        };
        Self {
            url: run.url,
            model: run.model,
            concurrency: run.concurrency,
            requests,
            completed: samples.len() as u64,
            failed: failures.values().sum(),
            failures,
            short_answers: samples
                .iter()
                .filter(|sample| sample.output_tokens < run.output_tokens)
                .count() as u64,
            prompt_tokens: range(|sample| sample.prompt_tokens),
            output_tokens: range(|sample| sample.output_tokens),
            wall_seconds: run.wall.as_secs_f64(),
            requests_per_second: samples.len() as f64 / seconds,
            prompt_tokens_per_second: sum(|sample| sample.prompt_tokens),
            output_tokens_per_second: sum(|sample| sample.output_tokens),
            ttft_ms: percentiles(samples.iter().map(|sample| sample.first)),
            inter_token_ms: percentiles(samples.iter().flat_map(|sample| sample.gaps.iter().copied())),
            total_ms: percentiles(samples.iter().map(|sample| sample.total)),
        }
    }
}

fn percentiles(durations: impl Iterator<Item = Duration>) -> Option<Percentiles> {
    let mut sorted: Vec<Duration> = durations.collect();
    sorted.sort_unstable();
    let max = sorted.last()?.as_secs_f64() * 1e3;
    let at = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1].as_secs_f64() * 1e3;
    Some(Percentiles {
        p50: at(50),
        p90: at(90),
        p99: at(99),
        max,
    })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} on {}, {} at a time", self.model, self.url, self.concurrency)?;
        writeln!(
            f,
            "  completed {}   failed {}   in {:.2} s",
            self.completed, self.failed, self.wall_seconds
        )?;
        for (reason, count) in &self.failures {
            writeln!(f, "    {count} × {reason}")?;
        }
        if let (Some(prompt), Some(output)) = (self.prompt_tokens, self.output_tokens) {
            writeln!(f, "  tokens per request: prompt {prompt}, answer {output}")?;
        }
        if self.short_answers > 0 {
            writeln!(
                f,
                "  {} answers ended early: the server does not know ignore_eos",
                self.short_answers
            )?;
        }
        writeln!(
            f,
            "\n  {:<14}{:>10}{:>10}{:>10}{:>10}",
            "ms", "p50", "p90", "p99", "max"
        )?;
        for (name, row) in [
            ("first token", self.ttft_ms),
            ("between tokens", self.inter_token_ms),
            ("total", self.total_ms),
        ] {
            if let Some(row) = row {
                writeln!(
                    f,
                    "  {name:<14}{:>10.1}{:>10.1}{:>10.1}{:>10.1}",
                    row.p50, row.p90, row.p99, row.max
                )?;
            }
        }
        write!(
            f,
            "\n  {:.1} output tokens/s   {:.1} prompt tokens/s   {:.2} requests/s",
            self.output_tokens_per_second, self.prompt_tokens_per_second, self.requests_per_second
        )
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.min == self.max {
            write!(f, "{}", self.min)
        } else {
            write!(f, "{} to {}", self.min, self.max)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn sample(prompt_tokens: u64, output_tokens: u64) -> Sample {
        Sample {
            prompt_tokens,
            output_tokens,
            first: ms(10),
            gaps: vec![ms(1), ms(3)],
            total: ms(14),
            text: String::new(),
            connection: None,
        }
    }

    #[test]
    fn percentiles_are_nearest_rank() {
        let of = |values: &[u64]| percentiles(values.iter().copied().map(ms));
        let hundred: Vec<u64> = (1..=100).rev().collect();
        assert_eq!(
            of(&hundred),
            Some(Percentiles {
                p50: 50.0,
                p90: 90.0,
                p99: 99.0,
                max: 100.0
            })
        );
        assert_eq!(
            of(&[5]),
            Some(Percentiles {
                p50: 5.0,
                p90: 5.0,
                p99: 5.0,
                max: 5.0
            })
        );
        assert_eq!(
            of(&[1, 2, 3]),
            Some(Percentiles {
                p50: 2.0,
                p90: 3.0,
                p99: 3.0,
                max: 3.0
            })
        );
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn failures_never_count_as_throughput() {
        let run = Run {
            url: "u".into(),
            model: "m".into(),
            concurrency: 2,
            output_tokens: 8,
            wall: ms(2000),
        };
        let results = vec![
            Ok(sample(100, 8)),
            Err("503: full".into()),
            Ok(sample(101, 4)),
            Err("503: full".into()),
        ];
        let report = Report::new(run, results);
        assert_eq!(
            (report.requests, report.completed, report.failed, report.short_answers),
            (4, 2, 2, 1)
        );
        assert_eq!(report.failures["503: full"], 2);
        assert_eq!(report.prompt_tokens, Some(Range { min: 100, max: 101 }));
        assert!((report.output_tokens_per_second - 6.0).abs() < 1e-9);
        assert!((report.requests_per_second - 1.0).abs() < 1e-9);
        let table = report.to_string();
        assert!(
            table.contains("completed 2   failed 2") && table.contains("2 × 503: full"),
            "{table}"
        );
        assert!(serde_json::to_value(&report).unwrap()["ttft_ms"]["p99"] == 10.0);
    }

    #[test]
    fn a_run_without_any_answer_has_no_percentiles() {
        let run = Run {
            url: "u".into(),
            model: "m".into(),
            concurrency: 1,
            output_tokens: 8,
            wall: ms(0),
        };
        let report = Report::new(run, vec![Err("x".into())]);
        assert_eq!(
            (report.ttft_ms, report.inter_token_ms, report.total_ms),
            (None, None, None)
        );
        assert!(report.output_tokens_per_second.abs() < 1e-9);
    }
}
