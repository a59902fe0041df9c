"""The engine over a real vLLM, on a CPU; `make test-vllm`. Our own model, in fp32, is the oracle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import fill
from vllm_kit import drive, folder_of, num_tokens

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.config import RunConfig
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Finished, Request
from slipstream.generator.vllm.backend import WORKER, environment, spec_of
from slipstream.generator.vllm.engine import Deadlines, VLLMEngine
from slipstream.generator.vllm.process import Launch
from slipstream.generator.vllm.settings import interpreter
from slipstream.models.config import TransformerConfig
from slipstream.models.transformer import Transformer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

VOCAB, MAX_LEN = 4096, 3200
STOP = 3720  # the 8th token of a greedy completion below; rare where tokens are sampled
LONG = 3000  # tokens: still under way, seconds later, when the test gets to change something
TOLERANCE = 1e-3  # nats
CONFIG = RunConfig(
    prompts={"tasks": [{"name": "spell_backward"}]},  # type: ignore[arg-type]
    generator={"engine": "vllm", "num_slots": 16},  # type: ignore[arg-type]
    eval={"num_slots": 8},  # type: ignore[arg-type]
)


def small_config(family: str, **changes: Any) -> TransformerConfig:
    """A tied head, and heads of the least size that vLLM takes on a CPU."""
    return TransformerConfig(
        family=family,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        max_positions=MAX_LEN,
        tie_embeddings=True,
        eos_token_ids=(STOP,),
        **changes,
    )


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(small_config("llama"))
    fill(model, 0)
    return model


@pytest.fixture(scope="module")
def vllm(model: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    """One process for all tests of this file; starting it takes most of their time."""
    engine = VLLMEngine(
        folder_of(model),
        Launch(
            command=[str(interpreter(CONFIG.generator.vllm)), str(WORKER)],
            environment=environment(CONFIG.generator.vllm, num_threads=1),
            log_path=Path(tmp_path_factory.mktemp("vllm")) / "vllm.log",
        ),
        spec_of(CONFIG, max_len=MAX_LEN, stop_token_ids=[STOP]),
        rooms={0: 16, 1: 8},
        max_len=MAX_LEN,
        seed=0,
        kv_on_update="keep",
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


@pytest.fixture(autouse=True)
def _first_weights(vllm: VLLMEngine, model: Transformer) -> None:
    """Every test starts with version 0, from random weights of seed 0."""
    load(vllm, model, seed=0, version=0)


def load(vllm: VLLMEngine, model: Transformer, *, seed: int, version: int) -> None:
    fill(model, seed)
    vllm.push()
    vllm.set_version(version)


def requests(count: int, *, max_new_tokens: int = 24, temperature: float = 0.7, **changes: Any) -> list[Request]:
    return [
        Request(
            ordinal=i // 2,
            sample=i % 2,
            prompt_tokens=np.random.default_rng(i // 2).integers(2, VOCAB, 3 + 5 * (i // 2)).astype(np.int32),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            **changes,
        )
        for i in range(count)
    ]


def by_key(finished: list[Finished]) -> dict[tuple[int, int], Finished]:
    return {(item.ordinal, item.sample): item for item in finished}


def forced_logprobs(model: Transformer, item: Finished) -> np.ndarray:
    """float32 [T]: what our model gives the completion's tokens, at its temperature and over what its cuts leave."""
    request = item.request
    tokens = torch.from_numpy(np.concatenate([request.prompt_tokens, item.tokens]).astype(np.int64))
    start = len(request.prompt_tokens)
    with torch.no_grad():
        logits = all_logits(model, tokens)[start - 1 : -1] / request.temperature
        logprobs = torch.log_softmax(cut(logits, request), dim=-1)
    return logprobs.gather(1, tokens[start:, None])[:, 0].numpy()


