"""Sections for what makes and scores completions: schedule, model, prompts, generator, rewards.

A section checks what it asks of itself, by validators, and of the others, where `RunConfig` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from slipstream.core.errors import ConfigError
from slipstream.core.fields import (
    CodePath,
    Count,
    Device,
    FilePath,
    Fraction,
    Interpreter,
    NonNegative,
    NonNegativeFloat,
    Number,
    Positive,
    PositiveFloat,
    Precision,
    Seconds,
    Section,
    Share,
    Temperature,
    check_shared_layers,
)
from slipstream.core.lora_section import LoraConfig

PolicyName = Literal["oldest_first", "drop_stale", "areal", "one_step", "sample_budget", "finish_order"]
"""Scheduling policies (`controller/schedule.py`, `controller/policies.py`)."""
HARD_BOUND: tuple[PolicyName, ...] = ("oldest_first", "drop_stale", "one_step")
"""Policies under which no token is staler than `max_staleness`."""
BY_PLACE: tuple[PolicyName, ...] = ("oldest_first", "one_step")
"""Policies that admit a group by its place in the order of training: within the bound, none beyond the last step."""
BY_VERSION: tuple[PolicyName, ...] = (*HARD_BOUND, "areal")
"""Policies that admit or discard by `max_staleness`, and so need versions that are fresh enough."""


class SchedulingConfig(Section):
    """The order of groups: which start, and which a step trains. Other policies are there to be compared with."""

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

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        """Refuse a policy without its parameter, and a parameter without its policy."""
        for name, policy in (("staleness_threshold", "sample_budget"), ("queue_groups", "finish_order")):
            value = vars(self)[name]
            if (value is not None) != (self.policy == policy):
                got = f"schedule.{name} = {value} with schedule.policy = '{self.policy}'"
                allowed = f"schedule.{name} with schedule.policy = '{policy}', or neither"
                raise ConfigError(f"schedule.{name} belongs to the policy '{policy}'", got=got, allowed=allowed)
        return self


class ModelConfig(Section):
    """The policy: a Hugging Face checkpoint (`path`) or a fresh, randomly initialised model of a `family`."""

    path: FilePath | None = Field(
        None,
        description="Folder of a Hugging Face checkpoint with tokenizer, or its id on the hub: ORG/NAME or "
        "ORG/NAME@REVISION, as every checkpoint may be named (docs/checkpoints.md). Family, sizes and "
        "alphabet are then its own: the fields for a fresh model are not used.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub id `path`; the run saves the commit, behind an @ in `path`."
    )
    family: Literal["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_neox", "gpt2"] = Field(
        "llama", description="Architecture of a fresh model (llama also covers Mistral and SmolLM)."
    )
    hidden_size: Positive = Field(128, description="Width of the residual stream.")
    intermediate_size: Positive = Field(512, description="Width of the MLP.")
    num_experts: Annotated[int, Field(ge=0, le=4096, strict=True)] = Field(
        0,
        description="Experts of each layer's MLP, in the families qwen3_moe and mixtral (docs/experts.md); 0: one MLP.",
    )
    experts_per_token: Count = Field(2, description="Experts that a token goes through; with num_experts.")
    expert_width: Positive | None = Field(None, description="Width of an expert; null: intermediate_size.")
    num_layers: Count = Field(3, description="Decoder layers.")
    num_heads: Count = Field(4, description="Query heads.")
    num_kv_heads: Count = Field(4, description="Key and value heads; divides num_heads.")
    max_positions: Positive = Field(256, description="Longest sequence, prompt and completion together, in tokens.")
    tie_embeddings: bool = Field(True, description="Share the input embedding with the output head.")
    alphabet: str | None = Field(
        None,
        description="Characters of a character tokenizer for a fresh model; null takes printable ASCII and newline. "
        "Prompts, demonstrations and the fixed text of environment.observation that have another one are refused; in "
        "any other text it becomes <unk>.",
    )
    chat_template: str | None = Field(
        None, description="Jinja template of chats; null: the tokenizer's own. Exported models have it."
    )
    lora: LoraConfig = Field(
        default_factory=LoraConfig, description="Adapters of low rank, trained instead of all weights."
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

    def check_template(self) -> None:
        """Raise ConfigError for a chat template of a fresh model, whose tokenizer of characters has none."""
        if self.chat_template is not None:
            what = "model.chat_template is for the tokenizer of a checkpoint"
            raise ConfigError(
                what, got="model.chat_template of a fresh model", allowed="model.path or sft.path with it"
            )

    def check_heads(self) -> None:
        """Raise ConfigError for sizes that a fresh model cannot have; a checkpoint has its own."""
        if self.hidden_size % self.num_heads or self.num_heads % self.num_kv_heads:
            got = f"hidden_size {self.hidden_size}, heads {self.num_heads}, kv heads {self.num_kv_heads}"
            allowed = "hidden_size % num_heads == 0 and num_heads % num_kv_heads == 0"
            raise ConfigError("head sizes do not divide", got=got, allowed=allowed)
        if (self.num_experts > 0) != (self.family in ("qwen3_moe", "mixtral")):
            raise ConfigError(
                "model.num_experts belongs to the families of mixtures of experts, and they to it",
                got=f"model.num_experts = {self.num_experts} with model.family = '{self.family}'",
                allowed="num_experts > 0 with 'qwen3_moe' or 'mixtral', 0 with every other family",
            )
        if self.num_experts and self.experts_per_token > self.num_experts:
            raise ConfigError(
                "a token cannot go through more experts than there are",
                got=f"model.experts_per_token = {self.experts_per_token}",
                allowed=f"1..{self.num_experts} (model.num_experts)",
            )
        if self.family == "mixtral" and self.expert_width not in (None, self.intermediate_size):
            raise ConfigError(
                "experts of the family mixtral are intermediate_size wide",
                got=f"model.expert_width = {self.expert_width}",
                allowed=f"{self.intermediate_size} or null",
            )


class TaskConfig(Section):
    """One reasoning-gym dataset by name and parameters."""

    name: str = Field(description="reasoning-gym dataset, e.g. 'spell_backward'; see `slipstream recipes --tasks`.")
    params: dict[str, Any] = Field(default_factory=dict, description="Parameters of the dataset (not size, not seed).")
    weight: PositiveFloat = Field(1.0, description="Share of prompts drawn from this task, relative to the others.")


class PromptsConfig(Section):
    """The source of questions: reasoning-gym `tasks`, or a `dataset` (JSONL, parquet, folder or hub id)."""

    tasks: list[TaskConfig] = Field(default_factory=list, description="reasoning-gym tasks, mixed by weight.")
    dataset: FilePath | None = Field(
        None, description="Path or hub id of a dataset with columns `prompt` and `answer`."
    )
    dataset_config: str | None = Field(None, description="Configuration of `dataset`, and of no other data set.")
    dataset_split: str = Field("train", description="Split of a Hugging Face dataset to read.")
    streaming: bool = Field(
        False,
        description="Read `dataset` while the run goes on, in its order but for a shuffle buffer: for data that is too "
        "large for memory, or to be read at the start. num_train does not apply, and repeated prompts stay.",
    )
    shuffle_buffer: Positive = Field(2048, description="With streaming: prompts from which the next one is drawn.")
    prompt_column: str = Field(
        "prompt",
        description="Column with a string or a list of chat messages. Templates call it by its name, {question}, "
        "or {prompt} unless another column has that name; no other column may be called question.",
    )
    answer_column: str = Field("answer", description="Column with the reference answer; may be absent from the data.")
    messages_column: str | None = Field(
        None,
        description="Column with whole chats, where there are such: all messages but the last are the prompt, and that "
        "one, the assistant's, is the answer, whatever the columns above say.",
    )
    reference: str = Field(
        "{answer}", description="Reference completion from the row's columns, for preferences, win rates and a bias."
    )
    eval_dataset: FilePath | None = Field(
        None, description="Held-out dataset; null splits it off `dataset` by text hash."
    )
    template: str = Field(
        "{question}",
        description="Prompt text from the row's columns, e.g. \"{question}\\n\" or '{word}>' (metadata are columns "
        "too). {question} is the text of prompt_column, or of a task; literal braces are written {{ and }}.",
    )
    chat: bool = Field(False, description="Wrap the prompt as one user message in the tokenizer's chat template.")
    system: str | None = Field(None, description="System message of chat prompts.")
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Further variables of the chat template, e.g. { enable_thinking = false }, wherever chats are "
        "rendered: prompts, turns of environments and agents, evaluations, stages, and `slipstream serve` of it.",
    )
    between_periods: bool = Field(
        False,
        description="Keep a dataset's prompt from behind its first period to its last, also where it is cut; drop it "
        "without two (N).",
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
    identity: Literal["text", "row"] = Field(
        "text",
        description="What rows share to count as one prompt, which is trained on or held out once: their normalised "
        "text, or all columns, for environments that begin with the same text.",
    )

    @model_validator(mode="after")
    def _check_column(self) -> Self:
        if (self.too_long == "shorten") != (self.shorten_column is not None):
            got = f"too_long = '{self.too_long}', shorten_column = {self.shorten_column!r}"
            allowed = "too_long = 'shorten' with a shorten_column, or neither"
            raise ConfigError("shortening prompts takes the column to shorten", got=got, allowed=allowed)
        return self

    def config_of(self, source: str) -> str | None:
        """Return the configuration to read of the data set `source`."""
        return self.dataset_config if source == self.dataset else None


class VLLMConfig(Section):
    """vLLM as the engine of a generator or a teacher (`engine = "vllm"`), a process in an environment of its own."""

    python: Interpreter = Field(
        ".venv-vllm/bin/python",
        description="Interpreter of vLLM's environment, from the working folder; in a checkout, `make vllm-env` "
        "makes that one.",
    )
    enforce_eager: bool = Field(True, description="Run vLLM without compiling: a faster start, slower decoding.")
    kv_cache_gb: Positive = Field(1, description="Memory of the KV cache on a CPU, in GiB, of each of vLLM's ranks.")
    gpu_memory_utilization: Annotated[Number, Field(gt=0, le=1)] = Field(
        0.5, description="Share of a GPU's memory for vLLM, weights and cache; the trainer may need the rest."
    )
    max_model_len: Positive | None = Field(
        None, description="Longest sequence in vLLM, in tokens; null: the longest prompt and completion, and the probe."
    )
    start_timeout_s: Seconds = Field(300.0, description="Longest start of the process, in seconds.")
    answer_timeout_s: Seconds = Field(
        120.0, description="Longest wait for weights to be loaded, or a probe to be computed, in seconds."
    )
    silence_timeout_s: Seconds = Field(
        60.0, description="Longest time without a token, or a teacher's answer, while any are due, in seconds."
    )
    max_restarts: NonNegative = Field(
        1, description="Processes that may die or fall silent and be replaced, in a run; completions go on behind that."
    )
    engine_args: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="Further arguments of vLLM's AsyncEngineArgs, such as block_size."
    )


PROBE_TOLERANCES: dict[Precision, float] = {"float32": 1e-3, "bfloat16": 0.25, "int8": 0.75, "fp8": 1.5, "mxfp4": 3.5}
"""Nats: one and a half to two and a half times the largest mean error seen on probe texts (`benchmarks/probe.py`)."""


MAX_KEPT = 512
"""Tokens of the largest kept set: four bytes each, for every token sampled."""


class GeneratorConfig(Section):
    """Sampling and the decode engine."""

    replicas: Count = Field(1, description="Generator processes.")
    max_replicas: Count | None = Field(
        None,
        description="With `slipstream launch`: the most generators at a time; those above `replicas` may join while "
        "the run goes on (docs/cluster.md). null: replicas.",
    )
    tensor_parallel: Count = Field(
        1,
        description="Processes of each replica, which share every layer; of a mixture's experts each has whole ones. "
        "With engine = 'vllm' they are vLLM's.",
    )
    pipeline_parallel: Count = Field(
        1,
        description="Stages of each replica, each with a part of the layers and their keys and values; a replica has "
        "`tensor_parallel` times as many processes. Completions are decoded in as many groups, one on each stage: "
        "`num_slots` should be 8 times as many or more.",
    )
    num_slots: Positive | None = Field(
        None,
        description="Completions decoded at once per replica; a multiple of 8. null: 64, or what suits a GPU that the "
        "plan knows (docs/gpu.md).",
    )
    max_new_tokens: Positive = Field(64, description="Longest completion, in tokens; longer ones finish as 'length'.")
    temperature: Temperature = Field(1.0, description="Sampling temperature; the loss uses the same.")
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
    routing_replay: bool = Field(
        False,
        description="Of a mixture of experts: record the experts that the engine chooses for every token, and have the "
        "trainer's forward passes of the policy go through the same ones (docs/experts.md). Without an environment.",
    )
    segment_tokens: Positive | None = Field(
        None, description="Export and resume completions every so many tokens when a newer version waits."
    )
    weight_update_at: Literal["turn", "episode"] = Field(
        "episode",
        description="With [environment] and weight_update = 'between_batches': a version waits for the end of every "
        "episode that has sampled a turn, or of the turns that are being sampled alone: then turns of one episode may "
        "have several versions.",
    )
    stop_at_eos: bool = Field(
        True,
        description="End completions at EOS: the tokenizer's, and each eos_token_id of the model's "
        "generation_config.json, or config.json, that is no ordinary token. false samples max_new_tokens always (N).",
    )
    kv_on_update: Literal["keep", "recompute", "recompute_if_older_than"] = Field(
        "keep",
        description="What an in-flight swap does with the KV cache: keep it (Magistral), rebuild it, or rebuild only "
        "what holds keys older than max_kv_age versions.",
    )
    max_kv_age: NonNegative = Field(0, description="Versions a key may lag behind with 'recompute_if_older_than'.")
    prefill_tokens: Positive | None = Field(
        None,
        description="Prompt tokens prefilled beside one decode step at most. null: 512, or what suits a GPU that the "
        "plan knows.",
    )
    prefill_chunk: Positive = Field(
        512,
        description="Longer prompts are prefilled in pieces of so many tokens, one a step, whatever prefill_tokens is.",
    )
    sessions: Positive | None = Field(
        None,
        description="With [environment]: episodes that a replica has open at a time, live ones and those whose "
        "environment thinks. null: twice num_slots.",
    )
    parked_tokens: NonNegative | None = Field(
        None,
        description="With [environment]: tokens whose keys and values stay while an environment thinks; of more, those "
        "idle for longest are made again. null: those of all sessions, as far as a GPU's memory has room.",
    )
    prefix_cache_tokens: NonNegative = Field(
        2048, description="Tokens of finished prompts kept for later completions of the same prompt and version."
    )
    time_limit_s: Seconds | None = Field(
        None, description="A completion that takes longer, from its start in seconds, ends with reason 'deadline'."
    )
    stop_token_ids: list[NonNegative] = Field(
        default_factory=list, description="Stop tokens besides those of stop_at_eos."
    )
    seeds: Literal["shared", "per_replica"] = Field(
        "shared",
        description="Noise of training samples by the run's seed alone: a completion is the same on any replica. Or by "
        "seed + replica * 100003 (N): who samples it decides the text. Evaluation is always shared.",
    )
    precision: Precision = Field(
        "float32",
        description="Weights of the generators, quantised where the trainer publishes them: bfloat16 halves the bytes "
        "of a version, int8 (per output channel, CPU only) and fp8 (per row, NVIDIA Hopper) quarter them, mxfp4 (4 bits"
        ", a scale per 32 weights, CPU only) stores matrices in 0.53 bytes per weight (docs/generator.md).",
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
        description="What the native engine computes on: 'cpu', 'cuda' (replicas on the GPUs in turn, behind the "
        "trainer's where there are enough) or 'cuda:N' (all on one). Where the trainer computes on CUDA too, versions "
        "stay on GPUs (docs/weight_sync.md).",
    )
    kv_cache_gb: PositiveFloat | None = Field(
        None,
        description="Memory for keys and values on a GPU, in GiB per engine; an evaluation is a second one. null: what "
        "all slots can fill, if 85% of the GPU (divided by its replicas) or of gpu_share have room for that beside the "
        "weights.",
    )
    gpu_share: Share | None = Field(
        None,
        description="Largest share of a GPU's memory that each rank of a replica takes, keys and values included. "
        "null: all of it, in equal parts where several replicas of a run on one machine share it; where the trainer "
        "computes there too, what the plan says (docs/gpu.md). Replicas that join a run from elsewhere need a number "
        "where they share a GPU (docs/cluster.md).",
    )
    engine: Literal["native", "vllm"] = Field(
        "native", description="What decodes: Slipstream's own engine, or vLLM beside it (docs/vllm.md)."
    )
    vllm: VLLMConfig = Field(default_factory=VLLMConfig, description="vLLM, with engine = 'vllm'.")

    @property
    def ranks(self) -> int:
        """The processes of a replica, without those of a vLLM: there one process drives them all."""
        return 1 if self.engine == "vllm" else self.pipeline_parallel * self.tensor_parallel

    @property
    def rows(self) -> int:
        """Return `num_slots`, or what it is where nothing was chosen."""
        return 64 if self.num_slots is None else self.num_slots

    @property
    def prefilled(self) -> int:
        """Return `prefill_tokens`, or what it is where nothing was chosen."""
        return 512 if self.prefill_tokens is None else self.prefill_tokens

    @property
    def most_replicas(self) -> int:
        """The most replicas at a time."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.most_replicas < self.replicas:
            got = f"generator.max_replicas = {self.max_replicas} with generator.replicas = {self.replicas}"
            raise ConfigError("a run starts with more generators than it may have", got=got, allowed="replicas or more")
        if self.routing_replay and self.pipeline_parallel > 1:
            raise ConfigError(
                "each stage of a replica knows the experts of its own layers alone",
                got=f"generator.routing_replay with generator.pipeline_parallel = {self.pipeline_parallel}",
                allowed="generator.pipeline_parallel = 1, or generator.routing_replay = false",
                hint="generator.tensor_parallel divides a model, too",
            )
        if self.rows % 8:
            raise ConfigError(
                "num_slots must keep decode batches bit-reproducible", got=self.num_slots, allowed="multiples of 8"
            )
        if self.kv_cache_gb is not None and self.device == "cpu":
            raise ConfigError(
                "on a CPU every slot has room for the longest prompt and completion: there is nothing to bound",
                got=f"generator.kv_cache_gb = {self.kv_cache_gb:g} with generator.device = 'cpu'",
                allowed="generator.kv_cache_gb with generator.device = 'cuda'",
                hint="generator.vllm.kv_cache_gb"
                if self.engine == "vllm"
                else "lower generator.num_slots, generator.max_new_tokens or prompts.max_prompt_tokens",
            )
        if self.gpu_share is not None and self.device == "cpu":
            what = "a CPU has its memory to itself" if self.engine == "native" else "vLLM takes its own share"
            got = f"generator.gpu_share = {self.gpu_share:g} with generator.device = 'cpu'"
            hint = None if self.engine == "native" else "generator.vllm.kv_cache_gb"
            raise ConfigError(what, got=got, allowed="generator.device = 'cuda'", hint=hint)
        if self.keep_sets and not 1 <= self.top_k <= MAX_KEPT:
            raise ConfigError(
                "kept sets need a bound on their size",
                got=f"generator.keep_sets with generator.top_k = {self.top_k}",
                allowed=f"generator.top_k = 1..{MAX_KEPT}",
                hint="top_p and min_p cut further within top_k",
            )
        return self

    @property
    def max_probe_error(self) -> float:
        """Return `probe_tolerance`, or what suits the precision, in nats."""
        return PROBE_TOLERANCES[self.precision] if self.probe_tolerance is None else self.probe_tolerance

    @property
    def truncates(self) -> bool:
        """Whether training samples come from a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


MAX_GROUP_SCORES = 4096
"""Rewards that terms with per = 'group' give a group, all together: a worker's answer has at most 512 KiB."""
FROM_JUDGE = "judge:"
"""Prefix of the function of a term that stands for one of `rewards.judges`: its name follows."""


