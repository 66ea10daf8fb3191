//! The scanner.
//!
//! `held` is what has come since the last decision, `at` how far of it was looked at. A call is *told* once its name is known
//! and its arguments begin; until then everything can still turn out to be text, and then the search for the next mark goes on
//! right after the mark that led astray. Each decision depends on positions in the text alone, never on where it was cut.

use super::call::{Call, Phase, Seen};
use super::{ToolEvent, ToolFormat};

/// What waits longer than this is text. It also bounds what marks within marks can cost: each is looked behind so far at most.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// So much white space before a call belongs to the call; more is text.
const MAX_BLANKS: usize = 32;

/// Finds the calls in the text of one answer. See the [module](super) for what it promises.
#[derive(Debug)]
pub struct ToolScanner {
    format: ToolFormat,
    held: String,
    at: usize,
    /// Bytes at the beginning of `held` that are text if this is no call: the mark, and white space before it.
    lead: usize,
    state: State,
    /// Calls told of.
    calls: usize,
    broken: bool,
}

#[derive(Debug)]
enum State {
    /// Nothing but white space has come. Where no mark is needed, a call may stand here.
    Start,
    /// Text.
    Text,
    /// After a mark: a call or a list of calls.
    Open,
    /// In a list, before a call.
    Listed,
    /// In a call; `listed`: in a list.
    Call { call: Call, listed: bool },
    /// After a call in a list.
    AfterListed,
    /// After a call or a list, before the mark that closes it.
    After,
    /// After all of it: white space is dropped.
    Between,
}

impl ToolScanner {
    /// Before an answer.
    pub fn new(format: ToolFormat) -> Self {
        Self {
            format,
            held: String::new(),
            at: 0,
            lead: 0,
            state: State::Start,
            calls: 0,
            broken: false,
        }
    }

    /// Takes the next piece of the answer; gives what is certain by now.
    pub fn push(&mut self, text: &str) -> Vec<ToolEvent> {
        let mut events = Vec::new();
        self.held.push_str(text);
        while self.step(&mut events, false) {}
        events
    }

    /// Ends the answer; gives what was held back.
    pub fn finish(&mut self) -> Vec<ToolEvent> {
        let mut events = Vec::new();
        loop {
            while self.step(&mut events, true) {}
            match &self.state {
                State::Start | State::Text | State::Between => {
                    self.text(self.held.len(), &mut events);
                    return events;
                }
                State::Call { call, .. } if call.phase() == Phase::Arguments => {
                    self.broken = true;
                    return events;
                }
                State::Call { call, .. } if call.phase() == Phase::Rest => return events,
                // what should have followed a call is cut off
                State::After | State::AfterListed => return events,
                State::Open | State::Listed if self.lead == 0 => return events,
                State::Open | State::Listed | State::Call { .. } => self.no_call(&mut events),
            };
        }
    }

    /// How many calls were told of.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Calls were told of, and all of them are whole.
    pub fn has_calls(&self) -> bool {
        self.calls > 0 && !self.broken
    }

    /// The arguments of a call that was told of broke off or are no JSON: certain after [`finish`](Self::finish).
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Does one thing; false: more text is needed.
    fn step(&mut self, events: &mut Vec<ToolEvent>, last: bool) -> bool {
        match self.state {
            State::Start => self.start(),
            State::Text => self.search(events, last),
            State::Open => match self.next() {
                Next::Byte(b'{') => self.call(false),
                Next::Byte(b'[') if self.format == ToolFormat::Hermes => self.enter(1, State::Listed),
                Next::Byte(_) | Next::TooFar => self.no_call(events),
                Next::More => false,
            },
            State::Listed => match self.next() {
                Next::Byte(b'{') => self.call(true),
                Next::Byte(_) | Next::TooFar => self.no_call(events),
                Next::More => false,
            },
            State::Call { .. } => self.go_on(events),
            State::AfterListed => match self.next() {
                Next::Byte(b',') => self.enter(1, State::Listed),
                Next::Byte(b']') => self.enter(1, State::After),
                Next::Byte(_) | Next::TooFar => self.no_call(events),
                Next::More => false,
            },
            State::After => match self.next() {
                Next::Byte(b'{') => self.call(false),
                Next::Byte(_) => self.close(),
                Next::TooFar => self.no_call(events),
                Next::More => false,
            },
            State::Between => {
                self.held.drain(..blanks(&self.held));
                !self.held.is_empty() && self.enter(0, State::Text)
            }
        }
    }

    /// What stands at `at`, after white space.
    fn next(&mut self) -> Next {
        self.at += blanks(&self.held[self.at..]);
        if self.at > MAX_HEAD_BYTES {
            return Next::TooFar;
        }
        match self.held.as_bytes().get(self.at) {
            Some(byte) => Next::Byte(*byte),
            None => Next::More,
        }
    }

    fn enter(&mut self, bytes: usize, state: State) -> bool {
        self.at += bytes;
        self.state = state;
        true
    }

    fn call(&mut self, listed: bool) -> bool {
        let call = Call::new(self.format);
        self.enter(0, State::Call { call, listed })
    }

