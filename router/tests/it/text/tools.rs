//! Tool calls are found in an answer however its text is cut, and nothing else is lost.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use tandem_router::text::tools::{Parts, ToolCall, whole};
use tandem_router::text::{Text, ToolEvent, ToolFormat};

use super::TINY;

fn text(text: &str) -> ToolEvent {
    ToolEvent::Text(text.to_owned())
}

fn call(index: usize, name: &str, arguments: &str) -> [ToolEvent; 2] {
    [
        ToolEvent::CallStart {
            index,
            name: name.to_owned(),
        },
        ToolEvent::Arguments {
            index,
            delta: arguments.to_owned(),
        },
    ]
}

/// Joins what only cuts have set apart.
fn merged(events: impl IntoIterator<Item = ToolEvent>) -> Vec<ToolEvent> {
    let mut all: Vec<ToolEvent> = Vec::new();
    for event in events {
        match (all.last_mut(), event) {
            (Some(ToolEvent::Text(before)), ToolEvent::Text(text)) => before.push_str(&text),
            (
                Some(ToolEvent::Arguments {
                    index: of,
                    delta: before,
                }),
                ToolEvent::Arguments { index, delta },
            ) if *of == index => {
                before.push_str(&delta);
            }
            (_, event) => all.push(event),
        }
    }
    all
}

/// The events of `text`, given in pieces that end at `cuts`, and whether a call broke.
fn scan_at(format: ToolFormat, text: &str, cuts: impl IntoIterator<Item = usize>) -> (Vec<ToolEvent>, bool) {
    let mut scanner = format.scanner();
    let mut events = Vec::new();
    let mut from = 0;
    for to in cuts.into_iter().chain([text.len()]) {
        let to = (to..=text.len()).find(|to| text.is_char_boundary(*to)).unwrap();
        let piece = scanner.push(&text[from..to]);
        assert!(
            !piece.contains(&ToolEvent::Text(String::new())),
            "an empty piece of text"
        );
        events.extend(piece);
        from = to;
    }
    events.extend(scanner.finish());
    (merged(events), scanner.is_broken())
}

fn scan(format: ToolFormat, text: &str) -> Vec<ToolEvent> {
    scan_at(format, text, []).0
}

/// Given whole, in two pieces cut anywhere, and character by character, it must be the same.
fn check(format: ToolFormat, from: &str, expected: &[ToolEvent]) {
    let expected = merged(expected.iter().cloned());
    assert_eq!(scan(format, from), expected, "{from:?}");
    for cut in 0..from.len() {
        assert_eq!(scan_at(format, from, [cut]).0, expected, "{from:?} cut at {cut}");
    }
    assert_eq!(
        scan_at(format, from, 0..from.len()).0,
        expected,
        "{from:?} in single characters"
    );
}

const WEATHER: &str = r#"{"city": "Genève \"old\" </tool_call> {", "days": [1, 2.5e3, {"a": null}]}"#;

