#!/usr/bin/env bash
# Everything that judges without running: format, clippy, dependencies' licences, sources and duplicates.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo fmt --all --check
(cd fuzz && cargo fmt --check)
# The same profile as the build, so that nothing is compiled for the lints alone but the workspace's own metadata.
cargo clippy --release --workspace --all-targets --locked -- -D warnings
# What only the tests' binaries with faults are made of.
cargo clippy --release --workspace --bins --locked --features tandem-engine/faults,tandem-router/faults -- -D warnings
scripts/venv.sh scripts/requirements-lint.txt
# cargo finds its subcommands by PATH. Advisory databases cannot be had offline, so they are not among the checks.
PATH="$PWD/.venv/bin:$PATH" cargo deny --locked --workspace check -D unmatched-skip -D unnecessary-skip bans licenses sources
