"""`response_format`: whatever the schema, the answer parses and matches it."""

import json
import os
import random

import fastjsonschema
import openai
import pydantic
import pytest
from conftest import MODEL

SCHEMAS = int(os.environ.get("TANDEM_TEST_SCHEMAS", "20"))
WORDS = ("red", "green", "blue", "Zürich", "a b", 'quo"te', "")


def schema_of(draw: random.Random, depth: int) -> dict:
    """A schema whose every match is short, so that the answer's length is no excuse."""
    kinds = ["string", "enum", "const", "integer", "boolean", "null"]
    if depth:
        kinds += ["object"] * 3 + ["array"] * 2 + ["anyOf"]
    match draw.choice(kinds):
        case "string":
            return {"type": "string", "maxLength": draw.randint(0, 8)}
        case "enum":
            return {"enum": draw.sample([*WORDS, 1, 2.5, None, True], draw.randint(1, 4))}
        case "const":
            return {"const": draw.choice([*WORDS, 7, False])}
        case "integer":
            least = draw.randint(-1000, 1000)
            return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 500)}
        case "object":
            names = draw.sample(["name", "age", "x", "y", "tags", "é"], draw.randint(0, 3))
            properties = {name: schema_of(draw, depth - 1) for name in names}
            required = [name for name in names if draw.random() < 0.7]
            return {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        case "array":
            least = draw.randint(0, 2)
            items = schema_of(draw, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + draw.randint(0, 1)}
        case "anyOf":
            return {"anyOf": [schema_of(draw, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": kind}


@pytest.mark.parametrize("seed", range(SCHEMAS))
def test_the_answer_matches_the_schema(client: openai.OpenAI, seed: int):
    draw = random.Random(seed)
    schema = {
        "type": "object",
        "properties": {"value": schema_of(draw, 2), "other": schema_of(draw, 1)},
        "required": ["value", "other"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Give me an example."}],
        response_format={"type": "json_schema", "json_schema": {"name": "example", "schema": schema}},
        temperature=1.0,
        seed=seed,
        max_tokens=600,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop", (schema, choice.message.content)
    fastjsonschema.validate(schema, json.loads(choice.message.content))


class City(pydantic.BaseModel):
    name: str
    country: str
    capital: bool


def test_a_class_of_the_clients_is_filled(client: openai.OpenAI):
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe Paris as JSON."}],
        response_format=City,
        temperature=0,
        max_tokens=200,
    )
    assert isinstance(answer.choices[0].message.parsed, City), answer


def test_a_json_object_is_one(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe Paris as a short JSON object."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=64,
    )
    text = answer.choices[0].message.content
    # The model may go on until its length is over, but it begins nothing else.
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_schema_that_cannot_be_met_is_refused_by_name(client: openai.OpenAI):
    schema = {"type": "object", "properties": {"a": {"type": "nonsense"}}, "required": ["a"]}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        )
