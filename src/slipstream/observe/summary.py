"""`summary.json`: what a run came to. Its fields are an interface; scripts may rely on them.

`violations` checks the identities: every admitted prompt has exactly one fate, every process-second exactly one state.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.core.config import STAGES, RunConfig
from slipstream.core.disk import replace_file
from slipstream.core.files import decode_json, load_json
from slipstream.core.held_out import Measured
from slipstream.core.recipes import stage_dir
from slipstream.observe.balance import Balance
from slipstream.observe.health import AlarmSpan

Status = Literal["running", "done", "failed", "interrupted"]
ACCOUNTING_TOLERANCE_S = 1e-3


_MEASURES = ("reward", "reward_parts", "accuracy", "reward_error", "num_judged")  # of `Measured`


class Evaluation(msgspec.Struct, frozen=True):
    """The scores of one policy version's answers to held-out prompts: greedy ones, and `sampled_` at temperature 1.

    `reward` is the mean of what would be trained on, `reward_error` its standard error, `reward_parts` the means of its
    terms. The accuracies are shares of right answers, None where no term is named as the measure (`eval.measure`), of
    `num_judged` prompts: less than `num_prompts` where the measure abstained. Runs older than these lack them.
    """

    accuracy: float | None
    sampled_accuracy: float | None
    num_prompts: int
    reward: float | None = None
    sampled_reward: float | None = None
    reward_parts: dict[str, float] = {}
    sampled_reward_parts: dict[str, float] = {}
    reward_error: float | None = None
    sampled_reward_error: float | None = None
    num_judged: int | None = None
    sampled_num_judged: int | None = None

    @classmethod
    def of(cls, greedy: Measured, sampled: Measured, num_prompts: int) -> Evaluation:
        both = {"": greedy, "sampled_": sampled}
        found = {prefix + name: getattr(one, name) for prefix, one in both.items() for name in _MEASURES}
        return cls(num_prompts=num_prompts, **found)

    @property
    def greedy(self) -> Measured:
        return self._measured("")

    @property
    def sampled(self) -> Measured:
        return self._measured("sampled_")

    def _measured(self, prefix: str) -> Measured:
        return Measured(**{name: getattr(self, prefix + name) for name in _MEASURES})


class Evaluations(msgspec.Struct, frozen=True):
    """Version 0 (after the warm start) and the last one; None for one that was not run.

    Of `eval.sets` these are of the first, whose name is `primary`, and `sets` has the others, without `sampled_`.
    """

    before: Evaluation | None = None
    after: Evaluation | None = None
    primary: str = ""
    sets: dict[str, Evaluations] = {}

    @property
    def never_right(self) -> str | None:
        """A sentence where no answer was right in either: the measure may be one that never reaches 1."""
        both = [one for one in (self.before, self.after) if one is not None]
        shares = [share for one in both for share in (one.accuracy, one.sampled_accuracy) if share is not None]
        if self.after is None or not shares or any(shares):
            return None
        return "Accuracy reads 0 because no held-out answer reached 1 by eval.measure: does a right one score 1 there?"


BEST, BEST_FILE = "best", "best.json"
"""The folder of the best model in that of a run, and the file in it that says which one it is."""


class Best(msgspec.Struct, frozen=True):
    """The version of the model in `best/`: of all that were evaluated, the one with the highest `value` of `metric`.

    It may be of an attempt that a resume has cut off.
    """

    version: int
    metric: str
    value: float


def read_best(run_dir: Path) -> Best | None:
    """Return what `best/` of a run holds; None without it."""
    path = run_dir / BEST / BEST_FILE
    try:
        return decode_json(path, Best) if path.is_file() else None
    except (OSError, ValueError):
        return None


class _Prompts(msgspec.Struct, frozen=True):
    data: Data | None = None


def longest_prompt(run_dir: Path) -> int:
    """Return the tokens of the longest prompt that the run in `run_dir` took; 0 where no summary says it."""
    try:
        data = decode_json(run_dir / "summary.json", _Prompts).data
    except (OSError, ValueError):
        return 0
    return 0 if data is None else data.longest_tokens


class Throughput(msgspec.Struct, frozen=True):
    """Over the RL phase: from the first admission to the end of the last step; None where no step was finished."""

    generated_tokens_per_s: float | None
    trained_tokens_per_s: float | None
    completions_per_s: float | None


class Staleness(msgspec.Struct, frozen=True):
    """The staleness of consumed tokens. `histogram` maps steps to tokens; `updates_max` is in optimizer updates.

    `bound` is what the scheduling policy promises of `max`, None where that is nothing.
    """

    max: int
    mean: float
    bound: int | None
    histogram: dict[int, int]
    updates_max: int


class Prompts(msgspec.Struct, frozen=True):
    """Groups by fate. `lost` were admitted and have none; `repeated` were trained more than once: both are bugs.

    `failed` are groups of which every completion failed to be scored and that were dropped; `failed_completions` counts
    single ones, in all groups that were sampled for training; held-out answers that fail count in no field.
    """

    admitted: int
    trained: int
    failed: int
    skipped: int
    pending: int
    lost: int
    repeated: int
    regenerated_tokens: int
    failed_completions: int = 0


class Data(msgspec.Struct, frozen=True):
    """Prompts to train on and held out, those dropped as longer than `max_tokens`, and the longest of the others.

    `sets` are those of each of `eval.sets`.
    """

    num_train: int
    num_eval: int
    num_too_long: int
    max_tokens: int
    longest_tokens: int
    sets: dict[str, int] = {}


class WeightSync(msgspec.Struct, frozen=True):
    """Swaps by generators (`count`), publishes `skipped`, payload `bytes` moved; `pause_s`: decoding stood still."""

    count: int
    skipped: int
    bytes: int
    transfer_s_p50: float | None
    pause_s_p50: float | None
    pause_s_max: float | None


class TrainedRows(msgspec.Struct, frozen=True):
    """Rows of the trainer's microbatches, of one epoch: those of all contexts, and those that were `read`.

    Contexts of a group that begin alike share rows; `saved_frac` is the share that was not computed.
    """

    unshared: int
    read: int
    saved_frac: float

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> TrainedRows | None:
        """Sum over the metrics of steps; None where they have no such counts."""
        counted = [line for line in lines if "tokens_unshared" in line]
        unshared, read = (int(sum(line[name] for line in counted)) for name in ("tokens_unshared", "tokens_read"))
        return cls(unshared, read, 1.0 - read / unshared) if unshared else None

    @property
    def in_words(self) -> str:
        return f"{self.read:,} of {self.unshared:,} rows, {self.saved_frac:.0%} saved where contexts begin alike"


class EpisodeCounts(msgspec.Struct, frozen=True):
    """The episodes with an environment, of training and of evaluations, as the environments' process counted them.

    `episodes` began and `turns` were sampled in them; `mean_turns` is of those that ended. `restarts`: they began again
    as their environment failed; `failed`: it did so too often; `cut`: a limit ended them. `environment_s` is the sum
    over episodes of the time in answers. Of what generators had read of an episode before a turn, `parked_hit_frac` was
    still there, None where nothing was to be read; `evicted_sessions` times that was given up for want of memory. Of
    agents' requests for turns, `forks` began further branches of episodes that ended, and `refused` got no turn.
    `restored` environments went on from a state, after a resume or the loss of a worker; `begun_again` episodes were
    open before a process was lost or the run resumed, and began from their reset.
    """

    episodes: int
    turns: int
    mean_turns: float | None
    restarts: int
    failed: int
    cut: int
    tool_calls: int
    tool_errors: int
    environment_s: float
    parked_hit_frac: float | None
    evicted_sessions: int
    forks: int = 0
    refused: int = 0
    restored: int = 0
    begun_again: int = 0


class JudgeCounts(msgspec.Struct, frozen=True):
    """The work of a judge, for training and evaluations.

    `scored` completions got a score, for `cached` of them without a request of their own; `failures` got none.
    `requests` were sent, `retries` among them; `seconds` is the sum of their durations. Tokens are those that the
    endpoint counted, `cost` is by the judge's prices.
    """

    scored: int
    cached: int
    failures: int
    requests: int
    retries: int
    input_tokens: int
    output_tokens: int
    seconds: float
    cost: float

    @property
    def request_s(self) -> float | None:
        """The mean duration of a request."""
        return self.seconds / self.requests if self.requests else None


class Versions(msgspec.Struct, frozen=True):
    python: str
    torch: str
    slipstream: str
    commit: str | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `summary.json` holds. `accounting` maps process to state to seconds; each process sums to `wall_s`.

    After a resume `steps`, `eval`, `staleness`, `prompts`, `padding_frac` and `rows` are of all that led to the final
    weights; `wall_s`, `throughput`, `accounting`, `balance`, `weight_sync`, `episodes` and `judges` of the last
    attempt. `earlier_s` is what the attempts before it took up to the checkpoint that it went on from: `earlier_s +
    wall_s` is the run's time, less what was abandoned.
    """

    recipe: str
    seed: int
    status: Status
    steps: int
    wall_s: float
    policy_version: int
    model_params: int
    eval: Evaluations
    throughput: Throughput
    staleness: Staleness
    accounting: dict[str, dict[str, float]]
    prompts: Prompts
    weight_sync: WeightSync
    padding_frac: float
    versions: Versions
    earlier_s: float = 0.0
    adapter_params: int | None = None  # which alone are trained, beside `model_params`; None: all of these are
    evaluation: dict[str, Any] | None = None  # what the stage `evaluate` found (`stages/evaluate.py`)
    alarms: list[AlarmSpan] = []  # each with the steps it lasted, by the step it began at
    data: Data | None = None
    restarts: dict[str, int] = {}  # executor -> how often it was started again
    model_share: float | None = None  # of the work of all processes: in states that compute the model, wall time
    model_cpu_share: float | None = None  # the same states' part of the CPU seconds of all processes
    balance: Balance | None = None  # who starves, why, and what would help, over the loop (`observe/balance.py`)
    error: str | None = None  # of a run that failed: the reason
    stopped_because: str | None = None  # of a run that is done before its last step: `StopCause` (core/types.py)
    best: Best | None = None  # None without `eval.keep_best`
    callback_s: dict[str, float] = {}  # seconds in calls of each of the user's callbacks, beside the run, by its name
    episodes: EpisodeCounts | None = None  # None without an environment
    stages: dict[str, dict[str, Any]] = {}  # `stage.json` of the other stages that are done, by name
    judges: dict[str, JudgeCounts] = {}  # by name
    rows: TrainedRows | None = None  # None before a step
    resume_call: str | None = None  # what goes on with the run; None: `slipstream run --resume DIR`

    @classmethod
    def without_rl(cls, config: RunConfig, run_dir: Path, evaluation: dict[str, Any] | None) -> Summary:
        """Return that of a run whose stages are done and none of which is RL, of which it counts nothing."""
        stages = stage_records(run_dir)
        return cls(
            recipe=config.recipe,
            seed=config.seed,
            status="done",
            steps=0,
            wall_s=sum(record["seconds"] for record in stages.values()),
            policy_version=0,
            model_params=0,
            eval=Evaluations(),
            throughput=Throughput(None, None, None),
            staleness=Staleness(0, 0.0, None, {}, 0),
            accounting={},
            prompts=Prompts(0, 0, 0, 0, 0, 0, 0, 0),
            weight_sync=WeightSync(0, 0, 0, None, None, None),
            padding_frac=0.0,
            versions=versions(),
            evaluation=evaluation,
            stages=stages,
        )

    @property
    def trainable(self) -> str:
        """How much of the model is trained, in words."""
        trained = self.adapter_params or self.model_params
        return f"{trained:,} trainable of {self.model_params + (self.adapter_params or 0):,} parameters"

    @property
    def total_s(self) -> float:
        """Seconds of all attempts, without what was abandoned."""
        return self.earlier_s + self.wall_s


