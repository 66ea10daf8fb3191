//! One call: an object with a name and arguments, in whichever order, perhaps with other things.

use std::ops::Range;

use super::ToolFormat;
use super::json::JsonScan;

/// How far a call is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Before the arguments, or in ones that came before the name.
    Head,
    /// In its arguments.
    Arguments,
    /// After them.
    Rest,
}

/// What a byte brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    Nothing,
    /// This is the first byte of the arguments, and the name is known.
    ArgumentsBegin,
    /// This is their last.
    ArgumentsEnd,
    /// This is the last byte of the call.
    End,
    /// This is no call; the byte does not belong to it.
    Broken,
}

/// The key whose value comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Name,
    Arguments,
    Other,
}

/// A call as it comes.
#[derive(Debug)]
pub(super) struct Call {
    format: ToolFormat,
    json: JsonScan,
    phase: Phase,
    key: Key,
    /// Where the key or value that is being read begins.
    from: usize,
    name: Option<String>,
    /// Where arguments that came before the name are.
    early: Option<Range<usize>>,
}

impl Call {
    pub(super) fn new(format: ToolFormat) -> Self {
        Self {
            format,
            json: JsonScan::new(),
            phase: Phase::Head,
            key: Key::Other,
            from: 0,
            name: None,
            early: None,
        }
    }

    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    /// Takes the next byte, which stands at `at` in `held`. What this call remembers are places in `held`, so nothing before
    /// `at` may be dropped while it is in its head.
    pub(super) fn push(&mut self, byte: u8, at: usize, held: &str) -> Seen {
        let (depth, key_due, value_due) = (self.json.depth(), self.json.expects_key(), self.json.expects_value());
        if self.json.push(byte).is_err() {
            return Seen::Broken;
        }
        if self.phase == Phase::Arguments {
            if self.json.depth() > 1 {
                return Seen::Nothing;
            }
            self.phase = Phase::Rest;
            self.key = Key::Other;
            return Seen::ArgumentsEnd;
        }
        if self.json.is_over() {
            return Seen::End;
        }
        match depth {
            1 if key_due && byte == b'"' => self.from = at,
            1 if self.json.expects_colon() && byte == b'"' => return self.key_ends(&held[self.from..=at]),
            1 if value_due && !self.json.expects_value() => return self.value_begins(byte, at),
            1 if self.key == Key::Name && byte == b'"' && self.json.expects_next() => {
                self.key = Key::Other;
                self.name = string(&held[self.from..=at]).filter(|name| !name.is_empty());
                if self.name.is_none() {
                    return Seen::Broken;
                }
            }
            2 if self.key == Key::Arguments && self.json.depth() == 1 => {
                self.key = Key::Other;
                self.early = Some(self.from..at + 1);
            }
            _ => {}
        }
        Seen::Nothing
    }

    fn key_ends(&mut self, raw: &str) -> Seen {
        let Some(key) = string(raw) else { return Seen::Broken };
        self.key = match key.as_str() {
            "name" if self.name.is_none() => Key::Name,
            "arguments" | "parameters" if self.phase == Phase::Head && self.early.is_none() => Key::Arguments,
            // without a mark an object with other keys is just JSON, and must not wait for its end
            "name" | "arguments" | "parameters" | "type" | "id" => Key::Other,
            _ if self.format == ToolFormat::LlamaJson && self.phase == Phase::Head => return Seen::Broken,
            _ => Key::Other,
        };
        Seen::Nothing
    }

    fn value_begins(&mut self, byte: u8, at: usize) -> Seen {
        self.from = at;
        match (self.key, byte) {
            (Key::Arguments, b'{') if self.name.is_some() => {
                self.phase = Phase::Arguments;
                Seen::ArgumentsBegin
            }
            (Key::Arguments, b'{') | (Key::Name, b'"') | (Key::Other, _) => Seen::Nothing,
            (Key::Arguments | Key::Name, _) => Seen::Broken,
        }
    }

    /// The name; empty if it was taken before.
    pub(super) fn take_name(&mut self) -> String {
        self.name.take().unwrap_or_default()
    }

    /// At the end of a call whose arguments have not been told: what they are, if it is a call. After a mark, a name alone is a
    /// call without arguments.
    pub(super) fn late_arguments(&self, held: &str) -> Option<String> {
        self.name.as_ref()?;
        match &self.early {
            Some(range) => Some(held[range.clone()].to_owned()),
            None => (self.format == ToolFormat::Hermes).then(|| "{}".to_owned()),
        }
    }
}

/// The text of a JSON string.
fn string(raw: &str) -> Option<String> {
    serde_json::from_str(raw).ok()
}
