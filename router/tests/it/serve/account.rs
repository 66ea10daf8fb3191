//! The one log line of a request.

use std::collections::BTreeMap;
use std::fmt;

use parking_lot::Mutex;
use serde_json::json;
use tandem_wire::{Reason, Source};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::client::{question, until_text};
use super::engine::{self, Step};
use super::stack::stack;

/// The fields of a line, as text.
type Line = BTreeMap<&'static str, String>;

/// Keeps the lines of requests of all tests in this process: what is logged of a callsite is cached for all threads at once,
/// so a subscriber of one thread would miss some.
struct Log;

static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());

struct Reader<'a>(&'a mut Line);

impl Visit for Reader<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO && metadata.target().starts_with("tandem_router")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::new();
        event.record(&mut Reader(&mut line));
        if line.get("message").is_some_and(|message| message == "request") {
            LINES.lock().push(line);
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[tokio::test]
async fn a_request_that_failed_or_whose_client_left_is_said_to_have_made_no_attempt() {
    tracing::subscriber::set_global_default(Log).unwrap();
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let ask = |id: &str, streamed: bool| {
        let body = question(json!({"stream": streamed}));
        let request = stack.client.post("/v1/chat/completions", &body);
        request.header("x-request-id", id).send()
    };

    for _ in 0..3 {
        decode.fails_with(Reason::Incomplete, Source::Decode);
    }
    assert_eq!(ask("account-failed", false).await.unwrap().status(), 502);
    decode.then(vec![Step::Started, Step::Spell("Par"), Step::Hold]);
    drop(until_text(ask("account-left", true).await.unwrap(), "Par").await);
    stack.at_rest(&[&decode]).await;
    assert_eq!(ask("account-served", false).await.unwrap().status(), 200);
    stack.at_rest(&[&decode]).await;

    let lines = LINES.lock();
    let line = |id: &str| {
        let of = |line: &&Line| line["request_id"].trim_matches('"') == id;
        lines.iter().find(of).unwrap_or_else(|| panic!("no line of {id}"))
    };
    let prompt = line("account-served")["prompt_tokens"].clone();
    for (id, code, attempts, tokens) in [
        ("account-failed", "incomplete", "3", "0"),
        ("account-left", "client_gone", "1", "3"),
        ("account-served", "ok", "1", "5"),
    ] {
        let line = line(id);
        assert_eq!(line["code"].trim_matches('"'), code);
        assert_eq!(line["attempts"], attempts, "{line:?}");
        assert_eq!(line["completion_tokens"], tokens, "{line:?}");
        assert_eq!(line.get("prompt_tokens"), Some(&prompt));
        assert_eq!(line.contains_key("first_token_seconds"), tokens != "0", "{line:?}");
    }
}
