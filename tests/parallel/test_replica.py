"""A generator's replica on several ranks: what it generates is what one executor generates of the same, whenever what
reaches each of its ranks; it sleeps without work, and ends as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import replica_jobs as jobs
from covering import with_slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ports import NoSpans, Port
from rank_models import CONFIGS, whole_model
from rank_pool import RankPool

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.channel import make_transport_dir
from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ConfigError
from slipstream.core.executor import Context
from slipstream.core.fields import Precision
from slipstream.core.saved import prompt_crc32
from slipstream.core.sections import ModelConfig
from slipstream.core.service_messages import CompletionsFinished, Counters, Evaluate, Ready
from slipstream.core.types import Completion, Message, Segment, Swapped, VersionSpan
from slipstream.core.unfinished_messages import Partial
from slipstream.generator.lockstep import COMMANDS_AT_ONCE, LockStep
from slipstream.models.build import check_division
from slipstream.models.config import TransformerConfig
from slipstream.models.served import ServedWeights

BETWEEN: dict[str, Any] = {"weight_update": "between_batches", "max_staleness": 2}
IN_FLIGHT: dict[str, Any] = {"weight_update": "in_flight", "max_staleness": 2}
GENEROUS_S = 30.0
"""On however slow a machine; below the minute after which ranks give each other up."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("policy")
    jobs.save_policy(folder)
    return str(folder)


@pytest.fixture
def transport() -> Iterator[str]:
    folder = make_transport_dir()
    yield str(folder)
    shutil.rmtree(folder)


def run(ranks: RankPool, case: jobs.Case, policy: str, *, world: int) -> tuple[list[jobs.Outcome], jobs.Outcome]:
    """(what each rank did, what one executor does when told the same)."""
    folder = make_transport_dir()
    try:
        by_rank = ranks.run(jobs.replica, case, policy, str(folder), world=world)
    finally:
        shutil.rmtree(folder)
    [alone] = ranks.run(jobs.follow, case, policy, by_rank[0].trace, world=1)
    return by_rank, alone


def said(completion: Completion) -> tuple[Any, ...]:
    [segment] = completion.segments
    spans = [(span.start, span.version) for span in segment.version_spans]
    times = (completion.started_s, completion.finished_s)
    return segment.tokens.tolist(), spans, completion.finish_reason, completion.text, times


def logprobs(completion: Completion) -> np.ndarray:
    [segment] = completion.segments
    assert segment.behaviour_logprobs is not None
    return segment.behaviour_logprobs


def kinds(events: list[Message]) -> set[type]:
    return {type(event) for event in events}


def assert_one_replica(by_rank: list[jobs.Outcome], case: jobs.Case) -> None:
    """All ranks did the same at the same steps; only rank 0 spoke of it."""
    first, *others = by_rank
    assert len(first.completions) == case.num_completions
    for other in others:
        assert [(len(commands), *rest) for commands, *rest in other.trace] == [
            (len(commands), *rest) for commands, *rest in first.trace
        ]
        assert other.committed == first.committed
        assert other.probe_errors == first.probe_errors
        assert not other.completions
        assert kinds(other.events) == {Ready}
    assert Counters in kinds(first.events)
    swapped = [event.version for event in first.events if isinstance(event, Swapped)]
    assert swapped == [version for version, _ in first.committed]


def assert_equal_to_one(first: jobs.Outcome, alone: jobs.Outcome, *, atol: float) -> None:
    assert first.completions.keys() == alone.completions.keys()
    for key, completion in first.completions.items():
        assert said(completion) == said(alone.completions[key]), key
        np.testing.assert_allclose(logprobs(completion), logprobs(alone.completions[key]), rtol=0, atol=atol)
    assert first.committed == alone.committed


def evaluation(eval_id: int, count: int, temperature: float = 0.0) -> Evaluate:
    prompts = tuple(jobs.prompt(50 + number) for number in range(count))
    return Evaluate(eval_id=eval_id, prompts=prompts, temperature=temperature)


