#!/bin/bash
# Starts the run; called again after its end, goes on from its last checkpoint. Stop it with: sky jobs cancel --name @{name}
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

if sky jobs queue --skip-finished | awk '{for (i = 1; i <= NF; i++) if ($i == "@{name}") found = 1} END {exit !found}'; then
    echo "this run is being worked on already: sky jobs queue" >&2
    exit 1
fi
if [[ ! -e key ]]; then
    (umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >key.new && mv key.new key)
fi
# The key is a secret of the job: no argument that others could see.
SLIPSTREAM_RUN_KEY=$(cat key)
export SLIPSTREAM_RUN_KEY
sky volumes apply --yes volume.yaml
sky jobs launch --yes --detach-run --secret SLIPSTREAM_RUN_KEY run.yaml
