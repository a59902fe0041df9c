"""Which side of the loop starves, the split that would balance it, and the dial that would use the idle side. Pure.

`judge` takes what the sides did from the first admission to the end of the last step, measured
(`observe/accounting.py`) or simulated. The order of its questions:

    1. Do scores hold both up?          the trainer waits for rewards most; while they start, nothing is said
    2. Does either side wait at all?    below `SMALL` on both sides, the run is balanced
    3. Do environments hold both up?    both wait, generators most for environments
    4. Do they take turns?              both wait, generators for the bound: `max_staleness` 0 means that, a tight one
                                        leads to it. Where generators wait for something else, nothing is said
    5. Do stragglers hold it up?        a batch lies ready behind one old group
    6. Else one side waits for the other's work.

Nothing is said of fewer than `LEAST_STEPS`, nor of executors that share one process, where each waits while another
works. A suggestion is a change: of the split one by which steps get shorter by more than `SMALL`, of a dial at most
`MOST_CHANGE` times its present value, since what is computed from a run holds near it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from slipstream.core.plain import plural
from slipstream.core.ranks import RANK_MARK
from slipstream.observe.states import idle_share, in_words, seconds_of, totals_of

SMALL = 0.1
"""Of a side's time: waiting less than this is what two processes need to hand things to each other."""
LEAST_STEPS = round(1 / SMALL)
"""With fewer the first step, in which the loop fills and everything is cold, is more than `SMALL` of the time."""
MOST_CHANGE = 2

COMPUTING = ("trainer", "generator", "reward_models", "reference", "teacher", "critic")
"""Sides that run models: those among which cores or GPUs are split."""

Starves = Literal["trainer", "generator", "both", "neither"]
Bottleneck = Literal["generation", "training", "rewards", "environments", "stragglers", "turns", "none"]


@dataclass(frozen=True)
class Side:
    """The processes of one side in the loop: seconds by state of each, and the units (threads or GPUs) each has."""

    processes: Mapping[str, Mapping[str, float]]
    units: Mapping[str, float]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by state of all its processes together."""
        return totals_of(self.processes.values())

    @property
    def idle(self) -> float:
        return idle_share(self.seconds)

    def share(self, *states: str) -> float:
        """Return the share of `states` in the time that its processes were there."""
        seconds = self.seconds
        there_s = sum(seconds.values()) - seconds_of("gone", seconds)
        return sum(seconds.get(state, 0.0) for state in states) / there_s if there_s > 0 else 0.0

    @property
    def num_present(self) -> float:
        """The number of its groups that were there, on average; ranks of one come and go together."""
        leaders = [seconds for name, seconds in self.processes.items() if RANK_MARK not in name]
        return sum(1 - seconds_of("gone", seconds) / (sum(seconds.values()) or 1) for seconds in leaders)

    @property
    def num_units(self) -> float:
        return sum(self.units.values())

    @property
    def work(self) -> float:
        """T: unit-seconds of work."""
        return sum(seconds_of("work", seconds) * self.units[name] for name, seconds in self.processes.items())


@dataclass(frozen=True)
class Dials:
    """The fields of the configuration that balance a run; `overtake_steps` is None where no group overtakes another.

    `most_sessions`: the episodes of a replica that the bound admits at a time.
    """

    max_staleness: int = 2
    takes_turns: bool = False
    publish_every: int = 1
    overtake_steps: int | None = None
    epochs: int = 1
    completions_per_group: int = 8
    select: str = "all"
    kv_on_update: str = "keep"
    eval_every: int = 0
    reward_workers: int = 1  # 0: functions are called by the controller's process
    reward_model_ranks: int = 0
    reward_model_tensor_parallel: int = 1
    sessions: int = 0
    most_sessions: int = 0
    most_replicas: int = 0  # 0: none may join while the run goes on
    environment_workers: int = 0  # 0: there are none, or they are in the caller's process


@dataclass(frozen=True)
class Loop:
    """`num_steps` steps in `length_s` seconds. `unit` is what the sides are measured in; None: in different ones.

    `shares_units`: trainer and generators have the same ones, by turns. `shares_process`: they are in one process.
    `dials`: None where nobody knows them.
    """

    sides: Mapping[str, Side]
    num_steps: int
    length_s: float
    unit: str | None = "threads"
    shares_units: bool = False
    shares_process: bool = False
    dials: Dials | None = None


class Interference(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a piece of work while the other side computes, over those while it does not; None: too little seen."""

    decode: float | None = None
    train: float | None = None


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """The units of each side now, in exact balance and in whole numbers, and a step's seconds with each.

    In balance T_i / n_i is the same for every side i, with T_i unit-seconds of work per step: for two sides LlamaRL's
    T_t / theta = T_g / (1 - theta) (arXiv:2505.24034, section 7). It supposes that work scales with units.
    """

    unit: str
    now: dict[str, float]
    balanced: dict[str, float]
    whole: dict[str, int]
    step_s_now: float
    step_s_balanced: float
    step_s_whole: float