def cut(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """`logits` [T, V] with -inf where `top_k`, then `top_p`, then `min_p` leave nothing."""
    if request.top_k:
        least = logits.topk(request.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if request.top_p < 1:
        probabilities, order = logits.softmax(-1).sort(descending=True)
        is_beyond = probabilities.cumsum(-1) - probabilities >= request.top_p
        logits = logits.masked_fill(torch.empty_like(is_beyond).scatter_(1, order, is_beyond), -torch.inf)
    probabilities = logits.softmax(-1)
    return logits.masked_fill(probabilities < request.min_p * probabilities.amax(-1, keepdim=True), -torch.inf)


def all_logits(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """float32 [T, V] of `tokens` [T]."""

    def attention(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, D], keys and values [T, Hkv, D] -> [T, H, D]."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        return torch.einsum("hts,shd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), v)

    return model.logits(model(tokens, torch.arange(len(tokens)), attention))


def engine_core(pid: int) -> int:
    """The child of worker `pid` that is vLLM's engine, by the title it gives itself; the others are helpers."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (found,) = (int(child) for child in children if b"EngineCore" in Path(f"/proc/{child}/cmdline").read_bytes())
    return found


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max())


def test_greedy_completions_are_those_of_our_engine(vllm: VLLMEngine, model: Transformer) -> None:
    asked = requests(12, temperature=0.0)
    vllm.submit(asked)
    theirs = by_key(drive(vllm, deadline_s=120))
    ours = native_engine(model, num_slots=16, max_len=MAX_LEN, seed=0, stop_token_ids=[STOP])
    ours.submit(asked)
    expected: list[Finished] = []
    while not ours.is_idle:
        expected += ours.step()
    assert len(theirs) == len(expected) == 12
    assert {item.finish_reason for item in expected} == {"stop", "length"}
    for item in expected:
        same = theirs[item.ordinal, item.sample]
        assert same.tokens.tolist() == item.tokens.tolist()
        assert same.finish_reason == item.finish_reason


@pytest.mark.parametrize(
    "cuts",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.7}, {"top_k": 20, "min_p": 0.1}],
    ids=str,
)
def test_logprobs_are_those_of_what_was_sampled_from(
    vllm: VLLMEngine, model: Transformer, cuts: dict[str, Any]
) -> None:
    """After the temperature, and over the tokens that the cuts have left."""
    vllm.submit(requests(12, **cuts))
    finished = drive(vllm, deadline_s=120)
    errors = [difference(forced_logprobs(model, item), item.logprobs) for item in finished]
    assert max(errors) < TOLERANCE


def test_a_sample_is_a_function_of_its_request(vllm: VLLMEngine) -> None:
    asked = requests(8, max_new_tokens=12)
    vllm.submit(asked)
    crowd = by_key(drive(vllm, deadline_s=120))
    vllm.submit(asked[3:4])
    (alone,) = drive(vllm, deadline_s=120)
    assert alone.tokens.tolist() == crowd[1, 1].tokens.tolist()
    assert crowd[1, 0].tokens.tolist() != crowd[1, 1].tokens.tolist()


def test_weights_change_in_the_middle_of_completions(vllm: VLLMEngine, model: Transformer) -> None:
    """Tokens before stay, each carries its version, and the probe is that of a fresh model, tied head and all."""
    vllm.submit(requests(16, max_new_tokens=LONG, temperature=1.3))
    finished = drive(vllm, lambda: num_tokens(vllm) >= 8, deadline_s=120)
    before = {(live.request.ordinal, live.request.sample): list(live.tokens) for live in vllm._live.values()}
    load(vllm, model, seed=1, version=1)
    probe = np.random.default_rng(0).integers(2, VOCAB, 32).astype(np.int32)
    error = difference(probe_logprobs(model, probe), vllm.probe(probe))
    assert error < TOLERANCE
    finished += drive(vllm, deadline_s=120)
    swapped = [item for item in finished if len(item.version_spans) == 2]
    assert len(swapped) >= 2
    new = Transformer(model.config)
    new.load_state_dict(model.state_dict())
    fill(model, 0)
    firsts = []
    for item in swapped:
        start = item.version_spans[1].start
        assert item.tokens[: len(before[item.ordinal, item.sample])].tolist() == before[item.ordinal, item.sample]
        old = np.abs(forced_logprobs(model, item) - item.logprobs)
        assert old[:start].max() < TOLERANCE, "sampled under version 0"
        firsts.append(old[start])
        assert np.abs(forced_logprobs(new, item) - item.logprobs)[start:].max() > 0.01, "the old keys were kept"
    assert sorted(firsts)[1] > TOLERANCE, "first tokens of version 1: one may have the same logprob by chance"


def test_caches_are_rebuilt_on_request(vllm: VLLMEngine, model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 'recompute', tokens behind the update are those of the new weights over the whole completion."""
    monkeypatch.setattr(vllm, "_kv_on_update", "recompute")
    vllm.submit(requests(16, max_new_tokens=LONG, temperature=1.3))
    drive(vllm, lambda: num_tokens(vllm) >= 8, deadline_s=120)
    load(vllm, model, seed=1, version=1)
    finished = [item for item in drive(vllm, deadline_s=120) if len(item.version_spans) == 2]
    assert len(finished) >= 2
    for item in finished:
        start = item.version_spans[1].start
        assert np.abs(forced_logprobs(model, item) - item.logprobs)[start:].max() < TOLERANCE


def test_a_shared_prompt_is_not_served_from_the_cache_of_old_weights(vllm: VLLMEngine, model: Transformer) -> None:
    """The prompt is longer than a block of vLLM's cache, so that its keys would be found there."""
    prompt = np.random.default_rng(1).integers(2, VOCAB, 80).astype(np.int32)
    asked = [Request(ordinal=0, sample=i, prompt_tokens=prompt, max_new_tokens=4, temperature=1.0) for i in range(2)]
    for seed in (0, 1):
        load(vllm, model, seed=seed, version=seed)
        vllm.submit(asked)
        for item in drive(vllm, deadline_s=120):
            assert difference(forced_logprobs(model, item), item.logprobs) < TOLERANCE


def test_prompts_that_fill_more_than_a_step(vllm: VLLMEngine, model: Transformer) -> None:
    """In parts, as vLLM would do it, a seeded request fails on a CPU (see `worker.make_vllm`)."""
    budget = vllm._spec.engine_args["max_num_batched_tokens"]
    length = MAX_LEN - 4
    assert 16 * length > 5 * budget
    prompts = np.random.default_rng(2).integers(2, VOCAB, (16, length)).astype(np.int32)
    asked = [
        Request(ordinal=i, sample=0, prompt_tokens=prompts[i], max_new_tokens=4, temperature=1.0) for i in range(16)
    ]
    vllm.submit(asked)
    finished = drive(vllm, deadline_s=120)
    assert len(finished) == 16
    for item in finished:
        assert difference(forced_logprobs(model, item), item.logprobs) < TOLERANCE


@pytest.mark.parametrize("who", ["worker", "engine core"])
def test_a_killed_vllm_is_replaced_with_the_present_weights(
    vllm: VLLMEngine, model: Transformer, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_max_restarts", vllm.num_restarts + 1)
    load(vllm, model, seed=2, version=2)
    probe = np.random.default_rng(0).integers(2, VOCAB, 32).astype(np.int32)
    vllm.probe(probe)
    vllm.submit(requests(16, max_new_tokens=LONG, temperature=1.3))
    drive(vllm, lambda: num_tokens(vllm) >= 4, deadline_s=120)
    first, restarts = vllm.pid, vllm.num_restarts
    os.kill(first if who == "worker" else engine_core(first), signal.SIGKILL)
    finished = drive(vllm, deadline_s=400)
    assert vllm.num_restarts == restarts + 1
    with pytest.raises(ProcessLookupError):
        os.killpg(first, 0)  # neither it nor any process of vLLM's
    assert difference(probe_logprobs(model, probe), vllm.probe(probe)) < TOLERANCE
    assert finished
    for item in finished:
        assert [span.version for span in item.version_spans] == [2]
        assert difference(forced_logprobs(model, item), item.logprobs) < TOLERANCE
