//! Chat templates: Jinja2 as Python runs it for Hugging Face models.
//!
//! The template is compiled once. Rendering runs on a budget (`FUEL`) that bounds both its time and the memory that it can
//! allocate, whatever the conversation.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::SystemTime;

use minijinja::Value;
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment};

use super::message::{self, ContentShape};
use super::source::SpecialTokens;
use super::{Json, Message, TextError, python};

/// Instructions, or 64-byte pieces of data, that one rendering may cost: 1 GiB allocated in all, about a second.
/// A message costs 20 to 100, so this is far beyond what an 8 MiB body holds in any usual template.
const FUEL: u64 = 16 << 20;

const NAME: &str = "chat template";

/// Where a template's `strftime_now` takes the time from.
pub type Clock = fn() -> SystemTime;

/// A conversation to render.
#[derive(Debug, Clone, Copy)]
pub struct ChatInput<'a> {
    /// The messages, in order.
    pub messages: &'a [Message],
    /// The request's `tools`, as they came.
    pub tools: Option<&'a Json>,
    /// End with the opening of an assistant message, so that the model answers.
    pub add_generation_prompt: bool,
    /// `chat_template_kwargs`: further variables of the template, an object.
    pub kwargs: Option<&'a Json>,
}

impl<'a> ChatInput<'a> {
    /// A conversation that the assistant shall answer, without tools.
    pub fn new(messages: &'a [Message]) -> Self {
        Self {
            messages,
            tools: None,
            add_generation_prompt: true,
            kwargs: None,
        }
    }
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token` and the others that the template may print.
    special_tokens: SpecialTokens,
    shape: ContentShape,
}

/// Variables that a request's `chat_template_kwargs` must not replace.
const RESERVED: [&str; 5] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "chat_template",
    "tokenize",
];

impl ChatTemplate {
    /// Compiles `source`.
    pub fn compile(source: &str, special_tokens: &SpecialTokens) -> Result<Self, TextError> {
        Self::compile_with_clock(source, special_tokens, SystemTime::now)
    }

    /// Compiles `source`, with a clock of the caller's for `strftime_now`.
    pub fn compile_with_clock(source: &str, special_tokens: &SpecialTokens, clock: Clock) -> Result<Self, TextError> {
        let bad = |error: &minijinja::Error| TextError::BadTemplate {
            reason: describe(error),
        };
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|e| bad(&e))?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        python::install(&mut environment, clock);
        environment
            .add_template_owned(NAME, python::without_generation_blocks(source))
            .map_err(|e| bad(&e))?;
        let mut template = Self {
            environment,
            special_tokens: special_tokens.clone(),
            shape: ContentShape::String,
        };
        template.shape = template.probe_shape();
        Ok(template)
    }

    /// Renders a conversation.
    pub fn render(&self, input: &ChatInput<'_>) -> Result<String, TextError> {
        self.render_as(input, self.shape)
    }

    fn render_as(&self, input: &ChatInput<'_>, shape: ContentShape) -> Result<String, TextError> {
        let fail = |error: &minijinja::Error| TextError::Render {
            reason: describe(error),
        };
        let messages: Vec<Value> = input
            .messages
            .iter()
            .enumerate()
            .map(|(index, message)| message::for_template(message, index, shape))
            .collect::<Result<_, _>>()?;
        let mut variables: BTreeMap<String, Value> = BTreeMap::new();
        for (name, token) in &self.special_tokens {
            variables.insert(name.clone(), Value::from(token.as_str()));
        }
        variables.insert("documents".into(), Value::from(()));
        if let Some(kwargs) = input.kwargs {
            extend(&mut variables, kwargs)?;
        }
        variables.insert("messages".into(), Value::from(messages));
        // no tools is none, an empty list too: `tools is not none` must not open an empty tool section
        let tools = input
            .tools
            .filter(|tools| tools.is_true())
            .cloned()
            .unwrap_or_else(|| Value::from(()));
        variables.insert("tools".into(), tools);
        variables.insert("add_generation_prompt".into(), Value::from(input.add_generation_prompt));
        let template = self.environment.get_template(NAME).map_err(|e| fail(&e))?;
        template.render(Value::from(variables)).map_err(|e| fail(&e))
    }

    /// Finds out how the template takes a content: one that loops over parts prints nothing of a string, silently.
    fn probe_shape(&self) -> ContentShape {
        const PROBE: &str = "tandem-content-probe";
        let messages = [Message::text("user", PROBE)];
        let shows = |shape| {
            self.render_as(&ChatInput::new(&messages), shape)
                .is_ok_and(|text| text.contains(PROBE))
        };
        if !shows(ContentShape::String) && shows(ContentShape::Parts) {
            ContentShape::Parts
        } else {
            ContentShape::String
        }
    }
}

fn extend(variables: &mut BTreeMap<String, Value>, kwargs: &Json) -> Result<(), TextError> {
    let refuse = |field: String, reason: &str| {
        Err(TextError::Field {
            field,
            reason: reason.into(),
        })
    };
    if kwargs.is_none() || kwargs.is_undefined() {
        return Ok(());
    }
    if kwargs.kind() != minijinja::value::ValueKind::Map {
        return refuse("chat_template_kwargs".into(), "must be an object");
    }
    let Ok(names) = kwargs.try_iter() else { return Ok(()) };
    for name in names {
        let value = kwargs.get_item(&name).unwrap_or_default();
        if let Some(reserved) = RESERVED.iter().find(|reserved| name.as_str() == Some(reserved)) {
            return refuse(format!("chat_template_kwargs.{reserved}"), "cannot be set here");
        }
        variables.insert(name.to_string(), value);
    }
    Ok(())
}

/// What went wrong, its cause and the line; `raise_exception`'s words come through alone.
fn describe(error: &minijinja::Error) -> String {
    if let Some(raised) = python::raised(error) {
        return raised.to_owned();
    }
    let mut text = error.detail().map_or_else(
        || error.kind().to_string(),
        |detail| format!("{}: {detail}", error.kind()),
    );
    if let Some(line) = error.line() {
        // writing into a String cannot fail
        let _ = write!(text, " (line {line} of the template)");
    }
    text
}
