"""The ten statistics by plain arithmetic, verdicts on made-up ones; the published table is the published one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from experiments.adam_epsilon import experiment
from experiments.adam_epsilon.experiment import (
    NAMES,
    PIPELINE,
    SIZES,
    excess_table,
    figure,
    section,
    sft_spec,
    statistics_table,
    verdicts,
)
from experiments.adam_epsilon.ratios import batch_config, excess, published, ratio_statistics
from experiments.lab import Lab
from experiments.section import render


def test_statistics_by_hand():
    """Ratios 2, 1/2, 1.1 and 1 with advantages of both signs: the clip binds at the first, not at the second."""
    new = np.log(np.array([2.0, 0.5, 1.1, 1.0])) - 3.0
    old = np.full(4, -3.0)
    found = ratio_statistics(new, old, np.array([1.0, 1.0, -1.0, 1.0]), clip=0.2)
    logs = [math.log(2), -math.log(2), math.log(1.1), 0.0]
    mean_log, mean_ratio = sum(logs) / 4, 4.6 / 4
    assert found == pytest.approx(
        {
            "policy/approxkl": sum(log**2 for log in logs) / 8,
            "policy/clipfrac": 1 / 4,
            "ratio_mean": mean_ratio,
            "ratio_var": sum((ratio - mean_ratio) ** 2 for ratio in (2.0, 0.5, 1.1, 1.0)) / 4,
            "ratio_max": 2.0,
            "ratio_min": 0.5,
            "logprob_diff_mean": mean_log,
            "logprob_diff_var": sum((log - mean_log) ** 2 for log in logs) / 4,
            "logprob_diff_max": math.log(2),
            "logprob_diff_min": -math.log(2),
        }
    )


def test_the_clip_counts_where_it_holds_a_token_back():
    new, old = np.log(np.array([0.5, 0.5, 1.5, 1.5])), np.zeros(4)
    for advantages, clipped in (([1, 1, 1, 1], 2 / 4), ([-1, -1, -1, -1], 2 / 4), ([1, 1, -1, -1], 0.0)):
        found = ratio_statistics(new, old, np.array(advantages, dtype=float), clip=0.2)
        assert found["policy/clipfrac"] == clipped


def test_the_published_table():
    """N's own words on it: approximate KL 6 times, clipped 4.4 times the original's, diff's variance 6 times."""
    found = published()
    assert {len(column) for column in found.values()} == {10}
    assert excess(found, "policy/approxkl") == pytest.approx(6.3, abs=0.05)
    assert excess(found, "logprob_diff_var") == pytest.approx(6.4, abs=0.05)
    assert found["torch"]["policy/clipfrac"] / found["TF1, original"]["policy/clipfrac"] == pytest.approx(4.4, abs=0.05)
    assert found["torch"]["logprob_diff_mean"] / found["TF1, original"]["logprob_diff_mean"] == pytest.approx(1.7, 0.01)
    for column in found.values():
        # Not all of the numbers are of the same tokens' mean: these three are, to the digits that were printed.
        assert math.exp(column["logprob_diff_max"]) == pytest.approx(column["ratio_max"], rel=1e-4)
        assert math.exp(column["logprob_diff_min"]) == pytest.approx(column["ratio_min"], rel=1e-4)
        second = column["logprob_diff_var"] + column["logprob_diff_mean"] ** 2
        assert second / 2 == pytest.approx(column["policy/approxkl"], rel=0.02)


def test_an_excess_over_nothing_is_infinite():
    assert excess({"torch": {"x": 3.0}, "tensorflow": {"x": 2.0}}, "x") == 1.5
    assert excess({"torch": {"x": 3.0}, "tensorflow": {"x": 0.0}}, "x") == math.inf
    assert math.isnan(excess({"torch": {"x": 0.0}, "tensorflow": {"x": 0.0}}, "x"))


def test_only_the_formulation_of_adam_and_the_epochs_differ():
    settings: dict[str, Any] = {"policy": "/p", "reward_model": "/r", "completions": 128, "seed": 3}
    torch_config = batch_config(adam="torch", epochs=2, **settings)
    changed = batch_config(adam="tensorflow", epochs=2, **settings).model_dump()
    assert changed["trainer"]["optimizer"].pop("adam") == changed["critic"]["optimizer"].pop("adam") == "tensorflow"
    expected = torch_config.model_dump()
    assert expected["trainer"]["optimizer"].pop("adam") == expected["critic"]["optimizer"].pop("adam") == "torch"
    assert changed == expected
    assert (torch_config.trainer.optimizer.eps, torch_config.updates_per_step) == (1e-5, 2)
    assert torch_config.completions_per_step * torch_config.generator.max_new_tokens == 1536  # as many as N's
    assert torch_config.trainer.optimizer.max_grad_norm == math.inf


def test_policies_of_other_sizes_learn_from_the_same_demonstrations():
    usual = PIPELINE.config()
    for size, shape in SIZES.items():
        config = sft_spec(size).config()
        assert config.stages == ["sft"]
        assert config.prompts == usual.prompts
        assert config.sft.demonstrations == usual.sft.demonstrations
        assert config.model.hidden_size == shape["hidden_size"] != usual.model.hidden_size


