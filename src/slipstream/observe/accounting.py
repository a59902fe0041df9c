"""The accounting of a run's seconds and tokens, with what to change: from its files alone, while it runs or afterwards.

    read_accounting(run_dir) -> RunAccounting

is the one source of every share that is shown: `summary.json`, the terminal, the report, the watch page. States and
their kinds are in `observe/states.py`. Definitions:

    idle share      waiting over the time that a process was there. That of the whole run has its start and end in it;
                    the verdict is about the *loop*: from the first admission to the end of the last step
    step window     step n lasts from the end of step n - 1 to its own, by the trainer's timeline; the first from the
                    first admission. Windows are disjoint and cover the loop
    interference    how much slower each side is while the other computes (`observe/interference.py`)
    wasted tokens   sampled, or read again, and nobody was trained on them (`observe/waste.py`)
    verdict         which side starves, the split that would balance it, and the dial that would use the idle side
                    (`observe/balance.py`)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.files import load_json
from slipstream.core.recipes import resolve
from slipstream.core.run_log import read_decisions
from slipstream.observe import timeline
from slipstream.observe.balance import COMPUTING, Balance, Dial, Dials, Interference, Loop, Side, judge
from slipstream.observe.interference import SideWork
from slipstream.observe.states import idle_share, side_of, totals_of
from slipstream.observe.waste import WASTE, ReplicaTokens, Wasted, replica_tokens, wasted

CONTROLLER = "controller"


class ProcessAccounting(msgspec.Struct, frozen=True, kw_only=True):
    """One process over the run: `states` (state -> seconds) sum to its `wall_s`.

    It computes with `threads`, alone with `most_threads`, on `device`, perhaps `within` another process, as an inline
    executor does. `cpu_s`: the CPU seconds of what has ended of it, all threads; `model_cpu_s` of these were spent in
    states that compute the model.
    """

    name: str
    states: dict[str, float]
    threads: int = 1
    most_threads: int = 1
    device: str = "cpu"
    within: str = ""
    cpu_s: float = 0.0
    model_cpu_s: float = 0.0


class StepAccounting(msgspec.Struct, frozen=True, kw_only=True):
    """Step `step` from `start_s` to `end_s`, seconds since the start of the run; process -> state -> seconds."""

    step: int
    start_s: float
    end_s: float
    states: dict[str, dict[str, float]]


class RunAccounting(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. Times are seconds since the start of the run, which is `start_s` on the run's clock.

    `loop` is from the first admission to the end of the last step; `idle` of each side, and `balance`, are over it.
    None, and empty, before the first step is done.
    """

    start_s: float
    wall_s: float
    loop: tuple[float, float] | None
    processes: dict[str, ProcessAccounting]
    steps: list[StepAccounting]
    idle: dict[str, float]
    balance: Balance

    @property
    def accounting(self) -> dict[str, dict[str, float]]:
        """process -> state -> seconds, as in `summary.json`."""
        return {name: process.states for name, process in self.processes.items()}

    @property
    def model_cpu_share(self) -> float | None:
        """Share of the processes' CPU seconds that compute the model; None where nobody who did has told them."""
        cpu_s = sum(process.cpu_s for process in self.processes.values() if not process.within)
        model_s = sum(process.model_cpu_s for process in self.processes.values())
        return model_s / cpu_s if model_s and cpu_s else None


def accounting_bytes(run_dir: Path) -> int:
    """Return how many bytes `read_accounting` would read."""
    files = [run_dir / "events.jsonl", *timeline.process_files(run_dir)]
    return sum(path.stat().st_size for path in files if path.exists())


