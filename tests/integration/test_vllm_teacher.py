"""A teacher in a real vLLM, on a CPU: against a forward pass, and in whole runs; `make test-vllm`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_distillation_run import SHAPE, SMALL, distilled, steps_of
from transformers import AutoModelForCausalLM

import slipstream
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.executor import Context
from slipstream.core.sections import ModelConfig
from slipstream.core.spans import NoSpans
from slipstream.generator.vllm.reader import ROOMS, VLLMReader
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

VOCAB, PADDED, MAX_LEN, TOP_K = 1000, 24, 300, 16
FAMILIES = {
    "as it lies": ("llama", {"tie_embeddings": True}, 0, 1.0),
    "cut, tied, hotter": ("qwen2", {"tie_embeddings": True}, PADDED, 1.3),
    "cut, untied, colder": ("qwen3", {"tie_embeddings": False}, PADDED, 0.7),
}


def context(run_dir: Path) -> Context:
    return Context("teacher", run_dir, {}, {}, NoSpans(), WallClock())


@pytest.mark.parametrize("form", FAMILIES)
def test_it_reads_as_a_forward_pass_does(form: str, tmp_path: Path) -> None:
    """The likeliest tokens at every place, their logprobs and the sampled token's; again behind a kill."""
    family, changes, num_padded, temperature = FAMILIES[form]
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
    model = new_model(ModelConfig(family=family, max_positions=MAX_LEN, **shape, **changes), VOCAB + num_padded, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim >= 2 else 1.0)
    save_model(model, tmp_path / "teacher")
    teacher = {"path": str(tmp_path / "teacher"), "executor": "own", "engine": "vllm", "top_k": TOP_K}
    config = RunConfig.model_validate(
        {
            "prompts": {"tasks": [{"name": "spell_backward"}], "max_prompt_tokens": 100},
            "generator": {"max_new_tokens": MAX_LEN - 100},
            "model": {"max_positions": MAX_LEN},
            "loss": {"name": "distill"},
            "teacher": teacher,
        }
    )
    rng = np.random.default_rng(0)
    lengths = [MAX_LEN, 2, *rng.integers(2, MAX_LEN, ROOMS + 20)]
    contexts = []
    for length in lengths:
        places = np.flatnonzero(rng.random(length - 1) < 0.7) + 1
        contexts.append((rng.integers(0, VOCAB, length).astype(np.int32), places))
    twin = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float64)
    reader = VLLMReader(config, context(tmp_path), num_tokens=VOCAB, temperature=temperature)
    try:
        check(reader, contexts, twin, temperature)
        os.kill(reader.pid, signal.SIGKILL)
        check(reader, contexts[:5], twin, temperature)
        assert reader.num_restarts == 1
    finally:
        reader.close()


def check(reader: VLLMReader, contexts: list[Any], twin: Any, temperature: float) -> None:
    raw, found = reader.read(contexts), reader.likeliest(contexts)
    sampled_error = error = rest_error = mass_error = 0.0
    for (tokens, places), (ids, said), (kept, logprobs) in zip(contexts, raw, found, strict=True):
        with torch.no_grad():
            logits = twin(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1, :VOCAB]
        rows = (logits / temperature).log_softmax(-1).numpy()[places - 1]
        if not len(places):
            assert kept.shape == (0, TOP_K)
            continue
        np.testing.assert_array_equal(ids[:, 0], tokens[places])
        expected = np.take_along_axis(rows, kept, axis=1)
        assert (np.diff(kept, axis=1) > 0).all()
        # Those that are left out are not likelier than those that are taken.
        best = -np.sort(-rows, axis=1)[:, :TOP_K]
        np.testing.assert_allclose(-np.sort(-expected, axis=1), best, atol=1e-4)
        sampled = rows[np.arange(len(places)), tokens[places]]
        sampled_error = max(sampled_error, float(np.abs(said[:, 0] - sampled).max()))
        error = max(error, float(np.abs(logprobs[:, :-1] - expected).max()))
        rest = 1.0 - np.exp(expected).sum(axis=1)
        rest_error = max(rest_error, float(np.abs(logprobs[:, -1] - np.log(rest))[rest > 1e-2].max(initial=0.0)))
        mass_error = max(mass_error, float(np.abs(np.exp(logprobs[:, -1]) - rest).max()))
    print(  # noqa: T201
        f"largest differences: top-k {error:.2e}, sampled {sampled_error:.2e}, rest {rest_error:.2e} nats, "
        f"{mass_error:.2e} in probability"
    )
    assert max(error, sampled_error, rest_error) < 1e-4
    assert mass_error < 1e-5


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distilled(tmp_path_factory.mktemp("native") / "run", top_k=8, executor="own")


@pytest.mark.parametrize("temperature", [None, 1.5])
def test_a_run_learns_as_from_the_native_teacher(native: Path, tmp_path: Path, temperature: float | None) -> None:
    hot = {} if temperature is None else {"temperature": temperature}
    expected = native if not hot else distilled(tmp_path / "native", top_k=8, executor="own", **hot)
    run = distilled(tmp_path / "run", top_k=8, executor="own", engine="vllm", **hot)
    for mine, other in zip(steps_of(run), steps_of(expected), strict=True):
        apart = {name: abs(mine[name] - other[name]) for name in ("loss", "teacher_kl", "teacher_top_k_mass")}
        print(mine["step"], apart)  # noqa: T201
        assert apart["loss"] < 1e-4
        assert apart["teacher_kl"] < 1e-4


def test_teacher_and_generator_may_both_be_in_vllm(tmp_path: Path) -> None:
    """In processes of their own, with samples of vLLM's own noise: the student comes nearer."""
    teacher = {"top_k": 8, "executor": "own", "engine": "vllm"}
    generator = {"engine": "vllm", "num_slots": 16}
    model = SMALL["model"] | {"hidden_size": 64}
    overrides = SMALL | {"host": "process", "deadline_s": 400.0, "model": model, "generator": generator}
    overrides |= {"sft": SMALL["sft"] | {"shape": SHAPE}, "teacher": teacher}
    result = slipstream.run("distill_mini", overrides=overrides, out=tmp_path / "run", display=False)
    assert result.status == "done"
    kls = [step["teacher_kl"] for step in steps_of(result.out)]
    print(kls)  # noqa: T201
    assert len(kls) == SMALL["steps"]
    assert kls[-1] < 0.8 * kls[0]
    for name in ("teacher", "generator-0"):
        assert (result.out / "logs" / f"{name}-vllm.log").exists()
