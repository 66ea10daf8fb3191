//! How a model writes its calls.

use super::ToolScanner;

/// A way to write calls. Which one a model has been taught shows in its chat template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once for each call, or one list of calls between the marks:
    /// Hermes, Qwen2.5, Qwen3, SmolLM2, SmolLM3.
    Hermes,
    /// The answer is `{"name": …, "parameters": {…}}`, several of them with `;` between: Llama 3.1 to 3.3.
    LlamaJson,
}

impl ToolFormat {
    /// Every format, for tests and messages.
    pub const ALL: [Self; 2] = [Self::Hermes, Self::LlamaJson];

    /// The format that the text of a chat template tells of, none if it tells of none or of one that is not read here.
    pub fn detect(template: &str) -> Option<Self> {
        let has = |mark| template.contains(mark);
        // the same mark around something else than JSON: Qwen3-Coder and GLM-4.5
        let no_json = has("<function=") || has("<arg_key>");
        if has("<tool_call>") {
            return (!no_json).then_some(Self::Hermes);
        }
        // Llama 3.2's small models do without the tag
        let llama = has("<|start_header_id|>") && (has("\"parameters\"") || has("<|python_tag|>"));
        llama.then_some(Self::LlamaJson)
    }

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::LlamaJson => "llama-json",
        }
    }

    /// What stands before a call. Where these are special tokens they must be shown:
    /// [`TextStream::with_markers`](crate::text::TextStream::with_markers).
    pub const fn markers(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &["<tool_call>", "</tool_call>"],
            Self::LlamaJson => &["<|python_tag|>"],
        }
    }

    /// Before each call.
    pub(super) const fn opening(self) -> &'static str {
        self.markers()[0]
    }

    /// After each call, or between two.
    pub(super) const fn closing(self) -> &'static str {
        match self {
            Self::Hermes => "</tool_call>",
            Self::LlamaJson => ";",
        }
    }

    /// A scanner for one answer.
    pub fn scanner(self) -> ToolScanner {
        ToolScanner::new(self)
    }
}
