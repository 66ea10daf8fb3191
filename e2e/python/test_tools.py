"""Tool calls, as OpenAI's own examples make them: whole, streamed, through the SDK's helpers, and the tool's answer going back."""

import json
from typing import Literal

import openai
import pydantic
import pytest
from conftest import MODEL, Process, Stack, free_port, model_file

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get current temperature for a given location.",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "City and country e.g. Bogotá, Colombia", "maxLength": 40},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["location", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
QUESTION = [{"role": "user", "content": "What is the weather like in Paris today?"}]
THE_WEATHER = {"type": "function", "function": {"name": "get_weather"}}


def asked(choice: object, messages: list = QUESTION) -> dict:
    return {
        "model": MODEL,
        "messages": messages,
        "tools": [WEATHER, TIME],
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": 200,
    }


def is_weather(arguments: str) -> None:
    found = json.loads(arguments)
    assert set(found) == {"location", "unit"}, found
    assert isinstance(found["location"], str)
    assert found["unit"] in ("celsius", "fahrenheit")


@pytest.mark.parametrize("choice", ["required", THE_WEATHER], ids=["required", "one"])
def test_a_call_is_the_same_whole_and_streamed(client: openai.OpenAI, choice: object):
    answer = client.chat.completions.create(**asked(choice)).choices[0]
    assert answer.finish_reason == "tool_calls", answer
    [call] = answer.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name in ("get_weather", "get_time")
    if choice == THE_WEATHER:
        assert call.function.name == "get_weather"
        is_weather(call.function.arguments)

    calls = {}
    chunks = list(client.chat.completions.create(**asked(choice), stream=True))
    for chunk in chunks:
        for delta in chunk.choices[0].delta.tool_calls or []:
            if delta.index not in calls:
                calls[delta.index] = delta
            else:
                calls[delta.index].function.arguments += delta.function.arguments
    assert list(calls) == [0]
    assert calls[0].id.startswith("call_")
    assert calls[0].function.name == call.function.name
    assert calls[0].function.arguments == call.function.arguments
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [answer.finish_reason]


def test_the_sdks_own_stream_puts_the_call_together(client: openai.OpenAI):
    whole = client.chat.completions.create(**asked(THE_WEATHER)).choices[0].message.tool_calls[0]
    with client.chat.completions.stream(**asked(THE_WEATHER)) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, event.arguments) for event in done] == [("get_weather", whole.function.arguments)]
    assert final.choices[0].message.tool_calls[0].function.arguments == whole.function.arguments


class GetWeather(pydantic.BaseModel):
    city: str = pydantic.Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


def test_a_class_of_the_clients_is_filled_by_a_call(client: openai.OpenAI):
    tool = openai.pydantic_function_tool(GetWeather)
    choice = {"type": "function", "function": {"name": "GetWeather"}}
    answer = client.chat.completions.parse(**(asked(choice) | {"tools": [tool]}))
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, GetWeather), answer


def test_what_the_tool_answered_goes_back_and_the_model_speaks(client: openai.OpenAI):
    message = client.chat.completions.create(**asked(THE_WEATHER)).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "14 degrees and rain"}
    messages = [*QUESTION, message, result]
    answer = client.chat.completions.create(**asked("none", messages))
    before = client.chat.completions.create(**asked("none"))
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > before.usage.prompt_tokens, "the tool's answer is not in the prompt"


def test_auto_is_refused_where_the_model_has_no_way_to_write_calls(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked("auto"))
    assert "--tool-parser" in caught.value.body["message"]


@pytest.fixture(scope="module")
def hermes(stack: Stack, tmp_path_factory: pytest.TempPathFactory):
    """A second router, which looks for the calls that the model was taught to write in its prompt."""
    listen = f"127.0.0.1:{free_port()}"
    flags = {"listen": listen, "model_name": MODEL, "tokenizer": model_file(), "tool_parser": "hermes"} | stack.control
    router = Process("hermes-router", "tandem-router", tmp_path_factory.mktemp("hermes"), flags)
    try:
        router.wait_ready()
        with openai.OpenAI(base_url=f"http://{listen}/v1", api_key="unused", max_retries=0, timeout=600) as client:
            yield client
    finally:
        router.stop()


def turn(city: str) -> list[dict]:
    call = json.dumps({"name": "get_weather", "arguments": {"location": city}})
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
    ]


def test_a_call_that_the_model_decides_on_is_found_in_its_text(hermes: openai.OpenAI):
    # After four of them it writes the fifth, each token by far the likeliest.
    taught = [message for city in ("Rome", "Madrid", "Berlin", "Tokyo") for message in turn(city)]
    system = {"role": "system", "content": "You are a helpful assistant."}
    messages = [system, *taught, turn("Paris")[0]]
    answer = hermes.chat.completions.create(**asked("auto", messages)).choices[0]
    assert answer.finish_reason == "tool_calls", answer
    assert answer.message.content is None
    [call] = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"location": "Paris"})
    with hermes.chat.completions.stream(**asked("auto", messages)) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert len(pieces) > 1, "the arguments came in one piece"
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    assert final.finish_reason == "tool_calls"
