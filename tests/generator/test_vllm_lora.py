"""Adapters in a real vLLM, on a CPU; `make test-vllm`. Our own model with the adapters, in fp32, is the oracle."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import fill
from test_vllm import CONFIG, LONG, MAX_LEN, STOP, TOLERANCE, VOCAB, difference, forced_logprobs, requests, small_config
from vllm_kit import drive, folder_of, num_tokens

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.generator.requests import Finished
from slipstream.generator.vllm.backend import WORKER, environment, spec_of
from slipstream.generator.vllm.engine import Deadlines, VLLMEngine
from slipstream.generator.vllm.process import Launch
from slipstream.generator.vllm.settings import interpreter
from slipstream.models.lora import install, shapes_for, shapes_of, targeted
from slipstream.models.transformer import Transformer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROBE = np.random.default_rng(0).integers(2, VOCAB, 32).astype(np.int32)


@pytest.fixture(scope="module")
def model() -> Transformer:
    """A Qwen3 with adapters of rank 5 on all layers but the head, which is tied; vLLM pads them to rank 8."""
    config = small_config("qwen3", qk_norm=True)
    model = Transformer(config)
    install(model, shapes_for(config, targeted(config, ()), rank=5, alpha=7.0, use_rslora=False))
    fill(model, 0)
    return model


@pytest.fixture(scope="module", params=["in_place", "side_by_side"])
def vllm(
    model: Transformer, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VLLMEngine]:
    """One process for all tests of a way to hold adapters."""
    lora = {"lora": {"rank": 5}}
    mode = {"in_place": "in_flight", "side_by_side": "between_batches"}[request.param]
    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update=lora), "weight_update": mode})
    config = type(CONFIG).model_validate(
        {
            "prompts": {"tasks": [{"name": "spell_backward"}]},
            "generator": {"engine": "vllm", "num_slots": 16},
            "eval": {"num_slots": 8},
            "model": lora,
            "weight_update": mode,
            "max_staleness": 1,
        }
    )
    engine = VLLMEngine(
        folder_of(copy.deepcopy(model)),
        Launch(
            command=[str(interpreter(config.generator.vllm)), str(WORKER)],
            environment=environment(config.generator.vllm, num_threads=1),
            log_path=Path(tmp_path_factory.mktemp("vllm")) / "vllm.log",
        ),
        spec_of(config, max_len=MAX_LEN, stop_token_ids=[STOP], shapes=shapes_of(model)),
        rooms={0: 16, 1: 8},
        max_len=MAX_LEN,
        seed=0,
        kv_on_update="recompute",
        deadlines=Deadlines(start_s=400.0, answer_s=120.0, silence_s=120.0),
        max_restarts=0,
        probe_tolerance=TOLERANCE,
        vocab_size=VOCAB,
    )
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.close()


def load(vllm: VLLMEngine, model: Transformer, version: int) -> Transformer:
    """Give vLLM random adapters as large as the base; return the policy with them."""
    policy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(100 + version)
    own = dict(vllm._folder._save.args[0].named_parameters())  # type: ignore[attr-defined]
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if ".adapter." in name:
                parameter.normal_(std=0.15, generator=generator)
                own[name].copy_(parameter)
    vllm.push()
    error = difference(probe_logprobs(policy, PROBE), vllm.probe(PROBE))
    assert error < TOLERANCE
    assert difference(probe_logprobs(model, PROBE), vllm.probe(PROBE)) > 0.1, "the adapters count"
    vllm.set_version(version)
    return policy


def gaps(policies: dict[int, Transformer], item: Finished) -> np.ndarray:
    """Of every token to what the version that it names gives it behind all that came before."""
    starts = [*(span.start for span in item.version_spans), len(item.tokens)]
    found = {span.version: forced_logprobs(policies[span.version], item) for span in item.version_spans}
    return np.concatenate(
        [
            np.abs(found[span.version] - item.logprobs)[start:end]
            for span, start, end in zip(item.version_spans, starts, starts[1:], strict=False)
        ]
    )


def test_every_token_is_of_the_adapter_that_it_names(vllm: VLLMEngine, model: Transformer) -> None:
    """In place all rows move to the newest, and their keys are made anew; side by side each keeps its own."""
    policies = {1: load(vllm, model, 1)}
    vllm.submit(requests(8, max_new_tokens=LONG, temperature=1.3))
    finished = drive(vllm, lambda: num_tokens(vllm) >= 8, deadline_s=120)
    num_begun = vllm.num_live
    policies[2] = load(vllm, model, 2)
    changes: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.3, "stream": 1}
    vllm.submit(requests(8, **changes))
    finished += drive(vllm, deadline_s=120)
    assert num_begun >= 4
    assert max(gaps(policies, item).max() for item in finished) < TOLERANCE
    versions = [[span.version for span in item.version_spans] for item in finished if item.request.stream == 0]
    assert [2] not in versions
    if vllm._spec.side_by_side:
        assert versions == [[1]] * 8
    else:
        assert [1, 2] in versions
    later = [item for item in finished if item.request.stream]
    assert {span.version for item in later for span in item.version_spans} == {2}


def test_versions_come_and_go(vllm: VLLMEngine, model: Transformer) -> None:
    """More of them than vLLM has room for at once, a prompt's cache shared by those of one version only."""
    prompt = np.random.default_rng(1).integers(2, VOCAB, 80).astype(np.int32)
    for version in range(3, 8):
        policy = load(vllm, model, version)
        asked = requests(4, max_new_tokens=4, temperature=1.0)
        vllm.submit([*asked, *(one.__class__(**{**vars(one), "prompt_tokens": prompt, "ordinal": 9}) for one in asked)])
        for item in drive(vllm, deadline_s=120):
            assert gaps({version: policy}, item).max() < TOLERANCE
