"""Whole runs with vLLM as the generator's engine; those with a real one, in processes, by `make test-vllm`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from audit import audit, lines
from processes import command_line, descendants, is_alive
from safetensors.numpy import load_file

import slipstream
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.core.recipes import resolve
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Request
from slipstream.generator.vllm import backend
from slipstream.models.build import build_policy, build_tokenizer, stop_token_ids
from slipstream.observe.samples import read_samples

FAKE = Path(__file__).parents[1] / "generator" / "fake_vllm.py"
HEADS_FOR_VLLM = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
STEPS = 4
LOGPROB_ERROR = 1e-4
"""Nats, in float32: two implementations of one model are apart by rounding; the largest seen is 5e-6."""


def vllm_run(tiny: dict[str, Any], **changes: Any) -> dict[str, Any]:
    evaluation = {"every": 2, "num_prompts": 24, "num_slots": 8}
    overrides = tiny | {"steps": STEPS, "deadline_s": 400.0, "model": HEADS_FOR_VLLM, "eval": evaluation} | changes
    overrides["generator"] = {"engine": "vllm", "num_slots": 16} | changes.get("generator", {})
    return overrides


def check_versions(out: Path, *, max_probe_error: float) -> list[int]:
    """The versions swapped in: first to last, never back, each with its probe; evaluations are of them."""
    swaps = [line["event"] for line in lines(out / "events.jsonl") if line["event"]["type"] == "Swapped"]
    versions = [swap["version"] for swap in swaps]
    assert versions == sorted(set(versions))
    assert (versions[0], versions[-1]) == (0, STEPS)
    assert all(0 <= swap["probe_error"] < max_probe_error for swap in swaps)
    assert all(swap["pause_s"] > 0 for swap in swaps)
    evaluated = [line["version"] for line in lines(out / "metrics.jsonl") if "eval_reward" in line]
    assert evaluated[0] == 0
    assert evaluated[-1] == STEPS
    assert 2 <= evaluated[1] <= STEPS
    assert set(evaluated) <= set(versions)
    return versions


def check_tokens(out: Path, versions: list[int], weight_update: str) -> None:
    """Every token has one of the versions swapped in, newer ones behind older ones; between batches there is one."""
    for rollout in lines(out / "rollouts.jsonl"):
        starts, tagged = zip(*rollout["versions"], strict=True)
        assert starts[0] == 0
        assert list(starts) == sorted(set(starts))
        assert starts[-1] < rollout["num_tokens"]
        assert list(tagged) == sorted(set(tagged))
        assert set(tagged) <= set(versions)
        if weight_update == "between_batches":
            assert len(tagged) == 1


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("weight_update", ["in_flight", "between_batches"])
@pytest.mark.parametrize("lora", [{}, {"rank": 4, "targets": ["q_proj", "o_proj", "up_proj", "down_proj"]}], ids=str)
def test_the_quickstart_runs_with_vllm(
    tiny: dict[str, Any], tmp_path: Path, lora: dict[str, Any], weight_update: str
) -> None:
    """Every version passes its probe in vLLM, at lag 0 both sides agree to rounding, and what was pinned is answered.

    The audit recomputes staleness and every prompt's fate from the files.
    """
    overrides = vllm_run(tiny, weight_update=weight_update, model=HEADS_FOR_VLLM | {"lora": lora})
    out = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False).out
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["policy_version"]) == ("done", STEPS, STEPS)
    found = audit(out)
    assert found["steps"] == STEPS
    assert max(found["histogram"]) <= summary["staleness"]["bound"] == 2
    check_tokens(out, check_versions(out, max_probe_error=LOGPROB_ERROR), weight_update)
    at_lag_0 = [
        line["logprob_diff_max/lag_0"] for line in lines(out / "metrics.jsonl") if "logprob_diff_max/lag_0" in line
    ]
    assert at_lag_0, "the first step is of version 0"
    assert 0 < max(at_lag_0) < LOGPROB_ERROR
    check_last_answers(resolve("quickstart", overrides), out)
    if lora:
        tensors = load_file(out / "model" / "adapter_model.safetensors")
        assert all(tensor.any() for tensor in tensors.values()), "the adapters are not zero"
        synced = summary["weight_sync"]
        assert synced["bytes"] == synced["count"] * sum(tensor.nbytes for tensor in tensors.values())
        assert "drain" not in summary["accounting"]["generator-0"], "versions stay side by side"


def check_last_answers(config: RunConfig, out: Path) -> None:
    """The greedy answers after training are those of the exported model, by our own engine."""
    trained = config.model.model_copy(update={"path": str(out / "model")})
    model, _ = build_policy(trained, seed=config.seed)
    tokenizer = build_tokenizer(trained)
    stops = stop_token_ids(tokenizer, config.generator, model.config)
    engine = native_engine(model, num_slots=8, max_len=64, seed=0, stop_token_ids=stops)
    samples = read_samples(out / "samples.json")
    assert samples
    for i, sample in enumerate(samples):
        prompt = tokenizer(sample.prompt, add_special_tokens=False, return_tensors="np")["input_ids"][0].astype("int32")
        limit = config.generator.max_new_tokens
        engine.submit([Request(ordinal=i, sample=0, prompt_tokens=prompt, max_new_tokens=limit, temperature=0.0)])
    answers = {}
    while not engine.is_idle:
        answers |= {item.ordinal: tokenizer.decode(item.tokens, skip_special_tokens=True) for item in engine.step()}
    assert [answers[i] for i in range(len(samples))] == [sample.after for sample in samples]


def always_good(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("weight_update", "max_staleness", "num_sampled", "rank"),
    [
        pytest.param("in_flight", 1, 2, None, marks=pytest.mark.slow),
        ("in_flight", 1, 2, 4),
        ("between_batches", 0, STEPS, None),
        pytest.param("between_batches", 2, 2, 4, marks=pytest.mark.slow),
    ],
)
def test_a_run_over_a_make_believe_vllm(
    tiny: dict[str, Any],
    tmp_path: Path,
    weight_update: str,
    max_staleness: int,
    num_sampled: int,
    rank: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its logprobs are minus a weight: so each version is sampled from its own weights, and from no other's."""
    monkeypatch.setattr(backend, "WORKER", FAKE)
    variables, started = backend.environment, []
    monkeypatch.setattr(
        backend, "environment", lambda *args, **given: started.append(given) or variables(*args, **given)
    )
    generator = {"vllm": {"python": sys.executable}, "probe_tolerance": 100.0, "tensor_parallel": 1 if rank else 2}
    loss = {"advantages": "reward", "skip_no_signal": False}  # all completions are the same: a group has no signal
    overrides = vllm_run(tiny, weight_update=weight_update, host="inline", generator=generator, loss=loss)
    overrides |= {"max_staleness": max_staleness, "warm_start": {"steps": 0}}
    overrides["model"] = HEADS_FOR_VLLM | {"lora": {"rank": rank}}
    run = partial(slipstream.run, "quickstart", overrides=overrides, reward=always_good, display=False)
    out = run(out=tmp_path / "run").out
    assert audit(out)["steps"] == STEPS
    assert [given["ranks"] for given in started] == [generator["tensor_parallel"]]
    versions = check_versions(out, max_probe_error=100.0)
    check_tokens(out, versions, weight_update)
    weights: dict[int, set[float]] = {}
    for rollout in lines(out / "rollouts.jsonl"):
        if len(rollout["versions"]) == 1:
            weights.setdefault(rollout["versions"][0][1], set()).add(rollout["mean_behaviour_logprob"])
    assert len(weights) >= num_sampled
    assert all(len(found) == 1 for found in weights.values()), weights
    assert len(set.union(*weights.values())) == len(weights), "versions have weights of their own"


