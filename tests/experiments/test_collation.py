"""Layouts and their padding by hand and against the textbook's packing; padding changes no logprob and no gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.collation import experiment
from experiments.collation.experiment import figure, padding_table, reductions, seconds_table, section, verdicts
from experiments.collation.packing import (
    COLLATIONS,
    CONSTANT,
    DISTRIBUTIONS,
    LONGEST,
    SHORTEST,
    VARIABLE,
    Microbatch,
    draw,
    first_come,
    greedy,
    mean_paddings,
    no_packing,
    padding_of,
    reduction,
)
from experiments.collation.timing import LAYOUTS, Step, as_rectangle, filled_to, packed, sequence, step_seconds
from experiments.lab import Lab
from experiments.section import render
from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.trainer.measure import microbatch_logprobs


def test_without_packing_rows_are_padded_to_the_longest_of_their_rectangle():
    assert no_packing([100, 300, 200, 40, 500], 2 * LONGEST) == [
        Microbatch((0, 1), 600),
        Microbatch((2, 3), 400),
        Microbatch((4,), 500),
    ]
    assert [one.members for one in no_packing([100, 300], LONGEST)] == [(0,), (1,)]


def test_first_come_never_goes_back_to_a_microbatch():
    assert first_come([600, 500, 100, 424, 1, 1024], 1024) == [
        Microbatch((0,), 1024),
        Microbatch((1, 2, 3), 1024),  # 500 + 100 + 424: full to the last token
        Microbatch((4,), 1024),
        Microbatch((5,), 1024),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_greedy_is_first_fit_decreasing(seed):
    """Johnson's, over lengths alone: how full each bin gets does not hang on which of two equal sequences is in it."""
    lengths = draw("uniform, 16 to 512", 50, np.random.default_rng(seed))
    bins: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((index for index, used in enumerate(bins) if used + length <= 1024), len(bins))
        bins[place : place + 1] = [(bins[place] if place < len(bins) else 0) + length]
    found = greedy(lengths, 1024)
    assert [sum(lengths[index] for index in one.members) for one in found] == bins
    assert sorted(index for one in found for index in one.members) == list(range(50))


@pytest.mark.parametrize("collation", COLLATIONS)
def test_padding_by_hand(collation):
    """Two workers get 512 + 16 and 512: one waits for the other, and both for the rest of their slots."""
    alone = padding_of([512, 16], 1024, collation=collation, workers=1)
    assert alone.padding == pytest.approx(1 - 528 / 1024)
    assert alone.imbalance == 0.0
    dealt = padding_of([512, 512, 16], 1024, collation=collation, workers=2)
    slots = {"no packing": (1024, 512)}.get(collation, (1024, 1024))
    assert dealt.padding == pytest.approx(1 - 1040 / 2048)
    assert dealt.imbalance == pytest.approx(1 - sum(slots) / 2048)


def test_shares_by_length_are_never_worse_here():
    lengths = [512, 16, 512, 16]
    preset = padding_of(lengths, 512, collation="greedy", workers=2)
    balanced = padding_of(lengths, 512, collation="greedy", workers=2, deal="balanced")
    assert preset.imbalance == pytest.approx(1 - (2 + 1) / 4)  # 512 + 512 against 16 + 16
    assert balanced.imbalance == 0.0


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_lengths_stay_inside_their_bounds(distribution):
    lengths = draw(distribution, 2000, np.random.default_rng(0))
    assert SHORTEST <= min(lengths) <= max(lengths) <= LONGEST
    assert (len(set(lengths)) == 1) == (distribution == CONSTANT)


def test_distributions_are_the_ones_of_the_readme():
    means = {name: np.mean(draw(name, 20_000, np.random.default_rng(1))) for name in DISTRIBUTIONS}
    assert means["uniform, 16 to 512"] == pytest.approx(264, rel=0.02)
    assert means["two kinds: 3/4 near 64, 1/4 at 512"] == pytest.approx(0.75 * 64 + 0.25 * 512, rel=0.02)
    medians = {name: np.median(draw(name, 20_000, np.random.default_rng(1))) for name in DISTRIBUTIONS}
    assert medians["geometric, mean 128"] == pytest.approx(128 * np.log(2), rel=0.03)
    assert medians["lognormal, median 128, sigma 0.6"] == pytest.approx(128, rel=0.03)
    assert medians["long tail: lognormal, median 64, sigma 1.2"] == pytest.approx(64, rel=0.04)


def test_a_reduction_counts_padding_tokens():
    """100 tokens in 200 slots, then in 125: 100 padding tokens become 25."""
    assert reduction(0.5, 0.2) == pytest.approx(0.75)
    assert reduction(0.0, 0.0) == 0.0


def test_a_measurement_is_the_mean_over_minibatches_of_padding():
    found = mean_paddings(capacity=1024, workers=2, completions_per_worker=6, seeds=[3, 4], minibatches=3)
    assert set(found) == set(DISTRIBUTIONS)
    rng = np.random.default_rng(4)
    each = []
    for _ in range(3):
        lengths = draw(VARIABLE[0], 12, rng)
        slots = max(1024 * len(first_come(lengths[rank::2], 1024)) for rank in range(2))
        each.append(1 - sum(lengths) / (2 * slots))
    assert found[VARIABLE[0]]["first-come"][1]["padding"] == pytest.approx(np.mean(each))
    assert found[CONSTANT]["no packing"][0]["padding"] == 0.0


