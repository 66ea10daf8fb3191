"""Builds the control plane of e2e/kube (etcd, Kubernetes' servers and kubectl, as one binary) and prints its path.

It takes about fifteen minutes of one core and happens once for what e2e/kube and this file hold: the binary is kept in the
user's cache, so that a second clone builds nothing.

usage: python3 scripts/kube.py
"""

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULE = ROOT / "e2e" / "kube"
INPUTS = [MODULE / "go.mod", MODULE / "go.sum", MODULE / "main.go", pathlib.Path(__file__).resolve()]
# Without these it would call itself v0.0.0, and clients that ask for the version believe it.
VERSION = {"gitVersion": "v1.34.4", "gitMajor": "1", "gitMinor": "34"}
LIMIT_SECONDS = 40 * 60


def target() -> pathlib.Path:
    """Where the binary of the files as they are is, or will be."""
    digest = hashlib.sha256()
    for path in INPUTS:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return home / "tandem" / f"kube-{digest.hexdigest()[:16]}" / "kube"


def lacking() -> str | None:
    """What this machine lacks to have the binary, or None."""
    if target().exists():
        return None
    if not sys.platform.startswith("linux"):
        return f"etcd and Kubernetes' servers are built for Linux only, this is {sys.platform}"
    if shutil.which("go") is None:
        return "no `go` on the PATH: install Go 1.25 or newer"
    return None


def build(binary: pathlib.Path) -> None:
    """Builds beside the place of the binary and renames, so that what is there is whole."""
    print(f"building the control plane of e2e/kube into {binary} (once; about 10 minutes on two cores)", file=sys.stderr)
    flags = " ".join(f"-X k8s.io/component-base/version.{name}={value}" for name, value in VERSION.items())
    with tempfile.TemporaryDirectory(dir=binary.parent) as folder:
        partial = pathlib.Path(folder) / "kube"
        subprocess.run(
            ["go", "build", "-trimpath", "-buildvcs=false", "-ldflags", f"-s -w {flags}", "-o", str(partial), "."],
            cwd=MODULE,
            # The Go that is installed, and exactly the module versions that are committed.
            env=os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOTOOLCHAIN": "local", "GOWORK": "off"},
            stdout=sys.stderr,
            check=True,
            timeout=LIMIT_SECONDS,
        )
        partial.replace(binary)


def main() -> None:
    binary = target()
    if reason := lacking():
        sys.exit(f"error: the control plane for tests cannot be built here: {reason}")
    if not binary.exists():
        binary.parent.mkdir(parents=True, exist_ok=True)
        # Of two that want it at once the second waits, and finds it built.
        with (binary.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not binary.exists():
                try:
                    build(binary)
                except subprocess.CalledProcessError as failed:
                    sys.exit(f"error: go build of e2e/kube failed with status {failed.returncode}; its words are above")
                except subprocess.TimeoutExpired:
                    sys.exit(f"error: go build of e2e/kube was not done after {LIMIT_SECONDS // 60} minutes")
    print(binary)


if __name__ == "__main__":
    main()
