"""A generator's replica in pipeline stages, alone and beside tensor parallelism: its ranks do the same, whatever
reaches each when; every token is of the version that it says; it ends as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import replica_jobs as jobs
from covering import with_slow
from rank_pool import RankPool
from stage_jobs import reread
from test_replica import BETWEEN, IN_FLIGHT, assert_one_replica, evaluation, logprobs, said

from slipstream.core.channel import make_transport_dir
from slipstream.generator.requests import Request


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


@pytest.mark.parametrize("together", with_slow([2], [1]))
def test_every_completion_is_of_the_versions_that_it_says(
    ranks: RankPool, policy: str, transport: str, together: int
) -> None:
    """Commands and versions reach each rank at a step of its own; evaluations have engines of their own."""
    generator = {"pipeline_parallel": 2, "tensor_parallel": together, "kv_on_update": "recompute", "max_new_tokens": 16}
    case = jobs.Case(
        IN_FLIGHT | {"generator": generator},
        commands=((0, jobs.admit(0, 4)), (2, jobs.admit(1)), (5, evaluation(0, 3)), (16, jobs.admit(2))),
        staged=(((9, 1), (22, None), (24, 2)), ((12, 1), (21, 2)), ((7, 1), (23, 2)), ((11, 1), (20, 2))),
        late=((), (0, 2, 0, 1), (3,), (0, 0, 4)),
    )
    by_rank = ranks.run(jobs.replica, case, policy, transport, world=2 * together)
    assert_one_replica(by_rank, case)
    assert by_rank[0].committed[-1][0] == 2
    assert max(by_rank[0].probe_errors) < 1e-4
    num_spans = []
    for (purpose, first, second), completion in by_rank[0].completions.items():
        number = first if purpose == "train" else 50 + second
        tokens, spans, *_ = said(completion)
        request = Request(ordinal=0, sample=0, prompt_tokens=jobs.prompt(number).tokens, max_new_tokens=24)
        ends = [*(start for start, _ in spans[1:]), len(tokens)]
        for (start, version), end in zip(spans, ends, strict=True):
            expected = reread(jobs.CONFIG, request, tokens, [version] * len(tokens))[start:end]
            np.testing.assert_allclose(logprobs(completion)[start:end], expected, rtol=0, atol=1e-5 * together)
        num_spans.append(len(spans))
    assert max(num_spans) > 1


def test_a_completion_is_cut_after_segment_tokens_tokens(ranks: RankPool, policy: str, transport: str) -> None:
    """More than it has where the same version does not wait, however many stages there are."""
    begun = []
    for number, (settings, segment_tokens) in enumerate([(IN_FLIGHT, None), (BETWEEN, 4)]):
        generator = {"pipeline_parallel": 2, "tensor_parallel": 1, "segment_tokens": segment_tokens}
        case = jobs.Case(
            settings | {"generator": generator},
            commands=((0, jobs.admit(0, 4)),),
            staged=(((12, 1),), ((12, 1),), (), ()),
        )
        folder = Path(transport, str(number))
        folder.mkdir(mode=0o700)
        by_rank = ranks.run(jobs.replica, case, policy, str(folder), world=2)
        assert_one_replica(by_rank, case)
        begun.append({key: said(completion)[1][1:] for key, completion in by_rank[0].completions.items()})
    at_once, cut = begun
    assert cut == {key: [(start + 4, 1)] for key, [(start, _)] in at_once.items()}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "mxfp4"])
def test_versions_of_fewer_bits_are_served_by_stages(
    ranks: RankPool, policy: str, transport: str, precision: str
) -> None:
    """To the bit as one executor does: every matrix is whole on its stage. It is told what was agreed upon, and swaps
    between the same batches, though at an earlier step (it decodes all rows in each), and again in those that follow.
    """
    generator = {"precision": precision, "pipeline_parallel": 2, "tensor_parallel": 1}
    case = jobs.Case(
        BETWEEN | {"generator": generator},
        commands=((0, jobs.admit(0, 4)), (3, evaluation(0, 2)), (20, jobs.admit(1))),
        staged=(((9, 1),), ((12, 1),), (), ()),
    )
    by_rank = ranks.run(jobs.replica, case, policy, transport, world=2)
    assert_one_replica(by_rank, case)
    [alone] = ranks.run(jobs.follow, case.on_one_rank(), policy, by_rank[0].trace, world=1)
    assert [version for version, _ in by_rank[0].committed] == [1]
    assert by_rank[0].probe_errors == pytest.approx(alone.probe_errors[:1], rel=1e-4)
    for key, completion in by_rank[0].completions.items():
        assert said(completion)[:2] == said(alone.completions[key])[:2]
        assert logprobs(completion).tobytes() == logprobs(alone.completions[key]).tobytes()


def test_a_stage_that_dies_ends_all_others(tmp_path: Path, policy: str, transport: str) -> None:
    pool = RankPool(2, tmp_path)
    try:
        (status, value), last = pool.outcomes(jobs.end, policy, transport, "dies", 2, world=2)
    finally:
        pool.close()
    assert (status, last) == ("done", ("died", None)), value
    assert value[0].startswith("RankError: 'generator-0@1' did not come to round 5")


def test_a_version_whose_probe_disagrees_ends_all_stages(ranks: RankPool, policy: str, transport: str) -> None:
    for error, _, version in ranks.run(jobs.end, policy, transport, "probe", 2, world=2):
        assert error.startswith("WeightSyncError: the probe disagrees")
        assert version == 0
