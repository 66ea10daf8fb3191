//! Text: the only place where strings become token ids and token ids become strings.
//!
//! | room | purpose |
//! | --- | --- |
//! | [`source`] | what a tokenizer file holds, whichever format it has |
//! | `gguf`, `pre`, `hf` | reading a GGUF's metadata, its pre-tokenizer names, and `tokenizer.json` |
//! | [`template`], `python`, [`message`] | chat templates, rendered as Python's Jinja2 renders them |
//! | [`vocab`], [`detok`] | bytes of every id; ids to text without ever cutting a character |
//! | [`stop`] | stop strings over streamed text |
//! | [`stream`] | both together: what a choice of a response holds |
//! | [`tools`] | tool calls in an answer's text |
//!
//! Nothing here knows HTTP. [`Text`] is immutable, `Send + Sync` and meant to live in an [`Arc`]; a [`TextStream`] belongs
//! to one choice of one response.
//!
//! [`Text::load`] takes 40 ms for 49,000 tokens and more for larger vocabularies, [`Text::encode_prompt`] 0.3 to 1.5 ms per
//! KiB of new text: both belong on blocking threads, and rendering with them. A
//! [`TextStream`] costs 15 to 25 ns a token.

mod error;
mod gguf;
mod hf;
mod pre;
mod python;

pub mod detok;
pub mod message;
pub mod source;
pub mod stop;
pub mod stream;
pub mod template;
pub mod tools;
pub mod vocab;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

pub use error::TextError;
pub use message::{Content, Message, Part};
/// A JSON value that keeps the order of its keys, which `tojson` in a template makes visible to the model.
pub use minijinja::Value as Json;
pub use stream::{Delta, TextStream};
pub use template::{ChatInput, ChatTemplate};
pub use tools::{ToolEvent, ToolFormat, ToolScanner};
pub use vocab::Vocabulary;

use source::Source;

/// A model's text side: tokenizer, chat template, and the bytes of every token.
pub struct Text {
    tokenizer: tokenizers::Tokenizer,
    vocabulary: Arc<Vocabulary>,
    template: Option<ChatTemplate>,
    tools: Option<ToolFormat>,
    eos_ids: Vec<u32>,
    model_name: Option<String>,
}

impl std::fmt::Debug for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Text")
            .field("model_name", &self.model_name)
            .finish_non_exhaustive()
    }
}

impl Text {
    /// Loads a `.gguf` file's metadata, or a `tokenizer.json` with the files that lie beside it (`tokenizer_config.json`,
    /// `chat_template.jinja`, `generation_config.json`, each optional).
    ///
    /// Reads the whole vocabulary: call it off the serving threads.
    pub fn load(path: &Path) -> Result<Self, TextError> {
        let text = Self::from_source(Source::read(path)?)?;
        // the first that puts special tokens around a text would be a client's else
        text.encode("a", true).map_err(|error| TextError::Malformed {
            path: path.to_owned(),
            reason: error.to_string(),
        })?;
        Ok(text)
    }

    /// Builds the text side from what a file held.
    pub fn from_source(source: Source) -> Result<Self, TextError> {
        let tools = source.template.as_deref().and_then(ToolFormat::detect);
        let template = match source.template {
            Some(template) => Some(ChatTemplate::compile(&template, &source.special_tokens)?),
            None => None,
        };
        Ok(Self {
            tokenizer: source.tokenizer,
            vocabulary: Arc::new(source.vocabulary),
            template,
            tools,
            eos_ids: source.eos_ids,
            model_name: source.model_name,
        })
    }

    /// The model's name as its file gives it, if it does.
    pub fn model_name(&self) -> Option<&str> {
        self.model_name.as_deref()
    }

    /// The ids that end a generation: end of sequence, end of turn.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// The vocabulary: bytes per id.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// The chat template, if the model has one.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }

    /// How the model writes tool calls, as its chat template tells or [`with_tool_format`](Self::with_tool_format) says.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        self.tools
    }

    /// The model writes tool calls like this, whatever its template tells.
    #[must_use]
    pub fn with_tool_format(mut self, format: Option<ToolFormat>) -> Self {
        self.tools = format;
        self
    }

    /// Renders a conversation into the text that the model was trained on.
    ///
    /// A message's content is put into the text as it is: a user who writes `<|im_start|>system` gets that control
    /// token, as with every server of this kind. Templates have no escape for it; callers that need one must
    /// filter content before this call.
    pub fn render_chat(&self, input: &ChatInput<'_>) -> Result<String, TextError> {
        self.template.as_ref().ok_or(TextError::NoTemplate)?.render(input)
    }

    /// Ids of a text prompt (`/v1/completions`): special tokens written in it are recognised, and the model's own
    /// beginning-of-sequence token is put before it if the model asks for one.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, TextError> {
        self.encode(text, true)
    }

    /// Ids of a rendered conversation: the template wrote the special tokens, so none is added.
    ///
    /// Adding them again is how a prompt comes to begin with two BOS tokens, which degrades answers silently.
    pub fn encode_chat(&self, rendered: &str) -> Result<Vec<u32>, TextError> {
        self.encode(rendered, false)
    }

    /// Ids of `text`; special tokens in it are recognised, `add_special` says whether the model's own are put around it.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        // the library panics where a part of its file asks for what another part lacks
        let encoded = catch_unwind(AssertUnwindSafe(|| self.tokenizer.encode_fast(text, add_special)));
        let reason = match encoded {
            Ok(Ok(encoding)) => return Ok(encoding.get_ids().to_vec()),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "one of its parts does not fit the others".to_owned(),
        };
        Err(TextError::Encode { reason })
    }

    /// The text of `ids` as a whole. Invalid bytes become U+FFFD as in [`String::from_utf8_lossy`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        self.vocabulary.decode(ids, skip_special)
    }

    /// A stream that turns a choice's ids into text and ends it at the first of `stops`.
    pub fn stream(&self, stops: &[String]) -> Result<TextStream, TextError> {
        TextStream::new(Arc::clone(&self.vocabulary), stops)
    }
}
