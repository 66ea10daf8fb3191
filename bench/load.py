"""A public load generator (aiperf) against the whole: prefill, decode and router as `tandem up` starts them.

usage: load.py --bin DIR --model FILE.gguf [--requests 48] [--concurrency 8] [--json OUT]    (under the load generator's Python)
Fails unless every request is answered. No hub is asked: the tokenizer is made from the model's file.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ["request_count", "error_request_count", "request_throughput", "output_token_throughput", "time_to_first_token",
         "inter_token_latency", "request_latency", "input_sequence_length", "output_sequence_length"]  # fmt: skip


def write_tokenizer(model, folder):
    """The GGUF's byte-level BPE as transformers' files."""
    fields = gguf.GGUFReader(model).fields
    value = lambda name: fields[f"tokenizer.{name}"].contents()
    tokens = value("ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in value("ggml.merges")]
    bpe = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, value("ggml.token_type"), strict=True) if kind == gguf.TokenType.CONTROL]
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=tokens[value("ggml.eos_token_id")], additional_special_tokens=special
    )
    wrapped.chat_template = value("chat_template")
    wrapped.save_pretrained(folder)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def load(url, model, tokenizer, args, folder):
    """Runs the generator; gives the figures it exports."""
    command = [
        Path(sys.executable).with_name("aiperf"), "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", tokenizer, "--concurrency", args.concurrency, "--request-count", args.requests, "--random-seed", 1,
        "--prompt-input-tokens-mean", 128, "--output-tokens-mean", 32, "--extra-inputs", "ignore_eos:true",
        "--output-artifact-dir", folder, "--ui", "none",
    ]  # fmt: skip
    env = os.environ | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    run = subprocess.run(list(map(str, command)), env=env, text=True, capture_output=True, timeout=900, check=False)
    found = list(Path(folder).rglob("profile_export_aiperf.json"))
    if run.returncode or not found:
        sys.exit(f"aiperf ended with {run.returncode} and {len(found)} result files:\n{run.stdout[-4000:]}\n{run.stderr[-4000:]}")
    return json.loads(found[0].read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, type=Path)
    parser.add_argument("--model", required=True, type=Path, help="as the claim of examples/smollm2.yaml names it: FOLDER/smollm2/model.gguf")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_tokenizer(args.model, folder / "tokenizer")
        tandem, http = args.bin / "tandem", f"127.0.0.1:{free_port()}"
        up = [tandem, "up", "-f", ROOT / "examples" / "smollm2.yaml", "--claim", f"models={args.model.parent.parent}",
              "--http", http, "--state-dir", folder / "state", "--detach"]  # fmt: skip
        try:
            subprocess.run(up, check=True, timeout=120, stdout=subprocess.DEVNULL)
            model = json.loads((folder / "state" / "state.json").read_text())["model"]
            result = load(f"http://{http}", model, folder / "tokenizer", args, folder / "out")
        finally:
            subprocess.run([tandem, "down", "--state-dir", folder / "state"], check=False, timeout=120, stdout=subprocess.DEVNULL)

    print(f"\naiperf, {args.requests} streamed chats, {args.concurrency} at a time")
    figures = {name: result[name] for name in SHOWN if result.get(name)}
    for name, figure in figures.items():
        rest = ", ".join(f"{key} {figure[key]:.1f}" for key in ("p50", "p99") if figure.get(key) is not None)
        print(f"{name.replace('_', ' '):<26}{figure['avg']:>10.1f} {figure['unit']:<14} {rest}")
    done = figures["request_count"]["avg"]
    failed = figures.get("error_request_count", {"avg": 0})["avg"]
    if done != args.requests or failed:
        sys.exit(f"{done:.0f} of {args.requests} requests answered, {failed:.0f} failed")
    if args.json:
        args.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
