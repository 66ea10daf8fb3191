#!/bin/sh
# Changes the planner in every way that cargo-mutants knows, one at a time, and looks whether a test of the planner fails:
#   [MUTANTS_JOBS=2] scripts/mutants.sh [further options of cargo-mutants]
# Prints the kill rate and each survivor, with why it does where operator/plan/survivors.txt says it; fails when the rate is below 90 %.
# cargo-mutants is installed once, outside of the clone; results are in target/mutants.out.
set -eu
cd "$(dirname "$0")/.."
version=27.1.0
root="${XDG_CACHE_HOME:-$HOME/.cache}/tandem/cargo-mutants-$version"
[ -x "$root/bin/cargo-mutants" ] || cargo install cargo-mutants --locked --version "$version" --root "$root"

# Few worlds for each mutant: the rate says whether they are enough.
export PROPTEST_CASES="${PROPTEST_CASES:-100}" PROPTEST_MAX_SHRINK_ITERS=0
mkdir -p target
status=0
"$root/bin/cargo-mutants" mutants --package tandem-plan --test-package tandem-plan --profile mutants --output target \
    --jobs "${MUTANTS_JOBS:-2}" --minimum-test-timeout 60 "$@" || status=$?
# 2: some survived, 3: some took too long; the rest is no result
case $status in 0 | 2 | 3) ;; *) exit "$status" ;; esac
python3 scripts/survivors.py target/mutants.out/outcomes.json operator/plan/survivors.txt
