#!/bin/sh
# Fuzzes one reader for so many seconds, guided by coverage, with the stable compiler: scripts/fuzz.sh TARGET SECONDS
# TARGET is a file of fuzz/targets, or "all" for each of them in turn. Inputs that grow coverage are kept in fuzz/grown; an input that
# crashes, hangs for 30 seconds or makes a reader hold too much is left in fuzz/artifacts, and the script fails.
# Needs a C++ compiler for libFuzzer's runtime.
set -eu
cd "$(dirname "$0")/.."
[ $# -eq 2 ] || { echo "usage: scripts/fuzz.sh TARGET|all SECONDS" >&2; exit 2; }
command -v c++ >/dev/null || { echo "a C++ compiler is needed: apt-get install g++" >&2; exit 2; }
targets=$1
[ "$targets" != all ] || targets=$(cd fuzz/targets && ls | sed 's/\.rs$//')

# what cargo-fuzz passes without a sanitizer
pass="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
pass="$pass -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing"
host=$(rustc -vV | sed -n 's/^host: //p')
# with a target named, build scripts and macros stay without the counters
bins=$(for target in $targets; do printf -- '--bin %s ' "$target"; done)
# the versions that are shipped
cp Cargo.lock fuzz/Cargo.lock
(cd fuzz && RUSTFLAGS="$pass" cargo build --release --target "$host" $bins)

# readers of files write theirs here
[ ! -d /dev/shm ] || export TMPDIR=/dev/shm
for target in $targets; do
    mkdir -p "fuzz/grown/$target" "fuzz/artifacts/$target"
    echo "==> $target for $2 seconds"
    "fuzz/target/$host/release/$target" "fuzz/grown/$target" "fuzz/corpus/$target" \
        -artifact_prefix="fuzz/artifacts/$target/" -max_total_time="$2" -timeout=30 -rss_limit_mb=2048 -print_final_stats=1
done
