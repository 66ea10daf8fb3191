//! Tool calls in answers, whole and streamed.

use serde_json::{Value, json};
use tandem_wire::proto::finished::Cause;
use tandem_wire::proto::grammar;

use super::client::Events;
use super::engine::{self, Step, spell};
use super::stack::{Stack, stack};

const HERMES: &str = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>\n\
                      <tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";

fn tools() -> Value {
    let function =
        |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
    json!([function("weather"), function("time")])
}

/// The message that the chunks of a stream make together.
fn joined(events: &Events) -> Value {
    let mut calls: Vec<Value> = Vec::new();
    for event in &events.data {
        for delta in event["choices"][0]["delta"]["tool_calls"]
            .as_array()
            .into_iter()
            .flatten()
        {
            let at = delta["index"].as_u64().unwrap() as usize;
            if at == calls.len() {
                assert!(delta["id"].as_str().unwrap().starts_with("call_"));
                calls.push(json!({"type": delta["type"], "function": delta["function"]}));
                continue;
            }
            assert!(
                delta.get("id").is_none() && delta["function"].get("name").is_none(),
                "{delta}"
            );
            let so_far = calls[at]["function"]["arguments"].as_str().unwrap().to_owned();
            calls[at]["function"]["arguments"] = (so_far + delta["function"]["arguments"].as_str().unwrap()).into();
        }
    }
    json!({"content": events.text(), "calls": calls, "finish": events.finish_reason()})
}

/// The same of a whole answer.
async fn whole(stack: &Stack, extra: Value) -> Value {
    let answer = stack.client.chat(extra).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let mut choice = answer.json()["choices"][0].clone();
    let mut calls = choice["message"]["tool_calls"].take();
    for call in calls.as_array_mut().into_iter().flatten() {
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
        call.as_object_mut().unwrap().remove("id");
    }
    let calls = if calls.is_null() { json!([]) } else { calls };
    let content = choice["message"]["content"].as_str().unwrap_or_default();
    json!({"content": content, "calls": calls, "finish": choice["finish_reason"]})
}

