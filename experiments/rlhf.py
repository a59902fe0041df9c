"""RLHF in miniature, shared by experiments: the recipe `tldr_mini`, with models that many runs begin with made once.

Asynchronous RLHF's dial (arXiv:2410.18252, section 3.2): N minibatches are sampled by one policy, then each of them is
trained on once. Here that is one step of N minibatches at staleness 0: its update j (0 <= j < N) trains on completions
that are j updates old.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes

from experiments.comparison import LEAST_GAIN, is_as_great, is_greater
from experiments.kept import Row, Wanted
from experiments.kept import outcomes as of_runs
from experiments.lab import Lab, Spec, metrics, summary
from experiments.section import spread
from experiments.step_drift import kl_by_step
from slipstream.core.recipes import merge, stage_dir

RECIPE = "tldr_mini"
SEEDS = (0, 1, 2, 3, 4)
"""Five, so that a difference which all of them show counts (`experiments/comparison.py`)."""

SIZES: dict[str, dict[str, int]] = {
    "S": {"hidden_size": 64, "intermediate_size": 192, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4},
    "M": {"hidden_size": 128, "intermediate_size": 384, "num_layers": 3, "num_heads": 4, "num_kv_heads": 4},
    "L": {"hidden_size": 256, "intermediate_size": 768, "num_layers": 3, "num_heads": 8, "num_kv_heads": 8},
}
"""Policies and reward models; M is the recipe's."""
USUAL = "M"

SFT_SEED = 0
"""All seeds begin with one SFT policy per size, as with one base model: some seeds of a fresh one learn to copy late or
never, and leave a reward model near chance, from which nothing can be gained (docs/log.md)."""

MORE_DATA: dict[str, Any] = {
    "prompts": {"num_train": 12000},
    "sft": {"steps": 1000, "num_demonstrations": 12000},
    "preferences": {"num_prompts": 2000},
}
"""Twice the recipe's, or more."""

LR = 1e-4
KL_COEF = 0.1
_NO_PENALTY = {"coef": 0.0}
_LEAVE_ONE_OUT = {"advantages": "leave_one_out", "whiten_advantages": "no"}
_GROUP_MEAN = {"advantages": "group_mean", "whiten_advantages": "no"}

LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {"loss": {"name": "ppo", "advantages": "gae", "whiten_advantages": "minibatch"}},
    "rloo": {"loss": {"name": "rloo", **_LEAVE_ONE_OUT}},
    "proximal_rloo": {"loss": {"name": "proximal_rloo", **_LEAVE_ONE_OUT}},
    "copg": {"loss": {"name": "copg", **_LEAVE_ONE_OUT}},
    "online_dpo": {
        "loss": {"name": "online_dpo", "params": {"beta": 0.1}, "select": "best_and_worst", **_GROUP_MEAN},
        "kl": _NO_PENALTY,  # beta is the penalty
    },
    "best_of_2": {
        "loss": {"name": "best_of_n", "select": "best", **_GROUP_MEAN},
        "kl": {"place": "loss", "estimator": "k2"},  # a penalty in the reward only chooses; A has none
        "trainer": {"optimizer": {"lr": LR / 3}},  # A: 1e-6 where the others have 3e-6
    },
    "grpo": {"loss": {"name": "grpo", "advantages": "group_normalised", "whiten_advantages": "no"}},
    "aipo": {"loss": {"name": "aipo", **_GROUP_MEAN}},
}
"""What each loss changes, its advantages and penalty included."""

NAMES = {
    "ppo": "PPO",
    "rloo": "RLOO",
    "proximal_rloo": "Proximal RLOO",
    "copg": "CoPG",
    "online_dpo": "Online DPO",
    "best_of_2": "Best of 2",
    "grpo": "GRPO",
    "aipo": "AIPO",
}


@dataclass(frozen=True)
class Tuned:
    """Times a loss's own learning rate, and times its own penalty: the KL in reward or loss, or Online DPO's beta."""

    lr_times: float = 1.0
    penalty_times: float = 1.0


