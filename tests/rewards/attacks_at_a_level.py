"""Run by `test_privilege_levels.py` with the rights of some level: all attacks of `hostile_programs`, as JSON."""

from __future__ import annotations

import json
import os
import socket
import sys

from hostile_programs import ATTACKS, source
from reward_jobs import job, run_jobs

from slipstream.core.errors import ConfigError
from slipstream.rewards.checks import check_isolation
from slipstream.rewards.functions import make_term
from slipstream.rewards.pool import ScoredJob, ScoringPool
from slipstream.rewards.protocol import WorkerSetup


def main(folder: str) -> None:
    setup = WorkerSetup(
        [make_term("code", {"memory_mb": 128, "partial": True})], {}, memory_bytes=1 << 29, timeout_s=10.0
    )
    pool = ScoringPool(setup, num_workers=1, private=[folder])
    try:
        pool.wait_ready()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            private = (folder, os.getcwd())
            programs = [source(name, private=private, secret="quartz-ibex", port=port) for name in ATTACKS]
            tests = {"inputs": [""] * 3, "outputs": ["breached", "held", "held"]}
            jobs = [job(i, f"```\n{program}\n```", tests=tests) for i, program in enumerate(programs)]
            done = run_jobs(pool, jobs)
        refusal = ""
        try:
            check_isolation(setup, pool.isolation, trust_verifier=False)
        except ConfigError as error:
            refusal = str(error)
        outcomes = {name: outcome(done[i]) for i, name in enumerate(ATTACKS)}
        sys.stdout.write(json.dumps({"isolation": sorted(pool.isolation), "outcomes": outcomes, "refusal": refusal}))
    finally:
        pool.close()


def outcome(scored: ScoredJob) -> str:
    """Return what an attack printed, by the share of the three tests that passed; or why there is none."""
    return {(0.0,): "neither", (1 / 3,): "breached", (2 / 3,): "held"}.get(tuple(scored.parts), str(scored))


if __name__ == "__main__":
    main(sys.argv[1])
