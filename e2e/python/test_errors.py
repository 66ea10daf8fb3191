"""Wrong requests: the status that says whose fault it is, and OpenAI's error shape in every one."""

import http.client
import json

import openai
import pytest
from conftest import MAX_LENGTH_TOKENS, MODEL, Stack

MESSAGES = [{"role": "user", "content": "Hello"}]


def post(stack: Stack, path: str, body: str | bytes | dict, **headers: str) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(stack.http, timeout=60)
    try:
        data = json.dumps(body) if isinstance(body, dict) else body
        connection.request("POST", path, data, {"content-type": "application/json"} | headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def error(answer: tuple[int, dict], status: int) -> dict:
    assert answer[0] == status, answer
    assert set(answer[1]) == {"error"}, answer
    found = answer[1]["error"]
    assert {"message", "type", "param", "code"} <= set(found), found
    assert isinstance(found["message"], str) and found["message"]
    return found


def test_an_over_long_prompt_is_400_and_names_both_lengths(client: openai.OpenAI):
    words = "river " * (MAX_LENGTH_TOKENS + 200)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=words, max_tokens=16)
    message = caught.value.body["message"]
    assert str(MAX_LENGTH_TOKENS) in message, message
    numbers = [int(word.strip(".,;:()")) for word in message.split() if word.strip(".,;:()").isdigit()]
    assert any(number > MAX_LENGTH_TOKENS for number in numbers), f"the prompt's own length is missing: {message}"
    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_that_fits_but_not_with_its_answer_is_400(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="Hello", max_tokens=MAX_LENGTH_TOKENS)
    assert str(MAX_LENGTH_TOKENS) in caught.value.body["message"]


def test_an_unknown_model_is_404_and_is_named(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-17", messages=MESSAGES)
    assert "gpt-17" in caught.value.body["message"]
    assert MODEL in caught.value.body["message"], "the error does not say what is served"
    assert caught.value.code == "model_not_found"


def test_malformed_json_is_400_and_says_where(stack: Stack):
    found = error(post(stack, "/v1/chat/completions", '{"model": "x", "messages": [}'), 400)
    assert found["type"] == "invalid_request_error"
    assert "line 1" in found["message"] or "column" in found["message"], found


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"model": MODEL, "messages": "Hello"}, "messages"),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"content": "Hello"}]}, "messages[0]"),
        ("/v1/chat/completions", {"model": MODEL, "messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": MESSAGES, "model": 7}, "model"),
        ("/v1/chat/completions", {"model": MODEL}, "messages"),
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "max_tokens": "many"}, "max_tokens"),
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "max_tokens": 0}, "max_tokens"),
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "temperature": -1}, "temperature"),
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "top_p": 1.5}, "top_p"),
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "stream": "yes"}, "stream"),
        ("/v1/chat/completions", {"model": MODEL, "messages": MESSAGES, "stop": 5}, "stop"),
        ("/v1/completions", {"model": MODEL, "prompt": {"text": "Hello"}}, "prompt"),
        ("/v1/completions", {"model": MODEL}, "prompt"),
        ("/v1/completions", {"model": MODEL, "prompt": "Hello", "seed": "x"}, "seed"),
    ],
)
def test_a_wrong_value_is_400_and_the_field_is_named(stack: Stack, path: str, body: dict, field: str):
    found = error(post(stack, path, body), 400)
    assert found["type"] == "invalid_request_error"
    assert field in (found["param"] or "") or field in found["message"], found


def test_a_body_over_the_limit_is_413(stack: Stack):
    error(post(stack, "/v1/completions", json.dumps({"model": MODEL, "prompt": "x" * (9 << 20)})), 413)


def test_an_unknown_path_is_404_in_the_same_shape(stack: Stack):
    error(post(stack, "/v1/embeddings", {"model": MODEL, "input": "Hello"}), 404)


def test_after_all_of_these_a_good_request_is_answered(client: openai.OpenAI):
    assert client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4).choices
