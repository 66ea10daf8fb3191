//! JSON, byte by byte: where a value ends and whether it still is one, without ever looking back.
//!
//! The grammar is RFC 8259's. Nothing is built: the text itself is what goes on to the client.

/// Deeper values are refused; `serde_json` has the same limit.
const MAX_DEPTH: usize = 128;

/// These bytes are no JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Invalid;

/// What may come next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// A value.
    Value,
    /// A value, or the end of the array that was just opened.
    FirstValue,
    /// A key, or the end of the object that was just opened.
    FirstKey,
    /// A key.
    Key,
    /// The colon after a key.
    Colon,
    /// In a string; `key`: it is one.
    String { key: bool },
    /// After a backslash in a string.
    Escape { key: bool },
    /// So many hexadecimal digits of `\uXXXX` are missing.
    Hex { key: bool, missing: u8 },
    /// The rest of `true`, `false` or `null`.
    Literal(&'static [u8]),
    /// In a number.
    Number(Digits),
    /// A comma, or the end of what is open.
    Next,
    /// Nothing: the value is complete.
    Over,
}

/// A place in a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Digits {
    Minus,
    Zero,
    Whole,
    Point,
    Fraction,
    E,
    Sign,
    Exponent,
}

/// Where in a value the next byte stands.
#[derive(Debug)]
pub struct JsonScan {
    /// What is open, the innermost last; true: an object.
    open: Vec<bool>,
    at: At,
}

impl JsonScan {
    /// Before a value.
    pub fn new() -> Self {
        Self {
            open: Vec::new(),
            at: At::Value,
        }
    }

    /// How many arrays and objects are open.
    pub fn depth(&self) -> usize {
        self.open.len()
    }

    /// The value is complete. Never true of a bare number, whose end only the next byte would tell.
    pub fn is_over(&self) -> bool {
        self.at == At::Over
    }

    /// A key is due, or the end of an empty object.
    pub fn expects_key(&self) -> bool {
        matches!(self.at, At::Key | At::FirstKey)
    }

    /// A key has ended.
    pub fn expects_colon(&self) -> bool {
        self.at == At::Colon
    }

    /// A value is due.
    pub fn expects_value(&self) -> bool {
        self.at == At::Value
    }

    /// A value has ended.
    pub fn expects_next(&self) -> bool {
        self.at == At::Next
    }

    /// Takes the next byte.
    pub fn push(&mut self, byte: u8) -> Result<(), Invalid> {
        self.at = match self.at {
            At::String { key } => match byte {
                b'"' if key => At::Colon,
                b'"' => self.value_ends(),
                b'\\' => At::Escape { key },
                0..0x20 => return Err(Invalid),
                _ => self.at,
            },
            At::Escape { key } => match byte {
                b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => At::String { key },
                b'u' => At::Hex { key, missing: 4 },
                _ => return Err(Invalid),
            },
            At::Hex { key, missing } => match (byte.is_ascii_hexdigit(), missing) {
                (true, 1) => At::String { key },
                (true, _) => At::Hex {
                    key,
                    missing: missing - 1,
                },
                _ => return Err(Invalid),
            },
            At::Literal(rest) => match rest.split_first() {
                Some((due, [])) if byte == *due => self.value_ends(),
                Some((due, rest)) if byte == *due => At::Literal(rest),
                _ => return Err(Invalid),
            },
            At::Number(digits) => match number(digits, byte) {
                Some(digits) => At::Number(digits),
                None if ends(digits) => {
                    self.at = self.value_ends();
                    return self.push(byte);
                }
                None => return Err(Invalid),
            },
            _ if matches!(byte, b' ' | b'\t' | b'\n' | b'\r') => self.at,
            At::FirstKey | At::Key if byte == b'"' => At::String { key: true },
            At::Colon if byte == b':' => At::Value,
            At::FirstKey if byte == b'}' => self.close(true)?,
            At::FirstValue if byte == b']' => self.close(false)?,
            At::Value | At::FirstValue => self.value_begins(byte)?,
            At::Next => match byte {
                b'}' => self.close(true)?,
                b']' => self.close(false)?,
                b',' if self.open.last() == Some(&true) => At::Key,
                b',' => At::Value,
                _ => return Err(Invalid),
            },
            At::FirstKey | At::Key | At::Colon | At::Over => return Err(Invalid),
        };
        Ok(())
    }

