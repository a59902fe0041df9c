"""Sections for what comes before and after RL: warm start, the other stages, evaluation, the judge."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from slipstream.core.errors import ConfigError
from slipstream.core.fields import (
    MAX_INTEGER,
    MAX_STEPS,
    CodePath,
    Count,
    Epochs,
    FilePath,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Number,
    Positive,
    PositiveFloat,
    Seconds,
    Section,
    Steps,
    Temperature,
    TemperatureOrGreedy,
)
from slipstream.core.training_sections import OptimizerConfig


class DemonstrationConfig(Section):
    """A kind of demonstration for the warm start: a template over the row's columns and its share."""

    template: str = Field(
        description="Completion text from the row's columns, e.g. '{answer}' or '{word}'; an EOS token is appended. "
        "Literal braces are written {{ and }}; <eos>, or the tokenizer's own EOS, ends a turn within."
    )
    weight: PositiveFloat = Field(1.0, description="Share of demonstrations of this kind, relative to the others.")


class WarmStartConfig(Section):
    """Supervised fine-tuning before the first RL step; ends at policy version 0."""

    steps: Annotated[int, Field(ge=0, le=MAX_STEPS, strict=True)] = Field(
        0, description="Optimizer updates; 0 skips the warm start."
    )
    batch_size: Count = Field(64, description="Demonstrations per update.")
    num_demonstrations: Positive = Field(20_000, description="Training prompts used as demonstrations.")
    demonstrations: list[DemonstrationConfig] = Field(
        default_factory=lambda: [DemonstrationConfig(template="{answer}")], description="Kinds and their shares."
    )
    optimizer: OptimizerConfig = Field(
        default_factory=lambda: OptimizerConfig(lr=1e-3), description="Optimizer of the warm start."
    )


class SftShape(Section):
    """Sizes of a fresh model of the stage `sft` that is not the policy, but a teacher; null: as in [model]."""

    hidden_size: Positive | None = Field(None, description="Width of the residual stream.")
    intermediate_size: Positive | None = Field(None, description="Width of the MLP.")
    num_layers: Count | None = Field(None, description="Decoder layers.")
    num_heads: Count | None = Field(None, description="Query heads.")
    num_kv_heads: Count | None = Field(None, description="Key and value heads; divides num_heads.")

    @property
    def given(self) -> dict[str, int]:
        return {name: size for name, size in vars(self).items() if size is not None}


class SftConfig(Section):
    """The stage `sft`: supervised fine-tuning whose checkpoint later stages take as 'stage:sft'."""

    path: FilePath | None = Field(
        None, description="Checkpoint it starts from; null: a fresh model as [model] describes."
    )
    shape: SftShape = Field(default_factory=SftShape, description="Sizes of a fresh model, if it is not the policy.")
    dataset: FilePath | None = Field(
        None, description="Dataset of demonstrations; null: the run's training prompts with `demonstrations`."
    )
    dataset_config: str | None = Field(
        None, description="Configuration of `dataset`; null: prompts.dataset_config where it is the same data set."
    )
    dataset_split: str | None = Field(None, description="Split of a Hugging Face `dataset`; null: that of [prompts].")
    prompt_column: str = Field("prompt", description="Column of `dataset` with a string or a list of chat messages.")
    completion_column: str = Field("completion", description="Column of `dataset` with the completion, as {answer}.")
    messages_column: str = Field(
        "messages", description="Column of `dataset` with whole chats, where it has one: the last message is learned."
    )
    demonstrations: list[DemonstrationConfig] = Field(
        default_factory=lambda: [DemonstrationConfig(template="{answer}")], description="Kinds and their shares."
    )
    num_demonstrations: Positive = Field(20_000, description="Demonstrations at most.")
    held_out: Fraction = Field(
        0.05, description="Share of their prompts whose demonstrations only measure loss and accuracy."
    )
    loss_on: Literal["completions", "all"] = Field(
        "completions", description="Tokens that are learned: the completion's, or the prompt's too (N, item 42)."
    )
    epochs: Epochs = Field(1, description="Passes over the demonstrations.")
    steps: Steps | None = Field(None, description="Optimizer updates, whatever that is in passes; null takes epochs.")
    batch_size: Count = Field(64, description="Demonstrations per update.")
    optimizer: OptimizerConfig = Field(
        default_factory=lambda: OptimizerConfig(lr=1e-5, schedule="cosine"), description="Optimizer of the stage."
    )


