"""The schema of a run: its sections (`core/*sections.py`), the fields above them, and what must hold between them.

Nothing the user asked for is rewritten: derived values are properties, conflicts raise ConfigError. `core/recipes.py`
loads TOML into it and applies overrides. A section checks what it asks of itself and of the others; vLLM and the stages
do so themselves, before a run (`check_conflicts` in `stages/named.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from slipstream.core.environment_section import EnvironmentConfig, check_episodes
from slipstream.core.errors import ConfigError
from slipstream.core.fields import Count, FolderName, NonNegative, Positive, Seconds, Section, Steps
from slipstream.core.lora_section import check_lora
from slipstream.core.observe_sections import CallbacksConfig, HealthConfig, ObserveConfig, TrackersConfig
from slipstream.core.sections import (
    BY_PLACE,
    BY_VERSION,
    HARD_BOUND,
    GeneratorConfig,
    ModelConfig,
    PromptsConfig,
    RewardsConfig,
    SchedulingConfig,
)
from slipstream.core.stage_sections import (
    DpoConfig,
    EvalConfig,
    EvaluationConfig,
    JudgeConfig,
    PreferencesConfig,
    RewardModelConfig,
    SftConfig,
    WarmStartConfig,
)
from slipstream.core.teacher_section import DISTILL, TeacherConfig
from slipstream.core.training_sections import CriticConfig, KLConfig, LossConfig, TrainerConfig, check_training

Stage = Literal["sft", "preferences", "dpo", "reward_model", "rl", "evaluate"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""All stages, in the order in which a run goes through them."""
JUST_RL: tuple[Stage, ...] = ("rl",)
STAGE_PREFIX = "stage:"
MAX_SEED = 2**62 - 1
"""Seeds have room for the offsets that are added to them on the way to a generator of 64 bits."""
MIN_UPDATE_S = 0.001
"""No forward pass, backward pass and update of a model takes less."""
PRESETS: dict[str, dict[str, Any]] = {
    "sync": {"max_staleness": 0, "weight_update": "between_batches"},
    "one_step": {"max_staleness": 1, "weight_update": "between_batches"},
    "bounded": {"weight_update": "between_batches"},
    "continuous": {"weight_update": "in_flight"},
    "tolerant": {"max_staleness": 8, "overtake_steps": 6, "weight_update": "in_flight"},
}


def stage_of(path: str | None) -> str | None:
    """Return 'sft' for 'stage:sft', a path that stands for the checkpoint of an earlier stage; None for others."""
    return path.removeprefix(STAGE_PREFIX) if path is not None and path.startswith(STAGE_PREFIX) else None


