//! Short names of what is compared and never read back.

use std::fmt::Write as _;

use sha2::{Digest as _, Sha256};

/// Six hex digits over texts in their order.
pub fn short<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hasher = Sha256::new();
    for text in texts {
        hasher.update((text.len() as u64).to_le_bytes());
        hasher.update(text);
    }
    hasher.finalize()[..3].iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
