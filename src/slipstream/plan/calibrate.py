"""Calibration of the simulator: from the files of finished runs to the seconds of everything (`Costs`).

Decode steps and microbatches are fitted by their rows and tokens (`plan/fits.py`). All else is a mean over the
timelines, as it would have been alone; latencies of messages come from comparing the files of two processes, whose
clocks are one. Runs that calibrate together are of one model on one machine; they may differ in everything else.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

import numpy as np

from slipstream.controller.pipeline import replica_of
from slipstream.controller.placement import place
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.run_log import LoopState, RolloutLine
from slipstream.core.sections import GeneratorConfig
from slipstream.core.types import CompletionFinished, Swapped
from slipstream.observe.states import DECODES, kind
from slipstream.observe.timeline import Instant, Slice
from slipstream.plan.fits import Fit, Pieces, RunProcesses, cores_of, fit, fit_background, seconds_in
from slipstream.plan.lengths import queued, recorded_turns
from slipstream.plan.recorded import RecordedRun, RecordedWorkload, of_last_attempt
from slipstream.plan.simulated_run import Batch, Costs

SLOT_ROWS = 8  # rows of the slot engine's decode steps, on a CPU, are a multiple of it (`generator/kv_cache.py`)
LONG_CONTEXT = 128  # tokens of a sequence from which on the keys and values that a step reads count
STEP_STATES = ("forward_backward", "optimizer", "collate", "reference", "teacher", "proximal", "values")
"""States of a training step."""
MEASURES = ("reference", "proximal", "values")  # those of them that only read
PASSES = DECODES | {"prefill", "re_prefill"}  # states of a generator that run the model for training
CLOSE_NS = 1000  # times that differ by less are the same
TURN = ("receive", "stage", "overhead")  # states of every turn of a generator's loop besides
WAKING = ("receive", "overhead")  # states of a trainer between two waits that a rollout has interrupted
TOGETHER_S = 3e-4  # rollouts that come within it are taken at once
SCORE_RANGE_S, SCORE_TRIALS = (1e-5, 10.0), 61
"""Seconds of scoring a completion that are tried: ten of each power of ten."""
MAX_SCORED = 4000  # completions that are looked at for it
LATEST = 0.95  # the quantile of latencies above which something else held a message up
FEWEST = 4  # factors that make a distribution
MAX_JITTER = 512  # factors of each kind that are kept
JITTER_QUANTILES = (0.005, 0.995)  # factors beyond them are cut: there the machine did something else
LEAST_JITTER = 0.05

Told = tuple[float, float]
"""(mean, of how many)"""


@dataclass(frozen=True)
class Calibration:
    """Seconds from the files of runs: `decode` by step and row, `train` by microbatch and token, `seconds` of the rest.

    `background`: what staging gets of a core where others want all of them.
    """

    cores: int
    decode: Fit
    train: Fit
    seconds: Mapping[str, float]
    background: float
    jitter: Mapping[str, tuple[float, ...]]
    runs: tuple[RecordedRun, ...]

    def costs(self, config: RunConfig) -> Costs:
        """Return the seconds of all pieces of a run like these with the dials of `config`."""
        threads = place(config, self.cores)
        generator, trainer = threads["generator"].together, threads["trainer"].together
        seconds, decode, train = self.seconds, self.decode, self.train
        pass_s, token_s = decode.seconds(generator, passes=1), decode.seconds(generator, prefilled=1)

        def train_s(batch: Batch) -> dict[str, float]:
            updates, epochs = config.updates_per_step, config.trainer.epochs
            share = config.trained_per_group / config.samples_per_group
            rows = round(batch.prompt_tokens + share * (batch.completion_tokens - batch.completions))
            microbatches = max(updates, -(-rows * epochs // config.trainer.microbatch_tokens))
            states = {
                "forward_backward": train.seconds(trainer, microbatches=microbatches, tokens=rows * epochs),
                "optimizer": updates * seconds["optimizer"],
                "collate": batch.completions * seconds["collate"],
            }
            measures = {state: rows * seconds[state] / train.speed(trainer) for state in MEASURES if seconds[state]}
            return states | measures

        return Costs(
            decode=lambda _, rows, context: decode.seconds(generator, steps=1, rows=rows, context=context),
            train=train_s,
            prefill=lambda _, tokens, is_alone: tokens * token_s + (pass_s if is_alone else 0.0),
            jitter=self.jitter,
            **{name: seconds[name.removesuffix("_s")] for name in FIXED},
        )

    def workload(self, config: RunConfig, seed: int) -> RecordedWorkload:
        """Return the groups of the runs for a run with `config`."""
        return RecordedWorkload(
            self.runs,
            groups_per_step=config.groups_per_step,
            samples=config.samples_per_group,
            num_held_out=config.eval.num_prompts,
            seed=seed,
        )


FIXED = tuple(field.name for field in fields(Costs) if field.type == "float")
"""The fields of `Costs` that are one number."""


def calibrate(runs: Sequence[RecordedRun]) -> Calibration:
    """Calibrate with `runs`. ConfigError where they are of different models or machines."""
    _check_alike(runs)
    machines = [RunProcesses(run) for run in runs]
    decode, train = _fit_decode(machines), _fit_train(machines)
    told = [_seconds(machine, decode.beside, train) for machine in machines]

    def mean_of(name: str) -> float:  # over runs, by how much each has seen
        count = sum(part[name][1] for part in told)
        return sum(mean * seen for mean, seen in (part[name] for part in told)) / count if count else 0.0

    staged = [each for machine in machines for each in _staging(machine, decode.beside)]
    stage_s, background = fit_background(staged)
    return Calibration(
        cores=machines[0].cores,
        decode=decode,
        train=train,
        seconds={name: mean_of(name) for name in told[0]} | {"stage": stage_s},
        background=background,
        jitter={"decode": _jitter(decode.residuals), "train": _jitter(_step_factors(machines, train.beside))},
        runs=tuple(runs),
    )


def _check_alike(runs: Sequence[RecordedRun]) -> None:
    for what, found in (
        ("models", {run.config.model.model_dump_json() for run in runs}),
        ("numbers of cores", {cores_of(run) for run in runs}),
    ):
        if len(found) > 1:
            raise ConfigError(
                f"runs with different {what} do not calibrate together",
                got=", ".join(str(run.path) for run in runs),
                hint="give runs of one model on one machine",
            )


def row_multiple(generator: GeneratorConfig) -> int:
    """Return the multiple that rows of a decode step and tokens of a prompt are rounded up to."""
    return SLOT_ROWS if generator.device == "cpu" and generator.engine == "native" else 1


def generator_dials(config: RunConfig) -> dict[str, Any]:
    """Return the fields of `SimulatedSetup` that are fields of a run's generators."""
    same = ("replicas", "segment_tokens", "prefill_chunk", "weight_update_at")
    fields = {name: getattr(config.generator, name) for name in same} | {"slots": config.generator.rows}
    fields |= {"prefill_tokens": config.generator.prefilled}
    return fields | {"weight_update": config.weight_update, "resident_versions": config.resident_versions}