class RunConfig(Section):
    """The configuration of a whole run: frozen, and checked where it is made."""

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
    overtake_steps: NonNegative = Field(
        0,
        description="Widens W by so many times P: finished groups may overtake an unfinished one by so many steps. "
        "Generators are then k - overtake_steps steps ahead, and only stragglers are older.",
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
        description="How often each executor is started again when its process is lost: generators, "
        "environments and rewards alone, while the run goes on; trainer, critic, reference, teacher and reward models "
        "with the whole run, from the last checkpoint. "
        "Of a group on another machine its agent is told (`slipstream launch --group`).",
    )
    stages: list[Stage] = Field(
        default_factory=lambda: list(JUST_RL),
        description="What a run goes through, in this order: sft, preferences, dpo, reward_model, rl, evaluate. "
        "'stage:sft', 'stage:dpo' and 'stage:reward_model' stand for their checkpoints wherever one is named.",
    )
    schedule: SchedulingConfig = Field(
        default_factory=SchedulingConfig, description="Which groups start, and which a step trains."
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="The policy.")
    prompts: PromptsConfig = Field(default_factory=PromptsConfig, description="Where questions come from.")
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig, description="Sampling and decoding.")
    environment: EnvironmentConfig = Field(
        default_factory=EnvironmentConfig, description="What answers between the turns of an episode, if there are any."
    )
    rewards: RewardsConfig = Field(default_factory=RewardsConfig, description="Scoring.")
    loss: LossConfig = Field(default_factory=LossConfig, description="Loss and advantages.")
    kl: KLConfig = Field(default_factory=KLConfig, description="Penalty for leaving the reference policy.")
    teacher: TeacherConfig = Field(default_factory=TeacherConfig, description="A model that the policy learns from.")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="The training step.")
    critic: CriticConfig = Field(default_factory=CriticConfig, description="Value function of actor-critic PPO.")
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig, description="SFT before RL.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Held-out evaluation.")
    sft: SftConfig = Field(default_factory=SftConfig, description="Stage of demonstrations.")
    preferences: PreferencesConfig = Field(default_factory=PreferencesConfig, description="Stage of preferences.")
    dpo: DpoConfig = Field(default_factory=DpoConfig, description="Stage of direct preference optimisation.")
    reward_model: RewardModelConfig = Field(default_factory=RewardModelConfig, description="Stage of the reward model.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Stage of the evaluation.")
    gold: RewardsConfig = Field(
        default_factory=lambda: RewardsConfig(terms=[]),
        description="What completions are really worth: it labels preferences and decides win rates, and RL never "
        "sees it. Without terms and models: the same as [rewards].",
    )
    judge: JudgeConfig = Field(default_factory=JudgeConfig, description="Judge of pairs, for labels and win rates.")
    callbacks: CallbacksConfig = Field(
        default_factory=CallbacksConfig, description="Functions of your own that hear of the run, and may end it."
    )
    health: HealthConfig = Field(default_factory=HealthConfig, description="Alarms.")
    trackers: TrackersConfig = Field(default_factory=TrackersConfig, description="Other people's dashboards.")
    observe: ObserveConfig = Field(default_factory=ObserveConfig, description="Files for people to look at.")

    @property
    def gold_rewards(self) -> RewardsConfig:
        return self.gold if self.gold.weighted else self.rewards

    @property
    def first_checkpoint(self) -> str | None:
        """Return the checkpoint that the policy comes from, before all stages that train it; None: a fresh model."""
        path = self.dpo.path if stage_of(self.model.path) == "dpo" else self.model.path
        return self.sft.path if stage_of(path) == "sft" else path

    @property
    def computes_on_gpu(self) -> bool:
        """Whether the trainer or the native engine does."""
        return self.trainer.device == "cuda" or self.generator.device != "cpu"

    @property
    def samples_on(self) -> str:
        """The device that a policy is sampled on outside of RL, by the native engine: with vLLM, the trainer's."""
        return self.trainer.device if self.generator.engine == "vllm" else self.generator.device

    @property
    def trains_in_stages(self) -> bool:
        """Whether a stage besides RL trains a model."""
        return bool({"sft", "dpo", "reward_model"} & set(self.stages))

    @property
    def samples_in_stages(self) -> bool:
        """Whether a stage besides RL samples from a policy."""
        samples = "reward_model" in self.stages and self.reward_model.normalise == "before_and_after"
        return samples or bool({"preferences", "evaluate"} & set(self.stages))

    @property
    def weights_stay_on_gpu(self) -> bool:
        """Whether versions go from GPU to GPU: where both ends compute there, and nothing on the way needs the host."""
        is_on_gpu = self.trainer.device == "cuda" and self.generator.device.startswith("cuda")
        return is_on_gpu and self.generator.engine == "native" and not self.generator.delta and self.host == "process"

    @property
    def publishes_in_place(self) -> bool:
        """Whether generators read versions from the bfloat16 weights that the trainer computes with: as both sides take
        turns, nothing changes these while they are read."""
        trainer = self.trainer
        has_copy = trainer.ranks == 1 and trainer.precision == "bfloat16" and trainer.compute_copy
        is_copied = self.generator.precision == "bfloat16" and not self.model.lora.is_set
        takes_part = self.weights_stay_on_gpu and self.takes_turns and trainer.publish_in_place
        return takes_part and has_copy and is_copied

    @property
    def sft_model(self) -> ModelConfig:
        """Return the model that the stage sft starts from: of [model]'s sizes, but for those of [sft.shape]."""
        return self.model.model_copy(update={"path": self.sft.path, **self.sft.shape.given})

    @property
    def staleness_bound(self) -> int | None:
        """Return the most steps that a consumed token may be old; None under a policy that promises no bound."""
        return self.max_staleness if self.schedule.policy in HARD_BOUND else None

    @property
    def bounds_admissions(self) -> bool:
        """Whether a group's place says what may be trained of it; `drop_stale` discards whatever is stale by then."""
        return self.schedule.policy in BY_PLACE

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
        """Return the temperature by which the trainer divides all logits of policy and reference."""
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
    def capacity_tokens(self) -> int:
        """The rows of an update's microbatch; 0 gives each completion a microbatch of its own."""
        return 0 if self.loss.baseline == "min_variance" else self.trainer.microbatch_tokens

    @property
    def has_critic(self) -> bool:
        return self.loss.advantages == "gae"

    @property
    def has_own_critic(self) -> bool:
        """Whether the critic is trained by an executor of its own, beside the trainer."""
        return self.has_critic and self.critic.executor == "own"

    @property
    def has_teacher(self) -> bool:
        return self.teacher.path is not None

    @property
    def has_own_teacher(self) -> bool:
        """Whether rollouts come with what the teacher says, from an executor of its own."""
        return self.has_teacher and self.teacher.executor == "own"

    @property
    def longest_completion(self) -> int:
        """Return the most tokens behind a prompt: those of a completion, or of all turns of an episode."""
        turn = self.generator.max_new_tokens
        if not self.environment.is_set:
            return turn
        return self.environment.max_episode_tokens or self.environment.max_turns * turn

    @property
    def needs_functions(self) -> bool:
        """Whether completions are to be scored by functions: they need not be where reward models or an environment
        score, or where a teacher alone is learned from."""
        others = self.rewards.models or self.environment.is_set or self.loss.name == DISTILL
        return bool(self.rewards.asked or not others)

    @property
    def part_weights(self) -> list[float]:
        """Return the weights of a reward's parts, in their order: functions, the environment, models."""
        environment = [self.environment.reward_weight] if self.environment.is_set else []
        functions, models = self.rewards.asked, self.rewards.models
        return [*(term.weight for term in functions), *environment, *(model.weight for model in models)]

    @property
    def sessions(self) -> int:
        """Return the completions or episodes that a replica has open at a time."""
        slots = self.generator.rows
        return self.generator.sessions or 2 * slots if self.environment.is_set else slots

    def for_set(self, name: str) -> RunConfig:
        """Return the configuration whose held-out prompts are the set `name` of eval.sets; ConfigError without it."""
        found = {one.name: one for one in self.eval.sets}
        if name not in found:
            raise ConfigError.unknown("there is no such set in eval.sets", name, found, got=name, none="no name")
        chosen, prompts = found[name], self.prompts
        own = {key: value for key in _OF_PROMPTS if (value := getattr(chosen, key)) is not None}
        source = (
            (chosen.dataset, chosen.dataset_config) if chosen.dataset else (prompts.dataset, prompts.dataset_config)
        )
        own["dataset"] = source[0]  # whose configuration it is
        own |= {"eval_dataset": source[0], "dataset_config": source[1], "dataset_split": chosen.split}
        measure = self.eval.measure_of(name)  # and no rule of the run, which may go by another set's
        evaluation = self.eval.model_copy(update={"sets": [], "measure": measure, "metric": None})
        return self.model_copy(update={"prompts": prompts.model_copy(update=own), "eval": evaluation})

    @property
    def num_held_out(self) -> int | None:
        """Return the held-out prompts that there are at most; None where that is known when they are read."""
        return self.eval.sets[0].num_prompts if self.eval.sets else self.prompts.num_eval

    @property
    def num_evaluated(self) -> int | None:
        """Return the held-out prompts of the stage evaluate; None: all of the first set."""
        asked = self.evaluation.num_prompts
        return 200 if asked is None and not self.eval.sets else asked

    def with_longest_prompt(self, num_tokens: int) -> RunConfig:
        """Return the configuration with the longest prompt that there is, where no limit was asked for: slots are as
        long as it takes."""
        if self.prompts.max_prompt_tokens is not None:
            return self
        prompts = self.prompts.model_copy(update={"max_prompt_tokens": num_tokens})
        return self.model_copy(update={"prompts": prompts})

    def longest_prompt(self, max_positions: int) -> int:
        """Return the tokens of the longest prompt that is taken, in a model of so many positions."""
        asked = self.prompts.max_prompt_tokens
        return max_positions - self._least_behind if asked is None else asked

    @property
    def _least_behind(self) -> int:
        """Return the tokens that must fit behind a prompt: an agent's episode may lie in several contexts."""
        return self.generator.max_new_tokens if self.environment.has_only_agents else self.longest_completion

    def longest_sequence(self, max_positions: int) -> int:
        """Return the tokens of the longest prompt and completion together, in a model of so many positions."""
        return min(max_positions, self.longest_prompt(max_positions) + self.longest_completion)

    @property
    def least_sequence(self) -> int:
        """Return what is known of `longest_sequence` before prompts are read: without a limit, they have a token."""
        return (self.prompts.max_prompt_tokens or 1) + self._least_behind

    def check_lengths(self, max_positions: int, *, of: str, hint: str) -> None:
        """Raise ConfigError where prompts and completions do not fit the `max_positions` `of` a model."""
        asked = self.prompts.max_prompt_tokens
        has_turns = self.environment.is_set and not self.environment.has_only_agents
        if self.least_sequence > max_positions:
            raise ConfigError(
                f"prompts and {'episodes' if has_turns else 'completions'} do not fit the model",
                got=f"max_prompt_tokens = {'null' if asked is None else asked}, "
                f"{'environment.max_episode_tokens' if has_turns else 'max_new_tokens'} = {self._least_behind}",
                allowed=f"together at most {of} = {max_positions}",
                hint=hint,
            )

    @property
    def samples_per_group(self) -> int:
        """Return the completions sampled per prompt: G, and ReMax's greedy one behind them."""
        return self.completions_per_group + (self.loss.advantages == "greedy_baseline")

    @property
    def trained_per_group(self) -> int:
        """Return the completions of a group that `loss.select` trains on, without ReMax's greedy one."""
        return {"all": self.completions_per_group, "best": 1, "best_and_worst": 2}[self.loss.select]

    @property
    def completions_per_step(self) -> int:
        return self.groups_per_step * self.completions_per_group

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        self._check_schedule()
        if self.first_checkpoint is None:
            self.check_lengths(
                self.model.max_positions,
                of="model.max_positions",
                hint="lower prompts.max_prompt_tokens (longer prompts are dropped), or raise model.max_positions",
            )
            self.model.check_heads()
            self.model.check_template()
        self._check_prompts()
        self._check_processes()
        self.rewards.check_terms(self.samples_per_group)
        check_episodes(self)
        check_lora(self)
        check_training(self)
        return self

    def _check_schedule(self) -> None:
        schedule, k = self.schedule, self.max_staleness
        if schedule.queue_groups is not None and schedule.queue_groups < self.groups_per_step:
            raise ConfigError(
                "the queue of finished groups does not hold a batch: the trainer would wait for it forever",
                got=f"schedule.queue_groups = {schedule.queue_groups}, groups_per_step = {self.groups_per_step}",
                allowed="schedule.queue_groups >= groups_per_step",
            )
        asked = f"reorder_window = {self.reorder_window}, overtake_steps = {self.overtake_steps}"
        if schedule.policy != "oldest_first" and self.window != 1:
            raise ConfigError(
                "only the policy 'oldest_first' has a window",
                got=f"{asked} with schedule.policy = '{schedule.policy}'",
                allowed="reorder_window = 1, overtake_steps = 0",
            )
        if schedule.policy == "one_step" and (k, self.publish_every) != (1, 1):
            raise ConfigError(
                "the policy 'one_step' is one step stale, and takes every version",
                got=f"max_staleness = {k}, publish_every = {self.publish_every}",
                allowed="max_staleness = 1 and publish_every = 1",
            )
        if schedule.policy in BY_VERSION and self.publish_every > k + 1:
            raise ConfigError(
                "publish_every leaves generators no version fresh enough to sample from",
                got=f"publish_every = {self.publish_every}, max_staleness = {k}",
                allowed=f"1..{k + 1} (max_staleness + 1)",
                hint="raise max_staleness or publish more often",
            )
        limit = (k - self.publish_every + 1) * self.groups_per_step + 1
        if schedule.policy == "oldest_first" and self.window > limit:
            raise ConfigError(
                "reorder_window is too wide: generators and trainer would wait for each other forever",
                got=asked,
                allowed=f"1..{limit} ((max_staleness - publish_every + 1) * groups_per_step + 1), steps included",
                hint="raise max_staleness, or lower reorder_window or overtake_steps",
            )
        if self.generator.segment_tokens is not None and self.weight_update == "in_flight":
            raise ConfigError(
                "segment_tokens cuts completions at a swap, but in_flight swaps need no cut",
                got="segment_tokens with weight_update = 'in_flight'",
                allowed="segment_tokens with weight_update = 'between_batches'",
                hint="drop segment_tokens, or use the preset 'bounded'",
            )
        if self.generator.weight_update_at == "turn" and (self.weight_update == "in_flight" or self.model.lora.is_set):
            other = "model.lora" if self.model.lora.is_set else "weight_update = 'in_flight'"
            raise ConfigError(
                "no version waits for a turn to end: with adapters an episode keeps its own, and in flight none waits",
                got=f"generator.weight_update_at = 'turn' with {other}",
                allowed="generator.weight_update_at = 'turn' with weight_update = 'between_batches', without adapters",
                hint="drop weight_update_at, or use the preset 'bounded'",
            )

    @property
    def window(self) -> int:
        """Return W of the schedule's rules."""
        return self.reorder_window + self.overtake_steps * self.groups_per_step

    @property
    def mixes_turns(self) -> bool:
        """Return whether turns of one episode may have several versions."""
        return self.weight_update == "in_flight" or self.generator.weight_update_at == "turn"

    @property
    def max_probe_error(self) -> float:
        """Return `generator.probe_tolerance`, or what suits the lower precision of generators and trainer, in nats."""
        as_trained = self.generator.model_copy(update={"precision": self.model.lora.base_precision})
        return max(self.generator.max_probe_error, as_trained.max_probe_error)

    @property
    def resident_versions(self) -> int:
        """Return how many versions a generator holds side by side: all that can be in use (docs/staleness.md), or 1."""
        holds_one = self.generator.engine == "native" and self.generator.device.startswith("cuda")
        keeps = self.model.lora.is_set and self.weight_update == "between_batches" and not holds_one
        return self.max_staleness + 1 if keeps else 1

    def _check_prompts(self) -> None:
        prompts = self.prompts
        if bool(prompts.tasks) == bool(prompts.dataset):
            raise ConfigError(
                "exactly one source of prompts is needed",
                got=f"{len(prompts.tasks)} tasks and dataset = {prompts.dataset!r}",
                allowed="prompts.tasks or prompts.dataset",
                hint=_BOTH_SOURCES if prompts.tasks else None,
            )
        reads_all: list[str] = [stage for stage in self.stages if stage not in ("rl", "evaluate")]
        reads_all += ["warm_start"] * (self.warm_start.steps > 0)
        if prompts.streaming and (prompts.tasks or reads_all):
            raise ConfigError(
                "a stream of prompts is for RL on a data set alone",
                got="prompts.streaming with " + ("prompts.tasks" if prompts.tasks else ", ".join(reads_all)),
                allowed="prompts.dataset, stages of rl and evaluate, and no warm start",
            )
        if prompts.identity == "row" and (prompts.tasks or self.eval.sets):
            raise ConfigError(
                "rows are told apart by their columns in data sets, whose held-out rows are of the same columns",
                got="prompts.identity = 'row' with " + ("prompts.tasks" if prompts.tasks else "eval.sets"),
                allowed="prompts.dataset without eval.sets",
                hint="prompts.eval_dataset names held-out rows",
            )
        if self.eval.sets and prompts.eval_dataset is not None:
            raise ConfigError(
                "held-out prompts are named twice",
                got=f"prompts.eval_dataset = '{prompts.eval_dataset}' with eval.sets",
                allowed="one of the two",
                hint="`slipstream eval RUN --data FILE` answers the prompts of a file, and no others",
            )
        if without := [one.name for one in self.eval.sets if not (one.dataset or prompts.dataset)]:
            got, allowed = f"eval.sets '{without[0]}' without a dataset", "its dataset, as prompts.dataset is not given"
            raise ConfigError("a set of prompts needs data", got=got, allowed=allowed)
        if not self.eval.sets and self.eval.num_prompts > prompts.num_eval:
            raise ConfigError(
                "evaluation asks for more prompts than are held out",
                got=f"eval.num_prompts = {self.eval.num_prompts}, prompts.num_eval = {prompts.num_eval}",
                allowed="eval.num_prompts <= prompts.num_eval",
            )

    def _check_processes(self) -> None:
        if self.updates_per_step * MIN_UPDATE_S > self.deadline_s:
            raise ConfigError(
                "a step has more updates than its deadline has time for",
                got=f"trainer.epochs = {self.trainer.epochs} x trainer.minibatches = {self.trainer.minibatches} updates"
                f" of {MIN_UPDATE_S:g} s or more = {self.updates_per_step * MIN_UPDATE_S:g} s",
                allowed=f"deadline_s = {self.deadline_s:g}",
            )
        ranks = {
            "trainer.ranks": self.trainer.ranks,
            "generator.tensor_parallel": 1 if self.generator.engine == "vllm" else self.generator.tensor_parallel,
            "generator.pipeline_parallel": self.generator.pipeline_parallel,
            "rewards.model_ranks": self.rewards.model_ranks,
            "kl.ranks": self.kl.ranks,
            "teacher.ranks": self.teacher.ranks,
            "critic.ranks": self.critic.ranks,
        }
        several = ", ".join(f"{field} = {count}" for field, count in ranks.items() if count > 1)
        if self.host == "inline":
            self._check_inline(several)
        for section, who in (
            ("trainer", "the trainer computes"),
            ("rewards", "reward models compute"),
            ("gold", "reward models compute"),
            ("kl", "the reference computes"),
            ("teacher", "the teacher computes"),
        ):
            part = vars(self)[section]
            is_of_vllm = section == "teacher" and self.teacher.engine == "vllm"  # which has a precision on all devices
            if part.precision != "float32" and part.device == "cpu" and not is_of_vllm:
                raise ConfigError(
                    f"on a CPU {who} in float32",
                    got=f"{section}.precision = '{part.precision}' with {section}.device = 'cpu'",
                    allowed=f"{section}.device = 'cuda'",
                )

    def _check_inline(self, several: str) -> None:
        """Refuse what takes processes of their own; `several` names the fields of more than one rank."""
        share = "gpu_share" if self.trainer.gpu_share or self.generator.gpu_share else ""
        cast = "model.lora" if self.model.lora.is_set else "" if self.trainer.compute_copy else "compute_copy = false"
        if self.trainer.device != "cuda" or self.trainer.precision == "float32":
            cast = ""
        for what, got in (
            ("several ranks need processes of their own", several),
            ("a share of a GPU's memory is a process's", share),
            ("weights are cast to trainer.precision by a process's group", cast),
        ):
            if got:
                raise ConfigError(what, got=f"{got} with host = 'inline'", allowed="host = 'process'")


_OF_PROMPTS = ("prompt_column", "answer_column", "template")
"""Fields of a set of eval.sets that take the place of those of [prompts]."""
_BOTH_SOURCES = (
    "[[prompts.tasks]] of the recipe and a dataset exclude each other: write a recipe with one of them, or in Python "
    'overrides={"prompts.tasks": [], "prompts.dataset": PATH}'
)
