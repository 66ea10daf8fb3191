#!/usr/bin/env python3
"""Renders every template of tests/data/templates with every conversation, as transformers does it with Jinja2.

    pip install jinja2==3.1.6
    python3 router/tests/golden/renderings.py        # rewrites router/tests/data/renderings.json

The environment is the one that Hugging Face chat templates are written for: sandboxed, trim_blocks, lstrip_blocks, loop controls,
`tojson` as json.dumps without ASCII escapes, `raise_exception`, `strftime_now` (here on a fixed clock), and `generation` blocks.
"""

import json
from datetime import datetime, timezone
from pathlib import Path

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

DATA = Path(__file__).parent.parent / "data"
NOW = datetime(2026, 7, 4, 9, 5, 3, tzinfo=timezone.utc)
SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}


class Generation(Extension):
    """`{% generation %}` prints its body; where it stands in the text matters to training alone."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_print"), [], [], body).set_lineno(line)

    def _print(self, caller):
        return caller()


def raise_exception(message):
    raise TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda text: NOW.strftime(text)
    return env


def shaped(messages, parts):
    """What the server makes of a request's messages before the template sees them."""
    out = []
    for message in messages:
        message = dict(message)
        content = message.get("content")
        texts = [] if content is None else [content] if isinstance(content, str) else [part["text"] for part in content]
        message["content"] = [{"type": "text", "text": text} for text in texts] if parts else "\n".join(texts)
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                function = dict(call["function"])
                arguments = function.get("arguments")
                if isinstance(arguments, str):
                    function["arguments"] = json.loads(arguments) if arguments.strip() else {}
                calls.append({key: function if key == "function" else value for key, value in call.items()})
            message["tool_calls"] = calls
        out.append(message)
    return out


def main():
    conversations = json.loads((DATA / "conversations.json").read_text())
    renderings = {}
    for path in sorted((DATA / "templates").glob("*.jinja")):
        template = environment().from_string(path.read_text())
        results = {}
        for conversation in conversations:
            variables = dict(SPECIAL, documents=None, **conversation.get("chat_template_kwargs", {}))
            try:
                results[conversation["name"]] = template.render(
                    messages=shaped(conversation["messages"], path.stem == "parts"),
                    tools=conversation.get("tools") or None,
                    add_generation_prompt=conversation.get("add_generation_prompt", True),
                    **variables,
                )
            except TemplateError as error:
                results[conversation["name"]] = {"raises": str(error)}
        renderings[path.stem] = results
    text = json.dumps(renderings, ensure_ascii=False, indent=0, sort_keys=True) + "\n"
    (DATA / "renderings.json").write_text(text)
    print(f"{sum(map(len, renderings.values()))} renderings, {len(text)} bytes")


if __name__ == "__main__":
    main()