def _fit_decode(machines: Sequence[RunProcesses]) -> Fit:
    """Seconds per decode step and row computed, per token prefilled, beside decoding or alone, and per pass alone."""
    longest = max(machine.run.config.least_sequence for machine in machines)
    terms = ("steps", "rows", "prefilled", "passes", "context")[: 5 if longest >= LONG_CONTEXT else 4]

    def pieces(run: int, machine: RunProcesses, name: str) -> Pieces:
        slices = [one for one in machine.slices[name] if one.state in (*PASSES, "evaluate") and one.count]
        number = np.array([one.count for one in slices], dtype=np.float64)
        is_decoding = np.array([one.state in (*DECODES, "evaluate") for one in slices], dtype=np.float64)
        live = is_decoding * np.array([one.units for one in slices]) / np.maximum(number, 1)
        multiple = row_multiple(machine.run.config.generator)
        middles = np.array([(one.start_ns + one.end_ns) / 2e9 for one in slices])
        columns = [
            is_decoding * number,
            np.ceil(live / multiple) * multiple * number,
            _prefilled(machine, name, slices, multiple),
            (1 - is_decoding) * number,
            is_decoding * number * _context(machine.run, name, middles),
        ]
        return Pieces.of(machine, run, name, slices, columns[: len(terms)])

    parts = [pieces(run, machine, name) for run, machine in enumerate(machines) for name in machine.generators]
    return fit(terms, machines[0].cores, parts)


