"""A run whose verifier loops, eats memory, forks, floods and writes: it goes on, and nothing leaves the worker."""

from __future__ import annotations

import itertools
import json
import re
import threading
from pathlib import Path

import pytest
from audit import audit
from processes import command_line

import slipstream
from slipstream.core.errors import SlipstreamError
from slipstream.core.run_log import read_metrics, read_rollouts

HOSTILE = """
import os, pathlib, subprocess, sys, time

def reward(prompts, completions, completion_ids, **columns):
    kind = sum(map(ord, completions[0] + prompts[0])) % 40
    if kind == 0:
        while True:
            pass
    if kind == 1:
        hoard = [0] * (8 << 30)
    if kind == 2:
        for _ in range(200):
            if os.fork() == 0:
                os.setsid()
                time.sleep(7919)
    if kind == 3:
        sys.stdout.write("x" * (100 << 20))
    if kind == 4:
        pathlib.Path(MARKER).write_text("escaped")
        return [0.5]
    if kind == 5:
        subprocess.run(["touch", MARKER], check=True)
    if kind == 6:
        os._exit(0)
    if kind == 7:
        return [float("nan")]
    if kind == 8:
        return ["very good"]
    if kind == 9:
        return [1.0] * 100_000
    if kind == 10:
        return [1e300]
    if kind == 11:
        raise ValueError("z" * 1_000_000)
    return [float(len(completions[0]) % 3)]
"""


def test_a_hostile_verifier_costs_rollouts_and_nothing_else(tiny, tmp_path):
    marker = Path.home() / f".slipstream-escaped-{tmp_path.name}"
    source = tmp_path / "hostile.py"
    source.write_text(f"MARKER = {str(marker)!r}\n{HOSTILE}")
    overrides = tiny | {
        "steps": 3,
        "groups_per_step": 2,
        "rewards": {"terms": [{"function": f"{source}:reward"}], "timeout_s": 1.0, "dry_call": False},
        "eval": {"every": 0, "num_prompts": 8, "num_slots": 8},
        "loss": {"skip_no_signal": False},
    }
    result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert result.status == "done"
    assert audit(result.out)["fates"]["trained"] == 6
    failures = [rollout.failure for rollout in read_rollouts(result.out / "rollouts.jsonl") if rollout.failure]
    assert failures, "the adversary never struck; its seed wants another look"
    assert not marker.exists()
    started = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    assert not [pid for pid in started if any(str(tmp_path) in word for word in command_line(pid))], "a worker is left"


CAUSES = {  # of the kinds above -> what the failure says
    "timed out": "a loop, or children that sleep on",
    "MemoryError": "memory",
    "worker": "death of the worker, however it came",
    "reward is": "a number that is none, or is too large",
    "ValueError": "an exception",
}


@pytest.mark.slow
def test_the_others_are_scored_meanwhile_and_the_user_is_told(tiny, tmp_path):
    """A quarter of all verdicts is an attack; a hanging one holds up its own group for its deadline, and no more."""
    source = tmp_path / "hostile.py"
    source.write_text(f"MARKER = {str(tmp_path / 'marker')!r}\n{HOSTILE}".replace("% 40", "% 48"))
    timeout_s = 2.0
    overrides = tiny | {
        "steps": 20,
        "rewards": {
            "terms": [{"function": f"{source}:reward"}],
            "timeout_s": timeout_s,
            "num_workers": 2,
            "dry_call": False,
        },
        "eval": {"every": 0, "num_prompts": 8, "num_slots": 8},
        "loss": {"skip_no_signal": False},
    }
    result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert result.status == "done"
    assert audit(result.out)["fates"]["trained"] == 80
    assert not (tmp_path / "marker").exists()
    rollouts = list(read_rollouts(result.out / "rollouts.jsonl"))
    failed = [one for one in rollouts if one.failure]
    assert len(failed) > 0.1 * len(rollouts)
    assert all(one.reward == 0.0 and one.num_tokens > 0 for one in failed)  # scored with failure_reward, not poisoned
    found = {cause for cause in CAUSES if any(cause in (one.failure or "") for one in failed)}
    assert len(found) >= 3, {one.failure for one in failed}
    assert all(len(one.failure or "") <= 2000 for one in failed)
    # While one worker hangs the other scores, unless nothing is left to be scored but what hangs.
    hung = [one for one in failed if "timed out" in one.failure]
    times_s = [one.scored_s for one in rollouts]
    accompanied = [one for one in hung if any(one.scored_s - timeout_s < t < one.scored_s - 0.1 for t in times_s)]
    assert len(accompanied) >= max(1, len(hung) // 4)
    metrics = read_metrics(result.out / "metrics.jsonl")
    assert max(line.get("scored_failed_frac", 0.0) for line in metrics) > 0.1
    assert any(line.get("poisoned", 0.0) for line in metrics) is False
    alarms = json.loads((result.out / "summary.json").read_text())["alarms"]
    (alarm,) = [alarm for alarm in alarms if alarm["name"] == "failed_rewards"]
    assert "could not be scored" in alarm["text"]


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_python_function_that_hangs_costs_its_deadline_eight_times(num_threads, tiny, tmp_path):
    """Its thread cannot be killed: while there are eight of them no call begins, and the run says why it ends.

    Calls that other threads are in by then may hang, too.
    """
    calls, release = itertools.count(1), threading.Event()
    called: list[int] = []

    def hangs(completions, **columns):
        call = next(calls)
        called.append(call)
        if call % 3 == 0:
            release.wait()
        return [float(call % 2)]

    overrides = tiny | {
        "steps": 3,
        "warm_start": {"steps": 0},
        "rewards": {"timeout_s": 0.5, "dry_call": False, "num_threads": num_threads},
        "eval": tiny["eval"] | {"num_prompts": 8},
        "loss": {"skip_no_signal": False},
    }
    try:
        with pytest.raises(SlipstreamError, match="every completion of a group fails") as caught:
            slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", reward=hangs, display=False)
    finally:
        release.set()
    told = re.search(r"hangs in (\d+) threads and is not called meanwhile", str(caught.value))
    assert told is not None, str(caught.value)
    assert 8 <= int(told[1]) <= 8 + num_threads - 1
    if num_threads == 1:
        assert len(called) == 24
