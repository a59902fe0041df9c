"""Sections for the training step: loss, KL penalty, optimizer, critic, trainer; and what they ask of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from slipstream.core.errors import ConfigError
from slipstream.core.fields import (
    CodeName,
    Count,
    DecayRate,
    Device,
    Epochs,
    FilePath,
    Fraction,
    Limit,
    NonNegative,
    NonNegativeFloat,
    Number,
    Positive,
    PositiveFloat,
    Section,
    Share,
    Steps,
    check_shared_layers,
)
from slipstream.core.teacher_section import DISTILL

if TYPE_CHECKING:
    from slipstream.core.config import RunConfig

Advantages = Literal["group_mean", "group_normalised", "leave_one_out", "optimal", "greedy_baseline", "gae", "reward"]
GROUP_RELATIVE: tuple[Advantages, ...] = (
    "group_mean",
    "group_normalised",
    "leave_one_out",
    "optimal",
    "greedy_baseline",
)
"""Estimators that give every rollout of a group of equal rewards an advantage of 0."""
MIN_WHITENED = 8
"""Completions of a part that is whitened alone: the original RLHF code's least (N, item 29)."""


class LossConfig(Section):
    """The policy loss, its advantages, and which completions of a group are trained on."""

    name: CodeName = Field(
        "aipo", description="Key of `algorithms.losses.LOSSES`, of kind 'policy'; or 'file.py:name' of a Loss."
    )
    params: dict[str, Annotated[float, Field(allow_inf_nan=True)] | str] = Field(
        default_factory=dict, description="The loss's own constants, e.g. max_ratio = 4."
    )
    reduction: Literal["token", "sequence", "constant"] = Field(
        "token",
        description="Token losses divide by tokens (DAPO), average sequence means (GRPO), or divide by "
        "sequences x max_new_tokens (Dr. GRPO); with an environment x its max_episode_tokens, or max_turns x "
        "max_new_tokens.",
    )
    advantages: Advantages = Field(
        "group_normalised",
        description="r - mean, (r - mean) / (std + std_eps), r - mean of the others, r - optimal_beta log mean exp(r / "
        "optimal_beta), or r - reward of the greedy completion (ReMax: one more is sampled), over the group; from a "
        "critic; or the reward itself.",
    )
    baseline: Literal["mean", "min_variance"] = Field(
        "mean",
        description="What group_mean and group_normalised take off a reward: the group's mean, or its mean weighted by "
        "the squared norms of its completions' gradients (VCPO). That takes a backward pass for each completion, one "
        "after the other over all ranks, and two more gradients of memory.",
    )
    credit: Literal["episode", "turn"] = Field(
        "episode",
        description="Reward that an episode's turn is judged by: the whole one, or what it brings from this turn on, "
        "compared with the same turn of the group's other episodes. For environments that reward single turns.",
    )
    std_eps: PositiveFloat = Field(0.1, description="Added to the group's standard deviation.")
    optimal_beta: PositiveFloat = Field(
        1.0,
        description="Temperature of advantages = 'optimal', in units of reward (OAPL's beta_1); near 0: r - the best.",
    )
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
        description="Completions of a group that are trained on; pairs need best_and_worst, best_of_n needs best.",
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

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if self.several_rewards == "normalise_then_sum" and self.advantages != "group_normalised":
            what = "normalised rewards are summed to advantages, which leaves nothing to another estimator"
            got = f"several_rewards = 'normalise_then_sum' with advantages = '{self.advantages}'"
            raise ConfigError(what, got=got, allowed="advantages = 'group_normalised'")
        if self.truncated == "subtract" and self.truncation_reward >= 0:
            got = f"loss.truncated = 'subtract' with truncation_reward = {self.truncation_reward:g}"
            allowed = "truncation_reward < 0, which is added to its reward"
            raise ConfigError("a truncated completion is to lose by it", got=got, allowed=allowed)
        return self


