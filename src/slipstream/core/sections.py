"""The sections of a run's configuration: frozen pydantic models, whose fields describe their unit and consequence.

What holds between sections is checked by `RunConfig` in `core/config.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from slipstream.core.errors import ConfigError
from slipstream.core.plain import wrong_path, wrong_with

MAX_INTEGER = 2**31 - 1
"""Of any integer: what libraries in C take. Unbounded fields mean 'as many as there are'."""
MAX_COUNT = 2**16
"""Of what takes memory or time one by one: layers, processes, the groups of a step, completions of a group."""
MAX_STEPS = 10**8
"""At 10 ms each twelve days; metrics.jsonl alone has hundreds of GB then."""
MAX_EPOCHS = 1000
"""Over one batch, or one data set: far beyond any use, and a batch is only left when all are done."""
MAX_NUMBER, MIN_POSITIVE = 1e30, 1e-30
"""Of numbers that meet tensors: products of two are in the range of float32, and none becomes 0 or inf there."""
MAX_WAIT_S, MIN_WAIT_S = 2_000_000.0, 0.001
"""Of a wait: epoll and ZeroMQ count milliseconds, in 31 bits (24.8 days)."""


def _null_in(value: Any) -> str | None:
    is_in = isinstance(value, str) and "\0" in value
    return "a null character, which ends a text for whatever is written in C" if is_in else None


def _not_tiny(value: float) -> float:
    if value < MIN_POSITIVE:
        raise PydanticCustomError("greater_than_equal", "too small", {"ge": MIN_POSITIVE})
    return value


def _not_huge(value: float) -> float:
    if MAX_NUMBER < value < math.inf:
        raise PydanticCustomError("less_than_equal", "too large", {"le": f"{MAX_NUMBER:g}, or inf"})
    return _not_tiny(value)


def _name(value: str) -> str:
    if "/" in value or value in (".", ".."):
        raise PydanticCustomError("name", "a name of a folder, not a path")
    return _path(value)


def _path(value: str) -> str:
    if (wrong := wrong_path(value)) is not None:
        raise PydanticCustomError("path", "{wrong}", {"wrong": wrong})
    return value


Positive = Annotated[int, Field(gt=0, le=MAX_INTEGER, strict=True)]
NonNegative = Annotated[int, Field(ge=0, le=MAX_INTEGER, strict=True)]
Count = Annotated[int, Field(gt=0, le=MAX_COUNT, strict=True)]
Steps = Annotated[int, Field(gt=0, le=MAX_STEPS, strict=True)]
Epochs = Annotated[int, Field(gt=0, le=MAX_EPOCHS, strict=True)]
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, le=MAX_NUMBER, strict=True), AfterValidator(_not_tiny)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MAX_NUMBER, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
Seconds = Annotated[float, Field(ge=MIN_WAIT_S, le=MAX_WAIT_S, strict=True)]
Limit = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=True), AfterValidator(_not_huge)]
"""inf: there is none. All other numbers are finite."""
FilePath = Annotated[str, AfterValidator(_path)]
"""Of a file, a folder or a hub id; a function's too, 'file.py:function'."""
FolderName = Annotated[str, Field(max_length=100), AfterValidator(_name)]


Precision = Literal["float32", "bfloat16", "int8", "fp8"]
"""How a generator's weights are stored and multiplied; the trainer's are float32."""


