"""Commands, waits, and what a machine must have installed."""

import collections.abc
import os
import pathlib
import shutil
import subprocess
import sys
import time

# A command, where Debian has it, and whether only the images need it.
COMMANDS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ipset": "ipset",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "cc": "gcc",
}
IMAGE_COMMANDS = {"buildah": "buildah", "debootstrap": "debootstrap"}
# Where plugins for pod networks are: Debian's place, and everybody else's.
PLUGINS = [pathlib.Path("/usr/lib/cni"), pathlib.Path("/opt/cni/bin")]
PLUGINS_PACKAGE = "containernetworking-plugins"
# Nothing is reached through a proxy, and nothing depends on what the caller's shell has set.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}


def run(*command: object, stdin: str = "", check: bool = True, limit: float = 60) -> str:
    """What a command prints. Ends the program with the command's own words if it fails."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False, timeout=limit, env=ENVIRONMENT)
    except FileNotFoundError:
        sys.exit(f"error: this machine has no {words[0]}: install it")
    except subprocess.TimeoutExpired:
        sys.exit(f"error: `{' '.join(words)}` was not done after {limit:.0f} s")
    if check and done.returncode:
        sys.exit(f"error: `{' '.join(words)}` failed with status {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def succeeds(*command: object) -> bool:
    """Whether a command ends well within a few seconds."""
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, check=False, timeout=20, env=ENVIRONMENT)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def wait(what: str, limit: float, done: collections.abc.Callable[[], bool], why: collections.abc.Callable[[], str]) -> None:
    """Waits until something is so; ends the program, with a reason, if it is not in time."""
    end = time.monotonic() + limit
    while not done():
        if time.monotonic() > end:
            sys.exit(f"error: {what} after {limit:.0f} s: {why()}")
        time.sleep(0.1)


def plugins() -> pathlib.Path | None:
    """The folder of the plugins for pod networks, if there is one."""
    return next((folder for folder in PLUGINS if (folder / "bridge").exists()), None)


def missing(commands: dict[str, str]) -> list[str]:
    """The packages that would bring what is not there."""
    path = ENVIRONMENT["PATH"] + ":" + os.environ.get("PATH", "")
    return sorted({package for command, package in commands.items() if shutil.which(command, path=path) is None})


def install(docker: bool) -> None:
    """Installs what is missing with apt, if the machine has that."""
    packages = missing(COMMANDS | ({} if docker else IMAGE_COMMANDS))
    if plugins() is None:
        packages.append(PLUGINS_PACKAGE)
    if not packages:
        return
    if shutil.which("apt-get") is None:
        sys.exit(f"error: this machine lacks what Debian has in the packages {', '.join(packages)}: install them")
    print(f"  installing {', '.join(packages)}", flush=True)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *packages]
    # What is known of the packages may be old or missing.
    for command in (install, ["apt-get", "update", "-q"], install):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, env=env)
        if done.returncode == 0 and command is install:
            return
    sys.exit(f"error: `{' '.join(install)}` failed with status {done.returncode}: {done.stderr.strip()[-2000:]}")
