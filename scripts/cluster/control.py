"""The machine of the control plane: etcd, Kubernetes' servers, and DNS for the pods."""

import json
import pathlib

import tools
from machine import Machine
from pki import Pki

SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
# A node that was not heard of for so long is taken for lost; Kubernetes' own are 50 seconds.
GRACE_SECONDS = 30

# CoreDNS wants braces on lines of their own.
COREFILE = """
.:53 {
    errors
    ready :8181
    kubernetes cluster.local in-addr.arpa {
        kubeconfig KUBECONFIG
    }
    cache 5
}
"""


class Control:
    def __init__(self, machine: Machine, pki: Pki, bin: pathlib.Path, grace_seconds: int) -> None:
        self.machine, self.pki, self.bin, self.grace_seconds = machine, pki, bin, grace_seconds

    def start(self) -> None:
        """Starts all servers and waits until the API is ready."""
        pki, machine, path = self.pki, self.machine, self.pki.path
        peer, client = "http://127.0.0.1:2380", "http://127.0.0.1:2379"
        machine.start(
            "etcd", self.bin / "etcd", "--data-dir=/var/lib/etcd", f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}", "--log-level=warn",
            # It is a cluster to try things on: it need not outlive a power failure.
            "--unsafe-no-fsync",
        )  # fmt: skip
        machine.start(
            "kube-apiserver", self.bin / "kube-apiserver", f"--etcd-servers={client}", "--bind-address=0.0.0.0", "--secure-port=6443",
            f"--advertise-address={machine.address}", "--allow-privileged",
            f"--tls-cert-file={path('server.crt')}", f"--tls-private-key-file={path('server.key')}",
            f"--client-ca-file={path('ca.crt')}", f"--token-auth-file={path('tokens.csv')}",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
            f"--service-cluster-ip-range={SERVICES}", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={path('accounts.pub')}", f"--service-account-signing-key-file={path('accounts.key')}",
            f"--kubelet-client-certificate={path('kubelet-client.crt')}", f"--kubelet-client-key={path('kubelet-client.key')}",
            "--kubelet-preferred-address-types=InternalIP",
        )  # fmt: skip
        ready = ["get", "--raw=/readyz", "--request-timeout=5s"]
        tools.wait(
            "the API server is not ready", 120, lambda: tools.succeeds(*self.kubectl_words(), *ready), lambda: machine.said("kube-apiserver")
        )
        machine.start(
            "kube-controller-manager", self.bin / "kube-controller-manager",
            f"--kubeconfig={pki.kubeconfig('system:kube-controller-manager')}", "--leader-elect=false",
            f"--service-account-private-key-file={path('accounts.key')}", f"--root-ca-file={path('ca.crt')}",
            "--use-service-account-credentials", f"--node-monitor-grace-period={self.grace_seconds}s", "--node-monitor-period=1s",
        )  # fmt: skip
        scheduler = f"--kubeconfig={pki.kubeconfig('system:kube-scheduler')}"
        machine.start("kube-scheduler", self.bin / "kube-scheduler", scheduler, "--leader-elect=false")
        corefile = machine.folder / "Corefile"
        corefile.write_text(COREFILE.replace("KUBECONFIG", str(pki.kubeconfig("dns"))))
        machine.start("coredns", self.bin / "coredns", f"-conf={corefile}")
        self.apply(self.dns())

    def kubectl_words(self) -> list:
        return [self.bin / "kubectl", f"--kubeconfig={self.pki.kubeconfig('admin')}", f"--cache-dir={self.pki.folder / 'kubectl'}"]

    def kubectl(self, *words: object, **options: object) -> str:
        return tools.run(*self.kubectl_words(), *words, **options)

    def apply(self, objects: list[dict]) -> None:
        manifest = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=manifest)

    def dns(self) -> list[dict]:
        """What pods find DNS by. CoreDNS is no pod, so where it is, is said by hand."""
        ports = [("dns", "UDP"), ("dns-tcp", "TCP")]
        service = {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": "kube-dns", "namespace": "kube-system"},
            "spec": {"clusterIP": DNS_SERVICE, "ports": [{"name": name, "protocol": proto, "port": 53} for name, proto in ports]},
        }  # fmt: skip
        slice = {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": {"kubernetes.io/service-name": "kube-dns"}},
            "endpoints": [{"addresses": [self.machine.address], "conditions": {"ready": True}}],
            "ports": [{"name": name, "protocol": proto, "port": 53} for name, proto in ports],
        }  # fmt: skip
        return [service, slice]
