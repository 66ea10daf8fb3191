//! `tokenizer.json` and the files that lie beside it.

use std::path::Path;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use tokenizers::Tokenizer;

use super::TextError;
use super::source::{Source, SpecialTokens};
use super::vocab::VocabularyBuilder;

/// Largest file read whole; the largest known `tokenizer.json` has some 35 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Ids without a token, below the last one that has one: each costs memory, and a file of 200 bytes could ask for 80 MiB.
const MAX_UNUSED_IDS: usize = 16 << 10;

/// Reads `tokenizer.json` at `path`.
pub(super) fn read(path: &Path) -> Result<Source, TextError> {
    let malformed = |reason: String| TextError::Malformed {
        path: path.to_owned(),
        reason,
    };
    let text = text_of(path)?.ok_or_else(|| TextError::Io {
        path: path.to_owned(),
        source: std::io::Error::from(std::io::ErrorKind::NotFound),
    })?;
    let mut tokenizer = parse(&text).map_err(|why| malformed(format!("not a tokenizer.json: {why}")))?;
    // settings for training batches; left on, a long prompt would be cut off silently
    tokenizer
        .with_truncation(None)
        .map_err(|error| malformed(error.to_string()))?;
    tokenizer.with_padding(None);

    let (rule, leading_spaces) = decode_rule(path, &tokenizer)?;
    let special_ids: std::collections::HashMap<u32, bool> = tokenizer
        .get_added_tokens_decoder()
        .into_iter()
        .map(|(id, token)| (id, token.special))
        .collect();
    let tokens = tokenizer.get_vocab(true);
    let used = tokens.len();
    let ids = match tokens.into_iter().max_by_key(|(_, id)| *id) {
        None => 0,
        Some((token, id)) if id as usize > used + MAX_UNUSED_IDS => {
            return Err(malformed(format!(
                "the id of {token:?} is {id}, far above the number of tokens, {used}"
            )));
        }
        Some((_, id)) => id + 1,
    };
    let mut vocabulary = VocabularyBuilder::default();
    for id in 0..ids {
        // an id may be unused: it stands for no bytes
        let token = tokenizer.id_to_token(id).unwrap_or_default();
        match special_ids.get(&id) {
            Some(&special) => vocabulary.push(token.as_bytes(), special),
            None => vocabulary.push(&rule.bytes(&token), false),
        }
    }

    let config: Config = json_beside(path, "tokenizer_config.json")?.unwrap_or_default();
    let special_tokens = config.special_tokens();
    let template = match text_of(&path.with_file_name("chat_template.jinja"))? {
        Some(template) => Some(template),
        None => config.template(),
    };
    let generation: Generation = json_beside(path, "generation_config.json")?.unwrap_or_default();
    let mut eos_ids = generation.eos_token_id.map_or_else(Vec::new, OneOrMany::into_vec);
    if let Some(eos) = special_tokens.get("eos_token") {
        let id = tokenizer
            .token_to_id(eos)
            .ok_or_else(|| malformed(format!("the eos_token {eos:?} has no id")))?;
        if !eos_ids.contains(&id) {
            eos_ids.push(id);
        }
    }
    Ok(Source {
        tokenizer,
        vocabulary: vocabulary.finish(leading_spaces),
        template,
        special_tokens,
        eos_ids,
        model_name: None,
    })
}

/// The library panics on some files instead of refusing them: where a decoder's JSON is broken, where a normalizer's data are.
fn parse(text: &str) -> Result<Tokenizer, String> {
    serde_json::from_str::<IgnoredAny>(text).map_err(|error| error.to_string())?;
    match std::panic::catch_unwind(|| text.parse::<Tokenizer>()) {
        Ok(parsed) => parsed.map_err(|error| error.to_string()),
        Err(_) => Err("one of its parts holds what no such part can hold".to_owned()),
    }
}

/// How a token's text stands for bytes.
enum Rule {
    /// Each character is a byte of GPT-2's alphabet.
    ByteLevel,
    /// `from` stands for a space; `<0x0A>` for a byte.
    Spaces { from: Option<String>, byte_tokens: bool },
}

impl Rule {
    fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel => byte_level_bytes(token),
            Self::Spaces { from, byte_tokens } => {
                let byte = token
                    .strip_prefix("<0x")
                    .and_then(|rest| rest.strip_suffix('>'))
                    .filter(|hex| hex.len() == 2);
                if let (true, Some(Ok(byte))) = (byte_tokens, byte.map(|hex| u8::from_str_radix(hex, 16))) {
                    return vec![byte];
                }
                match from {
                    Some(from) => token.replace(from.as_str(), " ").into_bytes(),
                    None => token.as_bytes().to_vec(),
                }
            }
        }
    }
}

