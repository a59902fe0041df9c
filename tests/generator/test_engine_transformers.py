"""The engine against transformers: greedy ids, behaviour logprobs, and a swap in the middle with the old cache kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import covering, with_slow
from engine_kit import VOCAB, drain, new_engine, random_prompt, run

from slipstream.generator.requests import Request
from slipstream.models.hf import load_model

SIZES: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def hf_model(family: str, seed: int = 0, **changes: object) -> Any:
    import transformers  # here, since each process of the tests imports every file

    torch.manual_seed(seed)
    extra = {"head_dim": 8} if family == "qwen3" else {}
    config = transformers.AutoConfig.for_model(family, **(SIZES | extra | changes))
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def prompts_of(num: int) -> list[np.ndarray]:
    return [random_prompt(4 + 7 * i % 23, seed=i) for i in range(num)]


@pytest.mark.parametrize(("family", "prefill_chunk"), covering(["llama", "qwen2", "qwen3"], [512, 8]))
def test_greedy_ids_and_logprobs(family: str, prefill_chunk: int, tmp_path: Path) -> None:
    reference = hf_model(family)
    reference.save_pretrained(tmp_path)
    engine = new_engine(load_model(tmp_path), num_slots=5, prefill_chunk=prefill_chunk)
    batch = [Request(i, 0, prompt, max_new_tokens=10, temperature=0.0) for i, prompt in enumerate(prompts_of(6))]
    for completion in run(engine, batch).values():
        ids = torch.from_numpy(completion.request.prompt_tokens.astype(np.int64))[None]
        with torch.inference_mode():
            expected = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)[
                0
            ]
            logits = reference(expected[None]).logits[0].double()
        assert completion.tokens.tolist() == expected[ids.shape[1] :].tolist()
        logprobs = torch.log_softmax(logits, -1)[ids.shape[1] - 1 : -1]
        scores = logprobs.gather(1, expected[ids.shape[1] :, None])[:, 0].numpy()
        assert np.abs(scores - completion.logprobs).max() < 1e-4


@pytest.mark.parametrize("prefill_chunk", with_slow([40], [512]))
def test_logprobs_in_every_length_bucket(prefill_chunk: int, tmp_path: Path) -> None:
    """Heads wide enough for buckets of 32 positions; decoded and prefilled up to 300, past two blocks of 128."""
    reference = hf_model("qwen3", hidden_size=64, head_dim=16, max_position_embeddings=320, initializer_range=0.1)
    reference.save_pretrained(tmp_path)
    engine = new_engine(load_model(tmp_path), max_len=320, stop_token_ids=[], prefill_chunk=prefill_chunk)
    lengths = [1, 31, 32, 33, 64, 100, 127, 128, 129, 200, 256, 290]
    batch = [Request(i, 0, random_prompt(n, seed=i), max_new_tokens=10) for i, n in enumerate(lengths)]
    for completion in run(engine, [*batch, Request(99, 0, random_prompt(2), max_new_tokens=300)]).values():
        num_prompt = len(completion.request.prompt_tokens)
        ids = torch.from_numpy(np.concatenate([completion.request.prompt_tokens, completion.tokens]).astype(np.int64))
        with torch.inference_mode():
            logprobs = torch.log_softmax(reference(ids[None]).logits[0].double(), -1)[num_prompt - 1 : -1]
        scores = logprobs.gather(1, ids[num_prompt:, None])[:, 0].numpy()
        assert np.abs(scores - completion.logprobs).max() < 1e-4


def test_swap_keeping_the_cache_equals_a_loop_over_past_key_values(tmp_path: Path) -> None:
    old, new = hf_model("llama", 0), hf_model("llama", 1)
    for name, reference in (("old", old), ("new", new)):
        reference.save_pretrained(tmp_path / name)
    model, newer = load_model(tmp_path / "old"), load_model(tmp_path / "new")
    engine = new_engine(model, stop_token_ids=[])
    engine.submit([Request(i, 0, prompt, max_new_tokens=16) for i, prompt in enumerate(prompts_of(6))])
    for _ in range(9):
        engine.step()
    model.load_state_dict(newer.state_dict())
    engine.set_version(1)
    finished = drain(engine)
    assert len(finished) == 6
    for completion in finished.values():
        ids = torch.from_numpy(completion.request.prompt_tokens.astype(np.int64))[None]
        cache, scores = None, []
        for position, token in enumerate(completion.tokens.tolist()):
            weights = old if position < 9 else new
            with torch.inference_mode():
                out = weights(ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            scores.append(torch.log_softmax(out.logits[0, -1].double(), -1)[token].item())
            ids = torch.tensor([[token]])
        assert np.abs(np.array(scores) - completion.logprobs).max() < 1e-4
