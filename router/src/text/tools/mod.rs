//! Tool calls in the text of an answer: found as the text comes, piece by piece.
//!
//! | room | purpose |
//! | --- | --- |
//! | `format` | how a model writes its calls, told from its chat template |
//! | `scan` | the scanner: text in, [`ToolEvent`]s out |
//! | `call` | one call: its name, its arguments, in whichever order |
//! | `json` | where a JSON value ends, byte by byte |
//!
//! What the scanner promises:
//! - where the text is cut into pieces changes nothing but the cuts of [`ToolEvent::Text`] and [`ToolEvent::Arguments`];
//! - the deltas of a call's arguments, joined, are the characters that the model wrote, a JSON object;
//! - text waits only while it may still become a call's beginning, at most `MAX_HEAD_BYTES`; arguments do not wait;
//! - what only looks like a call is text, and so is all that stands between calls but white space next to them.
//!
//! A call whose JSON breaks off or is none before its arguments begin is text. If it breaks later, a stream has told of the
//! call already and goes on with text; [`whole`] knows better and gives the whole answer as text, as vLLM does.

mod call;
mod format;
mod json;
mod scan;

pub use format::ToolFormat;
pub use scan::ToolScanner;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolEvent {
    /// What is no call.
    Text(String),
    /// A call begins.
    CallStart {
        /// Its number in this answer, from 0.
        index: usize,
        /// The function's name.
        name: String,
    },
    /// More of a call's arguments.
    Arguments {
        /// The call's number.
        index: usize,
        /// The next characters of a JSON object.
        delta: String,
    },
}

impl ToolEvent {
    /// Of which call it tells, if of any.
    pub fn call(&self) -> Option<usize> {
        match self {
            Self::Text(_) => None,
            Self::CallStart { index, .. } | Self::Arguments { index, .. } => Some(*index),
        }
    }
}

/// A complete call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The function's name.
    pub name: String,
    /// A JSON object, as the model wrote it.
    pub arguments: String,
}

/// A whole answer, taken apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parts {
    /// What is no call.
    pub text: String,
    /// The calls, in order.
    pub calls: Vec<ToolCall>,
}

/// Takes a whole answer apart. If one of its calls has no complete arguments, all of it is text.
pub fn whole(format: ToolFormat, text: &str) -> Parts {
    let mut scanner = ToolScanner::new(format);
    let mut events = scanner.push(text);
    events.extend(scanner.finish());
    if scanner.is_broken() {
        return Parts {
            text: text.to_owned(),
            calls: Vec::new(),
        };
    }
    let mut parts = Parts::default();
    for event in events {
        match event {
            ToolEvent::Text(text) => parts.text.push_str(&text),
            ToolEvent::CallStart { name, .. } => parts.calls.push(ToolCall {
                name,
                arguments: String::new(),
            }),
            ToolEvent::Arguments { delta, .. } => {
                if let Some(call) = parts.calls.last_mut() {
                    call.arguments.push_str(&delta);
                }
            }
        }
    }
    parts
}