def start(tiny: dict[str, Any], tmp_path: Path, **settings: Any) -> subprocess.Popen[str]:
    """A run with processes of its own over the make-believe vLLM, which a script puts in the worker's place."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$2"\n')
    python.chmod(0o755)
    generator = {"vllm": {"python": str(python)} | settings, "probe_tolerance": 100.0}
    changes = {"warm_start": {"steps": 0}, "eval": {"every": 0, "num_prompts": 8, "num_slots": 8}}
    overrides = vllm_run(tiny, steps=10_000, generator=generator, loss={"skip_no_signal": False}, **changes)
    call = (
        f"slipstream.run('quickstart', overrides=json.loads({json.dumps(overrides)!r}), out={str(tmp_path / 'run')!r})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", f"import json, slipstream; {call}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def await_vllm(run: subprocess.Popen[str], out: Path, *, steps: int) -> int:
    """The pid of vLLM, once so many steps are trained; the run's own files are the event."""
    end_s = time.monotonic() + 60
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"reward_mean"') < steps:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < end_s, f"no {steps} steps"
        time.sleep(0.05)
    (found,) = (pid for pid in descendants(run.pid) if str(FAKE) in command_line(pid))
    return found


@pytest.mark.slow
def test_a_killed_vllm_is_replaced_in_the_middle_of_a_run(tiny: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = start(tiny, tmp_path, max_restarts=1)
    first = await_vllm(run, out, steps=3)
    os.kill(first, signal.SIGKILL)
    steps_then = (out / "metrics.jsonl").read_text().count('"reward_mean"')
    second = await_vllm(run, out, steps=steps_then + 4)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert second != first
    assert not is_alive(second)
    swaps = [line["event"] for line in lines(out / "events.jsonl") if line["event"]["type"] == "Swapped"]
    assert [swap["version"] for swap in swaps] == sorted({swap["version"] for swap in swaps})
    log = (out / "logs" / "generator-0.log").read_text()
    assert f"the vLLM process (pid {first}) ended" in log
    assert "vLLM is started again with version" in log


@pytest.mark.slow
def test_one_death_too_many_ends_the_run_and_leaves_nothing(tiny: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = start(tiny, tmp_path, max_restarts=0)
    vllm = await_vllm(run, out, steps=2)
    everything = descendants(run.pid)
    os.kill(vllm, signal.SIGKILL)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    for part in ("generator-0", f"the vLLM process (pid {vllm}) ended", "SIGKILL", "logs/generator-0-vllm.log"):
        assert part in output, output
    assert json.loads((out / "summary.json").read_text())["status"] == "failed"
    assert not any(is_alive(pid) for pid in everything)


@pytest.mark.slow
def test_vllm_ends_with_its_generator(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Killed, the generator removes nothing: vLLM's process does, weights and sockets. The run goes on with others."""
    run = start(tiny, tmp_path)
    vllm = await_vllm(run, tmp_path / "run", steps=2)
    spec_path = Path(command_line(vllm)[-1])
    weights = Path(json.loads(spec_path.read_text())["folder"])
    assert weights.is_dir()
    generator = int(Path(f"/proc/{vllm}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(generator, signal.SIGKILL)
    end_s = time.monotonic() + 30
    while is_alive(vllm) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not is_alive(vllm)
    assert not weights.exists()
    assert not spec_path.parent.exists()
    assert run.poll() is None, run.communicate()[0]
    run.send_signal(signal.SIGTERM)
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 143, said
    assert "generator-0 was lost" in said


def test_weights_that_do_not_arrive_end_the_run(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The make-believe vLLM computes nothing like the trainer's logprobs."""
    monkeypatch.setattr(backend, "WORKER", FAKE)
    overrides = vllm_run(tiny, host="inline", generator={"vllm": {"python": sys.executable}})
    with pytest.raises(WeightSyncError, match="version 0 does not reproduce the trainer's logprobs"):
        slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)


def test_what_vllm_cannot_run_is_refused_before_anything_starts(tiny: dict[str, Any], tmp_path: Path) -> None:
    def refused(match: str, *, model: dict[str, Any] | None = None, **generator: Any) -> None:
        overrides = vllm_run(
            tiny, generator={"vllm": {"python": sys.executable}} | generator, model=model or HEADS_FOR_VLLM
        )
        with pytest.raises(ConfigError, match=match):
            slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
        assert not (tmp_path / "run" / "logs").exists()

    refused("no environment with vLLM", vllm={"python": str(tmp_path / "python")})
    refused("all of its cache or none", kv_on_update="recompute_if_older_than")
    refused("sets that tokens were drawn from", keep_sets=True, top_k=8)
    for precision in ("int8", "mxfp4"):
        refused("without scales", precision=precision)
    refused("base beside adapters without scales", model=HEADS_FOR_VLLM | {"lora": {"rank": 4}}, precision="fp8")
    refused("draws its own noise", seeds="per_replica")
    refused("no lower temperature", temperature=0.001)
    refused("min_p before top_p", top_p=0.9, min_p=0.1)
    refused("max_model_len is too short", vllm={"python": sys.executable, "max_model_len": 32})
    refused("no attention for heads of this size", model=HEADS_FOR_VLLM | {"hidden_size": 48})
    refused("no adapters for this family", model=HEADS_FOR_VLLM | {"family": "gpt2", "lora": {"rank": 4}})
    refused("cannot probe an adapter of the head", model=HEADS_FOR_VLLM | {"lora": {"rank": 4, "targets": ["lm_head"]}})
    embedding = {"lora": {"rank": 4, "targets": ["embed_tokens"]}}
    refused("given no adapter of an embedding", model=HEADS_FOR_VLLM | embedding)
    wide = {"hidden_size": 576, "num_heads": 18, "num_kv_heads": 2, "lora": {"rank": 513}}
    refused("no room for adapters of this rank", model=HEADS_FOR_VLLM | wide)
    for name in ("model", "enable_chunked_prefill", "max_loras"):
        refused("some arguments of vLLM are set by Slipstream", vllm={"engine_args": {name: True}})
    refused("generator.tensor_parallel divides the model", vllm={"engine_args": {"tensor_parallel_size": 2}})
    refused("vLLM divides models by itself", pipeline_parallel=2)
    refused("divided over this number of ranks\n.*3 ranks for 2 heads", tensor_parallel=3)
    refused("engine_args", vllm={"engine_args": {"x": float("nan")}})
