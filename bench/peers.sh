#!/usr/bin/env bash
# Makes a Python with one kind of peer, once, outside the clone, and prints its path.
# usage: bench/peers.sh llama|routers|load
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1-}
wanted=bench/requirements-$kind.txt
[ -n "$kind" ] && [ -e "$wanted" ] || { echo "usage: bench/peers.sh llama|routers|load" >&2; exit 1; }
flags="-include $PWD/bench/amx_tiles.h"
venv=${XDG_CACHE_HOME:-$HOME/.cache}/tandem/peer-$kind-$(cat "$wanted" bench/amx_tiles.h | sha256sum | cut -c1-12)
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock -w 3600 9 || { echo "error: another bench/peers.sh has held $venv.lock for an hour; end it or remove the file" >&2; exit 1; }

if ! [ -e "$venv/done" ]; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    pip=("$venv/bin/pip" install --quiet --disable-pip-version-check -r "$wanted")
    if [ "$kind" = llama ]; then
        echo "building llama.cpp for this CPU into $venv (5 to 10 minutes on two cores)" >&2
        # Not from pip's cache of wheels: it does not know for which CPU or with which flags one was built.
        CFLAGS=$flags CXXFLAGS=$flags CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" \
            "${pip[@]}" --no-cache-dir --no-binary llama-cpp-python >&2
        cc -O2 -shared -fPIC bench/no_amx.c -o "$venv/no_amx.so"
    else
        echo "installing the peers of $wanted into $venv" >&2
        "${pip[@]}" --only-binary :all: >&2
    fi
    touch "$venv/done"
fi
echo "$venv/bin/python"
