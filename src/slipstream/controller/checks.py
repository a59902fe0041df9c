"""Checks of a configuration that need what several nodes know; what one alone knows, it checks itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from slipstream.controller.placement import check_processes, check_remote, computing_groups, scorers
from slipstream.core.channel_spec import MAX_MESSAGE_BYTES
from slipstream.core.config import RunConfig, stage_of
from slipstream.core.errors import ConfigError
from slipstream.core.plain import shortened
from slipstream.environments.checks import Given, check_environments
from slipstream.generator.device import check_device
from slipstream.generator.vllm.backend import check_vllm
from slipstream.generator.vllm.reader import check_reader
from slipstream.models.build import build_tokenizer, check_division, max_positions
from slipstream.models.config import TransformerConfig, config_from_hf
from slipstream.models.device import check_gpus
from slipstream.models.foreign_text import rehearse_tokenizer
from slipstream.models.hf import read_hf_config
from slipstream.models.hub import check_model_path, has_checkpoint, is_adapter
from slipstream.models.peft import tokenizer_folder
from slipstream.models.preflight import Head, check_checkpoint, check_policy
from slipstream.models.shards import whole_shapes
from slipstream.models.sizes import check_sizes
from slipstream.models.stages import Stage
from slipstream.models.tokenizer import Tokenizer, has_tokenizer, load_tokenizer, vocabulary_size
from slipstream.prompts import task_table
from slipstream.rewards.checks import check_rewards
from slipstream.rewards.given import is_from_python
from slipstream.trainer.loss_checks import check_loss, needed_columns


def check(
    config: RunConfig,
    *,
    given: Collection[str] = (),
    environments: Given | None = None,
    remote: Collection[str] = (),
) -> None:
    """Raise ConfigError for what the schema cannot see: models, losses, tasks, rewards and GPUs that are not there.

    `given` are the names of the reward functions that were handed over from Python, `environments` what was besides.
    What `remote` groups compute on is on their machines, where they look for it themselves.
    """
    check_model_path(config)
    check_remote(config, remote)
    here = computing_groups(config) - set(remote)
    check_processes(config, here, has_workers=has_workers(config))
    if "generator" in here:
        if config.generator.most_replicas > config.generator.replicas:
            got = f"generator.max_replicas = {config.generator.max_replicas} in a run on one machine"
            hint = "start it with `slipstream launch`, which works on one machine, too, or raise generator.replicas"
            raise ConfigError("generators join a running run from commands of their own", got=got, hint=hint)
        check_vllm(config)
        check_device(config)
    if "trainer" in here:
        check_gpus("trainer", config.trainer.device, "ranks", config.trainer.ranks)
    for scorer in scorers(config):
        if scorer.name in here:
            section, _, field = scorer.field.partition(".")
            check_gpus(section, scorer.device, field, scorer.ranks)
    for ranks in {config.generator.tensor_parallel, config.trainer.tensor_parallel}:
        check_division(config.model, ranks)
    shape = check_policy(config)
    check_stages(config, shape)
    check_sizes(config, shape, here)
    check_loss(config)
    check_checkpoints(config, readers(config))
    check_scorers(config)
    check_teacher(config)
    if "teacher" in here:
        check_reader(config)
    check_following(config)
    check_environments(config, environments)
    if config.needs_functions:
        check_rewards(config.rewards, task_table(config.prompts.tasks), given)


def check_room(config: RunConfig, *, remote: Collection[str] = ()) -> None:
    """Raise ConfigError where memory has no room for the longest prompt, which is known once all have been read."""
    here = computing_groups(config) - set(remote)
    if "generator" in here:
        check_vllm(config)
    if "teacher" in here:
        check_reader(config)
    check_sizes(config, check_policy(config), here)


def check_scorers(config: RunConfig) -> None:
    """Raise ConfigError where a reference, reward models or a critic do not divide over their tensor-parallel ranks.

    That the checkpoints are there, `check_checkpoints` has seen.
    """
    reference = config.model.path if config.kl.reference is None else config.kl.reference
    check_division(config.model.model_copy(update={"path": reference}), config.kl.tensor_parallel)
    if config.has_own_critic:
        start = config.model.path if config.critic.path is None else config.critic.path
        check_division(config.model.model_copy(update={"path": start}), config.critic.tensor_parallel)
    for model in config.rewards.models:
        divided = config.model.model_copy(update={"path": model.path})
        check_division(divided, config.rewards.model_tensor_parallel)


Reader = tuple[str, str | None, Head]
"""A model that reads the policy's tokens, in words; its checkpoint (None: the policy's own); the kind of its head."""


def readers(config: RunConfig) -> list[Reader]:
    """Return the models that read the policy's tokens during RL."""
    found: list[Reader] = [
        (f"reward model '{model.name}' (rewards.models)", model.path, "score") for model in config.rewards.models
    ]
    if "reference_logprobs" in needed_columns(config):
        found.append(("reference policy (kl.reference)", config.kl.reference, "language"))
    found += [("teacher (teacher.path)", config.teacher.path, "language")] * config.has_teacher
    if config.has_critic and config.critic.model == "own":
        found.append(("critic (critic.path)", config.critic.path, "any"))
    return found


