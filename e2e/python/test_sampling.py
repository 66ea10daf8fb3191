"""How tokens are chosen, and what is told of them, through the `openai` SDK and the real stack."""

import collections
import json
import math
import urllib.request

import openai
import pytest
from conftest import MODEL, Stack
from test_openai_sdk import QUESTION

# Greedily the model goes on with "-to-many" four times.
PROMPT = " ".join(["one"] * 12)


def post(stack: Stack, path: str, body: dict) -> dict:
    request = urllib.request.Request(
        stack.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def tokens(stack: Stack, text: str) -> list[int]:
    return post(stack, "/tokenize", {"prompt": text})["tokens"]


def complete(client: openai.OpenAI, prompt: str = PROMPT, **asked):
    asked = {"max_tokens": 16, "temperature": 0} | asked
    return client.completions.create(model=MODEL, prompt=prompt, **asked)


def test_tokens_and_text_are_each_others_reverse(stack: Stack):
    text = "Grüße, 世界 🎉"
    ids = tokens(stack, text)
    assert post(stack, "/detokenize", {"tokens": ids}) == {"prompt": text}
    chat = post(stack, "/tokenize", {"model": MODEL, "messages": QUESTION})
    assert chat["count"] == len(chat["tokens"])
    assert chat["max_model_len"] > chat["count"]


def test_a_token_comes_through_both_legs(stack: Stack):
    with urllib.request.urlopen(stack.url + "/health_generate", timeout=60) as response:
        assert json.loads(response.read())["status"] == "generating"


def test_a_bias_forces_a_token_and_forbids_one(stack: Stack, client: openai.OpenAI):
    [forced] = tokens(stack, " banana")
    answer = complete(client, max_tokens=4, logit_bias={str(forced): 100})
    assert answer.choices[0].text == " banana" * 4
    capital = "The capital of France is"
    [paris] = tokens(stack, " Paris")
    assert " Paris" in complete(client, capital, max_tokens=2).choices[0].text
    assert " Paris" not in complete(client, capital, max_tokens=2, logit_bias={str(paris): -100}).choices[0].text


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"extra_body": {"repetition_penalty": 2.0}}],
    ids=lambda penalty: next(iter(penalty)),
)
def test_a_penalty_leads_away_from_what_was_said(client: openai.OpenAI, penalty: dict):
    plain = complete(client).choices[0].text
    penalised = complete(client, **penalty).choices[0].text
    assert plain.count("many") > 2, f"the prompt does not make it repeat itself: {plain!r}"
    assert penalised.count("many") < plain.count("many"), (plain, penalised)


def test_one_candidate_is_greedy_however_it_is_asked_for(client: openai.OpenAI):
    greedy = complete(client, "Once upon a time").choices[0].text
    for one in ({"top_k": 1}, {"min_p": 1.0}):
        assert complete(client, "Once upon a time", temperature=1.0, extra_body=one).choices[0].text == greedy


def test_an_answer_does_not_end_before_it_may(client: openai.OpenAI):
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 64, "temperature": 0}
    plain = client.chat.completions.create(**asked)
    assert plain.choices[0].finish_reason == "stop"
    least = plain.usage.completion_tokens + 8
    longer = client.chat.completions.create(**asked, extra_body={"min_tokens": least})
    assert longer.usage.completion_tokens >= least


def test_several_answers_differ_and_a_seed_repeats_them(client: openai.OpenAI):
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 16, "temperature": 1.5, "n": 3, "seed": 5}
    first = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1, texts
    again = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in again.choices] == texts
    # The first is what the seed alone gives, and the prompt counts once.
    alone = client.chat.completions.create(**(asked | {"n": 1}))
    assert alone.choices[0].message.content == texts[0]
    assert first.usage.prompt_tokens == alone.usage.prompt_tokens
    assert first.usage.completion_tokens > alone.usage.completion_tokens

    pieces: dict[int, str] = collections.defaultdict(str)
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert [pieces[index] for index in range(3)] == texts


def test_a_chats_log_probabilities_are_the_same_whole_and_streamed(client: openai.OpenAI):
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 5}
    whole = client.chat.completions.create(**asked).choices[0]
    content = whole.logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode() == whole.message.content
    for token in content:
        top = [likely.logprob for likely in token.top_logprobs]
        assert len(top) == 5
        assert top == sorted(top, reverse=True)
        assert sum(math.exp(logprob) for logprob in top) <= 1.001
        # Greedy: the token itself is the likeliest.
        assert token.logprob == top[0] <= 0
        assert token.token == token.top_logprobs[0].token
    chunks = client.chat.completions.create(**asked, stream=True)
    streamed = [
        token
        for chunk in chunks
        for choice in chunk.choices
        for token in (choice.logprobs.content if choice.logprobs else [])
    ]
    assert streamed == content


def test_a_completions_log_probabilities_are_the_same_whole_and_streamed(client: openai.OpenAI):
    whole = complete(client, "The capital of France is", logprobs=2).choices[0]
    told = whole.logprobs
    assert "".join(told.tokens) == whole.text
    places = zip(told.text_offset, told.tokens, strict=True)
    assert [whole.text[offset : offset + len(token)] for offset, token in places] == told.tokens
    for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
        assert len(top) == 2
    chunks = list(complete(client, "The capital of France is", logprobs=2, stream=True))
    parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in getattr(part, name)] == getattr(told, name), name