UNTUNED = Tuned()


@dataclass(frozen=True)
class Run:
    """One run of RL and its evaluation; N = `num_minibatches`.

    `measured`: one that does not measure the KL of all its completions itself keeps their tokens and logprobs, from
    which it is computed afterwards. What is trained does not change.
    """

    loss: str
    num_minibatches: int
    seed: int
    policy: str = USUAL
    reward_model: str = USUAL
    tuned: Tuned = UNTUNED
    measured: bool = False

    @property
    def name(self) -> str:
        name = (
            f"rlhf {self.loss} N={self.num_minibatches} policy {self.policy} reward model {self.reward_model} "
            f"seed {self.seed}"
        )
        name += f" lr x{self.tuned.lr_times:g}" * (self.tuned.lr_times != 1.0)
        return name + f" penalty x{self.tuned.penalty_times:g}" * (self.tuned.penalty_times != 1.0)


@dataclass(frozen=True)
class Pipeline:
    """How long RL is: `updates` of `prompts_per_update` x 2 completions, whatever N. `overrides` are every run's.

    `by_size`: tables `sft` and `reward_model` that the models of one size have besides. `easier`: a pipeline with
    whose SFT policy this one's fine-tuning begins, where its own prompts are too hard to begin with.
    """

    updates: int = 192
    prompts_per_update: int = 32
    overrides: Mapping[str, Any] = field(default_factory=dict)
    by_size: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    easier: Pipeline | None = None

    @property
    def told(self) -> str:
        """For a section's setup."""
        return (
            "`tldr_mini` with more data; one SFT policy, and preferences and a reward model for each seed; "
            f"{self.updates} updates of {self.prompts_per_update} prompts x 2 completions for every N, a learning rate "
            "that falls to 0; win rate and KL on 500 held-out prompts x 2 completions at temperature 1"
        )

    def sft(self, lab: Lab, size: str = USUAL) -> Spec:
        """The SFT policy of one size, with which every seed begins."""
        own: dict[str, Any] = {
            "stages": ["sft"],
            "model": SIZES[size],
            "critic": {"path": "stage:sft"},  # there is no stage yet that makes the recipe's
            "rewards": {"models": []},
        }
        if self.easier is not None:
            own["sft"] = {"path": model_of(lab.place(self.easier.sft(lab, size)), "sft")}
        return self._spec(f"rlhf sft {size}", SFT_SEED, merge(own, self._tables(size, "sft")))

    def judge(self, lab: Lab, seed: int, size: str = USUAL) -> Spec:
        """The reward model of one size, which begins as the SFT policy of that size.

        Preferences are between completions of the usual size's policy, which is also what scores are normalised on: a
        reward model of another size learns from the same pairs.
        """
        start = model_of(lab.place(self.sft(lab)), "sft")
        own: dict[str, Any] = {
            "stages": ["preferences", "reward_model"],
            "model": {"path": start},
            "kl": {"reference": start},
        }
        if size != USUAL:
            usual = stage_dir(lab.place(self.judge(lab, seed)), "preferences")
            own |= {
                "stages": ["reward_model"],
                "reward_model": {
                    "path": model_of(lab.place(self.sft(lab, size)), "sft"),
                    "preferences": str(usual / "preferences.jsonl"),
                },
            }
        return self._spec(f"rlhf reward model {size} seed {seed}", seed, merge(own, self._tables(size, "reward_model")))

    def settings(self, run: Run) -> dict[str, Any]:
        """The settings of RL, but for where its models lie. ValueError where N does not divide `updates`."""
        num = run.num_minibatches
        if self.updates % num:
            raise ValueError(f"{self.updates} updates are no whole number of steps of {num}")
        own: dict[str, Any] = {
            "stages": ["rl", "evaluate"],
            "steps": self.updates // num,
            "groups_per_step": self.prompts_per_update * num,
            "completions_per_group": 2,
            "max_staleness": 0,
            "weight_update": "between_batches",
            "kl": {"coef": KL_COEF},
            "rewards": {"terms": []},
            "loss": {"skip_no_signal": False},  # else a policy that repeats itself would sample more than another
            "trainer": {
                "minibatches": num,
                "checkpoint_every": 0,
                "optimizer": {"lr": LR, "schedule": "linear"},
            },
            "eval": {"num_prompts": 64},
            "evaluation": {"num_samples": 2},
            "observe": {"tokens_every": 0},
        }
        own = merge(own, LOSSES[run.loss])
        own["trainer"]["optimizer"]["lr"] *= run.tuned.lr_times
        own["kl"]["coef"] *= run.tuned.penalty_times
        if "beta" in (of_loss := own["loss"].get("params", {})):
            own = merge(own, {"loss": {"params": {"beta": of_loss["beta"] * run.tuned.penalty_times}}})
        if run.measured and not measures_all(own["kl"]):
            own = merge(own, {"observe": {"tokens_every": 1}})
        return own

    def rl(self, lab: Lab, run: Run) -> Spec:
        """RL and its evaluation. ValueError as in `settings`."""
        start = model_of(lab.place(self.sft(lab, run.policy)), "sft")
        judge = model_of(lab.place(self.judge(lab, run.seed, run.reward_model)), "reward_model")
        models = {
            "model": {"path": start},
            "kl": {"reference": start},
            "rewards": {"models": [{"path": judge}]},
            "critic": {"path": judge},
        }
        return self._spec(run.name, run.seed, merge(self.settings(run), models))

    def outcomes(self, lab: Lab, runs: Sequence[Run], kept: Path | None = None) -> dict[Run, Outcome]:
        """What they came to: by the lines of the file `kept`, or made now."""
        specs = {run: self.rl(lab, run) for run in runs}

        def make(some: Sequence[Run]) -> list[Path]:
            sizes = {"policies": [run.policy for run in some], "reward_models": [run.reward_model for run in some]}
            return self.make(lab, list(dict.fromkeys(run.seed for run in some)), [specs[run] for run in some], **sizes)

        def read(run: Run, place: Path) -> Row:
            return outcome(lab, specs[run], place, with_steps=run.measured).row()

        every = [asdict(self), MORE_DATA, SIZES]
        wanted = {
            run: Wanted(asdict(run), [asdict(run), self.settings(run), *every], lab.place(specs[run])) for run in runs
        }
        rows = of_runs(lab, kept, wanted, make=make, read=read)
        return {run: Outcome.of(row) for run, row in rows.items()}

    def make(
        self,
        lab: Lab,
        seeds: Sequence[int],
        runs: Sequence[Spec],
        *,
        policies: Sequence[str] = (),
        reward_models: Sequence[str] = (),
    ) -> list[Path]:
        """The folders of `runs`; what they begin with is made before them: the usual size first, then these sizes."""
        judges = [USUAL, *(size for size in reward_models if size != USUAL)]
        self._make_policies(lab, list(dict.fromkeys([*judges, *policies])))
        for some in (judges[:1], judges[1:]):
            lab.run_all([self.judge(lab, seed, size) for size in some for seed in seeds])
        return lab.run_all(runs)

    def _make_policies(self, lab: Lab, sizes: Sequence[str]) -> None:
        if self.easier is not None:
            self.easier._make_policies(lab, sizes)
        lab.run_all([self.sft(lab, size) for size in sizes])

    def _tables(self, size: str, section: str) -> dict[str, Any]:
        own = self.by_size.get(size, {})
        return {section: own[section]} if section in own else {}

    def _spec(self, name: str, seed: int, own: Mapping[str, Any]) -> Spec:
        every = merge({"seed": seed, "host": "inline"}, MORE_DATA)
        return Spec(name, RECIPE, merge(merge(every, own), self.overrides), cores=1)


