#!/bin/bash
# Starts the run; called again after its end, goes on from its last checkpoint. Stop it with:
#     @{kubectl} delete jobs --selector=app.kubernetes.io/instance=@{name}
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Jobs cannot be changed: those of an earlier start make room, unless they still run.
selector=app.kubernetes.io/instance=@{name}
active=$(@{kubectl} get jobs --selector="$selector" --output=jsonpath='{.items[?(@.status.active)].metadata.name}')
if [[ -n $active ]]; then
    echo "this run is being worked on already: $active" >&2
    exit 1
fi
@{kubectl} delete jobs --selector="$selector" --ignore-not-found

# The key goes from the system's randomness to the cluster's Secret: no file, no argument that others could see.
if ! @{kubectl} get secret @{name} >/dev/null 2>&1; then
    head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' |
        @{kubectl} create secret generic @{name} --from-file=key=/dev/stdin
fi
if ! @{kubectl} get persistentvolumeclaim slipstream >/dev/null 2>&1; then
    @{kubectl} apply --filename=volume.yaml
fi
@{kubectl} apply @{files}