def stage_records(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return `stage.json` of the stages that are done, by their names."""
    paths = {stage: stage_dir(run_dir, stage) / "stage.json" for stage in STAGES}
    return {stage: load_json(path, dict[str, Any]) for stage, path in paths.items() if path.is_file()}


def write_summary(summary: Summary, path: Path) -> None:
    """Replace `path` atomically: a reader, also after a crash, sees the old file or the new one. DiskError."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def read_summary(path: Path) -> Summary:
    """The summary in `path`; raises SlipstreamError when fields are missing or of the wrong type."""
    return load_json(path, Summary)


def violations(summary: Summary) -> list[str]:
    """The identities that `summary` breaks, one sentence each; empty for a sound run."""
    found = []
    prompts, staleness = summary.prompts, summary.staleness
    fates = prompts.trained + prompts.failed + prompts.skipped + prompts.pending
    if prompts.admitted != fates:
        found.append(f"prompts: admitted {prompts.admitted}, but trained + failed + skipped + pending = {fates}")
    if prompts.lost or prompts.repeated:
        found.append(f"prompts: {prompts.lost} lost and {prompts.repeated} repeated, must be 0 and 0")
    for process, states in summary.accounting.items():
        total_s = sum(states.values())
        if abs(total_s - summary.wall_s) > ACCOUNTING_TOLERANCE_S:
            found.append(f"accounting: {process} sums to {total_s:.6f} s, but wall_s is {summary.wall_s:.6f}")
        if (least := min(states.values(), default=0.0)) < -ACCOUNTING_TOLERANCE_S:
            found.append(f"accounting: {process} has a state of {least:.6f} s")
    if staleness.bound is not None and staleness.max > staleness.bound:
        found.append(f"staleness: max {staleness.max} is above its bound {staleness.bound}")
    if staleness.histogram and max(staleness.histogram) != staleness.max:
        found.append(f"staleness: max {staleness.max}, but the histogram ends at {max(staleness.histogram)}")
    return found


def versions() -> Versions:
    """Return the versions in use: `commit` is the checkout this package lies in, None for an installed wheel."""
    return Versions(
        python=platform.python_version(),
        torch=importlib.metadata.version("torch"),
        slipstream=_own_version(),
        commit=_commit(Path(__file__).resolve().parents[3]),
    )


def _own_version() -> str:
    try:
        return importlib.metadata.version("slipstream-rl")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit(root: Path) -> str | None:
    if not (root / ".git").exists() or not (root / "src" / "slipstream").is_dir():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
