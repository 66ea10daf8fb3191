//! `/tokenize` and `/detokenize`, as vLLM has them.

use serde::{Deserialize, Serialize};

use super::prepare::{Limits, Origin, TextWork, check_ids};
use super::request::read;
use crate::error::RouterError;
use crate::metrics::Endpoint;
use crate::text::{ChatInput, Json, Message};

/// The body of `/tokenize`: a prompt or a conversation.
#[derive(Debug, Deserialize)]
pub struct TokenizeBody {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    tools: Option<Json>,
    chat_template_kwargs: Option<Json>,
    /// Open an assistant's message; the default is true, as in a chat.
    add_generation_prompt: Option<bool>,
    /// The model's own around a prompt; the defaults are those of the two APIs.
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

/// The body of `/detokenize`.
#[derive(Debug, Deserialize)]
pub struct DetokenizeBody {
    model: Option<String>,
    tokens: Option<Vec<u32>>,
}

#[derive(Debug, Serialize)]
struct Tokenized {
    count: usize,
    max_model_len: Option<u32>,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

#[derive(Debug, Serialize)]
struct Detokenized {
    prompt: String,
}

impl TextWork {
    /// Answers `/tokenize`, as JSON.
    pub async fn tokenize(&self, body: &[u8], limits: &Limits, origin: &Origin) -> Result<Vec<u8>, RouterError> {
        let body: TokenizeBody = read(body)?;
        body.model
            .as_deref()
            .map_or(Ok(()), |asked| limits.check_model(asked))?;
        let endpoint = match (&body.prompt, &body.messages) {
            (Some(_), None) => Endpoint::Completions,
            (None, Some(messages)) if messages.is_empty() => {
                return Err(RouterError::field("messages", "give at least one message"));
            }
            (None, Some(_)) => Endpoint::Chat,
            (Some(_), Some(_)) => return Err(RouterError::field("prompt", "give either a prompt or messages")),
            (None, None) => return Err(RouterError::field("prompt", "missing; give a prompt or messages")),
        };
        let (bound, max_model_len) = (self.bound(limits, endpoint), limits.max_length_tokens);
        let answer = self
            .run(
                origin.came + limits.knobs.request(),
                origin.asker,
                limits,
                move |text| {
                    let rendered = match &body.messages {
                        Some(messages) => text.render_chat(&ChatInput {
                            tools: body.tools.as_ref(),
                            kwargs: body.chat_template_kwargs.as_ref(),
                            add_generation_prompt: body.add_generation_prompt.unwrap_or(true),
                            ..ChatInput::new(messages)
                        })?,
                        None => body.prompt.unwrap_or_default(),
                    };
                    bound(&rendered)?;
                    let add_special = body.add_special_tokens.unwrap_or(body.messages.is_none());
                    let tokens = text.encode(&rendered, add_special)?;
                    let strings = || tokens.iter().map(|id| text.decode(&[*id], false)).collect();
                    let token_strs = body.return_token_strs.unwrap_or(false).then(strings).transpose()?;
                    Ok(Tokenized {
                        count: tokens.len(),
                        max_model_len,
                        tokens,
                        token_strs,
                    })
                },
            )
            .await?;
        Ok(serde_json::to_vec(&answer).unwrap_or_default())
    }

    /// Answers `/detokenize`, as JSON. Special tokens are a part of the text.
    pub async fn detokenize(&self, body: &[u8], limits: &Limits, origin: &Origin) -> Result<Vec<u8>, RouterError> {
        let body: DetokenizeBody = read(body)?;
        body.model
            .as_deref()
            .map_or(Ok(()), |asked| limits.check_model(asked))?;
        let tokens = body.tokens.ok_or_else(|| RouterError::field("tokens", "missing"))?;
        let prompt = self
            .run(
                origin.came + limits.knobs.request(),
                origin.asker,
                limits,
                move |text| {
                    check_ids("tokens", &tokens, text.vocabulary().len())?;
                    Ok(text.decode(&tokens, false)?)
                },
            )
            .await?;
        Ok(serde_json::to_vec(&Detokenized { prompt }).unwrap_or_default())
    }
}
