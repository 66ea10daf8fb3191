"""A router with API keys and TLS in front of the same engines, through the `openai` SDK and a CA made here."""

import pathlib
import ssl
import time

import httpx2
import openai
import pytest
import trustme
from conftest import MODEL, Process, Stack, free_port, model_file

KEY = "sk-the-right-one-0123456789"
OTHER = "sk-the-other-one-0123456789"
WRONG = "sk-the-wrong-one-0123456789"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Locked:
    def __init__(self, stack: Stack, folder: pathlib.Path) -> None:
        self.authority = trustme.CA()
        self.keys = folder / "keys"
        self.keys.write_text(f"# of this test\n{KEY}\n{OTHER}\n")
        pair = self.authority.issue_cert("localhost")
        cert, key = folder / "cert.pem", folder / "key.pem"
        for blob in pair.cert_chain_pems:
            blob.write_to_path(cert, append=True)
        pair.private_key_pem.write_to_path(key)
        port = free_port()
        self.url = f"https://localhost:{port}/v1"
        flags = {"listen": f"127.0.0.1:{port}", "model_name": MODEL, "tokenizer": model_file()} | stack.control
        flags |= {"api_key_file": self.keys, "tls_cert": cert, "tls_key": key}
        self.process = Process("locked-router", "tandem-router", folder, flags)

    def client(self, key: str, *, trusting: bool = True) -> openai.OpenAI:
        context = ssl.create_default_context()
        if trusting:
            self.authority.configure_trust(context)
        http = httpx2.Client(verify=context, trust_env=False)
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=60, http_client=http)


@pytest.fixture(scope="module")
def locked(stack: Stack, tmp_path_factory: pytest.TempPathFactory):
    locked = Locked(stack, tmp_path_factory.mktemp("locked"))
    try:
        locked.process.wait_ready()
        yield locked
    finally:
        locked.process.stop()


def ask(client: openai.OpenAI, **more: object):
    return client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0, **more)


def test_the_sdk_is_answered_with_its_key_whole_and_streamed(locked: Locked):
    with locked.client(KEY) as client:
        whole = ask(client).choices[0].message.content
        pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, stream=True) if chunk.choices]
        assert "".join(pieces) == whole
        assert [model.id for model in client.models.list().data] == [MODEL]


def test_a_wrong_key_is_an_authentication_error(locked: Locked):
    with locked.client(WRONG) as client:
        for call in (lambda: ask(client), lambda: ask(client, stream=True), client.models.list):
            with pytest.raises(openai.AuthenticationError) as caught:
                call()
            assert caught.value.code == "invalid_api_key"
            assert caught.value.response.headers["www-authenticate"] == "Bearer"


def test_a_certificate_of_an_unknown_authority_is_not_trusted(locked: Locked):
    with locked.client(KEY, trusting=False) as client, pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_a_key_that_was_removed_is_refused_without_a_restart(locked: Locked):
    with locked.client(OTHER) as other, locked.client(KEY) as kept:
        other.models.list()
        locked.keys.write_text(f"{KEY}\n")
        end = time.monotonic() + 30
        while True:
            try:
                other.models.list()
            except openai.AuthenticationError:
                break
            assert time.monotonic() < end, "the removed key still opens"
            time.sleep(0.05)
        kept.models.list()


def test_no_key_stands_in_the_log_or_the_metrics(locked: Locked):
    for text in (locked.process.log.read_text(), locked.process.metrics()):
        assert "sk-the-" not in text
    assert "invalid_api_key" in locked.process.metrics()
