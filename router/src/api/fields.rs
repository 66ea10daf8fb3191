//! Fields that have more than one shape, each with a visitor of its own: a derived untagged enum could say neither which
//! element is wrong nor what was expected.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::text::Json;

/// `stop`: a string or a list of strings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stop(pub Vec<String>);

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Stop;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Stop, E> {
                Ok(Stop(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Stop, A::Error> {
                let mut stops = Vec::new();
                while let Some(stop) = list.next_element()? {
                    stops.push(stop);
                }
                Ok(Stop(stops))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// One prompt of `/v1/completions`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// To be tokenized.
    Text(String),
    /// Token ids.
    Ids(Vec<u32>),
}

/// `prompt`: a string, a list of token ids, a list of strings, or a list of lists of token ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompts(pub Vec<Prompt>);

/// An element of a list of prompts.
enum Element {
    Text(String),
    Id(u32),
    Ids(Vec<u32>),
}

impl Element {
    fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a string",
            Self::Id(_) => "a token id",
            Self::Ids(_) => "a list of token ids",
        }
    }
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Element;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id or a list of token ids")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Element, E> {
                Ok(Element::Text(text.to_owned()))
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<Element, E> {
                match u32::try_from(id) {
                    Ok(id) => Ok(Element::Id(id)),
                    Err(_) => Err(E::invalid_value(de::Unexpected::Unsigned(id), &self)),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Element, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = list.next_element()? {
                    ids.push(id);
                }
                Ok(Element::Ids(ids))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Prompts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a list of strings, a list of token ids or a list of such lists")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompts, E> {
                Ok(Prompts(vec![Prompt::Text(text.to_owned())]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
                let mut prompts = Vec::new();
                let mut ids: Option<Vec<u32>> = None;
                let mut kind: Option<&'static str> = None;
                while let Some(element) = list.next_element::<Element>()? {
                    let first = *kind.get_or_insert(element.kind());
                    if first != element.kind() {
                        return Err(de::Error::custom(format_args!(
                            "the list begins with {first} and also holds {}",
                            element.kind()
                        )));
                    }
                    match element {
                        Element::Text(text) => prompts.push(Prompt::Text(text)),
                        Element::Ids(list) => prompts.push(Prompt::Ids(list)),
                        Element::Id(id) => ids.get_or_insert_default().push(id),
                    }
                }
                prompts.extend(ids.map(Prompt::Ids));
                Ok(Prompts(prompts))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// `logit_bias`: an object of token ids, as strings, and what is added to their logits.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LogitBias(pub Vec<(u32, f32)>);

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = LogitBias;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of token ids and numbers")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LogitBias, A::Error> {
                let mut biases = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    let id = name
                        .parse()
                        .map_err(|_| de::Error::custom(format_args!("{name:?} is not a token id")))?;
                    biases.push((id, map.next_value()?));
                }
                Ok(LogitBias(biases))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// `response_format`.
#[derive(Debug, Clone, serde::Deserialize)]
#[serde(expecting = "an object with a type")]
pub struct ResponseFormat {
    /// `text`, `json_object` or `json_schema`.
    #[serde(rename = "type")]
    pub kind: String,
    /// With `json_schema`.
    pub json_schema: Option<JsonSchema>,
}

/// `response_format.json_schema`. It is always held to the letter, whatever `strict` says.
#[derive(Debug, Clone, serde::Deserialize)]
#[serde(expecting = "an object with a name and a schema")]
pub struct JsonSchema {
    /// For people.
    pub name: String,
    /// The schema.
    pub schema: Option<Json>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompts(json: &str) -> Result<Vec<Prompt>, String> {
        serde_json::from_str::<Prompts>(json)
            .map(|p| p.0)
            .map_err(|e| e.to_string())
    }

    #[test]
    fn every_shape_of_a_prompt_is_read() {
        let text = |t: &str| Prompt::Text(t.into());
        assert_eq!(prompts(r#""a""#), Ok(vec![text("a")]));
        assert_eq!(prompts(r#"["a","b"]"#), Ok(vec![text("a"), text("b")]));
        assert_eq!(prompts("[1,2]"), Ok(vec![Prompt::Ids(vec![1, 2])]));
        assert_eq!(
            prompts("[[1],[2,3]]"),
            Ok(vec![Prompt::Ids(vec![1]), Prompt::Ids(vec![2, 3])])
        );
        assert_eq!(prompts("[]"), Ok(vec![]));
    }

    #[test]
    fn a_mixed_list_is_refused_in_words() {
        assert!(
            prompts(r#"["a",1]"#)
                .unwrap_err()
                .contains("begins with a string and also holds a token id")
        );
        assert!(prompts("[1,-1]").unwrap_err().contains("expected a string, a token id"));
        assert!(
            prompts("{}")
                .unwrap_err()
                .contains("expected a string, a list of strings")
        );
    }

    #[test]
    fn a_bias_is_of_a_token_id() {
        let biases = |json: &str| {
            serde_json::from_str::<LogitBias>(json)
                .map(|b| b.0)
                .map_err(|e| e.to_string())
        };
        assert_eq!(biases(r#"{"5":1,"7":-0.5}"#), Ok(vec![(5, 1.0), (7, -0.5)]));
        assert_eq!(biases("{}"), Ok(vec![]));
        for wrong in [r#"{"five":1}"#, r#"{"-1":1}"#, r#"{"4294967296":1}"#] {
            assert!(biases(wrong).unwrap_err().contains("is not a token id"), "{wrong}");
        }
        assert!(biases("[5]").unwrap_err().contains("expected an object of token ids"));
    }

    #[test]
    fn a_stop_is_a_string_or_a_list() {
        assert_eq!(serde_json::from_str::<Stop>(r#""x""#).unwrap().0, ["x"]);
        assert_eq!(serde_json::from_str::<Stop>(r#"["x","y"]"#).unwrap().0, ["x", "y"]);
        assert!(serde_json::from_str::<Stop>("5").is_err());
    }
}
