//! `tools` and `tool_choice`: what the template shows, how calls are read in the answer, and the grammar of a call that must be.
//!
//! A call that must be made is one JSON object and nothing else, whatever way of writing calls the model has been taught: the
//! grammar lets it write nothing but that.

use minijinja::value::ValueKind;
use tandem_wire::proto::{Grammar, grammar};

use super::request::ChatBody;
use super::sampling::MAX_SCHEMA_BYTES;
use crate::error::RouterError;
use crate::text::{Json, ToolFormat};

/// Most tools of one request, as at OpenAI's.
const MAX_TOOLS: usize = 128;

/// What becomes of a request's tools.
#[derive(Debug, Default)]
pub struct Tools {
    /// What the template shows.
    pub shown: Option<Json>,
    /// How calls are written in the answer; none: there are none.
    pub format: Option<ToolFormat>,
    /// A call must be made.
    pub grammar: Option<Grammar>,
}

/// `tool_choice`.
enum Choice {
    None,
    Auto,
    Required,
    One(String),
}

impl Tools {
    /// Reads both fields. `format` is how the model writes calls by itself.
    pub fn read(body: &ChatBody, format: Option<ToolFormat>) -> Result<Self, RouterError> {
        let functions = functions(body.tools.as_ref())?;
        let choice = choice(body.tool_choice.as_ref())?;
        if functions.is_empty() {
            return match choice {
                Choice::None | Choice::Auto => Ok(Self::default()),
                Choice::Required | Choice::One(_) => Err(RouterError::field("tool_choice", "only allowed with tools")),
            };
        }
        let shown = body.tools.clone();
        let forced: Vec<&Function> = match &choice {
            Choice::None => return Ok(Self::default()),
            Choice::Auto => Vec::new(),
            Choice::Required => functions.iter().collect(),
            Choice::One(name) => {
                let named: Vec<_> = functions.iter().filter(|function| function.name == *name).collect();
                if named.is_empty() {
                    let detail = format!("{name:?} is not the name of a tool");
                    return Err(RouterError::field("tool_choice.function.name", detail));
                }
                named
            }
        };
        if body
            .response_format
            .as_ref()
            .is_some_and(|format| format.kind != "text")
        {
            return Err(RouterError::Unsupported {
                param: "response_format".into(),
                detail: "not supported together with tools".into(),
            });
        }
        if forced.is_empty() {
            let format = format.ok_or_else(|| RouterError::Unsupported {
                param: "tools".into(),
                detail: "how this model writes calls does not show in its chat template; set --tool-parser, or choose \
                         one by tool_choice"
                    .into(),
            })?;
            return Ok(Self {
                shown,
                format: Some(format),
                grammar: None,
            });
        }
        Ok(Self {
            shown,
            format: Some(ToolFormat::LlamaJson),
            grammar: Some(call_of(&forced)?),
        })
    }
}

/// A function that may be called.
struct Function {
    name: String,
    parameters: Json,
}

fn functions(tools: Option<&Json>) -> Result<Vec<Function>, RouterError> {
    let Some(tools) = tools.filter(|tools| !tools.is_none()) else {
        return Ok(Vec::new());
    };
    let list = match tools.kind() {
        ValueKind::Seq => tools.try_iter().ok(),
        _ => None,
    };
    let list: Vec<Json> = list
        .ok_or_else(|| RouterError::field("tools", "expected a list of tools"))?
        .collect();
    if list.len() > MAX_TOOLS {
        let detail = format!("{} tools, but at most {MAX_TOOLS} are allowed", list.len());
        return Err(RouterError::field("tools", detail));
    }
    list.iter().enumerate().map(|(at, tool)| function(at, tool)).collect()
}

fn function(at: usize, tool: &Json) -> Result<Function, RouterError> {
    let get = |value: &Json, name: &str| value.get_attr(name).unwrap_or_default();
    let kind = get(tool, "type");
    match kind.as_str() {
        Some("function") => {}
        Some(other) => {
            return Err(RouterError::Unsupported {
                param: format!("tools[{at}].type"),
                detail: format!("{other:?} is not \"function\""),
            });
        }
        None => return Err(RouterError::field(format!("tools[{at}].type"), "expected \"function\"")),
    }
    let function = get(tool, "function");
    let name = get(&function, "name");
    let name = name
        .as_str()
        .filter(|name| !name.is_empty())
        .ok_or_else(|| RouterError::field(format!("tools[{at}].function.name"), "expected the function's name"))?;
    let parameters = get(&function, "parameters");
    let typed = get(&parameters, "type");
    let whole = match parameters.kind() {
        ValueKind::Map => typed.is_undefined() || typed.as_str() == Some("object"),
        ValueKind::Undefined | ValueKind::None => true,
        _ => false,
    };
    if !whole {
        let field = format!("tools[{at}].function.parameters");
        return Err(RouterError::field(field, "expected a JSON schema of an object"));
    }
    Ok(Function {
        name: name.to_owned(),
        parameters,
    })
}

fn choice(choice: Option<&Json>) -> Result<Choice, RouterError> {
    let Some(choice) = choice.filter(|choice| !choice.is_none()) else {
        return Ok(Choice::Auto);
    };
    match choice.as_str() {
        Some("none") => return Ok(Choice::None),
        Some("auto") => return Ok(Choice::Auto),
        Some("required") => return Ok(Choice::Required),
        _ => {}
    }
    let function = choice.get_attr("function").unwrap_or_default();
    match function.get_attr("name").unwrap_or_default().as_str() {
        Some(name) => Ok(Choice::One(name.to_owned())),
        None => Err(RouterError::field(
            "tool_choice",
            "expected \"none\", \"auto\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": ...}}",
        )),
    }
}

