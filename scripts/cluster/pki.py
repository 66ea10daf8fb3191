"""Certificates, users and their kubeconfigs."""

import json
import pathlib
import secrets

import tools

DAYS = "365"


class Pki:
    def __init__(self, folder: pathlib.Path, server: str) -> None:
        self.folder, self.server = folder, server

    def path(self, name: str) -> pathlib.Path:
        return self.folder / name

    def create(self, names: list[str], nodes: list[str]) -> None:
        """Writes all files. `names` are what the API server is called by; a list of tokens is read only when it starts."""
        self.folder.mkdir(parents=True, mode=0o700)
        tools.run("openssl", "genrsa", "-out", self.path("accounts.key"), "2048")
        tools.run("openssl", "rsa", "-in", self.path("accounts.key"), "-pubout", "-out", self.path("accounts.pub"))
        new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes"]
        tools.run(*new, "-x509", "-days", DAYS, "-subj", "/CN=tandem", "-keyout", self.path("ca.key"), "-out", self.path("ca.crt"))
        alternative = ",".join(f"{'IP' if name[0].isdigit() else 'DNS'}:{name}" for name in names)
        self.certificate("server", "/CN=kube-apiserver", f"subjectAltName={alternative}\n")
        self.certificate("kubelet-client", "/O=system:masters/CN=kube-apiserver", "extendedKeyUsage=clientAuth\n")

        # DNS and firewall come as pods elsewhere, with roles of their own; here they may do everything.
        users = {"admin": "system:masters", "dns": "system:masters", "firewall": "system:masters"}
        users |= dict.fromkeys(("system:kube-controller-manager", "system:kube-scheduler", "system:kube-proxy"), "")
        users |= {f"system:node:{node}": "system:nodes" for node in nodes}
        lines = []
        for user, group in users.items():
            token = secrets.token_hex(16)
            lines.append(f'{token},{user},{user},"{group}"\n')
            self.kubeconfig(user).write_text(json.dumps(self.config(token), indent=1))
        self.path("tokens.csv").write_text("".join(lines))

    def certificate(self, name: str, subject: str, extensions: str) -> None:
        key, request, extra = self.path(f"{name}.key"), self.path(f"{name}.csr"), self.path(f"{name}.ext")
        extra.write_text(extensions)
        tools.run("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", subject, "-keyout", key, "-out", request)
        sign = ["openssl", "x509", "-req", "-days", DAYS, "-in", request, "-extfile", extra, "-out", self.path(f"{name}.crt")]
        tools.run(*sign, "-CA", self.path("ca.crt"), "-CAkey", self.path("ca.key"), "-CAcreateserial")

    def kubeconfig(self, user: str) -> pathlib.Path:
        return self.path(f"{user.replace(':', '-')}.kubeconfig")

    def config(self, token: str) -> dict:
        authority = tools.run("base64", "-w0", self.path("ca.crt"))
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tandem", "cluster": {"server": self.server, "certificate-authority-data": authority}}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "tandem", "context": {"cluster": "tandem", "user": "user"}}],
            "current-context": "tandem",
        }