def _prefilled(machine: RunProcesses, process: str, passes: Sequence[Slice], multiple: int) -> np.ndarray:
    """float64 [N]: prompt tokens, padding included, that each of `passes` has prefilled.

    A group's rows start with the step after; what is prefilled once more, after a swap, is not seen. Of an evaluation
    nobody has written that down: it has a prompt for every completion, and one starts where one ends.
    """
    first: dict[int, tuple[float, int]] = {}
    for line in machine.run.rollouts:
        if line.replica == replica_of(process) and line.started_s < first.get(line.ordinal, (np.inf, 0))[0]:
            first[line.ordinal] = line.started_s, len(line.prompt)
    tokens = np.zeros(len(passes))
    if not first:
        return tokens
    started_s, prompts = np.array(list(first.values())).T
    padded = np.ceil(prompts / multiple) * multiple
    is_own = np.array([one.state != "evaluate" for one in passes], dtype=bool)
    units = np.array([one.units for one in passes])
    tokens[~is_own] = units[~is_own] * (fmean(padded) / _mean_length(machine.run))
    if not is_own.any():
        return tokens
    # A row that starts with the first step of a slice was prefilled in the one before.
    starts_ns, firsts_ns = np.array([(one.start_ns, one.state_ns / one.count / 2) for one in passes])[is_own].T
    place = np.searchsorted(starts_ns, np.round(started_s * 1e9) + CLOSE_NS, side="right") - 1
    place -= (place >= 0) & (started_s * 1e9 < (starts_ns + firsts_ns)[place])
    np.add.at(tokens, np.flatnonzero(is_own)[place[place >= 0]], padded[place >= 0])
    return tokens


def _context(run: RecordedRun, process: str, times_s: np.ndarray) -> np.ndarray:
    """float64 [N]: tokens that the live rows of `process` have together at these times."""
    lines = [line for line in run.rollouts if line.replica == replica_of(process) and line.finished_s > line.started_s]
    started, finished = np.array([(line.started_s, line.finished_s) for line in lines]).reshape(-1, 2).T
    slope = np.array([line.num_tokens for line in lines]) / (finished - started)
    constant = np.array([len(line.prompt) for line in lines]) - slope * started
    total = np.zeros(len(times_s))
    for ends, sign in ((started, 1.0), (finished, -1.0)):
        order = np.argsort(ends)
        before = np.searchsorted(ends[order], times_s)
        sums = [np.concatenate([[0.0], np.cumsum(values[order])])[before] for values in (constant, slope)]
        total += sign * (sums[0] + sums[1] * times_s)
    return np.maximum(total, 0.0)


def _fit_train(machines: Sequence[RunProcesses]) -> Fit:
    """Seconds per microbatch and token of forward-backward."""

    def pieces(run: int, machine: RunProcesses) -> Pieces:
        slices = [one for one in machine.slices[machine.trainer] if one.state == "forward_backward" and one.count]
        columns = [np.array([one.count for one in slices], float), np.array([one.units for one in slices], float)]
        return Pieces.of(machine, run, machine.trainer, slices, columns)

    return fit(("microbatches", "tokens"), machines[0].cores, [pieces(*each) for each in enumerate(machines)])


