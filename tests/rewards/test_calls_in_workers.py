"""What a worker calls: whole groups, functions that are named when they are slow, a network where it is allowed."""

from __future__ import annotations

import http.server
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from covering import with_slow
from reward_jobs import GENEROUS_S, HERE, job, run_jobs

from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ConfigError
from slipstream.core.sections import RewardsConfig, RewardTerm
from slipstream.core.types import Completion, Prompt, Segment
from slipstream.rewards.assembly import Assembly
from slipstream.rewards.checks import check_rewards, isolation_report, setup_of
from slipstream.rewards.pool import ScoringPool
from slipstream.rewards.protocol import RewardGroupJob
from slipstream.rewards.scorers import Scorers

RANKS = RewardTerm(function=f"{HERE / 'group_rewards.py'}:ranks", per="group")
HANGS = RewardTerm(function=f"{HERE / 'group_rewards.py'}:hangs")
MATCH = RewardTerm(function="exact_match")


def pool_of(*terms: RewardTerm, clock: Any = None, **fields: Any) -> ScoringPool:
    config = RewardsConfig(terms=list(terms), **{"timeout_s": 120.0, "memory_mb": 512} | fields)
    pool = ScoringPool(setup_of(config, {}), num_workers=1, clock=clock)
    pool.wait_ready()
    return pool


def group(job_id: int, *texts: str) -> RewardGroupJob:
    return RewardGroupJob(job_id, [job(0, text, answer="a") for text in texts])


def test_a_group_is_scored_by_one_call_and_fails_as_a_whole() -> None:
    with closing(pool_of(MATCH, RANKS)) as pool:
        questions = [
            group(0, "b", "", "a"),
            group(1, "b", "raise", "a"),
            group(2, "die", "a"),
            group(3, "x", "y"),
            job(4, "a", answer="a"),
        ]
        done = run_jobs(pool, questions)
    assert done[0].parts == [2.0, None, 1.0]
    assert done[1].failure == "ranks: ValueError: not this group (group_rewards.py, line 16)"
    assert (done[2].failure or "").startswith("ranks: worker died")
    assert done[3].parts == [0.0, 1.0]
    assert done[4].parts == [1.0]  # terms of completions alone


def wait_for(pool: ScoringPool, is_so: Callable[[], bool]) -> None:
    """Poll without a result until the worker has said so."""
    end_s = time.monotonic() + GENEROUS_S
    while not is_so():
        assert time.monotonic() < end_s
        select.select(pool.fds(), [], [], 1.0)
        assert pool.poll() == []


@pytest.mark.parametrize(("question", "slow"), with_slow([("hang alone", HANGS)], [("hang", RANKS)]))
def test_who_is_slow_is_named_among_several_terms(question: str, slow: RewardTerm) -> None:
    """The clock is moved when the worker has said what it has come to."""
    clock, name = VirtualClock(), slow.function.rpartition(":")[2]
    with closing(pool_of(MATCH, HANGS, RANKS, RewardTerm(function=RANKS.function, per="group"), clock=clock)) as pool:
        pool.submit(job(0, question, answer="a") if slow is HANGS else group(0, question))
        pool.poll()
        (slot,) = [slot for slot in pool._slots if slot.jobs]
        wait_for(pool, lambda: slot.term == name)
        clock.advance(120.0)
        (hung,) = pool.poll()
    assert hung.failure == f"{name}: timed out after 120 s"


