"""The whole suite, tier by tier: prints each tier's time and, last, one line that counts every test of every tier.

usage: python3 scripts/test.py [--long] [--tier NAME]

`--long` runs what does not fit into the everyday suite (soaks, numerics beside llama.cpp, a public load generator, fuzzing, mutants
of the planner, real nodes), in place of it; `--tier` runs one tier of either. A tier that this machine cannot run is named and counts
as one skipped test; under CI=true whatever is skipped is a failure. The closing line is also written to target/test-summary, for .ci/run.
"""

import argparse
import collections.abc
import dataclasses
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import kube

ROOT = pathlib.Path(__file__).resolve().parent.parent
SUMMARY = ROOT / "target" / "test-summary"
CI = os.environ.get("CI") == "true"


@dataclasses.dataclass(frozen=True)
class Tier:
    name: str
    command: list[str]
    limit_minutes: int
    counts: bool = True  # whether the output holds test counts
    lacks: collections.abc.Callable[[], str | None] = lambda: None  # what this machine lacks for it
    faults: bool = False  # whether it starts binaries with faults


def lacks_control_plane() -> str | None:
    if os.geteuid() != 0:
        return "a network namespace of its own needs root"
    return kube.lacking()


def lacks_nodes() -> str | None:
    if sys.platform.startswith("linux") and os.geteuid() == 0:
        return kube.lacking(tuple(kube.PARTS))
    return "namespaces, mounts and cgroups of its own need Linux and root"


# One build of everything comes first: the tests start the very binaries that are shipped.
BUILD = [
    Tier("model", ["sh", "-c", "scripts/venv.sh && .venv/bin/python scripts/model.py"], 20, counts=False),
    Tier("build", ["cargo", "build", "--release", "--workspace", "--locked", "--bins"], 45, counts=False),
]
# Every cargo command selects the whole workspace: with a part of it, dependencies get other features and compile again.
CARGO_TEST = ["cargo", "test", "--release", "--workspace", "--locked", "--no-fail-fast"]
# One test at a time: they stop, kill and time processes that want both cores.
ALONE = ["--", "--test-threads=1"]
PYTEST_OF = "scripts/venv.sh e2e/python/requirements.txt && .venv/bin/python -m pytest -q"
# Engine and router once more, with faults that tests plant; their dependencies are the same.
FAULTS = ["--features", "tandem-engine/faults,tandem-router/faults"]
BUILD_FAULTS = ["cargo", "build", "--release", "--workspace", "--locked", *FAULTS]
BUILD_OF_FAULTS = Tier("build faults", [*BUILD_FAULTS, "--bin", "tandem-engine-faults", "--bin", "tandem-router-faults"], 30, counts=False)


def on_nodes(*flags: str, **env: str) -> list[str]:
    """The tests on real nodes, one of which asks with OpenAI's SDK. Some print what they have measured."""
    given = "".join(f"export {key}={value}; " for key, value in env.items())
    command = [*CARGO_TEST, "--test", "node", *ALONE, "--show-output", *flags]
    return ["sh", "-c", f"{given}scripts/venv.sh e2e/python/requirements.txt && exec {shlex.join(command)}"]


KUBE = Tier("kube", ["python3", "scripts/kube.py"], 45, counts=False, lacks=lacks_control_plane)
EVERYDAY = [
    Tier("lint", ["scripts/lint.sh"], 45, counts=False),
    Tier("unit and golden", [*CARGO_TEST, "--exclude", "tandem-e2e"], 45),
    Tier("process", [*CARGO_TEST, "--test", "process", *ALONE], 30),
    BUILD_OF_FAULTS,
    # its output is the table of what was planted and what was found
    Tier("faults", [*CARGO_TEST, "--test", "faults", *ALONE, "--nocapture"], 15, faults=True),
    KUBE,
    # They wait more than they compute. Some print what they have measured.
    Tier("control plane", [*CARGO_TEST, "--test", "control", "--", "--test-threads=6", "--show-output"], 20, lacks=lacks_control_plane),
    # for the tests of the charts, which are among those of the clients
    Tier("helm", ["python3", "scripts/kube.py", "helm"], 30, counts=False, lacks=lambda: kube.lacking(("helm",))),
    Tier("clients", ["sh", "-c", f"{PYTEST_OF} e2e/python"], 15),
    Tier("kube of nodes", ["sh", "-c", "for part in node policy; do python3 scripts/kube.py $part || exit 1; done"], 45, counts=False,
         lacks=lacks_nodes),
    # one node is lost every day, the other kind in test-long
    Tier("node", on_nodes("--skip", "lost_with_the_only_decode"), 40, lacks=lacks_nodes, faults=True),
]


def control(name: str, filter: str, limit_minutes: int, **env: str) -> Tier:
    """Some of the control plane's tests, with more to do than every day."""
    given = "".join(f"export {key}={value}; " for key, value in env.items())
    command = [*CARGO_TEST, "--test", "control", "--", "--nocapture", filter]
    return Tier(name, ["sh", "-c", given + "exec " + shlex.join(command)], limit_minutes, lacks=lacks_control_plane)


