"""Mixtures of experts: grouping, against a loop over tokens and experts; bits that the company does not change."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
import transformers
from hf_cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from slipstream.batching.collate import collate
from slipstream.core.errors import ConfigError
from slipstream.core.packed import TrainSequence
from slipstream.core.recipes import resolve
from slipstream.core.sections import ModelConfig
from slipstream.models import experts as module
from slipstream.models.attention import PackedAttention
from slipstream.models.config import TransformerConfig, config_from_hf, config_to_hf, local_config, new_config
from slipstream.models.experts import ROWS, Experts, expert_loads, group, replayed, route_type
from slipstream.models.layout import layout
from slipstream.models.packed import at_targets
from slipstream.models.preflight import check_policy
from slipstream.models.transformer import ACTIVATIONS, Transformer

CONFIG = config_from_hf(CASES["qwen3_moe"].to_dict())


def mixture(config: TransformerConfig = CONFIG, dtype: torch.dtype = torch.float32, seed: int = 0) -> Experts:
    experts = Experts(config, ACTIVATIONS["silu"]).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return experts


def states(num_tokens: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, CONFIG.hidden_size, generator=generator, dtype=torch.float64).to(dtype)


def by_loop(experts: Experts, x: torch.Tensor, given: torch.Tensor | None = None) -> torch.Tensor:
    """Every token through each of its experts, weighted by its gate; no sorting, no grouping."""
    probabilities = (x @ experts.router.weight.T).softmax(-1)
    up = experts.up.weight.view(experts.num_experts, -1, x.shape[1])
    down = experts.down.weight.view(experts.num_experts, x.shape[1], -1)
    out = []
    for index, (row, chances) in enumerate(zip(x, probabilities, strict=True)):
        ranked = sorted(range(len(chances)), key=chances.tolist().__getitem__, reverse=True)[: experts.per_token]
        ranked = ranked if given is None else given[index].tolist()
        total = sum(chances[e] for e in ranked) if experts.normalises else 1.0
        parts = []
        for expert in ranked:
            gate, value = (up[expert] @ row).chunk(2)
            parts.append(chances[expert] / total * (down[expert] @ (gate * gate.sigmoid() * value)))
        out.append(torch.stack(parts).sum(0))
    return torch.stack(out) if out else x * 0


@given(
    st.integers(1, 9).flatmap(
        lambda e: st.integers(1, e).flatmap(
            lambda k: st.tuples(
                st.just(e), st.just(k), st.lists(st.permutations(range(e)).map(lambda p: p[:k]), max_size=40)
            )
        )
    )
)
def test_every_choice_has_one_row_of_its_expert(case: tuple[int, int, list[list[int]]]) -> None:
    num_experts, k, choices = case
    chosen = torch.tensor(choices, dtype=torch.int64).view(len(choices), k)
    for on_device in (False, True):
        groups = group(chosen, num_experts, on_device=on_device)
        if on_device:
            assert groups.ends is not None
            ends = groups.ends.tolist()
            starts = [0, *ends[:-1]]
        else:
            assert all(size % ROWS == 0 and size - (chosen == e).sum() < ROWS for e, size in enumerate(groups.sizes))
            ends = torch.tensor(groups.sizes).cumsum(0).tolist()
            starts = [end - size for end, size in zip(ends, groups.sizes, strict=True)]
        assert len(groups.source) == ends[-1]
        places = groups.places.flatten().tolist()
        assert len(set(places)) == len(places)
        for token, row in enumerate(choices):
            for choice, expert in enumerate(row):
                place = int(groups.places[token, choice])
                assert groups.source[place] == token
                assert starts[expert] <= place < ends[expert]


@settings(max_examples=25)
@given(st.integers(0, 20), st.integers(1, 6), st.booleans(), st.integers(0, 99))
def test_outputs_and_gradients_are_those_of_a_loop(num_tokens: int, k: int, normalises: bool, seed: int) -> None:
    config = dataclasses.replace(CONFIG, experts_per_token=k, normalises_gates=normalises)
    experts = mixture(config, torch.float64, seed)
    x = states(num_tokens, torch.float64, seed + 1).requires_grad_()
    weights = states(num_tokens, torch.float64, seed + 2)
    results = []
    for function in (experts, lambda rows: by_loop(experts, rows)):
        out = function(x)
        inputs = [x, *experts.parameters()]
        grads = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True, materialize_grads=True)
        results.append((out, *grads))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)


def test_given_experts_are_gone_through_with_gates_of_their_own() -> None:
    """Routing replay: recorded experts where they are known, the router's choice elsewhere; gradients by the router."""
    experts, x = mixture(dtype=torch.float64), states(20, torch.float64).requires_grad_()
    _, own = experts.route(x)
    recorded = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(n))[:3] for n in range(20)])
    recorded[::4] = 255
    expected = torch.where(recorded == 255, own, recorded)
    assert not torch.equal(expected, own)
    results = []
    for out in (
        experts(x, lambda chosen: replayed(recorded.to(route_type(6)), chosen)),
        by_loop(experts, x, given=expected),
    ):
        inputs = [x, *experts.parameters()]
        grads = torch.autograd.grad((out * states(20, torch.float64, 5)).sum(), inputs)
        results.append((out, *grads))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)
    assert (route_type(254), route_type(255)) == (torch.uint8, torch.int16)