def read_accounting(run_dir: Path, *, window_s: tuple[float, float] | None = None) -> RunAccounting:
    """The accounting of a run that is over, or of what there is of one that goes on. SlipstreamError for damaged files.

    `window_s`: when it began and ended on its clock; None: as its files say, the same for a run that is over. One
    timeline is held at a time.
    """
    files = timeline.process_files(run_dir)
    wall_s = _wall_s(run_dir / "summary.json")
    is_over = window_s is not None or wall_s is not None
    start_s, end_s = _window(files, wall_s) if window_s is None else window_s
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    steps, bounds_ns = _steps(files, run_dir / "events.jsonl", start_ns)
    processes: dict[str, ProcessAccounting] = {}
    windows: dict[str, list[dict[str, float]]] = {}
    replicas: dict[int, ReplicaTokens] = {}
    work = SideWork(bounds_ns[min(1, len(steps))], bounds_ns[-1])  # the first step is cold
    for path in files:
        records = list(timeline.read_timeline(path))
        slices = timeline.presence(records, start_ns, end_ns, is_over=is_over)
        processes[path.stem] = _process(path.stem, records, timeline.account_windows(slices, [start_ns, end_ns])[0])
        windows[path.stem] = timeline.account_windows(slices, bounds_ns)
        work.add(path.stem, slices)
        if (told := replica_tokens(path.stem, records)) is not None:
            replicas[told[0]] = told[1]
    waste = list(wasted(read_decisions(run_dir / "events.jsonl"), replicas))
    loop = {name: totals_of(seconds) for name, seconds in windows.items()} if steps else {}
    bounds_s = [(bound_ns - start_ns) * 1e-9 for bound_ns in bounds_ns]
    interference = work.interference() if steps else Interference()
    sides = _sides(loop, processes)
    return RunAccounting(
        start_s=start_s,
        wall_s=end_s - start_s,
        loop=(bounds_s[0], bounds_s[-1]) if steps else None,
        processes=processes,
        steps=[
            StepAccounting(
                step=step,
                start_s=bounds_s[i],
                end_s=bounds_s[i + 1],
                states={name: seconds[i] for name, seconds in windows.items()},
            )
            for i, step in enumerate(steps)
        ],
        idle={name: side.idle for name, side in sides.items()},
        balance=_balance(
            loop, sides, processes, _config(run_dir), num_steps=len(steps), interference=interference, waste=waste
        ),
    )


def _wall_s(path: Path) -> float | None:
    """Return `wall_s` of `summary.json`; None without one of a run that is over."""

    class Ended(msgspec.Struct):
        status: str
        wall_s: float

    if not path.is_file():
        return None
    ended = load_json(path, Ended)
    return None if ended.status == "running" else ended.wall_s


def _window(files: Sequence[Path], wall_s: float | None) -> tuple[float, float]:
    """Return the time from the first record, of the controller if it has one, to the run's end or last record."""
    first_ns: dict[str, int] = {}
    last_ns = 0
    for path in files:
        for record in timeline.read_timeline(path):
            start_ns, end_ns = timeline.times_ns(record)
            first_ns[path.stem] = min(start_ns, first_ns.get(path.stem, start_ns))
            last_ns = max(last_ns, end_ns)
        if path.stem == CONTROLLER and wall_s is not None and CONTROLLER in first_ns:
            break  # it comes first, and says all
    start_s = first_ns.get(CONTROLLER, min(first_ns.values(), default=last_ns)) * 1e-9
    return start_s, last_ns * 1e-9 if wall_s is None else start_s + wall_s


def _config(run_dir: Path) -> RunConfig | None:
    """Return the run's configuration; None without one that this version can read: shares need none."""
    path = run_dir / "config.toml"
    try:
        return resolve(path) if path.is_file() else None
    except ConfigError:
        return None


def _process(name: str, records: Sequence[timeline.Record], states: dict[str, float]) -> ProcessAccounting:
    newest = timeline.ProcessStart(name, 0, 0)
    lives: list[timeline.CpuSoFar] = []  # what each has told last
    for record in records:
        match record:
            case timeline.ProcessStart():
                newest = record
                lives.append(timeline.CpuSoFar(record.time_ns))
            case timeline.CpuSoFar():
                lives[-1:] = [record]
    return ProcessAccounting(
        name=name,
        states=states,
        threads=newest.threads,
        most_threads=max(newest.threads, newest.threads_alone),
        device=newest.device,
        within=newest.within,
        cpu_s=sum(life.cpu_ns for life in lives) * 1e-9,
        model_cpu_s=sum(life.model_ns for life in lives) * 1e-9,
    )


