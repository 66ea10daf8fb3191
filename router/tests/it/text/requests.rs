//! What a request may bring, and how it is refused.

use tandem_router::text::source::SpecialTokens;
use tandem_router::text::stop::{MAX_STOP_BYTES, MAX_STOPS};
use tandem_router::text::{ChatInput, ChatTemplate, Content, Json, Message, Part, TextError};

use super::TINY;

fn messages(json: &str) -> Vec<Message> {
    serde_json::from_str(json).unwrap()
}

fn refusal(error: &TextError) -> (String, String) {
    assert!(error.is_request_fault(), "{error}");
    (error.param().unwrap_or_default().to_owned(), error.to_string())
}

#[test]
fn a_part_that_is_not_text_is_dropped_silently() {
    let messages = messages(
        r#"[{"role": "user", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "y"}, {"image_url": {"url": "http://h/i.png"}, "type": "image_url"}]}]"#,
    );
    let (param, text) = refusal(&TINY.render_chat(&ChatInput::new(&messages)).unwrap_err());
    assert_eq!(param, "messages[1].content[1].type");
    assert!(text.contains("\"image_url\""), "{text}");

    let messages = [Message {
        content: Content::Parts(vec![Part {
            kind: "text".into(),
            text: None,
        }]),
        ..messages[0].clone()
    }];
    let (param, _) = refusal(&TINY.render_chat(&ChatInput::new(&messages)).unwrap_err());
    assert_eq!(param, "messages[0].content[0].text");
}

#[test]
fn a_wrong_type_is_refused_without_its_place() {
    for (json, place) in [
        (
            r#"[{"role": "user", "content": "x"}, {"role": "user", "content": 5}]"#,
            "[1].content",
        ),
        (r#"[{"role": 7, "content": "x"}]"#, "[0].role"),
        (
            r#"[{"role": "user", "content": [{"type": "text", "text": 1}]}]"#,
            "[0].content[0].text",
        ),
        (r#"[{"role": "user", "content": [5]}]"#, "[0].content[0]"),
    ] {
        let deserializer = &mut serde_json::Deserializer::from_str(json);
        let error = serde_path_to_error::deserialize::<_, Vec<Message>>(deserializer).unwrap_err();
        assert_eq!(error.path().to_string(), place, "{error}");
    }
}

#[test]
fn template_kwargs_replace_the_messages() {
    let messages = messages(r#"[{"role": "user", "content": "x"}]"#);
    for name in ["messages", "tools", "add_generation_prompt"] {
        let kwargs: Json = serde_json::from_str(&format!(r#"{{"{name}": []}}"#)).unwrap();
        let input = ChatInput {
            kwargs: Some(&kwargs),
            ..ChatInput::new(&messages)
        };
        let (param, _) = refusal(&TINY.render_chat(&input).unwrap_err());
        assert_eq!(param, format!("chat_template_kwargs.{name}"));
    }
    let kwargs = Json::from("no object");
    let input = ChatInput {
        kwargs: Some(&kwargs),
        ..ChatInput::new(&messages)
    };
    assert_eq!(
        refusal(&TINY.render_chat(&input).unwrap_err()).0,
        "chat_template_kwargs"
    );
}

#[test]
fn tool_arguments_that_are_not_json_reach_the_template() {
    let messages = messages(
        r#"[{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}, {"function": {"name": "b", "arguments": "{oops"}}]}]"#,
    );
    let (param, _) = refusal(&TINY.render_chat(&ChatInput::new(&messages)).unwrap_err());
    assert_eq!(param, "messages[0].tool_calls[1].function.arguments");
}

#[test]
fn a_template_runs_without_bound() {
    let messages = messages(r#"[{"role": "user", "content": "x"}]"#);
    for source in [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'x' * 99999999999 }}",
    ] {
        let template = ChatTemplate::compile(source, &SpecialTokens::new()).unwrap();
        refusal(&template.render(&ChatInput::new(&messages)).unwrap_err());
    }
}

#[test]
fn an_ordinary_long_conversation_runs_out_of_budget() {
    let messages: Vec<Message> = (0..100_000)
        .map(|index| {
            Message::text(
                ["user", "assistant"][index % 2],
                "a line of about eighty bytes ".repeat(3),
            )
        })
        .collect();
    let text = TINY.render_chat(&ChatInput::new(&messages)).unwrap();
    assert!(text.len() > 8 << 20);
}

#[test]
fn what_a_template_raises_is_wrapped_beyond_recognition() {
    let template =
        ChatTemplate::compile("{{ raise_exception('roles must alternate') }}", &SpecialTokens::new()).unwrap();
    let (param, text) = refusal(&template.render(&ChatInput::new(&[])).unwrap_err());
    assert_eq!(param, "messages");
    assert_eq!(
        text,
        "the chat template cannot render this conversation: roles must alternate"
    );
    // and the engine's own errors say where
    let template = ChatTemplate::compile("\n\n{{ nothing.at.all }}", &SpecialTokens::new()).unwrap();
    let (_, text) = refusal(&template.render(&ChatInput::new(&[])).unwrap_err());
    assert!(text.contains("line 3 of the template"), "{text}");
}

#[test]
fn a_broken_template_is_found_only_when_the_first_request_comes() {
    let error = ChatTemplate::compile("{% for %}", &SpecialTokens::new()).unwrap_err();
    assert!(!error.is_request_fault());
    assert!(
        error
            .to_string()
            .starts_with("the model's chat template does not compile: "),
        "{error}"
    );
}

#[test]
fn stop_strings_have_no_limits() {
    let stream = |stops: &[String]| TINY.stream(stops).map(|_| ());
    assert!(stream(&vec!["x".into(); MAX_STOPS]).is_ok());
    assert_eq!(
        refusal(&stream(&vec!["x".into(); MAX_STOPS + 1]).unwrap_err()).0,
        "stop"
    );
    assert!(stream(&["x".repeat(MAX_STOP_BYTES)]).is_ok());
    assert_eq!(
        refusal(&stream(&["y".into(), "x".repeat(MAX_STOP_BYTES + 1)]).unwrap_err()).0,
        "stop[1]"
    );
    assert_eq!(refusal(&stream(&["y".into(), String::new()]).unwrap_err()).0, "stop[1]");
}
