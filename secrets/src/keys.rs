//! A list of secrets, each of which opens.

use std::fmt;

use subtle::Choice;

use crate::file::{SecretError, SecretFile};
use crate::token::{Fingerprint, Token, check};

/// More keys than this belong into something that manages them.
pub const MAX_KEYS: usize = 4096;

/// The keys of a file.
pub struct Keys(Vec<Fingerprint>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys({})", self.0.len())
    }
}

impl Keys {
    /// One key on each line; blank lines and those that begin with `#` hold none.
    pub fn parse(file: &SecretFile, bytes: &[u8]) -> Result<Self, SecretError> {
        let keys = lines(file, bytes)
            .take(MAX_KEYS + 1)
            .map(|key| Ok(Fingerprint::of(key?.as_bytes())))
            .collect::<Result<Vec<_>, _>>()?;
        match keys.len() {
            0 => Err(none(file)),
            n if n > MAX_KEYS => Err(file.error(format!("it has more than {MAX_KEYS} keys"))),
            _ => Ok(Self(keys)),
        }
    }

    /// The first key of such a file, for a client that comes with it.
    pub fn first(file: &SecretFile, bytes: &[u8]) -> Result<Token, SecretError> {
        let key = lines(file, bytes).next().ok_or_else(|| none(file))??;
        Token::parse(file, key.as_bytes())
    }

    /// Is a key what a request came with? Every key is looked at, whichever it is.
    pub fn open(&self, presented: &[u8]) -> bool {
        let presented = Fingerprint::of(presented);
        let found = self
            .0
            .iter()
            .fold(Choice::from(0), |found, key| found | key.equals(&presented));
        bool::from(found)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }
}

/// The keys of a file in order, each checked.
fn lines<'a>(file: &'a SecretFile, bytes: &'a [u8]) -> impl Iterator<Item = Result<&'a str, SecretError>> {
    let lines = bytes.split(|&b| b == b'\n').map(<[u8]>::trim_ascii).enumerate();
    lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with(b"#"))
        .map(|(at, line)| check(line).map_err(|problem| file.error(format!("the key on line {} {problem}", at + 1))))
}

fn none(file: &SecretFile) -> SecretError {
    file.error("it holds no key; write one on each line")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Keys, String> {
        let file = SecretFile::private("--api-key-file", "keys");
        Keys::parse(&file, text.as_bytes()).map_err(|error| error.to_string())
    }

    #[test]
    fn every_line_opens_but_comments_and_blank_lines() {
        let keys =
            parse("# of team a\nsk-aaaaaaaaaaaaaaaa\r\n\n  sk-bbbbbbbbbbbbbbbb  \n#sk-cccccccccccccccc\n").unwrap();
        assert_eq!(keys.count(), 2);
        assert!(keys.open(b"sk-aaaaaaaaaaaaaaaa") && keys.open(b"sk-bbbbbbbbbbbbbbbb"));
        for wrong in [
            "",
            "sk-cccccccccccccccc",
            "#sk-cccccccccccccccc",
            "sk-aaaaaaaaaaaaaaab",
            "sk-aaaaaaaaaaaaaaa",
        ] {
            assert!(!keys.open(wrong.as_bytes()), "{wrong}");
        }
        assert_eq!(format!("{keys:?}"), "Keys(2)");
    }

    #[test]
    fn a_client_comes_with_another_key_than_the_first() {
        let file = SecretFile::private("--api-key-file", "keys");
        let first = |text: &str| Keys::first(&file, text.as_bytes()).map_err(|error| error.to_string());
        let key = first("# of team a\n\n sk-aaaaaaaaaaaaaaaa\r\nshort-one\n").unwrap();
        assert_eq!(key.authorization(), "Bearer sk-aaaaaaaaaaaaaaaa");
        assert!(first("#\n").unwrap_err().contains("holds no key"));
        assert!(first("short-one").unwrap_err().contains("line 1 has 9 characters"));
    }

    #[test]
    fn a_broken_file_is_refused_by_its_line_without_the_key() {
        for (text, named) in [
            ("", "holds no key"),
            ("# only words\n\n", "holds no key"),
            ("sk-aaaaaaaaaaaaaaaa\nshort-one\n", "line 2 has 9 characters"),
            ("sk-aaaaaaaaa aaaaaaa\n", "line 1 has a character"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(
                error.starts_with("--api-key-file keys: ") && error.contains(named),
                "{error}"
            );
            assert!(!error.contains("short-one") && !error.contains("sk-a"), "{error}");
        }
        let many = "sk-aaaaaaaaaaaaaaaa\n".repeat(MAX_KEYS);
        assert_eq!(parse(&many).unwrap().count(), MAX_KEYS);
        assert!(
            parse(&(many + "sk-aaaaaaaaaaaaaaaa"))
                .unwrap_err()
                .contains("more than 4096 keys")
        );
    }
}