def check_checkpoints(config: RunConfig, named: Sequence[Reader]) -> None:
    """Raise ConfigError for a checkpoint of `named` that is not there, or reads other tokens than the policy writes.

    It may know more tokens than the policy, under other ids. One without a tokenizer must have as many tokens at least.
    Those of stages that have not run yet are passed over.
    """
    given = [(what, Path(path), head) for what, path, head in named if path is not None and stage_of(path) is None]
    if not given:
        return
    policy = policy_tokenizer(config)
    vocabulary = policy.get_vocab().items()
    for what, path, head in given:
        if not has_checkpoint(path):
            raise ConfigError(f"there is no {what}", got=path, allowed="a folder with config.json")
        shape, longest = check_checkpoint(path, head), config.longest_sequence(max_positions(config))
        if head != "score" and shape.max_positions < longest:
            raise ConfigError(
                f"{what} does not read what the policy writes",
                got=f"at most {shape.max_positions} tokens in {path}",
                allowed=f"at least {longest}, the run's longest prompt and completion together",
            )
        vocab_size = shape.vocab_size
        tokens = tokenizer_folder(path)
        if has_tokenizer(tokens):
            rehearse_tokenizer(tokens)
        if has_tokenizer(tokens) and not vocabulary <= load_tokenizer(tokens).get_vocab().items():
            allowed = "a model with the policy's tokens, under the same ids"
            hint = "it reads the tokens that were sampled, not their text"
            raise ConfigError(f"{what} and the policy have different tokenizers", got=path, allowed=allowed, hint=hint)
        if vocab_size < len(policy):
            raise ConfigError(
                f"{what} has a smaller vocabulary than the policy",
                got=f"{vocab_size} tokens in {path}",
                allowed=f"at least the {len(policy)} of the policy's tokenizer",
                hint="it reads the tokens that were sampled, not their text",
            )


def check_following(config: RunConfig) -> None:
    """Raise ConfigError for a reference that is to follow the policy, and has other weights."""
    path = config.kl.reference
    if config.kl.sync_every is None or path is None or stage_of(path) is not None:
        return
    ours, theirs = whole_shapes(check_policy(config)), whole_shapes(check_checkpoint(Path(path), "language"))
    if is_adapter(Path(path)) or ours != theirs:
        other = [f"{name} {list(shape)}" for name, shape in theirs.items() if ours.get(name) != shape]
        raise ConfigError(
            "a reference that follows the policy has the policy's weights",
            got=f"{path}: {', '.join(other[:3]) or 'fewer tensors, or adapters'}",
            allowed="a model of the policy's sizes, whole",
            hint="without kl.sync_every any model of its tokens will do",
        )


