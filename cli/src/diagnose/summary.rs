//! How things stand, in sentences.

use super::facts::{Condition, Facts};
use super::observation::{Seconds, count};
use super::verdict::{Opinion, Standing};

/// How things stand, whatever the finding is.
pub fn summary(facts: &Facts<'_>, client_path: &Opinion) -> Vec<String> {
    let mut lines = Vec::new();
    let Some((clients, _)) = facts.clients else {
        return lines;
    };
    let answered = match clients.last_answer_written_ms {
        Some(ms) => format!("last answer fully written {} ago", Seconds(ms)),
        None => "no answer written yet".to_owned(),
    };
    for engine in facts
        .engines
        .iter()
        .filter(|engine| engine.condition == Condition::Loading)
    {
        lines.push(format!(
            "{} {} is loading its model",
            engine.side.name(),
            engine.endpoint
        ));
    }
    if clients.in_flight == 0 {
        lines.push(format!("nothing in flight inside Tandem, {answered}"));
    } else {
        let moving = facts.waits.iter().filter(|wait| wait.state != "held");
        let steps: Vec<u64> = moving.map(|wait| facts.step_ms(wait)).collect();
        let still = steps.iter().filter(|ms| **ms >= facts.stuck_ms).count() as u64;
        let seen = facts.waits.len() as u64;
        // the router names those that have been in their state for longest
        let named = (seen < clients.in_flight).then(|| format!(", of {seen} that are named"));
        let moving = steps.into_iter().max().map(Seconds).map(|oldest| match still {
            0 => format!(", all progressing (oldest step {oldest})"),
            still => format!(", {still} of them without a step (oldest step {oldest})"),
        });
        let in_flight = count(clients.in_flight, "request");
        let (named, moving) = (named.unwrap_or_default(), moving.unwrap_or_default());
        lines.push(format!("{in_flight} in flight{named}{moving}"));
        for engine in facts.engines.iter().filter(|engine| engine.busy) {
            lines.push(format!(
                "{} {} is full and steps: others wait for their turn",
                engine.side.name(),
                engine.endpoint
            ));
        }
        lines.push(answered);
    }
    let held = facts.waits.iter().filter(|wait| wait.state == "held").count() as u64;
    if held > 0 {
        lines.push(format!("{} held back by the order on traffic", count(held, "request")));
    }
    if clients.lately.client_gone > 0 {
        let gone = count(clients.lately.client_gone, "client connection");
        lines.push(format!("{gone} closed before their answer ended"));
    }
    if client_path.standing == Standing::NotMeasured
        && let Some(last) = lines.last_mut()
    {
        last.push_str(", client side not measured");
    }
    lines
}