def model_of(run: Path, stage: str) -> str:
    """The checkpoint that a stage of a run left or will leave."""
    return str(stage_dir(run, stage) / "model")


@dataclass(frozen=True)
class Ended:
    """What `evaluation.json` says of the policy that RL began with, or ended with.

    `win_rate` is gold's, against the references, a tie being half a win; `kl` in nats per completion from the SFT
    policy; `perplexity` the SFT policy's, per response token.
    """

    win_rate: float
    gold: float
    kl: float
    perplexity: float


def ended(evaluation: Mapping[str, Any], moment: str = "after") -> Ended:
    """One of the two moments of an `evaluation.json`."""
    found = evaluation[moment]
    return Ended(
        win_rate=found["gold"]["win_rate"]["mean"],
        gold=found["gold"]["mean_score"],
        kl=found["drift"]["kl"]["per_sequence"]["mean"],
        perplexity=found["drift"]["perplexity"]["per_response_token"]["mean"],
    )


def read_evaluation(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "evaluation.json").read_text())
    return found


class Step(NamedTuple):
    """What a step was trained on: means over its `completions`.

    `kl` is that of the policy that sampled them, in nats per completion from the SFT policy, `gold` the gold score.
    """

    kl: float
    gold: float
    completions: int


def measures_all(kl: Mapping[str, Any]) -> bool:
    """Whether a run with this table measures the KL of all that it samples: for a penalty in the reward it does."""
    return bool(kl["coef"]) and kl.get("place", "reward") == "reward"


