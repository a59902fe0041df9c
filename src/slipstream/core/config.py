"""The schema of a run: its sections (`core/sections.py`), the fields above them, and what must hold between them.

Nothing the user asked for is rewritten: derived values are properties, conflicts raise ConfigError. `core/recipes.py`
loads TOML into it and applies overrides.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from slipstream.core.errors import ConfigError
from slipstream.core.sections import (
    BY_VERSION,
    GROUP_RELATIVE,
    HARD_BOUND,
    MAX_GROUP_SCORES,
    MAX_KEPT,
    MIN_WHITENED,
    VLLM_MIN_TEMPERATURE,
    AlarmName,
    Count,
    CriticConfig,
    DemonstrationConfig,
    EvalConfig,
    EvaluationConfig,
    FolderName,
    GeneratorConfig,
    HealthConfig,
    JudgeConfig,
    KLConfig,
    LossConfig,
    ModelConfig,
    NonNegative,
    ObserveConfig,
    OptimizerConfig,
    Positive,
    PreferencesConfig,
    PromptsConfig,
    RewardModelConfig,
    RewardModelTerm,
    RewardsConfig,
    RewardTerm,
    SchedulingConfig,
    Seconds,
    Section,
    SftConfig,
    Steps,
    TaskConfig,
    TrackerName,
    TrackersConfig,
    TrainerConfig,
    VLLMConfig,
    WarmStartConfig,
)

__all__ = [
    "GROUP_RELATIVE",
    "JUST_RL",
    "PRESETS",
    "STAGES",
    "STAGE_PREFIX",
    "AlarmName",
    "CriticConfig",
    "DemonstrationConfig",
    "EvalConfig",
    "EvaluationConfig",
    "GeneratorConfig",
    "HealthConfig",
    "JudgeConfig",
    "KLConfig",
    "LossConfig",
    "ModelConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "PreferencesConfig",
    "PromptsConfig",
    "RewardModelConfig",
    "RewardModelTerm",
    "RewardTerm",
    "RewardsConfig",
    "RunConfig",
    "SchedulingConfig",
    "Section",
    "SftConfig",
    "Stage",
    "TaskConfig",
    "TrackerName",
    "TrackersConfig",
    "TrainerConfig",
    "VLLMConfig",
    "WarmStartConfig",
    "stage_of",
]

Stage = Literal["sft", "preferences", "reward_model", "rl", "evaluate"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""In the order in which a run goes through them."""
JUST_RL: tuple[Stage, ...] = ("rl",)
STAGE_PREFIX = "stage:"
MAX_SEED = 2**62 - 1
"""What is added to it on the way to a generator of 64 bits has room."""


MIN_UPDATE_S = 0.001
"""No forward pass, backward pass and update of a model takes less."""


def stage_of(path: str | None) -> str | None:
    """'sft' of 'stage:sft', a path that stands for the checkpoint of an earlier stage; None for others."""
    return path.removeprefix(STAGE_PREFIX) if path is not None and path.startswith(STAGE_PREFIX) else None


PRESETS: dict[str, dict[str, Any]] = {
    "sync": {"max_staleness": 0, "weight_update": "between_batches"},
    "one_step": {"max_staleness": 1, "weight_update": "between_batches"},
    "bounded": {"weight_update": "between_batches"},
    "continuous": {"weight_update": "in_flight"},
}


