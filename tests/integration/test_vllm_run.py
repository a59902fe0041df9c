"""A whole run with vLLM as the generator's engine, in processes; `make test-vllm`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.core.errors import ConfigError

VLLM: dict[str, Any] = {
    "model": {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2},
    "generator": {"engine": "vllm", "num_slots": 16},
}


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("weight_update", ["in_flight", "between_batches"])
def test_the_quickstart_runs_with_vllm(tiny: dict[str, Any], tmp_path: Path, weight_update: str) -> None:
    """Every version is swapped in and passes its probe in vLLM; at lag 0 both sides agree to rounding."""
    overrides = tiny | VLLM | {"steps": 4, "deadline_s": 400.0, "weight_update": weight_update}
    overrides["eval"] = {"every": 2, "num_prompts": 24, "num_slots": 8}
    result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert result.summary.status == "finished"
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert events
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) >= 4 * 16
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps


def test_what_vllm_cannot_run_is_refused_before_anything_starts(tiny: dict[str, Any], tmp_path: Path) -> None:
    def refused(match: str, **generator: Any) -> None:
        overrides = tiny | {"generator": {"engine": "vllm", "num_slots": 16} | generator}
        with pytest.raises(ConfigError, match=match):
            slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)

    refused("no environment with vLLM", vllm={"python": str(tmp_path / "python")})
    refused("all of its cache or none", kv_on_update="recompute_if_older_than")
    refused("draws its own noise", seeds="per_replica")
    refused("some arguments of vLLM are set by Slipstream", vllm={"engine_args": {"model": "x"}})
    refused("go to another process", vllm={"engine_args": {"x": float("nan")}})