class KLConfig(Section):
    """The penalty for leaving the reference policy, which is kept beside the trainer or in an executor of its own."""

    coef: NonNegativeFloat = Field(
        0.0,
        description="Weight of the KL divergence, per nat; 0: no penalty, and no reference is kept unless the loss "
        "reads one (online_dpo, online_ipo).",
    )
    place: Literal["reward", "loss"] = Field(
        "reward",
        description="Taken off the reward (PPO, RLOO: behaviour policy against reference) or added to the loss.",
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k1", description="Per token: log ratio, half its square, or GRPO's unbiased and positive one."
    )
    corrected: bool = Field(
        False,
        description="In the loss: multiply by the ratio of policy to sampler, so that the gradient is that of the KL "
        "divergence itself (DeepSeek-V3.2; TRL's default).",
    )
    reference: FilePath | None = Field(
        None, description="Folder or hub id of the reference's checkpoint; null: policy version 0."
    )
    sync_every: Steps | None = Field(
        None, description="Steps after which the reference moves towards the policy, again and again; null: it stays."
    )
    mixup: Share = Field(0.6, description="The share of the way that it moves then: 1 makes it the policy.")
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
        1,
        description="Processes of an own executor. They hold copies of the reference, each as many ranks as "
        "tensor_parallel and sharded say; completions are dealt to the copies one by one.",
    )
    tensor_parallel: Count = Field(1, description="Ranks of an own executor that share each layer; divides `ranks`.")
    sharded: bool = Field(
        False,
        description="Cut one copy over all ranks of an own executor (FSDP2 over the data-parallel ones), for a "
        "reference too large for tensor_parallel ranks: each layer is gathered when it runs. false: tensor_parallel "
        "ranks hold a copy.",
    )
    device: Device = Field("cpu", description="What an own executor computes on: 'cpu', or 'cuda', a GPU per process.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="What an own executor keeps and computes the reference in on a GPU."
    )

    @model_validator(mode="after")
    def _check_executor(self) -> Self:
        own = {name: vars(self)[name] for name in ("ranks", "tensor_parallel", "sharded", "device", "precision")}
        changed = [name for name, value in own.items() if value != type(self).model_fields[name].default]
        check_shared_layers("kl", "ranks", self.ranks, "tensor_parallel", self.tensor_parallel)
        if self.executor == "trainer" and changed:
            raise ConfigError(
                "the trainer computes reference logprobs as it trains: on its ranks, its device, in its precision",
                got=", ".join(f"kl.{name} = {own[name]!r}" for name in changed) + " with kl.executor = 'trainer'",
                allowed="kl.executor = 'own'",
            )
        return self

    @model_validator(mode="after")
    def _check_following(self) -> Self:
        if self.sync_every is not None and self.executor == "own":
            what = "a reference that follows the policy does so between two steps, in the trainer"
            got = f"kl.sync_every = {self.sync_every} with kl.executor = 'own'"
            raise ConfigError(what, got=got, allowed="kl.executor = 'trainer'")
        return self

    @model_validator(mode="after")
    def _check_penalty(self) -> Self:
        if self.place == "loss" and self.estimator == "k1" and self.coef:
            raise ConfigError(
                "the gradient of k1 in the loss is zero on average: it penalises nothing",
                got="kl.place = 'loss' with kl.estimator = 'k1'",
                allowed="k2 or k3 in the loss, any in the reward",
                hint="set kl.estimator = 'k3' (GRPO)",
            )
        if self.corrected and self.place == "reward":
            what = "a penalty in the reward has no gradient that a ratio could correct"
            got = "kl.corrected = true with kl.place = 'reward'"
            raise ConfigError(what, got=got, allowed="kl.place = 'loss', with k2 or k3")
        if self.target is not None and not self.coef:
            raise ConfigError("an adaptive KL coefficient needs a start", got="kl.coef = 0", hint="N starts at 0.15")
        return self


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: PositiveFloat = Field(1e-4, description="Peak learning rate.")
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.999), description="Adam's decay rates.")
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
    executor: Literal["trainer", "own"] = Field(
        "trainer",
        description="Where a model of its own is trained: on the trainer's ranks, in turn with the policy, or in "
        "processes of the critic's own, at the same time as the policy; values and updates are the same.",
    )
    ranks: Count = Field(
        1,
        description="Processes of an own executor, which divide one critic as the trainer's ranks do the policy: "
        "tensor_parallel of them share each layer, FSDP2 cuts the rest.",
    )
    tensor_parallel: Count = Field(1, description="Ranks of an own executor that share each layer; divides `ranks`.")
    device: Device = Field(
        "cpu",
        description="What an own executor computes on: 'cpu', or 'cuda', a GPU per rank. Precision, recomputation and "
        "offloading are the trainer's.",
    )
    gpu_share: Share | None = Field(
        None,
        description="Largest share of a GPU's memory that each rank of an own executor takes. null: all of it; where "
        "trainer and generator compute there too, what the plan says (docs/gpu.md).",
    )

    @model_validator(mode="after")
    def _check_executor(self) -> Self:
        own = {name: vars(self)[name] for name in ("ranks", "tensor_parallel", "device", "gpu_share")}
        changed = [name for name, value in own.items() if value != type(self).model_fields[name].default]
        check_shared_layers("critic", "ranks", self.ranks, "tensor_parallel", self.tensor_parallel)
        if self.executor == "trainer" and changed:
            raise ConfigError(
                "the trainer trains the critic on its own ranks and device, divided as the policy is",
                got=", ".join(f"critic.{name} = {own[name]!r}" for name in changed)
                + " with critic.executor = 'trainer'",
                allowed="critic.executor = 'own'",
            )
        if self.executor == "own" and self.model == "head":
            what = "a head reads the policy's states, which are in the trainer"
            got = "critic.executor = 'own' with critic.model = 'head'"
            raise ConfigError(what, got=got, allowed="critic.model = 'own'")
        if self.device == "cpu" and self.gpu_share is not None:
            got = f"critic.gpu_share = {self.gpu_share:g} with critic.device = 'cpu'"
            raise ConfigError("a CPU has its memory to itself", got=got, allowed="critic.device = 'cuda'")
        return self