def _steps(files: Sequence[Path], events: Path, start_ns: int) -> tuple[list[int], list[int]]:
    """The steps that were trained, and the bounds of their windows in nanoseconds: one more than there are steps."""
    trainer = next((path for path in files if side_of(path.stem) == "trainer"), None)
    steps: list[int] = []
    bounds_ns: list[int] = []
    began_ns = None  # the work on the first step
    for record in () if trainer is None else timeline.read_timeline(trainer):
        if isinstance(record, timeline.Instant) and record.name == timeline.TRAINED:
            steps.append(record.args["step"])
            bounds_ns.append(record.time_ns)
        elif began_ns is None and isinstance(record, timeline.Slice) and "step" in record.args:
            began_ns = record.start_ns
    if not steps:
        return [], [start_ns]
    # When this attempt first admitted or trained: a resume may bring a whole batch before that.
    times = (round(line.time_s * 1e9) for line in read_decisions(events) if line.begins)
    admitted_ns = next((time_ns for time_ns in times if time_ns >= start_ns), None)
    first_ns = began_ns if admitted_ns is None or admitted_ns > bounds_ns[0] else admitted_ns
    return steps, [start_ns if first_ns is None else first_ns, *bounds_ns]


def _sides(loop: Mapping[str, Mapping[str, float]], processes: Mapping[str, ProcessAccounting]) -> dict[str, Side]:
    names: dict[str, list[str]] = defaultdict(list)
    for name in loop:
        names[side_of(name)].append(name)
    return {
        side: Side(
            processes={name: loop[name] for name in members},
            units={name: processes[name].threads if processes[name].device == "cpu" else 1 for name in members},
        )
        for side, members in names.items()
    }


def _balance(
    loop: Mapping[str, Mapping[str, float]],
    sides: Mapping[str, Side],
    processes: Mapping[str, ProcessAccounting],
    config: RunConfig | None,
    *,
    num_steps: int,
    interference: Interference,
    waste: Sequence[Wasted],
) -> Balance:
    computing = [processes[name] for name in loop if side_of(name) in COMPUTING]
    on_cpu = [process.device == "cpu" for process in computing]
    verdict = judge(
        Loop(
            sides=sides,
            num_steps=num_steps,
            length_s=sum(next(iter(loop.values()), {}).values()),
            unit="threads" if all(on_cpu) else None if any(on_cpu) else "GPUs",
            shares_units=config is not None and config.is_colocated and all(on_cpu),
            shares_process=len({process.within or process.name for process in computing}) == 1,
            dials=_dials(config, inline={side_of(name) for name in loop if processes[name].within}),
        ),
        allows=lambda dial: config is not None and _is_valid(config, dial),
    )
    tokens = dict.fromkeys(WASTE, 0)
    for one in waste:
        tokens[one.cause] += one.tokens
    return Balance(
        idle={name: idle_share(seconds) for name, seconds in loop.items()},
        interference=interference,
        wasted_tokens=tokens,
        starves=verdict.starves,
        bottleneck=verdict.bottleneck,
        verdict=verdict.sentence,
        split=verdict.split,
        dial=verdict.dial,
    )


def _is_valid(config: RunConfig, dial: Dial) -> bool:
    """Whether the run could be started with its dial as suggested."""
    section, _, name = dial.field.rpartition(".")
    change: dict[str, Any] = {section: {name: dial.suggested}} if section else {name: dial.suggested}
    if dial.field == "completions_per_group" and config.loss.select == "all":
        change["loss"] = {"select": "best_and_worst"}
    try:
        resolve(config.model_dump(), change)
    except ConfigError:
        return False
    return True


def _dials(config: RunConfig | None, *, inline: Collection[str]) -> Dials | None:
    """Return the fields of `config`; workers are none of the sides that are `inline`, in the controller's process."""
    if config is None:
        return None
    has_workers, has_environments = "rewards" not in inline, config.environment.is_set
    admitted = (config.max_staleness + 1) * config.completions_per_step
    same = ("max_staleness", "takes_turns", "publish_every", "completions_per_group")
    is_ours = config.schedule.policy == "oldest_first"
    return Dials(
        **{name: getattr(config, name) for name in same},
        overtake_steps=config.overtake_steps if is_ours else None,
        epochs=config.trainer.epochs,
        select=config.loss.select,
        kv_on_update=config.generator.kv_on_update,
        eval_every=config.eval.every,
        reward_workers=config.rewards.num_workers if has_workers and not config.rewards.judges else 0,
        reward_model_ranks=config.rewards.model_ranks if config.rewards.models else 0,
        reward_model_tensor_parallel=config.rewards.model_tensor_parallel,
        sessions=config.sessions if has_environments else 0,
        most_sessions=-(-admitted // config.generator.replicas) if has_environments else 0,
        most_replicas=most if (most := config.generator.most_replicas) > config.generator.replicas else 0,
        environment_workers=config.environment.num_workers if has_environments and "environments" not in inline else 0,
    )