class Dial(msgspec.Struct, frozen=True, kw_only=True):
    """A field of the configuration, what it is and what would use the idle side."""

    field: str
    now: float | str
    suggested: float | str
    effect: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """`sentence` says all of it; the rest is for programs. Empty, and None, where it cannot be told."""

    starves: Starves | None
    bottleneck: Bottleneck | None
    sentence: str
    split: Split | None = None
    dial: Dial | None = None


NOTHING = Verdict(starves=None, bottleneck=None, sentence="")


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """`balance` of `summary.json`: over the loop, from the first admission to the end of the last step.

    `idle`: process -> share of waiting. `starves`: the side that lacks work. `verdict` is empty where none
    can be told.
    """

    idle: dict[str, float]
    interference: Interference
    wasted_tokens: dict[str, int]
    starves: Starves | None
    bottleneck: Bottleneck | None
    verdict: str
    split: Split | None
    dial: Dial | None


def judge(loop: Loop, *, allows: Callable[[Dial], bool] = lambda _: True) -> Verdict:
    """Return the side of `loop` that waits for the other, and what would help; `allows` says if a dial may be set."""
    trainer, generator = loop.sides.get("trainer"), loop.sides.get("generator")
    if trainer is None or generator is None or loop.num_steps < LEAST_STEPS or loop.shares_process:
        return NOTHING
    takes_turns = loop.dials is not None and loop.dials.takes_turns
    found = _diagnosis(trainer, generator, takes_turns=takes_turns)
    starts = [loop.sides[name].share("start_up") for name in ("rewards", "reward_models") if name in loop.sides]
    if found is None or (found[1] == "rewards" and 2 * max(starts, default=0) >= trainer.share("wait_rewards")):
        return NOTHING
    starves, bottleneck = found
    split = _split(loop)
    dial = None if loop.dials is None else _dial(loop, loop.dials, trainer, generator, bottleneck)
    if dial is not None and not allows(dial):
        dial = None
    clauses = [_opening(trainer, generator, bottleneck, loop.dials)]
    pool = "" if loop.dials is None else _pool_in_words(loop, loop.dials, trainer, generator)
    if pool and bottleneck == "generation":
        clauses.append(pool)
    elif split is not None and bottleneck in ("generation", "training") and _is_shorter(split):
        clauses.append(_split_in_words(split))
    if dial is not None:
        clauses.append(dial.effect)
    elif bottleneck == "environments":
        clauses.append("faster environments would shorten that wait")
    return Verdict(starves=starves, bottleneck=bottleneck, sentence="; ".join(clauses) + ".", split=split, dial=dial)


def _diagnosis(trainer: Side, generator: Side, *, takes_turns: bool) -> tuple[Starves, Bottleneck] | None:
    idle, rival = trainer.idle - trainer.share("wait_critic"), generator.idle  # training goes on in the critic
    waits = {what: trainer.share(f"wait_{what}") for what in ("generation", "rewards", "straggler")}
    longest = max(waits, key=waits.__getitem__)
    if longest == "rewards" and waits["rewards"] >= SMALL:
        return "both" if rival >= SMALL else "trainer", "rewards"
    if idle < SMALL and rival < SMALL:
        return "neither", "none"
    if idle >= SMALL and generator.share("wait_environment") >= max(SMALL, rival / 2):
        return "both", "environments"
    if takes_turns or min(idle, rival) >= max(SMALL, max(idle, rival) / 2):
        return ("both", "turns") if takes_turns or generator.share("wait_trainer") >= rival / 2 else None
    if longest == "straggler" and waits["straggler"] >= SMALL:
        return "trainer", "stragglers"
    return ("trainer", "generation") if idle > rival else ("generator", "training")