@pytest.mark.parametrize("world", with_slow([2], [4]))
def test_completions_are_those_of_one_executor(ranks: RankPool, policy: str, world: int) -> None:
    """Versions arrive on each rank at a step of its own, one gives way to the next, and so do commands."""
    case = jobs.Case(
        IN_FLIGHT | {"generator": {"kv_on_update": "recompute"}},
        commands=(
            (0, jobs.admit(0, 4)),
            (2, jobs.admit(1)),
            (5, evaluation(0, 3)),
            (6, jobs.admit(2)),
            (20, jobs.admit(3)),
        ),
        staged=(
            ((4, 1), (12, None), (14, 2)),
            ((7, 1), (11, 2)),
            ((2, 1), (13, 2)),
            ((6, 1), (10, 2)),
        ),
        late=((), (0, 2, 0, 1), (3,), (0, 0, 4)),
    )
    by_rank, alone = run(ranks, case, policy, world=world)
    assert_one_replica(by_rank, case)
    assert_equal_to_one(by_rank[0], alone, atol=1e-4)
    assert [version for version, _ in by_rank[0].committed][-1] == 2
    assert max(by_rank[0].probe_errors) < 1e-4
    spans = [len(said(completion)[1]) for completion in by_rank[0].completions.values()]
    assert max(spans) > 1
    told = [event for event in by_rank[0].events if isinstance(event, CompletionsFinished)]
    assert {one.ordinal for event in told for one in event.finished} == {0, 1, 2, 3}


arrivals = st.lists(st.integers(0, 30), max_size=3, unique=True).map(sorted)


@st.composite
def cases(draw: st.DrawFn) -> jobs.Case:
    messages: list[tuple[int, Message]] = []
    steps = sorted(draw(st.lists(st.integers(0, 40), min_size=1, max_size=5)))
    for ordinal, step in enumerate(steps):
        is_evaluation = draw(st.integers(0, 4)) == 0
        message = evaluation(ordinal, 2, 0.7) if is_evaluation else jobs.admit(ordinal, draw(st.integers(1, 5)))
        messages.append((step, message))
    staged = tuple(
        tuple((step, draw(st.sampled_from([None, *range(1, index + 2)]))) for index, step in enumerate(draw(arrivals)))
        for _ in range(4)
    )
    late = tuple(tuple(draw(st.lists(st.integers(0, 4), max_size=5))) for _ in range(4))
    mode = draw(
        st.sampled_from(
            [
                IN_FLIGHT,
                IN_FLIGHT | {"generator": {"kv_on_update": "recompute_if_older_than", "max_kv_age": 1}},
                BETWEEN,
                BETWEEN | {"generator": {"segment_tokens": 3}},
                IN_FLIGHT | {"generator": {"time_limit_s": 6.0}},
            ]
        )
    )
    return jobs.Case(mode, tuple(messages), staged, late, seconds_per_step=0.5)


@pytest.mark.parametrize(("world", "num_examples"), with_slow([(4, 2)], [(2, 10), (4, 10)]))
def test_whatever_arrives_when(ranks: RankPool, policy: str, world: int, num_examples: int) -> None:
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def holds(case: jobs.Case) -> None:
        by_rank, alone = run(ranks, case, policy, world=world)
        assert_one_replica(by_rank, case)
        assert_equal_to_one(by_rank[0], alone, atol=1e-4)

    holds()


def test_the_time_limit_of_a_resumed_completion_is_the_same_on_all_ranks(ranks: RankPool, policy: str) -> None:
    admitted = jobs.admit(0, 6)
    segment = Segment(
        tokens=np.arange(2, 6, dtype=np.int32),
        behaviour_logprobs=np.full(4, -1.0, np.float32),
        version_spans=(VersionSpan(0, 0),),
    )
    crc32 = prompt_crc32(admitted.prompt.tokens)
    partials = tuple(Partial(ordinal=0, sample=sample, prompt_crc32=crc32, segment=segment) for sample in range(1, 6))
    case = jobs.Case(
        IN_FLIGHT | {"generator": {"time_limit_s": 4.0}},
        commands=((3, msgspec.structs.replace(admitted, partials=partials)),),
        seconds_per_step=0.5,
    )
    by_rank, alone = run(ranks, case, policy, world=2)
    assert_one_replica(by_rank, case)
    assert_equal_to_one(by_rank[0], alone, atol=1e-4)
    resumed = [said(by_rank[0].completions["train", 0, sample]) for sample in range(1, 6)]
    assert all(tokens[:4] == [2, 3, 4, 5] for tokens, *_ in resumed)
    assert "deadline" in [finish_reason for _, _, finish_reason, *_ in resumed]