# Layouts that are really computed


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(0)
    return [sequence(index, length, rng) for index, length in enumerate([40, 17, 29, 40, 22])]


def test_padding_changes_no_logprob_and_no_gradient(sequences):
    step = Step(hidden_size=16, num_layers=1, capacity=2 * LONGEST)
    plain = packed(sequences)
    grads, rows = [], []
    for microbatch in (plain, as_rectangle(plain), filled_to(plain, 700)):
        rows.append(microbatch.num_tokens)
        logprobs, _ = microbatch_logprobs(step.model, microbatch, temperature=1.0)
        for segment, (index, _) in enumerate(microbatch.keys):
            expected = probe_logprobs(step.model, sequences[index].tokens)[sequences[index].mask[1:]]
            own = logprobs.detach().numpy()[microbatch.segment_ids == segment]
            np.testing.assert_allclose(own, expected, atol=1e-5)
        step.optimizer.zero_grad()
        torch.autograd.backward((logprobs * torch.from_numpy(microbatch.advantages)).sum())
        grads.append(step.flat.grad.clone())
    assert rows == [148, 5 * 40, 700]
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0], atol=1e-4, rtol=1e-3)


def test_every_layout_trains_each_sequence_once(sequences):
    lengths = [one.num_inputs for one in sequences]
    assert lengths == [40, 17, 29, 40, 22]
    for name, layout in LAYOUTS.items():
        microbatches = layout(sequences, lengths, 64)
        assert sorted(key for one in microbatches for key in one.keys) == [(index, 0) for index in range(5)], name
        if name.endswith("filled"):
            assert {one.num_tokens for one in microbatches} == {64}
    ours = [{index for index, _ in one.keys} for one in LAYOUTS["greedy"](sequences, lengths, 64)]
    assert ours == [set(one.members) for one in greedy(lengths, 64)]


# What is said


def made_up(first_come_padding: float, greedy_padding: float, imbalance: float = 0.0):
    def seeds(padding):
        return [{"padding": padding + 0.001 * seed, "imbalance": imbalance} for seed in range(3)]

    ways = {"no packing": 0.5, "first-come": first_come_padding, "greedy": greedy_padding, "greedy, balanced": 0.01}
    return {name: {way: seeds(padding) for way, padding in ways.items()} for name in DISTRIBUTIONS}


def made_up_seconds(greedy_seconds: float = 1.0):
    seconds = {layout: [2.0, 2.1] for layout in LAYOUTS} | {"greedy, filled": [greedy_seconds, greedy_seconds]}
    return dict.fromkeys(DISTRIBUTIONS, seconds)


def words(paddings, seconds):
    return [verdict.holds for verdict in verdicts(paddings, seconds)]


def test_verdicts_follow_the_rules_of_the_readme():
    good = {1: made_up(0.2, 0.1), 8: made_up(0.3, 0.1)}
    assert words(good, made_up_seconds()) == [True, True, True, True]
    little = {1: made_up(0.2, 0.19), 8: made_up(0.2, 0.19)}
    assert words(little, made_up_seconds())[:2] == [True, False]
    assert words({1: little[1], 8: good[8]}, made_up_seconds())[1] is None
    assert words({1: made_up(0.1, 0.2), 8: good[8]}, made_up_seconds())[0] is False
    assert words({1: good[1], 8: made_up(0.3, 0.1, imbalance=0.06)}, made_up_seconds())[2] is False
    assert words(good, made_up_seconds(2.05))[3] is False  # faster than the slower half only
    mixed = dict(made_up_seconds())
    mixed[VARIABLE[0]] = mixed[VARIABLE[0]] | {"greedy, filled": [3.0, 3.0]}
    assert words(good, mixed)[3] is None
    assert "10% to 20%" in verdicts(good, made_up_seconds())[1].found
    assert reductions(good[1])[VARIABLE[0]][0] == pytest.approx(1 - (0.1 / 0.9) / (0.2 / 0.8))


def test_tables_and_figure_have_a_row_for_each_distribution():
    paddings = made_up(0.2, 0.1)
    table = padding_table(paddings, balanced=True)
    assert all(f"| {name} | 0.501 (0.001) | 0.201 (0.001) |" in table for name in DISTRIBUTIONS)
    assert f"| {CONSTANT} | 2.05 (0.05) |" in seconds_table(made_up_seconds())
    assert figure({1: paddings, 8: paddings}, {512: paddings, 1024: paddings}).count("<svg") == 1


@pytest.mark.slow
def test_the_whole_experiment_at_toy_size(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "COMPLETIONS", 6)
    monkeypatch.setattr(experiment, "WORKERS", {1: 2, 2: 2})
    monkeypatch.setattr(experiment, "SEEDS", (0, 1))
    monkeypatch.setattr(experiment, "TIMED", {"hidden_size": 16, "num_layers": 1, "repeats": 1, "seed": 0})
    text = render("collation", section(Lab(tmp_path)))
    assert text.count("Greedy collation reduces padding by 19%.") == 1
    assert "seed=" not in text


def test_times_are_taken_of_every_layout():
    found = step_seconds(
        distributions=[CONSTANT], capacity=1024, completions=3, hidden_size=16, num_layers=1, repeats=1, seed=0
    )
    assert found.keys() == {CONSTANT}
    assert found[CONSTANT].keys() == LAYOUTS.keys()
    assert all(seconds > 0 for (seconds,) in found[CONSTANT].values())
