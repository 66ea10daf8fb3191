//! The bytes of every token, for grammars alone: out of a GGUF file's metadata or a `tokenizer.json`.
//!
//! A token whose text is not made of plain bytes (control, added, unused) has none: it never is a part of a matched text.

use std::collections::HashMap;

use serde_json::Value;

/// The bytes of each token, by id; empty for one that stands for no text.
pub type TokenBytes = Vec<Vec<u8>>;

/// Longer tokens are no part of any text that a grammar allows.
const MAX_TOKEN_BYTES: usize = 1024;

/// Kinds in `tokenizer.ggml.token_type`.
mod kind {
    pub(super) const NORMAL: i64 = 1;
    pub(super) const BYTE: i64 = 6;
}

/// Out of `tokenizer.ggml.model`, `.tokens` and `.token_type`.
///
/// # Errors
/// Says which kind of vocabulary is not read.
pub fn from_gguf(model: &str, tokens: &[String], kinds: &[i64]) -> Result<TokenBytes, String> {
    if kinds.len() != tokens.len() {
        return Err(format!("{} tokens but {} token types", tokens.len(), kinds.len()));
    }
    let style = match model {
        "gpt2" => Style::ByteLevel,
        "llama" => Style::Spaces,
        other => return Err(format!("its vocabulary is of kind {other:?}, gpt2 and llama are read")),
    };
    let bytes = |(text, &kind): (&String, &i64)| match kind {
        kind::NORMAL => style.bytes(text),
        kind::BYTE => byte(text).map(|b| vec![b]).unwrap_or_default(),
        _ => Vec::new(),
    };
    Ok(tokens.iter().zip(kinds).map(bytes).collect())
}

/// Out of a `tokenizer.json` of byte-level BPE, or of BPE with byte fallback.
///
/// # Errors
/// Says what was not understood.
pub fn from_tokenizer_json(text: &[u8]) -> Result<TokenBytes, String> {
    let json: Value = serde_json::from_slice(text).map_err(|e| format!("tokenizer.json: {e}"))?;
    let kind = |v: &Value| v["type"].as_str().unwrap_or_default().to_owned();
    let decoder = &json["decoder"];
    let steps = decoder["decoders"]
        .as_array()
        .map_or(std::slice::from_ref(decoder), Vec::as_slice);
    let style = if steps.iter().any(|s| kind(s) == "ByteLevel") {
        Style::ByteLevel
    } else if steps.iter().any(|s| kind(s) == "ByteFallback") {
        Style::Spaces
    } else {
        return Err("tokenizer.json: its decoder is neither ByteLevel nor ByteFallback".to_owned());
    };
    let vocab = json["model"]["vocab"]
        .as_object()
        .ok_or("tokenizer.json: model.vocab is no object")?;
    // ids are dense but for a few; the bound keeps a damaged one from taking memory
    let most = 2 * vocab.len() + 1024;
    let mut tokens = TokenBytes::new();
    for (text, id) in vocab {
        let id = id.as_u64().map_or(usize::MAX, |id| id as usize);
        if id >= most {
            return Err(format!("tokenizer.json: token {text:?} has no sensible id"));
        }
        if tokens.len() <= id {
            tokens.resize(id + 1, Vec::new());
        }
        tokens[id] = match (style, byte(text)) {
            (Style::Spaces, Some(byte)) => vec![byte],
            _ => style.bytes(text),
        };
    }
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        if let Some(token) = added["id"].as_u64().and_then(|id| tokens.get_mut(id as usize)) {
            token.clear();
        }
    }
    Ok(tokens)
}

/// How a vocabulary writes its tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    /// Each byte as one character, as GPT-2 has it.
    ByteLevel,
    /// Text with `▁` for a space.
    Spaces,
}

impl Style {
    /// Empty where the text is not of this style.
    fn bytes(self, text: &str) -> Vec<u8> {
        let bytes = match self {
            Self::ByteLevel => {
                let table = byte_table();
                text.chars()
                    .map(|c| table.get(&c).copied())
                    .collect::<Option<_>>()
                    .unwrap_or_default()
            }
            Self::Spaces => text.replace('\u{2581}', " ").into_bytes(),
        };
        if bytes.len() > MAX_TOKEN_BYTES {
            Vec::new()
        } else {
            bytes
        }
    }
}

/// `<0x0A>`
fn byte(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
}

/// Which byte a character stands for: printable ones for themselves, all others in order from U+0100.
fn byte_table() -> &'static HashMap<char, u8> {
    static TABLE: std::sync::OnceLock<HashMap<char, u8>> = std::sync::OnceLock::new();
    TABLE.get_or_init(|| {
        let own = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let others = (0..=u8::MAX).filter(|b| !own(*b)).zip('\u{100}'..);
        let same = (0..=u8::MAX).filter(|b| own(*b)).map(|b| (b as char, b));
        same.chain(others.map(|(b, c)| (c, b))).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_tokens_are_the_bytes_that_their_characters_stand_for() {
        let tokens = ["Ġa", "Ċ", "é", "Ã©", "<|end|>", "<0x0A>", "日"].map(str::to_owned);
        let got = from_gguf("gpt2", &tokens, &[1, 1, 1, 1, 3, 6, 1]).unwrap();
        let expected: [&[u8]; 7] = [b" a", b"\n", b"\xe9", "é".as_bytes(), b"", b"\n", b""];
        assert_eq!(got, expected);
        // every byte has its character
        let mut bytes: Vec<u8> = byte_table().values().copied().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn what_stands_for_no_text_matches_nothing() {
        let tokens = ["{", "{", "{", "{", "{", "{"].map(str::to_owned);
        for model in ["gpt2", "llama"] {
            let got = from_gguf(model, &tokens, &[0, 1, 2, 3, 4, 5]).unwrap();
            let with: Vec<usize> = (0..6).filter(|i| !got[*i].is_empty()).collect();
            assert_eq!(with, [1], "{model}");
        }
        assert!(from_gguf("bert", &tokens, &[1; 6]).unwrap_err().contains("bert"));
        assert!(
            from_gguf("gpt2", &tokens, &[1; 5])
                .unwrap_err()
                .contains("6 tokens but 5")
        );
    }

    #[test]
    fn a_tokenizer_json_gives_the_same_bytes() {
        let byte_level = br#"{"added_tokens": [{"id": 2, "content": "<|end|>"}, {"id": 9, "content": "<|far|>"}],
            "decoder": {"type": "ByteLevel"}, "model": {"vocab": {"\u0120a": 0, "\u010a": 1, "<|end|>": 2}}}"#;
        assert_eq!(
            from_tokenizer_json(byte_level).unwrap(),
            [b" a".to_vec(), b"\n".to_vec(), vec![]]
        );
        let fallback =
            br#"{"decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]},
            "model": {"vocab": {"<0x0A>": 1, "\u2581a": 3}}}"#;
        assert_eq!(
            from_tokenizer_json(fallback).unwrap(),
            [vec![], b"\n".to_vec(), vec![], b" a".to_vec()]
        );
        for (bad, named) in [
            ("{", "tokenizer.json"),
            (r#"{"decoder": {"type": "WordPiece"}}"#, "neither"),
            (r#"{"decoder": {"type": "ByteLevel"}}"#, "model.vocab"),
            (
                r#"{"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": 4000000000}}}"#,
                "sensible id",
            ),
            (
                r#"{"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": -1}}}"#,
                "sensible id",
            ),
        ] {
            let error = from_tokenizer_json(bad.as_bytes()).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }
}
