"""What else is expected of models divided over ranks: loading, options, resuming, errors, critics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sharded_jobs
import torch
from covering import covering, with_slow
from rank_models import CONFIGS, MIXTURE, whole_model
from rank_pool import RankPool
from sharded_jobs import Layout, assembled
from test_sharded import LAYOUTS, SETTINGS, alone, relative

from slipstream.core.config import RunConfig
from slipstream.core.sections import TaskConfig
from slipstream.models.attention import PackedAttention
from slipstream.models.hf import logical_tensors, save_model
from slipstream.models.initialise import initialise
from slipstream.models.scalar import new_scalar_model, save_scalar_model
from slipstream.models.transformer import Transformer

SOME = {name: LAYOUTS[name] for name in ("dp2", "tp2", "dp2_tp2")}


@pytest.mark.parametrize(("case", "layout"), covering(["qwen2", "gpt_neox", "gpt2_untied"], LAYOUTS))
def test_ranks_hold_the_checkpoint_that_they_read(ranks: RankPool, case: str, layout: str, tmp_path: Path) -> None:
    model = whole_model(CONFIGS[case])
    save_model(model, tmp_path, max_shard_bytes=20_000)
    held = assembled(ranks.run(sharded_jobs.load, str(tmp_path), LAYOUTS[layout], world=LAYOUTS[layout].world))
    for name, tensor in logical_tensors(model).items():
        np.testing.assert_array_equal(held[name], tensor.detach().numpy())


@pytest.mark.parametrize("layout", SOME)
def test_a_fresh_model_has_the_same_numbers_in_every_division(ranks: RankPool, layout: str) -> None:
    config = CONFIGS["qwen3"]
    whole = Transformer(config)
    initialise(whole, 5)
    held = assembled(ranks.run(sharded_jobs.fresh, config, 5, SOME[layout], world=SOME[layout].world))
    for name, tensor in logical_tensors(whole).items():
        np.testing.assert_array_equal(held[name], tensor.detach().numpy())


@pytest.mark.parametrize(
    ("layout", "gradient_error", "weight_error"),
    with_slow(
        [
            (Layout(2, 1, reduce_once=True, recomputes=True), 3e-6, 1e-5),
        ],
        [
            (Layout(2, 1, precision="bfloat16"), 0.1, 3e-3),  # rounding may send tokens to other experts
            (Layout(2, 1), 3e-6, 1e-5),
        ],
    ),
)
def test_data_parallel_ranks_train_a_mixture_of_experts(
    ranks: RankPool, layout: Layout, gradient_error: float, weight_error: float
) -> None:
    one = sharded_jobs.train_alone(MIXTURE, SETTINGS, 3)
    by_rank = ranks.run(sharded_jobs.train, MIXTURE, layout, SETTINGS, 3, world=layout.world)
    assert relative(assembled([seen.first_gradient for seen in by_rank]), one.first_gradient) < gradient_error
    assert relative(assembled([seen.weights for seen in by_rank]), one.weights) < weight_error


@pytest.mark.parametrize(
    ("layout", "case"),
    covering(
        [Layout(2, 1, reduce_once=True), Layout(2, 2, recomputes=True), Layout(1, 2, recomputes=True)],
        ["llama_tied", "gpt2"],
    ),
)
def test_options_change_no_gradient(ranks: RankPool, layout: Layout, case: str) -> None:
    one = alone(case, 1)
    by_rank = ranks.run(sharded_jobs.train, CONFIGS[case], layout, SETTINGS, 1, world=layout.world)
    assert relative(assembled([seen.first_gradient for seen in by_rank]), one.first_gradient) < 3e-6


def test_a_whole_model_recomputes_to_the_same_bits() -> None:
    gradients = {}
    kept: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for recomputes, tensors in kept.items():
        model = whole_model(CONFIGS["gpt_neox"])
        for layer in model.layers:
            layer.recomputes = recomputes
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=tensors: to.append(x) or x, lambda x: x):
            states = model(torch.arange(9), torch.arange(9), PackedAttention([5, 4]))
        model.logits(states).square().sum().backward()
        gradients[recomputes] = [parameter.grad for parameter in model.parameters()]
    assert len(kept[True]) < 10 < 30 < len(kept[False])
    assert all(map(torch.equal, gradients[False], gradients[True]))


@pytest.mark.parametrize("reduce_once", [False, True])
def test_one_reduction_per_update_where_it_is_asked_for(ranks: RankPool, reduce_once: bool) -> None:
    config, layout = CONFIGS["llama"], Layout(2, 1, reduce_once=reduce_once)
    for num_passes, num_reductions in ranks.run(sharded_jobs.count_reductions, config, layout, world=2):
        assert num_passes > 1
        groups = config.num_layers + 1  # of parameters: each layer, and the root
        assert num_reductions == groups * (1 if reduce_once else num_passes)


@pytest.mark.parametrize("layout", [Layout(2, 1, precision="bfloat16"), Layout(1, 2, precision="bfloat16")])
def test_products_in_bfloat16_leave_float32_weights_and_nearly_the_same_gradient(
    ranks: RankPool, layout: Layout
) -> None:
    one = alone("qwen3", 1)
    by_rank = ranks.run(sharded_jobs.train, CONFIGS["qwen3"], layout, SETTINGS, 1, world=layout.world)
    gradient = assembled([seen.first_gradient for seen in by_rank])
    assert 1e-4 < relative(gradient, one.first_gradient) < 3e-2
    assert relative(assembled([seen.weights for seen in by_rank]), one.weights) < 1e-3


def test_equals_torch_adamw_with_its_clipping(ranks: RankPool) -> None:
    settings = {"lr": 2e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 2.1}
    config = CONFIGS["llama_tied"]
    one = sharded_jobs.train_with_torch(config, settings, 3)
    assert min(one.grad_norms) < 2.1 < max(one.grad_norms), "clips in some updates only"
    by_rank = ranks.run(sharded_jobs.train, config, LAYOUTS["dp2_tp2"], settings, 3, world=4)
    assert by_rank[0].grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
    assert relative(assembled([seen.weights for seen in by_rank]), one.weights) < 1e-5


def test_tensorflow_adam(ranks: RankPool) -> None:
    settings = {**SETTINGS, "adam": "tensorflow", "eps": 1e-5}
    config = CONFIGS["llama"]
    one = sharded_jobs.train_alone(config, settings, 2)
    by_rank = ranks.run(sharded_jobs.train, config, LAYOUTS["dp2"], settings, 2, world=2)
    assert relative(assembled([seen.weights for seen in by_rank]), one.weights) < 1e-6
    assert relative(alone("llama", 2).weights, one.weights) > 1e-5, "the formulations differ"


@pytest.mark.parametrize("layout", with_slow(["dp2"], ["dp2_tp2", "tp2"]))
def test_resumed_is_uninterrupted(ranks: RankPool, layout: str) -> None:
    results = ranks.run(sharded_jobs.resume, CONFIGS["qwen3"], SOME[layout], SETTINGS, world=SOME[layout].world)
    straight, resumed = (assembled([result[which] for result in results]) for which in (0, 1))
    for name, tensor in straight.items():
        np.testing.assert_array_equal(resumed[name], tensor)


@pytest.mark.parametrize("case", ["llama", "llama_tied"])
def test_measurements_see_the_weights_of_their_moment(ranks: RankPool, case: str) -> None:
    """Embedding, last norm and head stay gathered after a pass without gradients."""
    config = CONFIGS[case]
    results = ranks.run(sharded_jobs.measure_between, config, LAYOUTS["dp2"], world=2)
    trained = whole_model(config)
    tensors = assembled([result[1] for result in results])
    with torch.no_grad():
        for name, tensor in logical_tensors(trained).items():
            tensor.copy_(torch.from_numpy(tensors[name]))
    before, after = sharded_jobs.logits_of(whole_model(config)), sharded_jobs.logits_of(trained)
    assert np.abs(after - before).max() > 0.1
    for (first, second, third), _ in results:
        np.testing.assert_allclose(first, before, rtol=0, atol=1e-5)
        np.testing.assert_allclose(second, before, rtol=0, atol=1e-5)
        np.testing.assert_allclose(third, after, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("layout", "value"), covering(SOME, [float("nan"), float("inf")]))
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all(ranks: RankPool, layout: str, value: float) -> None:
    config = CONFIGS["llama_biased"]  # biases behind sums over ranks lie on the first tensor-parallel rank alone
    results = ranks.run(sharded_jobs.poison, config, SOME[layout], value, world=SOME[layout].world)
    assert "at update 1, not finite in layers.1.up.weight" in results[0][0]
    assert results == [(results[0][0], True)] * SOME[layout].world


def critic_run(**critic: Any) -> RunConfig:
    optimizer = {"lr": 2e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
    return RunConfig.model_validate(
        {
            "prompts": {"tasks": [TaskConfig(name="chain_sum")]},
            "loss": {"name": "ppo", "advantages": "gae"},
            "critic": {"optimizer": optimizer, "head_init": "reward", **critic},
        }
    )


@pytest.mark.parametrize(
    ("layout", "case", "kind"),
    with_slow(
        [("tp2", "llama", "head"), ("dp2", "llama_biased", "path")],
        [
            ("dp2_tp2", "gpt2", "own"),
            ("dp2", "llama", "own"),
            ("tp4", "mistral", "own"),
            ("dp2_tp2", "qwen3", "head"),
            ("dp2_tp2", "llama_tied", "path"),
        ],
    ),
)
def test_critics_are_trained_as_on_one_rank(ranks: RankPool, layout: str, case: str, kind: str, tmp_path: Path) -> None:
    config = CONFIGS[case]
    critic: dict[str, Any] = {"model": "head"} if kind == "head" else {}
    if kind == "path":
        reward_model = new_scalar_model(whole_model(config, seed=3), head_init="reward", seed=4)
        reward_model.bias.data.fill_(0.25)
        save_scalar_model(reward_model, tmp_path)
        critic["path"] = str(tmp_path)
    run = critic_run(**critic)
    trunk, others, norms = sharded_jobs.train_critic_alone(config, run, 3)
    assert min(norms) > 0
    results = ranks.run(sharded_jobs.train_critic, config, LAYOUTS[layout], run, 3, world=LAYOUTS[layout].world)
    for held, other, seen in results:
        assert seen == results[0][2]
        assert seen == pytest.approx(norms, rel=1e-4)
        assert bool(held) == (kind != "head")
        assert other.keys() == others.keys()
        for name, expected in others.items():
            np.testing.assert_array_equal(other[name], results[0][1][name])
            np.testing.assert_allclose(other[name], expected, rtol=1e-4, atol=1e-6)
    if kind != "head":
        found = assembled([held for held, _, _ in results])
        kept = {name: tensor for name, tensor in trunk.items() if not name.endswith("c_attn.bias")}
        assert relative({name: found[name] for name in kept}, kept) < 1e-5
