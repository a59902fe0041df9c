#!/usr/bin/env bash
# Run `make test` again and again as on a slow, busy machine, and print a table: does it pass every time?
#
#     scripts/soak_tests.sh [RUNS] [RANDOM_RUNS] [BUSY]
#
# RUNS (10) times in the usual order, then RANDOM_RUNS (2) times with the files of tests in a random order (its seed is
# in the table; `make test ARGS="--shuffle-files SEED"` repeats it), each with BUSY (2) processes beside it that only
# compute, and without AVX-512. Ends with 1 if a run failed, whose output the table names.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

runs=${1:-10} random_runs=${2:-2} busy=${3:-2}
export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
make venv
logs=$(mktemp -d)
echo "$(git rev-parse --short HEAD), $(nproc) cores, $busy busy processes, AVX2; output in $logs"

for _ in $(seq "$busy"); do
    (while :; do :; done) &
done
trap 'kill $(jobs -p) 2>/dev/null' EXIT

failed=0
printf '%4s  %-8s  %8s  %s\n' run order seconds outcome
for run in $(seq $((runs + random_runs))); do
    order=usual arguments=""
    if [ "$run" -gt "$runs" ]; then
        order=$RANDOM arguments="--shuffle-files $order"
    fi
    started=$SECONDS log=$logs/run-$run.log
    if make test ARGS="$arguments" >"$log" 2>&1; then
        outcome=$(sed -nE 's/^([0-9]+ passed.*) in .*/\1/p' "$log" | paste -sd ';')
    else
        failed=1 outcome="FAILED: $(sed -nE 's/^(FAILED|ERROR) ([^ ]+).*/\2/p' "$log" | sort -u | paste -sd ' ') ($log)"
    fi
    printf '%4d  %-8s  %8d  %s\n' "$run" "$order" $((SECONDS - started)) "$outcome"
done
exit $failed
