"""The question of a plan: which model, on which devices, for which work; and the checks of it.

Every flag of `slipstream plan` is a field of `Question`, and so an argument of `slipstream.make_plan`. Bad input is a
ConfigError before anything is searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from slipstream.core.config import RunConfig, stage_of
from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.fields import MAX_COUNT, MAX_INTEGER, Precision
from slipstream.core.lora_section import LoraConfig
from slipstream.core.plain import shortened, shown
from slipstream.core.recipes import check_path, list_recipes, load_recipe, read_toml, resolve
from slipstream.models.config import TransformerConfig, config_from_hf, new_config
from slipstream.models.hf_fields import read_object
from slipstream.models.hub import config_file, hub_id
from slipstream.models.tokenizer import CharTokenizer
from slipstream.plan.counts import NO_ADAPTERS, Adapters, adapters_of
from slipstream.plan.hardware import IN_GB, GpuCluster, device_fields, device_named
from slipstream.plan.layouts import Workload
from slipstream.plan.lengths import AS_RECORDED, LengthSample, Turns, lengths_of_run, lengths_with_tail
from slipstream.plan.pipeline import MOST_STAGES
from slipstream.trainer.loss_checks import needs_reference

GROUPS, GROUP_SIZE = 512, 4  # a batch where none is given: LlamaRL's (section 8)
PROMPT_TOKENS, COMPLETION_TOKENS = 512.0, 1024.0  # mean lengths where none are given
TAIL = 4.0  # p99 over the mean where nothing else is given; the longest is twice that
MOST_STALENESS = 8
MOST = {
    **dict.fromkeys(("gpus", "gpus_per_node", "groups_per_step", "completions_per_group", "sessions"), MAX_COUNT),
    "lora_rank": MAX_COUNT,
    "max_new_tokens": MAX_INTEGER,
    **dict.fromkeys(("max_staleness", "rows"), 100),
    "max_stages": MOST_STAGES,
}
MAX_SIMULATED = 2**19  # completions of a step, of which the search simulates twenty for each row
LENGTHS = ("prompt_tokens", "completion_tokens", "p99_tokens")
_SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")


def _published() -> Iterator[tuple[str, TransformerConfig]]:
    for family in read_toml(Path(__file__).with_name("architectures.toml")).values():
        for name, values in family["models"].items():
            sizes = dict(zip(_SIZES, values, strict=False))
            heads = {"head_dim": values[0] // values[3], "tie_embeddings": False}
            yield name, TransformerConfig(**heads | family["fields"] | sizes | dict(*values[len(_SIZES) :]))


ARCHITECTURES: Mapping[str, TransformerConfig] = dict(_published())
"""Published shapes by name, in lower case, so that a plan needs no checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Fields that are None have defaults that depend on the others: a recipe's batch, a run's lengths."""

    model: str
    gpus: int | None = None
    gpu: str | None = None
    gpus_per_node: int | None = None
    network: float | None = None
    cluster: Path | None = None
    price: float | None = None
    measured: Path | None = None
    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    p99_tokens: float | None = None
    max_new_tokens: int | None = None
    lengths: Path | None = None
    groups_per_step: int | None = None
    completions_per_group: int | None = None
    precision: tuple[Precision, ...] | None = None
    max_staleness: int | None = None
    max_stages: int | None = None
    reference: bool = False
    critic: bool = False
    reward_model: str | None = None
    lora_rank: int | None = None
    turns: float | None = None
    given_tokens: int | None = None
    environment_s: float | None = None
    sessions: int | None = None
    rows: int = 3

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers so large that the search and the simulations would not end."""
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value > most):
                raise ConfigError(f"{_flag(name)} is out of range", got=shown(value), allowed=f"1..{most}")
        completions = (self.groups_per_step or GROUPS) * (self.completions_per_group or GROUP_SIZE)
        if completions > MAX_SIMULATED:
            got = f"--groups-per-step x --completions-per-group = {completions:,}"
            raise ConfigError("a step has more completions than are simulated", got=got, allowed=f"{MAX_SIMULATED:,}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model that was named: its shape, where its checkpoint lies if that is known, and the recipe it came with.

    `config` is that of the recipe's tables, `run` the folder of a run that was named.
    """

    name: str
    shape: TransformerConfig
    path: str | None = None
    recipe: Mapping[str, Any] | None = None
    config: RunConfig | None = None
    run: Path | None = None


def subject_of(named: str) -> Subject:
    """Find a published architecture, a Hugging Face folder or config.json, a recipe, a run's folder, or a hub id."""
    check_path(named, f"model {shortened(named, 60)!r}")
    path = Path(named)
    if named.lower() in ARCHITECTURES:
        return Subject(name=named.lower(), shape=ARCHITECTURES[named.lower()])
    if path.is_dir() and (path / "config.toml").is_file():
        return replace(_subject_of_recipe(path.name, read_toml(path / "config.toml")), run=path)
    if path.is_dir() or path.suffix == ".json":
        shape = config_from_hf(read_object(path / "config.json" if path.is_dir() else path))
        return Subject(name=path.name, shape=shape, path=str(path if path.is_dir() else path.parent))
    if path.suffix == ".toml" or named in {recipe.name for recipe in list_recipes()}:
        return _subject_of_recipe(path.stem, load_recipe(named))
    if hub_id(named) is not None:
        return Subject(name=path.name, shape=_shape_named(named, "MODEL"), path=named)
    known = [*ARCHITECTURES, *(recipe.name for recipe in list_recipes())]
    allowed = f"{', '.join(known)}; a Hugging Face folder, config.json or hub id; a .toml file; the folder of a run"
    raise ConfigError(f"'{named}' is no model that is known", allowed=allowed, hint=did_you_mean(named.lower(), known))


def _shape_named(path: str, field: str) -> TransformerConfig:
    """Read the shape of a checkpoint from its folder or hub id, without its weights."""
    return config_from_hf(read_object(config_file(path, what=field)))


def _subject_of_recipe(name: str, tables: Mapping[str, Any]) -> Subject:
    config = resolve(tables)
    path = config.first_checkpoint  # a stage's checkpoint has the shape of what the stage starts from
    if path is not None:
        path = path if config.model.revision is None else f"{path}@{config.model.revision}"
        shape = _shape_named(path, "model.path")
    else:
        shape = new_config(config.model, len(CharTokenizer(config.model.alphabet)))
    return Subject(name=name, shape=shape, path=path, recipe=tables, config=config)


_BY_FLAG = {name: name for name in ("gpus", "gpu", "gpus_per_node")}
_BY_FLAG |= {"network": "network_bandwidth_gb_s", "price": "usd_per_gpu_hour"}
"""Fields of a question -> those of a cluster's file."""
_CLUSTER_KEYS = ("gpus", "gpu", "gpus_per_node", "usd_per_gpu_hour", "name", "tflops", *IN_GB)


def cluster_of(question: Question) -> GpuCluster | None:
    """Return the GPUs of the question; None where it names none."""
    given = {name: getattr(question, name) for name in _BY_FLAG if getattr(question, name) is not None}
    flags = ", ".join(_flag(name) for name in given)
    if question.cluster is not None:
        if given:
            raise ConfigError("a cluster is described by a file or by flags", got=f"--cluster with {flags}")
        return cluster_of_file(question.cluster)
    if question.gpus is None:
        if given:
            raise ConfigError("a cluster has a number of GPUs", got=f"{flags} without --gpus", allowed="--gpus N")
        return None
    called = {key: _flag(name) for name, key in _BY_FLAG.items()}
    return _cluster_of_table({_BY_FLAG[name]: value for name, value in given.items()}, called.__getitem__)


def cluster_of_file(path: Path) -> GpuCluster:
    """Read a TOML file with `gpus`, a known `gpu`, and those of its constants that differ from the published ones."""
    table = read_toml(path)
    for key in table:
        if key not in _CLUSTER_KEYS:
            raise ConfigError.unknown(f"unknown field '{key}' in '{path}'", key, _CLUSTER_KEYS)
    count = table.get("gpus")
    if not isinstance(count, int) or isinstance(count, bool):
        raise ConfigError(f"'{path}' does not say how many GPUs there are", got=repr(count), allowed="gpus = N")
    flops, allowed = table.get("tflops", {}), get_args(Precision)
    if not isinstance(flops, dict) or not set(flops) <= set(allowed):
        raise ConfigError(f"'tflops' in '{path}' is by precision", got=flops, allowed=", ".join(allowed))
    return _cluster_of_table(table, lambda key: f"{key} in '{path}'")


def _cluster_of_table(table: Mapping[str, Any], called: Callable[[str], str]) -> GpuCluster:
    """Return the cluster of a file's fields; `called` is how a message names one of them."""
    device = device_named(str(table.get("gpu", "h100")))
    for key in (*IN_GB, "gpus_per_node", "usd_per_gpu_hour"):
        if key in table:
            _positive(called(key), table[key])
    if not isinstance(table.get("gpus_per_node", 1), int):
        raise ConfigError(f"{called('gpus_per_node')} must be a whole number", got=repr(table["gpus_per_node"]))
    for name, rate in table.get("tflops", {}).items():
        _positive(called(f"tflops.{name}"), rate)
    changes = device_fields(table)
    device = replace(
        device,
        **changes | {"flops": {**device.flops, **changes["flops"]}},
        name=str(table.get("name", device.name)),
        devices_per_node=int(table.get("gpus_per_node", device.devices_per_node)),
    )
    price = table.get("usd_per_gpu_hour")
    return GpuCluster(device=device, num_devices=table["gpus"], usd_per_device_hour=price)


def _positive(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{what} must be a positive number", got=repr(value))


def workload_of(question: Question, subject: Subject) -> tuple[Workload, tuple[str, ...]]:
    """Return the work of a step, and in words the defaults that were assumed."""
    config, assumed = subject.config, []
    for name in ("groups_per_step", "completions_per_group", "lora_rank", "sessions", *LENGTHS):
        if (value := getattr(question, name)) is not None:
            _positive(_flag(name), value)
    groups, group_size = question.groups_per_step, question.completions_per_group
    if config is not None:
        groups, group_size = groups or config.groups_per_step, group_size or config.samples_per_group
    elif groups is None and group_size is None:
        assumed.append(f"{GROUPS} prompts x {GROUP_SIZE} completions")
    groups, group_size = groups or GROUPS, group_size or GROUP_SIZE
    lengths, recorded, told = _lengths(question, subject)
    assumed += told
    named: dict[str, Any] = {
        "turns": question.turns,
        "given_tokens": question.given_tokens,
        "environment_s": question.environment_s,
    }
    workload = Workload(
        groups=groups,
        group_size=group_size,
        trained_per_group=None if config is None else _trained_per_group(config, group_size),
        measures_all=config is not None and config.kl.coef > 0 and config.kl.place == "reward",
        lengths=lengths,
        epochs=1 if config is None else config.trainer.epochs,
        minibatches=1 if config is None else config.trainer.minibatches,
        reference=question.reference or (config is not None and needs_reference(config)),
        critic=question.critic or (config is not None and config.has_critic and config.critic.model == "own"),
        reward_model=_reward_model(question, subject),
        adapters=_adapters(question, subject),
        turns=replace(recorded, **{name: value for name, value in named.items() if value is not None}),
        sessions=question.sessions,
    )
    longest = max_new_tokens(question, subject, lengths)
    if (question.turns, question.given_tokens) != (None, None):  # episodes of a run did fit
        longest += math.ceil(workload.turns.given_mean)
    if lengths.prompt_mean + longest > subject.shape.max_positions:
        raise ConfigError(
            "prompts and completions do not fit the model",
            got=f"prompts of {lengths.prompt_mean:g} and completions of up to {longest} tokens",
            allowed=f"together at most its {subject.shape.max_positions} positions",
            hint="lower --max-new-tokens or --prompt-tokens",
        )
    return workload, tuple(assumed)


def _trained_per_group(config: RunConfig, group_size: int) -> int:
    greedy = config.samples_per_group - config.completions_per_group  # ReMax samples one besides
    return config.model_copy(update={"completions_per_group": group_size - greedy}).trained_per_group


def _reward_model(question: Question, subject: Subject) -> TransformerConfig | None:
    config = subject.config
    if question.reward_model is not None:
        return subject_of(question.reward_model).shape
    if config is None or not config.rewards.models:
        return None
    if len(config.rewards.models) > 1:
        got = f"{len(config.rewards.models)} in rewards.models"
        hint = "plan with the largest: --reward-model NAME"
        raise ConfigError("a plan knows of one reward model", got=got, hint=hint)
    path: str | None = config.rewards.models[0].path
    if stage_of(path) == "reward_model":
        path = config.reward_model.path
    if path is None or stage_of(path) is not None:  # it starts from the policy, or from what that starts from
        return subject.shape
    if hub_id(path) is None and not (Path(path) / "config.json").is_file():
        what = "the shape of the reward model is not known"
        raise ConfigError(what, got=path, allowed="a folder with config.json", hint="--reward-model NAME gives one")
    return _shape_named(path, "rewards.models.path")


def _adapters(question: Question, subject: Subject) -> Adapters:
    """Return the adapters of the question's rank, else of the recipe's."""
    given = LoraConfig() if subject.config is None else subject.config.model.lora
    if given.path is not None:
        allowed = "model.lora.rank and targets in its place, those of that adapter"
        raise ConfigError("a plan takes the rank of adapters", got=f"model.lora.path = {given.path}", allowed=allowed)
    rank = question.lora_rank or given.rank
    if rank is None:
        return NO_ADAPTERS
    return adapters_of(subject.shape, rank, given.targets, given.adapter_precision, given.base_precision)


def _lengths(question: Question, subject: Subject) -> tuple[LengthSample, Turns, list[str]]:
    """Return the lengths, the turns of the run that they are of, and in words what was assumed."""
    given = [_flag(name) for name in LENGTHS if getattr(question, name) is not None]
    run = question.lengths
    if run is not None and given:
        raise ConfigError("lengths are those of a run or of flags", got=f"--lengths with {', '.join(given)}")
    if run is None and not given:
        run = subject.run
    if run is not None:
        return *lengths_of_run(run), []
    assumed: list[str] = []

    def either(value: float | None, default: float, words: str) -> float:
        if value is None:
            assumed.append(words.format(default))
        return default if value is None else value

    config, room = subject.config, subject.shape.max_positions
    prompt, longest = question.prompt_tokens, question.max_new_tokens
    if config is not None:
        longest = longest or config.generator.max_new_tokens
        if prompt is None and config.prompts.max_prompt_tokens is not None:
            prompt = config.prompts.max_prompt_tokens / 2
    most = room / 16 if longest is None else longest / 2
    prompt = either(prompt, min(PROMPT_TOKENS, room / 8), "prompts of {:g}")
    mean = either(question.completion_tokens, min(COMPLETION_TOKENS, most), "completions of {:g} tokens in the mean")
    tail = min(TAIL * mean, math.inf if longest is None else longest)
    p99 = either(question.p99_tokens, tail, "one in a hundred above {:g}")
    lengths = lengths_with_tail(prompt, mean, p99, math.ceil(2 * p99) if longest is None else longest)
    return lengths, AS_RECORDED, assumed


def max_new_tokens(question: Question, subject: Subject, lengths: LengthSample) -> int:
    """Return the limit of a completion: the question's, the recipe's, or the longest of the lengths."""
    if question.max_new_tokens is not None:
        return question.max_new_tokens
    config = subject.config
    return lengths.longest if config is None else max(config.generator.max_new_tokens, lengths.longest)


def precisions_of(question: Question, cluster: GpuCluster, *, has_experts: bool = False) -> tuple[Precision, ...]:
    """Return the generators' precisions: the question's, or bfloat16, and fp8 where the GPUs have products of it.

    Mixtures of experts generate in bfloat16 alone.
    """
    if has_experts:
        if wrong := set(question.precision or ()) - {"bfloat16"}:
            what = "a mixture of experts generates on GPUs in bfloat16 alone"
            raise ConfigError(what, got=", ".join(sorted(wrong)), allowed="bfloat16")
        return ("bfloat16",)
    if question.precision is None:
        return ("bfloat16", "fp8") if "fp8" in cluster.device.flops else ("bfloat16",)
    for precision in question.precision:
        if precision == "int8" or precision not in cluster.device.flops:
            allowed = ", ".join(name for name in ("float32", "bfloat16", "fp8") if name in cluster.device.flops)
            what = f"generators on {cluster.device.name} do not compute in {precision}"
            raise ConfigError(what, got=precision, allowed=allowed)
    return question.precision


def question_of(**given: Any) -> Question:
    """Make a Question of arguments. ConfigError for an unknown one."""
    known = [field.name for field in fields(Question)]
    for name in given:
        if name not in known:
            raise ConfigError.unknown(f"unknown argument '{name}'", name, known)
    paths = {name: Path(given[name]) for name in ("cluster", "measured", "lengths") if given.get(name) is not None}
    if isinstance(given.get("precision"), str):
        given["precision"] = (given["precision"],)
    return Question(**given | paths)
