"""`tandem up` of a model's folder, behind TLS and keys: the model as a hub publishes it, and every secret in its place."""

import json
import pathlib
import shutil
import signal
import ssl
import stat
import string
import subprocess
import time
import urllib.error
import urllib.request

import httpx2
import openai
import pytest
import trustme
from conftest import BIN, ROOT, free_port

MODEL = "small"
KEY = "sk-the-right-one-0123456789"
WRONG = "sk-the-wrong-one-0123456789"
# A random model of 128 tokens: what it says means nothing, but it says it by the whole way.
WEIGHTS = ROOT / "engine" / "tests" / "golden" / "llama-gqa"
MANIFEST = """\
apiVersion: tandem.dev/v1alpha1
kind: PDDeployment
metadata: {name: small}
spec:
  model:
    name: small
    source: {pvc: {claimName: models, path: small}}
  prefill: {backend: Cpu}
  decode: {backend: Cpu}
"""


def model_folder(folder: pathlib.Path) -> None:
    """Weights and config as transformers saved them, and a tokenizer of one ASCII character a token."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(WEIGHTS / name, folder / name)
    special = ["<unk>", "<s>", "</s>"]
    # GPT-2's alphabet: what prints stands for itself, space and line feed for these
    alphabet = [*string.ascii_letters, *string.digits, *string.punctuation, "Ġ", "Ċ"]
    # no merge leads to these, but the model says them
    rest = [f"{letter}s" for letter in string.ascii_letters[: 128 - len(special) - len(alphabet)]]
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": at, "content": text} | added for at, text in enumerate(special)],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {text: at for at, text in enumerate(special + alphabet + rest)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Up:
    """A running `tandem up`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.authority = trustme.CA()
        pair = self.authority.issue_cert("localhost")
        cert, key, keys = folder / "cert.pem", folder / "key.pem", folder / "keys"
        for blob in pair.cert_chain_pems:
            blob.write_to_path(cert, append=True)
        pair.private_key_pem.write_to_path(key)
        keys.write_text(f"{KEY}\n")
        for file in (key, keys):
            file.chmod(0o600)
        manifest = folder / "manifest.yaml"
        manifest.write_text(MANIFEST)
        model_folder(folder / "models" / "small")
        self.state_dir, self.log = folder / "state", folder / "up.log"
        port = free_port()
        self.url = f"https://localhost:{port}/v1"
        arguments = ["-f", manifest, f"--claim=models={folder / 'models'}", f"--http=127.0.0.1:{port}"]
        arguments += [f"--api-key-file={keys}", f"--tls-cert={cert}", f"--tls-key={key}", "--kv-memory-mib=16"]
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                [BIN / "tandem", "up", *arguments, f"--state-dir={self.state_dir}"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def wait_ready(self) -> None:
        end = time.monotonic() + 60
        while self.state().get("phase") != "ready":
            assert self.child.poll() is None, f"ended with {self.child.returncode}:\n{self.log.read_text()}"
            assert time.monotonic() < end, f"not ready: {self.state()}\n{self.log.read_text()}"
            time.sleep(0.05)

    def state(self) -> dict:
        try:
            return json.loads((self.state_dir / "state.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def order(self, *words: str) -> str:
        done = subprocess.run(
            [BIN / "tandem", *words, f"--state-dir={self.state_dir}"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def client(self, key: str) -> openai.OpenAI:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        http = httpx2.Client(verify=context, trust_env=False)
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=60, http_client=http)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory):
    up = Up(tmp_path_factory.mktemp("up"))
    try:
        up.wait_ready()
        yield up
    finally:
        # its children end with it
        up.child.send_signal(signal.SIGINT)
        try:
            up.child.wait(60)
        finally:
            up.child.kill()


def test_a_folder_is_served_whole_and_streamed(up: Up):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}
    with up.client(KEY) as client:
        whole = client.chat.completions.create(**asked)
        # one token a character, and the template's own
        assert whole.usage.prompt_tokens == len("user: Hi\nassistant:")
        text = whole.choices[0].message.content
        assert text
        pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True)]
        assert "".join(pieces) == text
        other = client.completions.create(model=MODEL, prompt="Something else", max_tokens=12, temperature=0)
        assert other.choices[0].text != text, "the prompt makes no difference"


def test_without_the_key_nobody_is_served(up: Up):
    with up.client(WRONG) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_admin_token_is_the_owners_and_the_commands_find_it(up: Up):
    [file] = [path for path in up.state_dir.iterdir() if path.name == "admin-token"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text().strip()
    assert "small: ready" in up.order("status")
    assert up.url.replace("localhost", "127.0.0.1") in up.order("status")
    assert up.order("flush").count(" pages freed") == 2
    [router] = [process for process in up.state()["processes"] if process["name"] == "router"]
    flush = f"http://{router['admin']}/admin/flush"

    def call(secret: str) -> int:
        request = urllib.request.Request(flush, method="POST", headers={"authorization": f"Bearer {secret}"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status
        except urllib.error.HTTPError as error:
            return error.code

    assert call(token) == 200
    assert call(KEY) == 401, "a key of the API gives orders"
    log = up.log.read_text()
    assert KEY not in log
    assert token not in log