def made_up(factors: dict[str, float]) -> dict[str, list[dict[str, Any]]]:
    """By size: PyTorch's numbers are so many times TensorFlow's, extremes further out accordingly."""

    def numbers(factor: float) -> dict[str, float]:
        found = dict.fromkeys(published()["torch"], 0.01 * factor)
        return found | {"ratio_min": 1 - 0.01 * factor, "logprob_diff_min": -0.01 * factor}

    def seed(factor: float, index: int) -> dict[str, Any]:
        both = {"torch": numbers(factor + 0.01 * index), "tensorflow": numbers(1.0)}
        epochs = {adam: {"1": values, "2": values} for adam, values in both.items()}
        return epochs | {"weights": {"count": 1e5, "small_share": 0.5, "median_root": 1e-5}}

    return {size: [seed(factor, index) for index in range(3)] for size, factor in factors.items()}


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ((2.0, 3.0, 5.0), [True, True, True]),
        ((1.5, 1.5, 1.5), [True, False, None]),
        ((5.0, 4.0, 3.5), [True, True, False]),
        ((0.5, 0.5, 0.5), [False, False, None]),
        ((0.5, 1.5, 1.8), [None, False, True]),
    ],
)
def test_verdicts_follow_the_rules_of_the_readme(factors, words):
    found = made_up(dict(zip(NAMES, factors, strict=True)))
    assert [verdict.holds for verdict in verdicts(found)] == words


@pytest.mark.parametrize("of_torch", [0.0, 1.0])
def test_a_factor_over_nothing_decides_nothing(of_torch):
    found = made_up(dict(zip(NAMES, (2.0, 3.0, 5.0), strict=True)))
    for adam, value in {"torch": of_torch, "tensorflow": 0.0}.items():
        for numbers in found[NAMES[-1]][0][adam].values():
            numbers["policy/approxkl"] = value
    assert verdicts(found)[-1].holds is None


def test_where_nothing_is_clipped_there_is_nothing_to_compare():
    found = made_up(dict(zip(NAMES, (2.0, 3.0, 5.0), strict=True)))
    for seed in found[NAMES[0]]:
        for adam in ("torch", "tensorflow"):
            for numbers in seed[adam].values():
                numbers["policy/clipfrac"] = 0.0
    direction = verdicts(found)[0]
    assert direction.holds
    assert "69 of 69 comparisons" in direction.found
    assert "3 more are ties" in direction.found
    assert "| `policy/clipfrac`, after two epochs | 3.9 |  | 3.01 (0.01) |" in excess_table(found)


def test_some_of_the_published_factors_are_no_verdict():
    found = made_up(dict(zip(NAMES, (2.0, 3.0, 5.0), strict=True)))
    for seed in found[NAMES[-1]]:
        for numbers in seed["torch"].values():
            numbers["policy/clipfrac"] = 1.0
    assert verdicts(found)[1].holds is None


def test_tables_and_figure():
    found = made_up(dict(zip(NAMES, (2.0, 3.0, 5.0), strict=True)))
    table = statistics_table(found)
    assert table.count("\n") == 11
    assert "| `policy/approxkl` | 0.00037 | 0.00237 | 0.00037 | 0.02010 (0.00010) | 0.01000 (0.00000) |" in table
    assert "| `policy/approxkl`, after two epochs | 6.3 | 2.01 (0.01) |" in excess_table(found)
    assert figure(found).count("<svg") == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_experiment_at_toy_size(tmp_path, monkeypatch):
    """The same batch at one epoch and at two, by both; PyTorch's Adam goes further also here."""
    small: dict[str, Any] = {
        "model": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
        "prompts": {"num_train": 200, "num_eval": 30},
        "sft": {"steps": 50, "num_demonstrations": 200},
        "preferences": {"num_prompts": 40, "held_out": 0.3},
        "reward_model": {"epochs": 1, "normalise_samples": 32},
        "eval": {"num_prompts": 10},
    }
    monkeypatch.setattr(experiment, "PIPELINE", PIPELINE.with_overrides(**small))
    original = sft_spec
    monkeypatch.setattr(
        experiment,
        "sft_spec",
        lambda size: original(size).with_overrides(**{name: small[name] for name in ("prompts", "sft", "eval")}),
    )
    monkeypatch.setattr(experiment, "SIZES", {"0.1M": SIZES["0.1M"]})
    monkeypatch.setattr(experiment, "NAMES", (experiment.MIDDLE, "0.1M"))
    monkeypatch.setattr(experiment, "SEEDS", (0,))
    monkeypatch.setattr(experiment, "COMPLETIONS", 32)
    lab = Lab(tmp_path)
    text = render("adam_epsilon", section(lab))
    assert text.count("| `ratio_min` |") == 1
    (tiny,) = experiment.measured(lab)[experiment.MIDDLE]
    for after in ("1", "2"):
        assert tiny["torch"][after]["policy/approxkl"] > tiny["tensorflow"][after]["policy/approxkl"] > 0
    assert tiny["torch"]["2"]["policy/approxkl"] > tiny["torch"]["1"]["policy/approxkl"]
    assert 0 < tiny["weights"]["small_share"] < 1
