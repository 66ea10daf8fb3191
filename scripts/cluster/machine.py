"""A machine of the cluster: network, mount, process and host name namespaces of its own on this one.

Its first process is the one that everything in it dies with, mounts and all: whatever is started in a machine leaves nothing
behind. `/run`, `/var/lib` and `/var/log` are its own, so that every program in it keeps its default paths. It is joined to the
others by a veth pair to a switch, a bridge in one more network namespace; the host has one such pair too, and nothing else of
the host's network is touched.
"""

import os
import pathlib
import signal
import subprocess
import sys

import tools

# Runs inside of the new namespaces; $1 is the machine's folder, $2 its name, $3 the program that stays.
FIRST = """
set -e
mount --make-rshared /
hostname "$2"
mount --bind "$1/lib" /var/lib
mount --bind "$1/log" /var/log
mount -t tmpfs -o mode=755 run /run
exec "$3"
"""


class Machine:
    def __init__(self, folder: pathlib.Path, cluster: str, short: str, address: str) -> None:
        self.folder = folder / short
        self.cluster, self.short, self.address = cluster, short, address
        self.name = f"{cluster}-{short}"

    def create(self, pause: pathlib.Path, gateway: str) -> None:
        """Makes the namespaces and starts the first process."""
        for part in ("lib", "log", "services"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        switch = f"{self.cluster}-switch"
        tools.run("ip", "netns", "add", self.name)
        tools.run("ip", "-n", switch, "link", "add", "name", self.short, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        tools.run("ip", "-n", switch, "link", "set", "dev", self.short, "master", "bridge", "up")
        tools.run("ip", "-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            tools.run("ip", "-n", self.name, "link", "set", device, "up")
        tools.run("ip", "-n", self.name, "route", "add", "default", "via", gateway)
        first = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--mount"]
        first += ["--uts", "--propagation=private", "sh", "-c", FIRST, "first", self.folder, self.name, pause]
        outer = self.spawn("first", first)
        tools.wait(f"{self.name} has not started", 20, lambda: self.begun(outer), lambda: self.said("first"))

    def begun(self, outer: int) -> bool:
        """Whether the first process has made its mounts and stays; notes its id then."""
        for child in children(outer):
            if pathlib.Path(f"/proc/{child}/comm").read_text().strip() == "pause":
                (self.folder / "pid").write_text(str(child))
                return True
        return False

    def inside(self) -> list[str]:
        """What to put before a command that is to run inside."""
        pid = (self.folder / "pid").read_text()
        return ["nsenter", f"--target={pid}", "--net", "--mount", "--pid", "--uts", "--"]

    def alive(self) -> bool:
        try:
            return pathlib.Path(f"/proc/{(self.folder / 'pid').read_text()}/comm").read_text().strip() == "pause"
        except OSError:
            return False

    def spawn(self, service: str, command: list) -> int:
        with (self.folder / f"{service}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.folder, env=tools.ENVIRONMENT,
            )  # fmt: skip
        return process.pid

    def start(self, service: str, *command: object, urgent: bool = True) -> None:
        """Starts a program inside; what it says goes to a log of its name.

        What is urgent goes before all else on this machine, which may be busy with what runs in the pods: a node whose kubelet does
        not come to its turn is taken for lost.
        """
        first = ["nice", "-n", "-10"] if urgent else []
        (self.folder / "services" / service).write_text(str(self.spawn(service, [*first, *self.inside(), *command])))

    def ended(self) -> list[str]:
        """The programs that were started and do not run any more."""
        services = (self.folder / "services").iterdir()
        return [service.name for service in services if not children(int(service.read_text()))]

    def kill(self, service: str) -> None:
        """Kills a program that was started, and nothing that it has started."""
        try:
            outer = int((self.folder / "services" / service).read_text())
            for child in children(outer):
                os.kill(child, signal.SIGKILL)
        except OSError:
            return
        tools.wait(f"{service} of {self.name} has not ended", 20, lambda: not children(outer), lambda: "it was killed")

    def run(self, *command: object, **options: object) -> str:
        """What a command prints that runs inside."""
        return tools.run(*self.inside(), *command, **options)

    def link(self, state: str) -> None:
        """Pulls the machine's cable (`down`) or puts it in again (`up`)."""
        tools.run("ip", "-n", f"{self.cluster}-switch", "link", "set", "dev", self.short, state)

    def said(self, service: str) -> str:
        """The last words of a program."""
        try:
            lines = (self.folder / f"{service}.log").read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return f"{service} of {self.name} says last:\n" + "\n".join(lines[-15:])


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def switch(cluster: str, gateway: str) -> None:
    """Makes the switch and joins the host to it, by one device that is named like the cluster."""
    taken = [line for line in tools.run("ip", "-4", "route", "show", "to", "match", gateway).splitlines() if "default" not in line]
    if taken:
        sys.exit(f"error: this machine reaches {gateway} already ({taken[0].strip()}); choose another network with --network")
    name = f"{cluster}-switch"
    tools.run("ip", "netns", "add", name)
    tools.run("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
    tools.run("ip", "-n", name, "link", "set", "bridge", "up")
    tools.run("ip", "link", "add", cluster, "type", "veth", "peer", "name", "host", "netns", name)
    tools.run("ip", "-n", name, "link", "set", "host", "master", "bridge", "up")
    tools.run("ip", "address", "add", f"{gateway}/24", "dev", cluster)
    tools.run("ip", "link", "set", cluster, "up")


def remove(cluster: str) -> None:
    """Ends every machine of a cluster and its switch, also of one whose folder is gone."""
    # The device first: a namespace dies only after its last process, and the device's name would be taken until then.
    tools.run("ip", "link", "delete", cluster, check=False)
    names = [name for name in os.listdir("/run/netns") if name.startswith(f"{cluster}-")] if os.path.isdir("/run/netns") else []
    namespaces = {os.stat(f"/run/netns/{name}").st_ino for name in names}
    tools.wait(f"processes of {cluster} live on", 30, lambda: not kill_in(namespaces), lambda: str(kill_in(namespaces)))
    for name in names:
        tools.run("ip", "netns", "delete", name)


def kill_in(namespaces: set[int]) -> list[int]:
    """Kills all processes of some network namespaces. Of each machine that is its first one too, and all others die with it."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.stat(f"/proc/{entry}/ns/net").st_ino in namespaces:
                os.kill(int(entry), signal.SIGKILL)
                found.append(int(entry))
        except OSError:  # it has ended
            continue
    return found
