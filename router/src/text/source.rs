//! What a tokenizer file holds, whichever format it has.

use std::collections::BTreeMap;
use std::path::Path;

use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::BPE;
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

use super::gguf::{Metadata, Value};
use super::vocab::{Vocabulary, VocabularyBuilder};
use super::{TextError, hf, pre};

/// Special tokens by the names that templates know them by: `bos_token`, `eos_token`, `pad_token`, `unk_token`, ….
pub type SpecialTokens = BTreeMap<String, String>;

/// The parts of a model's text side.
pub struct Source {
    pub(super) tokenizer: Tokenizer,
    pub(super) vocabulary: Vocabulary,
    pub(super) template: Option<String>,
    pub(super) special_tokens: SpecialTokens,
    pub(super) eos_ids: Vec<u32>,
    pub(super) model_name: Option<String>,
}

impl Source {
    /// Reads a `.gguf` or a `tokenizer.json`, told apart by the file's name, or the `tokenizer.json` of a folder.
    pub fn read(path: &Path) -> Result<Self, TextError> {
        if path.is_dir() {
            return hf::read(&path.join("tokenizer.json"));
        }
        let extension = path
            .extension()
            .and_then(|extension| extension.to_str())
            .unwrap_or_default();
        match extension.to_ascii_lowercase().as_str() {
            "gguf" => from_gguf(path, &Metadata::read(path)?),
            "json" => hf::read(path),
            _ => Err(TextError::Unsupported {
                path: path.to_owned(),
                what: format!("a reader for files named .{extension}"),
                remedy: "give a .gguf file, a tokenizer.json or the folder that holds it",
            }),
        }
    }
}

/// Kinds of tokens in `tokenizer.ggml.token_type`.
mod kind {
    pub(super) const CONTROL: u64 = 3;
    pub(super) const USER_DEFINED: u64 = 4;
    pub(super) const LAST: u64 = 6;
}

/// Control tokens that end an assistant's turn. Several converters name only one in `eos_token_id`, and then generation runs on
/// into the next turn; llama.cpp knows these by text too.
const ENDS_OF_TURN: [&str; 8] = [
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|endofturn|>",
    "<end_of_turn>",
];