class TrainerConfig(Section):
    """One training step: minibatches (one optimizer update each) of microbatches (one forward-backward each)."""

    ranks: Count = Field(
        1,
        description="Processes of the trainer: data parallel (FSDP2) x pipeline parallel x context parallel x tensor "
        "parallel, with a group of their own.",
    )
    tensor_parallel: Count = Field(
        1, description="Ranks that share each layer, of a mixture's experts whole ones; divides `ranks`."
    )
    context_parallel: Count = Field(
        1,
        description="Ranks that read each microbatch together, each some of its rows: a sequence may be so many times "
        "longer in the same memory, for a gather of keys and values in every layer. Its product with `tensor_parallel`"
        " divides `ranks`. Not with stages.",
    )
    expert_parallel: Count = Field(
        1,
        description="Data-parallel ranks that divide a mixture's experts: each has so many times fewer, and tokens go "
        "to theirs and back by all-to-all, where else every rank gathers all experts of a layer. Divides the number of "
        "data-parallel ranks; times `tensor_parallel`, which divides experts too, it divides that of experts.",
    )
    pipeline_parallel: Count = Field(
        1,
        description="Stages, each with a part of the layers, that microbatches pass one after the other; times "
        "`tensor_parallel` it divides `ranks`. A stage idles (stages - 1) / (microbatches + stages - 1) of an update.",
    )
    pipeline_chunks: Count = Field(
        1,
        description="Ranges of layers in each stage. 1: the schedule 1F1B. More: interleaved 1F1B, which idles as many "
        "times less, and passes activations between stages as many times more often.",
    )
    device: Device = Field("cpu", description="What the trainer computes on: 'cpu', or 'cuda', a GPU per rank.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="What it computes in on a GPU; weights and optimizer stay float32 there, too."
    )
    gpu_share: Share | None = Field(
        None,
        description="Largest share of a GPU's memory that each rank takes, beside others on the same GPU. null: all of "
        "it; where a generator computes there too, what the plan says (docs/gpu.md).",
    )
    offload_moments: bool = Field(
        False,
        description="Keep AdamW's moments in pinned host memory, and bring those of one tensor after the other to the "
        "GPU for an update: 8 bytes a parameter less there, for two ways over the bus per update.",
    )
    recompute: bool = Field(
        False,
        description="Keep only each layer's input for the backward pass, and run the layer again there: less memory, a "
        "third more work.",
    )
    recompute_products: bool = Field(
        True,
        description="With recompute, also what products and attention gave is computed again; false keeps it: some "
        "more memory, and hardly more work than without recompute.",
    )
    compile: bool = Field(
        False,
        description="Let torch.compile fuse what is before and behind attention in each layer: the first steps take "
        "a minute longer. On one rank, without adapters.",
    )
    compute_copy: bool = Field(
        True,
        description="On one GPU in bfloat16, keep the weights in bfloat16, too: the optimizer refreshes them, and "
        "versions are read from them. 2 bytes a parameter; false casts each layer whenever it runs (FSDP2), as is done "
        "beside adapters.",
    )
    publish_in_place: bool = Field(
        True,
        description="At max_staleness = 0, where trainer and generators are on GPUs and both in bfloat16, let "
        "generators read versions from the trainer's compute_copy; false copies each to a slot first, and takes 4 "
        "bytes a parameter more.",
    )
    varlen: bool = Field(
        True,
        description="On a GPU in bfloat16, attend to all sequences of a microbatch in one call of torch's varlen_attn, "
        "each row once, where a small example comes out right; otherwise, and with false, they are padded.",
    )
    reduce_once: bool = Field(
        False,
        description="Sum gradients over data-parallel ranks once per update, not per microbatch: less traffic, but each"
        " rank then holds a whole gradient (of its tensor-parallel share).",
    )
    minibatches: Count = Field(1, description="Optimizer updates per pass over the batch (N of Asynchronous RLHF).")
    epochs: Epochs = Field(1, description="Passes over the batch per step (T of Asynchronous RLHF).")
    shuffle: bool = Field(False, description="Deal the groups into minibatches anew in every epoch, by the seed (N).")
    microbatch_tokens: Positive = Field(
        8192, description="Tokens of a microbatch; what completions of a prompt begin with alike counts once."
    )
    logprob_temperature: PositiveFloat | None = Field(
        None,
        description="Temperature of every logprob in training; null: generator.temperature, that of sampling (N). "
        "Another one is for seeing what that is good for: behaviour logprobs are then read again, as recorded ones "
        "are of another distribution, and only max_staleness = 0 has the policy for that.",
    )
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="Optimizer and schedule.")
    ess_scaling: Literal["no", "sqrt", "linear"] = Field(
        "no",
        description="Make an update smaller the fewer completions its importance ratios leave in effect: learning rate "
        "times the root of min(1, ess / ess_base), or times it (VCPO). `ess` is the share of effective completions.",
    )
    ess_base: PositiveFloat = Field(
        1.0, description="Share of effective completions from which on the learning rate is whole (VCPO: 1, or 0.55)."
    )
    checkpoint_every: NonNegative = Field(
        50,
        description="Steps between checkpoints of 12 bytes per parameter: what a lost trainer, a full disk or a kill "
        "costs at most. 0 saves only when the run ends or is told to: its last step, an early end, a signal, a "
        "callback that fails.",
    )
    keep_checkpoints: Positive = Field(2, description="Checkpoints kept on disk.")

    @property
    def peers(self) -> int:
        """The number of ranks that train on the same rollouts: stages, context- and tensor-parallel ranks."""
        return self.pipeline_parallel * self.context_parallel * self.tensor_parallel

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.ranks % self.peers:
            sizes = ("tensor_parallel", "context_parallel", "pipeline_parallel")
            fields = {f"trainer.{name}": vars(self)[name] for name in sizes}
            got = ", ".join(f"{name} = {size}" for name, size in [("trainer.ranks", self.ranks), *fields.items()])
            allowed = f"trainer.ranks: a multiple of {' x '.join(fields)}"
            raise ConfigError(
                "the trainer's ranks do not divide into those of one model each", got=got, allowed=allowed
            )
        if self.pipeline_parallel > 1 and self.context_parallel > 1:
            got = f"trainer.pipeline_parallel = {self.pipeline_parallel}"
            got += f" with trainer.context_parallel = {self.context_parallel}"
            what = "ranks that read a microbatch together are not divided into pipeline stages"
            raise ConfigError(what, got=got, allowed="one of the two above 1")
        self._check_experts()
        if self.pipeline_chunks > 1 and self.pipeline_parallel == 1:
            got = f"trainer.pipeline_chunks = {self.pipeline_chunks} with trainer.pipeline_parallel = 1"
            allowed = "trainer.pipeline_parallel above 1, or trainer.pipeline_chunks = 1"
            raise ConfigError("chunks are ranges of a pipeline stage's layers", got=got, allowed=allowed)
        if self.device == "cpu" and (self.gpu_share is not None or self.offload_moments):
            field = "gpu_share" if self.gpu_share is not None else "offload_moments"
            what = "a CPU has its memory to itself, and moments lie there"
            got = f"trainer.{field} with trainer.device = 'cpu'"
            raise ConfigError(what, got=got, allowed="trainer.device = 'cuda'")
        if not (self.recompute or self.recompute_products):
            what = "nothing is computed again, so that there is nothing to keep"
            got = "trainer.recompute_products = false with trainer.recompute = false"
            raise ConfigError(what, got=got, allowed="trainer.recompute = true")
        if self.compile and (self.ranks > 1 or not self.recompute_products):
            what = "torch.compile is for the layers of one rank, which keep everything or nothing"
            got = f"trainer.compile with trainer.ranks = {self.ranks}, recompute_products = {self.recompute_products}"
            raise ConfigError(what, got=got, allowed="trainer.ranks = 1, trainer.recompute_products = true")
        return self

    def _check_experts(self) -> None:
        """Raise ConfigError where the data-parallel ranks do not divide experts."""
        if self.expert_parallel == 1:
            return
        got = f"trainer.expert_parallel = {self.expert_parallel}"
        between = {"context_parallel": self.context_parallel, "pipeline_parallel": self.pipeline_parallel}
        beside = [f"trainer.{name} = {size}" for name, size in between.items() if size > 1]
        if beside:
            what = "experts are divided over data-parallel ranks that have a microbatch and all layers each"
            raise ConfigError(what, got=f"{got} with {beside[0]}", allowed=beside[0].split(" = ")[0] + " = 1")
        data = self.ranks // self.tensor_parallel
        if data % self.expert_parallel:
            raise ConfigError(
                "those that divide experts are some of the data-parallel ranks, as many in each set",
                got=f"{got} with {data} data-parallel ranks "
                f"(trainer.ranks = {self.ranks}, trainer.tensor_parallel = {self.tensor_parallel})",
                allowed=", ".join(str(n) for n in range(1, data + 1) if data % n == 0),
            )


