#!/usr/bin/env bash
# The engine beside llama.cpp. The peer is built natively, once, outside the clone (about 10 minutes on two cores).
set -euo pipefail
cd "$(dirname "$0")/.."
peer=${XDG_CACHE_HOME:-$HOME/.cache}/tandem/llama-peer-0.3.36
if ! [ -e "$peer/done" ]; then
    echo "building llama.cpp for this CPU into $peer" >&2
    rm -rf "$peer"
    python3 -m venv "$peer"
    CMAKE_ARGS=-DGGML_NATIVE=ON "$peer/bin/pip" install --quiet --no-binary llama-cpp-python -r bench/requirements.txt
    touch "$peer/done"
fi
python3 bench/engine_vs_llama.py --model .demo/models/smollm2/model.gguf --bin target/release \
    --peer-python "$peer/bin/python" --rounds "${ROUNDS:-5}" --json target/bench-engine.json