class RunConfig(Section):
    """A whole run."""

    recipe: FolderName = Field("custom", description="Name of the recipe, for file names and reports.")
    seed: Annotated[int, Field(ge=0, le=MAX_SEED, strict=True)] = Field(
        0, description="Seed of everything random: model, prompts, sampling."
    )
    steps: Steps = Field(100, description="Training steps.")
    groups_per_step: Count = Field(16, description="P: prompts per step.")
    completions_per_group: Count = Field(8, description="G: completions per prompt.")
    max_staleness: NonNegative = Field(2, description="k: how many steps old a token may be when trained on. 0 = sync.")
    weight_update: Literal["between_batches", "in_flight"] = Field(
        "in_flight", description="Swap weights only between completions, or between any two decode steps."
    )
    sync_placement: Literal["colocated", "split"] = Field(
        "colocated",
        description="What trainer and generators compute on where they take turns, at max_staleness = 0: all cores in "
        "each turn (LlamaRL's baseline), or the shares they have when they work side by side, which lie idle while it "
        "is the other's turn (that of Asynchronous RLHF).",
    )
    publish_every: Positive = Field(1, description="Steps between published versions; skipped ones count in the bound.")
    reorder_window: Positive = Field(
        1, description="W: an ordinal is trained before any W or more above it. At most (k - publish_every + 1) P + 1."
    )
    host: Literal["process", "inline"] = Field(
        "process", description="Executors in processes of their own, or all in this one, deterministically."
    )
    deadline_s: Seconds = Field(120.0, description="Longest wait for any peer, in seconds, before the run fails.")
    lease_s: Seconds = Field(
        30.0,
        description="A process that is silent for so many seconds is taken for lost: it is shut out, and one of the "
        "controller's own is killed.",
    )
    shutdown_grace_s: Seconds = Field(
        25.0,
        description="After SIGTERM or SIGHUP: seconds for the current step, its checkpoint and the end. A run that "
        "takes longer ends at once, without that checkpoint. Below what the scheduler gives (30 s in most).",
    )
    max_restarts: NonNegative = Field(
        3,
        description="How often each executor is started again when its process is lost: generators and rewards alone, "
        "while the run goes on; trainer, reference and reward models with the whole run, from the last checkpoint. "
        "Of a group on another machine its agent is told (`slipstream launch --group`).",
    )
    stages: list[Stage] = Field(
        default_factory=lambda: list(JUST_RL),
        description="What a run goes through, in this order: sft, preferences, reward_model, rl, evaluate. "
        "'stage:sft' and 'stage:reward_model' stand for their checkpoints wherever one is named.",
    )
    schedule: SchedulingConfig = Field(
        default_factory=SchedulingConfig, description="Which groups start, and which a step trains."
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="The policy.")
    prompts: PromptsConfig = Field(default_factory=PromptsConfig, description="Where questions come from.")
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig, description="Sampling and decoding.")
    rewards: RewardsConfig = Field(default_factory=RewardsConfig, description="Scoring.")
    loss: LossConfig = Field(default_factory=LossConfig, description="Loss and advantages.")
    kl: KLConfig = Field(default_factory=KLConfig, description="Penalty for leaving the reference policy.")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="The training step.")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="Value function of actor-critic PPO.")
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig, description="SFT before RL.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Held-out evaluation.")
    sft: SftConfig = Field(default_factory=SftConfig, description="Stage of demonstrations.")
    preferences: PreferencesConfig = Field(default_factory=PreferencesConfig, description="Stage of preferences.")
    reward_model: RewardModelConfig = Field(default_factory=RewardModelConfig, description="Stage of the reward model.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Stage of the evaluation.")
    gold: RewardsConfig = Field(
        default_factory=lambda: RewardsConfig(terms=[]),
        description="What completions are really worth: it labels preferences and decides win rates, and RL never "
        "sees it. Without terms and models: the same as [rewards].",
    )
    judge: JudgeConfig = Field(default_factory=JudgeConfig, description="Judge of pairs, for labels and win rates.")
    health: HealthConfig = Field(default_factory=HealthConfig, description="Alarms.")
    trackers: TrackersConfig = Field(default_factory=TrackersConfig, description="Other people's dashboards.")
    observe: ObserveConfig = Field(default_factory=ObserveConfig, description="Files for people to look at.")

    @property
    def gold_rewards(self) -> RewardsConfig:
        return self.gold if self.gold.weighted else self.rewards

    @property
    def is_fresh(self) -> bool:
        """Whether the first model of the run is a new one, of [model]'s shape."""
        return self.model.path is None or (stage_of(self.model.path) == "sft" and self.sft.path is None)

    @property
    def weights_stay_on_gpu(self) -> bool:
        """Whether versions go from GPU to GPU: where both ends compute there, and nothing on the way needs the host."""
        is_on_gpu = self.trainer.device == "cuda" and self.generator.device.startswith("cuda")
        return is_on_gpu and self.generator.engine == "native" and not self.generator.delta and self.host == "process"

    @property
    def staleness_bound(self) -> int | None:
        """The most steps a consumed token may be old; None under a scheduling policy that promises no bound."""
        return self.max_staleness if self.schedule.policy in HARD_BOUND else None

    @property
    def takes_turns(self) -> bool:
        """Whether trainer and generators never work at the same time."""
        return self.max_staleness == 0 and self.schedule.policy == "oldest_first"

    @property
    def is_colocated(self) -> bool:
        """Whether each of them has all cores in its turn."""
        return self.takes_turns and self.sync_placement == "colocated"

    @property
    def logprob_temperature(self) -> float:
        """By which the trainer divides all logits: those of policy and reference."""
        own = self.trainer.logprob_temperature
        return self.generator.temperature if own is None else own

    @property
    def rereads_behaviour(self) -> bool:
        """Whether the trainer takes other behaviour logprobs than those recorded when the tokens were sampled."""
        return self.logprob_temperature != self.generator.temperature

    @property
    def updates_per_step(self) -> int:
        return self.trainer.minibatches * self.trainer.epochs

    @property
    def has_critic(self) -> bool:
        return self.loss.advantages == "gae"

    def longest_prompt(self, max_positions: int) -> int:
        """Tokens of the longest prompt that is taken, in a model of so many positions."""
        asked = self.prompts.max_prompt_tokens
        return max_positions - self.generator.max_new_tokens if asked is None else asked

    def longest_sequence(self, max_positions: int) -> int:
        """Tokens of the longest prompt and completion together, in a model of so many positions."""
        return min(max_positions, self.longest_prompt(max_positions) + self.generator.max_new_tokens)

    @property
    def least_sequence(self) -> int:
        """The same as far as it is known before prompts are read: without a limit, prompts have one token or more."""
        return (self.prompts.max_prompt_tokens or 1) + self.generator.max_new_tokens

    def check_lengths(self, max_positions: int, *, of: str, hint: str) -> None:
        """Raise ConfigError where prompts and completions do not fit the `max_positions` `of` a model."""
        asked = self.prompts.max_prompt_tokens
        if self.least_sequence > max_positions:
            raise ConfigError(
                "prompts and completions do not fit the model",
                got=f"max_prompt_tokens = {'null' if asked is None else asked}, "
                f"max_new_tokens = {self.generator.max_new_tokens}",
                allowed=f"together at most {of} = {max_positions}",
                hint=hint,
            )

    @property
    def samples_per_group(self) -> int:
        """Completions sampled per prompt: G, and ReMax's greedy one behind them."""
        return self.completions_per_group + (self.loss.advantages == "greedy_baseline")

    @property
    def completions_per_step(self) -> int:
        return self.groups_per_step * self.completions_per_group

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        self._check_schedule()
        if self.schedule.policy in BY_VERSION and self.publish_every > self.max_staleness + 1:
            raise ConfigError(
                "publish_every leaves generators no version fresh enough to sample from",
                got=f"publish_every = {self.publish_every}, max_staleness = {self.max_staleness}",
                allowed=f"1..{self.max_staleness + 1} (max_staleness + 1)",
                hint="raise max_staleness or publish more often",
            )
        limit = (self.max_staleness - self.publish_every + 1) * self.groups_per_step + 1
        if self.schedule.policy == "oldest_first" and self.reorder_window > limit:
            raise ConfigError(
                "reorder_window is too wide: generators and trainer would wait for each other forever",
                got=f"reorder_window = {self.reorder_window}",
                allowed=f"1..{limit} ((max_staleness - publish_every + 1) * groups_per_step + 1)",
                hint="raise max_staleness or lower reorder_window",
            )
        if self.is_fresh:
            self.check_lengths(
                self.model.max_positions,
                of="model.max_positions",
                hint="lower prompts.max_prompt_tokens (longer prompts are dropped), or raise model.max_positions",
            )
        if self.generator.num_slots % 8:
            raise ConfigError(
                "num_slots must keep decode batches bit-reproducible",
                got=self.generator.num_slots,
                allowed="multiples of 8",
            )
        if self.generator.segment_tokens is not None and self.weight_update == "in_flight":
            raise ConfigError(
                "segment_tokens cuts completions at a swap, but in_flight swaps need no cut",
                got="segment_tokens with weight_update = 'in_flight'",
                allowed="segment_tokens with weight_update = 'between_batches'",
                hint="drop segment_tokens, or use the preset 'bounded'",
            )
        self._check_vllm()
        self._check_device()
        self._check_sets()
        self._check_loss()
        self._check_temperature()
        self._check_whitening()
        if self.trainer.minibatches > self.groups_per_step:
            raise ConfigError(
                "a minibatch must hold at least one group",
                got=f"minibatches = {self.trainer.minibatches}, groups_per_step = {self.groups_per_step}",
                allowed="minibatches <= groups_per_step",
            )
        if self.eval.num_prompts > self.prompts.num_eval:
            raise ConfigError(
                "evaluation asks for more prompts than are held out",
                got=f"eval.num_prompts = {self.eval.num_prompts}, prompts.num_eval = {self.prompts.num_eval}",
                allowed="eval.num_prompts <= prompts.num_eval",
            )
        if (self.prompts.too_long == "shorten") != (self.prompts.shorten_column is not None):
            raise ConfigError(
                "shortening prompts takes the column to shorten",
                got=f"too_long = '{self.prompts.too_long}', shorten_column = {self.prompts.shorten_column!r}",
                allowed="too_long = 'shorten' with a shorten_column, or neither",
            )
        if bool(self.prompts.tasks) == bool(self.prompts.dataset):
            raise ConfigError(
                "exactly one source of prompts is needed",
                got=f"{len(self.prompts.tasks)} tasks and dataset = {self.prompts.dataset!r}",
                allowed="prompts.tasks or prompts.dataset",
            )
        model = self.model
        if self.is_fresh and (model.hidden_size % model.num_heads or model.num_heads % model.num_kv_heads):
            raise ConfigError(
                "head sizes do not divide",
                got=f"hidden_size {model.hidden_size}, heads {model.num_heads}, kv heads {model.num_kv_heads}",
                allowed="hidden_size % num_heads == 0 and num_heads % num_kv_heads == 0",
            )
        self._check_ranks()
        self._check_stages()
        return self

    def _check_schedule(self) -> None:
        """The parameters of the scheduling policy that was chosen, and none of the others'."""
        schedule = self.schedule
        for name, policy in (("staleness_threshold", "sample_budget"), ("queue_groups", "finish_order")):
            value = vars(schedule)[name]
            if (value is not None) != (schedule.policy == policy):
                raise ConfigError(
                    f"schedule.{name} belongs to the policy '{policy}'",
                    got=f"schedule.{name} = {value} with schedule.policy = '{schedule.policy}'",
                    allowed=f"schedule.{name} with schedule.policy = '{policy}', or neither",
                )
        if schedule.queue_groups is not None and schedule.queue_groups < self.groups_per_step:
            raise ConfigError(
                "the queue of finished groups does not hold a batch: the trainer would wait for it forever",
                got=f"schedule.queue_groups = {schedule.queue_groups}, groups_per_step = {self.groups_per_step}",
                allowed="schedule.queue_groups >= groups_per_step",
            )
        if schedule.policy != "oldest_first" and self.reorder_window != 1:
            raise ConfigError(
                "only the policy 'oldest_first' has a window",
                got=f"reorder_window = {self.reorder_window} with schedule.policy = '{schedule.policy}'",
                allowed="reorder_window = 1",
            )
        if schedule.policy == "one_step" and (self.max_staleness, self.publish_every) != (1, 1):
            raise ConfigError(
                "the policy 'one_step' is one step stale, and takes every version",
                got=f"max_staleness = {self.max_staleness}, publish_every = {self.publish_every}",
                allowed="max_staleness = 1 and publish_every = 1",
            )

    def _check_ranks(self) -> None:
        trainer, generator = self.trainer, self.generator
        if self.updates_per_step * MIN_UPDATE_S > self.deadline_s:
            raise ConfigError(
                "a step has more updates than its deadline has time for",
                got=f"trainer.epochs = {trainer.epochs} x trainer.minibatches = {trainer.minibatches} updates of "
                f"{MIN_UPDATE_S:g} s or more = {self.updates_per_step * MIN_UPDATE_S:g} s",
                allowed=f"deadline_s = {self.deadline_s:g}",
            )
        if trainer.ranks % trainer.tensor_parallel:
            raise ConfigError(
                "the trainer's ranks do not divide into tensor-parallel groups",
                got=f"trainer.ranks = {trainer.ranks}, trainer.tensor_parallel = {trainer.tensor_parallel}",
                allowed="trainer.ranks: a multiple of trainer.tensor_parallel",
            )
        ranks = {
            "trainer.ranks": trainer.ranks,
            "generator.tensor_parallel": generator.tensor_parallel,
            "rewards.model_ranks": self.rewards.model_ranks,
            "kl.ranks": self.kl.ranks,
        }
        several = ", ".join(f"{field} = {count}" for field, count in ranks.items() if count > 1)
        if self.host == "inline" and several:
            raise ConfigError(
                "several ranks need processes of their own",
                got=f"{several} with host = 'inline'",
                allowed="host = 'process'",
            )
        if generator.engine == "vllm" and generator.tensor_parallel > 1:
            raise ConfigError(
                "vLLM divides models by itself",
                got=f"generator.tensor_parallel = {generator.tensor_parallel} with generator.engine = 'vllm'",
                allowed="generator.tensor_parallel = 1",
                hint="generator.vllm.engine_args = { tensor_parallel_size = 2 }",
            )
        for section, who in (
            ("trainer", "the trainer computes"),
            ("rewards", "reward models compute"),
            ("gold", "reward models compute"),
            ("kl", "the reference computes"),
        ):
            part = vars(self)[section]
            if part.precision != "float32" and part.device == "cpu":
                raise ConfigError(
                    f"on a CPU {who} in float32",
                    got=f"{section}.precision = '{part.precision}' with {section}.device = 'cpu'",
                    allowed=f"{section}.device = 'cuda'",
                )

    def _check_vllm(self) -> None:
        generator = self.generator
        if generator.engine != "vllm":
            return
        if generator.kv_on_update == "recompute_if_older_than":
            raise ConfigError(
                "vLLM keeps all of its cache or none",
                got="generator.kv_on_update = 'recompute_if_older_than' with generator.engine = 'vllm'",
                allowed="'keep' or 'recompute'",
            )
        if generator.keep_sets:
            raise ConfigError(
                "vLLM does not report the sets that tokens were drawn from",
                got="generator.keep_sets with generator.engine = 'vllm'",
                allowed="generator.keep_sets = false, or generator.engine = 'native'",
            )
        if generator.precision != "float32":
            raise ConfigError(
                "vLLM takes float32 weights, and computes in the type it is told",
                got=f"generator.precision = '{generator.precision}' with generator.engine = 'vllm'",
                allowed="generator.precision = 'float32'",
                hint="generator.vllm.dtype, generator.vllm.engine_args",
            )
        if generator.seeds == "per_replica":
            raise ConfigError(
                "vLLM draws its own noise: that of the original RLHF code is not to be had from it",
                got="generator.seeds = 'per_replica' with generator.engine = 'vllm'",
                allowed="generator.seeds = 'shared', or generator.engine = 'native'",
            )
        if generator.temperature < VLLM_MIN_TEMPERATURE:
            raise ConfigError(
                "vLLM samples at no lower temperature: it would take this one for another",
                got=f"generator.temperature = {generator.temperature:g} with generator.engine = 'vllm'",
                allowed=f"at least {VLLM_MIN_TEMPERATURE:g}",
            )
        if generator.top_p < 1.0 and generator.min_p > 0.0:
            raise ConfigError(
                "vLLM applies min_p before top_p, the native engine behind it: the samples would be others",
                got=f"generator.top_p = {generator.top_p:g}, min_p = {generator.min_p:g}, engine = 'vllm'",
                allowed="one of the two, with or without top_k",
            )

    def _check_device(self) -> None:
        generator = self.generator
        if generator.engine == "vllm" and generator.device != "cpu":
            raise ConfigError(
                "generator.device is the native engine's: vLLM computes on what it was built for",
                got=f"generator.device = '{generator.device}' with generator.engine = 'vllm'",
                allowed="generator.device = 'cpu', the default",
                hint="in a checkout, `make vllm-env` installs vLLM for a GPU where there is one (docs/vllm.md)",
            )
        if generator.kv_cache_gb is not None and generator.device == "cpu":
            raise ConfigError(
                "on a CPU every slot has room for the longest prompt and completion: there is nothing to bound",
                got=f"generator.kv_cache_gb = {generator.kv_cache_gb:g} with generator.device = 'cpu'",
                allowed="generator.kv_cache_gb with generator.device = 'cuda'",
                hint="generator.vllm.kv_cache_gb"
                if generator.engine == "vllm"
                else "lower generator.num_slots, generator.max_new_tokens or prompts.max_prompt_tokens",
            )

    def _check_sets(self) -> None:
        if self.generator.keep_sets and not 1 <= self.generator.top_k <= MAX_KEPT:
            raise ConfigError(
                "kept sets need a bound on their size",
                got=f"generator.keep_sets with generator.top_k = {self.generator.top_k}",
                allowed=f"generator.top_k = 1..{MAX_KEPT}",
                hint="top_p and min_p cut further within top_k",
            )

    def _check_stages(self) -> None:
        stages = self.stages
        if not stages or stages != [stage for stage in STAGES if stage in stages]:
            raise ConfigError("stages have one order", got=stages, allowed=f"some of {', '.join(STAGES)}")
        named: list[tuple[str, str | None, Stage, tuple[str, ...]]] = [
            ("model.path", self.model.path, "preferences", ("sft",)),
            ("preferences.path", self.preferences.path, "preferences", ("sft",)),
            ("reward_model.path", self.reward_model.path, "reward_model", ("sft",)),
            ("kl.reference", self.kl.reference, "rl", ("sft",)),
            ("critic.path", self.critic.path, "rl", ("sft", "reward_model")),
            *(("rewards.models.path", term.path, "rl", ("reward_model",)) for term in self.rewards.models),
            *(("gold.models.path", term.path, "rl", ()) for term in self.gold.models),
        ]
        for field, path, user, makers in named:
            stage = stage_of(path)
            if stage is None:
                continue
            if stage not in makers:
                allowed = " or ".join(f"'{STAGE_PREFIX}{maker}'" for maker in makers)
                raise ConfigError(f"no stage makes what {field} needs", got=path, allowed=allowed or "a folder")
            if stage not in stages:
                raise ConfigError(
                    f"{field} names a stage that this run does not go through",
                    got=f"{path} with stages = {stages}",
                    hint=f"add '{stage}' to stages before '{user}', or give the folder of its checkpoint",
                )
        if "reward_model" in stages and "preferences" not in stages and self.reward_model.preferences is None:
            raise ConfigError(
                "a reward model needs preferences",
                got=f"stages = {stages}",
                allowed="the stage 'preferences' before it, or reward_model.preferences",
            )
        if "preferences" in stages:
            self._check_labels()
        if "evaluate" in stages and "rl" not in stages:
            raise ConfigError("the stage evaluate measures what rl has changed", got=f"stages = {stages}")
        if "evaluate" in stages and self.evaluation.num_prompts > self.prompts.num_eval:
            raise ConfigError(
                "the stage evaluate asks for more prompts than are held out",
                got=f"evaluation.num_prompts = {self.evaluation.num_prompts}, prompts.num_eval = "
                f"{self.prompts.num_eval}",
                allowed="evaluation.num_prompts <= prompts.num_eval",
            )

    def _check_labels(self) -> None:
        if self.reward_model.candidates == 1:
            raise ConfigError(
                "the stage preferences compares completions and rates none",
                got="reward_model.candidates = 1",
                allowed="2 or 4, or reward_model.preferences with ratings and no stage preferences",
            )
        if self.preferences.labels == "judge" and not self.judge.is_given:
            raise ConfigError(
                "preferences.labels = 'judge' needs a judge",
                got="no judge.function and no judge.base_url",
                allowed="one of them",
            )
        if self.preferences.labels == "judge" and self.reward_model.candidates != 2:
            raise ConfigError(
                "a judge compares two completions",
                got=f"reward_model.candidates = {self.reward_model.candidates}",
                allowed="2, or preferences.labels = 'gold'",
            )
        if self.preferences.labels == "gold" and any(stage_of(term.path) for term in self.gold_rewards.models):
            raise ConfigError(
                "preferences would be labelled by the reward model that is trained on them",
                got="no [gold], and rewards.models of a stage",
                allowed="gold.terms or gold.models",
            )
        candidates = self.preferences.samples_per_prompt + self.preferences.with_reference
        if candidates < self.reward_model.candidates:
            raise ConfigError(
                "too few completions of a prompt to compare",
                got=f"{candidates} with reward_model.candidates = {self.reward_model.candidates}",
                hint="raise preferences.samples_per_prompt",
            )

    def _check_temperature(self) -> None:
        if self.rereads_behaviour and self.staleness_bound != 0:
            raise ConfigError(
                "behaviour logprobs at another temperature than that of sampling are read by the policy that sampled, "
                "which a stale batch's trainer no longer has",
                got=f"trainer.logprob_temperature = {self.logprob_temperature:g}, generator.temperature = "
                f"{self.generator.temperature:g}, max_staleness = {self.max_staleness}",
                allowed="max_staleness = 0, or trainer.logprob_temperature = null",
            )

    def _check_whitening(self) -> None:
        loss = self.loss
        if loss.whiten_parts == 1:
            return
        is_used = loss.whiten_advantages != "no" or (self.has_critic and self.critic.whiten_rewards)
        if not is_used:
            raise ConfigError(
                "there is nothing to whiten in parts",
                got=f"loss.whiten_parts = {loss.whiten_parts} without whitening",
                allowed="loss.whiten_advantages = 'batch' or 'minibatch', or critic.whiten_rewards with 'gae'",
            )
        per_group = {"all": self.completions_per_group, "best": 1, "best_and_worst": 2}[loss.select]
        minibatches = self.trainer.minibatches if loss.whiten_advantages == "minibatch" else 1
        smallest = self.groups_per_step // minibatches * per_group // loss.whiten_parts
        if smallest < MIN_WHITENED:
            raise ConfigError(
                "a part is too small to be whitened",
                got=f"{smallest} completions with loss.whiten_parts = {loss.whiten_parts}",
                allowed=f"at least {MIN_WHITENED} completions in every part (N)",
                hint="lower whiten_parts or trainer.minibatches, or raise groups_per_step",
            )

    def _check_loss(self) -> None:
        loss = self.loss
        needs_two = loss.select == "best_and_worst" or (
            loss.advantages in GROUP_RELATIVE and loss.advantages != "greedy_baseline"
        )
        if needs_two and self.completions_per_group < 2:
            raise ConfigError(
                "group advantages need at least two completions per prompt",
                got=f"completions_per_group = {self.completions_per_group} with advantages = '{loss.advantages}'",
                allowed=">= 2",
                hint="one completion per prompt takes advantages = 'gae', 'greedy_baseline' or 'reward'",
            )
        if loss.several_rewards == "normalise_then_sum" and loss.advantages != "group_normalised":
            raise ConfigError(
                "normalised rewards are summed to advantages, which leaves nothing to another estimator",
                got=f"several_rewards = 'normalise_then_sum' with advantages = '{loss.advantages}'",
                allowed="advantages = 'group_normalised'",
            )
        terms = self.rewards.weighted
        if terms and all(term.at_least is not None for term in terms):
            raise ConfigError(
                "constraints alone are no reward",
                got="rewards.terms and rewards.models that all have at_least",
                allowed="one term without it",
            )
        num_scores = self.samples_per_group * sum(term.per == "group" for term in self.rewards.terms)
        if num_scores > MAX_GROUP_SCORES:
            raise ConfigError(
                "a worker's answer for a group is too large",
                got=f"{num_scores:,} rewards of completions_per_group and the terms with per = 'group'",
                allowed=f"at most {MAX_GROUP_SCORES:,}",
                hint="rewards.terms[].per = 'completion' has no such limit",
            )
        adjusts_reward = (
            any(term.at_least is not None for term in terms)
            or loss.truncated in ("penalty", "subtract")
            or (self.kl.coef > 0 and self.kl.place == "reward")
        )
        if loss.several_rewards == "normalise_then_sum" and adjusts_reward:
            raise ConfigError(
                "normalised rewards have no sum that a constraint, a truncation or a KL penalty could change",
                got="several_rewards = 'normalise_then_sum' with at_least, loss.truncated or kl in the reward",
                allowed="several_rewards = 'sum_then_normalise'",
            )
        if self.kl.place == "loss" and self.kl.estimator == "k1" and self.kl.coef:
            raise ConfigError(
                "the gradient of k1 in the loss is zero on average: it penalises nothing",
                got="kl.place = 'loss' with kl.estimator = 'k1'",
                allowed="k2 or k3 in the loss, any in the reward",
                hint="set kl.estimator = 'k3' (GRPO)",
            )
        if self.kl.target is not None and not self.kl.coef:
            raise ConfigError("an adaptive KL coefficient needs a start", got="kl.coef = 0", hint="N starts at 0.15")
        if self.kl.target is not None and self.kl.horizon <= 0.2 * self.completions_per_step:
            raise ConfigError(
                "one step could take the whole KL coefficient away: it falls by up to 0.2 * completions / horizon",
                got=f"kl.horizon = {self.kl.horizon:g} with {self.completions_per_step} completions per step",
                allowed=f"above {0.2 * self.completions_per_step:g}",
            )
        generator = self.generator
        if loss.truncated == "subtract" and loss.truncation_reward >= 0:
            raise ConfigError(
                "a truncated completion is to lose by it",
                got=f"loss.truncated = 'subtract' with truncation_reward = {loss.truncation_reward:g}",
                allowed="truncation_reward < 0, which is added to its reward",
            )
        never_ends = not generator.stop_at_eos and not generator.stop_token_ids and self.rewards.truncate_token is None
        if never_ends and loss.truncated != "keep":
            raise ConfigError(
                "every completion would count as truncated: none can end",
                got=f"generator.stop_at_eos = false with loss.truncated = '{loss.truncated}'",
                allowed="loss.truncated = 'keep'",
                hint="set rewards.truncate_token, which says where a completion of fixed length ends",
            )
