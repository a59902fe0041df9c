"""Runs whose generators decode at another precision than the trainer's."""

from __future__ import annotations

import json

import pytest

import slipstream
from slipstream.core.errors import ConfigError
from slipstream.core.run_log import read_metrics
from slipstream.stages.named import resolve


@pytest.mark.parametrize(
    ("precision", "largest_gap"),
    [("int8", 0.5), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("mxfp4", 2.0), ("bfloat16", 0.1)))],
)
def test_a_run_trains_on_what_reduced_precision_sampled(tiny, tmp_path, precision, largest_gap):
    """The behaviour logprobs are those of the quantised weights: the gap at lag 0 is theirs, and is reported."""
    overrides = tiny | {
        "host": "inline",
        "steps": 3,
        "max_staleness": 0,
        "weight_update": "between_batches",
        "generator": tiny["generator"] | {"precision": precision},
        "eval": {"every": 2, "num_prompts": 8, "num_slots": 8},
    }
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / precision, display=False)
    assert run.summary["steps"] == 3
    lines = read_metrics(run.out / "metrics.jsonl")
    gaps = [line["logprob_diff_max/lag_0"] for line in lines if "logprob_diff_max/lag_0" in line]
    assert len(gaps) == 3
    assert 1e-4 < max(gaps) < largest_gap, "sampled by other weights than the trainer's, but near them"
    events = [json.loads(line) for line in (run.out / "events.jsonl").read_text().splitlines()]
    errors = [error for event in events for error in _values(event, "probe_error")]
    assert len(errors) >= 3
    assert 0 < max(errors) < largest_gap
    assert any("eval_accuracy" in line for line in lines)


def _values(node, key):
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            else:
                yield from _values(value, key)
    elif isinstance(node, list):
        for item in node:
            yield from _values(item, key)


@pytest.mark.slow
def test_processes_and_inline_agree_at_int8(tiny, tmp_path):
    overrides = tiny | {
        "steps": 2,
        "max_staleness": 0,
        "weight_update": "between_batches",
        "generator": tiny["generator"] | {"precision": "int8"},
    }
    inline = slipstream.run("quickstart", overrides=overrides | {"host": "inline"}, out=tmp_path / "a", display=False)
    process = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "b", display=False)
    name = "model/model.safetensors"
    assert (inline.out / name).read_bytes() == (process.out / name).read_bytes()


def test_what_the_configuration_refuses(tiny):
    with pytest.raises(ConfigError, match="vLLM is given matrices as the trainer"):
        resolve("quickstart", tiny | {"generator": {"precision": "int8", "engine": "vllm"}})
    with pytest.raises(ConfigError, match="vLLM is given matrices as the trainer"):
        resolve("quickstart", tiny | {"generator": {"precision": "mxfp4", "engine": "vllm"}})
    assert resolve("quickstart", tiny).generator.max_probe_error == 1e-3
    assert resolve("quickstart", tiny | {"generator": {"precision": "int8"}}).generator.max_probe_error == 0.75
    set_by_hand = {"precision": "int8", "probe_tolerance": 0.25}
    assert resolve("quickstart", tiny | {"generator": set_by_hand}).generator.max_probe_error == 0.25
