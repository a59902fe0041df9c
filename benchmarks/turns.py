"""Episodes of several turns with environments that answer late: synchronous and continuous training, in turn.

    python benchmarks/turns.py [--means 0 0.1 1] [--rounds 3] [--steps 6]    # a quarter of an hour on two cores
    python benchmarks/turns.py --engine                                     # the engine alone, two minutes
    python benchmarks/turns.py --trl                                        # beside TRL, after make .venv-trl/installed
    python benchmarks/turns.py --between                                    # when a version waits, and for what
    python benchmarks/turns.py --quick                                      # runs and engine small, in a minute

Runs: 4 turns of 16 tokens with 8 given tokens between them, a random model of 0.2 M parameters, 16 groups of 8 episodes
a step. An answer takes 0, 0.1 or 1 s on average with a heavy tail (`late_environment.py`). `sync` is the preset:
staleness 0, a version waits for all episodes. `continuous` swaps in flight at `max_staleness` 4, with 16 rows that
decode and `generator.sessions` = 256 episodes that are open. With `--between` the runs are these: `at episodes` and
`at turns` (`generator.weight_update_at`) are as `continuous` but for `weight_update = "between_batches"`. All train the
same number of tokens a step; each runs once per round, the order rotating. Idle is every state of the generator in
which it waits, from its own timeline, `drain` the share in which it decodes for a version that waits; the table has
medians over rounds. The ratio is of sampled tokens per second in one round.

Engine: CPU seconds of 12 episodes of 24 turns on 8 rows, with the keys of an episode kept between its turns (parked),
and without (prefilled again). TRL: the same model, prompts and environment (`Caller`, by `environment_factory`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import turns_beside_trl
from trl_call import INSTALL, TrlFailed, trl_version

import slipstream
from slipstream.core.run_log import read_metrics, read_rollouts
from slipstream.core.sections import ModelConfig
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Request
from slipstream.models.initialise import new_model
from slipstream.models.transformer import Transformer
from slipstream.observe.hardware import describe
from slipstream.observe.states import STATES
from slipstream.observe.summary import versions
from slipstream.observe.timeline import Slice, account_file, process_files, read_timeline, timeline_path

HERE = Path(__file__).resolve().parent
SEED = 0
MODES: dict[str, dict[str, Any]] = {
    "sync": {"max_staleness": 0, "weight_update": "between_batches"},
    "continuous": {"max_staleness": 4, "weight_update": "in_flight"},
}
BETWEEN: dict[str, dict[str, Any]] = {
    "at episodes": {"max_staleness": 4, "weight_update": "between_batches"},
    "at turns": {"max_staleness": 4, "weight_update": "between_batches"},
    "continuous": MODES["continuous"],
}
WARM_UP, LONGER = 3, 4


@dataclass(frozen=True)
class Sizes:
    """The sizes of the runs: episodes of `turns` turns of `turn_tokens` sampled tokens, `rows` decoded at a time."""

    groups: int = 16
    completions: int = 8
    turns: int = 4
    turn_tokens: int = 16
    rows: int = 16
    sessions: int = 256
    hidden: int = 64
    layers: int = 4
    staleness: int = 4

    @property
    def episodes(self) -> int:
        """Episodes of a step."""
        return self.groups * self.completions

    @property
    def tokens(self) -> int:
        """Sampled tokens of a step: no turn ends early."""
        return self.episodes * self.turns * self.turn_tokens


QUICK_MEANS = [0.0, 0.1]
QUICK = Sizes(turns=2, turn_tokens=16, groups=2, completions=4, sessions=24)


@dataclass(frozen=True)
class Measured:
    """A run, over its steady steps: sampled tokens per second, shares of time by state of generator and trainer.

    `environment_s` is the mean time in which an episode's environment worked.
    """

    tokens_per_s: float
    generator: dict[str, float]
    trainer: dict[str, float]
    environment_s: float

    def idle(self, process: str = "generator") -> float:
        """Return the share of time in which the process waited."""
        states: dict[str, float] = vars(self)[process]
        return sum(share for state, share in states.items() if state in STATES and STATES[state].kind == "wait")


def recipe_of(mode: str, mean_s: float, sizes: Sizes, *, steps: int) -> dict[str, Any]:
    """Return the recipe of a run whose environment takes `mean_s` seconds on average."""
    width = {"hidden_size": sizes.hidden, "intermediate_size": 3 * sizes.hidden, "num_layers": sizes.layers}
    heads = {"num_heads": sizes.hidden // 32, "num_kv_heads": sizes.hidden // 32, "max_positions": 1024}
    return {
        "recipe": f"bench-turns-{mode}",
        "seed": SEED,
        "steps": steps,
        "groups_per_step": sizes.groups,
        "completions_per_group": sizes.completions,
        **(MODES | BETWEEN)[mode],
        **({"max_staleness": sizes.staleness} if mode != "sync" else {}),
        "model": width | heads,
        "prompts": {"tasks": [{"name": "chain_sum"}], "num_train": 4096, "num_eval": 8, "template": "{expression}="},
        "generator": {
            "max_new_tokens": sizes.turn_tokens,
            "num_slots": sizes.rows,
            "sessions": sizes.sessions,
            "weight_update_at": "turn" if mode == "at turns" else "episode",
            "stop_at_eos": False,
        },
        "environment": {
            "class_path": f"{HERE / 'late_environment.py'}:Late",
            "parameters": {"mean_s": mean_s, "turns": sizes.turns},
            "max_turns": sizes.turns,
            "max_episode_tokens": sizes.turns * (sizes.turn_tokens + 16),
            "dry_run": False,
        },
        "loss": {"name": "grpo", "skip_no_signal": False},
        "trainer": {"microbatch_tokens": 4096, "optimizer": {"lr": 1e-6}},
        "eval": {"num_prompts": 8, "every": 0},
    }


def measure(mode: str, mean_s: float, sizes: Sizes, folder: Path, *, steps: int) -> Measured:
    """Run `steps` steps between a beginning and an end that do not count, in processes of their own.

    With staleness k the first k + `WARM_UP` fill the generators, and while the last k are trained they run dry. Steps
    are short then, and a slow episode holds up several: `LONGER` times as many count.
    """
    out = Path(tempfile.mkdtemp(dir=folder, prefix=f"run-{mode.replace(' ', '-')}-"))
    tail = sizes.staleness if mode != "sync" else 0
    warm_up, steps = WARM_UP + tail, steps * (LONGER if tail else 1)
    slipstream.run(recipe_of(mode, mean_s, sizes, steps=warm_up + steps + tail), out=out, display=False)
    ended = {line["step"]: line["wall_s"] for line in read_metrics(out / "metrics.jsonl") if "step_s" in line}
    first, last = warm_up - 1, warm_up + steps - 1
    seconds = ended[last] - ended[first]
    episodes = [line.episode for line in read_rollouts(out / "rollouts.jsonl") if line.episode is not None]
    shares = shares_of(out, first, last)
    return Measured(
        tokens_per_s=steps * sizes.tokens / seconds,
        generator=shares["generator-0"],
        trainer=shares["trainer"],
        environment_s=statistics.fmean(episode.environment_s for episode in episodes),
    )


def shares_of(run_dir: Path, first: int, last: int) -> dict[str, dict[str, float]]:
    """Shares of time of each process in each state, from the end of training step `first` to that of step `last`."""
    trained = [
        record
        for record in read_timeline(timeline_path(run_dir, "trainer"))
        if isinstance(record, Slice) and "step" in record.args
    ]
    end_s = {record.args["step"]: record.end_ns / 1e9 for record in trained}
    shares = {}
    for path in process_files(run_dir):
        seconds = account_file(path, end_s[first], end_s[last])
        shares[path.stem] = {state: one / (end_s[last] - end_s[first]) for state, one in seconds.items()}
    return shares


def compare_runs(modes: Sequence[str], means: Sequence[float], sizes: Sizes, *, rounds: int, steps: int) -> None:
    """All modes in turn for each mean and round, as a table."""
    print(f"{sizes}; {sizes.tokens:,} sampled tokens a step; an episode's environment works {sizes.turns} times\n")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for mean_s in means:
            runs: dict[str, list[Measured]] = {mode: [] for mode in modes}
            for turn in range(rounds):
                first = turn % len(modes)
                for mode in [*modes[first:], *modes[:first]]:
                    run = measure(mode, mean_s, sizes, Path(scratch), steps=steps)
                    runs[mode].append(run)
                    print(
                        f"  {mean_s:g} s, round {turn + 1}: {mode:<11} {run.tokens_per_s:7.0f} tokens/s, generator "
                        f"idle {run.idle():.1%}, load {os.getloadavg()[0]:.1f}",
                        flush=True,
                    )
            rows += table_rows(mean_s, runs)
    print(
        f"\n| environment, s | mode | sampled tokens/s | range | ratio to {modes[0]} | drain | generator idle "
        "| for environments | for the trainer | trainer waits |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    print("\n".join(rows))


def table_rows(mean_s: float, runs: dict[str, list[Measured]]) -> list[str]:
    """Return the table's rows for one mean."""
    first, rows = next(iter(runs)), []
    for mode, measured in runs.items():
        rates = [run.tokens_per_s for run in measured]
        ratios = [after.tokens_per_s / before.tokens_per_s for before, after in zip(runs[first], measured, strict=True)]
        drain, idle, environment, trainer, trainer_idle = (
            statistics.median(values)
            for values in (
                [run.generator.get("drain", 0.0) for run in measured],
                [run.idle() for run in measured],
                [run.generator.get("wait_environment", 0.0) for run in measured],
                [run.generator.get("wait_trainer", 0.0) for run in measured],
                [run.idle("trainer") for run in measured],
            )
        )
        ratio = "1" if mode == first else f"{statistics.median(ratios):.2f}"
        rows.append(
            f"| {mean_s:g} | {mode} | {statistics.median(rates):,.0f} | {min(rates):,.0f} .. {max(rates):,.0f} "
            f"| {ratio} | {drain:.1%} | {idle:.1%} | {environment:.1%} | {trainer:.1%} | {trainer_idle:.1%} |"
        )
    return rows