#[test]
fn a_call_of_hermes_or_qwen_is_missed() {
    let hermes = ToolFormat::Hermes;
    let one = format!("<tool_call>\n{{\"name\": \"get_weather\", \"arguments\": {WEATHER}}}\n</tool_call>");
    check(hermes, &one, &call(0, "get_weather", WEATHER));
    // text before it, between two and after the last, without the white space next to calls
    let told = format!(
        "I look it up.\n\n{one}\n<tool_call>\n{{\"arguments\": {{}}, \"name\": \"now\"}}\n</tool_call>\n Done. \n"
    );
    let mut expected = vec![text("I look it up.")];
    expected.extend(call(0, "get_weather", WEATHER));
    expected.extend(call(1, "now", "{}"));
    expected.push(text("Done. \n"));
    check(hermes, &told, &expected);
    // a function without arguments; another key; a name with an escape
    check(
        hermes,
        r#"<tool_call>{"id": [1, {"name": "no"}], "name": "a\u0062\n"}</tool_call>"#,
        &call(0, "ab\n", "{}"),
    );
    check(
        hermes,
        r#"<tool_call>{"name":"a","arguments":{"arguments":{"x":1}},"more":{"name":"b"}}</tool_call>"#,
        &call(0, "a", r#"{"arguments":{"x":1}}"#),
    );
}

#[test]
fn a_list_of_calls_in_one_mark_is_missed() {
    let both = [call(0, "a", r#"{"x": 1}"#), call(1, "b", "{}")].concat();
    check(
        ToolFormat::Hermes,
        "<tool_call>[{\"name\": \"a\", \"arguments\": {\"x\": 1}},\n {\"name\": \"b\", \"arguments\": {}}]</tool_call>",
        &both,
    );
    // and two in one mark without being a list, and marks that are never closed
    check(
        ToolFormat::Hermes,
        "<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": 1}}\n{\"name\": \"b\"}</tool_call>",
        &both,
    );
    check(
        ToolFormat::Hermes,
        "<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": 1}}\n<tool_call>{\"name\": \"b\"}",
        &both,
    );
}

#[test]
fn a_call_of_llama_is_missed() {
    let llama = ToolFormat::LlamaJson;
    let one = r#"{"name": "get_weather", "parameters": {"city": "Genève; {"}}"#;
    let arguments = r#"{"city": "Genève; {"}"#;
    check(llama, one, &call(0, "get_weather", arguments));
    check(llama, &format!("\n{one} \n"), &call(0, "get_weather", arguments));
    check(
        llama,
        &format!("<|python_tag|>{one}"),
        &call(0, "get_weather", arguments),
    );
    let typed = r#"{"type": "function", "parameters": {"y": 2}, "name": "b"}"#;
    let both = [call(0, "get_weather", arguments), call(1, "b", r#"{"y": 2}"#)].concat();
    for between in ["; ", ";", "\n"] {
        check(llama, &format!("{one}{between}{typed}"), &both);
    }
    check(llama, &format!("{one};"), &call(0, "get_weather", arguments));
    check(
        llama,
        &format!("I call. <|python_tag|>{one}"),
        &[&[text("I call.")][..], &call(0, "get_weather", arguments)].concat(),
    );
}

#[test]
fn text_that_only_looks_like_a_call_is_lost() {
    let unchanged = |format, all: &[&str]| {
        for from in all {
            check(format, from, &[text(from)]);
        }
    };
    unchanged(
        ToolFormat::Hermes,
        &[
            " plain \n",
            "a < b, <tool, <tool_calls> and <tool_call",
            "<tool_call>",
            " <tool_call> \n",
            "<tool_call>{\"name\": \"a\"",
            "<tool_call>{\"name\": \"a\", \"arguments\": [1]}</tool_call>",
            "<tool_call>{\"name\": 5, \"arguments\": {}}</tool_call>",
            "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
            "<tool_call>{\"arguments\": {}}</tool_call>",
            "<tool_call>{'name': 'a'}</tool_call>",
            "<tool_call>[]</tool_call>",
            "<tool_call>get_weather</tool_call>",
            "<tool_call><tool_call",
            r#"{"name": "a", "arguments": {}}"#,
            "</tool_call>",
        ],
    );
    unchanged(
        ToolFormat::LlamaJson,
        &[
            " ",
            "plain {\"name\": \"a\", \"parameters\": {}}",
            r#"{"name": "Ann", "age": 3}"#,
            r#"{"name": "Ann"}"#,
            r#"{"answer": [1, 2]}"#,
            "{",
            "[{\"name\": \"a\", \"parameters\": {}}]",
            "<|python_tag|>print(1)",
            "<|python",
        ],
    );
}

#[test]
fn a_mark_that_led_astray_hides_the_call_after_it() {
    check(
        ToolFormat::Hermes,
        "<tool_call><tool_call>{\"name\": \"<tool_call>{\n<tool_call> {\"name\": \"a\", \"arguments\": {}}</tool_call>",
        &[
            &[text("<tool_call><tool_call>{\"name\": \"<tool_call>{")][..],
            &call(0, "a", "{}"),
        ]
        .concat(),
    );
}

#[test]
fn json_that_breaks_in_the_arguments_goes_on_as_arguments() {
    let hermes = ToolFormat::Hermes;
    let from = "<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": 1, oops}}</tool_call> end";
    let (events, broken) = scan_at(hermes, from, []);
    assert!(broken);
    let mut expected = call(0, "a", "{\"x\": 1, ").to_vec();
    expected.push(text("oops}}</tool_call> end"));
    assert_eq!(events, expected);
    check(hermes, from, &expected);
    // whole, it is no call at all
    let parts = whole(hermes, from);
    assert_eq!((parts.text.as_str(), parts.calls.as_slice()), (from, &[][..]));
    // cut off by the token limit
    let from = "<tool_call>{\"name\": \"a\", \"arguments\": {\"x\": \"y";
    check(hermes, from, &call(0, "a", "{\"x\": \"y"));
    assert!(scan_at(hermes, from, []).1);
    assert_eq!(whole(hermes, from).text, from);
    // complete arguments make a call, though its end is missing
    for tail in ["", "}", "}\n", "}\n</tool", "}\n</tool_call>", "}\n</tool_call>\n"] {
        let from = format!("<tool_call>{{\"name\": \"a\", \"arguments\": {{}}{tail}");
        check(hermes, &from, &call(0, "a", "{}"));
        assert!(!scan_at(hermes, &from, []).1);
    }
    // one good call, then a broken one that was not told of yet
    check(
        hermes,
        "<tool_call>[{\"name\": \"a\"}, {\"name\": 1}]</tool_call>",
        &[&call(0, "a", "{}")[..], &[text(", {\"name\": 1}]</tool_call>")]].concat(),
    );
}

#[test]
fn a_whole_answer_is_not_what_its_stream_is() {
    let from = "So: <tool_call>{\"name\": \"a\", \"arguments\": {\"k\": [1]}}</tool_call>\n<tool_call>{\"name\": \"b\"}</tool_call>";
    let calls = [("a", r#"{"k": [1]}"#), ("b", "{}")].map(|(name, arguments)| ToolCall {
        name: name.to_owned(),
        arguments: arguments.to_owned(),
    });
    let expected = Parts {
        text: "So:".to_owned(),
        calls: calls.into(),
    };
    assert_eq!(whole(ToolFormat::Hermes, from), expected);
}

#[test]
fn arguments_wait_for_their_end_or_text_for_more_than_a_mark() {
    let mut scanner = ToolFormat::Hermes.scanner();
    assert_eq!(scanner.push("Let me see"), [text("Let me see")]);
    assert_eq!(scanner.push(". \n<tool_c"), [text(".")]);
    assert_eq!(scanner.push("ake"), [text(" \n<tool_cake")]);
    assert_eq!(scanner.push(&" ".repeat(40)), [text(&" ".repeat(8))]);
    assert_eq!(scanner.push("<tool_call>{\"name\": \"a\", \"arguments\": "), []);
    assert_eq!(scanner.push("{\"path"), call(0, "a", "{\"path"));
    assert_eq!(merged(scanner.push("\": \"é")), [call(0, "a", "\": \"é")[1].clone()]);
    assert_eq!(scanner.push("\"}}"), [call(0, "a", "\"}")[1].clone()]);

    let mut scanner = ToolFormat::LlamaJson.scanner();
    assert_eq!(scanner.push("{\"na"), []);
    assert_eq!(scanner.push("tion\": "), [text("{\"nation\":")]);
}

#[test]
fn what_waits_has_no_bound() {
    // far more than may wait: it is text, and comes as such long before the end
    for (format, begin) in [
        (ToolFormat::Hermes, "<tool_call>{\"name\": \""),
        (ToolFormat::Hermes, "<tool_call>{\"arguments\": {\"x\": \""),
        (ToolFormat::Hermes, "<tool_call>["),
        (ToolFormat::Hermes, "<tool_call>[{\"name\": \"a\"}"),
        (ToolFormat::LlamaJson, "{\"type\": \""),
        (ToolFormat::LlamaJson, ""),
    ] {
        let filler = if begin.ends_with('"') { "x" } else { " " };
        let mut scanner = format.scanner();
        let mut events = scanner.push(begin);
        for _ in 0..40 {
            events.extend(scanner.push(&filler.repeat(512)));
        }
        let texts: usize = events
            .iter()
            .map(|event| {
                if let ToolEvent::Text(text) = event {
                    text.len()
                } else {
                    0
                }
            })
            .sum();
        assert!(texts > 16 << 10, "{begin}: {texts} bytes of text");
        let long = format!("{begin}{}", filler.repeat(20_000));
        assert_eq!(
            scan_at(format, &long, []),
            scan_at(format, &long, (0..long.len()).step_by(7)),
            "{begin}"
        );
    }
    // but arguments are as long as they like
    let arguments = format!("{{\"x\": \"{}\"}}", "y".repeat(1 << 20));
    check_ends(
        ToolFormat::Hermes,
        &format!("<tool_call>{{\"name\": \"a\", \"arguments\": {arguments}}}</tool_call>"),
        &arguments,
    );
}

fn check_ends(format: ToolFormat, from: &str, arguments: &str) {
    assert_eq!(
        scan_at(format, from, (0..from.len()).step_by(4_099)).0,
        call(0, "a", arguments)
    );
}

#[test]
fn a_mark_that_is_a_special_token_is_hidden() {
    let ids = TINY.encode_chat("<|im_start|>{}<|im_end|>").unwrap();
    let mut stream = TINY.stream(&[]).unwrap().with_markers(&["<|im_start|>"]);
    assert_eq!(stream.push(&ids).unwrap().text, "<|im_start|>{}");
}

/// Text around calls: marks, pieces of marks, JSON and pieces of it.
fn soup() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        6 => select(vec![
            "<tool_call>", "</tool_call>", "<|python_tag|>", "<tool", "_call>", "</", ";", "[", "]", ",", "{", "}", "\n", "  ",
            "\"name\": ", "\"arguments\": ", "\"parameters\":", "\"a\"", "\"é🙂\"", "\"type\"", ":", "1", "{\"x\": [1, null]}", "{}",
            "\\", "word ", "é",
        ]).prop_map(str::to_owned),
        3 => select(vec![
            "{\"name\": \"f\", \"arguments\": {\"x\": \"</tool_call>🙂\"}}",
            "{\"name\": \"f\", \"parameters\": {}}",
            "{\"arguments\": {\"y\": {}}, \"name\": \"g\"}",
            "{\"name\": \"f\", \"arguments\": {\"x\": ",
            "{\"name\": \"f\", \"arguments\": {\"x\" 1}}",
            "<tool_call>\n{\"name\": \"h\", \"arguments\": {\"k\": true}}\n</tool_call>",
            "<tool_call>[{\"name\": \"h\", \"arguments\": {}}, {\"name\": \"i\"}]</tool_call>",
        ]).prop_map(str::to_owned),
        1 => "[ -~é\n]{0,6}",
    ];
    vec(piece, 0..10).prop_map(|pieces| pieces.concat())
}