def _seconds(machine: RunProcesses, beside: float, train: Fit) -> dict[str, Told]:
    run, config, trainer = machine.run, machine.run.config, machine.trainer
    own = machine.slices[trainer]
    start_s, end_s = run.loop_s

    def trained(*states: str) -> float:
        return machine.work_s(trainer, own, states, train.beside)

    steps, tokens = run.num_steps, sum(line["tokens_read"] for line in of_last_attempt(run))
    num_rollouts = sum(1 for line in run.rollouts if start_s <= line.scored_s <= end_s)
    num_events = sum(1 for line in run.events if start_s <= line.time_s <= end_s)
    uncounted_s = sum(one.state_ns * 1e-9 for one in own if one.state == "forward_backward" and not one.count)
    every = config.trainer.checkpoint_every
    sums: dict[str, tuple[float, float]] = {
        "optimizer": (trained("optimizer"), steps * config.updates_per_step),
        "collate": (trained("collate") + uncounted_s, steps * config.completions_per_step),
        "publish": (trained("publish", "stage"), steps // config.publish_every),
        "receive": (trained("receive"), num_rollouts),
        "wake": (trained("overhead"), _num_wakes(machine)),
        "record": (trained("record"), num_rollouts),
        "checkpoint": (trained("checkpoint"), steps // every if every else 0),
        "decide": (sum(seconds_in(one, ("schedule",)) for one in machine.slices["controller"]), num_events),
    }
    speed = train.speed(machine.threads[trainer])
    sums |= {state: (trained(state) * speed, tokens) for state in MEASURES}
    for name in machine.generators:
        for what, (total, count) in _of_generator(machine, name, beside).items():
            before = sums.get(what, (0.0, 0))
            sums[what] = before[0] + total, before[1] + count
    means = {name: (total / count if count else 0.0, float(count)) for name, (total, count) in sums.items()}
    latencies = _latencies(machine, *(means[name][0] for name in ("send", "receive", "wake")))
    return means | latencies


def _num_wakes(machine: RunProcesses) -> int:
    """Count how often rollouts came while the trainer waited: those that come together count once."""
    start_s, end_s = machine.run.loop_s
    scored_s = np.sort([line.scored_s for line in machine.run.rollouts if start_s <= line.scored_s <= end_s])
    own = machine.slices[machine.trainer]
    if not own:
        return 0
    is_waiting = np.array([kind(one.state) == "wait" or one.state in WAKING for one in own])
    place = np.searchsorted([one.start_ns * 1e-9 for one in own], scored_s, side="right") - 1
    is_apart = np.diff(scored_s, prepend=-np.inf) > TOGETHER_S
    return int((is_apart & is_waiting[np.maximum(place, 0)]).sum())


def _of_generator(machine: RunProcesses, name: str, beside: float) -> dict[str, tuple[float, float]]:
    """Return what one replica spends besides decode steps: (seconds of work, the number of pieces)."""
    run, slices = machine.run, machine.slices[name]
    start_s, end_s = run.loop_s
    busy, turns = _turns(slices)
    own = [line for line in run.rollouts if line.replica == replica_of(name) and start_s <= line.finished_s <= end_s]
    sent = sum(max(1, len(recorded_turns(line))) for line in own)
    evaluated = sum(one.units for one in slices if one.state == "evaluate") / _mean_length(run)
    swaps = sum(1 for r in run.timelines[name] if isinstance(r, Instant) and r.name == "swapped" and r.args["version"])
    return {
        "turn": (machine.work_s(name, busy, TURN, beside), turns),
        "send": (machine.work_s(name, slices, ("send",), beside), sent + evaluated),
        "swap": (machine.work_s(name, slices, ("swap",), beside), swaps),
    }


def _turns(slices: Sequence[Slice]) -> tuple[list[Slice], int]:
    """Return the slices between two waits in which something was decoded, and how many steps that were."""
    found: list[Slice] = []
    turns = 0
    for is_wait, group in itertools.groupby(slices, lambda one: kind(one.state) == "wait"):
        bout = [] if is_wait else list(group)
        if steps := sum(one.count for one in bout if one.state in DECODES or one.state == "evaluate"):
            found += bout
            turns += steps
    return found, turns


def _mean_length(run: RecordedRun) -> float:
    return max(1.0, fmean(line.num_tokens for line in run.rollouts)) if run.rollouts else 1.0


def _staging(machine: RunProcesses, beside: float) -> list[tuple[float, float]]:
    """Return for each version brought to a replica at low priority the seconds as in `RunProcesses.background_s`."""
    published = {
        one.args["version"]: float(one.end_ns)
        for one in machine.slices[machine.trainer]
        if one.state in ("publish", "stage") and "version" in one.args
    }
    swaps = [line.event for line in machine.run.events if isinstance(line.event, Swapped)]
    spans_ns = [(published[e.version], 1e9 * e.transfer_s) for e in swaps if e.version in published]
    return [machine.background_s(at_ns, at_ns + length_ns, beside) for at_ns, length_ns in spans_ns if length_ns > 0]


def _latencies(machine: RunProcesses, send_s: float, receive_s: float, wake_s: float) -> dict[str, Told]:
    """Seconds that messages take, and a completion to be scored."""
    run, trainer = machine.run, machine.trainer
    told: dict[tuple[int, int], float] = {}  # completion, group, step -> when the controller had word of it
    scored: dict[int, float] = {}
    admitted: dict[int, tuple[float, int]] = {}
    commanded: dict[int, float] = {}
    loop = LoopState()
    for line in run.events:
        if isinstance(line.event, CompletionFinished):
            told[line.event.ordinal, line.event.sample] = line.time_s
        for group in (move.group for move in loop.take(line) if move.fate is None):
            match group.phase:
                case "ready":
                    scored[group.ordinal] = line.time_s
                case "sampling" if not group.finished:
                    admitted[group.ordinal] = line.time_s, group.replica
                case "training":
                    commanded[group.step] = line.time_s
    together: dict[tuple[int, float], list[RolloutLine]] = defaultdict(list)  # that finished with one decode step
    last_s: dict[int, float] = defaultdict(float)
    for rollout in run.rollouts:
        together[rollout.replica, rollout.finished_s].append(rollout)
        last_s[rollout.ordinal] = max(last_s[rollout.ordinal], rollout.scored_s)
    to_controller = []
    for (_, finished_s), members in together.items():
        if heard := [told[one.ordinal, one.sample] for one in members if (one.ordinal, one.sample) in told]:
            to_controller.append(max(heard) - finished_s - len(members) * send_s)
    from_rewards = [
        time_s - last_s[ordinal]
        for ordinal, time_s in scored.items()
        if ordinal in last_s
        and _waited_s(machine, trainer, last_s[ordinal], time_s) > 2 / 3 * (time_s - last_s[ordinal]) > 0
    ]
    begun: dict[int, float] = {}
    for one in machine.slices[trainer]:
        if one.state in STEP_STATES and "step" in one.args:
            begun.setdefault(one.args["step"], one.start_ns * 1e-9)
    to_trainer = [
        _waited_s(machine, trainer, at, begun[n])
        for n, at in commanded.items()
        if n in begun and _waits(machine, trainer, at)
    ]
    to_generator = [
        _next_work(machine, name, time_s) - time_s
        for ordinal, (time_s, replica) in admitted.items()
        if (name := f"generator-{replica}") in machine.slices and _waits(machine, name, time_s)
    ]
    to_rewards_s, score_s = scoring(run)
    return {
        "score": (score_s, float(len(run.rollouts))),
        "to_rewards": (to_rewards_s, float(len(run.rollouts))),
        "from_rewards": _usual(from_rewards, less=wake_s + receive_s + _usual(to_controller)[0]),
        "to_controller": _usual(to_controller),
        "to_trainer": _usual(to_trainer),
        "to_generator": _usual(to_generator or to_controller),
    }


def scoring(run: RecordedRun) -> tuple[float, float]:
    """Seconds on the way to the rewards, and of one worker for one completion: such that a queue before so many workers
    ends when the recorded scores came, in the mean over completions."""
    lines = sorted(run.rollouts, key=lambda line: (line.finished_s, line.ordinal, line.sample))[:MAX_SCORED]
    if not lines:
        return 0.0, 0.0
    finished, scored = np.array([(line.finished_s, line.scored_s) for line in lines]).T
    best = (np.inf, 0.0, 0.0)
    for score_s in np.geomspace(*SCORE_RANGE_S, SCORE_TRIALS):
        each = [float(score_s)] * len(lines)
        late = scored - queued(finished.tolist(), each, run.config.rewards.num_workers)
        on_the_way = max(0.0, float(np.median(late)))
        best = min(best, (float(np.abs(late - on_the_way).mean()), on_the_way, float(score_s)))
    return best[1], best[2]


def _usual(seconds: Sequence[float], *, less: float = 0.0) -> Told:
    """Return the mean, without what is beyond the `LATEST` quantile: then something else held it up."""
    if not seconds:
        return 0.0, 0.0
    kept = np.minimum(seconds, np.quantile(seconds, LATEST))
    return max(0.0, float(kept.mean()) - less), float(len(seconds))


def _waited_s(machine: RunProcesses, name: str, start_s: float, end_s: float) -> float:
    """Return the seconds of this span of time in which `name` did nothing."""
    share = float(machine.share(name, np.array([start_s * 1e9]), np.array([end_s * 1e9]))[0])
    return (1 - share) * max(0.0, end_s - start_s)


def _waits(machine: RunProcesses, name: str, time_s: float) -> bool:
    """Return whether `name` waited at that moment."""
    slices = machine.slices[name]
    index = int(np.searchsorted([one.start_ns for one in slices], time_s * 1e9)) - 1
    return index >= 0 and slices[index].end_ns >= time_s * 1e9 and kind(slices[index].state) == "wait"


def _next_work(machine: RunProcesses, name: str, time_s: float) -> float:
    """Return when `name` began to prefill or decode after that moment, in which it waited."""
    begins = (one.start_ns for one in machine.slices[name] if one.state in PASSES and one.start_ns >= time_s * 1e9)
    return next((start_ns * 1e-9 for start_ns in begins), time_s)


def _jitter(factors: Sequence[float]) -> tuple[float, ...]:
    """Return some of `factors`, in their order, divided by their mean."""
    if len(factors) < FEWEST:
        return ()
    low, high = np.quantile(factors, JITTER_QUANTILES)
    kept = np.clip(np.asarray(factors), max(low, LEAST_JITTER), high)
    kept = kept[np.linspace(0, len(kept) - 1, min(len(kept), MAX_JITTER)).astype(int)]
    return tuple((kept / kept.mean()).tolist())


def _step_factors(machines: Sequence[RunProcesses], beside: float) -> list[float]:
    """Return the work of each training step over that of as many tokens in the mean of its run."""
    factors: list[float] = []
    for machine in machines:
        by_step: dict[int, list[Slice]] = defaultdict(list)
        for one in machine.slices[machine.trainer]:
            if one.state in STEP_STATES and "step" in one.args:
                by_step[one.args["step"]].append(one)
        tokens = {line["step"]: line["tokens_read"] for line in machine.run.metrics if line["step"] in by_step}
        work = {step: machine.work_s(machine.trainer, by_step[step], STEP_STATES, beside) for step in tokens}
        rate = sum(work.values()) / max(sum(tokens.values()), 1.0)
        factors += [work[step] / (rate * count) for step, count in tokens.items() if rate * count > 0]
    return factors