class Section(BaseModel):
    """Base of all sections: immutable, unknown fields are errors, and every value can be written and sent."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _check_plain(cls, value: Any) -> Any:
        if (wrong := wrong_with(value)) is not None or (wrong := _null_in(value)) is not None:
            raise PydanticCustomError("plain", "{wrong}", {"wrong": wrong})
        return value


PolicyName = Literal["oldest_first", "drop_stale", "areal", "one_step", "sample_budget", "finish_order"]
"""Scheduling policies (`controller/schedule.py`, `controller/policies.py`)."""
HARD_BOUND: tuple[PolicyName, ...] = ("oldest_first", "drop_stale", "one_step")
"""Those under which no token is staler than `max_staleness`."""
BY_VERSION: tuple[PolicyName, ...] = (*HARD_BOUND, "areal")
"""Those that admit or discard by `max_staleness`, and so need versions that are fresh enough."""


class SchedulingConfig(Section):
    """Which groups start, and which a step trains. The default is ours; the others are there to be compared with."""

    policy: PolicyName = Field(
        "oldest_first",
        description="`oldest_first` (bounded, discards nothing), or a peer's: `drop_stale`, `areal`, `one_step`, "
        "`sample_budget`, `finish_order` (docs/staleness.md). `areal` takes max_staleness for its admission and "
        "promises no bound; the last two do not look at it.",
    )
    staleness_threshold: NonNegativeFloat | None = Field(
        None,
        description="`sample_budget` only, and needed there: between two published versions "
        "(1 + staleness_threshold) publish_every P groups are generated at most.",
    )
    queue_groups: Positive | None = Field(
        None,
        description="`finish_order` only, and needed there: so many finished groups may wait for the trainer before "
        "no new one starts. At least groups_per_step.",
    )


class ModelConfig(Section):
    """The policy: a Hugging Face checkpoint (`path`) or a fresh, randomly initialised model of a `family`."""

    path: FilePath | None = Field(
        None,
        description="Folder of a Hugging Face checkpoint with tokenizer, or its id on the hub: ORG/NAME or "
        "ORG/NAME@REVISION, as every checkpoint may be named (docs/checkpoints.md). Excludes the rest.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub id `path`; the run saves the commit, behind an @ in `path`."
    )
    family: Literal["llama", "qwen2", "qwen3", "gpt_neox", "gpt2"] = Field(
        "llama", description="Architecture of a fresh model (llama also covers Mistral and SmolLM)."
    )
    hidden_size: Positive = Field(128, description="Width of the residual stream.")
    intermediate_size: Positive = Field(512, description="Width of the MLP.")
    num_layers: Count = Field(3, description="Decoder layers.")
    num_heads: Count = Field(4, description="Query heads.")
    num_kv_heads: Count = Field(4, description="Key and value heads; divides num_heads.")
    max_positions: Positive = Field(256, description="Longest sequence, prompt and completion together, in tokens.")
    tie_embeddings: bool = Field(True, description="Share the input embedding with the output head.")
    alphabet: str | None = Field(
        None,
        description="Characters of a character tokenizer for a fresh model; null takes printable ASCII and newline.",
    )

    @model_validator(mode="after")
    def _check_revision(self) -> Self:
        if self.revision is not None and (self.path is None or "@" in self.path or self.path.startswith("stage:")):
            raise ConfigError(
                "model.revision belongs to a hub id in model.path that names none itself",
                got=f"model.revision = '{self.revision}' with model.path = {self.path!r}",
                allowed="model.path = 'ORG/NAME' with model.revision, or model.path = 'ORG/NAME@REVISION'",
            )
        return self


class TaskConfig(Section):
    """One reasoning-gym dataset by name and parameters."""

    name: str = Field(description="reasoning-gym dataset, e.g. 'spell_backward'; see `slipstream recipes --tasks`.")
    params: dict[str, Any] = Field(default_factory=dict, description="Parameters of the dataset (not size, not seed).")
    weight: PositiveFloat = Field(1.0, description="Share of prompts drawn from this task, relative to the others.")


class PromptsConfig(Section):
    """Where questions come from: reasoning-gym `tasks`, or a `dataset` (JSONL, parquet, folder or hub id)."""

    tasks: list[TaskConfig] = Field(default_factory=list, description="reasoning-gym tasks, mixed by weight.")
    dataset: FilePath | None = Field(
        None, description="Path or hub id of a dataset with columns `prompt` and `answer`."
    )
    dataset_config: str | None = Field(None, description="Configuration of a hub dataset that has several.")
    dataset_split: str = Field("train", description="Split of a Hugging Face dataset to read.")
    prompt_column: str = Field("prompt", description="Column with a string or a list of chat messages.")
    answer_column: str = Field("answer", description="Column with the reference answer; may be absent from the data.")
    reference: str = Field(
        "{answer}", description="Reference completion from the row's columns, for preferences, win rates and a bias."
    )
    eval_dataset: FilePath | None = Field(
        None, description="Held-out dataset; null splits it off `dataset` by text hash."
    )
    template: str = Field(
        "{question}",
        description="Prompt text from the row's columns, e.g. '{question}\\n' or '{word}>' (metadata are columns too).",
    )
    chat: bool = Field(False, description="Wrap the prompt as one user message in the tokenizer's chat template.")
    system: str | None = Field(None, description="System message of chat prompts.")
    between_periods: bool = Field(
        False, description="Keep a dataset's prompt from behind its first period to its last; drop it without two (N)."
    )
    max_prompt_tokens: Positive | None = Field(
        None,
        description="Longest prompt, in tokens; see too_long. null: what the model's positions leave beside "
        "generator.max_new_tokens; decode slots then have room for the longest prompt that there is.",
    )
    too_long: Literal["drop", "cut", "shorten"] = Field(
        "drop",
        description="Longer prompts are dropped and counted, cut at the right, or shortened: shorten_column loses what "
        "follows its last line break until the prompt fits, then characters (N).",
    )
    shorten_column: str | None = Field(None, description="Column of the template to shorten, e.g. 'post'.")
    num_train: Positive = Field(20_000, description="Distinct training prompts; the stream reshuffles when they end.")
    num_eval: Positive = Field(500, description="Held-out prompts, disjoint from training ones by normalised text.")


class VLLMConfig(Section):
    """vLLM as the generator's engine (`generator.engine = "vllm"`), a process in an environment of its own."""

    python: FilePath = Field(
        ".venv-vllm/bin/python",
        description="Interpreter of vLLM's environment, from the working folder; in a checkout, `make vllm-env` "
        "makes that one.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Precision vLLM computes in; lower ones need a higher generator.probe_tolerance."
    )
    enforce_eager: bool = Field(True, description="Run vLLM without compiling: a faster start, slower decoding.")
    kv_cache_gb: Positive = Field(1, description="Memory of the KV cache on a CPU, in GiB.")
    gpu_memory_utilization: Annotated[Number, Field(gt=0, le=1)] = Field(
        0.5, description="Share of a GPU's memory for vLLM, weights and cache; the trainer may need the rest."
    )
    max_model_len: Positive | None = Field(
        None, description="Longest sequence in vLLM, in tokens; null: the longest prompt and completion, and the probe."
    )
    transfer: Literal["reload", "nccl"] = Field(
        "reload", description="Weights by a checkpoint in shared memory, or broadcast from a second GPU (not tested)."
    )
    start_timeout_s: Seconds = Field(300.0, description="Longest start of the process, in seconds.")
    answer_timeout_s: Seconds = Field(
        120.0, description="Longest wait for weights to be loaded, or a probe to be computed, in seconds."
    )
    silence_timeout_s: Seconds = Field(
        60.0, description="Longest time without a token while completions are due, in seconds."
    )
    max_restarts: NonNegative = Field(
        1, description="Processes that may die or fall silent and be replaced, in a run; completions go on behind that."
    )
    engine_args: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Further arguments of vLLM's AsyncEngineArgs, such as tensor_parallel_size."
    )

    @model_validator(mode="after")
    def _check_engine_args(self) -> Self:
        ours = sorted(VLLM_ARGS & self.engine_args.keys())
        if ours:
            raise ConfigError(
                "some arguments of vLLM are set by Slipstream",
                got=f"generator.vllm.engine_args with {', '.join(ours)}",
                hint="[generator], [eval] and [generator.vllm] have fields for them",
            )
        return self