def check_training(config: RunConfig) -> None:
    """Raise ConfigError for a loss, advantages or a KL penalty that cannot go with the other sections."""
    _check_batch(config)
    _check_advantages(config)
    _check_credit(config)
    _check_sum(config)
    _check_horizon(config)
    _check_ends(config)
    _check_whitening(config)
    _check_stages(config)
    _check_own_critic(config)


def _check_own_critic(config: RunConfig) -> None:
    """Raise ConfigError for a critic's executor where there is no critic, or no process for it, or another device's
    precision."""
    critic, trainer = config.critic, config.trainer
    if critic.executor == "trainer":
        return
    if not config.has_critic:
        got = f"critic.executor = 'own' with loss.advantages = '{config.loss.advantages}'"
        raise ConfigError("there is no critic to have an executor", got=got, allowed="loss.advantages = 'gae'")
    if config.host == "inline":
        raise ConfigError(
            "a critic of its own executor trains while the trainer does, which takes two processes",
            got="critic.executor = 'own' with host = 'inline'",
            allowed="host = 'process', or critic.executor = 'trainer'",
        )
    for field, is_of_gpu in (
        ("precision", trainer.precision != "float32"),
        ("offload_moments", trainer.offload_moments),
    ):
        if is_of_gpu and critic.device == "cpu":
            raise ConfigError(
                f"trainer.{field} is the critic's, too, and is for GPUs",
                got=f"trainer.{field} = {vars(trainer)[field]!r} with critic.device = 'cpu'",
                allowed="critic.device = 'cuda', or critic.executor = 'trainer'",
            )


