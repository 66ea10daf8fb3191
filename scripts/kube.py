"""Builds the parts of a small Kubernetes from e2e/kube and prints the path of the one that is asked for.

| name | holds |
| --- | --- |
| control | etcd, Kubernetes' servers and kubectl, as one binary |
| node | kubelet, kube-proxy and CoreDNS, as one binary |
| helm | helm |
| policy | kube-router, of which the firewall for NetworkPolicies is used |

It takes about fifteen minutes of one core for the first, twenty for the others together, and happens once for what e2e/kube holds:
the binaries are kept in the user's cache, so that a second clone builds nothing.

usage: python3 scripts/kube.py [control | node | helm | policy]
"""

import argparse
import dataclasses
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
# Without these the servers would call themselves v0.0.0, and clients that ask for the version believe it; helm would take itself
# for one of Kubernetes 1.20, and refuse charts that want a newer one.
VARIABLES = {
    "k8s.io/component-base/version": {"gitVersion": "v1.34.4", "gitMajor": "1", "gitMinor": "34"},
    "helm.sh/helm/v3/pkg/chartutil": {"k8sVersionMajor": "1", "k8sVersionMinor": "34"},
    "helm.sh/helm/v3/pkg/lint/rules": {"k8sVersionMajor": "1", "k8sVersionMinor": "34"},
}
FLAGS = "-s -w " + " ".join(f"-X {of}.{name}={value}" for of, values in VARIABLES.items() for name, value in values.items())
LIMIT_SECONDS = 40 * 60


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    module: pathlib.Path
    package: str
    binary: str  # the file's name

    def target(self) -> pathlib.Path:
        """Where the binary of the files as they are is, or will be."""
        digest = hashlib.sha256(FLAGS.encode())
        inputs = [self.module / name for name in ("go.mod", "go.sum")] + ([self.module / "main.go"] if self.package == "." else [])
        for path in inputs:
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
        home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        return home / "tandem" / f"kube-{self.name}-{digest.hexdigest()[:16]}" / self.binary


PARTS = {
    part.name: part
    for part in [
        Part("control", MODULE, ".", "kube"),
        # With a go.mod of its own, for what only it needs would change what the control plane is built from.
        Part("node", MODULE / "node", ".", "node"),
        Part("helm", MODULE / "node", "helm.sh/helm/v3/cmd/helm", "helm"),
        Part("policy", MODULE / "policy", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router", "kube-router"),
    ]
}


def lacking(names: tuple[str, ...] = ("control",)) -> str | None:
    """What this machine lacks to have the parts, or None."""
    if all(PARTS[name].target().exists() for name in names):
        return None
    if not sys.platform.startswith("linux"):
        return f"etcd and Kubernetes' servers are built for Linux only, this is {sys.platform}"
    if shutil.which("go") is None:
        return "no `go` on the PATH: install Go 1.25 or newer"
    return None


def compile_part(part: Part, binary: pathlib.Path) -> None:
    """Builds beside the place of the binary and renames, so that what is there is whole."""
    print(f"building {part.name} of e2e/kube into {binary} (once; several minutes)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=binary.parent) as folder:
        partial = pathlib.Path(folder) / part.binary
        subprocess.run(
            ["go", "build", "-trimpath", "-buildvcs=false", "-ldflags", FLAGS, "-o", str(partial), part.package],
            cwd=part.module,
            # The Go that is installed, and exactly the module versions that are committed.
            env=os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOTOOLCHAIN": "local", "GOWORK": "off"},
            stdout=sys.stderr,
            check=True,
            timeout=LIMIT_SECONDS,
        )
        partial.replace(binary)


def build(name: str) -> pathlib.Path:
    """The path of a part's binary, which is built if it is not there. Ends the program where that cannot be."""
    part = PARTS[name]
    binary = part.target()
    if reason := lacking((name,)):
        sys.exit(f"error: {name} of e2e/kube cannot be built here: {reason}")
    if not binary.exists():
        binary.parent.mkdir(parents=True, exist_ok=True)
        # Of two that want it at once the second waits, and finds it built.
        with (binary.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not binary.exists():
                try:
                    compile_part(part, binary)
                except subprocess.CalledProcessError as failed:
                    sys.exit(f"error: go build of e2e/kube, {name}, failed with status {failed.returncode}; its words are above")
                except subprocess.TimeoutExpired:
                    sys.exit(f"error: go build of e2e/kube, {name}, was not done after {LIMIT_SECONDS // 60} minutes")
    return binary


def main() -> None:
    parser = argparse.ArgumentParser(description="builds parts of a small Kubernetes")
    parser.add_argument("part", nargs="?", choices=PARTS, default="control")
    print(build(parser.parse_args().part))


if __name__ == "__main__":
    main()
