"""Accounting against runs whose every second is made up, and so known."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from accounted import check_accounting
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from written import began, event

from slipstream.core.background import background_cpu_s, start_thread
from slipstream.core.clock import VirtualClock, WallClock
from slipstream.core.jsonl import JsonlWriter
from slipstream.observe.accounting import RunAccounting, read_accounting
from slipstream.observe.balance import Dials, Loop, Side, judge, whole_split
from slipstream.observe.states import STATES, TRAINS, idle_share, in_words, kind, model_share, waited_for
from slipstream.observe.timeline import (
    TRAINED,
    CpuSoFar,
    ProcessEnd,
    ProcessStart,
    Slice,
    Timeline,
    account,
    read_timeline,
    timeline_path,
)
from slipstream.observe.waste import WASTE

START_S = 100.0
SWAPPED = event("Swapped")


class Process:
    """Writes the timeline of a process that does one thing after the other, beginning at START_S."""

    def __init__(self, run_dir: Path, name: str, *, at_s: float = START_S, **settings: Any) -> None:
        self.clock = VirtualClock(at_s)
        self.timeline = Timeline(name, timeline_path(run_dir, name), self.clock, **settings)

    def does(self, state: str, seconds: float, *, count: int = 0, units: int = 0, **args: Any) -> None:
        with self.timeline.span(state, **args):
            self.clock.advance(seconds)
            for piece in range(count):
                self.timeline.did(units // count + (piece < units % count))

    def trained(self, step: int) -> None:
        self.timeline.instant(TRAINED, step=step)


class Decisions:
    """`events.jsonl`, written by hand."""

    def __init__(self, run_dir: Path) -> None:
        self.path, self.lines = run_dir / "events.jsonl", []

    def add(self, at_s: float, event: dict[str, Any], *commands: dict[str, Any]) -> None:
        self.lines.append({"seq": len(self.lines), "time_s": START_S + at_s, "event": event, "commands": commands})
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))


def start(ordinal: int) -> dict[str, Any]:
    return {"type": "StartGroup", "ordinal": ordinal, "replica": 0}


def finished(ordinal: int, sample: int, num_tokens: int, num_restored: int = 0) -> dict[str, Any]:
    return event("CompletionFinished", ordinal=ordinal, sample=sample, num_tokens=num_tokens, num_restored=num_restored)


def done(step: int) -> dict[str, Any]:
    return event("StepDone", step=step, version=step + 1)


def configure(run_dir: Path, text: str = "") -> None:
    tasks = '[[prompts.tasks]]\nname = "chain_sum"\n'
    (run_dir / "config.toml").write_text(f"{text}{tasks}")


def make_run(
    run_dir: Path,
    trainer: Iterable[tuple[str, float]],
    generator: Iterable[tuple[str, float]],
    rewards: Iterable[tuple[str, float]] = (),
    environments: Iterable[tuple[str, float]] | None = None,
    *,
    num_steps: int = 10,
    threads: tuple[int, int] = (1, 1),
    config: str = "",
    inline: tuple[str, ...] = (),
    **settings: Any,
) -> RunAccounting:
    """A run of `num_steps` equal steps: what each process does in one of them, behind two seconds of start-up."""
    configure(run_dir, config)
    decisions = Decisions(run_dir)
    decisions.add(2.0, SWAPPED, start(0))
    did = {"trainer": trainer, "generator-0": generator, "rewards": rewards}
    did |= {} if environments is None else {"environments": environments}
    for (name, states), num_threads in zip(did.items(), (*threads, 1, 1), strict=False):
        within = {"within": "controller"} if name in inline else {}
        process = Process(run_dir, name, threads=num_threads, **settings, **within)
        process.does("start_up", 2.0)
        for step in range(num_steps):
            for state, seconds in states:
                process.does(state, seconds, **({"step": step} if state in TRAINS else {}))
            if name == "trainer":
                process.trained(step)
        process.does("shut_down", 0.5)
        process.timeline.close()
    return read_accounting(run_dir)


# Verdicts


def test_where_generation_is_the_bottleneck_the_trainer_starves(tmp_path: Path):
    found = make_run(
        tmp_path,
        trainer=[("wait_generation", 0.7), ("collate", 0.05), ("forward_backward", 0.2), ("optimizer", 0.05)],
        generator=[("decode", 0.97), ("wait_trainer", 0.03)],
        threads=(2, 2),
    )
    assert found.loop == pytest.approx((2.0, 12.0))
    assert found.idle == pytest.approx({"trainer": 0.7, "generator": 0.03, "rewards": 0.0})
    balance = found.balance
    assert (balance.starves, balance.bottleneck) == ("trainer", "generation")
    # T_t = 0.3 s x 2 threads, T_g = 0.97 s x 2 threads: T_t / theta = T_g / (1 - theta)
    theta = 0.6 / (0.6 + 1.94)
    assert balance.split is not None
    assert balance.split.balanced == pytest.approx({"trainer": 4 * theta, "generator": 4 * (1 - theta)})
    assert (balance.split.now, balance.split.whole) == ({"trainer": 2, "generator": 2}, {"trainer": 1, "generator": 3})
    assert balance.split.step_s_now == pytest.approx(1.0)
    assert balance.split.step_s_balanced == pytest.approx((0.6 + 1.94) / 4)
    assert balance.split.step_s_whole == pytest.approx(1.94 / 3)
    # 0.25 s of each second are updates, 0.7 s are free: two more times fit, and no more than twice is suggested.
    assert balance.dial is not None
    assert (balance.dial.field, balance.dial.now, balance.dial.suggested) == ("trainer.epochs", 1, 2)
    assert balance.verdict == (
        "Generation is the bottleneck: the trainer idles 70% of the time, generators 3%; in balance threads would be "
        "trainer 0.9 and generator 3.1 (now 2 and 2), so 1 and 3 for steps of 0.65 s instead of 1 s; "
        "trainer.epochs = 2 (T, updates per sample; now 1) would use the idle trainer."
    )


@pytest.mark.parametrize(
    ("state", "config", "dial"),
    [
        ("drain", 'weight_update = "between_batches"\n', ("weight_update", "between_batches", "in_flight")),
        ("re_prefill", '[generator]\nkv_on_update = "recompute"\n', ("generator.kv_on_update", "recompute", "keep")),
        ("evaluate", "[eval]\nevery = 4\n", ("eval.every", 4, 8)),
    ],
)
def test_where_generators_do_much_else_that_is_the_dial(tmp_path: Path, state: str, config: str, dial: tuple):
    trainer = [("wait_generation", 0.5), ("forward_backward", 0.5)]
    for name, share in (("much", 0.2), ("little", 0.05)):
        (tmp_path / name).mkdir()
        generator = [("decode", 0.95 - share), (state, share), ("wait_trainer", 0.05)]
        balance = make_run(tmp_path / name, trainer=trainer, generator=generator, config=config).balance
        assert (balance.starves, balance.bottleneck) == ("trainer", "generation")
        assert balance.dial is not None
        told = (balance.dial.field, balance.dial.now, balance.dial.suggested)
        assert told == (dial if name == "much" else ("trainer.epochs", 1, 2))


def test_evaluations_at_the_ends_alone_are_spared_by_no_dial(tmp_path: Path):
    """10 steps: with `every` = 10 the only ones are those before the first step and after the last."""
    trainer, generator = [("wait_generation", 0.5), ("forward_backward", 0.5)], [("decode", 0.75), ("evaluate", 0.2)]
    for every, field in ((9, "eval.every"), (10, None), (25, None)):
        folder = tmp_path / str(every)
        folder.mkdir()
        config = f"[eval]\nevery = {every}\n[trainer]\nepochs = 1\n"
        dial = make_run(folder, trainer=trainer, generator=generator, config=config).balance.dial
        assert dial is not None
        assert (dial.field == "eval.every") == (field is not None), dial


def test_where_training_is_the_bottleneck_generators_starve(tmp_path: Path):
    found = make_run(
        tmp_path,
        trainer=[("forward_backward", 0.8), ("optimizer", 0.1), ("stage", 0.05), ("wait_generation", 0.05)],
        generator=[("decode", 0.4), ("wait_trainer", 0.6)],
        config="completions_per_group = 8\n",
    )
    balance = found.balance
    assert (balance.starves, balance.bottleneck) == ("generator", "training")
    assert balance.split is not None
    assert balance.split.whole == balance.split.now == {"trainer": 1, "generator": 1}
    assert "in balance" not in balance.verdict, "the best whole split is the present one"
    assert balance.dial is not None
    assert (balance.dial.field, balance.dial.suggested) == ("completions_per_group", 16)  # 20 fit, twice 8 are told
    assert "with loss.select = 'best_and_worst'" in balance.verdict


def test_where_scoring_is_the_bottleneck_both_starve(tmp_path: Path):
    found = make_run(
        tmp_path,
        trainer=[("wait_rewards", 0.55), ("wait_generation", 0.15), ("forward_backward", 0.3)],
        generator=[("decode", 0.35), ("wait_trainer", 0.65)],
        rewards=[("score", 0.98), ("wait_completions", 0.02)],
        config="[rewards]\nnum_workers = 2\n",
    )
    balance = found.balance
    assert (balance.starves, balance.bottleneck) == ("both", "rewards")
    assert balance.dial is not None
    # Without waiting for rewards a step takes 0.45 s: scoring has to be 1 / 0.45 times as fast; twice is the most.
    assert (balance.dial.field, balance.dial.now, balance.dial.suggested) == ("rewards.num_workers", 2, 4)
    assert balance.verdict.startswith("Scoring is the bottleneck: the trainer waits for rewards 55% of the time")


@pytest.mark.parametrize(("starting", "bottleneck"), [(0.5, None), (0.3, None), (0.2, "rewards")])
def test_waiting_for_the_start_of_scoring_is_no_bottleneck(
    starting: float, bottleneck: str | None, tmp_path: Path
) -> None:
    """A resume has no warm start that would hide it: more workers would not shorten that wait."""
    balance = make_run(
        tmp_path,
        trainer=[("wait_rewards", 0.55), ("forward_backward", 0.45)],
        generator=[("decode", 0.35), ("wait_trainer", 0.65)],
        rewards=[("start_up", starting), ("score", 0.1), ("wait_completions", 0.9 - starting)],
    ).balance
    assert balance.bottleneck == bottleneck
    assert bool(balance.verdict) == (bottleneck is not None)


def test_where_stragglers_hold_a_batch_up_a_wider_bound_for_them_alone_is_the_dial(tmp_path: Path):
    states = {
        "trainer": [("wait_straggler", 0.5), ("wait_generation", 0.1), ("forward_backward", 0.4)],
        "generator": [("decode", 0.98), ("wait_trainer", 0.02)],
    }
    (tmp_path / "narrow").mkdir()
    dials = "max_staleness = 2\ngroups_per_step = 16\nreorder_window = 1\n"
    balance = make_run(tmp_path / "narrow", **states, config=dials).balance
    assert (balance.starves, balance.bottleneck) == ("trainer", "stragglers")
    assert balance.dial is not None
    assert (balance.dial.field, balance.dial.suggested) == ("max_staleness", 4)
    assert "overtake_steps = 2 " in balance.dial.effect, "as far ahead as before"
    (tmp_path / "wide").mkdir()
    dials = "max_staleness = 8\ngroups_per_step = 16\novertake_steps = 6\n"
    balance = make_run(tmp_path / "wide", **states, config=dials).balance
    assert balance.dial is not None
    assert (balance.dial.field, balance.dial.suggested) == ("max_staleness", 16)
    assert "overtake_steps = 14 " in balance.dial.effect
    (tmp_path / "one_step").mkdir()
    dials = "max_staleness = 1\n[schedule]\npolicy = 'one_step'\n"
    assert make_run(tmp_path / "one_step", **states, config=dials).balance.dial is None, "its bound is fixed"


def test_a_balanced_run_needs_nothing(tmp_path: Path):
    found = make_run(
        tmp_path,
        trainer=[("forward_backward", 0.93), ("wait_generation", 0.07)],
        generator=[("decode", 0.95), ("wait_trainer", 0.05)],
    )
    assert (found.balance.starves, found.balance.bottleneck, found.balance.dial) == ("neither", "none", None)
    assert found.balance.verdict == "Balanced: the trainer idles 7% of the time, generators 5%."


def test_at_staleness_0_the_sides_take_turns_on_the_same_threads(tmp_path: Path):
    found = make_run(
        tmp_path,
        trainer=[("wait_generation", 0.6), ("forward_backward", 0.4)],
        generator=[("decode", 0.55), ("wait_trainer", 0.45)],
        threads=(2, 2),
        config='max_staleness = 0\nweight_update = "between_batches"\n',
    )
    assert (found.balance.starves, found.balance.bottleneck) == ("both", "turns")
    assert found.balance.split is None, "neither would get more threads: each has all of them"
    assert found.balance.dial is not None
    assert (found.balance.dial.field, found.balance.dial.suggested) == ("max_staleness", 1)
    assert found.balance.verdict == (
        "Trainer and generators take turns at max_staleness = 0: the trainer idles 60% of the time, generators 45%; "
        "max_staleness = 1 would let them overlap."
    )


def test_a_split_baseline_takes_turns_on_threads_that_another_split_would_balance(tmp_path: Path):
    """0.4 and 0.55 thread-seconds of work of two threads: 0.84 and 1.16 would be even."""
    found = make_run(
        tmp_path,
        trainer=[("wait_generation", 0.6), ("forward_backward", 0.4)],
        generator=[("decode", 0.55), ("wait_trainer", 0.45)],
        config='max_staleness = 0\nsync_placement = "split"\nweight_update = "between_batches"\n',
    )
    assert (found.balance.starves, found.balance.bottleneck) == ("both", "turns")
    assert found.balance.split is not None
    assert found.balance.split.balanced["trainer"] == pytest.approx(2 * 0.4 / 0.95)


def test_at_staleness_0_they_take_turns_however_unequal_they_are(tmp_path: Path):
    found = make_run(
        tmp_path,
        trainer=[("wait_generation", 0.9), ("forward_backward", 0.1)],
        generator=[("decode", 0.85), ("wait_trainer", 0.15)],
        config='max_staleness = 0\nweight_update = "between_batches"\n',
    )
    assert (found.balance.starves, found.balance.bottleneck) == ("both", "turns")


def test_at_staleness_0_on_gpus_each_side_has_its_own(tmp_path: Path):
    found = make_run(
        tmp_path,
        trainer=[("wait_generation", 0.6), ("forward_backward", 0.4)],
        generator=[("decode", 0.55), ("wait_trainer", 0.45)],
        config='max_staleness = 0\nweight_update = "between_batches"\n',
        device="cuda",
    )
    assert found.balance.split is not None
    assert (found.balance.split.unit, found.balance.split.now) == ("GPUs", {"trainer": 1, "generator": 1})


def test_a_tight_bound_has_them_take_turns(tmp_path: Path):
    found = make_run(
        tmp_path,
        trainer=[("wait_generation", 0.45), ("forward_backward", 0.55)],
        generator=[("decode", 0.6), ("wait_trainer", 0.4)],
        config='max_staleness = 1\nweight_update = "between_batches"\n',
    )
    assert (found.balance.starves, found.balance.bottleneck) == ("both", "turns")
    assert found.balance.dial is not None
    assert (found.balance.dial.field, found.balance.dial.now, found.balance.dial.suggested) == ("max_staleness", 1, 2)
    (tmp_path / "seldom").mkdir()
    found = make_run(
        tmp_path / "seldom",
        trainer=[("wait_generation", 0.45), ("forward_backward", 0.55)],
        generator=[("decode", 0.6), ("wait_trainer", 0.4)],
        config="max_staleness = 3\npublish_every = 3\n",
    )
    assert found.balance.dial is not None
    assert (found.balance.dial.field, found.balance.dial.now, found.balance.dial.suggested) == ("publish_every", 3, 1)


ASKING = {
    "trainer": [("wait_generation", 0.6), ("forward_backward", 0.4)],
    "generator": [("decode", 0.4), ("wait_environment", 0.5), ("wait_trainer", 0.1)],
    "environments": [("step", 0.8), ("wait_turns", 0.2)],
}
ENVIRONMENT = '[environment]\nclass = "guess"\nnum_workers = 3\nmax_turns = 2\n'


@pytest.mark.parametrize(
    ("sessions", "inline", "dial", "told"),
    [
        (
            10,
            False,
            ("generator.sessions", 10, 20),
            "generator.sessions = 20 (now 10) would give generators other episodes to go on with; faster environments "
            "would shorten that wait",
        ),
        (40, False, ("generator.sessions", 40, 48), None),  # 3 batches of 2 groups of 8: the bound admits no more
        (
            48,
            False,
            ("environment.num_workers", 3, 6),
            "environment.num_workers = 6 (now 3) would shorten that wait where environments compute, faster "
            "environments anywhere",
        ),
        (48, True, None, "faster environments would shorten that wait"),
    ],
)
def test_where_environments_are_the_bottleneck_both_starve(
    tmp_path: Path, sessions: int, inline: bool, dial: tuple[str, int, int] | None, told: str | None
):
    config = "groups_per_step = 2\ncompletions_per_group = 8\nmax_staleness = 2\n"
    config += f"[generator]\nsessions = {sessions}\n{ENVIRONMENT}"
    found = make_run(tmp_path, **ASKING, config=config, inline=("environments",) if inline else ())
    balance = found.balance
    assert (balance.starves, balance.bottleneck) == ("both", "environments")
    assert (None if balance.dial is None else (balance.dial.field, balance.dial.now, balance.dial.suggested)) == dial
    opening = (
        "Environments are the bottleneck: generators wait for them 50% of the time, the trainer idles 60% of the time"
    )
    assert balance.verdict.startswith(f"{opening}; ")
    assert told is None or balance.verdict == f"{opening}; {told}."
    assert "in balance" not in balance.verdict, "no split of threads makes environments faster"
    limits = waited_for(found.accounting)
    assert limits["environments"] == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    ("trainer", "generator", "bottleneck"),
    [
        # The trainer works all the time: what generators wait for costs nothing.
        (
            [("forward_backward", 0.95), ("wait_generation", 0.05)],
            [("decode", 0.5), ("wait_environment", 0.5)],
            "training",
        ),
        # They wait for the bound, and now and then for environments.
        (
            [("forward_backward", 0.5), ("wait_generation", 0.5)],
            [("decode", 0.4), ("wait_environment", 0.15), ("wait_trainer", 0.45)],
            "turns",
        ),
        (
            [("wait_generation", 0.7), ("forward_backward", 0.3)],
            [("decode", 0.92), ("wait_environment", 0.08)],
            "generation",
        ),
    ],
)
def test_environments_that_hold_nobody_up_are_no_bottleneck(
    tmp_path: Path, trainer: list, generator: list, bottleneck: str
):
    found = make_run(tmp_path, trainer, generator, environments=ASKING["environments"], config=ENVIRONMENT)
    assert found.balance.bottleneck == bottleneck
    assert "nvironments" not in found.balance.verdict


def test_at_staleness_0_environments_are_named_where_generators_wait_for_them_most(tmp_path: Path):
    """Both sides wait by turns; overlapping them would not make the episodes of a batch shorter."""
    config = f'weight_update = "between_batches"\nmax_staleness = 0\n{ENVIRONMENT}'
    states = {"trainer": [("forward_backward", 0.2), ("wait_generation", 0.8)]}
    states["generator"] = [("decode", 0.3), ("wait_environment", 0.5), ("wait_trainer", 0.2)]
    assert make_run(tmp_path, **states, config=config).balance.bottleneck == "environments"


# Where a verdict would be wrong

STARVING = {
    "trainer": [("wait_generation", 0.7), ("forward_backward", 0.3)],
    "generator": [("decode", 0.97), ("wait_trainer", 0.03)],
}


def says_nothing(found: RunAccounting) -> bool:
    balance = found.balance
    told = (balance.starves, balance.bottleneck, balance.verdict, balance.split, balance.dial)
    return told == (None, None, "", None, None)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 9])
def test_of_fewer_than_ten_steps_nothing_is_said(tmp_path: Path, num_steps: int):
    """In the first the trainer waits for a whole batch, and everything is cold."""
    assert says_nothing(make_run(tmp_path, **STARVING, num_steps=num_steps))


def test_of_executors_in_one_process_nothing_is_said(tmp_path: Path):
    """Each waits while another works: no dial and no split would let them overlap."""
    assert says_nothing(make_run(tmp_path, **STARVING, config='host = "inline"\n', within="controller"))


def test_where_generators_wait_for_something_else_than_the_bound_nothing_is_said(tmp_path: Path):
    """More staleness would not help them."""
    trainer = [("wait_generation", 0.5), ("forward_backward", 0.5)]
    assert says_nothing(make_run(tmp_path, trainer=trainer, generator=[("decode", 0.5), ("wait_prompt", 0.5)]))


@pytest.mark.parametrize("threads", [(1, 1), (2, 16)])
def test_a_split_that_is_the_present_one_or_no_shorter_is_not_suggested(tmp_path: Path, threads: tuple[int, int]):
    found = make_run(tmp_path, **STARVING, threads=threads)
    assert found.balance.split is not None
    assert "in balance" not in found.balance.verdict
    assert "instead of" not in found.balance.verdict


def test_a_dial_that_the_configuration_refuses_is_not_suggested(tmp_path: Path):
    """Where a pair is compared, `completions_per_group` has to be 2."""
    states = {"trainer": [("forward_backward", 1.0)], "generator": [("decode", 0.5), ("wait_trainer", 0.5)]}
    pairs = 'completions_per_group = 2\n[loss]\nname = "online_dpo"\nadvantages = "none"\n'
    found = make_run(tmp_path, **states, config=pairs)
    assert (found.balance.bottleneck, found.balance.dial) == ("training", None)
    assert "completions_per_group" not in found.balance.verdict


def test_a_reward_that_is_called_in_the_controllers_process_has_no_workers_to_add(tmp_path: Path):
    states = {
        "trainer": [("wait_rewards", 0.5), ("forward_backward", 0.5)],
        "generator": [("decode", 0.5), ("wait_trainer", 0.5)],
        "rewards": [("score", 1.0)],
    }
    found = make_run(tmp_path, **states, inline=("rewards",))
    assert (found.balance.bottleneck, found.balance.dial) == ("rewards", None)
    assert "num_workers" not in found.balance.verdict


def test_no_dial_is_suggested_beyond_twice_its_value(tmp_path: Path):
    """A trainer that is busy for 2% of the time has room for fifty epochs, and would be ruined by them."""
    trainer = [("wait_generation", 0.98), ("forward_backward", 0.02)]
    found = make_run(tmp_path, trainer=trainer, generator=[("decode", 0.99), ("wait_trainer", 0.01)])
    assert found.balance.dial is not None
    assert (found.balance.dial.field, found.balance.dial.suggested) == ("trainer.epochs", 2)


POOL = "[generator]\nmax_replicas = {}\n"


@pytest.mark.parametrize(
    ("waits", "most", "advice"),
    [
        (0.5, 4, "1 more generator than the 1 that were there would shorten steps from 1 s to 0.5 s"),
        (0.3, 4, "1 more generator than the 1 that were there would shorten steps from 1 s to 0.7 s"),  # its own work
        (0.9, 9, "1 more generator than the 1 that were there would shorten steps from 1 s to 0.5 s"),  # no further
        (0.5, 1, ""),  # nobody may join
        (0.05, 4, ""),
    ],
)
def test_how_many_more_generators_would_help_a_run_that_they_may_join(
    tmp_path: Path, waits: float, most: int, advice: str
):
    trainer = [("wait_generation", waits), ("forward_backward", 1 - waits)]
    found = make_run(tmp_path, trainer=trainer, generator=[("decode", 1.0)], config=POOL.format(most))
    assert (advice in found.balance.verdict) if advice else "more generator" not in found.balance.verdict


def test_generators_that_were_there_for_a_part_count_as_a_part():
    there, joined = {"decode": 10.0}, {"absent": 7.5, "decode": 2.5}
    side = Side(
        {"generator-0": there, "generator-1": joined, "generator-1@1": joined},
        dict.fromkeys(["generator-0", "generator-1", "generator-1@1"], 1),
    )
    assert side.num_present == pytest.approx(1.25)
    loop = Loop(
        sides={
            "trainer": Side({"trainer": {"wait_generation": 5.0, "optimizer": 5.0}}, {"trainer": 1}),
            "generator": side,
        },
        num_steps=10,
        length_s=10.0,
        unit=None,
        dials=Dials(most_replicas=2),
    )
    assert (
        "1 more generator than the 1.25 that were there would shorten steps from 1 s to 0.56 s" in judge(loop).sentence
    )


def test_more_ranks_of_reward_models_are_whole_tensor_parallel_groups():
    """Seven would do, and a recipe with them is refused."""
    states = {
        "trainer": {"wait_rewards": 3.5, "wait_generation": 0.5, "forward_backward": 6.0},
        "generator": {"decode": 3.5, "wait_trainer": 6.5},
        "reward_models": {"score": 9.8, "wait_completions": 0.2},
    }
    for together, suggested in ((1, 7), (4, 8)):
        dial = judge(
            Loop(
                sides={name: Side({name: seconds}, {name: 1}) for name, seconds in states.items()},
                num_steps=10,
                length_s=10.0,
                dials=Dials(reward_model_ranks=4, reward_model_tensor_parallel=together),
            )
        ).dial
        assert dial is not None
        assert (dial.field, dial.now, dial.suggested) == ("rewards.model_ranks", 4, suggested)


SECONDS = st.just(0.0) | st.floats(1e-3, 10)
STATES_OF = {
    "trainer": ["forward_backward", "optimizer", "wait_generation", "wait_rewards", "wait_straggler", "absent"],
    "generator": ["decode", "prefill", "wait_trainer", "wait_prompt", "wait_environment", "lost", "unlabelled"],
    "rewards": ["score", "wait_completions"],
    "reward_models": ["score", "wait_completions"],
}


@drawn(30, 100, data=st.data())
def test_every_loop_gets_one_sentence_and_a_split_of_what_there_is(data: st.DataObject):
    sides = {}
    for side, states in STATES_OF.items():
        if side == "reward_models" and data.draw(st.booleans()):
            continue
        processes = {
            f"{side}-{i}": {s: data.draw(SECONDS) for s in states} for i in range(data.draw(st.integers(1, 2)))
        }
        sides[side] = Side(processes, {name: data.draw(st.integers(1, 64)) for name in processes})
    takes_turns = data.draw(st.none() | st.booleans())
    dials = None if takes_turns is None else Dials(max_staleness=data.draw(st.integers(0, 9)), takes_turns=takes_turns)
    verdict = judge(Loop(sides=sides, num_steps=data.draw(st.integers(0, 19)), length_s=10.0, dials=dials))
    assert verdict.sentence.endswith(".") == (verdict.starves is not None)
    assert verdict.sentence.count(". ") == verdict.sentence.count("\n") == 0
    assert (verdict.starves is None) == (verdict.bottleneck is None)
    if (split := verdict.split) is None:
        return
    assert sum(split.balanced.values()) == pytest.approx(sum(split.now.values()))
    assert sum(split.whole.values()) == sum(split.now.values())
    loads = [sides[name].work / units for name, units in split.balanced.items()]
    assert loads == pytest.approx([loads[0]] * len(loads))  # T_t / theta = T_g / (1 - theta), for every side
    assert split.step_s_balanced <= split.step_s_whole * (1 + 1e-9)


@drawn(30, 100, work=st.lists(st.floats(0.01, 100), min_size=1, max_size=4), more=st.integers(0, 8))
def test_whole_units_are_split_as_well_as_can_be(work: list[float], more: int):
    total = len(work) + more
    named = {str(i): value for i, value in enumerate(work)}
    found = whole_split(named, total)
    ways = [way for way in itertools.product(range(1, total + 1), repeat=len(work)) if sum(way) == total]
    best = min(max(value / units for value, units in zip(work, way, strict=True)) for way in ways)
    assert sum(found.values()) == total
    assert max(named[name] / units for name, units in found.items()) == pytest.approx(best)


# Steps


def test_windows_of_steps_are_disjoint_and_cover_the_loop(tmp_path: Path):
    configure(tmp_path)
    decisions = Decisions(tmp_path)
    decisions.add(-50.0, SWAPPED, start(0))  # of an earlier attempt
    decisions.add(0.5, SWAPPED, start(0))
    trainer, generator = Process(tmp_path, "trainer"), Process(tmp_path, "generator-0")
    trainer.does("wait_generation", 1.0)
    trainer.does("forward_backward", 0.5, step=0)
    trainer.trained(0)
    trainer.does("record", 0.25)
    trainer.does("forward_backward", 1.0, step=1)
    trainer.trained(1)
    trainer.does("publish", 0.25, version=2)
    generator.does("decode", 2.0)
    generator.does("wait_trainer", 1.0)
    for process in (trainer, generator):
        process.timeline.close()
    first, second = read_accounting(tmp_path).steps
    assert (first.step, first.start_s, first.end_s) == pytest.approx((0, 0.5, 1.5))
    assert (second.step, second.start_s, second.end_s) == pytest.approx((1, 1.5, 2.75))
    assert first.states["trainer"] == pytest.approx({"wait_generation": 0.5, "forward_backward": 0.5, "unlabelled": 0})
    assert second.states["trainer"] == pytest.approx({"record": 0.25, "forward_backward": 1.0, "unlabelled": 0})
    assert second.states["generator-0"] == pytest.approx({"decode": 0.5, "wait_trainer": 0.75, "unlabelled": 0})


def test_wasted_tokens_by_cause(tmp_path: Path):
    configure(tmp_path)
    decisions = Decisions(tmp_path)
    decisions.add(0.0, began())
    decisions.add(0.1, SWAPPED, *map(start, range(6)))
    for ordinal in range(5):
        for sample in (0, 1):
            decisions.add(0.2, finished(ordinal, sample, 10 * ordinal + 5))
    decisions.add(0.3, SWAPPED, {"type": "Skip", "ordinals": [1], "cause": "no_signal"})  # 2 x 15
    decisions.add(0.4, {"type": "ReplicaLost", "replica": 0}, start(0))  # 0 is sampled again
    decisions.add(0.5, finished(0, 0, 5))
    decisions.add(0.6, finished(0, 1, 5, num_restored=2), {"type": "TrainStep", "step": 0, "ordinals": [0]})
    decisions.add(1.0, done(0), {"type": "Skip", "ordinals": [2], "cause": "stale"})  # 2 x 25, before step 1
    decisions.add(1.2, SWAPPED, {"type": "Skip", "ordinals": [3], "cause": "failed"}, start(6))  # 2 x 35
    decisions.add(1.9, finished(0, 0, 5))  # another second copy, when the first is trained: it was regenerated, too
    decisions.add(2.0, done(1))  # 4 (2 x 45) and 5, 6 are left
    trainer, generator = Process(tmp_path, "trainer"), Process(tmp_path, "generator-0")
    for step, end_s in enumerate((0.999, 1.999)):
        trainer.does("forward_backward", START_S + end_s - trainer.clock.now_s(), step=step)
        trainer.trained(step)
    generator.timeline.counter("tokens", re_prefilled_tokens=0)
    generator.does("decode", 0.5, count=10, units=30)
    generator.timeline.counter("tokens", re_prefilled_tokens=7)
    # 8 + 5 tokens finished after the loss, since which it has sampled these and 11, and 30 before it
    generator.timeline.close()
    again = Process(tmp_path, "generator-0", at_s=START_S + 0.4)
    again.does("decode", 0.5, count=4, units=24)
    again.timeline.counter("tokens", re_prefilled_tokens=4)
    for process in (trainer, again):
        process.timeline.close()
    found = read_accounting(tmp_path)
    told = {"no_signal": 30, "failed": 70, "stale": 50, "regenerated": 8 + 5, "re_prefilled": 11, "not_selected": 0}
    assert found.balance.wasted_tokens == told | {"left": 90 + (24 - 8 - 5)}


def test_after_a_resume_what_was_admitted_before_is_regenerated(tmp_path: Path):
    configure(tmp_path)
    decisions = Decisions(tmp_path)
    decisions.add(-9.0, began())
    decisions.add(-8.0, SWAPPED, start(0), start(1))
    decisions.add(-7.0, finished(0, 0, 11))
    decisions.add(0.0, began(next_ordinal=2, readmit=[0, 1]))
    decisions.add(0.1, SWAPPED, start(0), start(1), start(2))
    for ordinal, restored in ((0, 11), (1, 4), (2, 0)):  # 0 was saved whole, 1 in part
        decisions.add(0.2, finished(ordinal, 0, 11, num_restored=restored))
    Process(tmp_path, "trainer").timeline.close()
    told = read_accounting(tmp_path).balance.wasted_tokens
    assert (told["regenerated"], told["left"]) == (7, 33)


def test_what_a_step_left_out_of_its_groups_is_wasted(tmp_path: Path):
    """Of two completions it trained the one of 30 tokens; the second step does not say, as those of old versions."""
    configure(tmp_path)
    decisions = Decisions(tmp_path)
    decisions.add(0.0, began())
    decisions.add(0.1, SWAPPED, start(0), start(1))
    for ordinal in (0, 1):
        decisions.add(0.2, finished(ordinal, 0, 30))
        decisions.add(0.3, finished(ordinal, 1, 10))
    told = {"staleness_tokens/lag_0": 35.0, "staleness_tokens/lag_1": 5.0, "tokens_trained": 30.0}
    for step, metrics in enumerate((told, {})):
        decisions.add(step + 0.5, SWAPPED, {"type": "TrainStep", "step": step, "ordinals": [step]})
        decisions.add(step + 0.9, done(step) | {"metrics": metrics})
    Process(tmp_path, "trainer").timeline.close()
    assert read_accounting(tmp_path).balance.wasted_tokens == dict.fromkeys(WASTE, 0) | {"not_selected": 10}


@pytest.mark.parametrize(("is_back", "left"), [(False, 30 - 10 - 4), (True, 9)])
def test_a_completion_that_was_handed_over_is_neither_regenerated_nor_left(tmp_path: Path, is_back: bool, left: int):
    configure(tmp_path)
    decisions = Decisions(tmp_path)
    decisions.add(0.0, began())
    decisions.add(0.1, SWAPPED, start(0))
    decisions.add(0.2, finished(0, 0, 10))
    decisions.add(0.6, event("ReplicaLost", replica=0), start(0) | {"replica": 1})
    for sample, restored, by in ((0, 10, -1), (1, 4, 0)):  # the first waited for its verdict, the other had 4 tokens
        decisions.add(1.5, finished(0, sample, 10, restored) | {"replica": 1, "handed_over_by": by})
    decisions.add(1.6, finished(0, 1, 10) | {"replica": 1}, {"type": "TrainStep", "step": 0, "ordinals": [0]})
    decisions.add(2.0, done(0))
    generator = Process(tmp_path, "generator-0")
    generator.does("decode", 0.5, count=10, units=30)
    generator.timeline.close()
    if is_back:  # it has taken no part in what the one before began
        generator = Process(tmp_path, "generator-0", at_s=START_S + 1.0)
        generator.does("decode", 0.5, count=9, units=9)
        generator.timeline.close()
    Process(tmp_path, "trainer").timeline.close()
    told = read_accounting(tmp_path).balance.wasted_tokens
    assert (told["regenerated"], told["left"]) == (10, left), "the one that was sampled from its start"


def test_a_metric_that_is_not_a_number_is_no_damage(tmp_path: Path):
    """JSON has null for it."""
    configure(tmp_path)
    Decisions(tmp_path).add(0.1, done(0) | {"metrics": {"loss": None, "tokens_trained": None}})
    assert not any(read_accounting(tmp_path).balance.wasted_tokens.values())


# Interference


def overlapped_run(run_dir: Path, *, decode: float, train: float, cycles: int = 30) -> RunAccounting:
    """In each cycle the sides compute together, then generators alone, then the trainer alone.

    Alone a microbatch takes 10 ms, and a decode step 1 ms with 8 rows and 3 ms with 64, of which cycles have one or the
    other; together they take `train` and `decode` times as long.
    """
    configure(run_dir)
    trainer, generator = Process(run_dir, "trainer"), Process(run_dir, "generator-0")
    for cycle in range(cycles):
        rows, step_s = ((8, 0.001), (64, 0.003))[cycle % 2]
        together_s, alone_s = 0.1 * train, 0.06
        for _ in range(10):
            trainer.does("forward_backward", 0.01 * train, count=1, units=2048, step=cycle)
        num_steps = int(together_s / (step_s * decode))
        for _ in range(num_steps):
            generator.does("decode", step_s * decode, count=1, units=rows)
        generator.does("receive", together_s - num_steps * step_s * decode)
        trainer.does("wait_generation", alone_s)
        for _ in range(round(alone_s / step_s)):
            generator.does("decode", step_s, count=1, units=rows)
        generator.does("wait_trainer", 0.1)
        for _ in range(10):
            trainer.does("forward_backward", 0.01, count=1, units=2048, step=cycle)
        trainer.trained(cycle)
    for process in (trainer, generator):
        process.timeline.close()
    return read_accounting(run_dir)


def test_interference_is_what_each_side_loses_while_the_other_computes(tmp_path: Path):
    found = overlapped_run(tmp_path, decode=1.5, train=1.2).balance.interference
    assert found.decode == pytest.approx(1.5, rel=0.03)
    assert found.train == pytest.approx(1.2, rel=0.03)


def test_without_interference_the_ratios_are_one(tmp_path: Path):
    found = overlapped_run(tmp_path, decode=1.0, train=1.0).balance.interference
    assert (found.decode, found.train) == pytest.approx((1.0, 1.0), rel=0.02)


def test_too_little_of_either_tells_nothing(tmp_path: Path):
    found = overlapped_run(tmp_path, decode=1.5, train=1.2, cycles=4).balance.interference
    assert found.decode is None, "0.24 s alone"
    (tmp_path / "uncounted").mkdir()
    found = make_run(
        tmp_path / "uncounted",
        trainer=[("forward_backward", 1.0)],
        generator=[("decode", 1.0)],
    ).balance.interference
    assert (found.decode, found.train) == (None, None), "no pieces were counted"


# Processes


def die(process: Process) -> None:
    """What was written so far stays."""
    process.timeline.flush()
    path = process.timeline.path
    assert path is not None
    written = path.read_bytes()
    process.timeline.close()
    path.write_bytes(written)


def test_restarted_processes_are_absent_or_lost_and_idle_shares_are_of_the_time_between(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("restarted")  # no run for `accounted.py`
    configure(tmp_path)
    controller = Process(tmp_path, "controller")
    controller.does("idle", 10.0)
    controller.timeline.close()
    killed = Process(tmp_path, "generator-0", at_s=START_S + 1.0)
    killed.does("decode", 3.0)
    die(killed)
    again = Process(tmp_path, "generator-0", at_s=START_S + 6.0)
    again.does("wait_trainer", 2.0)
    again.timeline.close()
    (tmp_path / "summary.json").write_text('{"status": "done", "wall_s": 10.0}')
    found = read_accounting(tmp_path)
    generator = found.processes["generator-0"]
    told = {"absent": 3.0, "decode": 3.0, "lost": 2.0, "wait_trainer": 2.0, "unlabelled": 0.0}
    assert generator.states == pytest.approx(told)
    assert idle_share(generator.states) == pytest.approx(2.0 / 5.0)
    for process in found.processes.values():
        assert sum(process.states.values()) == pytest.approx(found.wall_s)


def test_tests_excuse_overhead_by_what_stops_took_of_it_and_by_nothing_else(tmp_path_factory):
    """Of 3 s, 1 s may be overhead where a signal has stopped the process in it, and not where it met `decode`."""
    tmp_path = tmp_path_factory.mktemp("stopped")  # no run for `accounted.py`
    configure(tmp_path)
    for name in ("controller", "generator-0"):
        process = Process(tmp_path, name)
        for state, seconds in (("decode", 1.0), ("overhead", 1.0), ("decode", 1.0)):
            process.does(state if name == "generator-0" else "idle", seconds)
        process.timeline.close()
    states = {name: process.states for name, process in read_accounting(tmp_path).processes.items()}
    (tmp_path / "summary.json").write_text(json.dumps({"status": "done", "wall_s": 3.0, "accounting": states}))
    check_accounting(tmp_path, stops={"generator-0": [(START_S + 1.1, START_S + 1.9)]})
    for stops in ({}, {"generator-0": [(START_S, START_S + 1.0)]}, {"controller": [(START_S + 1.0, START_S + 2.0)]}):
        with pytest.raises(AssertionError, match=r"overhead 1\.0 s of 3\.0 s"):
            check_accounting(tmp_path, stops=stops)


def test_a_run_that_goes_on_is_accounted_for_up_to_its_last_line(tmp_path: Path):
    configure(tmp_path)
    Decisions(tmp_path).add(0.0, SWAPPED, start(0))
    trainer, generator = Process(tmp_path, "trainer"), Process(tmp_path, "generator-0")
    for step in range(3):
        trainer.does("forward_backward", 1.0, step=step)
        trainer.trained(step)
    generator.does("decode", 2.5)
    for process in (trainer, generator):
        process.timeline.flush()
    found = read_accounting(tmp_path)
    assert found.wall_s == pytest.approx(3.0)
    assert found.processes["generator-0"].states == pytest.approx({"decode": 2.5, "unlabelled": 0.5})
    for process in (trainer, generator):
        process.timeline.close()


def test_nothing_is_read_where_there_is_nothing(tmp_path: Path):
    found = read_accounting(tmp_path)
    assert (found.wall_s, found.loop, found.processes, found.steps) == (0.0, None, {}, [])


def compute(cpu_s: float) -> None:
    end_s = time.thread_time() + cpu_s
    while time.thread_time() < end_s:
        sum(range(1000))


def test_cpu_seconds_are_those_of_the_process_of_its_main_thread_and_of_those_in_the_background(tmp_path: Path):
    before_s = background_cpu_s()
    timeline = Timeline("p", tmp_path / "p.jsonl", VirtualClock())
    compute(0.05)
    thread = start_thread(compute, name="beside", args=(0.1,))
    while thread.is_alive() and background_cpu_s() - before_s < 0.02:
        pass  # what has been used so far counts while it runs
    thread.join()
    other = threading.Thread(target=compute, args=(0.1,))  # of a team, say
    other.start()
    other.join()
    timeline.close()
    (end,) = [record for record in read_timeline(tmp_path / "p.jsonl") if isinstance(record, ProcessEnd)]
    assert end.background_ns >= 0.1e9
    assert end.main_ns >= 0.05e9
    assert end.main_ns + end.background_ns + 0.1e9 <= end.cpu_ns + 0.02e9


def test_cpu_seconds_of_the_model_are_those_in_its_states_whatever_is_nested_or_read_meanwhile(tmp_path: Path):
    timeline = Timeline("p", tmp_path / "p.jsonl", VirtualClock())
    with timeline.span("overhead"):
        compute(0.1)
        with timeline.span("decode"):
            compute(0.02)
            timeline.totals()
            compute(0.02)
            with timeline.span("send"):
                compute(0.1)
            compute(0.02)
            other = threading.Thread(target=compute, args=(0.04,))
            other.start()
            other.join()
        compute(0.1)
    timeline.close()
    (end,) = [record for record in read_timeline(tmp_path / "p.jsonl") if isinstance(record, ProcessEnd)]
    assert 0.1e9 <= end.model_ns <= end.cpu_ns - 0.3e9


def test_one_that_is_killed_has_told_of_the_seconds_that_it_has_slices_of(tmp_path: Path):
    clock = VirtualClock()
    timeline = Timeline("p", tmp_path / "p.jsonl", clock)
    for _ in range(4):
        with timeline.span("decode"):
            compute(0.03)
            clock.advance(0.6)
    records = list(read_timeline(tmp_path / "p.jsonl"))
    timeline.close()
    told = [record for record in records if isinstance(record, CpuSoFar)]
    assert [one.time_ns for one in told] == [1_200_000_000, 2_400_000_000]
    assert [record.end_ns for record in records if isinstance(record, Slice)][-1] == told[-1].time_ns
    assert 0.05e9 <= told[0].model_ns <= told[0].cpu_ns
    assert told[0].model_ns + 0.05e9 <= told[1].model_ns
    assert account(records, 0.0, 3.0, is_over=True) == pytest.approx({"decode": 2.4, "unlabelled": 0.0, "lost": 0.6})


def test_the_models_share_of_cpu_seconds_is_of_whole_processes_and_of_all_their_lives(tmp_path: Path):
    """A trainer that was started again, an executor within the controller, and two that were killed."""
    told: dict[str, list[list[CpuSoFar]]] = {
        "controller": [[ProcessEnd(9, cpu_ns=60, model_ns=0)]],
        "rewards": [[ProcessEnd(9, cpu_ns=60, model_ns=10)]],  # within it: its seconds are the controller's
        "trainer": [[ProcessEnd(4, cpu_ns=15, model_ns=12)], [ProcessEnd(9, cpu_ns=25, model_ns=18)]],
        "generator-0": [[CpuSoFar(3, cpu_ns=5, model_ns=4), CpuSoFar(6, cpu_ns=20, model_ns=15)]],
        "generator-1": [[]],
    }
    for name, lives in told.items():
        begin = ProcessStart(name, 1, 1, within="controller" if name == "rewards" else "")
        with contextlib.closing(JsonlWriter(timeline_path(tmp_path, name))) as writer:
            for life in lives:
                writer.write(begin, *life)
    assert read_accounting(tmp_path).model_cpu_share == pytest.approx((10 + 12 + 18 + 15) / (60 + 15 + 25 + 20))
    for name in ("trainer", "rewards", "generator-0"):
        timeline_path(tmp_path, name).unlink()
    assert read_accounting(tmp_path).model_cpu_share is None, "nobody has told any"


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the system does not tell")
def test_the_time_in_which_others_have_the_core_is_told(tmp_path: Path):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        timeline = Timeline("p", tmp_path / "p.jsonl", WallClock())
        compute(0.2)  # far more than a turn of the scheduler, on a core that another process wants all the time
        timeline.close()
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.communicate()
    begin, end = list(read_timeline(tmp_path / "p.jsonl"))
    assert isinstance(end, ProcessEnd)
    assert 0 < end.kept_ns <= end.time_ns - begin.time_ns


def test_an_executor_within_a_process_has_its_own_states(tmp_path: Path):
    configure(tmp_path)
    controller = Process(tmp_path, "controller", threads_alone=2)
    inside = Process(tmp_path, "trainer", within="controller")
    controller.does("schedule", 1.0)
    inside.does("idle", 1.0)
    controller.does("idle", 3.0)
    inside.does("forward_backward", 3.0, step=0)
    for process in (inside, controller):
        process.timeline.close()
    found = read_accounting(tmp_path).processes
    assert found["controller"].states == pytest.approx({"schedule": 1.0, "idle": 3.0, "unlabelled": 0.0})
    assert found["trainer"].states == pytest.approx({"idle": 1.0, "forward_backward": 3.0, "unlabelled": 0.0})
    assert (found["trainer"].within, found["controller"].within) == ("controller", "")


# States


@pytest.mark.parametrize("state", STATES)
def test_every_state_is_explained(state: str):
    assert in_words(state) == STATES[state].words
    assert STATES[state].meaning
    assert STATES[state].colour.startswith("#")
    says_that_it_waits = state.startswith("wait_") or state == "idle"
    assert (kind(state) == "wait") == says_that_it_waits


def test_states_of_others_wait_if_they_say_so():
    assert (kind("wait_tool"), kind("simulate"), kind("unlabelled")) == ("wait", "work", None)
    assert (in_words("wait_tool"), in_words("run_tool")) == ("waits for tool", "run tool")


STATE_NAMES = st.sampled_from(["decode", "receive", "send", "wait_trainer", "swap"])
LENGTHS = st.just(0.0) | st.floats(1e-6, 0.002) | st.floats(1e-6, 0.3)
TURNS = st.lists(st.tuples(STATE_NAMES, LENGTHS, st.integers(0, 2)), max_size=60)


@settings(max_examples=40)
@given(TURNS, st.lists(st.just(0.0) | st.floats(1e-3, 5), min_size=2, max_size=6))
def test_short_turns_share_lines_and_lose_nothing(turns, bounds):
    clock = VirtualClock(1.0)
    timeline = Timeline("p", None, clock)
    seconds: dict[str, float] = {"unlabelled": 0.0}
    work: dict[str, list[int]] = {}
    for state, length_s, pieces in turns:
        with timeline.span(state):
            clock.advance(length_s)
            for piece in range(pieces if length_s else 0):
                timeline.did(piece + 1)
                work.setdefault(state, [0, 0])
                work[state][0] += 1
                work[state][1] += piece + 1
        seconds[state] = seconds.get(state, 0.0) + length_s
    whole = timeline.accounting(1.0, clock.now_s())
    records = timeline._buffer
    assert {s: whole.get(s, 0.0) for s in seconds} == pytest.approx(seconds, abs=1e-6)
    assert set(whole) <= set(seconds)
    told: dict[str, list[int]] = {}
    for record in records:
        if getattr(record, "count", 0):
            told.setdefault(record.state, [0, 0])
            told[record.state][0] += record.count
            told[record.state][1] += record.units
    assert told == work
    ordered = sorted({1.0, clock.now_s(), *(1.0 + b for b in bounds if 1.0 + b < clock.now_s())})
    parts = [account(records, a, b) for a, b in itertools.pairwise(ordered)]
    for state, value in whole.items():
        assert sum(part.get(state, 0.0) for part in parts) == pytest.approx(value, abs=1e-6)


def test_a_line_of_short_turns_is_named_by_the_longest():
    clock = VirtualClock()
    timeline = Timeline("p", None, clock)
    for _ in range(20):
        for state, length_s in (("receive", 2e-4), ("score", 5e-4), ("send", 1e-4)):
            with timeline.span(state):
                clock.advance(length_s)
    timeline.flush()
    (line,) = [record for record in timeline._buffer if isinstance(record, Slice)]
    assert line.state == "score"
    assert line.also == {"receive": 4_000_000, "send": 2_000_000}
    assert line.state_ns == 10_000_000


def test_a_loop_of_a_thousand_steps_a_second_writes_ten_lines_and_a_long_run_fewer(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("slipstream.observe.timeline.COARSER_AFTER", 50)
    clock = VirtualClock()
    timeline = Timeline("p", tmp_path / "p.jsonl", clock)
    num_lines = []
    for _ in range(4):
        for _ in range(10_000):
            for state, length_s in (("receive", 1e-4), ("decode", 8e-4), ("send", 1e-4)):
                with timeline.span(state):
                    clock.advance(length_s)
                    if state == "decode":
                        timeline.did(64)
        timeline.flush()
        num_lines.append(sum(1 for _ in read_timeline(tmp_path / "p.jsonl")))
    timeline.close()
    per_10_s = [after - before for before, after in itertools.pairwise([0, *num_lines])]
    assert per_10_s[0] <= 110
    assert per_10_s[3] <= per_10_s[0] / 2
    assert account(list(read_timeline(tmp_path / "p.jsonl")), 0.0, 40.0)["decode"] == pytest.approx(32.0, abs=1e-3)


# Documents


def table(name: str) -> list[list[str]]:
    """The rows of a table in docs/observability.md, the states' and causes' code marks taken off."""
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text(encoding="utf-8")
    _, _, *lines = page.split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0].splitlines()
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_page_explains_every_state_and_cause():
    words = {"work": "works", "wait": "waits", "gone": "is not there", None: "?"}
    assert table("states") == [[name, words[kind(name)], state.meaning] for name, state in STATES.items()]
    assert table("waste") == [[name, meaning] for name, meaning in WASTE.items()]


def test_the_model_has_its_share_of_the_work_and_not_of_the_waits():
    seconds = {
        "generator-0": {"decode": 4.0, "evaluate": 1.0, "wait_trainer": 50.0, "overhead": 1.0, "absent": 9.0},
        "trainer": {"forward_backward": 2.0, "optimizer": 1.0, "receive": 1.0, "unlabelled": 7.0},
        "rewards": {"score": 5.0, "start_up": 1.0},
    }
    assert model_share(seconds) == pytest.approx(8.0 / 16.0)
    assert model_share({"rewards": {"idle": 3.0}}) == 0.0