def _check_stages(config: RunConfig) -> None:
    """Raise ConfigError for what a trainer in pipeline stages cannot do yet (docs/cluster.md)."""
    if config.trainer.pipeline_parallel == 1:
        return
    loss = config.loss
    for what, field, is_refused in (
        ("adapters (model.lora)", "model.lora", config.model.lora.is_set),
        ("a critic", f"loss.advantages = '{loss.advantages}'", config.has_critic),
        ("a teacher", "teacher.path", config.has_teacher),
        ("a baseline of each completion's gradient", f"loss.baseline = '{loss.baseline}'", loss.baseline != "mean"),
    ):
        if is_refused:
            raise ConfigError(
                f"pipeline stages do not go together with {what} yet",
                got=f"{field} with trainer.pipeline_parallel = {config.trainer.pipeline_parallel}",
                allowed="trainer.pipeline_parallel = 1",
                hint="trainer.tensor_parallel and data-parallel ranks (FSDP2) divide a model, too",
            )


def _check_batch(config: RunConfig) -> None:
    if config.trainer.minibatches > config.groups_per_step:
        got = f"minibatches = {config.trainer.minibatches}, groups_per_step = {config.groups_per_step}"
        raise ConfigError("a minibatch must hold at least one group", got=got, allowed="minibatches <= groups_per_step")
    if config.rereads_behaviour and config.staleness_bound != 0:
        raise ConfigError(
            "behaviour logprobs at another temperature than that of sampling are read by the policy that sampled, "
            "which a stale batch's trainer no longer has",
            got=f"trainer.logprob_temperature = {config.logprob_temperature:g}, generator.temperature = "
            f"{config.generator.temperature:g}, max_staleness = {config.max_staleness}",
            allowed="max_staleness = 0, or trainer.logprob_temperature = null",
        )