/// The grammar of one call of one of these.
fn call_of(functions: &[&Function]) -> Result<Grammar, RouterError> {
    let single = functions.len() == 1;
    let calls = functions.iter().enumerate().map(|(at, function)| {
        let place = if single { String::new() } else { format!("/anyOf/{at}") };
        call(function, &format!("#{place}/properties/parameters"))
    });
    let calls: Vec<Json> = calls.collect();
    let schema = match <[Json; 1]>::try_from(calls) {
        Ok([call]) => call,
        Err(calls) => object([("anyOf", Json::from(calls))]),
    };
    let text = serde_json::to_string(&schema)
        .map_err(|error| RouterError::field("tools", format!("cannot be written as JSON: {error}")))?;
    if text.len() > MAX_SCHEMA_BYTES {
        let detail = format!(
            "their schemas have {} bytes, but at most {MAX_SCHEMA_BYTES} are allowed",
            text.len()
        );
        return Err(RouterError::field("tools", detail));
    }
    Ok(Grammar {
        kind: Some(grammar::Kind::JsonSchema(text)),
    })
}

fn call(function: &Function, place: &str) -> Json {
    let mut parameters = vec![(Json::from("type"), Json::from("object"))];
    if let Ok(names) = function.parameters.try_iter() {
        for name in names.filter(|name| name.as_str() != Some("type")) {
            let value = function.parameters.get_item(&name).unwrap_or_default();
            parameters.push((name, moved(&value, place)));
        }
    }
    object([
        ("type", Json::from("object")),
        (
            "properties",
            object([
                ("name", object([("const", Json::from(function.name.as_str()))])),
                ("parameters", Json::from_pairs(parameters)),
            ]),
        ),
        ("required", Json::from(vec!["name", "parameters"])),
        ("additionalProperties", Json::from(false)),
    ])
}

fn object<const N: usize>(fields: [(&str, Json); N]) -> Json {
    Json::from_pairs(fields.map(|(name, value)| (Json::from(name), value)))
}

/// A part of a schema, with what it refers to by the place where its whole now stands.
fn moved(value: &Json, place: &str) -> Json {
    match value.kind() {
        ValueKind::Map => {
            let Ok(names) = value.try_iter() else {
                return value.clone();
            };
            Json::from_pairs(names.map(|name| {
                let field = value.get_item(&name).unwrap_or_default();
                let target = field.as_str().and_then(|target| target.strip_prefix('#'));
                let field = match target.filter(|_| name.as_str() == Some("$ref")) {
                    Some(path) => Json::from(format!("{place}{path}")),
                    None => moved(&field, place),
                };
                (name, field)
            }))
        }
        ValueKind::Seq => match value.try_iter() {
            Ok(items) => Json::from(items.map(|item| moved(&item, place)).collect::<Vec<_>>()),
            Err(_) => value.clone(),
        },
        _ => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str, format: Option<ToolFormat>) -> Result<Tools, RouterError> {
        Tools::read(&ChatBody::read(json.as_bytes()).unwrap(), format)
    }

    const TOOLS: &str = r##""tools": [
        {"type": "function", "function": {"name": "a", "parameters": {"properties": {"y": {"$ref": "#/$defs/n"}, "x": {}},
            "$defs": {"n": {"type": "integer"}}}}},
        {"type": "function", "function": {"name": "b"}}]"##;

    fn schema(tools: Tools) -> String {
        let Some(grammar::Kind::JsonSchema(schema)) = tools.grammar.and_then(|grammar| grammar.kind) else {
            panic!("no grammar");
        };
        schema
    }

    #[test]
    fn a_forced_calls_grammar_loses_its_keys_order_or_what_it_refers_to() {
        let one = format!(r#"{{{TOOLS}, "tool_choice": {{"type": "function", "function": {{"name": "a"}}}}}}"#);
        let tools = read(&one, None).unwrap();
        assert_eq!(tools.format, Some(ToolFormat::LlamaJson));
        assert_eq!(
            schema(tools),
            r##"{"type":"object","properties":{"name":{"const":"a"},"parameters":{"type":"object","properties":{"y":{"$ref":"#/properties/parameters/$defs/n"},"x":{}},"$defs":{"n":{"type":"integer"}}}},"required":["name","parameters"],"additionalProperties":false}"##
        );
        let any = schema(read(&format!(r#"{{{TOOLS}, "tool_choice": "required"}}"#), None).unwrap());
        assert!(any.starts_with(r#"{"anyOf":[{"#), "{any}");
        assert!(
            any.contains(r##""$ref":"#/anyOf/0/properties/parameters/$defs/n""##),
            "{any}"
        );
        assert!(
            any.contains(r#"{"name":{"const":"b"},"parameters":{"type":"object"}}"#),
            "{any}"
        );
    }

    #[test]
    fn tools_that_may_not_be_called_are_shown_or_those_that_may_are_not() {
        let auto = read(&format!("{{{TOOLS}}}"), Some(ToolFormat::Hermes)).unwrap();
        assert!(auto.shown.is_some() && auto.grammar.is_none());
        assert_eq!(auto.format, Some(ToolFormat::Hermes));
        let none = read(
            &format!(r#"{{{TOOLS}, "tool_choice": "none"}}"#),
            Some(ToolFormat::Hermes),
        )
        .unwrap();
        assert!(none.shown.is_none() && none.format.is_none());
        // a model that was taught no way of its own
        assert_eq!(read(&format!("{{{TOOLS}}}"), None).unwrap_err().param(), Some("tools"));
    }
}
