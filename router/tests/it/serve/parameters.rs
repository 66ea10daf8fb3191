//! Every parameter of both APIs: what the engine is asked for, or the refusal that names the field.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tandem_router::api::request::{ChatBody, CompletionBody};
use tandem_wire::proto::{GenerateRequest, grammar};

use super::client::question;
use super::engine;
use super::stack::stack;

/// What a value must lead to.
enum Then {
    /// An answer; the engine saw these of [`seen`].
    Asked(Value),
    /// A refusal that names this field.
    Wrong(&'static str),
    /// A refusal of something that is not supported.
    Unsupported(&'static str),
}

use Then::{Asked, Unsupported, Wrong};

/// A parameter with the values that are tried.
type Row = (&'static str, Vec<(Value, Then)>);

/// What an engine was asked for, as JSON.
fn seen(call: &GenerateRequest) -> Value {
    let sampling = call.sampling.clone().unwrap();
    let grammar = sampling.grammar.and_then(|grammar| grammar.kind);
    json!({
        "prompt": call.prompt_tokens,
        "max_new_tokens": call.max_new_tokens,
        "stop_token_ids": call.stop_token_ids,
        "ignore_eos": call.ignore_eos,
        "batch_tokens": call.batch_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": sampling.logit_bias.iter().map(|b| (b.token, b.bias)).collect::<Vec<_>>(),
        "min_new_tokens": sampling.min_new_tokens,
        "logprobs": sampling.logprobs,
        "schema": grammar.map(|grammar::Kind::JsonSchema(schema)| schema),
    })
}

/// A number that reaches the engine as it is from `least` to `most`, and not beyond.
fn within(name: &'static str, least: f64, most: f64, beyond: [f64; 2]) -> Row {
    let mut cases: Vec<_> = [least, f64::midpoint(least, most), most]
        .map(|value| (json!(value), Asked(json!({name: value as f32}))))
        .into_iter()
        .collect();
    cases.extend(beyond.map(|value| (json!(value), Wrong(name))));
    cases.extend([json!("1"), json!([1]), json!(1e60)].map(|value| (value, Wrong(name))));
    (name, cases)
}

/// A flag whose other value is not supported.
fn only(name: &'static str, neutral: Value, other: Value) -> Row {
    (name, vec![(neutral, Asked(json!({}))), (other, Unsupported(name))])
}

fn both() -> Vec<Row> {
    let schema = json!({"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "number"}}});
    let format = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let many: Value = (0..301)
        .map(|id| (id.to_string(), json!(1)))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let most: Value = (0..300)
        .map(|id| (id.to_string(), json!(1)))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let long = json!({"description": "x".repeat(64 << 10)});
    vec![
        within("temperature", 0.0, 2.0, [-0.25, 2.25]),
        within("top_p", 0.0625, 1.0, [0.0, 1.25]),
        within("min_p", 0.0, 1.0, [-0.25, 1.25]),
        within("presence_penalty", -2.0, 2.0, [-2.25, 2.25]),
        within("frequency_penalty", -2.0, 2.0, [-2.25, 2.25]),
        within("repetition_penalty", 0.0625, 100.0, [0.0, 100.5]),
        (
            "top_k",
            vec![
                (json!(40), Asked(json!({"top_k": 40}))),
                (json!(1), Asked(json!({"top_k": 1}))),
                (json!(0), Asked(json!({"top_k": 0}))),
                (json!(-1), Asked(json!({"top_k": 0}))),
                (json!(1_u64 << 40), Asked(json!({"top_k": 0}))),
                (json!(-2), Wrong("top_k")),
                (json!(1.5), Wrong("top_k")),
                (json!("40"), Wrong("top_k")),
            ],
        ),
        (
            "seed",
            vec![
                (json!(7), Asked(json!({"seed": 7}))),
                (json!(-1), Asked(json!({"seed": u64::MAX}))),
                (json!(i64::MIN), Asked(json!({"seed": 1_u64 << 63}))),
                (json!(u64::MAX), Wrong("seed")),
                (json!("7"), Wrong("seed")),
                (json!(0.5), Wrong("seed")),
            ],
        ),
        (
            "max_tokens",
            vec![
                (json!(1), Asked(json!({"max_new_tokens": 1}))),
                (json!(7), Asked(json!({"max_new_tokens": 7}))),
                (json!(0), Wrong("max_tokens")),
                (json!(-1), Wrong("max_tokens")),
                (json!("x"), Wrong("max_tokens")),
            ],
        ),
        (
            "max_completion_tokens",
            vec![
                (json!(7), Asked(json!({"max_new_tokens": 7}))),
                (json!(0), Wrong("max_completion_tokens")),
                (json!(1.5), Wrong("max_completion_tokens")),
            ],
        ),
        (
            "min_tokens",
            vec![
                (json!(0), Asked(json!({"min_new_tokens": 0}))),
                (json!(16), Asked(json!({"min_new_tokens": 16}))),
                (json!(-1), Wrong("min_tokens")),
                (json!("x"), Wrong("min_tokens")),
            ],
        ),
        (
            "logit_bias",
            vec![
                (json!({}), Asked(json!({"logit_bias": []}))),
                (
                    json!({"525": -100, "0": 100, "7": 0.5}),
                    Asked(json!({"logit_bias": [[0, 100.0], [7, 0.5], [525, -100.0]]})),
                ),
                (most, Asked(json!({}))),
                (many, Wrong("logit_bias")),
                (json!({"526": 1}), Wrong("logit_bias.526")),
                (json!({"5": 100.5}), Wrong("logit_bias.5")),
                (json!({"5": -101}), Wrong("logit_bias.5")),
                (json!({"5": "1"}), Wrong("logit_bias.5")),
                (json!({"5": 1, "05": 1}), Wrong("logit_bias.5")),
                (json!({"five": 1}), Wrong("logit_bias")),
                (json!([5]), Wrong("logit_bias")),
            ],
        ),
        (
            "response_format",
            vec![
                (json!({"type": "text"}), Asked(json!({"schema": null}))),
                (
                    json!({"type": "json_object"}),
                    Asked(json!({"schema": r#"{"type":"object"}"#})),
                ),
                (
                    format(schema.clone()),
                    // in the order of the request: it is that of the answer
                    Asked(json!({"schema": schema.to_string()})),
                ),
                (format(json!({})), Asked(json!({"schema": "{}"}))),
                (format(json!(true)), Wrong("response_format.json_schema.schema")),
                (format(json!(null)), Wrong("response_format.json_schema.schema")),
                (format(long), Wrong("response_format.json_schema.schema")),
                (json!({"type": "json_schema"}), Wrong("response_format.json_schema")),
                (
                    json!({"type": "json_schema", "json_schema": {"schema": {}}}),
                    Wrong("response_format.json_schema.name"),
                ),
                (json!({"type": "regex"}), Unsupported("response_format.type")),
                (json!({}), Wrong("response_format.type")),
                (json!({"type": 5}), Wrong("response_format.type")),
                (json!("json"), Wrong("response_format")),
            ],
        ),
        (
            "stop",
            vec![
                (json!("x"), Asked(json!({}))),
                (json!(["x", "y"]), Asked(json!({}))),
                (json!([]), Asked(json!({}))),
                (json!(""), Wrong("stop[0]")),
                (json!(["x", 5]), Wrong("stop[1]")),
                (json!(vec!["x"; 17]), Wrong("stop")),
                (json!(5), Wrong("stop")),
            ],
        ),
        (
            "stop_token_ids",
            vec![
                (json!([9, 8]), Asked(json!({"stop_token_ids": [9, 8]}))),
                (json!(vec![1; 128]), Asked(json!({}))),
                (json!(vec![1; 129]), Wrong("stop_token_ids")),
                (json!([1, 526]), Wrong("stop_token_ids")),
                (json!([1, -2]), Wrong("stop_token_ids[1]")),
                (json!("x"), Wrong("stop_token_ids")),
            ],
        ),
        (
            "ignore_eos",
            vec![
                (json!(true), Asked(json!({"ignore_eos": true}))),
                (json!(false), Asked(json!({"ignore_eos": false}))),
                (json!("yes"), Wrong("ignore_eos")),
            ],
        ),
        (
            "skip_special_tokens",
            vec![
                (json!(true), Asked(json!({}))),
                (json!(false), Asked(json!({}))),
                (json!(1), Wrong("skip_special_tokens")),
            ],
        ),
        (
            "stream",
            vec![
                (json!(true), Asked(json!({"batch_tokens": false}))),
                (json!(false), Asked(json!({"batch_tokens": true}))),
                (json!("yes"), Wrong("stream")),
            ],
        ),
        (
            "stream_options",
            vec![
                (json!(null), Asked(json!({}))),
                (json!({"include_usage": true}), Wrong("stream_options")),
                (json!({"include_usage": 3}), Wrong("stream_options.include_usage")),
                (json!(5), Wrong("stream_options")),
            ],
        ),
        (
            "model",
            vec![
                (json!("tiny"), Asked(json!({}))),
                (json!(5), Wrong("model")),
                (json!(null), Wrong("model")),
            ],
        ),
        (
            "n",
            vec![
                (json!(1), Asked(json!({}))),
                (json!(2), Asked(json!({}))),
                (json!(128), Asked(json!({}))),
                (json!(129), Wrong("n")),
                (json!(0), Wrong("n")),
                (json!(-1), Wrong("n")),
                (json!("2"), Wrong("n")),
            ],
        ),
        only("prompt_logprobs", json!(null), json!(1)),
        only("use_beam_search", json!(false), json!(true)),
        only("allowed_token_ids", json!([]), json!([5])),
        only("bad_words", json!([]), json!(["x"])),
        only("include_stop_str_in_output", json!(false), json!(true)),
        only("truncate_prompt_tokens", json!(null), json!(5)),
        only("return_token_ids", json!(false), json!(true)),
        only("return_tokens_as_token_ids", json!(false), json!(true)),
        only("guided_json", json!(null), json!({"type": "object"})),
        only("guided_regex", json!(null), json!("a+")),
        only("guided_choice", json!([]), json!(["a"])),
        only("guided_grammar", json!(null), json!("root ::= x")),
        only("structured_outputs", json!({}), json!({"regex": "a+"})),
        only("logits_processors", json!([]), json!(["x"])),
        // not known, and so ignored as OpenAI's servers do
        ("user", vec![(json!("someone"), Asked(json!({})))]),
        ("metadata", vec![(json!({"a": 1}), Asked(json!({})))]),
        ("store", vec![(json!(true), Asked(json!({})))]),
        ("service_tier", vec![(json!("auto"), Asked(json!({})))]),
        ("unheard_of", vec![(json!([1]), Asked(json!({})))]),
    ]
}

fn chat() -> Vec<Row> {
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    vec![
        (
            "messages",
            vec![
                (user(json!("x")), Asked(json!({}))),
                (user(json!([{"type": "text", "text": "x"}])), Asked(json!({}))),
                (user(json!(5)), Wrong("messages[0].content")),
                (
                    user(json!([{"type": "image_url"}])),
                    Wrong("messages[0].content[0].type"),
                ),
                (json!([{"content": "x"}]), Wrong("messages[0].role")),
                (json!([]), Wrong("messages")),
                (json!(null), Wrong("messages")),
                (json!("x"), Wrong("messages")),
            ],
        ),
        (
            "chat_template_kwargs",
            vec![
                (json!({"thinking": false}), Asked(json!({}))),
                (json!({"messages": []}), Wrong("chat_template_kwargs.messages")),
                (json!("x"), Wrong("chat_template_kwargs")),
            ],
        ),
        (
            "tools",
            vec![
                (json!([]), Asked(json!({"schema": null}))),
                // the template of this model tells of no way to write calls
                (
                    json!([{"type": "function", "function": {"name": "f"}}]),
                    Unsupported("tools"),
                ),
                (json!([{"type": "retrieval"}]), Unsupported("tools[0].type")),
                (json!([{"function": {"name": "f"}}]), Wrong("tools[0].type")),
                (
                    json!([{"type": "function", "function": {}}]),
                    Wrong("tools[0].function.name"),
                ),
                (
                    json!([{"type": "function", "function": {"name": ""}}]),
                    Wrong("tools[0].function.name"),
                ),
                (
                    json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]),
                    Wrong("tools[0].function.parameters"),
                ),
                (
                    json!(vec![json!({"type": "function", "function": {"name": "f"}}); 129]),
                    Wrong("tools"),
                ),
                (json!("x"), Wrong("tools")),
                (json!({"type": "function"}), Wrong("tools")),
            ],
        ),
        (
            "tool_choice",
            vec![
                (json!("none"), Asked(json!({}))),
                (json!("auto"), Asked(json!({}))),
                (json!("required"), Wrong("tool_choice")),
                (
                    json!({"type": "function", "function": {"name": "f"}}),
                    Wrong("tool_choice"),
                ),
                (json!("some"), Wrong("tool_choice")),
                (json!(5), Wrong("tool_choice")),
                (json!({"type": "function"}), Wrong("tool_choice")),
            ],
        ),
        only("functions", json!([]), json!([{}])),
        only("function_call", json!("none"), json!({"name": "f"})),
        (
            "logprobs",
            vec![
                (json!(false), Asked(json!({"logprobs": null}))),
                (json!(true), Asked(json!({"logprobs": 0}))),
                (json!(1), Wrong("logprobs")),
            ],
        ),
        (
            "top_logprobs",
            vec![
                (json!(0), Asked(json!({"logprobs": null}))),
                (json!(2), Wrong("top_logprobs")),
                (json!(-1), Wrong("top_logprobs")),
                (json!("2"), Wrong("top_logprobs")),
            ],
        ),
        only("audio", json!(null), json!({"voice": "x"})),
        only("modalities", json!(["text"]), json!(["text", "audio"])),
        only("echo", json!(false), json!(true)),
        only("add_special_tokens", json!(false), json!(true)),
        only("add_generation_prompt", json!(true), json!(false)),
        only("continue_final_message", json!(false), json!(true)),
        only("chat_template", json!(null), json!("{{ x }}")),
        only("documents", json!([]), json!([{"text": "x"}])),
        only("web_search_options", json!({}), json!({"search_context_size": "low"})),
        (
            "parallel_tool_calls",
            vec![
                (json!(true), Asked(json!({}))),
                (json!(false), Asked(json!({}))),
                (json!("no"), Wrong("parallel_tool_calls")),
                (json!(0), Wrong("parallel_tool_calls")),
            ],
        ),
    ]
}

fn completions() -> Vec<Row> {
    vec![
        (
            "prompt",
            vec![
                (json!("x"), Asked(json!({}))),
                (json!([0, 525]), Asked(json!({"prompt": [0, 525]}))),
                (json!([[0, 525]]), Asked(json!({"prompt": [0, 525]}))),
                (json!([0, 526]), Wrong("prompt[1]")),
                (json!([[0], [526]]), Wrong("prompt[1][0]")),
                (json!(vec!["x"; 65]), Wrong("prompt")),
                (json!([]), Wrong("prompt")),
                (json!(["x", 5]), Wrong("prompt")),
                (json!({"text": "x"}), Wrong("prompt")),
                (json!(null), Wrong("prompt")),
            ],
        ),
        (
            "logprobs",
            vec![
                (json!(0), Asked(json!({"logprobs": 0}))),
                (json!(20), Asked(json!({"logprobs": 20}))),
                (json!(21), Wrong("logprobs")),
                (json!(-1), Wrong("logprobs")),
                (json!(true), Wrong("logprobs")),
            ],
        ),
        (
            "best_of",
            vec![
                (json!(1), Asked(json!({}))),
                (json!(2), Unsupported("best_of")),
                (json!("1"), Wrong("best_of")),
            ],
        ),
        only("echo", json!(false), json!(true)),
        only("suffix", json!(""), json!("x")),
        only("add_special_tokens", json!(true), json!(false)),
        only("prompt_embeds", json!(null), json!("x")),
    ]
}

#[tokio::test]
async fn a_parameter_does_not_reach_the_engine_or_is_refused_by_another_name() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let apis = [
        ("/v1/chat/completions", question(json!({})), chat(), ChatBody::FIELDS),
        (
            "/v1/completions",
            json!({"model": "tiny", "prompt": "x"}),
            completions(),
            CompletionBody::FIELDS,
        ),
    ];
    for (path, base, own, fields) in apis {
        let rows: Vec<Row> = both().into_iter().chain(own).collect();
        let known: BTreeSet<_> = rows.iter().map(|(field, _)| *field).collect();
        let missing: Vec<_> = fields.iter().filter(|field| !known.contains(*field)).collect();
        assert!(missing.is_empty(), "{path}: no row for {missing:?}");
        for (field, cases) in rows {
            let tried = cases.iter().filter(|(_, then)| matches!(then, Asked(_))).count();
            assert!(tried > 0, "{path}: {field} has no good value");
            let refused = tried < cases.len();
            assert_eq!(
                refused,
                fields.contains(&field),
                "{path}: {field} has no bad value, or a needless one"
            );
            for (value, then) in cases {
                let mut body = base.clone();
                body[field] = value.clone();
                let before = decode.calls().len();
                let answer = stack.client.send(path, &body).await;
                let case = format!("{path} {field}: {value} gives {} {}", answer.status, answer.text);
                let calls = decode.calls();
                if let Asked(expected) = then {
                    assert_eq!(answer.status, 200, "{case}");
                    let seen = seen(calls.last().unwrap());
                    for (name, expected) in expected.as_object().unwrap() {
                        assert_eq!(&seen[name], expected, "{case}");
                    }
                    continue;
                }
                let (Wrong(param) | Unsupported(param)) = then else {
                    continue;
                };
                let code = if matches!(then, Wrong(_)) {
                    "invalid_field"
                } else {
                    "unsupported_parameter"
                };
                assert_eq!(answer.status, 400, "{case}");
                assert_eq!(
                    (answer.code().as_str(), answer.param().as_deref()),
                    (code, Some(param)),
                    "{case}"
                );
                assert!(answer.message().starts_with(param), "{case}");
                assert_eq!(calls.len(), before, "{case}, but an engine was asked");
            }
        }
        for field in fields
            .iter()
            .filter(|field| !["model", "messages", "prompt"].contains(*field))
        {
            let mut body = base.clone();
            body[field] = Value::Null;
            let answer = stack.client.send(path, &body).await;
            assert_eq!(answer.status, 200, "{path} {field}: null gives {}", answer.text);
        }
    }
}

#[tokio::test]
async fn two_parameters_that_contradict_each_other_are_taken() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    for (extra, param) in [
        (json!({"max_tokens": 5, "max_completion_tokens": 6}), "max_tokens"),
        (json!({"max_tokens": 5, "min_tokens": 6}), "min_tokens"),
        (json!({"logprobs": false, "top_logprobs": 1}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
    ] {
        let answer = stack.client.chat(extra.clone()).await;
        assert_eq!(
            (answer.status, answer.param().as_deref()),
            (400, Some(param)),
            "{extra}"
        );
    }
    // without max_tokens, what fits counts
    let answer = stack.client.chat(json!({"min_tokens": 512})).await;
    assert_eq!((answer.status, answer.param().as_deref()), (400, Some("min_tokens")));
    let body = json!({"model": "tiny", "prompt": ["a", "b"], "n": 65});
    let answer = stack.client.send("/v1/completions", &body).await;
    assert_eq!((answer.status, answer.param().as_deref()), (400, Some("n")));
    let body = json!({"model": "tiny", "prompt": "a", "n": 2, "best_of": 2});
    assert_eq!(stack.client.send("/v1/completions", &body).await.status, 200);
    let same = json!({"max_tokens": 5, "max_completion_tokens": 5, "min_tokens": 5});
    assert_eq!(stack.client.chat(same).await.content(), "Paris");
}

#[tokio::test]
async fn the_keys_of_a_schema_are_put_into_another_order() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &[]).await;
    let body = r#"{"model": "tiny", "prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"name": "n",
        "schema": {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "number"}}}}}}"#;
    let answer = stack.client.raw("/v1/completions", body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(
        seen(&decode.calls()[0])["schema"],
        r#"{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"number"}}}"#
    );
}

