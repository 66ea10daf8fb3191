//! GGUF's names of pre-tokenizers: how text is cut into words before byte pairs are merged.
//!
//! A GGUF carries only the name; the patterns are those of the models' own `tokenizer.json`. A wrong pattern
//! gives plausible wrong ids and a worse model, so an unknown name is an error.

use tokenizers::normalizers::unicode::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

/// Llama 3: digits in groups of up to three.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2, 2.5 and 3: digits one by one.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Mistral's Tekken: words also split where case changes from lower to upper.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// What llama.cpp does for files that say `default`: punctuation alone, then GPT-2's words, then digits by three.
const DEFAULT: [&str; 4] = [
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
];

/// What comes before the byte pairs.
pub(super) struct PreTokenization {
    pub(super) normalizer: Option<NormalizerWrapper>,
    pub(super) pre_tokenizer: PreTokenizerWrapper,
    /// A word that is a token as a whole is that token, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// Whether text begins with BOS where the file does not say.
    pub(super) add_bos: bool,
}

/// Names that [`by_name`] knows, for the error about one that it does not.
pub(super) const KNOWN: &str =
    "gpt-2, default, smollm, starcoder, refact, llama-bpe, llama3, llama-v3, falcon3, qwen2, deepseek-r1-qwen, tekken";

/// The pre-tokenization that a GGUF's `tokenizer.ggml.pre` names, or `None` if the name is unknown.
pub(super) fn by_name(name: &str) -> Option<Result<PreTokenization, String>> {
    let plain = |pre_tokenizer| PreTokenization {
        normalizer: None,
        pre_tokenizer,
        ignore_merges: false,
        add_bos: false,
    };
    Some(match name {
        "gpt-2" => Ok(plain(ByteLevel::new(false, true, true).into())),
        "smollm" | "starcoder" | "refact" => {
            let parts = vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()];
            Ok(plain(Sequence::new(parts).into()))
        }
        "default" => split(&DEFAULT).map(plain),
        "llama-bpe" | "llama3" | "llama-v3" | "falcon3" => split(&[LLAMA3]).map(|pre_tokenizer| PreTokenization {
            ignore_merges: true,
            add_bos: true,
            ..plain(pre_tokenizer)
        }),
        "qwen2" | "deepseek-r1-qwen" => split(&[QWEN2]).map(|pre_tokenizer| PreTokenization {
            normalizer: Some(NFC.into()),
            ..plain(pre_tokenizer)
        }),
        "tekken" => split(&[TEKKEN]).map(|pre_tokenizer| PreTokenization {
            ignore_merges: true,
            add_bos: true,
            ..plain(pre_tokenizer)
        }),
        _ => return None,
    })
}

fn split(patterns: &[&str]) -> Result<PreTokenizerWrapper, String> {
    let mut parts: Vec<PreTokenizerWrapper> = Vec::with_capacity(patterns.len() + 1);
    for &pattern in patterns {
        let pattern = SplitPattern::Regex(pattern.into());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(|error| error.to_string())?;
        parts.push(split.into());
    }
    parts.push(ByteLevel::new(false, true, false).into());
    Ok(Sequence::new(parts).into())
}