class _Judge(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"0.25")

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def judge() -> Iterator[str]:
    """The address of a service on loopback."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Judge) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def asks(name: str) -> RewardTerm:
    return RewardTerm(function=f"{HERE / 'network_reward.py'}:{name}")


def test_an_error_in_a_call_over_the_network_says_that_there_is_none(judge: str) -> None:
    if not isolation_report()["network"]:
        pytest.skip("no barrier to the network holds here")
    clock = VirtualClock()
    with closing(pool_of(asks("judged"))) as pool:
        done = run_jobs(pool, [job(0, "a", url=judge), job(1, "a")])
    assert "URLError" in (done[0].failure or "")
    assert "rewards have no network: set network = true of the term, or rewards.allow_network = true" in (
        done[0].failure or ""
    )
    assert "KeyError" in (done[1].failure or "")
    assert "no network" not in (done[1].failure or "")  # it has nothing to do with it
    with closing(pool_of(asks("tries_for_ever"), clock=clock)) as pool:
        pool.submit(job(0, "a", url=judge))
        pool.poll()
        (slot,) = [slot for slot in pool._slots if slot.jobs]
        wait_for(pool, lambda: slot.has_tried_network)
        clock.advance(120.0)
        (hung,) = pool.poll()
    assert "timed out" in (hung.failure or "")
    assert "rewards have no network" in (hung.failure or "")


def test_workers_of_trusted_functions_may_have_the_network_and_variables(
    judge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "0.5")
    with closing(pool_of(asks("judged"), asks("keyed"), allow_network=True, environment=["JUDGE_KEY"])) as pool:
        assert "network" not in pool.isolation
        held = {name for name, holds in isolation_report().items() if holds and name != "network"}
        assert held <= pool.isolation, "all other barriers hold"
        assert run_jobs(pool, [job(0, "a", url=judge)])[0].parts == [0.25, 0.5]
    with closing(pool_of(asks("keyed"))) as pool:
        assert "KeyError: 'JUDGE_KEY'" in (run_jobs(pool, [job(0, "a")])[0].failure or "")


def test_a_client_keeps_its_connections_from_call_to_call(judge: str) -> None:
    with closing(pool_of(asks("judged_over_one_connection"), allow_network=True)) as pool:
        done = run_jobs(pool, [job(number, "a", url=judge) for number in range(4)])
    assert [done[number].failure for number in range(4)] == [None] * 4
    assert [done[number].parts for number in range(4)] == [[0.25]] * 4


def test_verifiers_that_evaluate_text_get_no_network() -> None:
    config = RewardsConfig(terms=[RewardTerm(function="math"), asks("judged")], allow_network=True)
    with pytest.raises(ConfigError, match="'math' evaluates model text") as caught:
        check_rewards(config, {})
    assert "rewards.allow_network = false, or rewards.trust_verifier = true" in str(caught.value)
    check_rewards(config.model_copy(update={"trust_verifier": True}), {})


def test_a_term_alone_may_have_the_network(judge: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In workers of its own, whose other barriers hold; beside it, a verifier that evaluates text is not refused."""
    if not isolation_report()["network"]:
        pytest.skip("no barrier to the network holds here")
    alone = [asks("judged").model_copy(update={"network": True}), asks("judged"), RewardTerm(function="math")]
    config = RewardsConfig(terms=alone, timeout_s=120.0)
    check_rewards(config, {})
    config = RewardsConfig(terms=alone[:2], timeout_s=120.0)  # what the verifier imports takes longer than the rest
    prompt = Prompt(
        prompt_id="0", text="q", tokens=np.arange(3, dtype=np.int32), task="", answer="1", columns={"url": judge}
    )
    scorers = Scorers(config, {}, {})
    try:
        assembly = Assembly(scorers.where)
        made_up = Completion(
            ordinal=0, sample=0, prompt=prompt, segments=(Segment(tokens=np.arange(2, dtype=np.int32)),),
            text="\\boxed{1}", finish_reason="stop",
        )  # fmt: skip
        calls = assembly.add(made_up)
        assert sorted(call.where[0] for call in calls) == ["network", "workers"]
        for call in calls:
            scorers.submit(call)
        answers: dict[str, Any] = {}
        end_s = time.monotonic() + 60
        while len(answers) < 2:
            assert time.monotonic() < end_s
            select.select(scorers.fds(), [], [], 0.2)
            answers |= {call.where[0]: one for one in scorers.poll() for call in calls if call.job_id == one.job_id}
        held = {name for name, holds in isolation_report().items() if holds}
        pools = scorers._pools
        assert held <= pools["workers"].isolation
        assert held - pools["network"].isolation == {"network"}
    finally:
        scorers.close()
    assert answers["network"].parts == [0.25]
    assert "rewards have no network" in answers["workers"].failure


def test_no_verifier_that_evaluates_text_gets_the_network_by_its_term() -> None:
    config = RewardsConfig(terms=[RewardTerm(function="math", network=True)])
    with pytest.raises(ConfigError, match="'math' evaluates model text"):
        check_rewards(config, {})


@pytest.mark.parametrize("name", ["", "A=B"])
def test_names_of_variables_are_names(name: str) -> None:
    with pytest.raises(ValueError, match="no environment variable has such a name"):
        RewardsConfig(environment=[name])


def test_a_built_in_scores_no_groups() -> None:
    with pytest.raises(ConfigError, match="'length' scores each completion by itself"):
        setup_of(RewardsConfig(terms=[RewardTerm(function="length", per="group")]), {})
