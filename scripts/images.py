"""Builds the images of engine, router and operator with docker or, as root, with buildah, and prints size and time of each.

`--build source` compiles inside of the build, from nothing but the checkout; `--build prebuilt` takes target/release of this
machine. Each image is also written to target/images/NAME.tar, for clusters that images are loaded into:

    kind load image-archive target/images/tandem-engine.tar
    k3d image import target/images/tandem-engine.tar

Without a docker daemon the base image is made by debootstrap and kept in the user's cache; no image registry is asked.

usage: python3 scripts/images.py [--build source|prebuilt] [--tag TAG] [--faults] [tandem-engine] [tandem-router] [tandem-operator]
"""

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "target" / "images"
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "tandem"
# Image and its Dockerfile.
IMAGES = {f"tandem-{name}": ROOT / f"Dockerfile.{name}" for name in ("engine", "router", "operator")}
BINARIES = ["tandem-engine", "tandem-router", "tandem-operator", "tandem"]
# Those that tests plant faults in, and what they are built as.
FAULTY = {"tandem-engine": "tandem-engine-faults", "tandem-router": "tandem-router-faults"}
BASE = "docker.io/library/debian:bookworm-slim"
# Of Debian 12, which the images take their libraries from.
GLIBC = (2, 36)
# What the base image does without.
SLIM = ["var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info"]
# A source build compiles everything once.
LIMIT_SECONDS = {"source": 90 * 60, "prebuilt": 10 * 60}


class Docker:
    """A daemon that answers; it gets the base image from where it always does."""

    name = "docker"

    def build(self, dockerfile: pathlib.Path, context: pathlib.Path, tag: str, args: dict[str, str], limit: int) -> None:
        flags = [f"--build-arg={key}={value}" for key, value in args.items()]
        run(["docker", "build", "-f", dockerfile, "-t", tag, *flags, context], limit, log_of(tag))

    def export(self, tag: str, archive: pathlib.Path) -> None:
        run(["docker", "save", "-o", archive, tag], 300)

    def tidy(self) -> None:
        """What a daemon keeps is its owner's business."""


class Buildah:
    """With a storage of its own in the user's cache, so that nothing of the machine's is touched."""

    name = "buildah"

    def __init__(self) -> None:
        storage = CACHE / "buildah"
        self.command = ["buildah", "--root", storage / "root", "--runroot", storage / "run"]
        if subprocess.run([*self.command, "inspect", "--type", "image", BASE], capture_output=True, check=False).returncode:
            self.commit(debian(), BASE)

    def commit(self, rootfs: pathlib.Path, tag: str) -> None:
        container = run([*self.command, "from", "scratch"], 60).strip()
        run([*self.command, "add", container, rootfs, "/"], 300)
        run([*self.command, "config", "--cmd", "bash", container], 60)
        run([*self.command, "commit", "--rm", container, tag], 300)

    def build(self, dockerfile: pathlib.Path, context: pathlib.Path, tag: str, args: dict[str, str], limit: int) -> None:
        flags = [f"--build-arg={key}={value}" for key, value in args.items()]
        # A network with an authority of its own names it by this variable.
        if certificates := os.environ.get("SSL_CERT_FILE"):
            flags += [f"--volume={certificates}:/run/host-ca.crt:ro", "--build-arg=CARGO_HTTP_CAINFO=/run/host-ca.crt"]
        how = ["--layers", "--isolation=chroot"]
        run([*self.command, "build", *how, "-f", dockerfile, "-t", tag, *flags, context], limit, log_of(tag))

    def export(self, tag: str, archive: pathlib.Path) -> None:
        archive.unlink(missing_ok=True)
        run([*self.command, "push", "--quiet", tag, f"docker-archive:{archive}:{tag}"], 300)

    def tidy(self) -> None:
        """Removes what no image is made of any more: binaries of former builds."""
        run([*self.command, "rmi", "--prune", "--force"], 300)


def log_of(tag: str) -> pathlib.Path:
    return OUT / f"{tag.rpartition('/')[2].partition(':')[0]}.log"