#[test]
fn the_documented_fields_are_others_than_those_that_are_read() {
    let text = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/api.md")).unwrap();
    let (_, parameters) = text.split_once("## Parameters").unwrap();
    let (parameters, _) = parameters.split_once("\n## ").unwrap();
    let (tables, refused) = parameters.split_once("Known, but refused").unwrap();
    let (refused_by_both, refused_by_one) = refused.split_once("of a chat").unwrap();
    let (refused_by_chat, refused_by_completions) = refused_by_one.split_once("of a completion").unwrap();
    let mut parts = tables.split("Of a ");
    let names = |text: &str| -> BTreeSet<String> {
        let first_cells = text
            .lines()
            .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
        first_cells.flat_map(quoted).collect()
    };
    let both = &names(parts.next().unwrap()) | &quoted(refused_by_both).collect();
    let chat = &names(parts.next().unwrap()) | &quoted(refused_by_chat).collect();
    let completions = &names(parts.next().unwrap()) | &quoted(refused_by_completions).collect();
    for (own, fields) in [(chat, ChatBody::FIELDS), (completions, CompletionBody::FIELDS)] {
        let read: BTreeSet<String> = fields.iter().map(|&field| field.to_owned()).collect();
        let told = &both | &own;
        assert_eq!(
            read.symmetric_difference(&told).collect::<Vec<_>>(),
            Vec::<&String>::new()
        );
    }
}

/// What stands between backquotes.
fn quoted(text: &str) -> impl Iterator<Item = String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned)
}