def trodden(run: Path, kl: Sequence[float] | None = None) -> list[Step]:
    """A run's steps, in their order; `kl` by step where the run does not measure it on all completions itself."""
    gold: dict[int, list[float]] = {}
    with (run / "rollouts.jsonl").open() as lines:
        for rollout in map(json.loads, lines):
            if rollout["outcome"] == "trained":
                gold.setdefault(rollout["step"], []).append(gold_score(rollout["prompt"], rollout["completion"]))
    own = {line["step"]: line["kl_reference_sum"] for line in metrics(run) if "kl_reference_sum" in line}
    of_step = own if kl is None else dict(enumerate(kl))
    return [Step(of_step[step], fmean(gold[step]), len(gold[step])) for step in sorted(gold)]


def steps_of(lab: Lab, spec: Spec) -> list[Step]:
    """The steps of a run that was made, their KL over all completions that were sampled, whatever is trained on."""
    run = lab.place(spec)
    if measures_all(spec.config().kl.model_dump()):
        return trodden(run)
    return trodden(run, lab.measure(f"kl by step, {spec.name}", kl_by_step, run=str(run)))


def gold_score(post: str, summary: str) -> float:
    """The recipe's gold: F1 of the summary's letters and the marked ones of the post.

    Taken from the text, not measured in the run: a worker that scores beside it would decide by its pace which
    completions the reward model reads together, and so their last bits.
    """
    ours, marked = Counter("".join(summary.split())), Counter(re.findall(r"\*(.)", post))
    return 2.0 * (ours & marked).total() / (ours.total() + marked.total())


def oldest_update(run: Path) -> int:
    """Optimizer updates between sampling and training of the stalest minibatch: N - 1."""
    return int(summary(run)["staleness"]["updates_max"])


def reward_accuracy(run: Path) -> float:
    """Of the reward model that a run of `Pipeline.judge` made, on held-out pairs."""
    record = json.loads((stage_dir(run, "reward_model") / "stage.json").read_text())
    return float(record["held_out_accuracy"])


def effective_share(run: Path) -> float:
    """Effective sample size of the ratios, a share: mean over those of a run's steps that have one, NaN without any."""
    known = [line["ess"] for line in metrics(run) if line.get("ess") is not None]
    return fmean(known) if known else nan