def test_a_microbatch_replays_what_its_sequences_have_recorded() -> None:
    """Two completions share a prompt's rows; each alone, in a pass that is told its experts, is the oracle."""
    model, generator = Transformer(CONFIG), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    prompt, sequences = np.arange(1, 8, dtype=np.int32), []
    of_prompt = rng_routes(0, len(prompt))
    for sample, length in enumerate((5, 9)):
        tokens = np.concatenate([prompt, np.arange(10, 10 + length, dtype=np.int32)])
        mask = np.arange(len(tokens)) >= len(prompt)
        sequence = TrainSequence.read_only((3, sample), tokens, mask)
        routes = np.concatenate([of_prompt, rng_routes(sample + 1, length - 1)])
        sequences.append(dataclasses.replace(sequence, routes=routes))
    [microbatch] = collate(sequences, 1000)
    assert microbatch.routes is not None
    assert len(microbatch.routes) == microbatch.num_tokens == 7 + 4 + 8
    with torch.no_grad():
        assert microbatch.keys == ((3, 1), (3, 0))
        got = at_targets(model, microbatch, replays=True).split([9, 5])
        for sequence, found in zip(sequences[::-1], got, strict=True):
            assert sequence.routes is not None
            inputs = torch.from_numpy(sequence.tokens[:-1]).long()
            told = Told([len(inputs)], torch.from_numpy(sequence.routes).long())
            alone = model(inputs, torch.arange(len(inputs)), told)[len(prompt) - 1 :]
            torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(torch.cat(got), at_targets(model, microbatch), atol=1e-3), "a teacher does not replay"


def rng_routes(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([[rng.permutation(6)[:3] for _ in range(CONFIG.num_layers)] for _ in range(count)]).astype(np.uint8)


class Told(PackedAttention):
    """Answers with the experts it was told, [N, L, k]."""

    def __init__(self, lengths: list[int], experts: torch.Tensor) -> None:
        super().__init__(lengths)
        self.experts = experts

    def route(self, layer: int, chosen: torch.Tensor) -> torch.Tensor:
        assert chosen.shape == self.experts[:, layer].shape
        return self.experts[:, layer]


def test_float64_equals_transformers() -> None:
    experts, config = mixture(dtype=torch.float64), CASES["qwen3_moe"]
    theirs = Qwen3MoeSparseMoeBlock(config).double()
    with torch.no_grad():
        theirs.gate.weight.copy_(experts.router.weight)
        theirs.experts.gate_up_proj.copy_(experts.up.weight.view_as(theirs.experts.gate_up_proj))
        theirs.experts.down_proj.copy_(experts.down.weight.view_as(theirs.experts.down_proj))
        x = states(50, torch.float64)
        # transformers computes the router's softmax in float32 whatever the model is
        torch.testing.assert_close(experts(x), theirs(x[None])[0], atol=1e-6, rtol=1e-5)


def test_a_tokens_bits_do_not_depend_on_the_others() -> None:
    experts, x = mixture(), states(64)
    with torch.no_grad():
        whole = experts(x)
        for rows in (slice(0, 8), slice(8, 24), slice(40, 64)):
            assert torch.equal(experts(x[rows]), whole[rows])
        shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(0))
        assert torch.equal(experts(x[shuffled]), whole[shuffled])
    assert torch.equal(experts(x), whole), "with gradients, as the trainer has it"