LONG = [
    Tier("soak", [*CARGO_TEST, "--test", "long", *ALONE], 75),
    KUBE,
    control("scale of 200", "scale::", 30, TANDEM_TEST_DEPLOYMENTS="200"),
    control("scale of 1000", "scale::", 90, TANDEM_TEST_DEPLOYMENTS="1000"),
    control("kills", "kills::", 60, TANDEM_TEST_KILLS="each"),
    Tier("schemas", ["sh", "-c", f"export TANDEM_TEST_SCHEMAS=200; {PYTEST_OF} e2e/python/test_json_schema.py"], 30),
    BUILD_OF_FAULTS,
    Tier("all on nodes", on_nodes(TANDEM_TEST_LOAD_SECONDS="100", TANDEM_TEST_ROWS="all"), 90, lacks=lacks_nodes, faults=True),
    # lost when Kubernetes by itself takes a node for lost
    Tier("nodes lost", on_nodes("lost_with_the_only", TANDEM_TEST_GRACE_SECONDS="50"), 60, lacks=lacks_nodes, faults=True),
    Tier("numerics", ["python3", "bench/run.py", "numerics"], 60, counts=False),
    Tier("load generator", ["python3", "bench/run.py", "load"], 30, counts=False),
    Tier("mutants", ["scripts/mutants.sh"], 180, counts=False),
    # 10 minutes a reader, and a build with coverage counters before them
    Tier("fuzz", ["scripts/fuzz.sh", "all", "600"], 60 + 10 * len(list((ROOT / "fuzz" / "targets").iterdir())), counts=False),
]

CARGO = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored;")
PYTEST = re.compile(r"^=*\s*((?:\d+ (?:passed|failed|errors?|skipped|xfailed|xpassed|deselected|warnings?),? ?)+) ?in [\d.]+s")


@dataclasses.dataclass
class Counts:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other: "Counts") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped

    def read(self, line: str) -> None:
        """Adds what a summary line of `cargo test` or pytest says; any other line says nothing."""
        if found := CARGO.match(line):
            passed, failed, ignored = map(int, found.groups())
            self.add(Counts(passed, failed, ignored))
        elif found := PYTEST.match(line):
            for number, word in re.findall(r"(\d+) (\w+)", found.group(1)):
                if word in ("passed", "xpassed"):
                    self.passed += int(number)
                elif word in ("failed", "error", "errors"):
                    self.failed += int(number)
                elif word in ("skipped", "xfailed"):
                    self.skipped += int(number)

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.passed} passed, {self.failed} failed{skipped}"


def run(tier: Tier, env: dict[str, str]) -> Counts:
    """Runs one tier with its output shown. Whatever makes it end badly without a failed test counts as one."""
    print(f"\n==> {tier.name}: {' '.join(tier.command)}", flush=True)
    if reason := tier.lacks():
        print(f"{tier.name}: skipped: {reason}", flush=True)
        return judged(tier, Counts(skipped=1) if tier.counts else Counts())
    counts = Counts()
    process = subprocess.Popen(
        tier.command, cwd=ROOT, env=env, text=True, errors="replace", bufsize=1, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    late = threading.Timer(tier.limit_minutes * 60, os.killpg, (process.pid, signal.SIGKILL))
    late.start()
    try:
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            counts.read(line)
        code = process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        expired = late.finished.is_set()
        late.cancel()
    if expired:
        print(f"{tier.name}: killed after {tier.limit_minutes} minutes", flush=True)
    if code != 0 and counts.failed == 0:
        print(f"{tier.name}: exit status {code} without a failed test; counted as one failure", flush=True)
        counts.failed = 1
    if tier.counts and code == 0 and counts.passed == 0:
        print(f"{tier.name}: no test ran; counted as one failure", flush=True)
        counts.failed = 1
    return judged(tier, counts)


def judged(tier: Tier, counts: Counts) -> Counts:
    """What was skipped is a failure under CI=true."""
    if CI and counts.skipped:
        print(f"{tier.name}: {counts.skipped} skipped, which is a failure under CI=true", flush=True)
        counts.failed += counts.skipped
        counts.skipped = 0
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description="runs the whole suite")
    parser.add_argument("--long", action="store_true", help="run what takes longer in place of the everyday suite")
    parser.add_argument("--tier", choices=[tier.name for tier in EVERYDAY + LONG], help="run this one alone, after the build")
    args = parser.parse_args()
    tiers = LONG if args.long else EVERYDAY
    if args.tier:
        tiers = [tier for tier in EVERYDAY + LONG if tier.name == args.tier][:1]
        if tiers[0].faults:
            tiers.insert(0, BUILD_OF_FAULTS)

    SUMMARY.parent.mkdir(exist_ok=True)
    SUMMARY.unlink(missing_ok=True)
    env = os.environ | {"TANDEM_TEST_MODEL": str(ROOT / ".demo" / "models" / "smollm2" / "model.gguf")}
    total, rows = Counts(), []
    for tier in BUILD + tiers:
        begin = time.monotonic()
        counts = run(tier, env)
        total.add(counts)
        rows.append((tier.name, time.monotonic() - begin, counts))
        if tier in BUILD and counts.failed:
            break  # nothing below can run

    print()
    for name, seconds, counts in rows:
        print(f"{name:>16}  {int(seconds) // 60:3d} min {int(seconds) % 60:2d} s  {counts}")
    print(f"{'all':>16}  {int(sum(r[1] for r in rows)) // 60:3d} min", flush=True)
    SUMMARY.write_text(f"{total}\n")
    print(total, flush=True)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