class PreferencesConfig(Section):
    """The stage `preferences`: completions of one prompt, and which of them is better."""

    path: FilePath | None = Field(None, description="Checkpoint that is sampled from; null: model.path.")
    num_prompts: Positive = Field(1000, description="Training prompts, the first ones.")
    samples_per_prompt: Count = Field(4, description="Completions sampled per prompt.")
    temperature: Temperature = Field(1.0, description="Sampling temperature.")
    with_reference: bool = Field(False, description="Compare with the prompt's reference completion as well.")
    labels: Literal["gold", "judge"] = Field(
        "gold", description="What says which is better: the scores of [gold], or the [judge] in both orders."
    )
    max_per_prompt: Positive | None = Field(
        None, description="Preferences kept per prompt, drawn by the seed; null keeps all pairs (or fours)."
    )
    held_out: Fraction = Field(0.1, description="Share of prompts whose preferences only measure accuracy.")


class DpoConfig(Section):
    """The stage `dpo`: the policy learns from preferences directly; later stages take its checkpoint as 'stage:dpo'."""

    path: FilePath | None = Field(None, description="Checkpoint it starts from; null: model.path.")
    loss: Literal["sigmoid", "ipo", "kto", "simpo"] = Field(
        "sigmoid",
        description="DPO's logistic loss of pairs, IPO's squared one, KTO of single completions with a label each, or "
        "SimPO, of pairs and without a reference.",
    )
    beta: PositiveFloat | None = Field(
        None, description="Scale of implicit rewards: the larger, the closer to the reference; null: 0.1, of simpo 2."
    )
    gamma: NonNegativeFloat = Field(1.0, description="simpo: the margin that implicit rewards of a pair are to have.")
    label_smoothing: Annotated[float, Field(ge=0, le=0.5, strict=True)] = Field(
        0.0, description="sigmoid: the share of pairs whose label is taken to be wrong."
    )
    desirable_weight: PositiveFloat = Field(1.0, description="kto: weight of desirable completions.")
    undesirable_weight: PositiveFloat = Field(
        1.0,
        description="kto: weight of undesirable ones. Weights times numbers of completions should be alike, those of "
        "desirable ones up to 4/3 as large (KTO, section 4).",
    )
    reference: FilePath | None = Field(
        None, description="Checkpoint that the policy is compared with; null: the one it starts from."
    )
    preferences: FilePath | None = Field(
        None,
        description="Dataset with columns prompt, chosen, rejected (kto also: prompt, completion, label), texts or "
        "chats, or a file like that of the stage `preferences`; null: that stage's.",
    )
    held_out: Fraction = Field(
        0.05, description="Share of a dataset's prompts that only measure; that stage's file says it itself."
    )
    epochs: Epochs = Field(1, description="Passes over the preferences.")
    steps: Steps | None = Field(None, description="Optimizer updates, whatever that is in passes; null takes epochs.")
    batch_size: Count = Field(32, description="Pairs, or single completions, per update.")
    optimizer: OptimizerConfig = Field(
        default_factory=lambda: OptimizerConfig(lr=1e-6, schedule="linear"), description="Optimizer of the stage."
    )

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        owners = {
            "gamma": "simpo",
            "label_smoothing": "sigmoid",
            "desirable_weight": "kto",
            "undesirable_weight": "kto",
        }
        for name, loss in owners.items():
            value = vars(self)[name]
            if self.loss != loss and value != type(self).model_fields[name].default:
                got = f"dpo.{name} = {value:g} with dpo.loss = '{self.loss}'"
                raise ConfigError(f"dpo.{name} belongs to another loss", got=got, allowed=f"dpo.loss = '{loss}'")
        if self.loss == "simpo" and self.reference is not None:
            what = "SimPO compares the policy with no reference"
            got = f"dpo.reference = '{self.reference}' with dpo.loss = 'simpo'"
            raise ConfigError(what, got=got, allowed="no dpo.reference, or another loss")
        return self