@pytest.mark.parametrize("precision", with_slow(["int8"], ["bfloat16"]))
def test_at_lower_precisions_all_ranks_do_the_same(ranks: RankPool, policy: str, precision: str) -> None:
    """And their versions are as near to the trainer's as those of one executor are."""
    case = jobs.Case(
        IN_FLIGHT | {"generator": {"precision": precision}},
        commands=((0, jobs.admit(0, 4)), (3, evaluation(0, 2)), (9, jobs.admit(1))),
        staged=(((4, 1),), ((7, 1),), (), ()),
    )
    by_rank, alone = run(ranks, case, policy, world=2)
    assert_one_replica(by_rank, case)
    assert by_rank[0].committed == alone.committed != []
    np.testing.assert_allclose(by_rank[0].probe_errors, alone.probe_errors, rtol=0.3)
    assert min(alone.probe_errors) > 1e-3  # or else this would be float32
    for key, completion in by_rank[0].completions.items():
        ours, theirs = said(completion)[0], said(alone.completions[key])[0]
        same = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
        assert same > 0
        difference = np.abs(logprobs(completion)[:same] - logprobs(alone.completions[key])[:same])
        assert difference.mean() < 0.1


TOLERANCES: dict[Precision, float] = {"float32": 1e-4, "bfloat16": 0.1, "int8": 0.1, "fp8": 0.4}


@pytest.mark.parametrize(
    ("precision", "in_place", "cases"),
    with_slow(
        [("float32", False, {"llama_tied": 2}), ("int8", True, {"gpt2_untied": 4})],
        product(TOLERANCES, [False, True], [{"llama_tied": 2, "gpt2_untied": 4}, {"qwen3": 4, "llama_biased": 2}]),
    ),
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_a_rank_serves_its_part_of_a_version(
    ranks: RankPool, precision: Precision, in_place: bool, cases: dict[str, int]
) -> None:
    """Scales of whole rows included; the tolerance is for sums whose shares are rounded on each rank."""
    assert_served(ranks, {name: (CONFIGS[name], world) for name, world in cases.items()}, precision, in_place)


@pytest.mark.parametrize("in_place", with_slow([True], [False]))
def test_a_rank_serves_whole_blocks_of_a_version(ranks: RankPool, in_place: bool) -> None:
    """With mxfp4: the numbers of one process, on ranks wide enough for them."""
    wide = {"head_dim": 32, "intermediate_size": 128}
    cases = {"llama_tied": 2, "gpt2_untied": 4}
    assert_served(ranks, {name: (replace(CONFIGS[name], **wide), n) for name, n in cases.items()}, "mxfp4", in_place)


def assert_served(
    ranks: RankPool, cases: dict[str, tuple[TransformerConfig, int]], precision: Precision, in_place: bool
) -> None:
    tolerance = TOLERANCES.get(precision, 0.1)
    text = np.random.default_rng(2).integers(2, CONFIGS["llama"].vocab_size, 40).astype(np.int32)
    for name, (config, world) in cases.items():
        expected = []
        for seed in (0, 1, 1, 0):
            model = whole_model(config, seed)
            ServedWeights(model, precision)
            expected.append(probe_logprobs(model, text))
        by_rank = ranks.run(jobs.served, config, precision, in_place, text, world=world)
        for seen in by_rank:
            assert all(is_right for is_right, _ in seen), name
            for (_, ours), (_, first), theirs in zip(seen, by_rank[0], expected, strict=True):
                assert np.array_equal(ours, first), name
                assert np.abs(ours - theirs).mean() < tolerance, name
        assert np.abs(expected[0] - expected[1]).mean() > 2 * tolerance


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "gpt2"])
def test_a_part_of_a_fresh_model_has_the_numbers_of_the_whole(ranks: RankPool, family: Any) -> None:
    config = ModelConfig(
        family=family, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=64
    )
    assert ranks.run(jobs.fresh, config, world=2) == [True, True]


# Without work, and without each other