def _opening(trainer: Side, generator: Side, bottleneck: Bottleneck, dials: Dials | None) -> str:
    idle, rival = f"{trainer.idle:.0%} of the time", f"{generator.idle:.0%}"
    asked = f"{generator.share('wait_environment'):.0%} of the time"
    unscored, late = (f"{trainer.share(f'wait_{what}'):.0%} of the time" for what in ("rewards", "straggler"))
    bound = "" if dials is None else f" at max_staleness = {dials.max_staleness}"
    return {
        "rewards": f"Scoring is the bottleneck: the trainer waits for rewards {unscored}, generators idle {rival}",
        "environments": f"Environments are the bottleneck: generators wait for them {asked}, the trainer idles {idle}",
        "none": f"Balanced: the trainer idles {idle}, generators {rival}",
        "turns": f"Trainer and generators take turns{bound}: the trainer idles {idle}, generators {rival}",
        "stragglers": f"Stragglers hold the trainer up: {late} a batch lies ready behind one old group",
        "generation": f"Generation is the bottleneck: the trainer idles {idle}, generators {rival}",
        "training": f"Training is the bottleneck: generators idle {rival}, the trainer {idle}",
    }[bottleneck]


def _split(loop: Loop) -> Split | None:
    sides = {name: loop.sides[name] for name in COMPUTING if name in loop.sides}
    work = {name: side.work / loop.num_steps for name, side in sides.items()}
    now = {name: side.num_units for name, side in sides.items()}
    if loop.unit is None or loop.shares_units or min(work.values()) <= 0 or min(now.values()) <= 0:
        return None
    total, total_work = sum(now.values()), sum(work.values())
    whole = whole_split(work, round(total))
    return Split(
        unit=loop.unit,
        now=now,
        balanced={name: total * value / total_work for name, value in work.items()},
        whole=whole,
        step_s_now=loop.length_s / loop.num_steps,
        step_s_balanced=total_work / total,
        step_s_whole=max(work[name] / whole[name] for name in work),
    )


