"""`make demo`: a real model served by router, decode and prefill as three processes, and a question to it.

Leaves them running. Started again it uses what runs. `make demo-stop` is `demo.py stop`.

usage: .venv/bin/python scripts/demo.py start [--http HOST:PORT] | stop
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
MANIFEST = "examples/smollm2.yaml"
STATE = ROOT / ".demo" / "state"
TANDEM = ROOT / "target" / "release" / "tandem"
QUESTION = "What is the capital of France?"
# Of its own accord the model takes the role of its default system prompt, and answers this one in French and without sense;
# llama.cpp gives the same.
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": QUESTION},
]
START_SECONDS = 120
# a proxy for the outside has no business with this machine's own addresses
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def running() -> dict | None:
    """What `tandem up` says about the demo that runs, if one does and answers."""
    try:
        state = json.loads((STATE / "state.json").read_text())
        with HTTP.open(f"http://{state['http']}/readyz", timeout=5):
            return state
    except (OSError, ValueError):  # no file, a half-written one, nobody there, or not ready
        return None


def start(http: str) -> None:
    build = ["cargo", "build", "--release", "--workspace", "--locked", "--bins"]
    if subprocess.run(build, cwd=ROOT, check=False).returncode:
        sys.exit("error: the build failed; it needs Rust 1.95 (rustup update stable) and a C compiler")
    subprocess.run([sys.executable, ROOT / "scripts" / "model.py"], check=True, stdout=subprocess.DEVNULL)

    state = running()
    if state:
        print(f"a demo runs already on http://{state['http']}; `make demo-stop` first to start this build anew")
    else:
        up = [TANDEM, "up", "-f", MANIFEST, "--claim", "models=.demo/models", "--http", http]
        up += ["--state-dir", STATE, "--detach"]
        try:
            code = subprocess.run(up, cwd=ROOT, check=False, timeout=START_SECONDS).returncode
        except subprocess.TimeoutExpired:
            subprocess.run([TANDEM, "down", "--state-dir", STATE], check=False)
            sys.exit(f"error: the demo was not ready after {START_SECONDS} s; its logs are in {STATE / 'logs'}")
        if code:
            sys.exit("error: the demo did not start; if the port is taken: make demo HTTP=127.0.0.1:9090")
        state = running()
        if not state:
            sys.exit(f"error: tandem up said that it is ready, but /readyz does not; its logs are in {STATE / 'logs'}")

    url, model = f"http://{state['http']}", state["model"]
    begin = time.monotonic()
    answer = ask(url, model)
    print(f"\n> {QUESTION}\n{answer}\n({time.monotonic() - begin:.1f} s)\n")
    if "Paris" not in answer:
        sys.exit("error: the answer does not name Paris; the model or an engine is not what it should be")
    print(
        f"""prefill, decode and router run in the background; their logs are in {(STATE / "logs").relative_to(ROOT)}.

Ask for yourself:
  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{{
    "model": "{model}", "messages": [{{"role": "user", "content": "Write a haiku about rivers."}}]}}'

Then try:
  - the same with "stream": true, or with OpenAI's SDK and base_url="{url}/v1";
  - kill -9 one of the processes while it answers, and ask again;
  - target/release/tandem bench chat --base-url {url} --concurrency 16, which loads it with 16 requests at a time;
  - target/release/tandem diagnose --state-dir {STATE.relative_to(ROOT)}, which says which layer is at fault, if one is;
  - {MANIFEST}, which describes what runs.

Stop it:
  make demo-stop"""
    )


def ask(url: str, model: str) -> str:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 64, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with HTTP.open(request, timeout=60) as response:
            return json.load(response)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        sys.exit(f"error: {url} answered {error.code}: {error.read().decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"error: {url} did not answer: {error}; its logs are in {STATE / 'logs'}")


def stop() -> None:
    if not TANDEM.exists():
        print("no demo was built here")
        return
    sys.exit(subprocess.run([TANDEM, "down", "--state-dir", STATE], check=False).returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description="starts or stops the demo")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("start").add_argument("--http", default="127.0.0.1:8080", help="where the router listens")
    commands.add_parser("stop")
    args = parser.parse_args()
    if args.command == "start":
        start(args.http)
    else:
        stop()


if __name__ == "__main__":
    main()