def test_one_kernel_for_all_experts_gives_what_the_loop_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA runs, in bfloat16; torch has it for CPUs, too."""
    experts = mixture(dtype=torch.bfloat16)
    grads = {}
    for is_one_kernel in (False, True):
        monkeypatch.setattr(module, "multiplies_groups", lambda *_, answer=is_one_kernel: answer)
        x = states(40, torch.bfloat16).requires_grad_()
        out = experts(x)
        found = torch.autograd.grad(out, [x, *experts.parameters()], states(40, torch.bfloat16, seed=2))
        grads[is_one_kernel] = (out, *found)
    for ours, expected in zip(grads[True], grads[False], strict=True):
        scale = float(expected.detach().float().abs().max())
        torch.testing.assert_close(ours.float(), expected.float(), atol=0.03 * scale, rtol=0.03)


def test_the_router_chooses_in_float32_at_every_precision() -> None:
    experts = mixture().to(torch.bfloat16)
    experts.router.float()
    gates, chosen = experts.route(states(32, torch.bfloat16))
    assert gates.dtype == torch.float32
    _, expected = (states(32, torch.bfloat16).double() @ experts.router.weight.double().T).topk(3)
    assert torch.equal(chosen, expected)
    assert experts.chosen is not None
    assert torch.equal(experts.chosen, expected)
    assert torch.equal(expert_loads(experts, 32), torch.bincount(expected.flatten(), minlength=6)[None])


def test_export_names_are_those_of_published_checkpoints() -> None:
    with torch.device("meta"):
        names = {tensor.name for tensor in layout(Transformer(CONFIG))}
    assert {f"model.layers.1.mlp.experts.5.{name}_proj.weight" for name in ("gate", "up", "down")} <= names
    hf = config_to_hf(CONFIG)
    assert (hf["num_experts"], hf["architectures"]) == (6, ["Qwen3MoeForCausalLM"])
    assert transformers.Qwen3MoeConfig.from_dict(hf).num_experts == 6


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"n_shared_experts": 1}, "n_shared_experts = 1"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"num_experts_per_tok": 9, "num_experts": 8}, "9 of 8"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": 10**9}, "num_experts"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"model_type": "mixtral", "sliding_window": 8}, "sliding_window = 8"),
    ],
)
def test_other_mixtures_are_refused(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf({"model_type": "qwen3_moe"} | raw)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 4}, "model.num_experts = 4 with model.family = 'llama'"),
        ({"family": "qwen3_moe"}, "model.num_experts = 0"),
        ({"family": "mixtral", "num_experts": 4, "experts_per_token": 5}, "experts_per_token = 5"),
        ({"family": "mixtral", "num_experts": 4, "expert_width": 8}, "expert_width = 8"),
    ],
)
def test_fresh_mixtures_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**changes).check_heads()  # type: ignore[arg-type]


def test_ranks_that_share_layers_have_whole_experts() -> None:
    config = new_config(ModelConfig(family="mixtral", num_experts=6), 16)
    assert local_config(config, 1) == config
    local = local_config(config, 2)
    assert (local.num_heads, local.num_experts, local.expert_width) == (config.num_heads // 2, 6, config.expert_width)
    with pytest.raises(ConfigError, match=r"4 ranks for 4 heads, .*, 6 experts"):
        local_config(config, 4)
    odd = dataclasses.replace(config, intermediate_size=config.intermediate_size + 1)
    assert local_config(odd, 2).num_experts == 6, "no layer has an MLP of that width"
    with pytest.raises(ConfigError, match="cannot be divided"):
        local_config(dataclasses.replace(odd, dense_layers=(0,)), 2)


MIXTURE = {"family": "qwen3_moe", "num_experts": 4}
LORA = {"lora": {"rank": 2}}
EXPERT_RANKS = {"ranks": 2, "expert_parallel": 2}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"model": MIXTURE, "generator": {"precision": "fp8"}}, "generator.precision = 'fp8'"),
        ({"model": MIXTURE, "generator": {"engine": "vllm"}}, "generator.engine = 'vllm'"),
        (
            {"model": MIXTURE | LORA, "generator": {"tensor_parallel": 2}},
            "model.lora with generator.tensor_parallel = 2",
        ),
        (
            {"model": MIXTURE | LORA, "trainer": {"ranks": 2, "tensor_parallel": 2}},
            "model.lora with trainer.tensor_parallel = 2",
        ),
        ({"model": MIXTURE | LORA, "trainer": EXPERT_RANKS}, "model.lora with trainer.expert_parallel = 2"),
        ({"trainer": EXPERT_RANKS}, "for no experts"),
        (
            {"model": MIXTURE | {"num_experts": 6}, "trainer": {"ranks": 4, "expert_parallel": 4}},
            "4 ranks (trainer.expert_parallel = 4, tensor_parallel = 1) for 6 experts\n  allowed: 1, 2, 3, 6 ranks",
        ),
        (
            {
                "model": MIXTURE | {"num_experts": 6},
                "trainer": {"ranks": 4, "expert_parallel": 2, "tensor_parallel": 2},
            },
            "4 ranks (trainer.expert_parallel = 2, tensor_parallel = 2) for 6 experts",
        ),
        ({"model": MIXTURE, "trainer": {"ranks": 2, "context_parallel": 2}}, "trainer.context_parallel = 2"),
        (
            {"model": MIXTURE | {"lora": {"rank": 2, "base_precision": "int8"}}, "generator": {"precision": "int8"}},
            "model.lora.base_precision = 'int8'",
        ),
        (
            {"model": MIXTURE | {"lora": {"rank": 2, "targets": ["up_proj"]}}},
            "allowed: q_proj, k_proj, v_proj, o_proj, gate_up_proj, down_proj",
        ),
        (
            {"model": MIXTURE | {"lora": {"rank": 4, "targets": ["gate_up_proj"]}}, "generator": {"device": "cuda"}},
            "a multiple of 8",
        ),
        ({"generator": {"routing_replay": True}}, "a model without experts"),
    ],
)
def test_what_mixtures_do_not_run_with(tables: dict[str, object], message: str) -> None:
    config = resolve("quickstart", {"warm_start": {"steps": 0}, "kl": {"coef": 0.0}, **tables})
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_policy(config)