@dataclass(frozen=True)
class Play:
    """Episodes for the engine alone: `given` tokens come behind each turn, `delay` steps later on average."""

    episodes: int = 12
    turns: int = 24
    turn_tokens: int = 24
    given: int = 16
    delay: int = 24
    rows: int = 8

    @property
    def max_len(self) -> int:
        return 16 + self.turns * (self.turn_tokens + self.given)


def play(model: Transformer, sizes: Play, parked_tokens: int | None) -> tuple[float, float, float]:
    """Play the episodes; CPU seconds, share of what was made before that was kept, share of whole later contexts."""
    vocabulary = model.config.vocab_size
    draw = np.random.default_rng(SEED)
    delays = draw.geometric(1 / sizes.delay, (sizes.episodes, sizes.turns))
    given = draw.integers(0, vocabulary, (sizes.episodes, sizes.turns, sizes.given), dtype=np.int32)
    engine = native_engine(
        model, num_slots=sizes.rows, max_len=sizes.max_len, seed=SEED, stop_token_ids=[], parked_tokens=parked_tokens
    )
    first = [
        Request(ordinal=i, sample=0, prompt_tokens=given[i, 0], max_new_tokens=sizes.turn_tokens, parks=True)
        for i in range(sizes.episodes)
    ]
    turn_of, later_tokens, step = [0] * sizes.episodes, 0, 0
    asleep: deque[tuple[int, Request]] = deque()
    started_s = time.process_time()
    engine.submit(first)
    while asleep or not engine.is_idle:
        engine.submit([request for until, request in asleep if until <= step])
        asleep = deque((until, request) for until, request in asleep if until > step)
        step += 1
        for item in engine.step() if not engine.is_idle else []:
            episode = item.ordinal
            turn_of[episode] += 1
            if (turn := turn_of[episode]) == sizes.turns:
                engine.release(item.request.session)
                continue
            context = np.concatenate([item.request.prompt_tokens, item.tokens, given[episode, turn]])
            later_tokens += len(context)
            following = replace(
                item.request, prompt_tokens=context, num_before=len(context) - sizes.given, goes_on=True
            )
            asleep.append((step + int(delays[episode, turn]), following))
    seconds, stats = time.process_time() - started_s, engine.stats
    made = stats.parked_hit_tokens + stats.parked_missed_tokens
    return seconds, stats.parked_hit_tokens / made, stats.parked_hit_tokens / later_tokens