fn from_gguf(path: &Path, metadata: &Metadata) -> Result<Source, TextError> {
    let malformed = |reason: String| TextError::Malformed {
        path: path.to_owned(),
        reason,
    };
    let unsupported = |what: String, remedy| TextError::Unsupported {
        path: path.to_owned(),
        what,
        remedy,
    };
    let need = |key: &str| malformed(format!("{key} is missing; the file has no tokenizer"));

    match metadata.string("tokenizer.ggml.model").map_err(malformed)? {
        Some("gpt2") => {}
        Some(model) => {
            return Err(unsupported(
                format!("tokenizer.ggml.model {model:?} (only \"gpt2\", byte-level BPE, is read from GGUF)"),
                "give the model's tokenizer.json instead",
            ));
        }
        None => return Err(need("tokenizer.ggml.model")),
    }
    let name = metadata
        .string("tokenizer.ggml.pre")
        .map_err(malformed)?
        .ok_or_else(|| {
            unsupported(
                "tokenizer.ggml.pre, without which its words cannot be cut as the model learned them".into(),
                "convert the model again with a current converter, or give its tokenizer.json",
            )
        })?;
    let pre = pre::by_name(name)
        .ok_or_else(|| {
            let what = format!("tokenizer.ggml.pre {name:?} (known: {})", pre::KNOWN);
            unsupported(what, "give the model's tokenizer.json instead")
        })?
        .map_err(malformed)?;

    let tokens = metadata
        .strings("tokenizer.ggml.tokens")
        .map_err(malformed)?
        .filter(|tokens| !tokens.is_empty())
        .ok_or_else(|| need("tokenizer.ggml.tokens"))?;
    let kinds = metadata.unsigneds("tokenizer.ggml.token_type").map_err(malformed)?;
    if let Some(kinds) = kinds {
        if kinds.len() != tokens.len() {
            return Err(malformed(format!(
                "{} tokens but {} token types",
                tokens.len(),
                kinds.len()
            )));
        }
        if let Some(at) = kinds.iter().position(|&kind| kind > kind::LAST) {
            return Err(malformed(format!(
                "token {at} ({:?}) is of type {}; 0 to 6 are known",
                tokens[at], kinds[at]
            )));
        }
    }
    let kind_of = |id: usize| kinds.map_or(0, |kinds| kinds[id]);
    let merges = metadata
        .strings("tokenizer.ggml.merges")
        .map_err(malformed)?
        .ok_or_else(|| need("tokenizer.ggml.merges"))?;

    let special_id = |key: &str| -> Result<Option<u32>, TextError> {
        let key = format!("tokenizer.ggml.{key}_token_id");
        match metadata.unsigned(&key).map_err(malformed)? {
            None => Ok(None),
            Some(id) if id < tokens.len() as u64 => Ok(Some(id as u32)),
            Some(id) => Err(malformed(format!(
                "{key} is {id}, but there are {} tokens",
                tokens.len()
            ))),
        }
    };
    let bos = special_id("bos")?;
    let eos = special_id("eos")?;
    let mut eos_ids: Vec<u32> = eos
        .into_iter()
        .chain(special_id("eot")?)
        .chain(special_id("eom")?)
        .collect();
    eos_ids.extend((0..tokens.len()).filter_map(|id| {
        (kind_of(id) == kind::CONTROL && ENDS_OF_TURN.contains(&tokens[id].as_str())).then_some(id as u32)
    }));
    let mut seen = std::collections::BTreeSet::new();
    eos_ids.retain(|&id| seen.insert(id));

    let mut special_tokens = SpecialTokens::new();
    for (key, id) in [
        ("bos", bos),
        ("eos", eos),
        ("unk", special_id("unknown")?),
        ("pad", special_id("padding")?),
    ] {
        if let Some(id) = id {
            special_tokens.insert(format!("{key}_token"), tokens[id as usize].clone());
        }
    }

    let mut ids = std::collections::HashMap::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        if let Some(other) = ids.insert(token.as_str(), id) {
            return Err(malformed(format!("tokens {other} and {id} are both {token:?}")));
        }
    }
    let mut vocabulary = VocabularyBuilder::default();
    let mut added = Vec::new();
    for (id, token) in tokens.iter().enumerate() {
        // a broken converter marks eos as a normal token, and then it is printed
        let control = kind_of(id) == kind::CONTROL || eos_ids.contains(&(id as u32));
        if control || kind_of(id) == kind::USER_DEFINED {
            vocabulary.push(token.as_bytes(), control);
            added.push(AddedToken::from(token.clone(), control).normalized(false));
        } else {
            vocabulary.push(&hf::byte_level_bytes(token), false);
        }
    }

    let merges: Vec<(String, String)> = merges
        .iter()
        .enumerate()
        .map(|(at, merge)| {
            // either side may itself be a space in odd vocabularies, so the separator is looked for after the first byte
            let space = merge.char_indices().skip(1).find(|&(_, character)| character == ' ');
            space
                .map(|(space, _)| (merge[..space].to_owned(), merge[space + 1..].to_owned()))
                .ok_or_else(|| malformed(format!("merge {at} is {merge:?}, which is not a pair")))
        })
        .collect::<Result<_, _>>()?;
    let model = BPE::builder()
        .vocab_and_merges(
            tokens
                .iter()
                .enumerate()
                .map(|(id, token)| (token.clone(), id as u32))
                .collect::<tokenizers::models::bpe::Vocab>(),
            merges,
        )
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(|error| malformed(format!("its merges and tokens do not fit: {error}")))?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_normalizer(pre.normalizer);
    tokenizer.with_pre_tokenizer(Some(pre.pre_tokenizer));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    tokenizer.add_tokens(&added);

    let flag = |key: &str, default| {
        metadata
            .bool(key)
            .map(|flag| flag.unwrap_or(default))
            .map_err(malformed)
    };
    let add_bos = flag("tokenizer.ggml.add_bos_token", pre.add_bos)?;
    let add_eos = flag("tokenizer.ggml.add_eos_token", false)?;
    let around = |wanted, key: &str, id: Option<u32>| match (wanted, id) {
        (false, _) => Ok(None),
        (true, Some(id)) => Ok(Some((tokens[id as usize].clone(), id))),
        (true, None) => Err(malformed(format!(
            "it wants {key} around a prompt but has no tokenizer.ggml.{key}_token_id"
        ))),
    };
    let (before, after) = (around(add_bos, "bos", bos)?, around(add_eos, "eos", eos)?);
    if before.is_some() || after.is_some() {
        let piece = |token: &Option<(String, u32)>| token.iter().map(|(text, _)| text.clone()).collect::<Vec<_>>();
        let pieces = [piece(&before), vec!["$A".to_owned()], piece(&after)].concat();
        let processor = TemplateProcessing::builder()
            .try_single(pieces)
            .map_err(|error| malformed(format!("special tokens around a prompt: {error}")))?
            .special_tokens(before.into_iter().chain(after).collect::<Vec<_>>())
            .build()
            .map_err(|error| malformed(format!("special tokens around a prompt: {error}")))?;
        tokenizer.with_post_processor(Some(processor));
    }

    let model_name = match metadata.get("general.name") {
        Some(Value::String(name)) => Some(name.clone()),
        _ => None,
    };
    Ok(Source {
        tokenizer,
        vocabulary: vocabulary.finish(0),
        template: metadata
            .string("tokenizer.chat_template")
            .map_err(malformed)?
            .map(str::to_owned),
        special_tokens,
        eos_ids,
        model_name,
    })
}
