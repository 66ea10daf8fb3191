//! One secret, and how it comes in a request.

use std::fmt;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};

use crate::file::{SecretError, SecretFile};

/// A shorter secret can be guessed.
pub const MIN_SECRET_BYTES: usize = 16;
/// A longer one is none.
pub const MAX_SECRET_BYTES: usize = 512;

/// A secret that opens an admin port.
#[derive(Clone)]
pub struct Token {
    text: String,
    digest: Fingerprint,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

impl Token {
    /// What a token's file holds, without white space around it.
    pub fn parse(file: &SecretFile, bytes: &[u8]) -> Result<Self, SecretError> {
        let text = bytes.trim_ascii();
        if text.is_empty() {
            return Err(file.error(format!(
                "it is empty; write a random token of at least {MIN_SECRET_BYTES} characters into it"
            )));
        }
        let text = check(text).map_err(|problem| file.error(format!("the token {problem}")))?;
        Ok(Self {
            text: text.to_owned(),
            digest: Fingerprint::of(text.as_bytes()),
        })
    }

    /// Draws one of 256 bits.
    pub fn draw() -> Self {
        let [high, low] = rand::random::<[u128; 2]>();
        let text = format!("{high:032x}{low:032x}");
        Self {
            digest: Fingerprint::of(text.as_bytes()),
            text,
        }
    }

    /// The secret itself, for whom it was drawn.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Draws a token and writes it into a new file that only its owner may read; an old one is replaced.
    pub fn make(path: &Path) -> std::io::Result<()> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
        writeln!(file, "{}", Self::draw().text)
    }

    /// Is it what a request came with? In the same time, whatever differs.
    pub fn opens(&self, presented: &[u8]) -> bool {
        bool::from(self.digest.equals(&Fingerprint::of(presented)))
    }

    /// `Bearer TOKEN`, for the `authorization` of a request of our own.
    pub fn authorization(&self) -> String {
        format!("Bearer {}", self.text)
    }
}

/// What stands for a secret in memory: comparing two tells nothing about how much of them is equal.
#[derive(Clone, Copy)]
pub(crate) struct Fingerprint([u8; 32]);

impl Fingerprint {
    pub(crate) fn of(secret: &[u8]) -> Self {
        Self(Sha256::digest(secret).into())
    }

    pub(crate) fn equals(&self, other: &Self) -> Choice {
        self.0.ct_eq(&other.0)
    }
}

/// A secret travels in a header: its characters are visible ASCII, and so many that it cannot be guessed.
pub(crate) fn check(secret: &[u8]) -> Result<&str, String> {
    if secret.len() < MIN_SECRET_BYTES {
        return Err(format!(
            "has {} characters; give it at least {MIN_SECRET_BYTES}, drawn at random",
            secret.len()
        ));
    }
    if secret.len() > MAX_SECRET_BYTES {
        return Err(format!(
            "has {} characters; give it at most {MAX_SECRET_BYTES}",
            secret.len()
        ));
    }
    str::from_utf8(secret)
        .ok()
        .filter(|text| text.bytes().all(|b| b.is_ascii_graphic()))
        .ok_or_else(|| "has a character other than visible ASCII; it could not be sent in a header".to_owned())
}

/// What the `authorization` of a request holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Presented<'a> {
    /// There is no such header.
    Nothing,
    /// Something other than one `Bearer` secret.
    Other,
    /// A secret, right or wrong.
    Secret(&'a [u8]),
}

const SCHEME: &[u8] = b"bearer ";

/// Reads all `authorization` headers of a request.
pub fn bearer<'a>(mut values: impl Iterator<Item = &'a [u8]>) -> Presented<'a> {
    let Some(value) = values.next() else {
        return Presented::Nothing;
    };
    // of two, another party on the way might have looked at the other
    if values.next().is_some() {
        return Presented::Other;
    }
    match value.split_at_checked(SCHEME.len()) {
        Some((scheme, secret)) if scheme.eq_ignore_ascii_case(SCHEME) && !secret.trim_ascii().is_empty() => {
            Presented::Secret(secret.trim_ascii())
        }
        _ => Presented::Other,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn file() -> SecretFile {
        SecretFile::private("--admin-token-file", "/etc/token")
    }

    #[test]
    fn white_space_around_a_token_is_no_part_of_it() {
        let token = Token::parse(&file(), b" \n0123456789abcdef\n").unwrap();
        assert!(token.opens(b"0123456789abcdef"));
        for wrong in [&b"0123456789abcdeF"[..], b"0123456789abcde", b"0123456789abcdef\n", b""] {
            assert!(!token.opens(wrong));
        }
        assert_eq!(token.authorization(), "Bearer 0123456789abcdef");
    }

    #[test]
    fn a_file_without_a_usable_token_is_refused_with_flag_file_and_remedy_but_not_its_content() {
        for (content, named) in [
            (&b""[..], "it is empty"),
            (b"  \n", "it is empty"),
            (b"fifteen-letters", "has 15 characters"),
            (b"two words are none", "visible ASCII"),
            ("sixteen bytes \u{fc}".as_bytes(), "visible ASCII"),
            (&[b'x'; 513], "has 513 characters"),
        ] {
            let error = Token::parse(&file(), content).unwrap_err().to_string();
            assert!(error.starts_with("--admin-token-file /etc/token: "), "{error}");
            assert!(error.contains(named), "{error}");
            for word in ["fifteen", "words", "sixteen", "xxx"] {
                assert!(!error.contains(word), "{error}");
            }
        }
    }

    #[test]
    fn a_made_token_is_new_each_time_and_only_its_owner_may_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "old").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let mut made = Vec::new();
        for _ in 0..2 {
            Token::make(&path).unwrap();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            made.push(std::fs::read(&path).unwrap());
        }
        assert_ne!(made[0], made[1]);
        let token = Token::parse(&file(), &made[1]).unwrap();
        assert_eq!(token.authorization().len(), "Bearer ".len() + 64);
    }

    #[test]
    fn only_one_bearer_secret_is_one() {
        let of = |values: &[&'static str]| match bearer(values.iter().map(|v| v.as_bytes())) {
            Presented::Nothing => "nothing",
            Presented::Other => "other",
            Presented::Secret(secret) => str::from_utf8(secret).unwrap(),
        };
        assert_eq!(of(&[]), "nothing");
        assert_eq!(of(&["Bearer abc"]), "abc");
        assert_eq!(of(&["bEaReR  abc "]), "abc");
        for other in ["", "Bearer", "Bearer ", "Bearer\tabc", "Basic abc", "abc"] {
            assert_eq!(of(&[other]), "other", "{other:?}");
        }
        assert_eq!(of(&["Bearer abc", "Bearer abc"]), "other");
    }

    #[test]
    fn a_token_is_not_shown() {
        let token = Token::parse(&file(), b"0123456789abcdef").unwrap();
        assert_eq!(format!("{token:?}"), "Token(..)");
    }
}
