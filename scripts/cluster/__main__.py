"""A Kubernetes of several nodes on this machine, from nothing: control plane, containerd, pod network, DNS, a firewall for
NetworkPolicies, eight pretended GPUs a node, the images of this checkout, and a claim with the SmolLM2 model.

Needs Linux and root. Everything lives in namespaces of its own; `down` leaves nothing behind but what is cached.

usage: python3 scripts/cluster up [--nodes N] | down | cut NODE | mend NODE | load ARCHIVE..., each with [--name NAME] [--state DIR]
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import control  # noqa: E402
import images  # noqa: E402
import kube  # noqa: E402
import machine  # noqa: E402
import node  # noqa: E402
import tools  # noqa: E402
from pki import Pki  # noqa: E402

PAUSE = ROOT / "e2e" / "kube" / "pause"
# The names that a binary of e2e/kube is called by.
LINKS = {
    "control": ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"],
    "node": ["kubelet", "kube-proxy", "coredns"],
    "helm": ["helm"],
    "policy": ["kube-router"],
}
GPUS = 8
# What the kubelet sets for the whole machine.
SYSCTLS = ["vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops"]
SYS = pathlib.Path("/proc/sys")
NAMESPACE, CLAIM = "serving", "models"


class Cluster:
    def __init__(self, name: str, state: pathlib.Path, network: str, nodes: int, grace_seconds: int = control.GRACE_SECONDS) -> None:
        self.name, self.state = name, state.absolute()
        base = network.removesuffix(".0")
        self.gateway = f"{base}.1"
        at = lambda short, host: machine.Machine(self.state, name, short, f"{base}.{host}")  # noqa: E731
        plane = at("control", 10)
        self.bin = self.state / "bin"
        self.pki = Pki(self.state / "pki", f"https://{plane.address}:6443")
        self.plane = control.Control(plane, self.pki, self.bin, grace_seconds)
        self.nodes = [
            node.Node(at(f"node{index}", 10 + index), index, self.pki, self.bin, grace_seconds) for index in range(1, nodes + 1)
        ]

    def machines(self) -> list[machine.Machine]:
        return [self.plane.machine, *(node.machine for node in self.nodes)]

    def runs(self) -> bool:
        """Whether all of it runs already."""
        return all(each.alive() for each in self.machines()) and tools.succeeds(*self.plane.kubectl_words(), "get", "nodes")

    def up(self, how: str, compile: bool) -> None:
        step = Steps()
        tools.install(images.docker())
        step("programs that the machine lacked")
        binaries = {part: kube.build(part) for part in LINKS}
        step("Kubernetes' binaries")
        model()
        step("the model")
        if how == "prebuilt" and compile:
            cargo_build()
            step("Tandem's binaries")
        archives = [*images.build(list(images.IMAGES), how, images.version()).values(), pause_image()]
        step("images")
        if self.runs():
            for each in self.nodes:
                each.load(archives)
            step("images onto the nodes of the cluster that runs already")
            self.say()
            return

        self.down()
        self.state.mkdir(parents=True, exist_ok=True)
        self.save()
        self.bin.mkdir()
        for part, names in LINKS.items():
            for name in names:
                (self.bin / name).symlink_to(binaries[part])
        shutil.copy(pause_binary(), self.bin / "pause")
        names = ["127.0.0.1", "localhost", control.API_SERVICE, self.plane.machine.address]
        names += ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"]
        self.pki.create(names, [each.machine.name for each in self.nodes])
        step("certificates")
        machine.switch(self.name, self.gateway)
        for each in self.machines():
            each.create(self.bin / "pause", self.gateway)
        for each in self.nodes:
            for other in self.machines():
                if other is not each.machine:
                    tools.run("ip", "-n", other.name, "route", "add", each.pods, "via", each.machine.address)
        step("machines and their network")
        self.plane.start()
        step("control plane")
        for each in self.nodes:
            each.start(archives)
        step("nodes started")
        for each in self.nodes:
            self.ready(each)
            each.advertise(self.plane, GPUS)
            each.start_firewall()
        step("nodes ready")
        self.plane.apply(self.claim())
        shutil.copy(self.pki.kubeconfig("admin"), self.state / "kubeconfig")
        step("the claim of the model")
        for each in self.machines():
            for service in each.ended():
                sys.exit(f"error: {service} has ended; {each.said(service)}")
        self.say()

    def ready(self, each: node.Node) -> None:
        name = each.machine.name
        path = "-o=jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        get = ["get", "node", name, "--ignore-not-found", path]
        tools.wait(
            f"node {name} is not ready", 90, lambda: self.plane.kubectl(*get, check=False) == "True", lambda: each.machine.said("kubelet")
        )

    def claim(self) -> list[dict]:
        """A namespace that holds pods to the restricted standard, and in it a claim with the model's folder of this machine."""
        folder = {
            "accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeMode": "Filesystem",
        }  # fmt: skip
        return [
            {
                "apiVersion": "v1", "kind": "Namespace",
                "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
            },
            {
                "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": CLAIM},
                "spec": folder | {
                    "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(ROOT / ".demo" / "models"), "type": "Directory"},
                    "claimRef": {"namespace": NAMESPACE, "name": CLAIM}, "persistentVolumeReclaimPolicy": "Retain",
                },
            },
            {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": CLAIM, "namespace": NAMESPACE},
                "spec": folder | {"volumeName": CLAIM, "resources": {"requests": {"storage": "1Gi"}}},
            },
        ]  # fmt: skip

    def save(self) -> None:
        """Notes what `down` puts back."""
        kept = {name: (SYS / name).read_text() for name in SYSCTLS}
        (self.state / "state.json").write_text(json.dumps({"name": self.name, "nodes": len(self.nodes), "sysctls": kept}))

    def down(self) -> None:
        machine.remove(self.name)
        node.remove_cgroups(self.name)
        try:
            kept = json.loads((self.state / "state.json").read_text())["sysctls"]
        except (OSError, ValueError):
            kept = {}
        for name, value in kept.items():
            (SYS / name).write_text(value)
        shutil.rmtree(self.state, ignore_errors=True)
        if self.state.exists():
            sys.exit(f"error: {self.state} could not be removed; what is mounted there: {mounts(self.state)}")

    def find(self, name: str) -> node.Node:
        for each in self.nodes:
            if each.machine.name == name:
                return each
        sys.exit(f"error: there is no node {name}; there are {', '.join(each.machine.name for each in self.nodes)}")

    def cut(self, name: str) -> None:
        """Loses a node: its kubelet ends and its cable is pulled; its pods live on, out of reach."""
        each = self.find(name)
        each.machine.kill("kubelet")
        each.machine.link("down")

    def mend(self, name: str) -> None:
        each = self.find(name)
        each.machine.link("up")
        each.start_kubelet()
        self.ready(each)
        each.advertise(self.plane, GPUS)

    def say(self) -> None:
        bin = shown(self.bin)
        print(
            f"""
{len(self.nodes)} nodes with {GPUS} pretended GPUs each, and the model in the claim {CLAIM} of the namespace {NAMESPACE}:

  export KUBECONFIG={self.state / "kubeconfig"} PATH={self.bin}:$PATH
  kubectl get nodes

Install the operator and serve:

  helm install tandem-crds charts/tandem-crds
  helm install tandem charts/tandem --namespace tandem-system --create-namespace
  kubectl apply --namespace {NAMESPACE} --filename examples/smollm2-cluster.yaml
  kubectl wait --namespace {NAMESPACE} --for=condition=Ready pdd/smollm2 --timeout=5m

Logs of Kubernetes' parts are in {shown(self.state)}/*/*.log, {bin} has kubectl and helm. `make cluster-down` removes all of it."""
        )