VLLM_ARGS = frozenset(
    {
        "model",
        "dtype",
        "enforce_eager",
        "gpu_memory_utilization",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "enable_chunked_prefill",
        "skip_tokenizer_init",
        "logprobs_mode",
        "weight_transfer_config",
        "disable_log_stats",
    }
)
"""Engine arguments that `generator/vllm/backend.py` and `worker.py` set themselves."""

VLLM_MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to it, with a warning in its log (`SamplingParams`, 0.32); 0 is greedy."""


PROBE_TOLERANCES: dict[Precision, float] = {"float32": 1e-3, "bfloat16": 0.25, "int8": 0.75, "fp8": 1.5}
"""Nats: one and a half to two and a half times the largest mean error seen on probe texts (`benchmarks/probe.py`)."""


MAX_KEPT = 512
"""Tokens of the largest kept set: four bytes each, for every token sampled."""


class GeneratorConfig(Section):
    """Sampling and the decode engine."""

    replicas: Count = Field(1, description="Generator processes.")
    tensor_parallel: Count = Field(1, description="Processes of each replica, which share every layer.")
    num_slots: Positive = Field(64, description="Completions decoded at once per replica; a multiple of 8 on CPU.")
    max_new_tokens: Positive = Field(64, description="Longest completion, in tokens; longer ones finish as 'length'.")
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature; the loss uses the same.")
    top_k: NonNegative = Field(0, description="Training samples come from the k likeliest tokens; 0: from all.")
    top_p: Annotated[Number, Field(gt=0, le=1)] = Field(
        1.0,
        description="Then from the fewest of them that hold this share of the probability. Without top_k the whole "
        "vocabulary is sorted for every token.",
    )
    min_p: Fraction = Field(
        0.0, description="Then from those with at least this share of the likeliest one's probability."
    )
    keep_sets: bool = Field(
        False,
        description="Record the tokens each token was drawn from, and take the trainer's logprobs over them: what "
        "losses with importance ratios need where top_k, top_p or min_p cut. Takes top_k = 1..512.",
    )
    segment_tokens: Positive | None = Field(
        None, description="Export and resume completions every so many tokens when a newer version waits (L6)."
    )
    stop_at_eos: bool = Field(True, description="End completions at EOS; false samples max_new_tokens always (N).")
    kv_on_update: Literal["keep", "recompute", "recompute_if_older_than"] = Field(
        "keep",
        description="What an in-flight swap does with the KV cache: keep it (Magistral), rebuild it, or rebuild only "
        "what holds keys older than max_kv_age versions.",
    )
    max_kv_age: NonNegative = Field(0, description="Versions a key may lag behind with 'recompute_if_older_than'.")
    prefill_tokens: Positive = Field(512, description="Prompt tokens prefilled beside one decode step at most.")
    prefill_chunk: Positive = Field(
        512,
        description="Longer prompts are prefilled in pieces of so many tokens, one a step, whatever prefill_tokens is.",
    )
    prefix_cache_tokens: NonNegative = Field(
        2048, description="Tokens of finished prompts kept for later completions of the same prompt and version."
    )
    time_limit_s: Seconds | None = Field(
        None, description="A completion that takes longer, from its start in seconds, ends with reason 'deadline'."
    )
    stop_token_ids: list[NonNegative] = Field(
        default_factory=list, description="Stop tokens besides the tokenizer's EOS."
    )
    seeds: Literal["shared", "per_replica"] = Field(
        "shared",
        description="Noise of training samples by the run's seed alone: a completion is the same on any replica. Or by "
        "seed + replica * 100003 (N): who samples it decides the text. Evaluation is always shared.",
    )
    precision: Precision = Field(
        "float32",
        description="Weights of the generators, quantised where the trainer publishes them: bfloat16 halves the bytes "
        "of a version, int8 (per output channel, CPU only) and fp8 (per row, NVIDIA Hopper) quarter them.",
    )
    delta: bool = Field(
        False,
        description="Between machines, send only what a version has changed, in words of 2 bytes: for slow links and "
        "precision = 'bfloat16', at the cost of another copy of the weights on either side. "
        "Versions go by way of host memory then, on GPUs, too.",
    )
    relays: bool = Field(
        True,
        description="Between machines, a replica may get versions from another that hands them on, where the network "
        "would carry the same version twice into or out of a machine. false, and where versions stay on GPUs: each "
        "gets its own from the trainer.",
    )
    probe_tolerance: PositiveFloat | None = Field(
        None,
        description="Largest mean |logprob difference| on the probe text before a version is refused, in nats; null: "
        "by precision, see docs/generator.md.",
    )
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = Field(
        "cpu",
        description="What the native engine computes on: 'cpu', 'cuda' (replicas on the GPUs in turn) or 'cuda:N' (all "
        "on one). Where the trainer computes on CUDA too, versions stay on GPUs (docs/weight_sync.md).",
    )
    kv_cache_gb: PositiveFloat | None = Field(
        None,
        description="Memory for keys and values on a GPU, in GiB per engine; an evaluation is a second one. null: what "
        "all slots can fill, if 85% of the GPU (divided by its replicas) have room for that beside the weights.",
    )
    engine: Literal["native", "vllm"] = Field(
        "native", description="What decodes: Slipstream's own engine, or vLLM beside it (docs/vllm.md)."
    )
    vllm: VLLMConfig = Field(default_factory=VLLMConfig, description="vLLM, with engine = 'vllm'.")

    @property
    def max_probe_error(self) -> float:
        """`probe_tolerance`, or what suits the precision, in nats."""
        return PROBE_TOLERANCES[self.precision] if self.probe_tolerance is None else self.probe_tolerance

    @property
    def truncates(self) -> bool:
        """Whether training samples come from a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