#[tokio::test]
async fn calls_stay_in_the_text_or_a_stream_tells_others() {
    let decode = engine::decode();
    decode.always(spell(HERMES));
    let stack = stack(&[], &[&decode], &["--tool-parser=hermes"]).await;
    let asked = json!({"tools": tools()});
    let whole = whole(&stack, asked.clone()).await;
    let call =
        |name: &str, arguments: &str| json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    assert_eq!(whole["content"], "I look.");
    assert_eq!(
        whole["calls"],
        json!([call("weather", r#"{"city": "Paris"}"#), call("time", "{}")])
    );
    assert_eq!(whole["finish"], "tool_calls");
    assert_eq!(joined(&stack.client.stream(asked).await), whole);
    // without tools it is text
    let plain = stack.client.chat(json!({})).await;
    assert_eq!(plain.content(), HERMES);
    assert!(plain.json()["choices"][0]["message"].get("tool_calls").is_none());
}

#[tokio::test]
async fn calls_come_in_parallel_where_one_at_a_time_was_asked_for() {
    let decode = engine::decode();
    decode.always(spell(HERMES));
    let stack = stack(&[], &[&decode], &["--tool-parser=hermes"]).await;
    for (parallel, names) in [
        (json!(null), &["weather", "time"][..]),
        (json!(true), &["weather", "time"]),
        (json!(false), &["weather"]),
    ] {
        let asked = json!({"tools": tools(), "parallel_tool_calls": parallel});
        let whole = whole(&stack, asked.clone()).await;
        let called = whole["calls"].as_array().unwrap();
        let called: Vec<_> = called.iter().map(|call| &call["function"]["name"]).collect();
        assert_eq!(called, names, "{asked}");
        assert_eq!(
            (&whole["content"], &whole["finish"]),
            (&json!("I look."), &json!("tool_calls"))
        );
        assert_eq!(joined(&stack.client.stream(asked).await), whole);
    }
}

#[tokio::test]
async fn an_answer_that_is_calls_alone_has_a_content_or_tokens_are_lost_with_their_text() {
    let decode = engine::decode();
    decode.always(spell("<tool_call>{\"name\": \"time\", \"arguments\": {}}</tool_call>"));
    let stack = stack(&[], &[&decode], &["--tool-parser=hermes"]).await;
    let asked = json!({"tools": tools(), "logprobs": true});
    let answer = stack.client.chat(asked.clone()).await.json();
    assert!(answer["choices"][0]["message"]["content"].is_null());
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert!(content.len() > 20);
    let events = stack.client.stream(asked).await;
    let streamed = events
        .data
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(streamed.flatten().cloned().collect::<Vec<_>>(), content);
}

#[tokio::test]
async fn a_call_that_was_cut_off_is_said_to_be_whole() {
    let decode = engine::decode();
    decode.always(vec![
        Step::Started,
        Step::Spell("<tool_call>{\"name\": \"weather\", \"arguments\": {\"ci"),
        Step::Finish(Cause::Length),
    ]);
    let stack = stack(&[], &[&decode], &["--tool-parser=hermes"]).await;
    let asked = json!({"tools": tools()});
    assert_eq!(whole(&stack, asked.clone()).await["finish"], "length");
    assert_eq!(joined(&stack.client.stream(asked).await)["finish"], "length");
}

#[tokio::test]
async fn a_call_that_must_be_made_is_left_to_the_model() {
    let decode = engine::decode();
    decode.always(spell("{\"name\": \"time\", \"parameters\": {\"zone\": \"UTC\"}}"));
    // whatever way of its own the model has, or none
    for flag in ["--tool-parser=none", "--tool-parser=hermes"] {
        let stack = stack(&[], &[&decode], &[flag]).await;
        let one = json!({"type": "function", "function": {"name": "time"}});
        for (choice, others) in [(json!("required"), true), (one, false)] {
            let asked = json!({"tools": tools(), "tool_choice": choice});
            let whole = whole(&stack, asked.clone()).await;
            let function = json!({"name": "time", "arguments": r#"{"zone": "UTC"}"#});
            assert_eq!(whole["calls"], json!([{"type": "function", "function": function}]));
            assert_eq!(
                (&whole["content"], &whole["finish"]),
                (&json!(""), &json!("tool_calls"))
            );
            assert_eq!(joined(&stack.client.stream(asked).await), whole);
            let sampling = decode.calls().last().unwrap().sampling.clone().unwrap();
            let grammar::Kind::JsonSchema(schema) = sampling.grammar.unwrap().kind.unwrap();
            assert!(schema.contains(r#"{"const":"time"}"#), "{schema}");
            assert_eq!(schema.contains(r#"{"const":"weather"}"#), others, "{schema}");
        }
    }
}

#[tokio::test]
async fn a_choice_of_tools_that_cannot_be_is_taken() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--tool-parser=hermes"]).await;
    let format = json!({"type": "json_object"});
    for (extra, param) in [
        (
            json!({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "f"}}}),
            "tool_choice.function.name",
        ),
        (json!({"tools": tools(), "response_format": format}), "response_format"),
    ] {
        let answer = stack.client.chat(extra.clone()).await;
        assert_eq!(
            (answer.status, answer.param().as_deref()),
            (400, Some(param)),
            "{extra}"
        );
    }
    // not shown and not looked for
    decode.always(spell(HERMES));
    let none = whole(
        &stack,
        json!({"tools": tools(), "tool_choice": "none", "response_format": format}),
    )
    .await;
    assert_eq!((&none["content"], &none["calls"]), (&json!(HERMES), &json!([])));
}

#[tokio::test]
async fn what_a_tool_answered_is_refused() {
    let decode = engine::decode();
    let stack = stack(&[], &[&decode], &["--tool-parser=hermes"]).await;
    let messages = json!([
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "twelve"},
    ]);
    assert_eq!(
        stack
            .client
            .chat(json!({"messages": messages, "tools": tools()}))
            .await
            .content(),
        "Paris"
    );
    let prompt = engine::TEXT.decode(&decode.calls()[0].prompt_tokens, false).unwrap();
    assert!(prompt.contains("<|im_start|>tool\ntwelve"), "{prompt}");
}
