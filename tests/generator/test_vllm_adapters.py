"""Adapters in vLLM, over a make-believe one: replaced in place, or held side by side; swaps, deaths and refusals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from covering import with_slow
from engine_kit import adapted_model, fill
from test_vllm_client import LADDER, check
from test_vllm_turns import first_turn, next_turn
from vllm_kit import drive, fake_engine, folder_of, num_tokens, request, set_fake

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.recipes import resolve
from slipstream.generator.requests import Finished, Session
from slipstream.generator.vllm.backend import spec_of
from slipstream.generator.vllm.engine import VLLMEngine
from slipstream.models.build import build_policy
from slipstream.models.config import new_config
from slipstream.models.hf import load_model
from slipstream.models.lora import shapes_of
from slipstream.models.peft import planned_shapes, with_adapters
from slipstream.models.transformer import Transformer

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
IN_PLACE, TWO = {"max_loras": 1}, {"max_loras": 3}  # two in use, and the newest


@pytest.fixture
def model() -> Transformer:
    model = adapted_model()
    set_adapters(model, 1.0)
    return model


def set_adapters(model: Transformer, value: float) -> None:
    """All numbers of the adapters, which the make-believe vLLM repeats in every logprob."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".adapter." in name:
                parameter.fill_(value)


def push(engine: VLLMEngine, model: Transformer, version: int, value: float | None = None) -> None:
    set_adapters(model, 1.0 + version if value is None else value)
    engine.push()
    np.testing.assert_array_equal(engine.probe(np.arange(4, dtype=np.int32)), [-(1.0 + version)] * 3)
    engine.set_version(version)


def versions_of(item: Finished) -> list[int]:
    return [span.version for span in item.version_spans]


WEIGHTS = {version: 1.0 + version for version in range(5)}


@LADDER
def test_an_adapter_in_place_moves_all_rows_to_the_newest(
    model: Transformer, tmp_path: Path, fake: dict[str, Any]
) -> None:
    with fake_engine(model, tmp_path, fake=fake | {"halts": [20, 20]}, engine_args=IN_PLACE) as engine:
        engine.submit([request(i) for i in range(6)])
        for version in (1, 2):
            drive(engine, lambda least=num_tokens(engine) + 5: num_tokens(engine) >= least)
            push(engine, model, version)
            assert [path.name for path in engine._folder.path.glob("push-*")] == [f"push-{version}"]
        finished = drive(engine)
    assert len(finished) == 6
    for item in finished:
        check(item, num_new=50, weights=WEIGHTS)
    assert versions_of(finished[0]) == [0, 1, 2]


@LADDER
def test_rows_keep_the_version_that_they_began_with(model: Transformer, tmp_path: Path, fake: dict[str, Any]) -> None:
    """Beside the newest, as long as anything goes on with it."""
    fake |= {"halts": [20, 20]}
    with fake_engine(model, tmp_path, fake=fake, engine_args=TWO, side_by_side=True) as engine:
        engine.submit([request(i) for i in (0, 1)])
        drive(engine, lambda: num_tokens(engine) >= 5)
        push(engine, model, 1)
        engine.submit([request(i) for i in (2, 3, 4)])
        drive(engine, lambda: num_tokens(engine) >= 5)
        assert engine.versions_in_use == {0, 1}
        push(engine, model, 2)
        engine.submit([request(5)])
        finished = drive(engine)
        assert engine.versions_in_use == set()
        push(engine, model, 3)
        assert {path.name for path in engine._folder.path.glob("push-*")} == {"push-2", "push-3"}
    versions = {item.ordinal: versions_of(item) for item in finished}
    assert versions == {0: [0], 1: [0], 2: [1], 3: [1], 4: [2], 5: [2]}, "4 and 5 waited for room"
    for item in finished:
        check(item, num_new=item.request.max_new_tokens, weights=WEIGHTS)


def test_an_episode_keeps_its_version_and_its_cache(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, engine_args=TWO, side_by_side=True) as engine:
        engine.submit([first_turn(num_new=9)])
        (turn,) = drive(engine)
        push(engine, model, 1)
        engine.submit([first_turn(1), next_turn(turn)])
        turns = {one.ordinal: one for one in drive(engine)}
        assert engine.versions_in_use == {0, 1}
        assert engine.session_counts["parked_hit_tokens"] >= 8
        assert {ordinal: versions_of(one) for ordinal, one in turns.items()} == {0: [0], 1: [1]}
        engine.release(Session(0, 0, 0))
        assert engine.versions_in_use == {1}
        engine.submit([first_turn(0)])
        (turn,) = drive(engine)
        assert versions_of(turn) == [1], "it begins again"