class Steps:
    """Prints how long each step took."""

    def __init__(self) -> None:
        self.begin = self.last = time.monotonic()

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        print(f"{now - self.begin:7.1f} s  {now - self.last:6.1f} s  {what}", flush=True)
        self.last = now


def known(state: pathlib.Path) -> int:
    """How many nodes the cluster has."""
    try:
        return json.loads((state / "state.json").read_text())["nodes"]
    except (OSError, ValueError):
        return 0


def shown(path: pathlib.Path) -> pathlib.Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def mounts(folder: pathlib.Path) -> list[str]:
    lines = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
    return [line.split()[4] for line in lines if line.split()[4].startswith(str(folder))]


def model() -> None:
    done = subprocess.run(["sh", "-c", "scripts/venv.sh && .venv/bin/python scripts/model.py"], cwd=ROOT, check=False, stdout=sys.stderr)
    if done.returncode:
        sys.exit("error: the model could not be fetched; the words above say why")


def cargo_build() -> None:
    if shutil.which("cargo") is None:
        sys.exit("error: there is no cargo to build Tandem with: install Rust 1.95, or let the images build it: --build source")
    if subprocess.run(["cargo", "build", "--release", "--workspace", "--locked", "--bins"], cwd=ROOT, check=False).returncode:
        sys.exit("error: the build failed; its words are above")


