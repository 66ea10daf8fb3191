//! Messages of a conversation: read from JSON, and shaped for a template.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::{Json, TextError};

/// One message. Fields other than role and content (`name`, `tool_calls`, `tool_call_id`, …) reach the template as they are.
#[derive(Debug, Clone, serde::Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or whatever the template knows.
    pub role: String,
    /// What was said.
    #[serde(default)]
    pub content: Content,
    /// The other fields.
    #[serde(flatten)]
    pub rest: BTreeMap<String, Json>,
}

impl Message {
    /// A message of plain text.
    pub fn text(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: Content::Text(content.into()),
            rest: BTreeMap::new(),
        }
    }
}

/// The content of a message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Content {
    /// Left out, or null, as beside tool calls.
    #[default]
    Absent,
    /// A string.
    Text(String),
    /// A list of typed parts.
    Parts(Vec<Part>),
}

/// One typed part of a content. Only `text` parts can be served; others are kept so that the refusal can name them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The part's `type`.
    pub kind: String,
    /// The part's `text`.
    pub text: Option<String>,
}

impl Part {
    /// A part of plain text.
    pub fn text(text: impl Into<String>) -> Self {
        Self {
            kind: "text".into(),
            text: Some(text.into()),
        }
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentVisitor;

        impl<'de> Visitor<'de> for ContentVisitor {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a list of parts or null")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<Content, E> {
                Ok(Content::Text(text))
            }

            fn visit_unit<E: de::Error>(self) -> Result<Content, E> {
                Ok(Content::Absent)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Content, A::Error> {
                let mut all = Vec::new();
                while let Some(part) = parts.next_element()? {
                    all.push(part);
                }
                Ok(Content::Parts(all))
            }
        }

        deserializer.deserialize_any(ContentVisitor)
    }
}

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PartVisitor;

        impl<'de> Visitor<'de> for PartVisitor {
            type Value = Part;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a content part, an object with a type")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Part, A::Error> {
                let (mut kind, mut text) = (None, None);
                while let Some(field) = fields.next_key::<Cow<'_, str>>()? {
                    match &*field {
                        "type" => kind = Some(fields.next_value()?),
                        "text" => text = fields.next_value()?,
                        _ => {
                            fields.next_value::<de::IgnoredAny>()?;
                        }
                    }
                }
                Ok(Part {
                    kind: kind.ok_or_else(|| de::Error::missing_field("type"))?,
                    text,
                })
            }
        }

        deserializer.deserialize_map(PartVisitor)
    }
}

/// How a template takes the text of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContentShape {
    /// `message.content` is a string: nearly every text model.
    String,
    /// `message.content` is a list of parts that the template loops over: models that take images too.
    Parts,
}

/// The message as a template sees it.
///
/// As vLLM does: the texts of several parts are joined with a line break, a missing content is the empty string, and a tool
/// call's `arguments`, which OpenAI's clients send as a string of JSON, becomes the object that templates expect.
pub(super) fn for_template(message: &Message, index: usize, shape: ContentShape) -> Result<Json, TextError> {
    let mut fields: Vec<(Json, Json)> = Vec::with_capacity(2 + message.rest.len());
    fields.push((Json::from("role"), Json::from(message.role.as_str())));
    fields.push((Json::from("content"), content(&message.content, index, shape)?));
    for (name, value) in &message.rest {
        let value = if name == "tool_calls" {
            tool_calls(value, index)?
        } else {
            value.clone()
        };
        fields.push((Json::from(name.as_str()), value));
    }
    Ok(Json::from_pairs(fields))
}

fn content(content: &Content, index: usize, shape: ContentShape) -> Result<Json, TextError> {
    let texts: Vec<&str> = match content {
        Content::Absent => Vec::new(),
        Content::Text(text) => vec![text],
        Content::Parts(parts) => parts
            .iter()
            .enumerate()
            .map(|(at, part)| match &part.text {
                Some(text) if part.kind == "text" => Ok(text.as_str()),
                None if part.kind == "text" => Err(TextError::Field {
                    field: format!("messages[{index}].content[{at}].text"),
                    reason: "a part of type \"text\" needs a text".into(),
                }),
                _ => Err(TextError::Field {
                    field: format!("messages[{index}].content[{at}].type"),
                    reason: format!(
                        "parts of type {:?} are not supported; this model takes \"text\" parts",
                        part.kind
                    ),
                }),
            })
            .collect::<Result<_, _>>()?,
    };
    Ok(match shape {
        ContentShape::String => Json::from(texts.join("\n")),
        ContentShape::Parts => texts
            .into_iter()
            .map(|text| minijinja::context! { type => "text", text => text })
            .collect(),
    })
}

fn tool_calls(calls: &Json, index: usize) -> Result<Json, TextError> {
    let Ok(calls) = calls.try_iter() else {
        return Ok(calls.clone());
    };
    calls
        .enumerate()
        .map(|(at, call)| {
            let function = call.get_attr("function").unwrap_or_default();
            let arguments = function.get_attr("arguments").unwrap_or_default();
            let parsed = match arguments.as_str() {
                Some(text) if text.trim().is_empty() => Json::from_pairs::<[(&str, Json); 0], _, _>([]),
                Some(text) => serde_json::from_str(text).map_err(|error| TextError::Field {
                    field: format!("messages[{index}].tool_calls[{at}].function.arguments"),
                    reason: format!("not JSON: {error}"),
                })?,
                None => return Ok(call),
            };
            Ok(replaced(&call, "function", &replaced(&function, "arguments", &parsed)))
        })
        .collect()
}

/// The map `value` with `key` replaced where it stands, so that the order of keys stays what the client sent.
fn replaced(value: &Json, key: &str, new: &Json) -> Json {
    let Ok(keys) = value.try_iter() else {
        return value.clone();
    };
    Json::from_pairs(keys.map(|name| {
        let field = if name.as_str() == Some(key) {
            new.clone()
        } else {
            value.get_item(&name).unwrap_or_default()
        };
        (name, field)
    }))
}
