//! What people read: observations first, then what they say of each layer, then the verdict.

use std::fmt::Write as _;

use super::observation::Note;
use super::record::Record;
use super::verdict::{Finding, Opinion, Standing, Verdict, notes};

/// The whole of it.
pub fn text(record: &Record, verdict: &Verdict) -> String {
    let mut text = format!("observed {} by tandem {}\n", record.taken, record.tandem);
    for observation in &verdict.observations {
        let _ = writeln!(
            text,
            "{:>4}  {}  [{}]",
            observation.number, observation.text, observation.place
        );
    }
    text.push_str("layers\n");
    for opinion in &verdict.layers {
        let _ = writeln!(text, "      {:<12}{}", opinion.layer.name(), opinion_line(opinion));
    }
    for line in &verdict.summary {
        let _ = writeln!(text, "{line}");
    }
    let _ = write!(text, "verdict: {}", finding(verdict));
    if matches!(verdict.finding, Finding::Undecided | Finding::NoFaultInside) {
        for line in verdict.decide() {
            let _ = write!(text, "\n  to decide: {line}");
        }
    }
    text
}

fn opinion_line(opinion: &Opinion) -> String {
    let standing = match opinion.standing {
        Standing::Suspected => "pointed to",
        Standing::Unclear => "unclear",
        Standing::Hidden => "hidden",
        Standing::Excluded => "excluded",
        Standing::NotMeasured => return "not measured".to_owned(),
    };
    let reasons: Vec<_> = opinion
        .reasons
        .iter()
        .map(|reason| format!("{} {}", reason.text, numbers(&reason.by)))
        .collect();
    format!("{standing}: {}", reasons.join("; "))
}

fn numbers(by: &[Note]) -> String {
    let numbers: Vec<_> = by.iter().map(ToString::to_string).collect();
    format!("({})", numbers.join(", "))
}

fn finding(verdict: &Verdict) -> String {
    match verdict.finding {
        Finding::Fault => {
            let suspects: Vec<_> = verdict
                .suspects()
                .map(|opinion| {
                    let by = notes(opinion.reasons.iter().map(|reason| reason.by.as_slice()));
                    format!("{} {}", opinion.layer.name(), numbers(&by))
                })
                .collect();
            format!("the observations point to: {}", suspects.join("; "))
        }
        Finding::NoFault => "no fault seen".to_owned(),
        Finding::NoFaultInside => "no fault seen inside Tandem; client side not measured".to_owned(),
        Finding::Undecided => "undecided".to_owned(),
    }
}
