"""What the benches' tables and their history share. Standard library only."""

import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HISTORY = ROOT / "bench" / "history"


def spread(values, digits):
    """median (least..most)"""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def ratios(ours, theirs):
    """Of the pairs: each round's two values lie next to each other in time."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def table(head, rows):
    """Columns as wide as they need be; the first one on the left."""
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        cells = [f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


def cpu_model():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def keep(name, parts):
    """Writes a run into the history; gives its path."""
    HISTORY.mkdir(exist_ok=True)
    now = time.gmtime()
    commit = git("rev-parse", "--short=10", "HEAD")
    record = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", now),
        "commit": commit,
        "changed_since": bool(git("status", "--porcelain", "--untracked-files=no")),
        "cpu": cpu_model(),
        "threads": os.cpu_count(),
        **parts,
    }
    path = HISTORY / f"{time.strftime('%Y%m%d-%H%M%S', now)}-{name}-{commit}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