/// The decoders that are a table of bytes per id, and how many spaces they strip from a text's beginning. Others are refused by name.
fn decode_rule(path: &Path, tokenizer: &Tokenizer) -> Result<(Rule, usize), TextError> {
    let unsupported = |what: String| TextError::Unsupported {
        path: path.to_owned(),
        what,
        remedy: "byte-level and sentencepiece-like (Metaspace, ByteFallback) decoders are",
    };
    let decoder = tokenizer
        .get_decoder()
        .ok_or_else(|| unsupported("a tokenizer without a decoder".into()))?;
    let decoder = serde_json::to_value(decoder)
        .map_err(|error| unsupported(format!("a decoder that cannot be read ({error})")))?;
    let steps = match decoder["decoders"].as_array() {
        Some(steps) if decoder["type"] == "Sequence" => steps.clone(),
        _ => vec![decoder],
    };
    let mut byte_level = false;
    let mut spaces = (None, false);
    let mut leading = 0;
    for step in &steps {
        let name = step["type"].as_str().unwrap_or("unnamed");
        match name {
            "ByteLevel" => byte_level = true,
            "ByteFallback" => spaces.1 = true,
            "Fuse" => {}
            "Replace" if step["content"] == " " && step["pattern"]["String"].is_string() => {
                spaces.0 = step["pattern"]["String"].as_str().map(str::to_owned);
            }
            "Metaspace" => {
                spaces.0 = step["replacement"].as_str().map(str::to_owned);
                leading = usize::from(step["prepend_scheme"] != "never");
            }
            "Strip" if step["content"] == " " && step["stop"] == 0 => {
                leading = step["start"].as_u64().unwrap_or(0) as usize;
            }
            _ => return Err(unsupported(format!("the decoder {name} ({step})"))),
        }
    }
    match (byte_level, &spaces) {
        (true, (None, false)) => Ok((Rule::ByteLevel, leading)),
        (false, _) => Ok((
            Rule::Spaces {
                from: spaces.0,
                byte_tokens: spaces.1,
            },
            leading,
        )),
        (true, _) => Err(unsupported(
            "a decoder that is byte-level and sentencepiece-like at once".into(),
        )),
    }
}

/// The bytes that a token of GPT-2's alphabet stands for; a token with a character outside of it stands for itself.
pub(super) fn byte_level_bytes(token: &str) -> Vec<u8> {
    token
        .chars()
        .map(byte_level_byte)
        .collect::<Option<Vec<u8>>>()
        .unwrap_or_else(|| token.as_bytes().to_vec())
}

/// GPT-2's alphabet: bytes that print stand for themselves, the other 68 are numbered from U+0100.
fn byte_level_byte(character: char) -> Option<u8> {
    Some(match u32::from(character) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => code as u8,
        code @ 0x100..=0x120 => (code - 0x100) as u8,
        code @ 0x121..=0x142 => (code - 0x121 + 0x7f) as u8,
        0x143 => 0xad,
        _ => return None,
    })
}

fn text_of(path: &Path) -> Result<Option<String>, TextError> {
    let io = |source| TextError::Io {
        path: path.to_owned(),
        source,
    };
    match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(io(error)),
        Ok(metadata) if metadata.len() > MAX_FILE_BYTES => {
            let reason = format!("{} bytes, more than the {MAX_FILE_BYTES} that are read", metadata.len());
            return Err(TextError::Malformed {
                path: path.to_owned(),
                reason,
            });
        }
        Ok(_) => {}
    }
    std::fs::read_to_string(path).map(Some).map_err(io)
}

fn json_beside<T: for<'de> Deserialize<'de>>(path: &Path, name: &str) -> Result<Option<T>, TextError> {
    let beside = path.with_file_name(name);
    let Some(text) = text_of(&beside)? else { return Ok(None) };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| TextError::Malformed {
            path: beside,
            reason: error.to_string(),
        })
}

/// The parts of `tokenizer_config.json` that matter for text.
#[derive(Debug, Default, Deserialize)]
struct Config {
    #[serde(default)]
    chat_template: Option<Template>,
    #[serde(flatten)]
    rest: std::collections::BTreeMap<String, Value>,
}

/// One template, or several by name.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Template {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Debug, Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl Config {
    fn template(self) -> Option<String> {
        match self.chat_template? {
            Template::One(template) => Some(template),
            Template::Named(all) => all
                .into_iter()
                .find(|named| named.name == "default")
                .map(|named| named.template),
        }
    }

    /// `bos_token` and its like, each a string or an object with the string as `content`.
    fn special_tokens(&self) -> SpecialTokens {
        let token = |value: &Value| value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned);
        self.rest
            .iter()
            .filter(|(name, _)| name.ends_with("_token") && !name.starts_with("add_"))
            .filter_map(|(name, value)| Some((name.clone(), token(value)?)))
            .collect()
    }
}

/// The part of `generation_config.json` that matters for text.
#[derive(Debug, Default, Deserialize)]
struct Generation {
    #[serde(default)]
    eos_token_id: Option<OneOrMany>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl OneOrMany {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}