MAX_GROUP_SCORES = 4096
"""Rewards that terms with per = 'group' give a group, all together: a worker's answer has at most 64 KiB."""
FROM_PYTHON = "python:"
"""How a term's function begins that was handed over from Python: its name follows."""


class RewardTerm(Section):
    """One reward function of the weighted sum."""

    function: FilePath = Field(
        description="'task' (the task's own verifier), 'exact_match', 'overlap', 'math', 'regex', 'length', 'code', or "
        "'module:function', 'file.py:function' with TRL's signature. 'python:NAME' stands for a function given to "
        "`slipstream.run`."
    )
    per: Literal["completion", "group"] = Field(
        "completion",
        description="What one call of your own function scores: one completion (lists of length 1), as soon as it is "
        "finished, or all completions of a prompt together.",
    )
    weight: Number = Field(1.0, description="Factor of this term in the sum.")
    at_least: Number | None = Field(
        None, description="Makes the term a constraint: below this, the reward is at most rewards.violation_cap (CGPO)."
    )
    params: dict[str, Any] = Field(default_factory=dict, description="Keyword parameters of a built-in function.")


class RewardModelTerm(Section):
    """One reward model of the weighted sum. It reads the policy's tokens, so both share a tokenizer."""

    path: FilePath = Field(
        description="Folder of a `*ForSequenceClassification` checkpoint with one label, or 'stage:reward_model'."
    )
    name: str = Field("reward_model", description="Name of its part of the reward, in metrics and rollouts.")
    weight: Number = Field(1.0, description="Factor of this term in the sum.")
    at_least: Number | None = Field(
        None, description="Makes the term a constraint: below this, the reward is at most rewards.violation_cap (CGPO)."
    )