@dataclass(frozen=True)
class Outcome:
    """What a run came to. `oldest` is the age of its stalest minibatch, in updates; `steps` are of measured runs."""

    began: Ended
    ended: Ended
    ess: float
    oldest: int
    steps: tuple[Step, ...] = ()

    @property
    def gain(self) -> float:
        """In win rate."""
        return self.ended.win_rate - self.began.win_rate

    def row(self) -> Row:
        return asdict(self) | {"steps": [[round(one.kl, 4), round(one.gold, 4), one.completions] for one in self.steps]}

    @classmethod
    def of(cls, row: Row) -> Outcome:
        steps = tuple(Step(*one) for one in row["steps"])
        return cls(Ended(**row["began"]), Ended(**row["ended"]), row["ess"], row["oldest"], steps)


def outcome(lab: Lab, spec: Spec, place: Path, *, with_steps: bool) -> Outcome:
    """Of a run that was made."""
    found = read_evaluation(place)
    steps = tuple(steps_of(lab, spec)) if with_steps else ()
    return Outcome(ended(found, "before"), ended(found), effective_share(place), oldest_update(place), steps)


@dataclass(frozen=True)
class Cell:
    """One loss (or size) at one N over the seeds, in their order; `began` is where RL began, by seed too."""

    began: Sequence[Ended]
    ended: Sequence[Ended]

    def win_rates(self) -> list[float]:
        return [one.win_rate for one in self.ended]

    def gains(self) -> list[float]:
        """Win rate at the end less that at the beginning."""
        return [after.win_rate - before.win_rate for before, after in zip(self.began, self.ended, strict=True)]


def cell_of(runs: Sequence[Outcome]) -> Cell:
    """The runs of one cell, one per seed."""
    return Cell([one.began for one in runs], [one.ended for one in runs])


def shares_kept(cell: Cell, on_policy: Cell) -> list[float] | None:
    """By seed, the gain in win rate as a share of what the same seed gains at N = 1.

    None where some seed gains less than LEAST_GAIN there.
    """
    base = on_policy.gains()
    if min(base) < LEAST_GAIN:
        return None
    return [ours / theirs for ours, theirs in zip(cell.gains(), base, strict=True)]


def share(values: Sequence[float] | None) -> str:
    """`shares_kept` for people."""
    return "too little gained" if values is None else spread(values, 2)


def is_greater_by_seed(ours: Sequence[float], theirs: Sequence[float]) -> bool | None:
    """`is_greater` of values at the same seeds, which began with the same models."""
    return is_greater(ours, theirs, paired=True)


def is_near_by_seed(ours: Sequence[float], theirs: Sequence[float], margin: float) -> bool | None:
    """Whether the means are at most `margin` apart; None where they are not, but within the noise of the seeds."""
    return all_of([is_as_great(*pair, margin, paired=True) for pair in ((ours, theirs), (theirs, ours))])


def all_of(answers: Iterable[bool | None]) -> bool | None:
    """No if any answer is no, yes if all are yes, else None."""
    found = list(answers)
    return False if False in found else None if None in found else True


def mean_by_seed(several: Sequence[Sequence[float]]) -> list[float]:
    """The mean over the first index of [settings][seeds]."""
    return [fmean(values) for values in zip(*several, strict=True)]


def drift_axes(axes: Sequence[Axes], largest: float) -> None:
    """The same axis of KL, 0 to `largest` nats, for all panels: straight up to 2, logarithmic beyond."""
    ticks = [tick for tick in (0, 1, 2, 5, 10, 20, 50, 100, 200) if tick <= 1.1 * largest]
    for axis in axes:
        axis.set_xscale("symlog", linthresh=2.0)
        axis.set_xticks(ticks, labels=map(str, ticks), minor=False)
        axis.set_xticks([], minor=True)
        axis.set(xlim=(-0.1, 1.1 * largest), ylim=(-0.02, 1.02), xlabel="KL from the SFT policy, nats per completion")


def shades_of(minibatches: Sequence[int]) -> dict[int, tuple[float, float, float, float]]:
    """A colour for each N, from dark to light."""
    colours = matplotlib.colormaps["viridis"]
    return {num: colours(index / len(minibatches)) for index, num in enumerate(minibatches)}
