#!/usr/bin/env bash
# Makes .venv with pip and the packages of the given requirement files, once per content of those files.
# usage: scripts/venv.sh [requirements.txt ...]
set -euo pipefail
cd "$(dirname "$0")/.."

exec 9>.venv.lock
flock -w 900 9 || { echo "error: another scripts/venv.sh has held .venv.lock for 15 minutes; end it or remove the file" >&2; exit 1; }

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    rm -rf .venv
    python3 -m venv .venv || { echo "error: python3 -m venv failed; Debian has it in the package python3-venv" >&2; exit 1; }
fi
for file in "$@"; do
    stamp=.venv/$(sha256sum "$file" | cut -c1-16).installed
    [ -e "$stamp" ] && continue
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r "$file"
    touch "$stamp"
done