def pause_binary() -> pathlib.Path:
    binary = images.OUT / "pause" / "pause"
    binary.parent.mkdir(parents=True, exist_ok=True)
    tools.run("cc", "-O2", "-static", "-s", "-o", binary, PAUSE / "pause.c")
    return binary


def pause_image() -> pathlib.Path:
    context, archive = pause_binary().parent, images.OUT / "pause.tar"
    tool = images.builder()
    tool.build(PAUSE / "Dockerfile", context, "localhost/pause:1", {}, 300)
    tool.export("localhost/pause:1", archive)
    return archive


def main() -> None:
    parser = argparse.ArgumentParser(description="a Kubernetes of several nodes on this machine")
    parser.add_argument("--name", default="tandem", help="what its namespaces, cgroups and network device begin with")
    parser.add_argument("--state", type=pathlib.Path, default=ROOT / ".demo" / "cluster", help="the folder of all its files")
    parser.add_argument("--network", default="10.200.0.0", help="a /24 of which this machine knows nothing")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="makes it; if it runs already, only its images are made anew")
    up.add_argument("--nodes", type=int, default=2, help="how many nodes")
    up.add_argument("--build", choices=images.LIMIT_SECONDS, default="prebuilt", help="where the images' binaries come from")
    up.add_argument("--no-build", action="store_true", help="take target/release as it is")
    up.add_argument(
        "--grace-seconds", type=int, default=control.GRACE_SECONDS, help="a node that was not heard of for so long is taken for lost; of a cluster that is made"
    )
    commands.add_parser("down", help="removes it")
    commands.add_parser("cut", help="loses a node: ends its kubelet and pulls its cable").add_argument("node")
    commands.add_parser("mend", help="brings it back").add_argument("node")
    commands.add_parser("load", help="puts images onto all nodes").add_argument("archive", type=pathlib.Path, nargs="+")
    args = parser.parse_args()
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        sys.exit("error: a cluster on this machine needs Linux and root (namespaces, mounts, cgroups); use kind or k3d otherwise")
    if args.command == "up":
        cluster = Cluster(args.name, args.state, args.network, args.nodes, args.grace_seconds)
    else:
        cluster = Cluster(args.name, args.state, args.network, known(args.state))
    match args.command:
        case "up":
            cluster.up(args.build, not args.no_build)
        case "down":
            cluster.down()
        case "cut":
            cluster.cut(args.node)
        case "mend":
            cluster.mend(args.node)
        case "load":
            for each in cluster.nodes:
                each.load([archive.absolute() for archive in args.archive])


if __name__ == "__main__":
    main()