class RewardTerm(Section):
    """One reward function of the weighted sum."""

    function: CodePath = Field(
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
    network: bool = Field(
        False,
        description="Let your own function open sockets: it runs in workers of its own, rewards.num_workers more, "
        "whose other barriers hold. The workers of all other terms stay without network.",
    )


_RESERVED = frozenset({"model", "messages", "stream", "n", "temperature", "max_tokens"})  # not for `JudgeTerm.params`


class JudgeTerm(Section):
    """One model behind an OpenAI-compatible endpoint that scores every completion, a term of the weighted sum."""

    name: str = Field("judge", description="Name of its part of the reward, in metrics and rollouts.")
    base_url: str = Field(description="Address of the endpoint, e.g. 'http://localhost:8000/v1'.")
    model: str = Field(description="Name of the model behind it.")
    api_key_env: str | None = Field(None, description="Environment variable with the key; null sends none.")
    prompt: str | None = Field(
        None,
        description="Template of the question, with {completion} or {messages} (all turns), and {prompt}, {answer} and "
        "columns of the row. Each comes between marks; other braces stay as they are. null: a general question, with "
        "{prompt} and {completion}, that asks for a last line 'Score: N'.",
    )
    prompt_file: FilePath | None = Field(None, description="File with the template, in place of `prompt`.")
    pattern: str | None = Field(
        None,
        description="Regular expression whose first group is the score; the last match in the reply counts. null: a "
        "line 'Score: N'.",
    )
    json_field: str | None = Field(
        None, description="Field with the score, of a JSON object in the reply, in place of `pattern`."
    )
    score_min: Number = Field(1.0, description="Score whose reward is 0. A lower score is no score.")
    score_max: Number = Field(10.0, description="Score whose reward is 1. A higher score is no score.")
    on_failure: Literal["fail", "abstain"] = Field(
        "fail",
        description="What no score means (no answer before the deadline, a refusal, a reply without a score in range, "
        "a row without a column of the template): 'fail': the completion has failed, 'abstain': the term is left out.",
    )
    weight: Number = Field(1.0, description="Factor of this term in the sum.")
    at_least: Number | None = Field(
        None, description="Makes the term a constraint: below this, the reward is at most rewards.violation_cap (CGPO)."
    )
    temperature: NonNegativeFloat = Field(0.0, description="Sampling temperature of the judge.")
    max_tokens: Positive = Field(512, description="Most tokens of a reply.")
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="Other fields of each request, e.g. top_p. With max_completion_tokens, max_tokens is not sent.",
    )
    max_concurrent: Count = Field(32, description="Completions asked about at once.")
    timeout_s: Seconds = Field(
        120.0, description="Limit of all attempts for one completion, in seconds from the first; then it has no score."
    )
    attempt_s: Seconds = Field(60.0, description="Limit of one attempt, in seconds; then there is another.")
    cached_scores: NonNegative = Field(
        100_000,
        description="Scores kept in the run's folder, the newest: what was asked before, also before a resume, is not "
        "asked again. 0: none.",
    )
    input_price: NonNegativeFloat = Field(0.0, description="Price of a million tokens read, in a currency of yours.")
    output_price: NonNegativeFloat = Field(0.0, description="Price of a million tokens of replies.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.score_min >= self.score_max:
            raise ConfigError(
                f"judge '{self.name}': score_min must be below score_max", got=f"{self.score_min:g}, {self.score_max:g}"
            )
        if taken := sorted(_RESERVED & self.params.keys()):
            what = f"judge '{self.name}': params may not hold these"
            raise ConfigError(what, got=", ".join(taken), hint="they are fields, or fixed")
        for one, other in (("prompt", "prompt_file"), ("pattern", "json_field")):
            if None not in (getattr(self, one), getattr(self, other)):
                raise ConfigError(f"judge '{self.name}' has {one} and {other}", allowed="one of them")
        return self


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
    """Scoring of completions: by functions in sandboxed workers, by reward models in an executor of their own."""

    terms: list[RewardTerm] = Field(
        default_factory=lambda: [RewardTerm(function="task")],
        description="Weighted sum of these; a term of weight 0 is measured only. With environment.class or choices the "
        "default is none: the environment's own reward.",
    )
    models: list[RewardModelTerm] = Field(
        default_factory=list, description="Reward models added to the sum. Without terms no worker is started."
    )
    judges: list[JudgeTerm] = Field(
        default_factory=list,
        description="Models behind endpoints added to the sum. They are asked by the process of rewards, outside of "
        "the workers.",
    )
    model_batch_size: Count = Field(64, description="Completions that reward models score at once, at most.")
    model_ranks: Count = Field(
        1,
        description="Processes of the reward models' executor. They hold copies of all the models, each as many ranks "
        "as model_tensor_parallel and models_sharded say; completions are dealt to the copies one by one.",
    )
    model_tensor_parallel: Count = Field(
        1, description="Ranks of that executor that share each layer; divides `model_ranks`."
    )
    models_sharded: bool = Field(
        False,
        description="Cut one copy of the models over all ranks of that executor (FSDP2 over the data-parallel ones), "
        "where they are too large for model_tensor_parallel ranks: each layer is gathered when it runs. false: "
        "model_tensor_parallel ranks hold a copy.",
    )
    device: Device = Field("cpu", description="What reward models compute on: 'cpu', or 'cuda', a GPU per process.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="What reward models are kept and computed in on a GPU; their heads stay float32."
    )
    num_workers: Count = Field(1, description="Sandboxed worker processes.")
    timeout_s: Seconds = Field(
        5.0,
        description="Limit of one scoring call in seconds, of a completion or a group; then the worker is killed.",
    )
    num_threads: Count = Field(
        4,
        description="Calls at once of Python functions that were given to `slipstream.run`, each in a thread; 1 for "
        "functions that are not safe in several threads.",
    )
    max_awaited: Count = Field(
        64, description="Calls at once of such functions that are `async def`, on one event loop; 1: one by one."
    )
    dry_call: bool = Field(
        True,
        description="Before a run starts, call your own functions, 'code' and 'overlap' on two of its prompts with "
        "made-up completions, and each judge on one, and refuse what fails. false: for what should not be called in "
        "vain.",
    )
    allow_network: bool = Field(
        False,
        description="Let all workers open sockets, as if every term had `network`. Not for verifiers that evaluate "
        "model text.",
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
    def _check_ranks(self) -> Self:
        check_shared_layers(
            "rewards", "model_ranks", self.model_ranks, "model_tensor_parallel", self.model_tensor_parallel
        )
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        wrong = next((name for name in self.environment if not name or "=" in name or "\0" in name), None)
        if wrong is not None:
            raise ConfigError("no environment variable has such a name", got=f"rewards.environment: {wrong!r}")
        names = self.part_names
        repeated = next((name for name in names[len(self.terms) :] if names.count(name) > 1), None)
        if repeated is not None:
            what = "reward models and judges need names of their own"
            hint = "set name in rewards.models and rewards.judges: metrics and rollouts show each part under it"
            raise ConfigError(what, got=f"'{repeated}' more than once", hint=hint)
        return self

    @property
    def asked(self) -> list[RewardTerm]:
        """Return the terms that the process of rewards has scored, in the order of their parts: functions, judges."""
        judges = (
            RewardTerm(function=FROM_JUDGE + judge.name, weight=judge.weight, at_least=judge.at_least)
            for judge in self.judges
        )
        return [*self.terms, *judges]

    def has_own_network(self, term: RewardTerm) -> bool:
        """Tell whether workers of its own run `term`, as those of other terms have no network."""
        return term.network and not self.allow_network

    @property
    def all_workers(self) -> int:
        """Return the number of workers: `num_workers` without network, and with it, where there are terms for them."""
        return self.num_workers * max(1, len({self.has_own_network(term) for term in self.terms}))

    @property
    def weighted(self) -> list[RewardTerm | RewardModelTerm]:
        """Return all terms of the sum in the order of their parts: functions, judges, models."""
        return [*self.asked, *self.models]

    @property
    def part_names(self) -> list[str]:
        """Return the names of their parts, each another one."""
        functions = names_of([term.function for term in self.terms])
        return [*functions, *(judge.name for judge in self.judges), *(model.name for model in self.models)]

    def check_sum(self, section: str) -> None:
        """Raise ConfigError for constraints alone in [`section`]: without another term there is no sum."""
        if self.weighted and all(term.at_least is not None for term in self.weighted):
            got = f"{section}.terms and {section}.models that all have at_least"
            raise ConfigError("constraints alone are no reward", got=got, allowed="one term without it")

    def check_terms(self, samples_per_group: int) -> None:
        """Raise ConfigError for terms that give more rewards than a worker's answer can have."""
        num_scores = samples_per_group * sum(term.per == "group" for term in self.terms)
        if num_scores > MAX_GROUP_SCORES:
            raise ConfigError(
                "a worker's answer for a group is too large",
                got=f"{num_scores:,} rewards of completions_per_group and the terms with per = 'group'",
                allowed=f"at most {MAX_GROUP_SCORES:,}",
                hint="rewards.terms[].per = 'completion' has no such limit",
            )


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