def _check_advantages(config: RunConfig) -> None:
    loss = config.loss
    compares = loss.advantages in GROUP_RELATIVE and loss.advantages != "greedy_baseline"
    if loss.name == DISTILL and loss.advantages != "leave_one_out":  # which is of no single completion, used or not
        compares = False
    if (compares or loss.select == "best_and_worst") and config.completions_per_group < 2:
        raise ConfigError(
            "group advantages need at least two completions per prompt",
            got=f"completions_per_group = {config.completions_per_group} with advantages = '{loss.advantages}'",
            allowed=">= 2",
            hint="one completion per prompt takes advantages = 'gae', 'greedy_baseline' or 'reward'",
        )


def _check_credit(config: RunConfig) -> None:
    loss = config.loss
    if loss.credit == "turn" and config.has_critic:
        raise ConfigError(
            "a critic's advantages are of tokens: turns would have to be rewarded on their last tokens, which is not "
            "done yet",
            got="loss.credit = 'turn' with loss.advantages = 'gae'",
            allowed="loss.credit = 'episode', or another estimator, such as 'leave_one_out'",
        )
    if loss.credit == "turn" and loss.several_rewards == "normalise_then_sum":
        raise ConfigError(
            "what the turns have brought is taken off a sum of rewards, and rewards that are normalised one by one "
            "have none",
            got="loss.credit = 'turn' with several_rewards = 'normalise_then_sum'",
            allowed="several_rewards = 'sum_then_normalise'",
        )


def _check_sum(config: RunConfig) -> None:
    """Rewards that are normalised one by one are never summed, so that nothing can be added to their sum."""
    adjusts_reward = (
        any(term.at_least is not None for term in config.rewards.weighted)
        or config.loss.truncated in ("penalty", "subtract")
        or (config.kl.coef > 0 and config.kl.place == "reward")
    )
    if config.loss.several_rewards == "normalise_then_sum" and adjusts_reward:
        what = "normalised rewards have no sum that a constraint, a truncation or a KL penalty could change"
        got = "several_rewards = 'normalise_then_sum' with at_least, loss.truncated or kl in the reward"
        raise ConfigError(what, got=got, allowed="several_rewards = 'sum_then_normalise'")


def _check_horizon(config: RunConfig) -> None:
    least = 0.2 * config.completions_per_step
    if config.kl.target is not None and config.kl.horizon <= least:
        what = "one step could take the whole KL coefficient away: it falls by up to 0.2 * completions / horizon"
        got = f"kl.horizon = {config.kl.horizon:g} with {config.completions_per_step} completions per step"
        raise ConfigError(what, got=got, allowed=f"above {least:g}")


def _check_ends(config: RunConfig) -> None:
    generator = config.generator
    can_end = generator.stop_at_eos or generator.stop_token_ids or config.rewards.truncate_token is not None
    if not can_end and config.loss.truncated != "keep":
        raise ConfigError(
            "every completion would count as truncated: none can end",
            got=f"generator.stop_at_eos = false with loss.truncated = '{config.loss.truncated}'",
            allowed="loss.truncated = 'keep'",
            hint="set rewards.truncate_token, which says where a completion of fixed length ends",
        )


def _check_whitening(config: RunConfig) -> None:
    loss = config.loss
    if loss.whiten_parts == 1:
        return
    if loss.whiten_advantages == "no" and not (config.has_critic and config.critic.whiten_rewards):
        got = f"loss.whiten_parts = {loss.whiten_parts} without whitening"
        allowed = "loss.whiten_advantages = 'batch' or 'minibatch', or critic.whiten_rewards with 'gae'"
        raise ConfigError("there is nothing to whiten in parts", got=got, allowed=allowed)
    minibatches = config.trainer.minibatches if loss.whiten_advantages == "minibatch" else 1
    smallest = config.groups_per_step // minibatches * config.trained_per_group // loss.whiten_parts
    if smallest < MIN_WHITENED:
        raise ConfigError(
            "a part is too small to be whitened",
            got=f"{smallest} completions with loss.whiten_parts = {loss.whiten_parts}",
            allowed=f"at least {MIN_WHITENED} completions in every part (N)",
            hint="lower whiten_parts or trainer.minibatches, or raise groups_per_step",
        )
