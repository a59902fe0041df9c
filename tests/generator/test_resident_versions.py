"""Versions of adapters side by side: each row decodes with the one it began with, and has the bits it has alone."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from covering import with_slow
from drawn import drawn
from engine_kit import (
    STOP,
    adapted_model,
    adapters_of_version,
    assert_same_bits,
    drain,
    new_engine,
    random_prompt,
    requests,
    run,
    take_version,
)
from episode_kit import Script, check_turn
from hypothesis import strategies as st

from slipstream.core.lora_section import AdapterPrecision
from slipstream.core.types import VersionSpan
from slipstream.generator.engine import Engine
from slipstream.generator.requests import Finished, Request, Session
from slipstream.models.served import ServedWeights
from slipstream.models.transformer import Transformer

Key = tuple[int, int]


def engine_with_versions(
    rank: int = 4, precision: AdapterPrecision = "float32", *, is_mixture: bool = False, **options: object
) -> tuple[Engine, ServedWeights]:
    model = adapted_model(rank, precision=precision, is_mixture=is_mixture)
    weights = ServedWeights(model, "float32")
    engine = new_engine(model, residents=weights, **options)
    take_version(engine, weights, 1)
    return engine, weights


def model_of(
    version: int, rank: int = 4, precision: AdapterPrecision = "float32", *, is_mixture: bool = False
) -> Transformer:
    model = adapted_model(rank, precision=precision, is_mixture=is_mixture)
    weights = ServedWeights(model, "float32")
    weights.rebind(adapters_of_version(weights, version))
    return model


@pytest.mark.parametrize(
    ("rank", "precision", "is_mixture"),
    with_slow(
        [(24, "bfloat16", False), (4, "float32", True)],
        [(4, "float32", False), (24, "float32", False), (4, "bfloat16", False), (3, "bfloat16", True)],
    ),
)
def test_rows_of_three_versions_have_the_bits_of_engines_of_one(
    rank: int, precision: AdapterPrecision, is_mixture: bool
) -> None:
    engine, weights = engine_with_versions(rank, precision, is_mixture=is_mixture, stop_token_ids=[])
    batch = requests(6, 2, max_new_tokens=7)  # in groups, whose prompts are prefilled once
    finished: dict[Key, Finished] = {}
    for version in (1, 2, 3):
        if version > 1:
            take_version(engine, weights, version)
        engine.submit(batch[4 * version - 4 : 4 * version])
        for _ in range(2):
            assert engine.step() == []
        assert sorted(weights.versions) == sorted(engine.versions_in_use) == list(range(1, version + 1))
    finished = drain(engine)
    assert list(weights.versions) == [3], "nothing goes on with the others"
    texts = defaultdict(set)
    models = {version: model_of(version, rank, precision, is_mixture=is_mixture) for version in (1, 2, 3)}
    for version in (1, 2, 3):
        part = batch[4 * version - 4 : 4 * version]
        alone = run(new_engine(models[version], stop_token_ids=[]), part)
        for key, expected in alone.items():
            assert_same_bits(finished[key], expected)
            assert finished[key].version_spans == (VersionSpan(start=0, version=version),)
    begun = {version: replace(batch[4 * version - 4], max_new_tokens=5) for version in (1, 2, 3)}
    for model in models.values():
        said = run(new_engine(model), list(begun.values()))
        for version, one in begun.items():
            texts[version].add(said[one.ordinal, 0].tokens.tobytes())
    assert all(len(found) == 3 for found in texts.values()), "versions say different things"


@pytest.mark.parametrize("parks", [False, True], ids=["completions", "first turns"])
def test_keys_of_a_prompt_are_of_the_version_of_its_rows(parks: bool) -> None:
    """Those that wait when a version comes: completions begin under it, turns under that of when they were asked for.

    All have one prompt, which is prefilled once for each version, although both are waited for at once.
    """
    engine, weights = engine_with_versions(num_slots=2, stop_token_ids=[], prefix_cache_tokens=64)
    batch = [Request(0, sample, random_prompt(20), max_new_tokens=3, parks=parks) for sample in range(6)]
    engine.submit(batch[:4])
    assert engine.step() == []
    take_version(engine, weights, 2)
    engine.submit(batch[4:])
    finished = drain(engine)
    assert engine.stats.prefilled_tokens == 2 * 19
    num_older = 4 if parks else 2
    for version, part in ((1, batch[:num_older]), (2, batch[num_older:])):
        for key, expected in run(new_engine(model_of(version), stop_token_ids=[]), part).items():
            assert_same_bits(finished[key], expected)
            assert finished[key].version_spans == (VersionSpan(start=0, version=version),)


BATCH = requests(4, 2, max_new_tokens=7)
MOST_VERSIONS = 5


@functools.cache
def alone(version: int) -> dict[Key, Finished]:
    return run(new_engine(model_of(version)), BATCH)


@drawn(
    3,
    50,
    actions=st.lists(
        st.tuples(st.sampled_from(["step", "step", "submit", "swap", "preempt", "move"]), st.integers(1, 4)),
        max_size=30,
    ),
    num_slots=st.integers(1, 9),
    prefill_tokens=st.sampled_from([1, 16, 64]),
)
def test_any_order_of_admissions_and_swaps(actions: list[tuple[str, int]], num_slots: int, prefill_tokens: int) -> None:
    """Every completion is of one version, which was there between its submission and its end, and says what it says.

    Also when it leaves its row, or the engine, and comes back. No version is held for nothing.
    """
    engine, weights = engine_with_versions(num_slots=num_slots, prefill_tokens=prefill_tokens, prefix_cache_tokens=30)
    waiting, finished = list(BATCH), list[Finished]()
    submitted: dict[Key, int] = {}

    def submit(count: int) -> None:
        for request in waiting[:count]:
            submitted[request.ordinal, request.sample] = engine.version
        engine.submit(waiting[:count])
        del waiting[:count]

    def step() -> None:
        for one in engine.step():
            finished.append(one)
            (span,) = one.version_spans
            assert span.start == 0
            assert submitted[one.ordinal, one.sample] <= span.version <= engine.version
        assert set(weights.versions) >= engine.versions_in_use | {engine.version}

    for action, number in actions:
        match action:
            case "step":
                for _ in range(number):
                    step()
            case "submit":
                submit(number)
            case "swap" if engine.version < MOST_VERSIONS:
                take_version(engine, weights, engine.version + 1)
                assert set(weights.versions) == engine.versions_in_use | {engine.version}
            case "preempt":
                engine.preempt(number)
            case "move":
                engine.submit(engine.export_live())
    submit(len(waiting))
    while not engine.is_idle:
        step()
    assert len(finished) == len(BATCH)
    for one in finished:
        expected = alone(one.version_spans[0].version)[one.ordinal, one.sample]
        assert np.array_equal(one.tokens, expected.tokens)
        assert np.abs(one.logprobs - expected.logprobs).max() < 1e-5
        if not {"preempt", "move"} & {action for action, _ in actions}:
            assert_same_bits(one, expected)


def turns_of(engine: Engine, weights: ServedWeights, scripts: list[Script]) -> tuple[dict[int, list[Finished]], int]:
    """All scripts, one more begun every other step, with a new version every 5 steps; how many turns were older."""
    turns: dict[int, list[Finished]] = {script.ordinal: [] for script in scripts}
    waiting, begun = [replace(script.request([]), parks=True) for script in scripts], 0
    due: list[Request] = []
    num_late = 0
    for count in range(400):
        if count % 2 == 0 and begun < len(waiting):
            engine.submit([waiting[begun]])
            begun += 1
        if count % 5 == 4 and engine.version < MOST_VERSIONS:
            take_version(engine, weights, engine.version + 1)
        engine.submit(due)
        due = []
        for finished in engine.step():
            said, script = turns[finished.ordinal], scripts[finished.ordinal]
            said.append(finished)
            num_late += finished.version_spans[0].version < engine.version
            if len(said) <= len(script.observations):
                due.append(replace(script.request(said), parks=True, goes_on=True))
            else:
                engine.release(Session(0, script.ordinal, 0))
        if begun == len(waiting) and engine.is_idle and not due:
            return turns, num_late
    raise AssertionError("episodes do not end")


@pytest.mark.parametrize("parked_tokens", with_slow([25], [None, 0]))
def test_an_episode_keeps_the_version_of_its_first_turn(parked_tokens: int | None) -> None:
    """Its later turns and its parked keys too, however many versions have come since."""
    engine, weights = engine_with_versions(num_slots=3, stop_token_ids=[STOP], parked_tokens=parked_tokens)
    scripts = [Script(i, 4 + 3 * i, (0, 5, 1)[: 1 + i % 3], max_new_tokens=6) for i in range(6)]
    turns, num_late = turns_of(engine, weights, scripts)
    assert num_late > 5
    versions = {o: {span.version for turn in said for span in turn.version_spans} for o, said in turns.items()}
    assert all(len(found) == 1 for found in versions.values()), versions
    assert len(set.union(*versions.values())) > 2
    assert engine.versions_in_use == set()
    models = {version: model_of(version) for found in versions.values() for version in found}
    num_sure = 0
    for ordinal, said in turns.items():
        assert len(said) == len(scripts[ordinal].observations) + 1
        for turn in said:
            num_sure += check_turn(models[next(iter(versions[ordinal]))], turn, seed=7)
    assert num_sure > 50
    assert (engine.stats.parked_hit_tokens > 0) == (parked_tokens != 0)