def test_ranks_without_work_sleep_and_wake_at_once(ranks: RankPool, policy: str, transport: str) -> None:
    slept = ranks.run(jobs.sleep, policy, transport, 0.5, [None] * 2, world=2)
    for rank in slept:
        assert rank.num_rounds == 1  # the one that the command is obeyed in
        assert rank.num_steps <= 4
        assert 0 < rank.began_s - slept[0].put_s < GENEROUS_S
        assert rank.committed == []
    assert set(slept[0].tokens) == {("train", ordinal, sample) for ordinal in (0, 1) for sample in (0, 1)}


@pytest.mark.parametrize("staged_s", with_slow([[0.2, 0.4]], [[0.2, 0.4, 0.0, 0.3]]), ids=len)
def test_a_version_is_committed_without_work_once_all_have_staged_it(
    ranks: RankPool, policy: str, transport: str, staged_s: list[float | None]
) -> None:
    slept = ranks.run(jobs.sleep, policy, transport, 0.8, staged_s, world=len(staged_s))
    for rank in slept:
        assert [version for version, _ in rank.committed] == [1]
        assert rank.num_rounds <= 4  # called together once, the round after it, and the command
        assert rank.num_steps <= 16
    assert slept[0].tokens["train", 0, 0] == [(0, 0)]
    assert slept[0].tokens["train", 1, 0] == [(0, 1)]


def test_a_version_that_one_rank_does_not_stage_holds_nobody_up(ranks: RankPool, policy: str, transport: str) -> None:
    slept = ranks.run(jobs.sleep, policy, transport, 0.5, [0.1, None], world=2)
    for rank in slept:
        assert rank.committed == []
        assert rank.num_rounds == 1
        assert 0 < rank.began_s - slept[0].put_s < GENEROUS_S
    assert slept[0].tokens["train", 1, 0] == [(0, 0)]


@pytest.mark.parametrize("how", ["noise", "commands"])
def test_a_rank_that_differs_ends_all(ranks: RankPool, policy: str, transport: str, how: str) -> None:
    for error, *_ in ranks.run(jobs.end, policy, transport, how, world=2):
        assert error.startswith("RankError: the ranks that run one model no longer do the same")
        assert "'generator-0@1' differs" in error


def test_a_version_whose_probe_disagrees_ends_all_with_the_old_one_in_place(
    ranks: RankPool, policy: str, transport: str
) -> None:
    for error, _, version in ranks.run(jobs.end, policy, transport, "probe", world=2):
        assert error.startswith("WeightSyncError: the probe disagrees")
        assert version == 0


@pytest.mark.parametrize(("how", "world"), [("dies", 4), ("hangs", 2)])
def test_a_lost_rank_ends_all_others(tmp_path: Path, policy: str, transport: str, how: str, world: int) -> None:
    """By name: one that hangs within the group's timeout (here 2 s), one that dies long before that is over."""
    pool = RankPool(world, tmp_path, timeout_s=60.0 if how == "dies" else 2.0)
    try:
        outcomes = pool.outcomes(jobs.end, policy, transport, how, world=world)
    finally:
        pool.close()
    *others, (last, _) = outcomes
    assert last == ("died" if how == "dies" else "done")
    for status, value in others:
        assert status == "done", value
        error, after_s, _ = value
        assert error.startswith(f"RankError: 'generator-0@{world - 1}' did not come to round 5")
        assert after_s < GENEROUS_S


def test_no_more_commands_are_passed_on_at_once_than_a_channel_holds() -> None:
    """The others take nothing while they wait for rank 0 in a round."""
    node = Port()
    for ordinal in range(COMMANDS_AT_ONCE + 1):
        node.put(jobs.admit(ordinal))
    context = Context("generator-0", Path(), {"commands": node}, {}, NoSpans(), VirtualClock())
    together = LockStep(context)
    together.receive()
    assert len(node.messages) == 1
    [spec, *_] = jobs.channels(2)
    assert spec.capacity > 2 * COMMANDS_AT_ONCE


def test_a_model_that_cannot_be_divided_is_refused_before_a_run() -> None:
    fresh = ModelConfig(hidden_size=48, intermediate_size=64, num_heads=6, num_kv_heads=3)
    check_division(fresh, 1)
    for ranks in (2, 4):
        with pytest.raises(ConfigError, match=f"got: +{ranks} ranks for 6 heads"):
            check_division(fresh, ranks)
    check_division(fresh.model_copy(update={"path": "stage:sft"}), 2)  # not there yet
