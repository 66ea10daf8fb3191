"""Judges a run of cargo-mutants: prints the kill rate, and every survivor with its reason.

usage: python3 scripts/survivors.py OUTCOMES.json SURVIVORS.txt

SURVIVORS.txt has a line for each mutant of which it is known why no test can see it, `FILE: WHAT: REASON`, with FILE and WHAT as
cargo-mutants prints them less the line numbers. Fails when fewer than 90 % are killed.
"""

import json
import pathlib
import re
import sys

LEAST = 0.9


def named(mutant: str) -> str:
    """`path/file.rs:12:5: what` without the place in the file."""
    return re.sub(r":\d+:\d+: ", ": ", mutant)


def main() -> int:
    outcomes = json.loads(pathlib.Path(sys.argv[1]).read_text())["outcomes"]
    lines = pathlib.Path(sys.argv[2]).read_text().splitlines()
    reasons = dict(line.rsplit(": ", 1) for line in lines if line and not line.startswith("#"))
    by_summary: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome["scenario"] != "Baseline":
            by_summary.setdefault(outcome["summary"], []).append(outcome["scenario"]["Mutant"]["name"])
    survivors = sorted(by_summary.get("MissedMutant", []))
    # one that makes a test hang is found by its time limit
    hung = sorted(by_summary.get("Timeout", []))
    killed = len(by_summary.get("CaughtMutant", [])) + len(hung)
    for one in hung:
        print(f"hangs: {one}")
    for survivor in survivors:
        print(f"survives: {survivor}: {reasons.get(named(survivor), 'NOT EXPLAINED')}")
    unexplained = [survivor for survivor in survivors if named(survivor) not in reasons]
    rate = killed / max(killed + len(survivors), 1)
    unviable = len(by_summary.get("Unviable", []))
    print(f"{killed} of {killed + len(survivors)} mutants killed, {rate:.1%} (at least {LEAST:.0%}), {len(hung)} of them by a test that hung; {unviable} do not compile")
    print(f"{len(survivors)} survive, {len(unexplained)} of them not explained")
    return 0 if killed and rate >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