@pytest.mark.parametrize("is_side_by_side", with_slow([True], [False]))
def test_a_killed_vllm_gets_base_and_adapters_again(model: Transformer, tmp_path: Path, is_side_by_side: bool) -> None:
    changes = {"engine_args": TWO if is_side_by_side else IN_PLACE, "side_by_side": is_side_by_side}
    with fake_engine(model, tmp_path, fake={"halts": [20, 20]}, max_restarts=1, **changes) as engine:
        engine.submit([request(i) for i in (0, 1)])
        drive(engine, lambda: num_tokens(engine) >= 5)
        push(engine, model, 1)
        engine.submit([request(i) for i in (2, 3)])
        drive(engine, lambda: num_tokens(engine) >= 5)
        set_fake(engine, {})
        os.kill(engine.pid, signal.SIGKILL)
        finished = drive(engine)
        assert engine.num_restarts == 1
    assert {versions_of(item)[-1] for item in finished if item.ordinal > 1} == {1}
    assert {tuple(versions_of(item)) for item in finished if item.ordinal < 2} == {(0,) if is_side_by_side else (0, 1)}
    for item in finished:
        check(item, num_new=50, weights=WEIGHTS)


def test_a_refused_version_is_taken_back_and_none_has_seen_it(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, fake={"halts": [20]}, engine_args=TWO, side_by_side=True) as engine:
        engine.submit([request()])
        drive(engine, lambda: num_tokens(engine) >= 5)
        set_adapters(model, 9.0)
        engine.push()
        engine.submit([request(1)])
        push(engine, model, 1, value=2.0)
        engine.submit([request(2)])
        found = {item.ordinal: item for item in drive(engine)}
    assert {ordinal: versions_of(item) for ordinal, item in found.items()} == {0: [0], 1: [0], 2: [1]}
    for item in found.values():
        check(item, num_new=50, weights=WEIGHTS)


@pytest.mark.parametrize(("use_rslora", "precision"), [(False, "float32"), (True, "float32"), (False, "bfloat16")])
def test_what_is_written_is_the_policy_for_peft(tmp_path: Path, use_rslora: bool, precision: str) -> None:
    """The base is written once, a push is its adapters; both together compute what the policy does."""
    import peft

    lora = {"rank": 3, "alpha": 5, "use_rslora": use_rslora, "adapter_precision": precision}
    overrides = {"model": {"lora": lora}}
    config = resolve("quickstart", overrides).model
    model, _ = build_policy(config, seed=0)
    with_adapters(model, config.lora, seed=0)
    fill(model, 1)
    tokens = torch.arange(10)
    expected = probe_logprobs(model, tokens.numpy())
    folder = folder_of(model)
    try:
        base, adapter = folder.base, folder.write(0)
        assert not shapes_of(load_model(base))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(base)
        theirs = peft.PeftModel.from_pretrained(theirs, adapter).eval()
        with torch.no_grad():
            logprobs = torch.log_softmax(theirs(tokens[None]).logits[0], -1)
        found = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
        np.testing.assert_allclose(found, expected, atol=1e-5)
        sizes = [path.stat().st_size for path in adapter.iterdir()]
        item = 4 if precision == "float32" else 2
        assert sum(sizes) < item * sum(p.numel() for p in model.parameters() if p.requires_grad) + 20_000
        folder.keep_only([])
        assert base.is_dir()
    finally:
        folder.close()


def test_vllm_is_told_of_the_adapters(tmp_path: Path) -> None:
    def arguments(**changes: Any) -> tuple[dict[str, Any], bool]:
        config = resolve("quickstart", {"generator": {"engine": "vllm"}} | changes)
        shapes = planned_shapes(config.model.lora, new_config(config.model, 40))
        spec = spec_of(config, max_len=100, stop_token_ids=[], shapes=shapes)
        json.dumps(spec.engine_args)
        return spec.engine_args, spec.side_by_side

    targets = ["q_proj", "layers.0.mlp.up_proj"]
    found, is_side_by_side = arguments(model={"lora": {"rank": 9, "targets": targets}})
    assert found["enable_lora"]
    assert (found["max_lora_rank"], found["max_loras"]) == (16, 1)
    assert found["lora_target_modules"] == ["q_proj", "up_proj"]
    assert not is_side_by_side
    between = {"weight_update": "between_batches", "model": {"lora": {"rank": 8}}}
    found, is_side_by_side = arguments(**between, max_staleness=2)
    assert (found["max_lora_rank"], found["max_loras"], is_side_by_side) == (8, 4, True)
    found, is_side_by_side = arguments(**between, max_staleness=0)
    assert (found["max_loras"], is_side_by_side) == (1, False)