class RewardModelConfig(Section):
    """Training a reward model on preferences, before the run that is rewarded by it."""

    path: FilePath | None = Field(
        None, description="Checkpoint it starts from: a policy, or a reward model with its head; null: model.path."
    )
    preferences: FilePath | None = Field(
        None,
        description="Dataset with columns prompt, chosen, rejected (with candidates = 1: prompt, completion, rating), "
        "or a file like that of the stage `preferences`; null: that stage's.",
    )
    candidates: Literal[1, 2, 4] = Field(
        2,
        description="Completions per label: pairs (Bradley-Terry), the best of four (cross-entropy), or one with its "
        "rating (squared error), of a dataset.",
    )
    epochs: Epochs = Field(1, description="Passes over the preferences; more than one overfits soon.")
    steps: Steps | None = Field(None, description="Optimizer updates, whatever that is in passes; null takes epochs.")
    batch_size: Count = Field(32, description="Preferences per update.")
    optimizer: OptimizerConfig = Field(
        default_factory=lambda: OptimizerConfig(lr=5e-5, eps=1e-5, schedule="linear"),
        description="Optimizer of the reward model.",
    )
    head_init: Literal["reward", "zero"] = Field(
        "reward", description="A fresh head's weights: N(0, 1 / sqrt(hidden_size + 1)), or 0."
    )
    normalise: Literal["before_and_after", "reference_bias", "none"] = Field(
        "before_and_after",
        description="Scores of the untrained policy's samples get mean 0 and standard deviation 1 before and after "
        "training (before it those of the ratings); or those of reference completions mean 0 after it; or neither.",
    )
    normalise_samples: Annotated[int, Field(ge=2, le=MAX_INTEGER, strict=True)] = Field(
        256, description="Completions of the untrained policy that before_and_after measures."
    )
    normalise_unbiased: bool = Field(False, description="Standard deviation over n - 1 instead of n samples.")


class JudgeConfig(Section):
    """A judge of two answers: a function, or a model behind an OpenAI-compatible endpoint."""

    function: CodePath | None = Field(
        None, description="'module:function' or 'file.py:function': (prompt, a, b) -> 'a', 'b' or 'tie'; may be async."
    )
    base_url: str | None = Field(None, description="Address of the endpoint, e.g. 'http://localhost:8000/v1'.")
    model: str = Field("", description="Name of the model behind it.")
    api_key_env: str | None = Field(None, description="Environment variable with the key; null sends none.")
    criterion: str = Field(
        "Say which answer serves the person who wrote the prompt better.", description="What better means."
    )
    deadline_s: Seconds = Field(60.0, description="Limit of one attempt, in seconds.")
    max_concurrency: Count = Field(8, description="Comparisons asked about at once.")

    @property
    def is_given(self) -> bool:
        return self.function is not None or self.base_url is not None


class EvaluationConfig(Section):
    """The stage `evaluate`: where RL began and where it ended, on held-out prompts, by gold, judge and drift."""

    num_prompts: Positive | None = Field(
        None, description="Held-out prompts, at most prompts.num_eval. null: 200, or all of the first of eval.sets."
    )
    num_samples: Count = Field(1, description="Completions per prompt; several give pass@k.")
    temperature: Temperature | None = Field(
        None, description="Sampling temperature (Asynchronous RLHF: 0.01); null: that of the generator."
    )