    /// What led here is text after all.
    fn no_call(&mut self, events: &mut Vec<ToolEvent>) -> bool {
        self.text(self.lead, events);
        self.lead = 0;
        self.enter(0, State::Text)
    }

    /// The first `bytes` of what is held are text.
    fn text(&mut self, bytes: usize, events: &mut Vec<ToolEvent>) {
        let text = &self.held[..bytes];
        match events.last_mut() {
            Some(ToolEvent::Text(before)) => before.push_str(text),
            _ if bytes > 0 => events.push(ToolEvent::Text(text.to_owned())),
            _ => {}
        }
        self.drop(bytes);
    }

    fn drop(&mut self, bytes: usize) {
        self.held.drain(..bytes);
        self.at = 0;
    }

    /// Without a mark, a call may begin an answer and stand nowhere else.
    fn start(&mut self) -> bool {
        let blanks = blanks(&self.held);
        if self.format != ToolFormat::LlamaJson || blanks > MAX_BLANKS {
            return self.enter(0, State::Text);
        }
        match self.held.as_bytes().get(blanks) {
            Some(b'{') => {
                self.lead = blanks + 1;
                self.at = blanks;
                self.call(false)
            }
            Some(_) => self.enter(0, State::Text),
            None => false,
        }
    }

    /// Looks for the next mark; gives the text before it.
    fn search(&mut self, events: &mut Vec<ToolEvent>, last: bool) -> bool {
        let mark = self.format.opening();
        let (found, from) = match self.held.find(mark) {
            Some(from) => (true, from),
            None if last => return false,
            None => (false, self.held.len() - begun(&self.held, mark)),
        };
        let before = self.held.as_bytes()[..from].iter().rev();
        let blanks = before.take(MAX_BLANKS).take_while(|byte| is_blank(**byte)).count();
        self.text(from - blanks, events);
        if found {
            self.lead = blanks + mark.len();
            self.enter(self.lead, State::Open);
        }
        found
    }

    /// Goes through a call, up to its end or to the end of what is there.
    fn go_on(&mut self, events: &mut Vec<ToolEvent>) -> bool {
        let State::Call { call, listed } = &mut self.state else {
            return true;
        };
        let listed = *listed;
        while let Some(&byte) = self.held.as_bytes().get(self.at) {
            if self.at >= MAX_HEAD_BYTES && call.phase() != Phase::Arguments {
                return self.no_call(events);
            }
            let seen = call.push(byte, self.at, &self.held);
            match seen {
                Seen::Nothing => self.at += 1,
                Seen::Broken => {
                    if call.phase() == Phase::Arguments {
                        self.broken = true;
                        self.arguments(events);
                    }
                    return self.no_call(events);
                }
                Seen::ArgumentsBegin => {
                    let name = call.take_name();
                    let index = self.calls;
                    self.calls += 1;
                    self.lead = 0;
                    events.push(ToolEvent::CallStart { index, name });
                    self.held.drain(..self.at);
                    self.at = 1;
                }
                Seen::ArgumentsEnd => {
                    self.at += 1;
                    self.arguments(events);
                    return true;
                }
                Seen::End => {
                    if call.phase() == Phase::Head {
                        let Some(arguments) = call.late_arguments(&self.held) else {
                            return self.no_call(events);
                        };
                        let name = call.take_name();
                        let index = self.calls;
                        self.calls += 1;
                        self.lead = 0;
                        events.push(ToolEvent::CallStart { index, name });
                        events.push(ToolEvent::Arguments {
                            index,
                            delta: arguments,
                        });
                    }
                    self.drop(self.at + 1);
                    return self.enter(0, if listed { State::AfterListed } else { State::After });
                }
            }
        }
        if call.phase() == Phase::Arguments {
            self.arguments(events);
        }
        false
    }

    /// What lies before `at` belongs to the arguments.
    fn arguments(&mut self, events: &mut Vec<ToolEvent>) {
        if self.at > 0 {
            events.push(ToolEvent::Arguments {
                index: self.calls - 1,
                delta: self.held[..self.at].to_owned(),
            });
        }
        self.drop(self.at);
    }

    /// The mark after a call, which may be missing.
    fn close(&mut self) -> bool {
        let (rest, mark) = (&self.held[self.at..], self.format.closing());
        if !rest.starts_with(mark) {
            return !mark.starts_with(rest) && self.enter(0, State::Between);
        }
        if self.format == ToolFormat::LlamaJson {
            return self.enter(mark.len(), State::Open);
        }
        self.drop(self.at + mark.len());
        self.enter(0, State::Between)
    }
}

/// What stands at a place.
enum Next {
    Byte(u8),
    /// Further away than is waited for.
    TooFar,
    More,
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

/// Bytes of white space at the beginning.
fn blanks(text: &str) -> usize {
    text.bytes().take_while(|byte| is_blank(*byte)).count()
}

/// The length of the longest end of `text` that `mark` begins with, without being all of it.
fn begun(text: &str, mark: &str) -> usize {
    let longest = text.len().min(mark.len() - 1);
    (1..=longest)
        .rev()
        .find(|length| mark.as_bytes().starts_with(&text.as_bytes()[text.len() - length..]))
        .unwrap_or(0)
}
