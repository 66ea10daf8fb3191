"""A node: containerd, a pod network, kubelet, kube-proxy, and a firewall that enforces NetworkPolicies."""

import json
import os
import pathlib

import control
import tools
from machine import Machine
from pki import Pki

PODS = "10.244.0.0/16"
GPU = "nvidia.com/gpu"
CGROUPS = pathlib.Path("/sys/fs/cgroup")

CONTAINERD = """
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  # Without CAP_SYS_RESOURCE runc cannot lower a score.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "PLUGINS"
    conf_dir = "/var/lib/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


class Node:
    def __init__(self, machine: Machine, index: int, pki: Pki, bin: pathlib.Path, grace_seconds: int) -> None:
        self.machine, self.index, self.pki, self.bin, self.grace_seconds = machine, index, pki, bin, grace_seconds
        # Nobody translates addresses between pods: NetworkPolicies see who calls.
        self.pods = f"10.244.{index}.0/24"

    def start(self, images: list[pathlib.Path]) -> None:
        """Starts everything; the node registers itself a little later."""
        machine, config = self.machine, self.machine.folder
        self.cgroup()
        if not pathlib.Path("/proc/sys/net/bridge").exists():
            tools.run("modprobe", "br_netfilter")
        machine.run("sh", "-c", "cd /proc/sys/net; echo 1 >ipv4/ip_forward; echo 1 >bridge/bridge-nf-call-iptables")
        (config / "lib" / "cni" / "net.d").mkdir(parents=True)
        (config / "lib" / "cni" / "net.d" / "pods.conflist").write_text(json.dumps(self.network()))
        (config / "containerd.toml").write_text(CONTAINERD.replace("PLUGINS", str(tools.plugins())))
        (config / "kubelet.json").write_text(json.dumps(self.kubelet()))
        self.start_containerd()
        self.load(images)
        self.start_kubelet()
        proxy = [f"--kubeconfig={self.pki.kubeconfig('system:kube-proxy')}", f"--hostname-override={machine.name}", f"--cluster-cidr={PODS}"]
        proxy += ["--proxy-mode=iptables", "--conntrack-max-per-core=0", "--oom-score-adj=0"]
        machine.start("kube-proxy", self.bin / "kube-proxy", *proxy)

    def start_firewall(self) -> None:
        """Enforces NetworkPolicies; it ends at once if the API server does not know the node yet."""
        flags = [f"--kubeconfig={self.pki.kubeconfig('firewall')}", f"--hostname-override={self.machine.name}"]
        flags += ["--run-firewall=true", "--run-router=false", "--run-service-proxy=false", "--run-loadbalancer=false"]
        self.machine.start("kube-router", self.bin / "kube-router", *flags, f"--service-cluster-ip-range={control.SERVICES}")

    def start_containerd(self) -> None:
        config = f"--config={self.machine.folder / 'containerd.toml'}"
        # What it starts, the containers, is as urgent as it is itself.
        self.machine.start("containerd", "containerd", config, "--log-level=warn", urgent=False)
        tools.wait(
            f"containerd of {self.machine.name} does not answer",
            60,
            lambda: tools.succeeds(*self.machine.inside(), "ctr", "version"),
            lambda: self.machine.said("containerd"),
        )

    def load(self, images: list[pathlib.Path]) -> None:
        for image in images:
            self.machine.run("ctr", "--namespace=k8s.io", "images", "import", image, limit=300)

    def start_kubelet(self) -> None:
        flags = [f"--config={self.machine.folder / 'kubelet.json'}", f"--hostname-override={self.machine.name}"]
        flags += [f"--kubeconfig={self.pki.kubeconfig(f'system:node:{self.machine.name}')}", f"--node-ip={self.machine.address}"]
        self.machine.start("kubelet", self.bin / "kubelet", *flags)

    def network(self) -> dict:
        ranges = {"type": "host-local", "ranges": [[{"subnet": self.pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
        bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": ranges}
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}

    def kubelet(self) -> dict:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.pki.path("ca.crt"))},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.machine.name}",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "clusterDNS": [control.DNS_SERVICE],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "failSwapOn": False,
            "failCgroupV1": False,
            "oomScoreAdj": 0,
            # A machine that does other things too, perhaps with a disk that is nearly full.
            "evictionHard": {"memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            "syncFrequency": "2s",
            "nodeStatusUpdateFrequency": "2s",
            "nodeLeaseDurationSeconds": self.grace_seconds,
            # A folder of the model's is not to be measured again and again.
            "volumeStatsAggPeriod": "-1s",
        }

    def cgroup(self) -> None:
        """The group that the pods' are made in, in every hierarchy."""
        for hierarchy in hierarchies():
            group = hierarchy / self.machine.name
            group.mkdir(exist_ok=True)
            if hierarchy == CGROUPS:  # version 2
                for parent in (hierarchy, group):
                    (parent / "cgroup.subtree_control").write_text("+cpu +cpuset +memory +pids")
            elif hierarchy.name == "cpuset":  # of version 1, where a new group has no processor
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (group / file).write_text((hierarchy / file).read_text())

    def advertise(self, plane: control.Control, gpus: int) -> None:
        """Says that the node has so many GPUs. The kubelet keeps what it has not written, and the scheduler counts it."""
        name = GPU.replace("/", "~1")
        patch = [{"op": "add", "path": f"/status/{of}/{name}", "value": str(gpus)} for of in ("capacity", "allocatable")]
        plane.kubectl("patch", "node", self.machine.name, "--subresource=status", "--type=json", f"--patch={json.dumps(patch)}")


def hierarchies() -> list[pathlib.Path]:
    """The cgroup file systems: one, or one for each controller."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [path for path in CGROUPS.iterdir() if path.is_dir() and not path.is_symlink() and path.name != "unified"]


def remove_cgroups(cluster: str) -> None:
    """Removes the groups of all nodes of a cluster; their processes have ended."""
    # runc makes one of version 2 too where both are mounted
    for hierarchy in {*hierarchies(), CGROUPS / "unified"}:
        for group in hierarchy.glob(f"{cluster}-*"):
            for folder, _, _ in os.walk(group, topdown=False):
                tools.wait(f"{folder} is in use", 20, lambda folder=folder: removed(folder), lambda: "it still has processes")


def removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
