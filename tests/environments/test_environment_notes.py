"""The sentences that the environments' node shows to people, by a node with real agents in this process."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drive import GENEROUS_S
from episode_world import prompt
from hosted_agents import fail, run_light
from ports import Port, start

from slipstream.core.recipes import resolve
from slipstream.core.service_messages import Noted
from slipstream.core.turn_messages import Observation, TurnSampled
from slipstream.core.types import EpisodeRecord, Segment, VersionSpan
from slipstream.environments.executor import Environments
from slipstream.environments.given import with_given_environment
from slipstream.models.tokenizer import CharTokenizer

CONFIG = {"recipe": "t", "steps": 1, "model": {"max_positions": 1024}, "prompts": {"tasks": [{"name": "chain_sum"}]}}


def played(
    run_dir: Path, row: dict[str, Any], *, terms: list[Any] | None = None, **environment: Any
) -> tuple[EpisodeRecord, list[str]]:
    """Let `run_light` play one episode, whose turns are all "7"; return its record and the notes."""
    changes = {"generator": {"max_new_tokens": 16}, "rewards": {"terms": terms or []}, "environment": environment}
    config, given = with_given_environment(resolve(CONFIG, changes), agent=run_light)
    executor = Environments(config=config, given=given)
    try:
        ports = start(executor, run_dir, name="environments")
        ports["turns"].put(TurnSampled(ordinal=0, sample=0, replica=0, turn=0, prompt=prompt(0, **row)))
        end_s = time.monotonic() + GENEROUS_S
        while (record := _sampled(ports)) is None:
            assert time.monotonic() < end_s, "hangs"
            if not executor.step():
                select.select(executor.wait_fds(), [], [], 1.0)
    finally:
        executor.close()
    return record, [message.text for message in ports["events"].messages if isinstance(message, Noted)]


def _sampled(ports: dict[str, Port]) -> EpisodeRecord | None:
    """Sample what was asked for; return the episode's record where it is over."""
    while (told := ports["observations"].get_nowait()) is not None:
        assert isinstance(told, Observation)
        if told.record is not None:
            return told.record
        segment = Segment(
            tokens=np.array(CharTokenizer().encode("7"), dtype=np.int32),
            behaviour_logprobs=np.zeros(1, dtype=np.float32),
            version_spans=(VersionSpan(start=0, version=0),),
        )
        ports["turns"].put(
            TurnSampled(
                ordinal=0,
                sample=0,
                replica=0,
                turn=told.turn + 1,
                life=told.life,
                segment=segment,
                finish_reason="stop",
                branch=told.branch,
            )
        )
    return None


def test_an_agent_that_raises_behind_a_limit_is_shown_with_the_limit(tmp_path: Path) -> None:
    record, notes = played(tmp_path, {"do": "talk", "text": "1", "turns": 2}, max_turns=1)
    assert (record.is_cut, record.failure, record.reward) == (True, None, None)
    [note] = notes
    assert "was refused a turn by environment.max_turns" in note
    assert "AssertionError" in note
    assert "begins again" not in note


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_an_episode_is_said_to_begin_again_where_it_does(tmp_path: Path, max_restarts: int) -> None:
    record, notes = played(tmp_path, {"do": "fail", "text": "no"}, max_restarts=max_restarts)
    reason = f"ValueError: no (hosted_agents.py, line {fail.__code__.co_firstlineno + 3})"
    assert record.failure == f"environment: {reason}"
    assert notes == [f"an environment failed, and its episode begins again: {reason}"] * max_restarts


@pytest.mark.parametrize("terms", [[{"function": "task"}], []])
def test_with_a_fork_it_is_said_what_rewards_read(tmp_path: Path, terms: list[Any]) -> None:
    record, notes = played(tmp_path, {"do": "parallel", "count": 2}, terms=terms)
    assert (record.reward, len(record.branches)) == (14.0, 1)
    [note] = notes
    assert "it is a fork" in note
    assert ("read the first branch only" in note) == bool(terms)
