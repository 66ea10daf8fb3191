//! What can go wrong with text, and whose fault it is.

use std::path::PathBuf;

/// An error of the text side. [`is_request_fault`](Self::is_request_fault) tells a bad request from a bad installation.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file could not be read.
    #[error("cannot read {path}: {source}; give the model's .gguf, its tokenizer.json or the folder that holds it")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what its format says.
    #[error("{path} is damaged or not what it claims to be: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the value and where it stands.
        reason: String,
    },
    /// A file is fine but asks for something that is not implemented.
    #[error("{path} needs {what}, which is not supported; {remedy}")]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The feature by its own name.
        what: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// The model has no chat template.
    #[error(
        "this model has no chat template, so a conversation cannot be turned into a prompt; \
         use /v1/completions, or put a chat_template.jinja beside its tokenizer.json"
    )]
    NoTemplate,
    /// The chat template does not compile.
    #[error("the model's chat template does not compile: {reason}")]
    BadTemplate {
        /// The template engine's words, with the line.
        reason: String,
    },
    /// The chat template refused this conversation or ran out of its budget.
    #[error("the chat template cannot render this conversation: {reason}")]
    Render {
        /// `raise_exception`'s words, or the engine's.
        reason: String,
    },
    /// A field of the request has a value that the model cannot take.
    #[error("{field}: {reason}")]
    Field {
        /// Path of the field, as in `messages[2].content[0]`.
        field: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// The tokenizer failed on a text.
    #[error("the tokenizer failed: {reason}")]
    Encode {
        /// The tokenizer's words.
        reason: String,
    },
    /// An id that the vocabulary does not have.
    #[error(
        "token id {id} is outside the vocabulary of {vocabulary_tokens} tokens; \
         the engine and the router's --tokenizer do not belong to the same model"
    )]
    UnknownToken {
        /// The id.
        id: u32,
        /// How many ids there are.
        vocabulary_tokens: usize,
    },
}

impl TextError {
    /// True when the request caused it (a 400), false when the installation did (a 500, or a refusal to start).
    pub fn is_request_fault(&self) -> bool {
        match self {
            Self::NoTemplate | Self::Render { .. } | Self::Field { .. } => true,
            Self::Io { .. }
            | Self::Malformed { .. }
            | Self::Unsupported { .. }
            | Self::BadTemplate { .. }
            | Self::Encode { .. }
            | Self::UnknownToken { .. } => false,
        }
    }

    /// The request's field at fault, for OpenAI's `param`.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::Field { field, .. } => Some(field),
            Self::NoTemplate | Self::Render { .. } => Some("messages"),
            _ => None,
        }
    }
}