def whole_split(work: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` units, at least one for each side, so that the slowest side (work over units) is as fast as can be.

    Every further unit goes to the side that is slowest then, which is optimal: the last one to get a unit would be the
    slowest without it.
    """
    units = dict.fromkeys(work, 1)
    for _ in range(total - len(work)):
        slowest = max(work, key=lambda name: work[name] / units[name])
        units[slowest] += 1
    return units


def _is_shorter(split: Split) -> bool:
    """Whether another whole split promises steps that are shorter by more than what nobody would see."""
    return split.whole != split.now and split.step_s_whole < (1 - SMALL) * split.step_s_now


def _split_in_words(split: Split) -> str:
    names = list(split.now)
    exact = " and ".join(f"{name} {split.balanced[name]:.1f}" for name in names)
    now = " and ".join(f"{split.now[name]:g}" for name in names)
    whole = " and ".join(str(split.whole[name]) for name in names)
    return (
        f"in balance {split.unit} would be {exact} (now {now}), so {whole} for steps of {split.step_s_whole:.2g} s "
        f"instead of {split.step_s_now:.2g} s"
    )


def _pool_in_words(loop: Loop, dials: Dials, trainer: Side, generator: Side) -> str:
    """Say how many more generators would spare the trainer its wait, of those that may join; '' where none would.

    n of them sample n times as much; a step takes at least as long as the trainer's own work.
    """
    waits, now = trainer.share("wait_generation"), generator.num_present
    wanted = min(now * waits / max(1 - waits, 0.05), (MOST_CHANGE - 1) * now, dials.most_replicas - now)
    more = math.ceil(round(wanted, 2))
    if waits < SMALL or more < 1:
        return ""
    step_s = loop.length_s / loop.num_steps
    then_s = step_s * max(1 - waits, now / (now + more))
    return (
        f"{plural(more, 'more generator')} than the {now:.3g} that were there would shorten steps from "
        f"{step_s:.2g} s to {then_s:.2g} s (`slipstream launch --group generator --join`)"
    )


def _dial(loop: Loop, dials: Dials, trainer: Side, generator: Side, bottleneck: Bottleneck) -> Dial | None:
    dial_of: dict[Bottleneck, Callable[[], Dial | None]] = {
        "turns": lambda: _more_overlap(dials),
        "rewards": lambda: _more_scoring(loop, dials, trainer),
        "environments": lambda: _more_episodes(dials),
        "stragglers": lambda: _more_room(dials),
        "generation": lambda: _less_beside(loop, dials, generator) or _more_updates(dials, trainer),
        "training": lambda: _more_samples(dials, generator),
    }
    return dial_of[bottleneck]() if bottleneck in dial_of else None


def _change(field: str, now: float | str, suggested: float | str, effect: str, *, was: str | None = None) -> Dial:
    """`field` = `suggested` with its effect in words; `was` stands behind the value, by default the present one."""
    told = f" (now {now})" if was is None else was
    return Dial(field=field, now=now, suggested=suggested, effect=f"{field} = {suggested}{told} {effect}")


def _more_overlap(dials: Dials) -> Dial:
    """Suggest to publish more often, at the same bound as skipped versions count in it, else a wider bound."""
    if dials.publish_every > 1:
        return _change("publish_every", dials.publish_every, 1, "would let them overlap more at the same bound")
    now, more = dials.max_staleness, " more" if dials.max_staleness else ""
    return _change("max_staleness", now, now + 1, f"would let them overlap{more}", was="")


def _less_beside(loop: Loop, dials: Dials, generator: Side) -> Dial | None:
    """Suggest to spare what generators do besides sampling, where it takes a tenth of their time."""
    evaluates = loop.num_steps > dials.eval_every  # else only at the ends, which no `every` spares
    spared: dict[str, tuple[str, float | str, float | str]] = {
        "drain": ("weight_update", "between_batches", "in_flight"),
        "re_prefill": ("generator.kv_on_update", dials.kv_on_update, "keep"),
        "evaluate": ("eval.every", dials.eval_every, (1 + evaluates) * dials.eval_every),
    }
    state = max(spared, key=generator.share)
    field, now, suggested = spared[state]
    if generator.share(state) < SMALL or now == suggested:
        return None
    less = "halve" if state == "evaluate" else "spare"
    effect = f"would {less} the {generator.share(state):.0%} of their time that generators spend in {in_words(state)}"
    return _change(field, now, suggested, effect)


def _more_scoring(loop: Loop, dials: Dials, trainer: Side) -> Dial | None:
    """Suggest scoring that is as much faster as the step would be without waiting for it. None without workers."""
    factor = 1 / max(1 - trainer.share("wait_rewards"), 0.05)
    models, functions = loop.sides.get("reward_models"), loop.sides.get("rewards")
    by_models = models is not None and (functions is None or models.share("score") > functions.share("score"))
    name, now = ("model_ranks", dials.reward_model_ranks) if by_models else ("num_workers", dials.reward_workers)
    if now < 1:
        return None
    suggested = min(max(now + 1, math.ceil(now * factor)), MOST_CHANGE * now)
    together = dials.reward_model_tensor_parallel if by_models else 1
    suggested = math.ceil(suggested / together) * together
    return _change(f"rewards.{name}", now, suggested, "or faster scoring would shorten that wait")


def _more_episodes(dials: Dials) -> Dial | None:
    """Suggest more episodes to go on with meanwhile, where the bound admits more; else more workers, if there are."""
    if (now := dials.sessions) < dials.most_sessions:
        suggested = min(MOST_CHANGE * now, dials.most_sessions)
        effect = "would give generators other episodes to go on with; faster environments would shorten that wait"
        return _change("generator.sessions", now, suggested, effect)
    if (now := dials.environment_workers) < 1:
        return None
    effect = "would shorten that wait where environments compute, faster environments anywhere"
    return _change("environment.num_workers", now, MOST_CHANGE * now, effect)


def _more_room(dials: Dials) -> Dial | None:
    """Suggest a wider bound, for stragglers alone: a window without it would only hold generators back."""
    now, passing = dials.max_staleness, dials.overtake_steps
    if passing is None:
        return None
    suggested = MOST_CHANGE * max(now, 1)
    was = f" with overtake_steps = {passing + suggested - now} (now {now} and {passing})"
    effect = "would let younger groups pass, and make no others older"
    return _change("max_staleness", now, suggested, effect, was=was)


def _more_updates(dials: Dials, trainer: Side) -> Dial | None:
    """Suggest as many epochs (T) as fit into the time that the trainer waits."""
    updates, now = trainer.share("forward_backward", "optimizer"), dials.epochs
    suggested = int(now * min(1 + trainer.idle / updates if updates > 0 else 1.0, MOST_CHANGE))
    if suggested <= now:
        return None
    was = f" (T, updates per sample; now {now})"
    return _change("trainer.epochs", now, suggested, "would use the idle trainer", was=was)


def _more_samples(dials: Dials, generator: Side) -> Dial | None:
    """Suggest as many completions (K) as generators could sample without waiting; best and worst are trained."""
    now = dials.completions_per_group
    suggested = int(now * min(1 / max(1 - generator.idle, 0.05), MOST_CHANGE))
    if suggested <= now:
        return None
    was, effect = f" (K; now {now})", "would use idle generators"
    if dials.select == "all":
        was += " with loss.select = 'best_and_worst'"
        effect += "; two of each group are trained on, the rest is not"
    return _change("completions_per_group", now, suggested, effect, was=was)