def run(command: list, limit: int, log: pathlib.Path | None = None) -> str:
    """What a command prints, or nothing if that goes to a log. Ends the program if it fails."""
    command = [str(word) for word in command]
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(log.open("w")) if log else subprocess.PIPE
        try:
            done = subprocess.run(
                command, check=False, text=True, timeout=limit, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT if log else None,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            sys.exit(f"error: `{' '.join(command)}` was not done after {limit} s{f'; its words are in {log}' if log else ''}")
    if done.returncode:
        where = f"{log}, and end with\n" + "\n".join(log.read_text().splitlines()[-15:]) if log else "above"
        sys.exit(f"error: `{' '.join(command)}` failed with status {done.returncode}; its words are {where}")
    return done.stdout or ""


def debian() -> pathlib.Path:
    """The root of a small Debian 12, as an archive; made once."""
    archive = CACHE / "debian-bookworm-updated.tar"
    if archive.exists():
        return archive
    print("making a Debian 12 with debootstrap (once; about a minute)", file=sys.stderr)
    CACHE.mkdir(parents=True, exist_ok=True)
    rootfs, partial = CACHE / f"debian-bookworm-{os.getpid()}", archive.with_suffix(f".{os.getpid()}")
    try:
        run(["debootstrap", "--variant=minbase", "bookworm", rootfs], 900, CACHE / "debian-bookworm.log")
        # As in the public image: what was mended since the release, a newer Rust among it.
        sources = rootfs / "etc" / "apt" / "sources.list"
        mirror = sources.read_text().split()[1].rstrip("/")
        with sources.open("a") as file:
            file.write(f"deb {mirror} bookworm-updates main\ndeb {mirror}-security bookworm-security main\n")
        for folder in SLIM:
            for entry in (rootfs / folder).iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        run(["tar", "-C", rootfs, "--numeric-owner", "--exclude=./dev/*", "-cf", partial, "."], 300)
        partial.replace(archive)
    finally:
        shutil.rmtree(rootfs, ignore_errors=True)
        partial.unlink(missing_ok=True)
    return archive


def lacking() -> str | None:
    """What this machine lacks to build images, or None."""
    if docker():
        return None
    if os.geteuid() != 0:
        return "neither a docker daemon nor root for buildah"
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    return f"neither a docker daemon nor {' and '.join(missing)}: apt-get install {' '.join(missing)}" if missing else None


def docker() -> bool:
    return bool(shutil.which("docker")) and not subprocess.run(["docker", "info"], capture_output=True, check=False).returncode


def builder() -> Docker | Buildah:
    if reason := lacking():
        sys.exit(f"error: no images can be built here: {reason}")
    return Docker() if docker() else Buildah()


def glibc(binary: pathlib.Path) -> tuple[int, int]:
    """The newest glibc that a binary asks for."""
    symbols = run(["objdump", "-T", binary], 60)
    return max(((int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols)), default=(0, 0))


def binaries(faults: bool) -> dict[str, pathlib.Path]:
    """What goes into images, by the name that it has there."""
    return {name: ROOT / "target" / "release" / (FAULTY.get(name, name) if faults else name) for name in BINARIES}


def prebuilt(faults: bool = False) -> pathlib.Path:
    """A context with this machine's binaries, without what only a debugger reads."""
    context = OUT / "context"
    shutil.rmtree(context, ignore_errors=True)
    release = context / "target" / "release"
    release.mkdir(parents=True)
    for name, binary in binaries(faults).items():
        if not binary.exists():
            sys.exit(f"error: there is no {binary}; run `make build` first, or build the images with --build source")
        if (needed := glibc(binary)) > GLIBC:
            sys.exit(
                f"error: {binary} needs glibc {needed[0]}.{needed[1]}, the images have {GLIBC[0]}.{GLIBC[1]}: this machine is newer"
                " than Debian 12; build the images with --build source"
            )
        run(["strip", "--strip-debug", "-o", release / name, binary], 60)
    return context


def version() -> str:
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def revision() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def stamp(dockerfile: pathlib.Path, image: str, faults: bool) -> str:
    """What an image of this machine's binaries is made of."""
    files = [binary.stat() for binary in binaries(faults).values()]
    return f"{image}\n{[(file.st_size, file.st_mtime_ns) for file in files]}\n{dockerfile.read_text()}"


def build(names: list[str], how: str, tag: str, faults: bool = False) -> dict[str, pathlib.Path]:
    """Builds the images, or takes what was built of the same binaries; gives the archive of each."""
    tool = builder()
    OUT.mkdir(parents=True, exist_ok=True)
    context = prebuilt(faults) if how == "prebuilt" else ROOT
    args = {"BUILD": how, "VERSION": version(), "REVISION": revision()}
    archives = {}
    for name in names:
        begin = time.monotonic()
        file = f"{name}-faults" if faults else name
        image, archive, made = f"localhost/{name}:{tag}", OUT / f"{file}.tar", OUT / f"{file}.stamp"
        of = stamp(IMAGES[name], image, faults) if how == "prebuilt" else None
        fresh = of is None or not archive.exists() or not made.exists() or made.read_text() != of
        if fresh:
            made.unlink(missing_ok=True)
            tool.build(IMAGES[name], context, image, args, LIMIT_SECONDS[how])
            tool.export(image, archive)
            if of is not None:
                made.write_text(of)
        took = f"{time.monotonic() - begin:6.1f} s, by {tool.name} from {how}" if fresh else "as it was"
        print(f"{image:40} {archive.stat().st_size / 1e6:6.1f} MB  {took}", flush=True)
        archives[name] = archive
    if how == "prebuilt":
        tool.tidy()
    return archives


def main() -> None:
    parser = argparse.ArgumentParser(description="builds the images")
    parser.add_argument("names", nargs="*", choices=[[], *IMAGES], default=[], metavar="NAME", help=f"of {', '.join(IMAGES)}")
    parser.add_argument("--build", choices=LIMIT_SECONDS, default="source", help="where the binaries come from")
    parser.add_argument("--tag", help="the images' tag; by default the version")
    parser.add_argument("--faults", action="store_true", help="for tests: what they plant faults in, tagged VERSION-faults")
    args = parser.parse_args()
    if args.faults and args.build != "prebuilt":
        parser.error("--faults takes binaries that were built with faults: --build prebuilt")
    tag = args.tag or (f"{version()}-faults" if args.faults else version())
    build(args.names or list(FAULTY if args.faults else IMAGES), args.build, tag, args.faults)


if __name__ == "__main__":
    main()
