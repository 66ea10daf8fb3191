//! What Python has and templates use: `raise_exception`, `strftime_now`, `tojson` as `json.dumps` writes, string methods.

use std::fmt::Write as _;
use std::time::SystemTime;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};

use super::template::Clock;

/// Adds Python's helpers to `environment`.
pub(super) fn install(environment: &mut Environment<'static>, clock: Clock) {
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_filter("escape", escape);
    environment.add_filter("e", escape);
    environment.add_test("iterable", iterable);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", move |format: &str| strftime(clock(), format));
}

/// Python's `None` cannot be iterated over, though minijinja's can: `tools is iterable and tools | length > 0` stands in the
/// templates of Hermes.
fn iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// What a template's author wrote for `raise_exception`, marked so that it can be told from the engine's errors.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: &str) -> Result<Value, Error> {
    let raised = Raised(message.to_owned());
    Err(Error::new(ErrorKind::InvalidOperation, raised.0.clone()).with_source(raised))
}

/// The words of `raise_exception`, if that is what ended the rendering.
pub(super) fn raised(error: &Error) -> Option<&str> {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(raised) = error.downcast_ref::<Raised>() {
            return Some(&raised.0);
        }
        cause = error.source();
    }
    None
}

/// `strftime` of the clock's time in UTC.
fn strftime(now: SystemTime, format: &str) -> Result<String, Error> {
    let fail = |error: jiff::Error| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now({format:?}): {error}"),
        )
    };
    let now = jiff::Timestamp::try_from(now).map_err(fail)?;
    jiff::fmt::strtime::format(format, &now.to_zoned(jiff::tz::TimeZone::UTC)).map_err(fail)
}

/// HTML escapes as markupsafe writes them, quotes by number.
fn escape(value: &Value) -> Value {
    if value.is_safe() {
        return value.clone();
    }
    let mut out = String::new();
    for character in value.to_string().chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            other => out.push(other),
        }
    }
    Value::from_safe_string(out)
}

/// `json.dumps(value, ensure_ascii=False, indent=…, separators=…, sort_keys=…)`, as transformers defines the filter.
#[expect(
    clippy::needless_pass_by_value,
    reason = "the template engine hands the arguments over"
)]
fn tojson(value: &Value, indent: Option<Value>, args: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => args.get::<Option<Value>>("indent")?,
    };
    let indent = match indent {
        Some(indent) if indent.is_none() || indent.is_undefined() => None,
        Some(indent) if indent.kind() == ValueKind::String => Some(indent.to_string()),
        Some(indent) => Some(" ".repeat(usize::try_from(indent)?.min(64))),
        None => None,
    };
    let separators: Option<(String, String)> = match args.get::<Option<Vec<String>>>("separators")? {
        Some(pair) => match <[String; 2]>::try_from(pair) {
            Ok([item, key]) => Some((item, key)),
            Err(_) => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "tojson: separators must be a pair",
                ));
            }
        },
        None => None,
    };
    let (item_separator, key_separator) =
        separators.unwrap_or_else(|| (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()));
    let mut writer = JsonWriter {
        out: String::new(),
        indent,
        item_separator,
        key_separator,
        sort_keys: args.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ascii: args.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    args.assert_all_used()?;
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

/// Deepest nesting of a value. serde_json refuses to read JSON deeper than 128.
const MAX_DEPTH: usize = 256;

struct JsonWriter {
    out: String,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
    ascii: bool,
}

impl JsonWriter {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("tojson: nested deeper than {MAX_DEPTH}"),
            ));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                self.out.push('[');
                let mut count = 0;
                for item in value.try_iter()? {
                    self.next_item(count, depth);
                    self.value(&item, depth + 1)?;
                    count += 1;
                }
                self.close(count, depth, ']');
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.out.push('{');
                let count = keys.len();
                for (at, key) in keys.into_iter().enumerate() {
                    self.next_item(at, depth);
                    match key.as_str() {
                        Some(key) => self.string(key),
                        None => self.string(&key.to_string()),
                    }
                    self.out.push_str(&self.key_separator);
                    self.value(&value.get_item(&key)?, depth + 1)?;
                }
                self.close(count, depth, '}');
            }
            kind => {
                let reason = format!("tojson: a value of type {kind} is not JSON serializable");
                return Err(Error::new(ErrorKind::InvalidOperation, reason));
            }
        }
        Ok(())
    }

    fn next_item(&mut self, before: usize, depth: usize) {
        if before > 0 {
            self.out.push_str(&self.item_separator);
        }
        self.new_line(depth + 1);
    }

    fn close(&mut self, items: usize, depth: usize, bracket: char) {
        if items > 0 {
            self.new_line(depth);
        }
        self.out.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn number(&mut self, value: &Value) {
        if value.is_integer() {
            self.out.push_str(&value.to_string());
        } else {
            self.out
                .push_str(&float(f64::try_from(value.clone()).unwrap_or(f64::NAN)));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                '\0'..='\u{1f}' => self.escape(character as u16),
                _ if self.ascii && !character.is_ascii() => {
                    let mut units = [0; 2];
                    for unit in character.encode_utf16(&mut units) {
                        self.escape(*unit);
                    }
                }
                _ => self.out.push(character),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, unit: u16) {
        // writing into a String cannot fail
        let _ = write!(self.out, "\\u{unit:04x}");
    }
}

/// A float as Python's `repr` writes it, which `json.dumps` uses.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    // the shortest digits that read back as the same number, as Python's
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = number.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// `{% generation %}…{% endgeneration %}`, which marks an assistant's text for training and prints its body, as
/// `{% with %}…{% endwith %}`, which has the same scope.
///
/// Only whole tags are replaced, whitespace marks stay; comments and `{% raw %}` blocks are passed over.
pub(super) fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((open, close)) = next_opening(rest) {
        let end = rest[open..]
            .find(close)
            .map_or(rest.len(), |end| open + end + close.len());
        let (before, tag) = (&rest[..open], &rest[open..end]);
        out.push_str(before);
        rest = &rest[end..];
        let inner = tag
            .strip_prefix("{%")
            .and_then(|tag| tag.strip_suffix("%}"))
            .unwrap_or_default();
        let word = inner.strip_prefix(['-', '+']).unwrap_or(inner);
        let word = word.strip_suffix(['-', '+']).unwrap_or(word);
        match word.trim() {
            "generation" => out.push_str(&tag.replacen("generation", "with", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endwith", 1)),
            "raw" => {
                out.push_str(tag);
                let raw = raw_block_bytes(rest);
                out.push_str(&rest[..raw]);
                rest = &rest[raw..];
            }
            _ => out.push_str(tag),
        }
    }
    out.push_str(rest);
    out
}

/// Where the next tag or comment begins, and what ends it.
fn next_opening(text: &str) -> Option<(usize, &'static str)> {
    match (text.find("{%"), text.find("{#")) {
        (Some(tag), Some(comment)) if comment < tag => Some((comment, "#}")),
        (Some(tag), _) => Some((tag, "%}")),
        (None, Some(comment)) => Some((comment, "#}")),
        (None, None) => None,
    }
}

/// How many bytes of `text` lie before the tag `{% endraw %}`.
fn raw_block_bytes(text: &str) -> usize {
    text.match_indices("{%")
        .find(|(at, _)| {
            text[at + 2..]
                .trim_start_matches(['-', '+'])
                .trim_start()
                .starts_with("endraw")
        })
        .map_or(text.len(), |(at, _)| at)
}
