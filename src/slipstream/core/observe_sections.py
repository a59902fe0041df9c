"""Sections for watching a run: what is written for people, alarms, trackers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from slipstream.core.errors import ConfigError
from slipstream.core.fields import CodePath, NonNegative, Number, Positive, Seconds, Section


class ObserveConfig(Section):
    """Files that are written only for people to look at."""

    tokens_every: NonNegative = Field(
        32,
        description="Write the tokens of every so many-th group that is trained to tokens.jsonl, each with its "
        "logprobs and advantage, for the watch page; 0 writes none.",
    )
    tokens_mb: Positive = Field(
        64,
        description="Size of tokens.jsonl in MB beyond which every second group in it is dropped, and half as many "
        "are written from then on.",
    )


HOOKS = ("on_step", "on_eval", "on_checkpoint")


class CallbacksConfig(Section):
    """Functions of your own that hear of the run, 'module:function' or 'file.py:function' (`core/hooks.py`).

    They run in the controller's process, outside of any sandbox.
    """

    on_step: list[CodePath] = Field(
        default_factory=list, description="Called with each step that is done: its number, version and metrics."
    )
    on_eval: list[CodePath] = Field(
        default_factory=list, description="Called with each evaluation: version, accuracy, mean reward and its parts."
    )
    on_checkpoint: list[CodePath] = Field(
        default_factory=list, description="Called with each checkpoint that is on disk: its step and folder."
    )
    timeout_s: Seconds = Field(600.0, description="Longest call, in seconds, before the run ends with an error.")

    @property
    def hooks(self) -> dict[str, list[str]]:
        return {name: getattr(self, name) for name in HOOKS}


AlarmName = Literal[
    "logprob_mismatch",
    "logprob_mismatch_growing",
    "ess_collapse",
    "ratio_clipped",
    "policy_drift",
    "kl_runaway",
    "length_hacking",
    "truncation_growing",
    "entropy_collapse",
    "grad_norm_spikes",
    "no_signal",
    "equal_rewards",
    "failed_rewards",
    "poisoned",
    "starving_trainer",
    "starving_generator",
    "slow_rewards",
    "straggler",
    "version_lag",
    "publish_skipped",
    "weights_unchanged",
]


class HealthConfig(Section):
    """Alarms over the metrics of each step (`observe/health.py`)."""

    alarms: bool = Field(True, description="Watch the metrics, and tell when they look wrong.")
    thresholds: dict[AlarmName, Number] = Field(
        default_factory=dict, description="Thresholds of single alarms in place of the shipped ones."
    )
    stop_on: list[AlarmName] = Field(
        default_factory=list, description="Alarms that end the run with an error when they begin."
    )

    @model_validator(mode="after")
    def _check_stops(self) -> Self:
        if self.stop_on and not self.alarms:
            what = "no alarm can end a run that watches for none"
            got = f"health.alarms = false with stop_on = {self.stop_on}"
            raise ConfigError(what, got=got, hint="leave health.alarms on, or stop_on empty")
        return self


TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]


class TrackersConfig(Section):
    """Trackers, to which metrics go besides metrics.jsonl (`observe/trackers.py`)."""

    names: list[TrackerName] = Field(
        default_factory=list,
        description="Trackers that get every line of metrics.jsonl, every alarm, the configuration and the summary: "
        "tensorboard (RUN/tensorboard), wandb (RUN/wandb and its server), trackio (its database on this machine), "
        "mlflow (RUN/mlruns, or MLFLOW_TRACKING_URI).",
    )
    project: str = Field("slipstream", description="Project at wandb and trackio, experiment at MLflow.")
    entity: str | None = Field(None, description="User or team at wandb; null: the default of its key.")
    run_name: str | None = Field(None, description="Name of the run there; null: that of its folder.")
    group: str | None = Field(None, description="Group of runs at wandb and trackio.")
    tags: list[str] = Field(default_factory=list, description="Tags of the run.")
    offline: bool = Field(
        False, description="Send nothing: wandb keeps all in RUN/wandb for `wandb sync`, trackio on this machine."
    )
    deadline_s: Seconds = Field(
        60.0, description="Longest wait for all trackers together at the end of the run, in seconds."
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if len(set(self.names)) < len(self.names):
            raise ConfigError(
                "a tracker is named twice", got=f"trackers.names = {self.names}", allowed="each name once"
            )
        return self