def check_stages(config: RunConfig, policy: TransformerConfig) -> None:
    """Raise ConfigError where `policy`, or the reference beside it, has fewer layers than the trainer's stages, or
    `policy` than those of a generator."""
    stage, path = Stage(0, config.trainer.pipeline_parallel, config.trainer.pipeline_chunks), config.kl.reference
    stage.check(policy.num_layers)
    Stage(0, config.generator.pipeline_parallel).check(policy.num_layers, section="generator")
    is_read = config.kl.executor == "trainer" and "reference_logprobs" in needed_columns(config)
    if is_read and path is not None and stage_of(path) is None and has_checkpoint(Path(path)):
        stage.check(check_checkpoint(Path(path), "language").num_layers)


def check_teacher(config: RunConfig) -> None:
    """Raise ConfigError for a teacher whose token table is not the policy's, or that does not read as far as the policy
    writes; and for more of its tokens than there are, or than fit a message.

    That the checkpoint is there, `check_checkpoints` has seen. What the stage sft will make has the policy's tokenizer.
    """
    teacher = config.teacher
    if teacher.path is None:
        return
    tokenizer, top_k = policy_tokenizer(config), teacher.top_k or 1
    if top_k > (size := vocabulary_size(tokenizer)):
        raise ConfigError("teacher.top_k is above the vocabulary", got=top_k, allowed=f"1..{size}, or null: all of it")
    num_bytes = config.longest_completion * (8 * top_k + 4)
    if config.has_own_teacher and num_bytes > MAX_MESSAGE_BYTES // 2:
        raise ConfigError(
            "what the teacher says of the longest completion does not fit one message",
            got=f"teacher.top_k = {top_k} at {config.longest_completion} tokens: {num_bytes:,} bytes",
            allowed=f"{MAX_MESSAGE_BYTES // 2:,} bytes",
            hint="lower teacher.top_k, or take teacher.executor = 'trainer'",
        )
    if stage_of(teacher.path) is not None:
        return
    _check_token_table(tokenizer, Path(teacher.path))
    longest = config.longest_sequence(max_positions(config))
    if (positions := config_from_hf(read_hf_config(Path(teacher.path))).max_positions) < longest:
        got = f"{positions} positions in {teacher.path}, sequences of up to {longest} tokens"
        hint = "lower prompts.max_prompt_tokens (longer prompts are dropped) or generator.max_new_tokens"
        raise ConfigError("the teacher does not read as far as the policy writes", got=got, hint=hint)
    ranks = config.trainer.tensor_parallel if teacher.executor == "trainer" else teacher.tensor_parallel
    check_division(config.model.model_copy(update={"path": teacher.path}), ranks)


def _check_token_table(tokenizer: Tokenizer, path: Path) -> None:
    path = tokenizer_folder(path)
    if not has_tokenizer(path):
        what = "the teacher has no tokenizer: nothing says that its token ids are the policy's"
        hint = "copy the tokenizer of the model that it was trained from"
        raise ConfigError(what, got=path, allowed="a folder with tokenizer.json", hint=hint)
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(path).get_vocab()
    if ours == theirs:
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    raise ConfigError(
        "the teacher has another vocabulary than the policy",
        got=f"{len(theirs)} tokens in {path}, {len(ours)} of the policy; {len(differing)} differ, such as "
        f"{shortened(differing[0], 40)!r}: {theirs.get(differing[0])} there, {ours.get(differing[0])} here",
        allowed="the same tokens under the same ids",
        hint="both say how likely each token is: they must mean the same ones",
    )


def policy_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the run's tokenizer, also before the stages that train the policy have handed it on."""
    return build_tokenizer(config.model.model_copy(update={"path": config.first_checkpoint}))


def has_functions(config: RunConfig) -> bool:
    """Whether any function scores, or an environment: reward models alone need no executor of functions."""
    return bool(config.rewards.asked) or not config.rewards.models or config.environment.is_set


def has_workers(config: RunConfig) -> bool:
    """Whether any function runs in a sandboxed worker."""
    return any(not is_from_python(term) for term in config.rewards.terms)