    fn value_begins(&mut self, byte: u8) -> Result<At, Invalid> {
        Ok(match byte {
            b'{' | b'[' if self.open.len() == MAX_DEPTH => return Err(Invalid),
            b'{' => {
                self.open.push(true);
                At::FirstKey
            }
            b'[' => {
                self.open.push(false);
                At::FirstValue
            }
            b'"' => At::String { key: false },
            b't' => At::Literal(b"rue"),
            b'f' => At::Literal(b"alse"),
            b'n' => At::Literal(b"ull"),
            b'-' => At::Number(Digits::Minus),
            b'0' => At::Number(Digits::Zero),
            b'1'..=b'9' => At::Number(Digits::Whole),
            _ => return Err(Invalid),
        })
    }

    fn value_ends(&self) -> At {
        if self.open.is_empty() { At::Over } else { At::Next }
    }

    fn close(&mut self, object: bool) -> Result<At, Invalid> {
        if self.open.pop() == Some(object) {
            Ok(self.value_ends())
        } else {
            Err(Invalid)
        }
    }
}

fn number(at: Digits, byte: u8) -> Option<Digits> {
    use Digits::{E, Exponent, Fraction, Minus, Point, Sign, Whole, Zero};
    match (at, byte) {
        (Minus, b'0') => Some(Zero),
        (Minus, b'1'..=b'9') | (Whole, b'0'..=b'9') => Some(Whole),
        (Zero | Whole, b'.') => Some(Point),
        (Point | Fraction, b'0'..=b'9') => Some(Fraction),
        (Zero | Whole | Fraction, b'e' | b'E') => Some(E),
        (E, b'+' | b'-') => Some(Sign),
        (E | Sign | Exponent, b'0'..=b'9') => Some(Exponent),
        _ => None,
    }
}

/// May a number end here?
fn ends(at: Digits) -> bool {
    matches!(at, Digits::Zero | Digits::Whole | Digits::Fraction | Digits::Exponent)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Is it one array or object, and nothing after it but blanks?
    fn is_container(text: &str) -> bool {
        let mut scan = JsonScan::new();
        text.bytes()
            .all(|byte| (scan.is_over() && byte.is_ascii_whitespace()) || scan.push(byte).is_ok())
            && scan.is_over()
    }

    /// Fragments that put together are JSON often, and nearly JSON else.
    fn nearly_json() -> impl Strategy<Value = String> {
        let fragment = proptest::sample::select(vec![
            "{", "}", "[", "]", ",", ":", "\"", "\"a\"", "\"k\":", "1", "-0", "0.5e+3", "01", "1.", "true", "nul",
            "null", "\\", "\\n", "\\u00e9", "\\u00g", "é", "\n", " ", "e", "-", "\u{1}",
        ]);
        let free = proptest::collection::vec(fragment, 0..12).prop_map(|all| all.concat());
        let leaf = proptest::sample::select(vec![
            "1",
            "-0.5E-3",
            "\"a\\\"\"",
            "true",
            "null",
            "[]",
            "{}",
            "",
            "x",
            "\"\\x\"",
        ]);
        let tree = leaf.prop_map(str::to_owned).prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(|all| format!("[{}]", all.join(", "))),
                proptest::collection::vec(inner, 0..4).prop_map(|all| format!(
                    "{{{}}}",
                    all.iter().map(|v| format!("\"k\": {v}")).collect::<Vec<_>>().join(",")
                )),
            ]
        });
        prop_oneof![free, tree]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn a_value_is_taken_that_serde_refuses_or_the_other_way_round(text in nearly_json()) {
            let container = text.trim_start_matches([' ', '\n']).starts_with(['{', '[']);
            // an array, because a number alone has no end
            let text = if container { text } else { format!("[{text}]") };
            let known = serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok();
            prop_assert_eq!(is_container(&text), known, "{}", text);
        }
    }

    #[test]
    fn depth_has_no_bound() {
        assert!(is_container(&("[".repeat(MAX_DEPTH) + &"]".repeat(MAX_DEPTH))));
        assert!(!is_container(&("[".repeat(MAX_DEPTH + 1) + &"]".repeat(MAX_DEPTH + 1))));
    }
}