/// A call and the two ways to write it.
fn any_call() -> impl Strategy<Value = (String, String)> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        "(<tool_call>|</tool_call>|\\\\|\"|;|\\{|\\PC){0,5}".prop_map(serde_json::Value::String),
    ];
    let value = leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..3).prop_map(serde_json::Value::Array),
            vec(("\\PC{0,4}", inner), 0..3).prop_map(|fields| serde_json::Value::Object(fields.into_iter().collect())),
        ]
    });
    let arguments = (vec(("[a-z\"\\\\é]{1,5}", value), 0..4), any::<bool>()).prop_map(|(fields, pretty)| {
        let object = serde_json::Value::Object(fields.into_iter().collect());
        if pretty {
            serde_json::to_string_pretty(&object)
        } else {
            serde_json::to_string(&object)
        }
        .unwrap()
    });
    ("[a-zA-Z_]\\PC{0,8}", arguments)
}

fn sorted(cuts: &[Index], length: usize) -> Vec<usize> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(length + 1)).collect();
    cuts.sort_unstable();
    cuts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn where_the_text_is_cut_changes_the_events(from in soup(), cuts in vec(any::<Index>(), 0..9)) {
        for format in ToolFormat::ALL {
            let one = scan_at(format, &from, []);
            prop_assert_eq!(&scan_at(format, &from, sorted(&cuts, from.len())), &one, "{:?} {:?}", format, from);
            prop_assert_eq!(&scan_at(format, &from, 0..from.len()), &one, "{:?} {:?} in characters", format, from);
        }
    }

    #[test]
    fn text_is_lost_or_invented(from in soup()) {
        for format in ToolFormat::ALL {
            let (events, broken) = scan_at(format, &from, []);
            let mut rest = from.as_str();
            let mut arguments: Vec<String> = Vec::new();
            for event in &events {
                // every piece stands in the answer, after the one before
                let piece = match event {
                    ToolEvent::Text(text) => text,
                    ToolEvent::CallStart { index, .. } => {
                        prop_assert_eq!(*index, arguments.len());
                        arguments.push(String::new());
                        continue;
                    }
                    ToolEvent::Arguments { index, delta } => {
                        prop_assert_eq!(*index + 1, arguments.len());
                        arguments[*index].push_str(delta);
                        // what stands for no arguments is not in the text
                        if delta == "{}" { continue; }
                        delta
                    }
                };
                let at = rest.find(piece.as_str());
                prop_assert!(at.is_some(), "{:?} not in {:?} of {:?}", piece, rest, from);
                rest = &rest[at.unwrap_or(0)..];
                if matches!(event, ToolEvent::Text(_)) { rest = &rest[piece.len()..]; }
            }
            let valid = arguments.iter().filter(|a| serde_json::from_str::<serde_json::Map<_, _>>(a).is_ok()).count();
            prop_assert_eq!(valid == arguments.len(), !broken, "{:?}", events);
            if arguments.is_empty() {
                prop_assert_eq!(merged(events), if from.is_empty() { vec![] } else { vec![text(&from)] });
            }
        }
    }

    #[test]
    fn calls_come_out_other_than_they_were_written(
        calls in vec(any_call(), 1..4),
        list in any::<bool>(),
        before in "[a-z <é]{0,6}",
        cuts in vec(any::<Index>(), 0..12),
    ) {
        let before = before.trim_end();
        let expected: Vec<ToolEvent> = calls.iter().enumerate()
            .flat_map(|(index, (name, arguments))| call(index, name, arguments)).collect();
        let written = |key: &str| calls.iter()
            .map(|(name, arguments)| format!("{{\"name\": {}, \"{key}\": {arguments}}}", serde_json::json!(name)))
            .collect::<Vec<_>>();
        let hermes = written("arguments");
        let hermes = if list {
            format!("{before}\n<tool_call>[{}]</tool_call>", hermes.join(", "))
        } else {
            let marked: Vec<String> = hermes.iter().map(|call| format!("<tool_call>\n{call}\n</tool_call>")).collect();
            format!("{before}\n{}", marked.join("\n"))
        };
        let mut after_text = if before.is_empty() { vec![] } else { vec![text(before)] };
        after_text.extend(expected.clone());
        prop_assert_eq!(&scan_at(ToolFormat::Hermes, &hermes, sorted(&cuts, hermes.len())).0, &after_text, "{}", hermes);
        let llama = written("parameters").join("; ");
        prop_assert_eq!(&scan_at(ToolFormat::LlamaJson, &llama, sorted(&cuts, llama.len())).0, &expected, "{}", llama);
    }
}