class RewardsConfig(Section):
    """How completions are scored: by functions in sandboxed workers, by reward models in an executor of their own."""

    terms: list[RewardTerm] = Field(
        default_factory=lambda: [RewardTerm(function="task")],
        description="Weighted sum of these; a term of weight 0 is measured only.",
    )
    models: list[RewardModelTerm] = Field(
        default_factory=list, description="Reward models added to the sum. Without terms no worker is started."
    )
    model_batch_size: Count = Field(64, description="Completions that reward models score at once, at most.")
    model_ranks: Count = Field(
        1,
        description="Processes of the reward models' executor: each has all of the models, and completions are dealt to"
        " them one by one.",
    )
    device: Annotated[str, Field(pattern=r"^(cpu|cuda)$")] = Field(
        "cpu", description="What reward models compute on: 'cpu', or 'cuda', a GPU per process."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="What reward models are kept and computed in on a GPU; their heads stay float32."
    )
    num_workers: Count = Field(1, description="Sandboxed worker processes.")
    timeout_s: Seconds = Field(
        5.0,
        description="Limit of one scoring call in seconds, of a completion or a group; then the worker is killed.",
    )
    dry_call: bool = Field(
        True,
        description="Before a run starts, call your own functions, 'code' and 'overlap' on two of its prompts with "
        "made-up completions, and refuse what fails. false: for functions that should not be called in vain.",
    )
    allow_network: bool = Field(
        False,
        description="Let workers open sockets: for functions that you trust, such as a judge. Not for verifiers that "
        "evaluate model text.",
    )
    environment: list[str] = Field(
        default_factory=list,
        description="Names of environment variables that workers get besides PATH, e.g. that of an API key.",
    )
    memory_mb: Positive = Field(2048, description="Address-space limit of a worker beyond what it starts with, in MiB.")
    violation_cap: Number = Field(0.0, description="Largest reward of a completion that violates a constraint.")
    max_chars: Positive = Field(20_000, description="Longer completions are cut to so many characters before scoring.")
    truncate_token: NonNegative | None = Field(
        None,
        description="Token id up to which a completion is scored, e.g. a period's; without it it counts as truncated. "
        "Training still covers all sampled tokens (N).",
    )
    truncate_after: NonNegative = Field(0, description="Completion tokens to pass over before looking for it.")
    failure_reward: Number = Field(0.0, description="Reward of a completion whose scoring failed or timed out.")
    trust_verifier: bool = Field(
        False, description="Run verifiers known to evaluate model text even where the platform cannot isolate them."
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        wrong = next((name for name in self.environment if not name or "=" in name or "\0" in name), None)
        if wrong is not None:
            raise ConfigError("no environment variable has such a name", got=f"rewards.environment: {wrong!r}")
        names = self.part_names
        repeated = next((model.name for model in self.models if names.count(model.name) > 1), None)
        if repeated is not None:
            raise ConfigError(
                "reward models need names of their own",
                got=f"'{repeated}' more than once",
                hint="set rewards.models[].name: metrics and rollouts show each part under it",
            )
        return self

    @property
    def weighted(self) -> list[RewardTerm | RewardModelTerm]:
        """All terms of the sum in the order of their parts: functions, then models."""
        return [*self.terms, *self.models]

    @property
    def part_names(self) -> list[str]:
        """The names of their parts, each another one."""
        return [*names_of([term.function for term in self.terms]), *(model.name for model in self.models)]


def names_of(functions: Sequence[str]) -> list[str]:
    """Return a short name for each of the reward functions: 'format_reward' for 'lib.rewards:format_reward'.

    Functions of one name in several files or modules are told apart by these, 'a.py:reward' and 'b.py:reward'; what is
    the same still is numbered from the second on.
    """
    names: list[str] = []
    for function in functions:
        location, _, name = function.rpartition(":")
        is_shared = any(other.rpartition(":")[2] == name and other != function for other in functions)
        name = f"{PurePath(location).name}:{name}" if location and is_shared else name
        number = 1
        while (numbered := name if number == 1 else f"{name}#{number}") in names:
            number += 1
        names.append(numbered)
    return names


Advantages = Literal["group_mean", "group_normalised", "leave_one_out", "greedy_baseline", "gae", "reward"]
GROUP_RELATIVE: tuple[Advantages, ...] = ("group_mean", "group_normalised", "leave_one_out", "greedy_baseline")
"""Estimators that give every rollout of a group of equal rewards an advantage of 0."""


MIN_WHITENED = 8
"""Completions of a part that is whitened alone: the original RLHF code's least (N, item 29)."""


class LossConfig(Section):
    """The policy loss, its advantages, and which completions of a group are trained on."""

    name: str = Field("aipo", description="Key of `algorithms.losses.LOSSES`, of kind 'policy'.")
    params: dict[str, Annotated[float, Field(allow_inf_nan=True)] | str] = Field(
        default_factory=dict, description="The loss's own constants, e.g. max_ratio = 4."
    )
    reduction: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="Token losses divide by tokens (DAPO, P3), average sequence means (GRPO), or divide by "
        "sequences x max_new_tokens (Dr. GRPO).",
    )
    advantages: Advantages = Field(
        "group_normalised",
        description="r - mean, (r - mean) / (std + std_eps), r - mean of the others, or r - reward of the greedy "
        "completion (ReMax: one more is sampled), over the group; from a critic; or the reward itself.",
    )
    std_eps: PositiveFloat = Field(0.1, description="Added to the group's standard deviation.")
    unbiased_std: bool = Field(False, description="Divide the group's variance by G - 1 (TRL), not by G (GRPO).")
    whiten_advantages: Literal["no", "batch", "minibatch"] = Field(
        "no", description="Advantages to mean 0 and variance 1, over the tokens of the batch or of each minibatch (N)."
    )
    whiten_parts: Count = Field(
        1,
        description="Whitening, that of rewards too, goes over each of so many equal parts of the batch or minibatch, "
        "as on so many ranks (N: 8). A part needs 8 completions.",
    )
    whiten_unbiased: bool = Field(False, description="Whiten by the variance over n - 1 (TRL), not over n (N).")
    several_rewards: Literal["sum_then_normalise", "normalise_then_sum"] = Field(
        "sum_then_normalise", description="Weigh the rewards' sum, or each reward's group-normalised value (GDPO)."
    )
    select: Literal["all", "best", "best_and_worst"] = Field(
        "all",
        description="Completions of a group that are trained on (A5); pairs need best_and_worst, best_of_n needs best.",
    )
    entropy_coef: NonNegativeFloat = Field(
        0.0, description="Weight of the entropy bonus, in nats; reduced over tokens as the loss is."
    )
    truncated: Literal["keep", "mask", "penalty", "subtract"] = Field(
        "keep",
        description="Completions without their end: train as they are, mask, replace their reward by "
        "truncation_reward, or add it (TRL).",
    )
    truncation_reward: Number = Field(0.0, description="Of completions without their end; -1 in most sources.")
    skip_no_signal: bool = Field(True, description="Replace groups whose rewards are all equal by new ones.")