class EvalSet(Section):
    """A named set of held-out prompts: a data set, or a split, of its own."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,60}$")] = Field(
        description="Its name in metrics, summary and report: letters, digits, '_', '.' and '-'."
    )
    dataset: FilePath | None = Field(None, description="Path or hub id of its data; null: prompts.dataset.")
    dataset_config: str | None = Field(None, description="Configuration of a hub `dataset` that has several.")
    split: str = Field("test", description="Split of a Hugging Face dataset to read; files have none.")
    prompt_column: str | None = Field(None, description="Column of the prompt; null: prompts.prompt_column.")
    answer_column: str | None = Field(None, description="Column of the reference answer; null: prompts.answer_column.")
    template: str | None = Field(None, description="Template of its prompts; null: prompts.template.")
    measure: str | None = Field(None, description="The reward term that says which answers are right; null: eval's.")
    num_prompts: Positive | None = Field(None, description="Prompts, the first distinct ones that fit; null: all.")
    temperature: TemperatureOrGreedy = Field(0.0, description="Of the answers; 0: greedy.")
    num_samples: Count = Field(1, description="Answers to each prompt; what is told are means over all of them.")


class EvalConfig(Section):
    """Held-out evaluation, pinned to one policy version."""

    every: NonNegative = Field(0, description="Steps between greedy evaluations during the run; 0 means only the ends.")
    num_prompts: Positive = Field(500, description="Held-out prompts per evaluation, at most prompts.num_eval.")
    num_slots: Positive = Field(64, description="Decode slots reserved for evaluation.")
    measure: str | None = Field(
        None,
        description="Name of the reward term that says whether an answer is right: where it is 1 or more. Accuracy is "
        "the share of right answers; without a measure there is none, and the mean reward tells how good a policy is.",
    )
    metric: Literal["accuracy", "reward"] | None = Field(
        None,
        description="What `stop_at`, `patience` and `keep_best` go by, of the greedy answers, or those of the first of "
        "`sets` at its temperature: the higher the better. null: accuracy where there is a measure, else the mean "
        "reward.",
    )
    stop_at: Number | None = Field(
        None, description="The run ends when an evaluation reaches this: as if its present step were its last."
    )
    patience: Count | None = Field(
        None, description="The run ends after so many evaluations in a row that are no better than the best one before."
    )
    keep_best: bool = Field(
        False,
        description="Keep the model of the version with the best evaluation so far in RUN/best, beside RUN/model with "
        "the last one. The trainer exports every version that may be evaluated.",
    )

    sets: list[EvalSet] = Field(
        default_factory=list,
        description="Named sets in place of prompts held out of the training data, which has no prompt of any of them. "
        "The first is the primary one: the rules, `best/`, samples and the stage evaluate go by it.",
    )

    @property
    def primary(self) -> str:
        """Return the name of the first set; empty where the run's own prompts are held out."""
        return self.sets[0].name if self.sets else ""

    def measure_of(self, name: str) -> str | None:
        """Return the measure of a set; '' stands for the primary one, or the run's own prompts."""
        own = {one.name: one.measure for one in self.sets}.get(name or self.primary)
        return own or self.measure

    @property
    def temperatures(self) -> list[float]:
        """Return those at which a run's evaluations sample: of its sets, or greedily, and 1 at its ends."""
        return [*([one.temperature for one in self.sets] or [0.0]), 1.0]

    @property
    def goes_by(self) -> Literal["accuracy", "reward"]:
        return self.metric or ("reward" if self.measure_of("") is None else "accuracy")

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        names = [one.name for one in self.sets]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError("a set of eval.sets is named twice", got=twice[0], allowed="a name for each")
        asked = [
            f"eval.{name} = {value}" for name in ("stop_at", "patience") if (value := getattr(self, name)) is not None
        ]
        if asked and not self.every:
            what = "nothing is evaluated before the end of the run"
            allowed = "eval.every of 1 or more: the steps between two evaluations"
            raise ConfigError(what, got=f"{', '.join(asked)} with eval.every = 0", allowed=allowed)
        if self.stop_at is not None and self.stop_at > 1 and self.goes_by == "accuracy":
            what = "an accuracy is a share, which never reaches this"
            hint = "eval.metric = 'reward' goes by the mean reward"
            raise ConfigError(what, got=f"eval.stop_at = {self.stop_at:g}", allowed="at most 1", hint=hint)
        return self