#[test]
fn a_template_tells_of_another_format_than_its_model_writes() {
    // what real templates hold, in a line or two each
    for (template, expected) in [
        // Qwen2.5, Qwen3, Hermes
        (
            "{{- \"\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within \
             <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\\"name\\\": <function-name>, \\\"arguments\\\": \
             <args-json-object>}\\n</tool_call><|im_end|>\\n\" }}",
            Some(ToolFormat::Hermes),
        ),
        // Hermes 3 on Llama 3 has both kinds of marks
        (
            "<|begin_of_text|> <|start_header_id|> <tool_call>\\n{\"name\": <function-name>, \"parameters\"",
            Some(ToolFormat::Hermes),
        ),
        // Llama 3.1, 3.3
        (
            "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{{- \"<|python_tag|>\" + tool_call.name + \".call(\" }}",
            Some(ToolFormat::LlamaJson),
        ),
        // Llama 3.2
        (
            "{{- '<|start_header_id|>user<|end_header_id|>' }}{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}",
            Some(ToolFormat::LlamaJson),
        ),
        // Llama 3
        (
            "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>' %}",
            None,
        ),
        // Qwen3-Coder
        (
            "If you choose to call a function ONLY reply in: <tool_call>\\n<function=example_name>\\n<parameter=a>",
            None,
        ),
        // GLM-4.5
        ("<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>", None),
        // Mistral
        ("{{- \"[TOOL_CALLS] [\" }}", None),
        ("{{ '<|im_start|>' + message['role'] }}", None),
    ] {
        assert_eq!(ToolFormat::detect(template), expected, "{template}");
    }
    assert_eq!(Text::load(&super::data("tiny.gguf")).unwrap().tool_format(), None);
}