class KLConfig(Section):
    """The penalty for leaving the reference policy, which is frozen beside the trainer or in an executor of its own."""

    coef: NonNegativeFloat = Field(0.0, description="Weight of the KL divergence, per nat; 0: no reference is kept.")
    place: Literal["reward", "loss"] = Field(
        "reward",
        description="Taken off the reward (PPO, RLOO: behaviour policy against reference) or added to the loss.",
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k1", description="Per token: log ratio, half its square, or GRPO's unbiased and positive one."
    )
    reference: FilePath | None = Field(
        None, description="Folder or hub id of the reference's checkpoint; null: policy version 0."
    )
    target: PositiveFloat | None = Field(
        None, description="Steer coef so that a completion's KL stays near this many nats; null: coef is fixed."
    )
    horizon: PositiveFloat = Field(10_000.0, description="Completions over which coef follows the target.")
    executor: Literal["trainer", "own"] = Field(
        "trainer",
        description="Where reference logprobs are computed: by the trainer when it trains on a batch, or before, one "
        "completion after the other as it is scored, in processes of the reference's own.",
    )
    ranks: Count = Field(
        1, description="Processes of an own executor: each has the whole reference; completions are dealt one by one."
    )
    device: Annotated[str, Field(pattern=r"^(cpu|cuda)$")] = Field(
        "cpu", description="What an own executor computes on: 'cpu', or 'cuda', a GPU per process."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="What an own executor keeps and computes the reference in on a GPU."
    )

    @model_validator(mode="after")
    def _check_executor(self) -> Self:
        own = {"ranks": self.ranks, "device": self.device, "precision": self.precision}
        changed = [name for name, value in own.items() if value != type(self).model_fields[name].default]
        if self.executor == "trainer" and changed:
            raise ConfigError(
                "the trainer computes reference logprobs as it trains: on its ranks, its device, in its precision",
                got=", ".join(f"kl.{name} = {own[name]!r}" for name in changed) + " with kl.executor = 'trainer'",
                allowed="kl.executor = 'own'",
            )
        return self


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: PositiveFloat = Field(1e-4, description="Peak learning rate.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="Adam's decay rates.")
    eps: PositiveFloat = Field(1e-8, description="Adam's epsilon.")
    adam: Literal["torch", "tensorflow"] = Field(
        "torch",
        description="Where epsilon is added: to the bias-corrected root (torch) or to the bare one (tensorflow), "
        "which makes early updates by small gradients smaller, as in the original RLHF code.",
    )
    weight_decay: NonNegativeFloat = Field(0.0, description="Decoupled weight decay of matrices (not norms or biases).")
    max_grad_norm: Limit = Field(1.0, description="Global gradient norm is clipped to this.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Decay after warm-up, to 0.")
    schedule_by: Literal["update", "step"] = Field(
        "update",
        description="Decay with every update, or from training step to step: one rate for all its epochs (N).",
    )
    warmup_updates: NonNegative = Field(0, description="Linear warm-up, in optimizer updates.")


class CriticConfig(Section):
    """The value function of loss.advantages = 'gae': values are recomputed when a batch is trained on."""

    model: Literal["own", "head"] = Field("own", description="A model of its own, or a head on the policy's states.")
    path: FilePath | None = Field(
        None, description="Checkpoint an own critic starts from: a reward model or a policy; null: the policy's start."
    )
    head_init: Literal["zero", "reward"] = Field(
        "zero", description="Fresh heads: all 0 (N), or like a reward model's."
    )
    coef: PositiveFloat = Field(0.1, description="Weight of the value loss.")
    clip: Limit = Field(0.2, description="Values move at most so far from those before the step; inf: free.")
    gamma: Fraction = Field(1.0, description="Discount per token.")
    lam: Fraction = Field(0.95, description="GAE's lambda: 1 is the return, 0 one step of bootstrapping.")
    whiten_rewards: bool = Field(
        False,
        description="Token rewards to variance 1, their mean kept, over the batch, or over each minibatch where "
        "loss.whiten_advantages says so (N).",
    )
    score_place: Literal["last", "after_last"] = Field(
        "last", description="The score's token: the last one, or the step after it (TL;DR reproduction, TRL)."
    )
    vtrace: bool = Field(False, description="Correct advantages and values for staleness (IMPALA); off: plain GAE.")
    max_rho: Limit = Field(1.0, description="V-trace's largest importance weight of an error.")
    max_c: Limit = Field(1.0, description="V-trace's largest weight of what is traced back.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The critic's own optimizer.")


class TrainerConfig(Section):
    """One training step: minibatches (one optimizer update each) of microbatches (one forward-backward each)."""

    ranks: Count = Field(
        1, description="Processes of the trainer: data parallel (FSDP2) x tensor parallel, with a group of their own."
    )
    tensor_parallel: Count = Field(1, description="Ranks that share each layer; divides `ranks`.")
    device: Annotated[str, Field(pattern=r"^(cpu|cuda)$")] = Field(
        "cpu", description="What the trainer computes on: 'cpu', or 'cuda', a GPU per rank."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="What it computes in on a GPU; weights and optimizer stay float32 there, too."
    )
    recompute: bool = Field(
        False,
        description="Keep only each layer's input for the backward pass, and run the layer again there: less memory, a "
        "third more work.",
    )
    reduce_once: bool = Field(
        False,
        description="Sum gradients over data-parallel ranks once per update, not per microbatch: less traffic, but each"
        " rank then holds a whole gradient (of its tensor-parallel share).",
    )
    minibatches: Count = Field(1, description="Optimizer updates per pass over the batch (M7, A2's N).")
    epochs: Epochs = Field(1, description="Passes over the batch per step (A4's T).")
    shuffle: bool = Field(False, description="Deal the groups into minibatches anew in every epoch, by the seed (N).")
    microbatch_tokens: Positive = Field(
        8192, description="Tokens of a microbatch (M7, M8); a prompt that completions share counts once."
    )
    logprob_temperature: PositiveFloat | None = Field(
        None,
        description="Temperature of every logprob in training; null: generator.temperature, that of sampling (N). "
        "Another one is for seeing what that is good for: behaviour logprobs are then read again, as recorded ones "
        "are of another distribution, and only max_staleness = 0 has the policy for that.",
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Optimizer and schedule.")
    checkpoint_every: NonNegative = Field(
        50,
        description="Steps between checkpoints of 12 bytes per parameter: what a lost trainer, a full disk or a kill "
        "costs at most. 0 saves at the end and on Ctrl-C only.",
    )
    keep_checkpoints: Positive = Field(2, description="Checkpoints kept on disk.")


class DemonstrationConfig(Section):
    """A kind of demonstration for the warm start: a template over the row's columns and its share."""

    template: str = Field(description="Completion text, e.g. '{answer}' or '{word}'; an EOS token is appended.")
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


class SftConfig(Section):
    """The stage `sft`: supervised fine-tuning whose checkpoint later stages take as 'stage:sft'."""

    path: FilePath | None = Field(
        None, description="Checkpoint it starts from; null: a fresh model as [model] describes."
    )
    dataset: FilePath | None = Field(
        None, description="Dataset of demonstrations; null: the run's training prompts with `demonstrations`."
    )
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
    temperature: PositiveFloat = Field(1.0, description="Sampling temperature.")
    with_reference: bool = Field(False, description="Compare with the prompt's reference completion as well.")
    labels: Literal["gold", "judge"] = Field(
        "gold", description="What says which is better: the scores of [gold], or the [judge] in both orders."
    )
    max_per_prompt: Positive | None = Field(
        None, description="Preferences kept per prompt, drawn by the seed; null keeps all pairs (or fours)."
    )
    held_out: Fraction = Field(0.1, description="Share of prompts whose preferences only measure accuracy.")


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

    function: FilePath | None = Field(
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

    num_prompts: Positive = Field(200, description="Held-out prompts, at most prompts.num_eval.")
    num_samples: Count = Field(1, description="Completions per prompt; several give pass@k.")
    temperature: PositiveFloat | None = Field(
        None, description="Sampling temperature (Asynchronous RLHF: 0.01); null: that of the generator."
    )


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


class ObserveConfig(Section):
    """What is written only for people to look at."""

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
    "failed_rewards",
    "poisoned",
    "starving_trainer",
    "starving_generator",
    "slow_rewards",
    "straggler",
    "version_lag",
    "publish_skipped",
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
            raise ConfigError(
                "no alarm can end a run that watches for none",
                got=f"health.alarms = false with stop_on = {self.stop_on}",
                hint="leave health.alarms on, or stop_on empty",
            )
        return self


TrackerName = Literal["tensorboard", "wandb", "trackio"]


class TrackersConfig(Section):
    """Where metrics go besides metrics.jsonl (`observe/trackers.py`)."""

    names: list[TrackerName] = Field(
        default_factory=list,
        description="Trackers that get every line of metrics.jsonl, every alarm, the configuration and the summary: "
        "tensorboard (RUN/tensorboard), wandb (RUN/wandb and its server), trackio (its database on this machine).",
    )
    project: str = Field("slipstream", description="Project at wandb and trackio.")
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
