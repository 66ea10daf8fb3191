//! Stop strings over text that arrives in pieces.
//!
//! The rule is a search in the whole text: of all matches of all stop strings the one that *begins* first
//! wins, and the text ends before it. Where the pieces are cut does not matter. So text is held back while it may still become
//! the beginning of a stop string, and a match is held back while one that began before it may still complete: with the
//! stops `bc` and `abcd`, `abc` waits for one more character.

use super::TextError;

/// Most stop strings of one request. OpenAI takes 4, other servers more.
pub const MAX_STOPS: usize = 16;
/// Longest stop string in bytes. What a stop costs per token grows with its length.
pub const MAX_STOP_BYTES: usize = 1024;

/// Holds back what may be a stop string and lets the rest pass.
#[derive(Debug)]
pub struct StopScanner {
    stops: Vec<String>,
    /// `begins[byte]`: some stop string begins with that byte. Passes most text after one look per byte.
    begins: [bool; 256],
    held: String,
    stopped: Option<usize>,
}

/// What a place in the text can still become.
enum At {
    Nothing,
    Prefix,
    Stop(usize),
}

impl StopScanner {
    /// Checks the stop strings of a request.
    pub fn new(stops: &[String]) -> Result<Self, TextError> {
        let field = |field: String, reason: String| Err(TextError::Field { field, reason });
        if stops.len() > MAX_STOPS {
            return field(
                "stop".into(),
                format!("{} stop strings, but at most {MAX_STOPS} are allowed", stops.len()),
            );
        }
        let mut begins = [false; 256];
        for (index, stop) in stops.iter().enumerate() {
            let Some(&first) = stop.as_bytes().first() else {
                return field(format!("stop[{index}]"), "a stop string must not be empty".into());
            };
            if stop.len() > MAX_STOP_BYTES {
                let reason = format!(
                    "{} bytes, but a stop string may have at most {MAX_STOP_BYTES}",
                    stop.len()
                );
                return field(format!("stop[{index}]"), reason);
            }
            begins[first as usize] = true;
        }
        let mut stops = stops.to_vec();
        // of two that begin at one place the shorter completes first, so it is the one that any cut of the text finds
        stops.sort_by_key(String::len);
        Ok(Self {
            stops,
            begins,
            held: String::new(),
            stopped: None,
        })
    }

    /// Takes the next piece of text; appends to `out` what is certain to lie before any stop string.
    ///
    /// Returns the stop string that ended the text, from then on always the same; later text is dropped.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<&str> {
        if self.stopped.is_none() {
            if self.stops.is_empty() {
                out.push_str(text);
            } else {
                self.held.push_str(text);
                self.scan(out, false);
            }
        }
        self.stopped()
    }

    /// Ends the text: what was only the beginning of a stop string is text after all.
    pub fn finish(&mut self, out: &mut String) -> Option<&str> {
        if self.stopped.is_none() {
            self.scan(out, true);
        }
        self.stopped()
    }

    /// The stop string that ended the text.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.map(|index| self.stops[index].as_str())
    }

    fn scan(&mut self, out: &mut String, last: bool) {
        let mut sure = self.held.len();
        for (at, &byte) in self.held.as_bytes().iter().enumerate() {
            if !self.begins[byte as usize] {
                continue;
            }
            match self.look(at) {
                At::Nothing => {}
                At::Prefix if last => {}
                At::Prefix => {
                    sure = at;
                    break;
                }
                At::Stop(index) => {
                    self.stopped = Some(index);
                    out.push_str(&self.held[..at]);
                    self.held.clear();
                    return;
                }
            }
        }
        out.push_str(&self.held[..sure]);
        self.held.drain(..sure);
    }

    fn look(&self, at: usize) -> At {
        let rest = &self.held.as_bytes()[at..];
        let mut found = At::Nothing;
        for (index, stop) in self.stops.iter().enumerate() {
            let stop = stop.as_bytes();
            if rest.starts_with(stop) {
                return At::Stop(index);
            }
            if stop.starts_with(rest) {
                found = At::Prefix;
            }
        }
        found
    }
}
