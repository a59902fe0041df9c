#!/bin/bash
# Starts the run; called again after its end, goes on from its last checkpoint. Stop it with: scancel $(cat jobs)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
unset SLIPSTREAM_RUN_KEY # SLURM stores the environment of jobs: the key is for its file alone

queue="jobs"
if [[ -s $queue && -n $(squeue --noheader --jobs="$(paste -sd, "$queue")" 2>/dev/null) ]]; then
    echo "this run is in the queue already: squeue --jobs=$(paste -sd, "$queue")" >&2
    exit 1
fi
mkdir -p logs
rm -f address # of an earlier start
if [[ ! -e key ]]; then
    (umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >key.new && mv key.new key)
fi

submitted=()
trap 'if (($? && ${#submitted[@]})); then scancel "${submitted[@]}"; fi' EXIT # all jobs or none
submit() {
    id=$(sbatch --parsable "$@")
    id=${id%%;*} # "id;cluster" where there are several clusters
    submitted+=("$id")
}
submit controller.sbatch
controller=$id
# The groups are jobs of their own, so that one can be lost and come back while the others run. They start after the
# controller, so that no GPU waits for it in vain.
names="controller $controller"
for group in @{groups}; do
    submit --dependency=after:"$controller" "$group.sbatch"
    names+=", $group $id"
done
# And they end with it.
submit --dependency=afterany:"$controller" end.sbatch "${submitted[@]:1}"
printf '%s\n' "${submitted[@]}" >"$queue"
echo "submitted: $names; logs are in $PWD/logs"