def compare_engines(sizes: Play, *, hidden: int, rounds: int) -> None:
    """The engine with keys parked, with room for half of them, and prefilled again, in turn; a table."""
    torch.set_num_threads(1)
    config = ModelConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_layers=4,
        num_heads=hidden // 32,
        num_kv_heads=hidden // 32,
        max_positions=2048,
    )
    model = new_model(config, 128, SEED, eos_token_id=1, pad_token_id=0)
    room = {"parked": None, "prefilled again": 0, "room for half": sizes.episodes * sizes.max_len // 4}
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in room}
    play(model, replace(sizes, episodes=4, turns=2), None)  # the first run loads kernels
    for turn in range(rounds):
        for name in list(room)[turn % 3 :] + list(room)[: turn % 3]:
            seen[name].append(play(model, sizes, room[name]))
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"\nEngine: {sizes}, {count / 1e6:.1f} M parameters, 1 thread; medians of {rounds}")
    print("| keys of an episode | CPU s | times the parked | of what was made before, kept | of later contexts, kept |")
    print("|---|---|---|---|---|")
    for name, plays in seen.items():
        ratio = statistics.median(one[0] / parked[0] for one, parked in zip(plays, seen["parked"], strict=True))
        seconds, kept, of_contexts = (statistics.median(values) for values in zip(*plays, strict=True))
        print(f"| {name} | {seconds:.2f} | {ratio:.2f} | {kept:.1%} | {of_contexts:.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="store_true", help="the engine alone")
    parser.add_argument("--trl", action="store_true", help="beside TRL")
    parser.add_argument("--between", action="store_true", help="versions between episodes, between turns, in flight")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--means", type=float, nargs="+", default=[0.0, 0.1, 1.0], help="seconds of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="measured steps per run")
    sizes = ("--groups", "--completions", "--turns", "--turn-tokens", "--rows", "--sessions", "--hidden", "--layers")
    for flag in (*sizes, "--staleness"):
        parser.add_argument(flag, type=int)
    arguments = parser.parse_args()
    print(f"command: python {shlex.join(sys.argv)}\nversions: {versions()}")
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    print(f"seed: {SEED}, load: {os.getloadavg()[0]:.1f}\n", flush=True)
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    if arguments.engine or arguments.quick:
        size = (Play(episodes=8, turns=4), 64) if arguments.quick else (Play(), 256)
        compare_engines(size[0], hidden=size[1], rounds=rounds)
    if arguments.trl:
        compare_with_trl(arguments.means, rounds=rounds, steps=steps)
    if not (arguments.engine or arguments.trl):
        given = {name: vars(arguments)[name] for name in vars(Sizes()) if vars(arguments)[name] is not None}
        means = QUICK_MEANS if arguments.quick else arguments.means
        modes = list(BETWEEN if arguments.between else MODES)
        compare_runs(modes, means, replace(QUICK if arguments.quick else Sizes(), **given), rounds=rounds, steps=steps)


def compare_with_trl(means: Sequence[float], *, rounds: int, steps: int) -> None:
    """Ours and TRL, where there is one: `turns_beside_trl.py`."""
    version = trl_version()
    if version is None:
        sys.exit(f"error: there is no TRL in an environment of its own; `{INSTALL}` installs it")
    print(f"TRL {version}")
    try:
        for mean_s in means:
            turns_beside_trl.compare(MODES, mean_s, rounds=rounds, steps=steps)
    except TrlFailed as failure:
        sys.exit(f"error: {failure}")


if __name__ == "__main__":
    main()
