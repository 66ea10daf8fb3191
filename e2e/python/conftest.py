"""A prefill, a decode and a router with a real model, once for all tests."""

import contextlib
import os
import pathlib
import socket
import subprocess
import time
import urllib.error
import urllib.request

import openai
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BIN = ROOT / "target" / "release"
MODEL = "smollm2"
MAX_LENGTH_TOKENS = 1024
# a proxy for the outside has no business with this machine's own addresses
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"


def free_port(given: set[int] = set()) -> int:  # noqa: B006, one set for the session is meant
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    if port in given:
        return free_port()
    given.add(port)
    return port


def model_file() -> pathlib.Path:
    path = pathlib.Path(os.environ.get("TANDEM_TEST_MODEL") or ROOT / ".demo" / "models" / "smollm2" / "model.gguf")
    assert path.exists(), f"{path} is not there: run `make model` first, or set TANDEM_TEST_MODEL"
    return path


class Process:
    """A child whose log is shown when it does not become ready."""

    def __init__(self, name: str, program: str, folder: pathlib.Path, flags: dict[str, object]) -> None:
        self.ops = f"127.0.0.1:{free_port()}"
        self.log = folder / f"{name}.log"
        binary = BIN / program
        assert binary.exists(), f"{binary} is not there: run `make build` first"
        arguments = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                [binary, *arguments, f"--ops-listen={self.ops}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def wait_ready(self, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.child.poll() is None, f"ended with {self.child.returncode}:\n{self.log.read_text()}"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{self.ops}/readyz", timeout=5):
                return
            time.sleep(0.05)
        raise AssertionError(f"not ready after {seconds} s:\n{self.log.read_text()}")

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.ops}/metrics", timeout=10) as response:
            return response.read().decode()

    def stop(self) -> None:
        self.child.kill()
        self.child.wait(10)


class Stack:
    def __init__(self, folder: pathlib.Path) -> None:
        control = {role: f"127.0.0.1:{free_port()}" for role in ("prefill", "decode")}
        self.control = control
        self.http = f"127.0.0.1:{free_port()}"
        self.processes: dict[str, Process] = {}
        for role, listen in control.items():
            flags = {"role": role, "model": model_file(), "backend": "cpu", "served_name": MODEL, "listen": listen}
            flags |= {"data_listen": "127.0.0.1:0", "max_length_tokens": MAX_LENGTH_TOKENS}
            self.processes[role] = Process(role, "tandem-engine", folder, flags)
        flags = {"listen": self.http, "model_name": MODEL, "tokenizer": model_file()} | control
        self.processes["router"] = Process("router", "tandem-router", folder, flags)
        try:
            for process in self.processes.values():
                process.wait_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    def stop(self) -> None:
        for process in self.processes.values():
            process.stop()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory):
    stack = Stack(tmp_path_factory.mktemp("stack"))
    yield stack
    stack.stop()


@pytest.fixture(scope="session")
def client(stack: Stack):
    # No retries: a first try that fails is a failure.
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=600) as client:
        yield client
