"""The `openai` Python SDK against the router."""

import asyncio

import openai
import pytest
from conftest import MODEL, Stack

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


def question(country: str) -> list[dict]:
    return [SYSTEM, {"role": "user", "content": f"Name the capital of {country}."}]


QUESTION = question("France")


def test_chat_answers_with_usage_and_a_finish_reason(client: openai.OpenAI):
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=32, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    usage = answer.usage
    assert 10 < usage.prompt_tokens < 100
    assert 1 <= usage.completion_tokens <= 32
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_chat_is_the_same_answer_in_pieces_with_usage_last(client: openai.OpenAI):
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 3, "the answer came in one piece"
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_include_usage_has_none(client: openai.OpenAI):
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=4, temperature=0, stream=True)
    )
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)


def test_a_system_message_and_earlier_turns_reach_the_template(client: openai.OpenAI):
    short = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=1, temperature=0)
    turns = [*QUESTION, {"role": "assistant", "content": "The capital of France is Paris."}, *question("Italy")[1:]]
    long = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=24, temperature=0)
    assert long.usage.prompt_tokens > short.usage.prompt_tokens + 15
    assert "Rome" in long.choices[0].message.content
    # Without a system message of its own the template puts the model's in, which is longer.
    default = client.chat.completions.create(model=MODEL, messages=QUESTION[1:], max_tokens=1, temperature=0)
    assert default.usage.prompt_tokens > short.usage.prompt_tokens


def test_completions_continue_the_prompt(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.object == "text_completion"
    assert answer.usage.completion_tokens <= 8
    chunks = list(
        client.completions.create(
            model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == answer.choices[0].text


def test_max_tokens_ends_with_length(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt="One, two, three,", max_tokens=3, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


def test_a_seed_repeats_a_sampled_answer(client: openai.OpenAI):
    def ask(seed: int) -> str:
        return (
            client.completions.create(
                model=MODEL, prompt="Once upon a time", max_tokens=24, temperature=1.0, top_p=0.95, seed=seed
            )
            .choices[0]
            .text
        )

    assert ask(7) == ask(7)
    assert len({ask(seed) for seed in range(1, 5)}) > 1, "every seed gives the same text"


COUNTING = "Count: one, two, three, four, five, six, seven,"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(client: openai.OpenAI, stream: bool):
    whole = client.completions.create(model=MODEL, prompt=COUNTING, max_tokens=24, temperature=0).choices[0].text
    stop = whole.split()[2]
    text, reason = complete(client, stream, stop=stop)
    assert reason == "stop"
    assert text == whole[: whole.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_spans_tokens_and_words_ends_the_answer(client: openai.OpenAI, stream: bool):
    whole = client.completions.create(model=MODEL, prompt=COUNTING, max_tokens=24, temperature=0).choices[0].text
    words = whole.split()
    # From the middle of one word to the middle of the next but one: no token is that long.
    begin = whole.index(words[2]) + 1
    end = whole.index(words[4], begin) + 1
    stop = whole[begin:end]
    assert whole.index(stop) == begin
    text, reason = complete(client, stream, stop=["never in this text", stop])
    assert reason == "stop"
    assert text == whole[:begin]


def complete(client: openai.OpenAI, stream: bool, **asked) -> tuple[str, str]:
    answer = client.completions.create(
        model=MODEL, prompt=COUNTING, max_tokens=24, temperature=0, stream=stream, **asked
    )
    if not stream:
        return answer.choices[0].text, answer.choices[0].finish_reason
    chunks = list(answer)
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    return "".join(choice.text for chunk in chunks for choice in chunk.choices), reasons[-1]


def test_models_lists_the_one_that_is_served(client: openai.OpenAI):
    models = client.models.list().data
    assert [model.id for model in models] == [MODEL]
    assert models[0].object == "model"


def test_an_answer_has_a_request_id(client: openai.OpenAI):
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION, max_tokens=1)
    assert raw.headers["x-request-id"]


def test_concurrent_streams_each_get_their_own_answer(stack: Stack, client: openai.OpenAI):
    countries = ("France", "Italy", "Spain", "Japan", "Peru", "Kenya")
    asked = {"model": MODEL, "max_tokens": 24, "temperature": 0}

    async def ask(client: openai.AsyncOpenAI, country: str) -> str:
        stream = await client.chat.completions.create(messages=question(country), stream=True, **asked)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, country) for country in countries))

    together = asyncio.run(all_of_them())
    alone = [client.chat.completions.create(messages=question(country), **asked) for country in countries]
    assert together == [answer.choices[0].message.content for answer in alone]
    assert len(set(together)) == len(countries)
